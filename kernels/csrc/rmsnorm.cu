// RMSNorm over the last dimension, with the residual addition in front of it and its gradients fused.
//
// One block per row forwards; backwards a block walks over rows and leaves one partial sum of the weight's gradient, which
// a second kernel adds up in a fixed order. A thread keeps what it has read of a row in registers, as far as it fits.
#include "numbers.cuh"
#include "reduce.cuh"
#include "tensors.h"

namespace stoker {
namespace {

constexpr int kKept = 4;  // packs per thread that stay in registers between the two passes over a row

template <class A>
__device__ __forceinline__ A inverse_root(A value) {
    if constexpr (std::is_same_v<A, double>) {
        return 1.0 / sqrt(value);
    } else {
        return 1.0f / sqrtf(value);  // rsqrtf is off by up to 2 ulp
    }
}

// x, or x + residual rounded to T: what is normed. The sum is written to `total`.
template <class T, int N, bool kResidual>
__device__ __forceinline__ Pack<T, N> input(const T* x, const T* residual, T* total, int64_t at) {
    Pack<T, N> pack = load<T, N>(x + at);
    if constexpr (kResidual) {
        const Pack<T, N> other = load<T, N>(residual + at);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            pack[i] = narrow<T>(widen<Acc<T>>(pack[i]) + widen<Acc<T>>(other[i]));
        }
        store<T, N>(total + at, pack);
    }
    return pack;
}

template <class T, class W, int N, int kThreads, bool kResidual>
__global__ void rmsnorm_forward(const T* __restrict__ x, const T* __restrict__ residual, const W* __restrict__ weight,
                                T* __restrict__ y, T* __restrict__ total, Acc<T>* __restrict__ rstd, int width,
                                Acc<T> eps, Acc<T> offset) {
    using A = Acc<T>;
    const int64_t row = int64_t{blockIdx.x} * width;
    const int packs = width / N;
    Pack<T, N> kept[kKept];
    A sum = 0;
    const auto add = [&](const Pack<T, N>& pack) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const A value = widen<A>(pack[i]);
            sum += value * value;
        }
    };
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
        const int p = threadIdx.x + k * kThreads;
        if (p < packs) {
            kept[k] = input<T, N, kResidual>(x, residual, total, row + int64_t{p} * N);
            add(kept[k]);
        }
    }
    for (int p = threadIdx.x + kKept * kThreads; p < packs; p += kThreads) {
        add(input<T, N, kResidual>(x, residual, total, row + int64_t{p} * N));
    }
    const A scale = inverse_root(block_sum<kThreads>(sum) / static_cast<A>(width) + eps);
    if (threadIdx.x == 0) {
        rstd[blockIdx.x] = scale;
    }
    const auto write = [&](Pack<T, N> pack, int p) {
        const Pack<W, N> factor = load<W, N>(weight + int64_t{p} * N);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            pack[i] = narrow<T>(widen<A>(pack[i]) * scale * (widen<A>(factor[i]) + offset));
        }
        store<T, N>(y + row + int64_t{p} * N, pack);
    };
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
        const int p = threadIdx.x + k * kThreads;
        if (p < packs) {
            write(kept[k], p);
        }
    }
    const T* source = kResidual ? total : x;
    for (int p = threadIdx.x + kKept * kThreads; p < packs; p += kThreads) {
        write(load<T, N>(source + row + int64_t{p} * N), p);
    }
}

// grad_x = rstd * (g w - x rstd mean(g w x rstd)) + grad_total, with w = weight + offset; one row of `partial` per block.
template <class T, class W, int N, int kThreads, bool kResidual>
__global__ void rmsnorm_backward(const T* __restrict__ grad_y, const T* __restrict__ grad_total,
                                 const T* __restrict__ x, const W* __restrict__ weight,
                                 const Acc<T>* __restrict__ rstd, T* __restrict__ grad_x, Acc<T>* __restrict__ partial,
                                 int64_t rows, int width, Acc<T> offset, bool in_shared) {
    using A = Acc<T>;
    STOKER_DYNAMIC_SHARED(A, shared_sums);
    // A column belongs to one thread, so its sum needs no barrier, wherever it is held.
    A* sums = in_shared ? shared_sums : partial + int64_t{blockIdx.x} * width;
    const int packs = width / N;
    for (int p = threadIdx.x; p < packs; p += kThreads) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            sums[p * N + i] = 0;
        }
    }
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const int64_t row = r * width;
        const A scale = rstd[r];
        A along = 0;
        for (int p = threadIdx.x; p < packs; p += kThreads) {
            const Pack<T, N> g = load<T, N>(grad_y + row + int64_t{p} * N);
            const Pack<T, N> v = load<T, N>(x + row + int64_t{p} * N);
            const Pack<W, N> factor = load<W, N>(weight + int64_t{p} * N);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const A of_weight = widen<A>(g[i]) * (widen<A>(v[i]) * scale);
                sums[p * N + i] += of_weight;
                along += of_weight * (widen<A>(factor[i]) + offset);
            }
        }
        along = block_sum<kThreads>(along) / static_cast<A>(width);
        for (int p = threadIdx.x; p < packs; p += kThreads) {
            const Pack<T, N> g = load<T, N>(grad_y + row + int64_t{p} * N);
            const Pack<T, N> v = load<T, N>(x + row + int64_t{p} * N);
            const Pack<W, N> factor = load<W, N>(weight + int64_t{p} * N);
            Pack<T, N> before{};
            if constexpr (kResidual) {
                before = load<T, N>(grad_total + row + int64_t{p} * N);
            }
            Pack<T, N> result;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const A normed = widen<A>(v[i]) * scale;
                A grad = (widen<A>(g[i]) * (widen<A>(factor[i]) + offset) - normed * along) * scale;
                if constexpr (kResidual) {
                    grad += widen<A>(before[i]);
                }
                result[i] = narrow<T>(grad);
            }
            store<T, N>(grad_x + row + int64_t{p} * N, result);
        }
    }
    if (in_shared) {
        A* mine = partial + int64_t{blockIdx.x} * width;
        for (int p = threadIdx.x; p < packs; p += kThreads) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                mine[p * N + i] = sums[p * N + i];
            }
        }
    }
}

// Elements at once and threads per row: a warp for a head's features, more for a model's width. Rows that cannot be read
// in pieces of 16 bytes are rare: one way for all of them.
template <int kPack, class F>
void with_shape(int width, bool aligned, F&& function) {
    using std::integral_constant;
    constexpr integral_constant<int, kPack> pack;
    if (!aligned) {
        return function(integral_constant<int, 1>{}, integral_constant<int, 256>{});
    }
    if (width <= kPack * kWarpSize * kKept) {
        return function(pack, integral_constant<int, kWarpSize>{});
    }
    if (width <= kPack * 128 * kKept) {
        return function(pack, integral_constant<int, 128>{});
    }
    function(pack, integral_constant<int, 512>{});
}

void check(const Tensor& x, const Tensor& weight) {
    STOKER_CHECK(x.dim() >= 1, "rmsnorm: x has no dimension to norm over");
    check_same_device("rmsnorm", x, {&weight});
    STOKER_CHECK(weight.dim() == 1 && weight.size(0) == x.size(-1), "rmsnorm: weight is ", describe(weight), ", x is ",
                 describe(x), "; expected one weight per feature");
    STOKER_CHECK(x.size(-1) <= INT32_MAX, "rmsnorm: ", x.size(-1), " features; expected less than 2^31");
}

void check_like(const Tensor& x, const char* what, const Tensor& other) {
    check_same_device("rmsnorm", x, {&other});
    STOKER_CHECK(other.scalar_type() == x.scalar_type() && same_shape(other, x), "rmsnorm: ", what, " is ",
                 describe(other), ", x is ", describe(x), "; both must be alike");
}

struct Forward {
    Tensor y, total, rstd;
};

Forward forward(const Tensor& given_x, const Tensor* given_residual, const Tensor& given_weight, double eps,
                double offset) {
    check(given_x, given_weight);
    if (given_residual != nullptr) {
        check_like(given_x, "residual", *given_residual);
    }
    const Tensor x = dense(given_x), weight = dense(given_weight);
    const Tensor residual = given_residual != nullptr ? dense(*given_residual) : x;
    const int64_t rows = rows_of(x);
    const int width = static_cast<int>(x.size(-1));
    Forward out{new_like(x), given_residual != nullptr ? new_like(x) : x, x};
    with_floating("rmsnorm", "x", x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        using A = Acc<T>;
        out.rstd = new_tensor(x, {rows}, Of<A>::dtype);
        with_parameter<T>("rmsnorm", "weight", weight.scalar_type(), [&](auto of_weight) {
            using W = typename decltype(of_weight)::type;
            if (rows == 0 || width == 0) {
                return;
            }
            const Launch launch(x);
            const auto run = [&](auto n, auto threads, auto with_residual) {
                constexpr int kThreads = threads.value;
                STOKER_LAUNCH((rmsnorm_forward<T, W, n.value, kThreads, with_residual.value>),
                              static_cast<unsigned>(rows), kThreads, 0, launch.stream(), data<T>(x), data<T>(residual),
                              data<W>(weight), data<T>(out.y), data<T>(out.total), data<A>(out.rstd), width,
                              static_cast<A>(eps), static_cast<A>(offset));
            };
            const auto by_width = [&](auto with_residual) {
                with_shape<kVector<T>>(
                    width, is_aligned<kVector<T>>(width, data<T>(x), data<T>(residual), data<W>(weight)),
                    [&](auto n, auto threads) { run(n, threads, with_residual); });
            };
            given_residual != nullptr ? by_width(std::true_type{}) : by_width(std::false_type{});
        });
    });
    return out;
}

std::tuple<Tensor, Tensor> rmsnorm(Tensor x, Tensor weight, double eps, double offset) {
    Forward out = forward(x, nullptr, weight, eps, offset);
    return {out.y, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> rmsnorm_residual(Tensor x, Tensor residual, Tensor weight, double eps,
                                                    double offset) {
    Forward out = forward(x, &residual, weight, eps, offset);
    return {out.y, out.total, out.rstd};
}

std::tuple<Tensor, Tensor> rmsnorm_grad(Tensor given_grad_y, std::optional<Tensor> given_grad_total, Tensor given_x,
                                        Tensor given_weight, Tensor rstd, double offset) {
    check(given_x, given_weight);
    check_like(given_x, "grad_y", given_grad_y);
    if (given_grad_total) {
        check_like(given_x, "grad_total", *given_grad_total);
    }
    const Tensor x = dense(given_x), weight = dense(given_weight), grad_y = dense(given_grad_y);
    const Tensor grad_total = given_grad_total ? dense(*given_grad_total) : grad_y;
    const int64_t rows = rows_of(x);
    const int width = static_cast<int>(x.size(-1));
    Tensor grad_x = new_like(x), grad_weight = new_like(weight);
    with_floating("rmsnorm", "x", x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        using A = Acc<T>;
        STOKER_CHECK(rstd.numel() == rows && rstd.scalar_type() == Of<A>::dtype && rstd.is_contiguous(),
                     "rmsnorm: rstd is ", describe(rstd), "; expected what the forward pass returned");
        with_parameter<T>("rmsnorm", "weight", weight.scalar_type(), [&](auto of_weight) {
            using W = typename decltype(of_weight)::type;
            if (rows == 0 || width == 0) {
                torch::stable::zero_(grad_weight);
                return;
            }
            const Launch launch(x);
            const unsigned blocks = grid_for(rows, launch.device(), 2);
            const Tensor partial = new_tensor(x, {blocks, width}, Of<A>::dtype);
            const int64_t bytes = int64_t{width} * static_cast<int64_t>(sizeof(A));
            const bool in_shared = bytes <= kSharedLimit - 1024;  // block_sum has some of its own
            const auto run = [&](auto n, auto threads, auto with_total) {
                constexpr int kThreads = threads.value;
                STOKER_LAUNCH((rmsnorm_backward<T, W, n.value, kThreads, with_total.value>), blocks, kThreads,
                              static_cast<size_t>(in_shared ? bytes : 0), launch.stream(), data<T>(grad_y),
                              data<T>(grad_total), data<T>(x), data<W>(weight), data<A>(rstd), data<T>(grad_x),
                              data<A>(partial), rows, width, static_cast<A>(offset), in_shared);
            };
            const auto by_width = [&](auto with_total) {
                with_shape<kVector<T>>(width,
                                       is_aligned<kVector<T>>(width, data<T>(x), data<T>(grad_y), data<T>(grad_total),
                                                              data<W>(weight)),
                                       [&](auto n, auto threads) { run(n, threads, with_total); });
            };
            given_grad_total ? by_width(std::true_type{}) : by_width(std::false_type{});
            launch_sum_rows<A, W>(data<A>(partial), data<W>(grad_weight), blocks, width, launch.stream());
        });
    });
    return {grad_x, grad_weight};
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("rmsnorm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)");
    m.def("rmsnorm_residual(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor, Tensor)");
    m.def("rmsnorm_grad(Tensor grad_y, Tensor? grad_total, Tensor x, Tensor weight, Tensor rstd, float offset) -> (Tensor, Tensor)");
}

STOKER_KERNELS(m) {
    m.impl("rmsnorm", TORCH_BOX(&stoker::rmsnorm));
    m.impl("rmsnorm_residual", TORCH_BOX(&stoker::rmsnorm_residual));
    m.impl("rmsnorm_grad", TORCH_BOX(&stoker::rmsnorm_grad));
}
