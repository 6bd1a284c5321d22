// Cross-entropy of rows of logits: losses, the statistics of a vocabulary shard, and gradients, in place if wanted. A block
// per row; what it does with the row is cross_entropy.cuh's.
//
// claim: cross_entropy_forward<.*>: 16-byte loads
// claim: cross_entropy_backward<.*, [48], .*>: 16-byte loads and stores
#include "cross_entropy.cuh"
#include "logit_rows.h"

namespace stoker {
namespace {

// What is done with every row. losses and lse, or maximum, sumexp and target_logit; null: not wanted.
template <class A>
struct Results {
    A *losses, *lse, *maximum, *sumexp, *target_logit;
};

template <class T, int N, int kThreads>
__global__ __launch_bounds__(kThreads, kResident / kThreads) void cross_entropy_forward(const T* __restrict__ logits, int64_t stride, int width, Targets targets,
                                      Acc<T> z_loss, Results<Acc<T>> out) {
    using A = Acc<T>;
    const int64_t r = blockIdx.x;
    const T* row = logits + r * stride;
    const Online<A> found = statistics<T, N, kThreads, false>(row, width, A(0));
    if (threadIdx.x == 0) {
        const int64_t target = targets.classes[r] - targets.vocab_start;
        const bool inside = target >= 0 && target < width;
        const A target_logit = inside ? widen<A>(row[target]) : A(0);
        out.maximum[r] = found.maximum;
        out.sumexp[r] = found.sum;
        if (out.target_logit != nullptr) {
            out.target_logit[r] = target_logit;
        } else {
            const bool ignored = targets.classes[r] == targets.ignore_index;
            STOKER_KERNEL_CHECK(inside || ignored, "cross_entropy: a target is neither a class nor ignore_index");
            const Loss<A> loss(found, target_logit, ignored, z_loss);
            out.losses[r] = loss.value;
            out.lse[r] = loss.lse;
        }
    }
}

// With maximum and sumexp of the whole vocabulary probabilities keep their digits at large logits; lse alone does as well.
template <class T, int N, int kThreads>
__global__ __launch_bounds__(kThreads, kResident / kThreads) void cross_entropy_backward(const T* logits, T* grad, int64_t stride, int64_t grad_stride, int width,
                                       Targets targets, const Acc<T>* lse, const Acc<T>* maximum,
                                       const Acc<T>* sumexp, const Acc<T>* grad_losses, int64_t grad_losses_stride,
                                       Acc<T> z_loss) {
    using A = Acc<T>;
    const int64_t r = blockIdx.x;
    if (targets.classes[r] == targets.ignore_index) {  // the same in every thread
        return write_zeros<T, N, kThreads>(grad + r * grad_stride, width);
    }
    const A grad_loss = grad_losses[r * grad_losses_stride];
    Slope<A> slope{lse[r], grad_loss * (1 + 2 * z_loss * lse[r]), grad_loss, targets.classes[r] - targets.vocab_start};
    if (maximum != nullptr) {
        slope.shift = maximum[r];
        slope.factor /= sumexp[r];
    }
    write_gradient<T, T, N, kThreads, false>(logits + r * stride, grad + r * grad_stride, width, A(0), slope);
}

// ---- host

// Calls function(N, threads) as constants, N the elements that are read at once.
template <int kPack, class F>
void with_threads(int width, F&& function) {
    using std::integral_constant;
    if (width <= 4 * kFewThreads * kPack) {
        return function(integral_constant<int, kPack>{}, integral_constant<int, kFewThreads>{});
    }
    function(integral_constant<int, kPack>{}, integral_constant<int, kManyThreads>{});
}

struct Forward {
    Tensor losses, lse, maximum, sumexp, target_logit;
};

Forward forward(const char* op, const Tensor& logits, const Tensor& given_targets, int64_t vocab_start,
                int64_t ignore_index, double z_loss, bool is_shard) {
    const LogitRows rows(op, logits);
    check_per_row(op, "targets", given_targets, logits, ScalarType::Long);
    const Tensor targets = dense(given_targets);
    Forward out{targets, targets, targets, targets, targets};
    with_floating(op, "logits", logits.scalar_type(), [&](auto of_logits) {
        using T = typename decltype(of_logits)::type;
        using A = Acc<T>;
        Results<A> results{};
        const auto add = [&](Tensor& tensor, A*& address) {
            tensor = new_like(targets, Of<A>::dtype);
            address = data<A>(tensor);
        };
        add(out.maximum, results.maximum);
        add(out.sumexp, results.sumexp);
        if (is_shard) {
            add(out.target_logit, results.target_logit);
        } else {
            add(out.losses, results.losses);
            add(out.lse, results.lse);
        }
        if (rows.count == 0) {
            return;
        }
        const Launch launch(logits);
        with_threads<kVector<T>>(rows.width, [&](auto n, auto threads) {
            STOKER_LAUNCH((cross_entropy_forward<T, n.value, threads.value>), static_cast<unsigned>(rows.count),
                          threads.value, 0, launch.stream(), data<T>(rows.tensor), rows.stride, rows.width,
                          Targets{data<int64_t>(targets), vocab_start, ignore_index}, static_cast<A>(z_loss), results);
        });
    });
    return out;
}

// losses, lse, maximum, sumexp
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(Tensor logits, Tensor targets, int64_t ignore_index,
                                                         double z_loss) {
    Forward out = forward("cross_entropy", logits, targets, 0, ignore_index, z_loss, false);
    return {out.losses, out.lse, out.maximum, out.sumexp};
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_stats(Tensor logits, Tensor targets, int64_t vocab_start) {
    Forward out = forward("cross_entropy_stats", logits, targets, vocab_start, 0, 0.0, true);
    return {out.maximum, out.sumexp, out.target_logit};
}

struct Backward {
    Tensor targets, lse, grad_losses;
    std::optional<Tensor> maximum, sumexp;
    int64_t vocab_start, ignore_index;
    double z_loss;
};

void backward(const Tensor& logits, const Backward& given, const LogitRows& rows, const Tensor& grad,
              int64_t grad_stride) {
    constexpr const char* op = "cross_entropy_grad";
    check_per_row(op, "targets", given.targets, logits, ScalarType::Long);
    const Tensor targets = dense(given.targets);
    with_floating(op, "logits", logits.scalar_type(), [&](auto of_logits) {
        using T = typename decltype(of_logits)::type;
        using A = Acc<T>;
        const auto checked = [&](const char* what, const Tensor& tensor) {
            check_per_row(op, what, tensor, logits, Of<A>::dtype);
            return dense(tensor);
        };
        const Tensor lse = checked("lse", given.lse);
        const std::optional<Tensor> maximum = given.maximum ? std::optional(checked("maximum", *given.maximum))
                                                            : std::nullopt;
        const std::optional<Tensor> sumexp = given.sumexp ? std::optional(checked("sumexp", *given.sumexp))
                                                          : std::nullopt;
        STOKER_CHECK(maximum.has_value() == sumexp.has_value(), op, ": expected both of maximum and sumexp, or none");
        check_per_row(op, "grad_losses", given.grad_losses, logits, Of<A>::dtype);
        const PerRow grad_losses(given.grad_losses);
        if (rows.count == 0) {
            return;
        }
        const Launch launch(logits);
        const T* from = data<T>(rows.tensor);
        const auto run = [&](auto n, auto threads) {
            STOKER_LAUNCH((cross_entropy_backward<T, n.value, threads.value>), static_cast<unsigned>(rows.count),
                          threads.value, 0, launch.stream(), from, data<T>(grad), rows.stride, grad_stride, rows.width,
                          Targets{data<int64_t>(targets), given.vocab_start, given.ignore_index}, data<A>(lse),
                          maximum ? data<A>(*maximum) : nullptr, sumexp ? data<A>(*sumexp) : nullptr,
                          data<A>(grad_losses.tensor), grad_losses.stride, static_cast<A>(given.z_loss));
        };
        if (are_alike<kVector<T>>(from, rows.stride, data<T>(grad), grad_stride)) {
            with_threads<kVector<T>>(rows.width, run);
        } else {
            run(std::integral_constant<int, 1>{}, std::integral_constant<int, kManyThreads>{});
        }
    });
}

Tensor cross_entropy_grad(Tensor logits, Tensor targets, Tensor lse, Tensor grad_losses, std::optional<Tensor> maximum,
                          std::optional<Tensor> sumexp, int64_t vocab_start, int64_t ignore_index, double z_loss) {
    const LogitRows rows("cross_entropy_grad", logits);
    Tensor grad = new_like(logits);
    backward(logits, {targets, lse, grad_losses, maximum, sumexp, vocab_start, ignore_index, z_loss}, rows, grad,
             rows.width);
    return grad;
}

void cross_entropy_grad_(Tensor logits, Tensor targets, Tensor lse, Tensor grad_losses, int64_t vocab_start,
                         int64_t ignore_index, double z_loss) {
    const LogitRows rows("cross_entropy_grad", logits);
    backward(logits, {targets, lse, grad_losses, std::nullopt, std::nullopt, vocab_start, ignore_index, z_loss}, rows,
             rows.tensor, rows.stride);
    if (rows.tensor.data_ptr() != logits.data_ptr()) {
        torch::stable::copy_(logits, rows.tensor);
    }
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def(
        "cross_entropy(Tensor logits, Tensor targets, int ignore_index, float z_loss) "
        "-> (Tensor, Tensor, Tensor, Tensor)");
    m.def("cross_entropy_stats(Tensor logits, Tensor targets, int vocab_start) -> (Tensor, Tensor, Tensor)");
    m.def(
        "cross_entropy_grad(Tensor logits, Tensor targets, Tensor lse, Tensor grad_losses, Tensor? maximum, "
        "Tensor? sumexp, int vocab_start, int ignore_index, float z_loss) -> Tensor");
    m.def(
        "cross_entropy_grad_(Tensor(a!) logits, Tensor targets, Tensor lse, Tensor grad_losses, int vocab_start, "
        "int ignore_index, float z_loss) -> ()");
}

STOKER_KERNELS(m) {
    m.impl("cross_entropy", TORCH_BOX(&stoker::cross_entropy));
    m.impl("cross_entropy_stats", TORCH_BOX(&stoker::cross_entropy_stats));
    m.impl("cross_entropy_grad", TORCH_BOX(&stoker::cross_entropy_grad));
    m.impl("cross_entropy_grad_", TORCH_BOX(&stoker::cross_entropy_grad_));
}
