// The norms forwards: kernels and their launch. Each element is read and written once: x (and residual) in, y (and the
// sum) out; a wide row beyond the registers is read once more per pass. kCentred: LayerNorm, else RMSNorm.
#pragma once

#include "norm.cuh"

namespace stoker::norm {

template <class T, bool kCentred>
struct Forward {
    const T* x;
    Rows x_rows;
    const T* residual;  // or nullptr; rows without gaps, as are those of y and total
    T* y;
    T* total;  // x + residual, which is then what is normed
    Acc<T>* mean;  // LayerNorm's
    Acc<T>* rstd;
    Parameter<T> weight, bias;  // bias: LayerNorm's
    int64_t rows;
    int width;
    Acc<T> eps, offset;

    template <int N>
    __device__ __forceinline__ Pack<T, N> normed(const Pack<T, N>& pack, Acc<T> centre, Acc<T> scale,
                                                 const Pack<Acc<T>, N>& factor, const Pack<Acc<T>, N>& shift) const {
        Pack<Acc<T>, N> values = widened<Acc<T>>(pack);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            values[i] = (values[i] - centre) * scale * (factor[i] + offset);
            if constexpr (kCentred) {
                values[i] += shift[i];
            }
        }
        return narrowed<T>(values);
    }

    template <int N>
    __device__ __forceinline__ Pack<Acc<T>, N> load_bias(int at) const {
        if constexpr (kCentred) {
            return bias.template load<N>(at);
        }
        return {};
    }

    __device__ __forceinline__ void save(int64_t row, Acc<T> centre, Acc<T> scale) const {
        rstd[row] = scale;
        if constexpr (kCentred) {
            mean[row] = centre;
        }
    }
};

template <class A, class T, int N>
__device__ __forceinline__ A sum_of(const Pack<T, N>& pack) {
    const Pack<A, N> values = widened<A>(pack);
    A sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sum += values[i];
    }
    return sum;
}

template <class A, class T, int N>
__device__ __forceinline__ A sum_of_squares(const Pack<T, N>& pack, A centre) {
    const Pack<A, N> values = widened<A>(pack);
    A sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sum += (values[i] - centre) * (values[i] - centre);
    }
    return sum;
}

constexpr int kNarrowRows = 4;  // per thread, so many loads are on their way at once

// The variance is that of the centred values: E[x^2] - E[x]^2 cancels.
// claim: norm::forward_(narrow|wide)<\w+, [48], \w+>: 16-byte loads and stores
template <class T, int N, bool kCentred>
__global__ void __launch_bounds__(kNarrowThreads) forward_narrow(Forward<T, kCentred> f, int lanes) {
    using A = Acc<T>;
    const int at = static_cast<int>(threadIdx.x) % lanes * N;
    const bool is_in = at < f.width;
    const int groups = static_cast<int>(blockDim.x) / lanes;
    const int64_t first = int64_t{blockIdx.x} * groups * kNarrowRows + threadIdx.x / lanes;
    Pack<T, N> kept[kNarrowRows];
#pragma unroll
    for (int k = 0; k < kNarrowRows; ++k) {
        const int64_t row = first + k * groups;
        kept[k] = is_in && row < f.rows ? load<T, N>(f.x + f.x_rows.at(row) + at) : Pack<T, N>{};
    }
    const Pack<A, N> factor = is_in ? f.weight.template load<N>(at) : Pack<A, N>{};
    const Pack<A, N> shift = is_in ? f.template load_bias<N>(at) : Pack<A, N>{};
    if (f.residual != nullptr) {
        Pack<T, N> other[kNarrowRows];
#pragma unroll
        for (int k = 0; k < kNarrowRows; ++k) {
            const int64_t row = first + k * groups;
            other[k] = is_in && row < f.rows ? load<T, N>(f.residual + row * f.width + at) : Pack<T, N>{};
        }
#pragma unroll
        for (int k = 0; k < kNarrowRows; ++k) {
            const int64_t row = first + k * groups;
            if (is_in && row < f.rows) {
                kept[k] = added(kept[k], other[k]);
                store<T, N>(f.total + row * f.width + at, kept[k]);
            }
        }
    }
    A centre[kNarrowRows] = {}, scale[kNarrowRows];
    if constexpr (kCentred) {
#pragma unroll
        for (int k = 0; k < kNarrowRows; ++k) {
            centre[k] = sum_of<A>(kept[k]);
        }
        group_sums(centre, lanes);
#pragma unroll
        for (int k = 0; k < kNarrowRows; ++k) {
            centre[k] /= static_cast<A>(f.width);
            hold_packed(kept[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < kNarrowRows; ++k) {
        scale[k] = is_in ? sum_of_squares(kept[k], centre[k]) : A(0);
    }
    group_sums(scale, lanes);
    if (!is_in) {
        return;  // no exchange of lanes from here on
    }
#pragma unroll
    for (int k = 0; k < kNarrowRows; ++k) {
        const int64_t row = first + k * groups;
        hold_packed(kept[k]);
        if (row < f.rows) {
            const A rstd = inverse_root(scale[k] / static_cast<A>(f.width) + f.eps);
            store<T, N>(f.y + row * f.width + at, f.template normed<N>(kept[k], centre[k], rstd, factor, shift));
            if (at == 0) {
                f.save(row, centre[k], rstd);
            }
        }
    }
}

constexpr int kWideThreads = 1024;

// Packs per thread that stay in registers.
template <int N>
constexpr int kForwardKept = N == 1 ? 8 : 4;

template <class T, int N, bool kCentred>
__global__ void __launch_bounds__(kWideThreads, 1) forward_wide(Forward<T, kCentred> f) {
    using A = Acc<T>;
    constexpr int kKept = kForwardKept<N>;
    const int64_t row = blockIdx.x;
    const int step = static_cast<int>(blockDim.x) * N;
    const int begin = static_cast<int>(threadIdx.x) * N;
    const T* x = f.x + f.x_rows.at(row);
    const T* residual = f.residual == nullptr ? nullptr : f.residual + row * f.width;
    T* total = f.total + row * f.width;
    Pack<T, N> kept[kKept];
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
        const int at = begin + k * step;
        kept[k] = at < f.width ? load<T, N>(x + at) : Pack<T, N>{};
    }
    if (residual != nullptr) {
        Pack<T, N> other[kKept];
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            const int at = begin + k * step;
            other[k] = at < f.width ? load<T, N>(residual + at) : Pack<T, N>{};
        }
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            const int at = begin + k * step;
            if (at < f.width) {
                kept[k] = added(kept[k], other[k]);
                store<T, N>(total + at, kept[k]);
            }
        }
        for (int at = begin + kKept * step; at < f.width; at += step) {
            store<T, N>(total + at, added(load<T, N>(x + at), load<T, N>(residual + at)));
        }
        x = total;  // a thread reads back what it has written itself
    }
    A centre[1] = {}, scale[1] = {};
    if constexpr (kCentred) {
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            centre[0] += sum_of<A>(kept[k]);
        }
        for (int at = begin + kKept * step; at < f.width; at += step) {
            centre[0] += sum_of<A>(load<T, N>(x + at));
        }
        block_sums(centre, 0);
        centre[0] /= static_cast<A>(f.width);
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            hold_packed(kept[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
        if (begin + k * step < f.width) {
            scale[0] += sum_of_squares(kept[k], centre[0]);
        }
    }
    for (int at = begin + kKept * step; at < f.width; at += step) {
        scale[0] += sum_of_squares(load<T, N>(x + at), centre[0]);
    }
    block_sums(scale, 1);
    const A rstd = inverse_root(scale[0] / static_cast<A>(f.width) + f.eps);
    if (threadIdx.x == 0) {
        f.save(row, centre[0], rstd);
    }
    T* y = f.y + row * f.width;
    const auto write = [&](const Pack<T, N>& pack, int at) {
        const Pack<A, N> factor = f.weight.template load<N>(at), shift = f.template load_bias<N>(at);
        store<T, N>(y + at, f.template normed<N>(pack, centre[0], rstd, factor, shift));
    };
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
        hold_packed(kept[k]);
        if (begin + k * step < f.width) {
            write(kept[k], begin + k * step);
        }
    }
    for (int at = begin + kKept * step; at < f.width; at += step) {
        write(load<T, N>(x + at), at);
    }
}

// aligned: rows and parameters begin at multiples of 16 bytes.
template <class T, bool kCentred>
void launch_forward(const Forward<T, kCentred>& f, bool aligned, void* stream) {
    by_width<T>(
        f.width, aligned,
        [&](auto n) {
            const int lanes = lanes_for(f.width / n.value);
            const int64_t threads_needed = (f.rows + kNarrowRows - 1) / kNarrowRows * lanes;
            const unsigned threads = whole_warps(threads_needed, kNarrowThreads);
            const int64_t rows_per_block = int64_t{threads} / lanes * kNarrowRows;
            STOKER_LAUNCH((forward_narrow<T, n.value, kCentred>),
                          static_cast<unsigned>((f.rows + rows_per_block - 1) / rows_per_block), threads, 0, stream, f,
                          lanes);
        },
        [&](auto n) {
            const unsigned threads = whole_warps((f.width / n.value + kForwardKept<n.value> - 1) / kForwardKept<n.value>,
                                                 kWideThreads);
            STOKER_LAUNCH((forward_wide<T, n.value, kCentred>), static_cast<unsigned>(f.rows), threads, 0, stream, f);
        });
}

}  // namespace stoker::norm
