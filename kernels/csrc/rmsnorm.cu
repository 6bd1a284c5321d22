// RMSNorm over the last dimension, with the residual addition in front of it and its gradients fused: the ops.
// norm_host.cuh has how they are run, norm_forward.cuh and norm_backward.cuh have the kernels.
#include "norm_host.cuh"

namespace stoker {
namespace {

constexpr const char* kOp = "rmsnorm";

std::tuple<Tensor, Tensor> rmsnorm(Tensor x, Tensor weight, double eps, double offset) {
    const norm::Normed out = norm::forward<false>(kOp, x, nullptr, weight, nullptr, eps, offset);
    return {out.y, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> rmsnorm_residual(Tensor x, Tensor residual, Tensor weight, double eps,
                                                    double offset) {
    const norm::Normed out = norm::forward<false>(kOp, x, &residual, weight, nullptr, eps, offset);
    return {out.y, out.total, out.rstd};
}

std::tuple<Tensor, Tensor> rmsnorm_grad(Tensor grad_y, std::optional<Tensor> grad_total, Tensor x, Tensor weight,
                                        Tensor rstd, double offset) {
    const norm::Gradients grads = norm::backward<false>(kOp, grad_y, grad_total, x, weight, nullptr, rstd, offset);
    return {grads.x, grads.weight};
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
