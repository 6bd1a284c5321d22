// Threads that wait for others which never come.
#include "case.h"

__global__ void half_the_block(int* out, int64_t) {
    if (threadIdx.x < 40) {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}
CASE(divergent_barrier, half_the_block, dim3(2, 1, 1), 64, 0, nullptr)

__global__ void without_lane_3(int* out, int64_t) {
    if (threadIdx.x != 3) {
        out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
    } else {
        __syncthreads();
    }
}
CASE(missing_lane, without_lane_3, 1, 32, 0, nullptr)

__global__ void two_barriers(int* out, int64_t) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}
CASE(different_barriers, two_barriers, 1, 64, 0, nullptr)

__global__ void part_of_a_warp(int* out, int64_t) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1, 1);
}
CASE(partial_mask, part_of_a_warp, 1, 32, 0, nullptr)

__global__ void nothing(int*, int64_t) {}
CASE(ragged_block, nothing, 1, 48, 0, nullptr)
CASE(empty_grid, nothing, 0, 32, 0, nullptr)
CASE(too_much_shared_memory, nothing, 1, 32, 1 << 20, nullptr)
