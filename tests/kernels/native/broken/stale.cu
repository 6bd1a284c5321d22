// Values that nobody wrote, or that another block left.
#include "case.h"

__global__ void left_by_another_block(int* out, int64_t) {
    __shared__ int counter;
    STOKER_DYNAMIC_SHARED(int, more);
    if (threadIdx.x == 0) {
        out[2 * blockIdx.x] = counter;
        out[2 * blockIdx.x + 1] = more[0];
        counter = more[0] = 7;
    }
}
CASE(stale_shared_memory, left_by_another_block, 2, 32, sizeof(int), nullptr)

template <class T>
__device__ inline T from_template(T value) {
    __shared__ T cell;
    const T old = cell;
    cell = value;
    return old;
}

__global__ void in_a_template(int* out, int64_t) {
    if (threadIdx.x == 0) {
        out[blockIdx.x] = from_template(9);
    }
}
CASE(stale_template_memory, in_a_template, 2, 32, 0, nullptr)

// The fourth value is kept in a register that only rows of four columns write.
__global__ void unwritten_register(int* out, int64_t columns) {
    int values[4];
    for (int64_t i = 0; i < columns; ++i) {
        values[i] = 1;
    }
    out[threadIdx.x] = values[3];
}
CASE(stale_register, unwritten_register, 1, 32, 0, nullptr)
