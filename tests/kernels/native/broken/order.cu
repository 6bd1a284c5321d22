// A value is read that another thread of the block has yet to write.
#include "case.h"

__global__ void reverse(int* out, int64_t) {
    __shared__ int tile[64];
    tile[threadIdx.x] = int(threadIdx.x);
    // __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x];
}
CASE(missing_barrier, reverse, 1, 64, 0, nullptr)

__global__ void neighbour(int* out, int64_t) {
    __shared__ int tile[32];
    tile[threadIdx.x] = int(threadIdx.x);
    // __syncwarp();
    out[threadIdx.x] = tile[(threadIdx.x + 1) % 32];
}
CASE(missing_warp_barrier, neighbour, 1, 32, 0, nullptr)

// The sum of the first round is overwritten by the second before all have read it.
__global__ void two_rounds(int* out, int64_t) {
    __shared__ int value;
    for (int round = 0; round < 2; ++round) {
        if (threadIdx.x == 0) {
            value = round + 1;
        }
        __syncthreads();
        out[round * 64 + threadIdx.x] = value;
        // __syncthreads();
    }
}
CASE(reused_too_early, two_rounds, 1, 64, 0, nullptr)

// Each block adds to what the block before it has left in global memory.
__global__ void chain(int* out, int64_t) {
    if (threadIdx.x == 0) {
        out[blockIdx.x + 1] = out[blockIdx.x] + 1;
    }
}
CASE(blocks_in_a_row, chain, 4, 32, 0, nullptr)
