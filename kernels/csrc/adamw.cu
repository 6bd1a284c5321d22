// The AdamW update of many tensors in one pass over memory, with what belongs to it: the factor of the gradients, and the
// narrow image of float32 masters or stochastic rounding of narrow weights.
//
// Every operation is one that IEEE 754 rounds correctly, and none is left to the compiler to contract: the result is the
// same to the last bit wherever an element lies, in whatever shard, on any device, and in the emulation.
#include "rounding.cuh"

namespace stoker {
namespace {

struct Numbers {
    Factor scale;
    float rest1, rest2;   // 1 - beta
    float rate;           // lr / (1 - beta1^step)
    float root;           // 1 / sqrt(1 - beta2^step)
    float eps, decay;     // decay: lr * weight_decay
};

// w is what is updated, in float32.
__device__ __forceinline__ void update(float& w, float g, float& m, float& v, float scale, const Numbers& c) {
    g = __fmul_rn(g, scale);
    m = __fmaf_rn(c.rest1, __fadd_rn(g, -m), m);
    const float square = __fmul_rn(g, g);
    const float mixed = __fmaf_rn(c.rest2, __fadd_rn(square, -v), v);
    v = mixed == mixed ? mixed : __fadd_rn(square, v);  // infinity stays: its difference to anything is NaN
    const float denominator = __fmaf_rn(__fsqrt_rn(v), c.root, c.eps);
    // Decay and step are added first: w, which is much larger, is rounded once.
    const float step = __fmaf_rn(c.decay, w, __fdiv_rn(__fmul_rn(c.rate, m), denominator));
    w = __fadd_rn(w, -step);
}

enum class Weights { plain, with_masters, rounded };

// P: the weights' dtype. Pointers: weights, gradients, averages, averages of squares, masters.
// claim: each_chunk<AdamW<.*>: 16-byte loads and stores
template <class P, class G, Weights kind>
struct AdamW {
    static constexpr int kPointers = kind == Weights::with_masters ? 5 : 4;
    static constexpr int kChunk = 8192;
    using Extra = std::conditional_t<kind == Weights::rounded, Place, Nothing>;
    using Wide = std::conditional_t<kind == Weights::rounded, P, float>;  // in which what is updated lies in memory
    Numbers numbers;

    template <int N>
    struct Packs {
        Pack<Wide, N> w;
        Pack<G, N> g;
        Pack<float, N> m, v;
    };

    template <class B>
    __device__ void operator()(const B& batch, const Chunk& chunk) const {
        constexpr int N = 4;  // neighbouring threads then read neighbouring 16 bytes of each float32 list
        P* params = at<P>(batch, 0, chunk);
        const G* grads = at<const G>(batch, 1, chunk);
        float* exp_avg = at<float>(batch, 2, chunk);
        float* exp_avg_sq = at<float>(batch, 3, chunk);
        Wide* updated = at<Wide>(batch, kind == Weights::with_masters ? 4 : 0, chunk);
        const float scale = numbers.scale.get();
        const bool aligned =
            fits<N>(params) && fits<N>(grads) && fits<N>(exp_avg) && fits<N>(exp_avg_sq) && fits<N>(updated);
        for_packs<N, 2>(
            chunk.numel, aligned,
            [&](auto n, int i) {
                return Packs<n.value>{load<Wide, n.value>(updated + i), load<G, n.value>(grads + i),
                                      load<float, n.value>(exp_avg + i), load<float, n.value>(exp_avg_sq + i)};
            },
            [&](auto packs, auto n, int i) {
                Pack<float, n.value> w;
#pragma unroll
                for (int k = 0; k < n.value; ++k) {
                    w[k] = widen<float>(packs.w[k]);
                    update(w[k], widen<float>(packs.g[k]), packs.m[k], packs.v[k], scale, numbers);
                }
                store<float, n.value>(exp_avg + i, packs.m);
                store<float, n.value>(exp_avg_sq + i, packs.v);
                if constexpr (kind == Weights::rounded) {
                    const auto words = rounding_words<n.value>(batch.extra[chunk.tensor], chunk.begin + i);
#pragma unroll
                    for (int k = 0; k < n.value; ++k) {
                        packs.w[k] = round_by(w[k], words[k]);
                    }
                    store<P, n.value>(params + i, packs.w);
                } else {
                    store<float, n.value>(updated + i, w);
                }
                if constexpr (kind == Weights::with_masters) {
                    Pack<P, n.value> image;
#pragma unroll
                    for (int k = 0; k < n.value; ++k) {
                        image[k] = narrow<P>(w[k]);
                    }
                    store<P, n.value>(params + i, image);
                }
            });
    }
};

struct Lists {
    const std::vector<Tensor>&params, &grads, &exp_avgs, &exp_avg_sqs, &masters;
    const std::vector<int64_t>& addresses;
};

void check(const Lists& lists) {
    constexpr const char* kOp = "adamw";
    const bool has_masters = !lists.masters.empty(), rounds = !lists.addresses.empty();
    check_lists(kOp, lists.params,
                {{"grads", &lists.grads}, {"exp_avgs", &lists.exp_avgs}, {"exp_avg_sqs", &lists.exp_avg_sqs}});
    if (has_masters) {
        check_lists(kOp, lists.params, {{"masters", &lists.masters}});
    }
    STOKER_CHECK(!has_masters || !rounds, kOp, ": masters and addresses for rounding exclude each other");
    for (size_t i = 0; i < lists.params.size(); ++i) {
        const auto wanted = [&](const char* name, const Tensor& tensor, ScalarType dtype) {
            STOKER_CHECK(tensor.scalar_type() == dtype, kOp, ": ", name, "[", i, "] is ", describe(tensor),
                         "; expected ", name_of(dtype));
        };
        wanted("exp_avgs", lists.exp_avgs[i], ScalarType::Float);
        wanted("exp_avg_sqs", lists.exp_avg_sqs[i], ScalarType::Float);
        if (has_masters) {
            wanted("masters", lists.masters[i], ScalarType::Float);
        } else {
            wanted("params", lists.params[i], rounds ? ScalarType::BFloat16 : ScalarType::Float);
        }
    }
}

// A list that is updated and one that is only read, contiguous.
struct Dense {
    explicit Dense(const Lists& lists)
        : params(lists.params), exp_avgs(lists.exp_avgs), exp_avg_sqs(lists.exp_avg_sqs), masters(lists.masters) {
        for (const Tensor& grad : lists.grads) {
            grads.push_back(dense(grad));
        }
    }
    Updated params, exp_avgs, exp_avg_sqs, masters;
    std::vector<Tensor> grads;
};

template <class P, class G, Weights kind>
void run(const Numbers& numbers, const Launch& launch, const Dense& dense, const std::vector<size_t>& group,
         const std::vector<Place>& places) {
    MultiTensor<AdamW<P, G, kind>> work({numbers}, launch);
    for (size_t i : group) {
        void *param = dense.params[i].data_ptr(), *grad = dense.grads[i].data_ptr();
        void *m = dense.exp_avgs[i].data_ptr(), *v = dense.exp_avg_sqs[i].data_ptr();
        const int64_t numel = dense.grads[i].numel();
        if constexpr (kind == Weights::with_masters) {
            work.add({param, grad, m, v, dense.masters[i].data_ptr()}, numel);
        } else if constexpr (kind == Weights::rounded) {
            work.add({param, grad, m, v}, numel, places[i]);
        } else {
            work.add({param, grad, m, v}, numel);
        }
    }
    work.flush();
}

void adamw(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
           std::vector<Tensor> exp_avg_sqs, std::vector<Tensor> masters, std::optional<Tensor> scale, double number,
           double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
           std::vector<int64_t> addresses) {
    const NoGraph no_graph;
    constexpr const char* kOp = "adamw";
    const Lists lists{params, grads, exp_avgs, exp_avg_sqs, masters, addresses};
    STOKER_CHECK(step >= 1, kOp, ": step ", step, "; the first is 1");
    check(lists);
    if (params.empty()) {
        return;
    }
    const double corrected1 = 1.0 - std::pow(beta1, static_cast<double>(step));
    const double corrected2 = 1.0 - std::pow(beta2, static_cast<double>(step));
    const Numbers numbers{factor_of(kOp, params, scale, number),
                          static_cast<float>(1.0 - beta1),
                          static_cast<float>(1.0 - beta2),
                          static_cast<float>(lr / corrected1),
                          static_cast<float>(1.0 / std::sqrt(corrected2)),
                          static_cast<float>(eps),
                          static_cast<float>(lr * weight_decay)};
    std::vector<Place> places;
    if (!addresses.empty()) {
        Places given(kOp, addresses);
        for (const Tensor& param : params) {
            places.push_back(given.next(param));
        }
        given.check_finished();
    }
    Dense dense(lists);
    const Launch launch(params[0]);
    by_key(
        params.size(), [&](size_t i) { return std::pair(params[i].scalar_type(), grads[i].scalar_type()); },
        [&](const std::vector<size_t>& group) {
            const size_t first = group[0];
            const std::string index = "[" + std::to_string(first) + "]";
            with_trained(kOp, "grads" + index, grads[first].scalar_type(), [&](auto of_grad) {
                using G = typename decltype(of_grad)::type;
                if (!places.empty()) {
                    return run<__nv_bfloat16, G, Weights::rounded>(numbers, launch, dense, group, places);
                }
                if (masters.empty()) {
                    return run<float, G, Weights::plain>(numbers, launch, dense, group, places);
                }
                with_trained(kOp, "params" + index, params[first].scalar_type(), [&](auto of_param) {
                    using P = typename decltype(of_param)::type;
                    run<P, G, Weights::with_masters>(numbers, launch, dense, group, places);
                });
            });
        });
    for (Updated* list : {&dense.params, &dense.exp_avgs, &dense.exp_avg_sqs, &dense.masters}) {
        list->finish();
    }
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def(
        "adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] masters, Tensor? scale, float number, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, int step, int[] addresses) -> ()");
}

STOKER_KERNELS(m) {
    m.impl("adamw", TORCH_BOX(&stoker::adamw));
}
