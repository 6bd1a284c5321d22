// The norm of many tensors taken together: a sum of squares per chunk, then the sum of those, always in the same order.
//
// A thread squares and adds a few dozen elements in float32; from there on sums are float64, of which there are so few
// that they cost nothing.
#include "multi_tensor.cuh"
#include "reduce.cuh"

namespace stoker {
namespace {

constexpr int kFinalThreads = 1024;

// claim: each_chunk<SumOfSquares<.*>: 16-byte loads
template <class T>
struct SumOfSquares {
    static constexpr int kPointers = 1;
    static constexpr int kChunk = 32768;
    using Extra = Nothing;
    double* partial;  // of this launch, one per block

    void launched(int64_t blocks) { partial += blocks; }

    template <class B>
    __device__ void operator()(const B& batch, const Chunk& chunk) const {
        constexpr int N = kVector<T>;
        constexpr int kAhead = 4;
        const T* x = at<const T>(batch, 0, chunk);
        double sum = 0;
        float run = 0;
        int added = 0;
        for_packs<N, kAhead>(
            chunk.numel, fits<N>(x), [&](auto n, int i) { return load<T, n.value>(x + i); },
            [&](const auto& pack, auto n, int) {
#pragma unroll
                for (int k = 0; k < n.value; ++k) {
                    const float value = widen<float>(pack[k]);
                    run = __fmaf_rn(value, value, run);
                }
                if (++added % kAhead == 0) {
                    sum += run;
                    run = 0;
                }
            });
        sum = over_block<Sum, kListThreads>(sum + run);
        if (threadIdx.x == 0) {
            partial[blockIdx.x] = sum;
        }
    }
};

__global__ void __launch_bounds__(kFinalThreads) sum_partials(const double* __restrict__ partial, int64_t count,
                                                              float* __restrict__ out, bool squared) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += kFinalThreads) {
        sum += partial[i];
    }
    sum = over_block<Sum, kFinalThreads>(sum);
    if (threadIdx.x == 0) {
        *out = static_cast<float>(squared ? sum : sqrt(sum));
    }
}

Tensor l2norm(std::vector<Tensor> tensors, bool squared) {
    const NoGraph no_graph;
    constexpr const char* kOp = "l2norm";
    STOKER_CHECK(!tensors.empty(), kOp, ": no tensors");
    check_lists(kOp, tensors, {});
    constexpr int64_t kChunk = SumOfSquares<float>::kChunk;
    int64_t chunks = 0;
    for (Tensor& tensor : tensors) {
        tensor = dense(tensor);
        chunks += (tensor.numel() + kChunk - 1) / kChunk;
    }
    const Launch launch(tensors[0]);
    const Tensor partial = new_tensor(tensors[0], {chunks}, ScalarType::Double);
    Tensor out = new_tensor(tensors[0], {}, ScalarType::Float);
    double* next = data<double>(partial);
    by_key(
        tensors.size(), [&](size_t i) { return tensors[i].scalar_type(); },
        [&](const std::vector<size_t>& group) {
            with_trained(kOp, "tensors[" + std::to_string(group[0]) + "]", tensors[group[0]].scalar_type(), [&](auto of) {
                MultiTensor<SumOfSquares<typename decltype(of)::type>> work({next}, launch);
                for (size_t i : group) {
                    work.add({tensors[i].data_ptr()}, tensors[i].numel());
                    next += (tensors[i].numel() + kChunk - 1) / kChunk;
                }
                work.flush();
            });
        });
    STOKER_LAUNCH((sum_partials), 1, kFinalThreads, 0, launch.stream(), data<double>(partial), chunks, data<float>(out),
                  squared);
    return out;
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("l2norm(Tensor[] tensors, bool squared) -> Tensor");
}

STOKER_KERNELS(m) {
    m.impl("l2norm", TORCH_BOX(&stoker::l2norm));
}
