// Many tensors at a time: multiplied in place by one factor, or copied into tensors of another dtype.
#include "multi_tensor.cuh"

namespace stoker {
namespace {

// claim: each_chunk<Scale<.*>: 16-byte loads and stores
template <class T>
struct Scale {
    static constexpr int kPointers = 1;
    static constexpr int kChunk = 16384;
    using Extra = Nothing;
    Factor factor;

    template <class B>
    __device__ void operator()(const B& batch, const Chunk& chunk) const {
        constexpr int N = kVector<T>;
        const float by = factor.get();
        T* x = at<T>(batch, 0, chunk);
        for_packs<N, 4>(
            chunk.numel, fits<N>(x), [&](auto n, int i) { return load<T, n.value>(x + i); },
            [&](auto pack, auto n, int i) {
#pragma unroll
                for (int k = 0; k < n.value; ++k) {
                    pack[k] = narrow<T>(widen<float>(pack[k]) * by);
                }
                store<T, n.value>(x + i, pack);
            });
    }
};

// claim: each_chunk<Copy<(float, float|bf16, bf16|half, half|bf16, half|half, bf16)> >: 16-byte loads and stores
template <class To, class From>
struct Copy {
    static constexpr int kPointers = 2;
    static constexpr int kChunk = 16384;
    using Extra = Nothing;

    template <class B>
    __device__ void operator()(const B& batch, const Chunk& chunk) const {
        constexpr int N = sizeof(To) > sizeof(From) ? kVector<To> : kVector<From>;
        To* target = at<To>(batch, 0, chunk);
        const From* source = at<const From>(batch, 1, chunk);
        for_packs<N, 4>(
            chunk.numel, fits<N>(target) && fits<N>(source),
            [&](auto n, int i) { return load<From, n.value>(source + i); },
            [&](const auto& pack, auto n, int i) {
                Pack<To, n.value> out;
#pragma unroll
                for (int k = 0; k < n.value; ++k) {
                    if constexpr (std::is_same_v<To, From>) {
                        out[k] = pack[k];
                    } else {
                        out[k] = narrow<To>(widen<float>(pack[k]));
                    }
                }
                store<To, n.value>(target + i, out);
            });
    }
};

void scale(std::vector<Tensor> given, std::optional<Tensor> factor, double number) {
    const NoGraph no_graph;
    constexpr const char* kOp = "scale";
    check_lists(kOp, given, {});
    if (given.empty()) {
        return;
    }
    Updated tensors(given);
    const Launch launch(given[0]);
    const Factor by = factor_of(kOp, given, factor, number);
    by_key(
        given.size(), [&](size_t i) { return given[i].scalar_type(); },
        [&](const std::vector<size_t>& group) {
            with_trained(kOp, "tensors[" + std::to_string(group[0]) + "]", given[group[0]].scalar_type(), [&](auto of) {
                MultiTensor<Scale<typename decltype(of)::type>> work({by}, launch);
                for (size_t i : group) {
                    work.add({tensors[i].data_ptr()}, given[i].numel());
                }
                work.flush();
            });
        });
    tensors.finish();
}

void cast_copy(std::vector<Tensor> given_targets, std::vector<Tensor> sources) {
    const NoGraph no_graph;
    constexpr const char* kOp = "cast_copy";
    check_lists(kOp, given_targets, {{"sources", &sources}});
    if (given_targets.empty()) {
        return;
    }
    for (Tensor& source : sources) {
        source = dense(source);
    }
    Updated targets(given_targets);
    const Launch launch(given_targets[0]);
    by_key(
        sources.size(), [&](size_t i) { return std::pair(targets[i].scalar_type(), sources[i].scalar_type()); },
        [&](const std::vector<size_t>& group) {
            const size_t first = group[0];
            const std::string index = "[" + std::to_string(first) + "]";
            with_trained(kOp, "targets" + index, targets[first].scalar_type(), [&](auto to) {
                with_trained(kOp, "sources" + index, sources[first].scalar_type(), [&](auto from) {
                    MultiTensor<Copy<typename decltype(to)::type, typename decltype(from)::type>> work({}, launch);
                    for (size_t i : group) {
                        work.add({targets[i].data_ptr(), sources[i].data_ptr()}, sources[i].numel());
                    }
                    work.flush();
                });
            });
        });
    targets.finish();
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("scale(Tensor(a!)[] tensors, Tensor? factor, float number) -> ()");
    m.def("cast_copy(Tensor(a!)[] targets, Tensor[] sources) -> ()");
}

STOKER_KERNELS(m) {
    m.impl("scale", TORCH_BOX(&stoker::scale));
    m.impl("cast_copy", TORCH_BOX(&stoker::cast_copy));
}
