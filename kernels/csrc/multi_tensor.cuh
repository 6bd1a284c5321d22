// One launch over many tensors: a block gets a chunk of one of them. Pointers and lengths travel as a kernel's argument,
// which the launch copies: nothing is allocated, nothing has to stay alive, and a captured graph has its own.
// Owns which block does what, and how a chunk is read. Not here: what is computed (an operation, see below).
#pragma once

#include <type_traits>

#include "numbers.cuh"
#include "tensors.h"

namespace stoker {

constexpr int kListThreads = 256;

struct Nothing {};

// At most 4 KB together with the operation, which is what every driver takes. P: tensors of one length that belong
// together (a weight, its gradient, ...). X: more about each of them.
template <int P, class X>
struct Batch {
    static constexpr int kEach = P * 8 + 8 + static_cast<int>(sizeof(X)) + 4;
    static constexpr int kTensors = 3900 / kEach;
    void* address[P][kTensors];
    int64_t numel[kTensors];
    X extra[kTensors];
    uint32_t first[kTensors];  // block that has the tensor's first chunk
    int count;
};

// One chunk: `numel` elements from `begin` on of the `tensor`-th entry of a batch.
struct Chunk {
    int tensor;
    int64_t begin;
    int numel;
};

// An operation is a struct with kPointers, kChunk, Extra, and a const operator()(batch, chunk) for all threads of a block.
// A chunk is a multiple of any pack of elements, so that it is aligned where its tensor is.
template <class Op>
using BatchOf = Batch<Op::kPointers, typename Op::Extra>;

template <class Op>
__global__ void __launch_bounds__(kListThreads) each_chunk(const __grid_constant__ BatchOf<Op> batch,
                                                           const __grid_constant__ Op op) {
    int low = 0;
    int high = batch.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (batch.first[middle] <= blockIdx.x ? low : high) = middle;
    }
    const int64_t begin = int64_t{blockIdx.x - batch.first[low]} * Op::kChunk;
    const int64_t rest = batch.numel[low] - begin;
    op(batch, Chunk{low, begin, rest < Op::kChunk ? static_cast<int>(rest) : Op::kChunk});
}

template <class T, class B>
__device__ __forceinline__ T* at(const B& batch, int list, const Chunk& chunk) {
    return static_cast<T*>(batch.address[list][chunk.tensor]) + chunk.begin;
}

// Whether N elements at once can be read from there.
template <int N, class T>
__device__ __forceinline__ bool fits(const T* address) {
    constexpr int kBytes = N * static_cast<int>(sizeof(T)) < 16 ? N * static_cast<int>(sizeof(T)) : 16;
    return reinterpret_cast<uintptr_t>(address) % kBytes == 0;
}

// For all elements of a chunk: packs = read(n, i) where n.value elements begin at i, then write(packs, n, i). kAhead packs
// are read before the first is written, so that enough bytes are on their way. N at once where `aligned`, then the rest.
template <int N, int kAhead, class Read, class Write>
__device__ __forceinline__ void for_packs(int numel, bool aligned, Read&& read, Write&& write) {
    const auto walk = [&](auto n, int begin, int packs) {
        for (int p = threadIdx.x; p < packs; p += kListThreads * kAhead) {
            decltype(read(n, 0)) kept[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                if (p + k * kListThreads < packs) {
                    kept[k] = read(n, begin + (p + k * kListThreads) * n.value);
                }
            }
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                if (p + k * kListThreads < packs) {
                    write(kept[k], n, begin + (p + k * kListThreads) * n.value);
                }
            }
        }
    };
    const int packs = aligned ? numel / N : 0;
    walk(std::integral_constant<int, N>{}, 0, packs);
    walk(std::integral_constant<int, 1>{}, packs * N, numel - packs * N);
}

// ---- on the host

// Collects tensors and launches when an argument is full, and at flush().
template <class Op>
class MultiTensor {
  public:
    // An operation with launched(blocks) is told of each launch, after it.
    MultiTensor(Op op, const Launch& launch) : op_(op), launch_(launch) {}

    // All of one length and of the operation's dtypes. Empty ones are skipped.
    void add(std::initializer_list<void*> addresses, int64_t numel, const typename Op::Extra& extra = {}) {
        static_assert(sizeof(BatchOf<Op>) + sizeof(Op) <= 4096, "more than a kernel's argument may have");
        static_assert(Op::kChunk % kListThreads == 0);
        const int64_t chunks = (numel + Op::kChunk - 1) / Op::kChunk;
        if (chunks == 0) {
            return;
        }
        if (batch_.count == BatchOf<Op>::kTensors || blocks_ + chunks > INT32_MAX) {
            flush();
        }
        const int i = batch_.count++;
        int list = 0;
        for (void* address : addresses) {
            batch_.address[list++][i] = address;
        }
        batch_.numel[i] = numel;
        batch_.extra[i] = extra;
        batch_.first[i] = static_cast<uint32_t>(blocks_);
        blocks_ += chunks;
    }

    void flush() {
        if (batch_.count == 0) {
            return;
        }
        STOKER_LAUNCH((each_chunk<Op>), static_cast<unsigned>(blocks_), kListThreads, 0, launch_.stream(), batch_, op_);
        if constexpr (requires { op_.launched(blocks_); }) {
            op_.launched(blocks_);
        }
        batch_.count = 0;
        blocks_ = 0;
    }

  private:
    Op op_;
    const Launch& launch_;
    BatchOf<Op> batch_{};
    int64_t blocks_ = 0;
};

// While it lives, torch's own operations record no graph and take leaves as they are: autograd passes over these ops.
class NoGraph {
  public:
    NoGraph() : before_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
    ~NoGraph() { aoti_torch_grad_mode_set_enabled(before_); }
    NoGraph(const NoGraph&) = delete;
    NoGraph& operator=(const NoGraph&) = delete;

  private:
    bool before_;
};

// A list that is updated in place: contiguous, and what was not gets its values back at finish().
class Updated {
  public:
    explicit Updated(const std::vector<Tensor>& given) : given_(given) {
        for (const Tensor& tensor : given) {
            dense_.push_back(dense(tensor));
        }
    }
    const Tensor& operator[](size_t i) const { return dense_[i]; }
    void finish() {
        for (size_t i = 0; i < dense_.size(); ++i) {
            if (!given_[i].is_contiguous()) {
                torch::stable::copy_(given_[i], dense_[i]);
            }
        }
    }

  private:
    std::vector<Tensor> given_;
    std::vector<Tensor> dense_;
};

// All tensors of all lists on one device, the i-th of each list of one shape.
inline void check_lists(const char* op, const std::vector<Tensor>& first,
                        std::initializer_list<std::pair<const char*, const std::vector<Tensor>*>> others) {
    for (const auto& [name, list] : others) {
        STOKER_CHECK(list->size() == first.size(), op, ": ", list->size(), " ", name, " for ", first.size(), " tensors");
    }
    for (size_t i = 0; i < first.size(); ++i) {
        check_same_device(op, first[0], {&first[i]});
        for (const auto& [name, list] : others) {
            check_same_device(op, first[0], {&(*list)[i]});
            STOKER_CHECK(same_shape((*list)[i], first[i]), op, ": ", name, "[", i, "] is ", describe((*list)[i]),
                         " beside ", describe(first[i]), "; expected the same shape");
        }
    }
}

// A factor that is a number, or a number on the device that nobody waits for: `tensor`, float32 with one element.
struct Factor {
    const float* address;
    float value;
    __device__ __forceinline__ float get() const { return address == nullptr ? value : *address; }
};

inline Factor factor_of(const char* op, const std::vector<Tensor>& beside, const std::optional<Tensor>& tensor,
                        double value) {
    if (!tensor) {
        return {nullptr, static_cast<float>(value)};
    }
    check_same_device(op, beside[0], {&*tensor});
    STOKER_CHECK(tensor->scalar_type() == ScalarType::Float && tensor->numel() == 1, op, ": the factor is ",
                 describe(*tensor), "; expected one float32");
    return {data<float>(*tensor), 0.0f};
}

// Calls function(indices) for each group of tensors whose key(i) is equal; groups in the order of their first tensors.
template <class Key, class F>
void by_key(size_t count, Key&& key, F&& function) {
    std::vector<decltype(key(size_t{0}))> keys;
    std::vector<std::vector<size_t>> groups;
    for (size_t i = 0; i < count; ++i) {
        const auto mine = key(i);
        size_t g = 0;
        while (g < keys.size() && keys[g] != mine) {
            ++g;
        }
        if (g == keys.size()) {
            keys.push_back(mine);
            groups.emplace_back();
        }
        groups[g].push_back(i);
    }
    for (const auto& group : groups) {
        function(group);
    }
}

// Calls function(Of<T>{}); float64 is refused, with what takes it instead.
template <class F>
void with_trained(const char* op, const std::string& what, ScalarType dtype, F&& function) {
    switch (dtype) {
        case ScalarType::Float: return function(Of<float>{});
        case ScalarType::BFloat16: return function(Of<__nv_bfloat16>{});
        case ScalarType::Half: return function(Of<__half>{});
        default: refuse(op, ": ", what, " is ", name_of(dtype), "; expected float32, bfloat16 or float16");
    }
}

}  // namespace stoker
