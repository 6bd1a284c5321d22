// RMSNorm over the last dimension, with the residual addition in front of it and its gradients fused: the ops.
// norm_forward.cuh and norm_backward.cuh have the kernels.
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace stoker {
namespace {

constexpr const char* kOp = "rmsnorm";

struct Results {
    Tensor y, total, rstd;
};

Results forward(const Tensor& given_x, const Tensor* given_residual, const Tensor& given_weight, double eps,
                double offset) {
    norm::check_rows(kOp, given_x);
    norm::check_parameter(kOp, "weight", given_x, given_weight);
    if (given_residual != nullptr) {
        norm::check_like(kOp, given_x, "residual", *given_residual);
    }
    const norm::Matrix x(given_x);
    const Tensor weight = dense(given_weight), residual = given_residual == nullptr ? weight : dense(*given_residual);
    const int64_t rows = rows_of(given_x);
    Results out{new_like(given_x), weight, weight};
    if (given_residual != nullptr) {
        out.total = new_like(given_x);
    }
    with_floating(kOp, "x", given_x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        constexpr int N = kVector<T>;
        out.rstd = new_tensor(given_x, {rows}, Of<Acc<T>>::dtype);
        with_parameter<T>(kOp, "weight", weight.scalar_type(), [](auto) {});
        if (given_x.numel() == 0) {
            return;
        }
        norm::Forward<T, false> f{};
        f.x = data<T>(x.tensor);
        f.x_rows = x.rows;
        f.y = data<T>(out.y);
        if (given_residual != nullptr) {
            f.residual = data<T>(residual);
            f.total = data<T>(out.total);
        }
        f.rstd = data<Acc<T>>(out.rstd);
        f.weight = norm::parameter<T>(weight);
        f.rows = rows;
        f.width = static_cast<int>(given_x.size(-1));
        f.eps = static_cast<Acc<T>>(eps);
        f.offset = static_cast<Acc<T>>(offset);
        const Launch launch(given_x);
        norm::launch_forward(f, x.is_aligned<N>() && is_aligned<N>(f.width, data<T>(weight), f.residual),
                             launch.stream());
    });
    return out;
}

std::tuple<Tensor, Tensor> rmsnorm(Tensor x, Tensor weight, double eps, double offset) {
    Results out = forward(x, nullptr, weight, eps, offset);
    return {out.y, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> rmsnorm_residual(Tensor x, Tensor residual, Tensor weight, double eps,
                                                    double offset) {
    Results out = forward(x, &residual, weight, eps, offset);
    return {out.y, out.total, out.rstd};
}

std::tuple<Tensor, Tensor> rmsnorm_grad(Tensor given_grad_y, std::optional<Tensor> given_grad_total, Tensor given_x,
                                        Tensor given_weight, Tensor rstd, double offset) {
    norm::check_rows(kOp, given_x);
    norm::check_parameter(kOp, "weight", given_x, given_weight);
    norm::check_like(kOp, given_x, "grad_y", given_grad_y);
    if (given_grad_total) {
        norm::check_like(kOp, given_x, "grad_total", *given_grad_total);
    }
    const norm::Matrix x(given_x), grad_y(given_grad_y);
    const Tensor weight = dense(given_weight), grad_total = given_grad_total ? dense(*given_grad_total) : weight;
    Tensor grad_x = new_like(given_x), grad_weight = new_like(weight);
    with_floating(kOp, "x", given_x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        constexpr int N = kVector<T>;
        norm::check_saved<T>(kOp, "rstd", given_x, rstd);
        with_parameter<T>(kOp, "weight", weight.scalar_type(), [&](auto of_weight) {
            using W = typename decltype(of_weight)::type;
            if (given_x.numel() == 0) {
                torch::stable::zero_(grad_weight);
                return;
            }
            norm::Backward<T, false> b{};
            b.grad_y = data<T>(grad_y.tensor);
            b.grad_y_rows = grad_y.rows;
            b.x = data<T>(x.tensor);
            b.x_rows = x.rows;
            b.grad_total = given_grad_total ? data<T>(grad_total) : nullptr;
            b.grad_x = data<T>(grad_x);
            b.rstd = data<Acc<T>>(rstd);
            b.weight = norm::parameter<T>(weight);
            b.rows = rows_of(given_x);
            b.width = static_cast<int>(given_x.size(-1));
            b.offset = static_cast<Acc<T>>(offset);
            const Launch launch(given_x);
            const bool aligned = x.is_aligned<N>() && grad_y.is_aligned<N>() &&
                                 is_aligned<N>(b.width, data<T>(weight), b.grad_total);
            const Tensor partial = norm::launch_backward(b, aligned, given_x, launch);
            launch_sum_rows(data<Acc<T>>(partial), data<W>(grad_weight), partial.size(0), b.width, launch.stream());
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
