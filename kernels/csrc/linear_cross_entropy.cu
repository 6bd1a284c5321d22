// Between the two matrix products of a chunk of tokens: its logits become losses, log-sum-exps and the logits' gradient in
// one launch, over the logits or narrower beside them. The products are torch's (kernels/native/linear_cross_entropy.py).
//
// claim: cross_entropy_whole<.*, [48], .*>: 16-byte loads and stores
#include "cross_entropy.cuh"
#include "logit_rows.h"

namespace stoker {
namespace {

// Statistics, loss and gradient of a row in one launch. grad_losses null: no gradient. grad: may be the logits' memory.
template <class T, class G, int N, int kThreads, bool kCap>
__global__ __launch_bounds__(kThreads, kResident / kThreads) void cross_entropy_whole(const T* logits, G* grad, int64_t stride, int64_t grad_stride, int width,
                                    Targets targets, const T* grad_losses, int64_t grad_losses_stride, T z_loss, T cap,
                                    T* losses, T* lse) {
    const int64_t r = blockIdx.x;
    const T* row = logits + r * stride;
    const int64_t target = targets.classes[r];
    const bool ignored = target == targets.ignore_index;
    const bool inside = target >= 0 && target < width;
    // Read before the row is written over.
    const T target_logit = inside ? capped<kCap>(row[target], cap) : T(0);
    const Online<T> found = statistics<T, N, kThreads, kCap>(row, width, cap);
    const Loss<T> loss(found, target_logit, ignored, z_loss);
    if (threadIdx.x == 0) {
        STOKER_KERNEL_CHECK(inside || ignored, "linear_cross_entropy: a target is neither a class nor ignore_index");
        losses[r] = loss.value;
        lse[r] = loss.lse;
    }
    if (grad_losses == nullptr) {
        return;
    }
    if (ignored) {
        return write_zeros<G, N, kThreads>(grad + r * grad_stride, width);
    }
    const T grad_loss = grad_losses[r * grad_losses_stride];
    const Slope<T> slope{found.maximum, grad_loss * (1 + 2 * z_loss * loss.lse) / found.sum, grad_loss, target};
    write_gradient<T, G, N, kThreads, kCap>(row, grad + r * grad_stride, width, cap, slope);
}

void cross_entropy_whole_(Tensor logits, Tensor losses, Tensor lse, std::optional<Tensor> grad, Tensor given_targets,
                          std::optional<Tensor> given_grad_losses, int64_t ignore_index, double z_loss,
                          double softcap) {
    constexpr const char* op = "linear_cross_entropy";
    const LogitRows rows(op, logits);
    const auto is_place = [&](const Tensor& tensor) {
        return tensor.dim() == 2 && (tensor.size(1) == 1 || tensor.stride(1) == 1);
    };
    STOKER_CHECK(is_place(logits), op, ": logits is ", describe(logits), "; expected dense rows in two dimensions");
    check_per_row(op, "targets", given_targets, logits, ScalarType::Long);
    check_per_row(op, "losses", losses, logits, logits.scalar_type());
    check_per_row(op, "lse", lse, logits, logits.scalar_type());
    STOKER_CHECK(losses.is_contiguous() && lse.is_contiguous(), op, ": losses and lse must be contiguous");
    const Tensor targets = dense(given_targets);
    const Tensor to = grad.value_or(logits);
    if (grad) {
        check_same_device(op, logits, {&to});
        STOKER_CHECK(same_shape(to, logits) && is_place(to), op, ": grad is ", describe(to), ", logits is ",
                     describe(logits), "; expected one shape, and dense rows");
    }
    std::optional<PerRow> grad_losses;
    if (given_grad_losses) {
        check_per_row(op, "grad_losses", *given_grad_losses, logits, logits.scalar_type());
        grad_losses.emplace(*given_grad_losses);
    }
    const auto run = [&](auto of_logits, auto of_grad) {
        using T = typename decltype(of_logits)::type;
        using G = typename decltype(of_grad)::type;
        constexpr int kPack = std::max(kVector<T>, kVector<G>);
        if (rows.count == 0) {
            return;
        }
        const Launch launch(logits);
        const T* from = data<T>(logits);
        const auto with_cap = [&](auto n, auto cap) {
            constexpr int kThreads = kManyThreads;
            STOKER_LAUNCH((cross_entropy_whole<T, G, n.value, kThreads, cap.value>), static_cast<unsigned>(rows.count),
                          kThreads, 0, launch.stream(), from, data<G>(to), rows.stride, to.stride(0), rows.width,
                          Targets{data<int64_t>(targets), 0, ignore_index},
                          grad_losses ? data<T>(grad_losses->tensor) : nullptr, grad_losses ? grad_losses->stride : 0,
                          static_cast<T>(z_loss), static_cast<T>(softcap), data<T>(losses), data<T>(lse));
        };
        const auto by_pack = [&](auto n) {
            softcap != 0.0 ? with_cap(n, std::true_type{}) : with_cap(n, std::false_type{});
        };
        are_alike<kPack>(from, rows.stride, data<G>(to), to.stride(0))
            ? by_pack(std::integral_constant<int, kPack>{})
            : by_pack(std::integral_constant<int, 1>{});
    };
#ifdef STOKER_EMULATION
    if (logits.scalar_type() == ScalarType::Double && to.scalar_type() == ScalarType::Double) {
        return run(Of<double>{}, Of<double>{});
    }
#endif
    STOKER_CHECK(logits.scalar_type() == ScalarType::Float, op, ": logits is ", describe(logits), "; expected float32");
    switch (to.scalar_type()) {
        case ScalarType::Float: return run(Of<float>{}, Of<float>{});
        case ScalarType::BFloat16: return run(Of<float>{}, Of<__nv_bfloat16>{});
        case ScalarType::Half: return run(Of<float>{}, Of<__half>{});
        default: refuse(op, ": grad is ", describe(to), "; expected float32, bfloat16 or float16");
    }
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def(
        "cross_entropy_whole_(Tensor(a!) logits, Tensor(b!) losses, Tensor(c!) lse, Tensor(d!)? grad, Tensor targets, "
        "Tensor? grad_losses, int ignore_index, float z_loss, float softcap) -> ()");
}

STOKER_KERNELS(m) {
    m.impl("cross_entropy_whole_", TORCH_BOX(&stoker::cross_entropy_whole_));
}
