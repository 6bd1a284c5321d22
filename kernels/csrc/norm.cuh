// What RMSNorm and LayerNorm share: y = (x - centre) * rstd * (weight + offset) + bias over rows, where RMSNorm has centre
// and bias 0. Owns how rows lie in memory, how threads share a row, and sums over a row; norm_forward.cuh and
// norm_backward.cuh have the kernels.
//
// A narrow row (at most 32 packs of 16 bytes: a head's features) belongs to `lanes` neighbouring lanes of a warp, one pack
// each, and a thread works on several rows at once. A wide row belongs to a block that keeps it in registers between
// passes over it; what does not fit is read again.
#pragma once

#include "numbers.cuh"
#include "reduce.cuh"
#include "tensors.h"

namespace stoker::norm {

constexpr int kNarrowThreads = 256;  // at most, per block of narrow rows

// Row r, of less than 2^31, begins at element (r / inner) * outer_stride + (r % inner) * inner_stride.
struct Rows {
    unsigned inner;
    int64_t inner_stride, outer_stride;

    __device__ __forceinline__ int64_t at(int64_t row) const {
        if (inner == 1) {
            return row * outer_stride;
        }
        const unsigned outer = static_cast<unsigned>(row) / inner;
        return outer * outer_stride + (static_cast<unsigned>(row) - outer * inner) * inner_stride;
    }
};

// A weight or bias, in T or in float32. Its dtype is looked at where it is read: two kernels less for each.
template <class T>
struct Parameter {
    const void* values;
    bool is_float;

    // The N from element `at` on.
    template <int N>
    __device__ __forceinline__ Pack<Acc<T>, N> load(int at) const {
        Pack<Acc<T>, N> wide;
        if (is_float) {
            wide = widened<Acc<T>>(stoker::load<float, N, true>(static_cast<const float*>(values) + at));
        } else {
            wide = widened<Acc<T>>(stoker::load<T, N, true>(static_cast<const T*>(values) + at));
        }
        return wide;
    }
};

template <class A>
__device__ __forceinline__ A inverse_root(A value) {
    if constexpr (std::is_same_v<A, double>) {
        return 1.0 / sqrt(value);
    } else {
        return 1.0f / sqrtf(value);  // rsqrtf is off by up to 2 ulp
    }
}

// x + residual, rounded to T.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> added(const Pack<T, N>& x, const Pack<T, N>& residual) {
    Pack<Acc<T>, N> sum = widened<Acc<T>>(x);
    const Pack<Acc<T>, N> other = widened<Acc<T>>(residual);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sum[i] += other[i];
    }
    return narrowed<T>(sum);
}

// Sums over each group of `lanes` neighbouring lanes, a power of two, in every lane of it. All lanes must call it.
template <int kCount, class A>
__device__ __forceinline__ void group_sums(A (&values)[kCount], int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            values[k] += __shfl_xor_sync(kFullWarp, values[k], distance);
        }
    }
}

// Sums over a block of up to 32 warps, in every thread. All threads must call it, with `turn` 0 and 1 by turns: who is
// a call ahead of a slower warp writes elsewhere, so that one barrier is enough.
template <int kCount, class A>
__device__ __forceinline__ void block_sums(A (&values)[kCount], int turn) {
    group_sums(values, kWarpSize);
    if (blockDim.x == kWarpSize) {
        return;
    }
    __shared__ A of_warp[2][kCount][kWarpSize];
    const int lane = threadIdx.x % kWarpSize;
    const int warps = static_cast<int>(blockDim.x) / kWarpSize;
    if (lane == 0) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            of_warp[turn][k][threadIdx.x / kWarpSize] = values[k];
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
        values[k] = lane < warps ? of_warp[turn][k][lane] : A(0);
    }
    group_sums(values, kWarpSize);
}

// ---- host: how a launch is cut

// The rows of a tensor whose last dimension is dense; the others may be strided as long as two strides describe them.
inline std::optional<Rows> strided_rows(const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
        return std::nullopt;
    }
    int levels = 0;
    int64_t count[2] = {1, 1}, stride[2] = {0, 0};
    for (int64_t i = last - 1; i >= 0; --i) {
        if (tensor.size(i) == 1) {
            continue;
        }
        if (levels > 0 && tensor.stride(i) == stride[levels - 1] * count[levels - 1]) {
            count[levels - 1] *= tensor.size(i);
        } else if (levels < 2) {
            count[levels] = tensor.size(i);
            stride[levels++] = tensor.stride(i);
        } else {
            return std::nullopt;
        }
    }
    return levels < 2 ? Rows{1, 0, stride[0]} : Rows{static_cast<unsigned>(count[0]), stride[0], stride[1]};
}

// A tensor whose rows a kernel can find: the given one, or a copy.
struct Matrix {
    Tensor tensor;
    Rows rows;

    explicit Matrix(const Tensor& given) : tensor(given), rows{1, 0, 0} {
        auto found = strided_rows(given);
        if (!found) {
            tensor = torch::stable::contiguous(given);
            found = Rows{1, 0, tensor.size(-1)};
        }
        rows = *found;
    }

    template <int N>
    bool is_aligned() const {
        return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 && rows.inner_stride % N == 0 &&
               rows.outer_stride % N == 0;
    }
};

template <class T>
Parameter<T> parameter(const Tensor& dense_tensor) {
    return {dense_tensor.data_ptr(), dense_tensor.scalar_type() == ScalarType::Float};
}

inline unsigned whole_warps(int64_t threads, int64_t most) {
    return static_cast<unsigned>(std::min(most, (threads + kWarpSize - 1) / kWarpSize * kWarpSize));
}

// The least power of two of lanes that hold a narrow row of so many packs.
inline int lanes_for(int packs) {
    int lanes = 1;
    while (lanes < packs) {
        lanes *= 2;
    }
    return lanes;
}

// Calls wide(N) or narrow(N), N the elements of a pack. Rows that cannot be read in pieces of 16 bytes are rare: one way
// for all of them.
template <class T, class Narrow, class Wide>
void by_width(int width, bool aligned, Narrow&& narrow, Wide&& wide) {
    constexpr std::integral_constant<int, kVector<T>> pack;
    if (!aligned || width % pack.value != 0) {
        wide(std::integral_constant<int, 1>{});
    } else if (width / pack.value <= kWarpSize) {
        narrow(pack);
    } else {
        wide(pack);
    }
}

inline void check_rows(const char* op, const Tensor& x) {
    STOKER_CHECK(x.dim() >= 1, op, ": x has no dimension to norm over");
    STOKER_CHECK(x.size(-1) <= INT32_MAX / 2, op, ": ", x.size(-1), " features; expected at most 2^30");
    STOKER_CHECK(rows_of(x) <= INT32_MAX, op, ": ", rows_of(x), " rows; expected less than 2^31");
}

inline void check_parameter(const char* op, const char* what, const Tensor& x, const Tensor& parameter) {
    check_same_device(op, x, {&parameter});
    STOKER_CHECK(parameter.dim() == 1 && parameter.size(0) == x.size(-1), op, ": ", what, " is ", describe(parameter),
                 ", x is ", describe(x), "; expected one ", what, " per feature");
}

inline void check_like(const char* op, const Tensor& x, const char* what, const Tensor& other) {
    check_same_device(op, x, {&other});
    STOKER_CHECK(other.scalar_type() == x.scalar_type() && same_shape(other, x), op, ": ", what, " is ",
                 describe(other), ", x is ", describe(x), "; both must be alike");
}

// What the forward pass has saved per row.
template <class T>
void check_saved(const char* op, const char* what, const Tensor& x, const Tensor& saved) {
    check_same_device(op, x, {&saved});
    STOKER_CHECK(saved.scalar_type() == Of<Acc<T>>::dtype && saved.dim() == 1 && saved.size(0) == rows_of(x) &&
                     saved.is_contiguous(),
                 op, ": ", what, " is ", describe(saved), ", x is ", describe(x),
                 "; expected what the forward pass returned");
}

}  // namespace stoker::norm
