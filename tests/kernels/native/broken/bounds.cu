// Accesses beside the memory they mean.
#include "case.h"

__global__ void one_too_many(int* out, int64_t n) {
    if (int64_t(threadIdx.x) <= n) {
        out[threadIdx.x] = 1;
    }
}
CASE(write_past_the_end, one_too_many, 1, 96, 0, nullptr)

// Through a pointer: the length of the array is out of the compiler's sight.
__device__ int last(const int* values, int64_t n) {
    return values[n];
}

__global__ void static_tile(int* out, int64_t n) {
    __shared__ int tile[64];
    tile[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = last(tile, n);
}
CASE(read_past_static_shared, static_tile, 1, 64, 0, nullptr)

__global__ void dynamic_tile(int* out, int64_t n) {
    STOKER_DYNAMIC_SHARED(int, tile);
    tile[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = last(tile, n);
}
CASE(read_past_dynamic_shared, dynamic_tile, 1, 64, 64 * sizeof(int), nullptr)

__global__ void dynamic_store(int* out, int64_t n) {
    STOKER_DYNAMIC_SHARED(int, tile);
    tile[threadIdx.x + n] = 1;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}
CASE(write_past_dynamic_shared, dynamic_store, 1, 64, 64 * sizeof(int), nullptr)

__global__ void vector_load(int* out, int64_t n) {
    const int4 four = *reinterpret_cast<const int4*>(out + n);
    out[threadIdx.x] = four.x;
}
CASE(misaligned_vector, vector_load, 1, 32, 0, nullptr)

// Wraps to a negative offset from the 2^31st element on.
__global__ void address_in_32_bits(int* out, int64_t n) {
    const int row = int(n) + int(blockIdx.x);
    const int offset = static_cast<int>(static_cast<unsigned>(row) * 1024u);
    out[offset + threadIdx.x] = 1;
}
CASE(short_address, address_in_32_bits, 1, 32, 0, nullptr)

__global__ void large_frame(int* out, int64_t n) {
    volatile int frame[25000];
    for (int i = 0; i < 25000; ++i) {
        frame[i] = i;
    }
    out[threadIdx.x] = frame[n];
}
CASE(large_stack, large_frame, 1, 32, 0, nullptr)
