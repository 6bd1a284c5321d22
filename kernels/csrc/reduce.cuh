// Sums over the threads of a block and over the rows of a matrix, always in the same order.
#pragma once

#include "device.cuh"
#include "numbers.cuh"

namespace stoker {

template <class A>
__device__ __forceinline__ A warp_sum(A value) {
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
        value += __shfl_xor_sync(kFullWarp, value, lanes);
    }
    return value;
}

template <class A>
__device__ __forceinline__ A warp_max(A value) {
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
        const A other = __shfl_xor_sync(kFullWarp, value, lanes);
        value = other > value ? other : value;
    }
    return value;
}

// The sum over all threads of the block, in every thread. Every thread must call it; it may be called again at once.
template <int kThreads, class A>
__device__ __forceinline__ A block_sum(A value) {
    constexpr int kWarps = kThreads / kWarpSize;
    value = warp_sum(value);
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
            value += of_warp[i];
        }
    }
    return value;
}

// out[c] = sum over r of partial[r, c], for partial sums [rows, width] that blocks have left.
// A block has 32 columns; its warps take every kWarps-th row, and their sums are added in the order of the warps.
template <class A, class W, int kThreads>
__global__ void sum_rows(const A* __restrict__ partial, W* __restrict__ out, int64_t rows, int64_t width) {
    constexpr int kWarps = kThreads / kWarpSize;
    __shared__ A of_warp[kWarps][kWarpSize];
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
    A sum = 0;
    if (column < width) {
        for (int64_t row = warp; row < rows; row += kWarps) {
            sum += partial[row * width + column];
        }
    }
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < width) {
        for (int i = 1; i < kWarps; ++i) {
            sum += of_warp[i][lane];
        }
        out[column] = narrow<W>(sum);
    }
}

template <class A, class W>
void launch_sum_rows(const A* partial, W* out, int64_t rows, int64_t width, void* stream) {
    constexpr int kThreads = 256;
    const auto blocks = static_cast<unsigned>((width + kWarpSize - 1) / kWarpSize);
    STOKER_LAUNCH((sum_rows<A, W, kThreads>), blocks, kThreads, 0, stream, partial, out, rows, width);
}

}  // namespace stoker
