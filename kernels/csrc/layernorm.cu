// LayerNorm over the last dimension, with the residual addition in front of it and its gradients fused: the ops.
// norm_host.cuh has how they are run, norm_forward.cuh and norm_backward.cuh have the kernels.
#include "norm_host.cuh"

namespace stoker {
namespace {

constexpr const char* kOp = "layernorm";

std::tuple<Tensor, Tensor, Tensor> layernorm(Tensor x, Tensor weight, Tensor bias, double eps) {
    const norm::Normed out = norm::forward<true>(kOp, x, nullptr, weight, &bias, eps, 0.0);
    return {out.y, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layernorm_residual(Tensor x, Tensor residual, Tensor weight, Tensor bias,
                                                              double eps) {
    const norm::Normed out = norm::forward<true>(kOp, x, &residual, weight, &bias, eps, 0.0);
    return {out.y, out.total, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layernorm_grad(Tensor grad_y, std::optional<Tensor> grad_total, Tensor x,
                                                  Tensor weight, Tensor mean, Tensor rstd) {
    const norm::Gradients grads = norm::backward<true>(kOp, grad_y, grad_total, x, weight, &mean, rstd, 0.0);
    return {grads.x, grads.weight, grads.bias};
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
