// LayerNorm over the last dimension, with the residual addition in front of it and its gradients fused: the ops.
// norm_forward.cuh and norm_backward.cuh have the kernels.
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace stoker {
namespace {

constexpr const char* kOp = "layernorm";

void check(const Tensor& x, const Tensor& weight, const Tensor& bias) {
    norm::check_rows(kOp, x);
    norm::check_parameter(kOp, "weight", x, weight);
    norm::check_parameter(kOp, "bias", x, bias);
    STOKER_CHECK(weight.scalar_type() == bias.scalar_type(), kOp, ": weight is ", name_of(weight.scalar_type()),
                 ", bias is ", name_of(bias.scalar_type()), "; expected both alike");
}

struct Results {
    Tensor y, total, mean, rstd;
};

Results forward(const Tensor& given_x, const Tensor* given_residual, const Tensor& given_weight,
                const Tensor& given_bias, double eps) {
    check(given_x, given_weight, given_bias);
    if (given_residual != nullptr) {
        norm::check_like(kOp, given_x, "residual", *given_residual);
    }
    const norm::Matrix x(given_x);
    const Tensor weight = dense(given_weight), bias = dense(given_bias);
    const Tensor residual = given_residual == nullptr ? weight : dense(*given_residual);
    const int64_t rows = rows_of(given_x);
    Results out{new_like(given_x), weight, weight, weight};
    if (given_residual != nullptr) {
        out.total = new_like(given_x);
    }
    with_floating(kOp, "x", given_x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        constexpr int N = kVector<T>;
        out.mean = new_tensor(given_x, {rows}, Of<Acc<T>>::dtype);
        out.rstd = new_tensor(given_x, {rows}, Of<Acc<T>>::dtype);
        with_parameter<T>(kOp, "weight", weight.scalar_type(), [](auto) {});
        if (given_x.numel() == 0) {
            return;
        }
        norm::Forward<T, true> f{};
        f.x = data<T>(x.tensor);
        f.x_rows = x.rows;
        f.y = data<T>(out.y);
        if (given_residual != nullptr) {
            f.residual = data<T>(residual);
            f.total = data<T>(out.total);
        }
        f.mean = data<Acc<T>>(out.mean);
        f.rstd = data<Acc<T>>(out.rstd);
        f.weight = norm::parameter<T>(weight);
        f.bias = norm::parameter<T>(bias);
        f.rows = rows;
        f.width = static_cast<int>(given_x.size(-1));
        f.eps = static_cast<Acc<T>>(eps);
        const Launch launch(given_x);
        norm::launch_forward(
            f, x.is_aligned<N>() && is_aligned<N>(f.width, data<T>(weight), data<T>(bias), f.residual),
            launch.stream());
    });
    return out;
}

std::tuple<Tensor, Tensor, Tensor> layernorm(Tensor x, Tensor weight, Tensor bias, double eps) {
    Results out = forward(x, nullptr, weight, bias, eps);
    return {out.y, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layernorm_residual(Tensor x, Tensor residual, Tensor weight, Tensor bias,
                                                              double eps) {
    Results out = forward(x, &residual, weight, bias, eps);
    return {out.y, out.total, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layernorm_grad(Tensor given_grad_y, std::optional<Tensor> given_grad_total,
                                                  Tensor given_x, Tensor given_weight, Tensor mean, Tensor rstd) {
    norm::check_rows(kOp, given_x);
    norm::check_parameter(kOp, "weight", given_x, given_weight);
    norm::check_like(kOp, given_x, "grad_y", given_grad_y);
    if (given_grad_total) {
        norm::check_like(kOp, given_x, "grad_total", *given_grad_total);
    }
    const norm::Matrix x(given_x), grad_y(given_grad_y);
    const Tensor weight = dense(given_weight), grad_total = given_grad_total ? dense(*given_grad_total) : weight;
    Tensor grad_x = new_like(given_x), grad_weight = new_like(weight), grad_bias = new_like(weight);
    with_floating(kOp, "x", given_x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        constexpr int N = kVector<T>;
        norm::check_saved<T>(kOp, "mean", given_x, mean);
        norm::check_saved<T>(kOp, "rstd", given_x, rstd);
        with_parameter<T>(kOp, "weight", weight.scalar_type(), [&](auto of_weight) {
            using W = typename decltype(of_weight)::type;
            if (given_x.numel() == 0) {
                torch::stable::zero_(grad_weight);
                torch::stable::zero_(grad_bias);
                return;
            }
            norm::Backward<T, true> b{};
            b.grad_y = data<T>(grad_y.tensor);
            b.grad_y_rows = grad_y.rows;
            b.x = data<T>(x.tensor);
            b.x_rows = x.rows;
            b.grad_total = given_grad_total ? data<T>(grad_total) : nullptr;
            b.grad_x = data<T>(grad_x);
            b.mean = data<Acc<T>>(mean);
            b.rstd = data<Acc<T>>(rstd);
            b.weight = norm::parameter<T>(weight);
            b.rows = rows_of(given_x);
            b.width = static_cast<int>(given_x.size(-1));
            const Launch launch(given_x);
            const bool aligned = x.is_aligned<N>() && grad_y.is_aligned<N>() &&
                                 is_aligned<N>(b.width, data<T>(weight), b.grad_total);
            const Tensor partial = norm::launch_backward(b, aligned, given_x, launch);
            launch_sum_rows(data<Acc<T>>(partial), data<W>(grad_weight), data<W>(grad_bias), b.width, partial.size(0),
                            partial.size(1), launch.stream());
        });
    });
    return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("layernorm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)");
    m.def("layernorm_residual(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)");
    m.def("layernorm_grad(Tensor grad_y, Tensor? grad_total, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor)");
}

STOKER_KERNELS(m) {
    m.impl("layernorm", TORCH_BOX(&stoker::layernorm));
    m.impl("layernorm_residual", TORCH_BOX(&stoker::layernorm_residual));
    m.impl("layernorm_grad", TORCH_BOX(&stoker::layernorm_grad));
}
