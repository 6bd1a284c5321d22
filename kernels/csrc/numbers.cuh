// Numbers in memory and in registers: what sums are held in, and loads and stores of several elements at once. Owns no
// layout: where a row lies and whether it may be read in pieces of 16 bytes is the caller's to know.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device.cuh"

namespace stoker {

// What sums over T are held in: float, and double for double.
template <class T>
struct Accumulator {
    using type = float;
};
template <>
struct Accumulator<double> {
    using type = double;
};
template <class T>
using Acc = typename Accumulator<T>::type;

template <class A, class T>
__device__ __forceinline__ A widen(T value) {
    return static_cast<A>(value);
}
template <class A>
__device__ __forceinline__ A widen(__nv_bfloat16 value) {
    return static_cast<A>(__bfloat162float(value));
}
template <class A>
__device__ __forceinline__ A widen(__half value) {
    return static_cast<A>(__half2float(value));
}

// To the nearest, ties to even.
template <class T>
struct Narrow {
    template <class A>
    static __device__ __forceinline__ T from(A value) {
        return static_cast<T>(value);
    }
};
template <>
struct Narrow<__nv_bfloat16> {
    static __device__ __forceinline__ __nv_bfloat16 from(float value) { return __float2bfloat16_rn(value); }
    static __device__ __forceinline__ __nv_bfloat16 from(double value) { return __double2bfloat16(value); }
};
template <>
struct Narrow<__half> {
    static __device__ __forceinline__ __half from(float value) { return __float2half_rn(value); }
    static __device__ __forceinline__ __half from(double value) { return __double2half(value); }
};
template <class T, class A>
__device__ __forceinline__ T narrow(A value) {
    return Narrow<T>::from(value);
}

// N neighbouring elements. N is 16 bytes of the widest type that a kernel reads side by side, or 1.
template <class T, int N>
struct Pack {
    T values[N];
    __device__ __forceinline__ T& operator[](int i) { return values[i]; }
    __device__ __forceinline__ const T& operator[](int i) const { return values[i]; }
};

// Elements of T in 16 bytes.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

namespace detail {
template <int bytes>
struct Unit;
template <>
struct Unit<16> {
    using type = int4;
};
template <>
struct Unit<8> {
    using type = int2;
};
template <>
struct Unit<4> {
    using type = int;
};
}  // namespace detail

// Aligned to min(16, N * sizeof(T)) bytes unless N is 1. kReadOnly: nobody writes there while the kernel runs, so the
// compiler may read it before a write that comes first.
template <class T, int N, bool kReadOnly = false>
__device__ __forceinline__ Pack<T, N> load(const T* address) {
    Pack<T, N> pack;
    if constexpr (N == 1) {
        pack[0] = *address;
    } else {
        constexpr int bytes = N * static_cast<int>(sizeof(T));
        using Unit = typename detail::Unit<bytes >= 16 ? 16 : bytes>::type;
        Unit units[bytes / sizeof(Unit)];
#pragma unroll
        for (int i = 0; i < bytes / static_cast<int>(sizeof(Unit)); ++i) {
            if constexpr (kReadOnly) {
                units[i] = __ldg(reinterpret_cast<const Unit*>(address) + i);
            } else {
                units[i] = reinterpret_cast<const Unit*>(address)[i];
            }
        }
        memcpy(&pack, units, bytes);
    }
    return pack;
}

// An ordinary store in one instruction: left alone, the compiler cuts it into words where its parts are computed apart.
template <class Unit>
__device__ __forceinline__ void store_unit(Unit* address, const Unit& unit) {
#ifdef STOKER_EMULATION
    *address = unit;
#else
    __stwb(address, unit);
#endif
}

template <class T, int N>
__device__ __forceinline__ void store(T* address, const Pack<T, N>& pack) {
    if constexpr (N == 1) {
        *address = pack[0];
    } else {
        constexpr int bytes = N * static_cast<int>(sizeof(T));
        using Unit = typename detail::Unit<bytes >= 16 ? 16 : bytes>::type;
        Unit units[bytes / sizeof(Unit)];
        memcpy(units, &pack, bytes);
#pragma unroll
        for (int i = 0; i < bytes / static_cast<int>(sizeof(Unit)); ++i) {
            store_unit(reinterpret_cast<Unit*>(address) + i, units[i]);
        }
    }
}

// ---- packs as a whole. Elements of 16 bits are taken as they came, two to a register: element by element, the compiler
// gives each of them a register of its own.

template <class T, int N>
constexpr bool kPaired = std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half> ? N % 2 == 0 : false;

template <class A, class T, int N>
__device__ __forceinline__ Pack<A, N> widened(const Pack<T, N>& pack) {
    Pack<A, N> wide;
#ifndef STOKER_EMULATION
    if constexpr (kPaired<T, N>) {
        unsigned words[N / 2];
        memcpy(words, &pack, sizeof(pack));
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            if constexpr (std::is_same_v<T, __half>) {
                __half2 pair;
                memcpy(&pair, &words[i], sizeof(pair));
                const float2 both = __half22float2(pair);
                wide[2 * i] = both.x;
                wide[2 * i + 1] = both.y;
            } else {
                wide[2 * i] = __uint_as_float(words[i] << 16);
                wide[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
            }
        }
        return wide;
    }
#endif
#pragma unroll
    for (int i = 0; i < N; ++i) {
        wide[i] = widen<A>(pack[i]);
    }
    return wide;
}

// To the nearest, ties to even.
template <class T, class A, int N>
__device__ __forceinline__ Pack<T, N> narrowed(const Pack<A, N>& wide) {
    Pack<T, N> pack;
#ifndef STOKER_EMULATION
    if constexpr (kPaired<T, N>) {
        unsigned words[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            if constexpr (std::is_same_v<T, __half>) {
                const __half2 pair = __floats2half2_rn(wide[2 * i], wide[2 * i + 1]);
                memcpy(&words[i], &pair, sizeof(pair));
            } else {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(wide[2 * i], wide[2 * i + 1]);
                memcpy(&words[i], &pair, sizeof(pair));
            }
        }
        memcpy(&pack, words, sizeof(pack));
        return pack;
    }
#endif
#pragma unroll
    for (int i = 0; i < N; ++i) {
        pack[i] = narrow<T>(wide[i]);
    }
    return pack;
}

// Has the compiler keep elements of 16 bits as they came until they are used again: it would rather widen them once and
// keep that, in twice the registers.
template <class T, int N>
__device__ __forceinline__ void hold_packed(Pack<T, N>& pack) {
#ifndef STOKER_EMULATION
    if constexpr (kPaired<T, N>) {
        unsigned words[N / 2];
        memcpy(words, &pack, sizeof(pack));
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            asm volatile("" : "+r"(words[i]));
        }
        memcpy(&pack, words, sizeof(pack));
    }
#endif
}

}  // namespace stoker
