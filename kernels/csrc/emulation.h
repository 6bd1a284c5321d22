// CUDA on the CPU: the same .cu files, compiled with `g++ -x c++ -DSTOKER_EMULATION`, run without a device. One fiber per
// CUDA thread; blocks run one after another. Owns the names that CUDA gives to things; emulation_block.h runs them.
//
// A deadlock, threads that meet at different barriers, an access where no memory is, and a write around dynamic shared
// memory raise std::runtime_error with the kernel, the block and which threads wait where. Threads run in the order of
// STOKER_EMULATION_ORDER=ascending|descending|random:<seed> between two barriers, so that results change with it where a
// barrier is missing.
//
// It cannot see: races between threads that hardware runs at the same time (each thread runs alone from one barrier or
// exchange to the next), the memory model (all writes are seen at once, fences mean nothing), races between blocks,
// registers, occupancy, launch bounds, the size of arguments, alignment of vector accesses (UBSan sees that), results
// that are read before a kernel wrote them, tensor cores and TMA. What is compiled for the device alone does not run:
// stores by __stwb, what a launch asks the driver, streams. Rounding of fused multiply-adds and of CUDA's own
// mathematical functions differs from the device's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

#include "emulation_block.h"

#define threadIdx (::stoker::emulation::running->index)
#define blockIdx (::stoker::emulation::block_index)
#define blockDim (::stoker::emulation::block_size)
#define gridDim (::stoker::emulation::grid_size)

#define STOKER_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::stoker::emulation::dynamic_shared)
#define STOKER_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    ::stoker::emulation::launch(#kernel, (kernel), grid, block, shared_bytes, stream, __VA_ARGS__)

#pragma GCC visibility push(hidden)
namespace stoker::emulation {

// Arguments become the kernel's parameters once; each thread gets its own copy of them.
template <class... P, class Stream, class... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, Stream, A&&... args) {
    std::tuple<std::decay_t<P>...> parameters(std::forward<A>(args)...);
    run_grid(name, grid, block, shared_bytes, [&] { std::apply(kernel, parameters); });
}

template <class To, class From>
To bit_cast(From value) {
    static_assert(sizeof(To) >= sizeof(From));
    To bits{};
    std::memcpy(&bits, &value, sizeof(From));
    return bits;
}

// What lane `source` gave, for values of at most 8 bytes.
template <class T>
T shuffle(unsigned mask, T value, unsigned source, Site site) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    const uint64_t bits = exchange(mask, bit_cast<uint64_t>(value), site)[source];
    T result;
    std::memcpy(&result, &bits, sizeof(T));
    return result;
}

inline unsigned lane() {
    return running->linear % kWarp;
}

inline unsigned ballot(unsigned mask, int predicate, Site site) {
    const uint64_t* values = exchange(mask, predicate != 0, site);
    unsigned bits = 0;
    for (unsigned i = 0; i < kWarp; ++i) {
        bits |= static_cast<unsigned>(values[i]) << i;
    }
    return bits;
}

}  // namespace stoker::emulation
#pragma GCC visibility pop

// ---- intrinsics. `file` and `line` are the caller's.

constexpr int warpSize = 32;

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    stoker::emulation::barrier({"__syncthreads", file, line});
}

inline void __syncwarp(unsigned mask = 0xffffffffu, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    stoker::emulation::exchange(mask, 0, {"__syncwarp", file, line});
}

// The warp is cut into groups of `width` lanes; a source outside of the group gives the lane's own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, const char* file = __builtin_FILE(),
              int line = __builtin_LINE()) {
    const unsigned group = stoker::emulation::lane() & ~unsigned(width - 1);
    return stoker::emulation::shuffle(mask, value, group + (unsigned(source) & unsigned(width - 1)),
                                      {"__shfl_sync", file, line});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
    const unsigned me = stoker::emulation::lane();
    const unsigned end = (me & ~unsigned(width - 1)) + unsigned(width);
    const unsigned source = me ^ unsigned(lanes);
    return stoker::emulation::shuffle(mask, value, source < end ? source : me, {"__shfl_xor_sync", file, line});
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = warpSize, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
    const unsigned me = stoker::emulation::lane();
    const bool inside = (me & unsigned(width - 1)) + lanes < unsigned(width);
    return stoker::emulation::shuffle(mask, value, inside ? me + lanes : me, {"__shfl_down_sync", file, line});
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = warpSize, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
    const unsigned me = stoker::emulation::lane();
    const bool inside = (me & unsigned(width - 1)) >= lanes;
    return stoker::emulation::shuffle(mask, value, inside ? me - lanes : me, {"__shfl_up_sync", file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
    return stoker::emulation::ballot(mask, predicate, {"__ballot_sync", file, line});
}

inline int __any_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return stoker::emulation::ballot(mask, predicate, {"__any_sync", file, line}) != 0;
}

inline int __all_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return stoker::emulation::ballot(mask, predicate, {"__all_sync", file, line}) == 0xffffffffu;
}

// Of 32-bit numbers; in hardware since compute capability 8.0.
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, const char* file = __builtin_FILE(),
                                  int line = __builtin_LINE()) {
    const uint64_t* values = stoker::emulation::exchange(mask, value, {"__reduce_max_sync", file, line});
    return static_cast<unsigned>(*std::max_element(values, values + warpSize));
}

inline unsigned __reduce_min_sync(unsigned mask, unsigned value, const char* file = __builtin_FILE(),
                                  int line = __builtin_LINE()) {
    const uint64_t* values = stoker::emulation::exchange(mask, value, {"__reduce_min_sync", file, line});
    return static_cast<unsigned>(*std::min_element(values, values + warpSize));
}

// The lanes that have this lane's value.
inline unsigned __match_any_sync(unsigned mask, unsigned value, const char* file = __builtin_FILE(),
                                 int line = __builtin_LINE()) {
    const uint64_t* values = stoker::emulation::exchange(mask, value, {"__match_any_sync", file, line});
    unsigned lanes = 0;
    for (int i = 0; i < warpSize; ++i) {
        lanes |= static_cast<unsigned>(values[i] == value) << i;
    }
    return lanes;
}

// Integers only: the order of float additions would change the result.
template <class T>
T atomicAdd(T* address, std::common_type_t<T> value) {
    static_assert(std::is_integral_v<T>, "atomicAdd on floating-point numbers is not deterministic");
    const T old = *address;
    *address = static_cast<T>(old + value);
    return old;
}

// Caching hints are none here.
template <class T>
T __ldg(const T* address) {
    return *address;
}
template <class T>
T __ldcs(const T* address) {
    return *address;
}
template <class T>
void __stcs(T* address, T value) {
    *address = value;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }

inline unsigned __float_as_uint(float value) { return stoker::emulation::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return stoker::emulation::bit_cast<int>(value); }
inline float __uint_as_float(unsigned bits) { return stoker::emulation::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return stoker::emulation::bit_cast<float>(bits); }

// Never contracted to a fused multiply-add (the emulated build has -ffp-contract=off).
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// Macros, for newer C libraries declare functions of these names.
#define rsqrtf(x) (1.0f / std::sqrt(static_cast<float>(x)))
#define rsqrt(x) (1.0 / std::sqrt(static_cast<double>(x)))

using std::max;
using std::min;
