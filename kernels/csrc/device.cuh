// What a kernel is written in: CUDA itself, or CUDA emulated on the CPU. Owns launching and the few facts about a device
// that launches need. Every kernel is launched through STOKER_LAUNCH, so that the same file compiles for both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#ifdef STOKER_EMULATION
#include "emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// STOKER_LAUNCH((kernel<T, N>), grid, block, shared_bytes, stream, arguments...)
#define STOKER_UNPACK(...) __VA_ARGS__
#define STOKER_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                              \
    do {                                                                                                           \
        (STOKER_UNPACK kernel)<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__); \
        ::stoker::check_cuda(cudaGetLastError(), #kernel);                                                         \
    } while (false)

// A kernel's dynamic shared memory as an array of T; at most once per kernel.
#define STOKER_DYNAMIC_SHARED(T, name)                                        \
    extern __shared__ __align__(16) unsigned char stoker_dynamic_shared[]; \
    T* name = reinterpret_cast<T*>(stoker_dynamic_shared)
#endif

namespace stoker {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int64_t kSharedLimit = 48 * 1024;  // bytes per block that every device gives without being asked

// In a kernel: where a number that the user gave is wrong, with no way to say so but to end it. On a device that is the
// failed assertion of CUDA ("device-side assert triggered"), also with NDEBUG.
#ifdef STOKER_EMULATION
#define STOKER_KERNEL_CHECK(condition, text)      \
    do {                                          \
        if (!(condition)) {                       \
            throw std::runtime_error(text);       \
        }                                         \
    } while (false)
#else
#define STOKER_KERNEL_CHECK(condition, text)                       \
    do {                                                           \
        if (!(condition)) {                                        \
            __assert_fail(text, __FILE__, __LINE__, __func__);     \
        }                                                          \
    } while (false)
#endif

#ifdef STOKER_EMULATION
inline int multiprocessors(int) {
    return emulation::multiprocessors();
}

template <class Kernel>
int resident_blocks(Kernel*, unsigned, int, int most) {
    return std::min(most, 2);
}
#else
inline void check_cuda(cudaError_t status, const char* what) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
    }
}

// Of a device; asked once per device and thread, as the driver takes microseconds.
inline int multiprocessors(int device) {
    thread_local int known_device = -1;
    thread_local int known = 0;
    if (device != known_device) {
        check_cuda(cudaDeviceGetAttribute(&known, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
        known_device = device;
    }
    return known;
}

// Blocks of so many threads that a multiprocessor of the device runs at the same time, at most `most`. A kernel whose
// blocks walk over the rest of the work wants no more of them: the others would begin when the first have ended.
template <class Kernel>
int resident_blocks(Kernel* kernel, unsigned threads, int device, int most) {
    thread_local Kernel* known_kernel = nullptr;
    thread_local unsigned known_threads = 0;
    thread_local int known_device = -1;
    thread_local int known = 0;
    if (kernel != known_kernel || threads != known_threads || device != known_device) {
        check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&known, kernel, static_cast<int>(threads), 0),
                   "resident blocks");
        known_kernel = kernel;
        known_threads = threads;
        known_device = device;
    }
    return std::clamp(known, 1, most);
}
#endif

// Blocks for `items` with a loop over the rest inside of the kernel: enough to fill the device, never more than items.
inline unsigned grid_for(int64_t items, int device, int blocks_per_multiprocessor) {
    return static_cast<unsigned>(std::min<int64_t>(items, int64_t{multiprocessors(device)} * blocks_per_multiprocessor));
}

}  // namespace stoker
