// Sums and largest values over the threads of a warp or block, and sums over the rows of a matrix; always in one order.
#pragma once

#include <type_traits>

#include "device.cuh"
#include "numbers.cuh"

namespace stoker {

// What is taken over many values; of two, in the order in which they come.
struct Sum {
    template <class A>
    static __device__ __forceinline__ A of(A a, A b) {
        return a + b;
    }
};
struct Largest {
    template <class A>
    static __device__ __forceinline__ A of(A a, A b) {
        return b > a ? b : a;
    }
};

// Over all lanes of a warp, in every lane.
template <class Op, class A>
__device__ __forceinline__ A over_warp(A value) {
    if constexpr (std::is_same_v<Op, Largest> && std::is_same_v<A, unsigned>) {
        return __reduce_max_sync(kFullWarp, value);
    } else {
#pragma unroll
        for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
            value = Op::of(value, __shfl_xor_sync(kFullWarp, value, lanes));
        }
        return value;
    }
}

// Over all threads of the block, in every thread. Every thread must call it; it may be called again at once.
template <class Op, int kThreads, class A>
__device__ __forceinline__ A over_block(A value) {
    constexpr int kWarps = kThreads / kWarpSize;
    value = over_warp<Op>(value);
    if constexpr (kWarps > 1) {
        __shared__ A of_warp[kWarps];
        __syncthreads();  // the last call's readers are done
        if (threadIdx.x % kWarpSize == 0) {
            of_warp[threadIdx.x / kWarpSize] = value;
        }
        __syncthreads();
        value = of_warp[0];
#pragma unroll
        for (int i = 1; i < kWarps; ++i) {
            value = Op::of(value, of_warp[i]);
        }
    }
    return value;
}

// Sums over r of partial[r, c], which blocks have left in [rows, width]: into first[c], or second[c - split] from column
// `split` on. A block has 32 columns; each of its warps takes every kth row, and their sums are added in one order.
template <class A, class W>
__global__ void __launch_bounds__(1024) sum_rows(const A* __restrict__ partial, W* __restrict__ first,
                                                 W* __restrict__ second, int64_t split, int64_t rows, int64_t width) {
    __shared__ A of_warp[kWarpSize][kWarpSize];
    const int warps = static_cast<int>(blockDim.x) / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
    A sum = 0;
    if (column < width) {
#pragma unroll 8
        for (int64_t row = warp; row < rows; row += warps) {
            sum += partial[row * width + column];
        }
    }
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < width) {
        for (int i = 1; i < warps; ++i) {
            sum += of_warp[i][lane];
        }
        (column < split ? first[column] : second[column - split]) = narrow<W>(sum);
    }
}

template <class A, class W>
void launch_sum_rows(const A* partial, W* first, W* second, int64_t split, int64_t rows, int64_t width, void* stream) {
    const auto blocks = static_cast<unsigned>((width + kWarpSize - 1) / kWarpSize);
    const auto warps = static_cast<unsigned>(std::clamp<int64_t>(rows / 8, 1, kWarpSize));
    STOKER_LAUNCH((sum_rows<A, W>), blocks, warps * kWarpSize, 0, stream, partial, first, second, split, rows, width);
}

}  // namespace stoker
