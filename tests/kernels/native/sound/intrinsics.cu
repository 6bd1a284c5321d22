// What each intrinsic gives: one row of `out` per question, 64 threads in two warps unless the launch says otherwise.
#include "../broken/case.h"

__global__ void exchanges(int* out, int64_t) {
    const int t = int(threadIdx.x);
    const unsigned all = 0xffffffffu;
    int* column = out + t;
    int row = 0;
    const auto put = [&](int value) { column[64 * row++] = value; };
    put(__shfl_sync(all, t, 5));
    put(__shfl_sync(all, t, 5, 8));
    put(__shfl_xor_sync(all, t, 16));
    put(__shfl_xor_sync(all, t, 8, 8));
    put(__shfl_down_sync(all, t, 3));
    put(__shfl_down_sync(all, t, 3, 4));
    put(__shfl_up_sync(all, t, 3));
    put(__shfl_up_sync(all, t, 3, 4));
    put(int(__ballot_sync(all, t % 2)));
    put(__any_sync(all, t == 40));
    put(__all_sync(all, t < 32));
    put(int(__shfl_xor_sync(all, double(t) + 0.5, 1) * 2));
    put(int(__bfloat162float(__shfl_xor_sync(all, __float2bfloat16(float(t)), 1))));
}
CASE(exchange_results, exchanges, 1, 64, 0, nullptr)

__global__ void bits(int* out, int64_t) {
    if (threadIdx.x == 0) {
        int row = 0;
        const auto put = [&](int value) { out[row++] = value; };
        put(__popc(0xf0f0u));
        put(__ffs(8));
        put(__ffs(0));
        put(__clz(1));
        put(int(__umulhi(0xffffffffu, 0xffffffffu)));
        put(int(rsqrtf(0.25f)));
        put(__float_as_int(1.0f));
        put(int(__uint_as_float(0x40400000u)));
        put(min(3, 4) + max(10, 20));
        put(__ldg(out));
    }
}
CASE(bit_results, bits, 1, 32, 0, nullptr)

__global__ void counts(int* out, int64_t) {
    atomicAdd(out, 1);
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
        out[1 + blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)] = int(blockDim.x * blockDim.y + blockDim.z);
    }
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) {
        out[32 + threadIdx.x + 4 * (threadIdx.y + 4 * threadIdx.z)] = int(100 * threadIdx.z + 10 * threadIdx.y + threadIdx.x);
    }
}
CASE(index_results, counts, dim3(2, 3, 2), dim3(4, 4, 2), 0, nullptr)

__global__ void mark_block(int* out, int64_t) {
    if (threadIdx.x == 0) {
        out[blockIdx.x % 64] = int(blockIdx.x);
    }
}
CASE(marks_of_blocks, mark_block, 1 << 30, 32, 0, nullptr)

// Sums 0 .. n - 1 by shuffles, a barrier and dynamic shared memory, three times, with the barriers it needs.
__global__ void sums(int* out, int64_t n) {
    STOKER_DYNAMIC_SHARED(int, partial);
    for (int round = 0; round < 3; ++round) {
        int sum = 0;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            sum += int(i) + round;
        }
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        if (threadIdx.x % 32 == 0) {
            partial[threadIdx.x / 32] = sum;
        }
        __syncthreads();
        int total = 0;
        for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
            total += partial[warp];
        }
        out[(3 * blockIdx.x + round) * blockDim.x + threadIdx.x] = total;
        __syncthreads();
    }
}
CASE(block_sums, sums, 2, 256, 8 * sizeof(int), nullptr)
