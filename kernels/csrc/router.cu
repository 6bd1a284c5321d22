// The experts of each token: the k highest of E scores, lower expert first among equals, and their weights.
//
// A warp per token holds the row in registers, as numbers that order like the scores; each round takes the highest of all
// lanes, and only the lane that had it looks for its next. Not here: scores, and what happens to the tokens (permute.cu).
#include "numbers.cuh"
#include "reduce.cuh"
#include "tensors.h"

namespace stoker {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = kThreads / kWarpSize;  // of a block
constexpr int kMostExperts = 512;
constexpr int kMostChosen = kWarpSize;  // a lane keeps one choice

// Unsigned numbers in the order of the scores: both zeros alike, NaN highest. 0 is left for "none".
__device__ __forceinline__ uint32_t order_key(float value) {
    if (value != value) {
        return 0xffffffffu;
    }
    uint32_t bits;
    value = value == 0 ? 0.0f : value;
    memcpy(&bits, &value, sizeof(bits));
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

#ifdef STOKER_EMULATION
__device__ __forceinline__ uint64_t order_key(double value) {
    if (value != value) {
        return 0xffffffffffffffffull;
    }
    uint64_t bits;
    value = value == 0 ? 0.0 : value;
    memcpy(&bits, &value, sizeof(bits));
    return bits >> 63 != 0 ? ~bits : bits | 0x8000000000000000ull;
}
#endif

// Experts `lane`, `lane + 32`, ... are this lane's: neighbours read neighbours.
template <class T, class B, int kSlots>
__global__ void topk_forward(const T* __restrict__ scores, const B* __restrict__ bias, int64_t* __restrict__ choice,
                             T* __restrict__ weights, int64_t tokens, int experts, int k, bool normalize, T smallest,
                             T scale) {
    using Key = decltype(order_key(T{}));
    const int lane = threadIdx.x % kWarpSize;
    const int64_t token = int64_t{blockIdx.x} * kTokens + threadIdx.x / kWarpSize;
    if (token >= tokens) {
        return;  // a whole warp; no barrier follows
    }
    const T* row = scores + token * experts;
    Key keys[kSlots];
    // This lane's highest that is left, and where.
    Key best = 0;
    int best_slot = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
        const int expert = s * kWarpSize + lane;
        keys[s] = 0;
        if (expert < experts) {
            keys[s] = order_key(bias == nullptr ? row[expert] : row[expert] + static_cast<T>(bias[expert]));
        }
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
        if (keys[s] > best) {
            best = keys[s];
            best_slot = s;
        }
    }
    int mine = 0;  // the choice of round `lane`
    for (int round = 0; round < k; ++round) {
        const Key highest = over_warp<Largest>(best);
        const unsigned expert = best_slot * kWarpSize + lane;
        const unsigned winner = __reduce_min_sync(kFullWarp, best == highest ? expert : 0xffffffffu);
        if (lane == round) {
            mine = static_cast<int>(winner);
        }
        if (expert == winner) {
            const int taken = best_slot;
            best = 0;
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                keys[s] = s == taken ? 0 : keys[s];
                if (keys[s] > best) {
                    best = keys[s];
                    best_slot = s;
                }
            }
        }
    }
    T weight = lane < k ? row[mine] : T{0};
    if (normalize) {
        weight = weight / (over_warp<Sum>(weight) + smallest);
    }
    if (lane < k) {
        choice[token * k + lane] = mine;
        weights[token * k + lane] = weight * scale;
    }
}

// With p the normalised weights and S their sum before: d score = scale (g - sum g p) / S; without: scale g. Zero for the
// experts that were not chosen.
template <class T>
__global__ void topk_backward(const T* __restrict__ grad_weights, const T* __restrict__ scores,
                              const int64_t* __restrict__ choice, T* __restrict__ grad_scores, int64_t tokens,
                              int experts, int k, bool normalize, T smallest, T scale) {
    const int lane = threadIdx.x % kWarpSize;
    const int64_t token = int64_t{blockIdx.x} * kTokens + threadIdx.x / kWarpSize;
    if (token >= tokens) {
        return;
    }
    const int64_t begin = token * experts;
    const int64_t mine = lane < k ? choice[token * k + lane] : 0;
    T grad = lane < k ? grad_weights[token * k + lane] : T{0};
    if (normalize) {
        const T score = lane < k ? scores[begin + mine] : T{0};
        const T sum = over_warp<Sum>(score) + smallest;
        grad = (grad - over_warp<Sum>(grad * (score / sum))) / sum;
    }
    for (int expert = lane; expert < experts; expert += kWarpSize) {
        grad_scores[begin + expert] = 0;
    }
    __syncwarp();  // other lanes' zeros are in memory
    if (lane < k) {
        grad_scores[begin + mine] = grad * scale;
    }
}

void check(const Tensor& scores, int64_t k) {
    STOKER_CHECK(scores.dim() == 2, "moe_topk: scores are ", describe(scores), "; expected [tokens, experts]");
    STOKER_CHECK(scores.size(1) <= kMostExperts, "moe_topk: ", scores.size(1), " experts; this kernel has up to ",
                 kMostExperts);
    STOKER_CHECK(k >= 1 && k <= scores.size(1) && k <= kMostChosen, "moe_topk: k=", k, " of ", scores.size(1),
                 " experts; this kernel has up to ", kMostChosen);
}

// float32; in the emulated build float64 too.
template <class F>
void with_scores(ScalarType dtype, F&& function) {
#ifdef STOKER_EMULATION
    if (dtype == ScalarType::Double) {
        return function(Of<double>{});
    }
#endif
    STOKER_CHECK(dtype == ScalarType::Float, "moe_topk: scores are ", name_of(dtype), "; expected float32");
    function(Of<float>{});
}

template <class F>
void with_slots(int64_t experts, F&& function) {
    using std::integral_constant;
    if (experts <= 2 * kWarpSize) {
        return function(integral_constant<int, 2>{});
    }
    if (experts <= 4 * kWarpSize) {
        return function(integral_constant<int, 4>{});
    }
    if (experts <= 8 * kWarpSize) {
        return function(integral_constant<int, 8>{});
    }
    function(integral_constant<int, kMostExperts / kWarpSize>{});
}

unsigned blocks_for(int64_t tokens) {
    return static_cast<unsigned>((tokens + kTokens - 1) / kTokens);
}

std::tuple<Tensor, Tensor> moe_topk(Tensor given_scores, int64_t k, std::optional<Tensor> given_bias, bool normalize,
                                    double scale, double smallest) {
    check(given_scores, k);
    const Tensor scores = dense(given_scores);
    const Tensor bias = given_bias ? dense(*given_bias) : scores;
    const int64_t tokens = scores.size(0), experts = scores.size(1);
    if (given_bias) {
        check_same_device("moe_topk", scores, {&bias});
        STOKER_CHECK(bias.dim() == 1 && bias.size(0) == experts, "moe_topk: bias is ", describe(bias), ", scores are ",
                     describe(scores), "; expected one per expert");
    }
    Tensor choice = new_tensor(scores, {tokens, k}, ScalarType::Long);
    Tensor weights = new_tensor(scores, {tokens, k}, scores.scalar_type());
    with_scores(scores.scalar_type(), [&](auto of_scores) {
        using T = typename decltype(of_scores)::type;
        with_parameter<T>("moe_topk", "bias", bias.scalar_type(), [&](auto of_bias) {
            using B = typename decltype(of_bias)::type;
            if (tokens == 0) {
                return;
            }
            const Launch launch(scores);
            with_slots(experts, [&](auto slots) {
                STOKER_LAUNCH((topk_forward<T, B, slots.value>), blocks_for(tokens), kThreads, 0, launch.stream(),
                              data<T>(scores), given_bias ? data<B>(bias) : static_cast<B*>(nullptr),
                              data<int64_t>(choice), data<T>(weights), tokens, static_cast<int>(experts),
                              static_cast<int>(k), normalize, static_cast<T>(smallest), static_cast<T>(scale));
            });
        });
    });
    return {choice, weights};
}

Tensor moe_topk_grad(Tensor given_grad_weights, Tensor given_scores, Tensor given_choice, bool normalize, double scale,
                     double smallest) {
    STOKER_CHECK(given_choice.dim() == 2 && given_choice.scalar_type() == ScalarType::Long, "moe_topk: choice is ",
                 describe(given_choice), "; expected what the forward pass returned");
    check(given_scores, given_choice.size(1));
    check_same_device("moe_topk", given_scores, {&given_choice, &given_grad_weights});
    const Tensor scores = dense(given_scores), choice = dense(given_choice), grad_weights = dense(given_grad_weights);
    const int64_t tokens = scores.size(0);
    STOKER_CHECK(same_shape(grad_weights, choice) && choice.size(0) == tokens &&
                     grad_weights.scalar_type() == scores.scalar_type(),
                 "moe_topk: gradient is ", describe(grad_weights), ", scores are ", describe(scores));
    Tensor grad_scores = new_like(scores);
    with_scores(scores.scalar_type(), [&](auto of_scores) {
        using T = typename decltype(of_scores)::type;
        if (tokens == 0) {
            return;
        }
        const Launch launch(scores);
        STOKER_LAUNCH((topk_backward<T>), blocks_for(tokens), kThreads, 0, launch.stream(), data<T>(grad_weights),
                      data<T>(scores), data<int64_t>(choice), data<T>(grad_scores), tokens,
                      static_cast<int>(scores.size(1)), static_cast<int>(choice.size(1)), normalize,
                      static_cast<T>(smallest), static_cast<T>(scale));
    });
    return grad_scores;
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("moe_topk(Tensor scores, int k, Tensor? bias, bool normalize, float scale, float smallest) -> (Tensor, Tensor)");
    m.def("moe_topk_grad(Tensor grad_weights, Tensor scores, Tensor choice, bool normalize, float scale, float smallest) -> Tensor");
}

STOKER_KERNELS(m) {
    m.impl("moe_topk", TORCH_BOX(&stoker::moe_topk));
    m.impl("moe_topk_grad", TORCH_BOX(&stoker::moe_topk_grad));
}
