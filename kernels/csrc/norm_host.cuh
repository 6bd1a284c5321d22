// What both norms do on the host: arguments are checked, tensors become a kernel's arguments, results are made. kCentred:
// LayerNorm, else RMSNorm. The kernels are norm_forward.cuh's and norm_backward.cuh's, the ops each .cu's own.
#pragma once

#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace stoker::norm {

inline void check_parameters(const char* op, const Tensor& x, const Tensor& weight, const Tensor* bias) {
    check_rows(op, x);
    check_parameter(op, "weight", x, weight);
    if (bias != nullptr) {
        check_parameter(op, "bias", x, *bias);
        STOKER_CHECK(weight.scalar_type() == bias->scalar_type(), op, ": weight is ", name_of(weight.scalar_type()),
                     ", bias is ", name_of(bias->scalar_type()), "; expected both alike");
    }
}

// total: with a residual; mean: LayerNorm's. What there is not is some other tensor.
struct Normed {
    Tensor y, total, mean, rstd;
};

template <bool kCentred>
Normed forward(const char* op, const Tensor& given_x, const Tensor* given_residual, const Tensor& given_weight,
               const Tensor* given_bias, double eps, double offset) {
    check_parameters(op, given_x, given_weight, given_bias);
    if (given_residual != nullptr) {
        check_like(op, given_x, "residual", *given_residual);
    }
    const Matrix x(given_x);
    const Tensor weight = dense(given_weight), bias = given_bias == nullptr ? weight : dense(*given_bias);
    const Tensor residual = given_residual == nullptr ? weight : dense(*given_residual);
    Normed out{new_like(given_x), weight, weight, weight};
    if (given_residual != nullptr) {
        out.total = new_like(given_x);
    }
    with_floating(op, "x", given_x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        constexpr int N = kVector<T>;
        Forward<T, kCentred> f{};
        f.rows = rows_of(given_x);
        out.rstd = new_tensor(given_x, {f.rows}, Of<Acc<T>>::dtype);
        if constexpr (kCentred) {
            out.mean = new_tensor(given_x, {f.rows}, Of<Acc<T>>::dtype);
            f.mean = data<Acc<T>>(out.mean);
            f.bias = parameter<T>(bias);
        }
        with_parameter<T>(op, "weight", weight.scalar_type(), [](auto) {});
        if (given_x.numel() == 0) {
            return;
        }
        f.x = data<T>(x.tensor);
        f.x_rows = x.rows;
        f.y = data<T>(out.y);
        if (given_residual != nullptr) {
            f.residual = data<T>(residual);
            f.total = data<T>(out.total);
        }
        f.rstd = data<Acc<T>>(out.rstd);
        f.weight = parameter<T>(weight);
        f.width = static_cast<int>(given_x.size(-1));
        f.eps = static_cast<Acc<T>>(eps);
        f.offset = static_cast<Acc<T>>(offset);
        const Launch launch(given_x);
        const bool aligned =
            x.is_aligned<N>() && is_aligned<N>(f.width, data<T>(weight), data<T>(bias), f.residual);
        launch_forward(f, aligned, launch.stream());
    });
    return out;
}

// bias: LayerNorm's; else the weight's.
struct Gradients {
    Tensor x, weight, bias;
};

// given_mean: LayerNorm's, else nullptr.
template <bool kCentred>
Gradients backward(const char* op, const Tensor& given_grad_y, const std::optional<Tensor>& given_grad_total,
                   const Tensor& given_x, const Tensor& given_weight, const Tensor* mean, const Tensor& rstd,
                   double offset) {
    check_parameters(op, given_x, given_weight, nullptr);
    check_like(op, given_x, "grad_y", given_grad_y);
    if (given_grad_total) {
        check_like(op, given_x, "grad_total", *given_grad_total);
    }
    const Matrix x(given_x), grad_y(given_grad_y);
    const Tensor weight = dense(given_weight), grad_total = given_grad_total ? dense(*given_grad_total) : weight;
    Gradients out{new_like(given_x), new_like(weight), weight};
    out.bias = kCentred ? new_like(weight) : out.weight;
    with_floating(op, "x", given_x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        constexpr int N = kVector<T>;
        Backward<T, kCentred> b{};
        if constexpr (kCentred) {
            check_saved<T>(op, "mean", given_x, *mean);
            b.mean = data<Acc<T>>(*mean);
        }
        check_saved<T>(op, "rstd", given_x, rstd);
        with_parameter<T>(op, "weight", weight.scalar_type(), [&](auto of_weight) {
            using W = typename decltype(of_weight)::type;
            if (given_x.numel() == 0) {
                torch::stable::zero_(out.weight);
                torch::stable::zero_(out.bias);
                return;
            }
            b.grad_y = data<T>(grad_y.tensor);
            b.grad_y_rows = grad_y.rows;
            b.x = data<T>(x.tensor);
            b.x_rows = x.rows;
            b.grad_total = given_grad_total ? data<T>(grad_total) : nullptr;
            b.grad_x = data<T>(out.x);
            b.rstd = data<Acc<T>>(rstd);
            b.weight = parameter<T>(weight);
            b.rows = rows_of(given_x);
            b.width = static_cast<int>(given_x.size(-1));
            b.offset = static_cast<Acc<T>>(offset);
            const Launch launch(given_x);
            const bool aligned = x.is_aligned<N>() && grad_y.is_aligned<N>() &&
                                 is_aligned<N>(b.width, data<T>(weight), b.grad_total);
            const Tensor partial = launch_backward(b, aligned, given_x, launch);
            launch_sum_rows(data<Acc<T>>(partial), data<W>(out.weight), data<W>(out.bias), b.width, partial.size(0),
                            partial.size(1), launch.stream());
        });
    });
    return out;
}

}  // namespace stoker::norm
