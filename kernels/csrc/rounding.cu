// Stochastic rounding of float32 tensors to bfloat16 ones, many at a time.
#include "rounding.cuh"

namespace stoker {
namespace {

struct Round {
    static constexpr int kPointers = 2;
    static constexpr int kChunk = 8192;
    using Extra = Place;

    template <class B>
    __device__ void operator()(const B& batch, const Chunk& chunk) const {
        constexpr int N = 8;
        auto* target = at<__nv_bfloat16>(batch, 0, chunk);
        const auto* value = at<const float>(batch, 1, chunk);
        const Place& place = batch.extra[chunk.tensor];
        for_packs<N, 1>(
            chunk.numel, fits<N>(target) && fits<N>(value),
            [&](auto n, int i) { return load<float, n.value>(value + i); },
            [&](const auto& wide, auto n, int i) {
                const auto words = rounding_words<n.value>(place, chunk.begin + i);
                Pack<__nv_bfloat16, n.value> out;
#pragma unroll
                for (int k = 0; k < n.value; ++k) {
                    out[k] = round_by(wide[k], words[k]);
                }
                store<__nv_bfloat16, n.value>(target + i, out);
            });
    }
};

void stochastic_round(std::vector<Tensor> given_targets, std::vector<Tensor> values, std::vector<int64_t> addresses) {
    const NoGraph no_graph;
    constexpr const char* kOp = "stochastic_round";
    check_lists(kOp, given_targets, {{"values", &values}});
    if (given_targets.empty()) {
        return;
    }
    for (size_t i = 0; i < values.size(); ++i) {
        STOKER_CHECK(given_targets[i].scalar_type() == ScalarType::BFloat16 &&
                         values[i].scalar_type() == ScalarType::Float && given_targets[i].dim() >= 1,
                     kOp, ": ", describe(values[i]), " to ", describe(given_targets[i]),
                     "; expected float32 to bfloat16, of at least one dimension");
    }
    Updated targets(given_targets);
    const Launch launch(targets[0]);
    MultiTensor<Round> work({}, launch);
    Places places(kOp, addresses);
    std::vector<Tensor> kept;  // until all is launched
    for (size_t i = 0; i < values.size(); ++i) {
        kept.push_back(dense(values[i]));
        const Place place = places.next(targets[i]);
        work.add({targets[i].data_ptr(), kept.back().data_ptr()}, values[i].numel(), place);
    }
    places.check_finished();
    work.flush();
    targets.finish();
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("stochastic_round(Tensor(a!)[] targets, Tensor[] values, int[] addresses) -> ()");
}

STOKER_KERNELS(m) {
    m.impl("stochastic_round", TORCH_BOX(&stoker::stochastic_round));
}
