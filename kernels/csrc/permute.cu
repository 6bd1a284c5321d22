// Rows of tokens in the order of their experts, and back: a counting sort, a copy of rows, a weighted sum and its gradient.
//
// The sort counts in whole numbers, so its order is always the same; rows are read once per token and moved in pieces of
// 16 bytes where they fit. A place that is not below the number of rows is that of a copy which is not moved.
//
// claim: copy_rows<int4>: 16-byte loads and stores
// claim: sum_copies<.*, [48]>: 16-byte loads and stores
// claim: unpermute_backward<.*, [48], 128>: 16-byte loads and stores
#include "numbers.cuh"
#include "reduce.cuh"
#include "tensors.h"

namespace stoker {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kItems = 256;                // consecutive choices of a warp
constexpr int kChunk = kWarps * kItems;  // of a block
constexpr int kMostBins = 1024;            // experts, and the one for none
constexpr int kFlight = 4;                 // rows that a thread of the sum has under way

// Anything but an expert's number is none: nothing is written out of bounds.
__device__ __forceinline__ int bin_of(int64_t expert, int experts) {
    return expert >= 0 && expert < experts ? static_cast<int>(expert) : experts;
}

// counts[block, bin]: of the block's chunk.
__global__ void sort_count(const int64_t* __restrict__ choice, int64_t* __restrict__ counts, int64_t items, int experts) {
    STOKER_DYNAMIC_SHARED(int, of_bin);
    for (int bin = threadIdx.x; bin <= experts; bin += kThreads) {
        of_bin[bin] = 0;
    }
    __syncthreads();
    const int64_t begin = int64_t{blockIdx.x} * kChunk;
    for (int i = threadIdx.x; i < kChunk; i += kThreads) {
        if (begin + i < items) {
            atomicAdd(&of_bin[bin_of(choice[begin + i], experts)], 1);
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin <= experts; bin += kThreads) {
        counts[int64_t{blockIdx.x} * (experts + 1) + bin] = of_bin[bin];
    }
}

// counts[block, bin] becomes the place of the block's first item of the bin; totals[bin]: items of an expert. One block of
// kMostBins threads, one per bin.
__global__ void __launch_bounds__(kMostBins) sort_scan(int64_t* __restrict__ counts, int64_t* __restrict__ totals,
                                                       int64_t blocks, int experts) {
    __shared__ int64_t of_warp[kMostBins / kWarpSize];
    const int bin = threadIdx.x, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    int64_t total = 0;
    if (bin <= experts) {
#pragma unroll 8
        for (int64_t b = 0; b < blocks; ++b) {
            total += counts[b * (experts + 1) + bin];
        }
    }
    int64_t upto = total;  // items of this bin and of those before it in the warp
#pragma unroll
    for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
        const int64_t other = __shfl_up_sync(kFullWarp, upto, lanes);
        upto += lane >= lanes ? other : 0;
    }
    if (lane == kWarpSize - 1) {
        of_warp[warp] = upto;
    }
    __syncthreads();
    int64_t place = upto - total;
    for (int w = 0; w < warp; ++w) {
        place += of_warp[w];
    }
    if (bin > experts) {
        return;
    }
    if (bin < experts) {
        totals[bin] = total;
    }
#pragma unroll 8
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t count = counts[b * (experts + 1) + bin];
        counts[b * (experts + 1) + bin] = place;
        place += count;
    }
}

// Each warp counts its own items, takes its share of the block's places, and gives them out 32 items at a time, in order.
__global__ void sort_place(const int64_t* __restrict__ choice, const int64_t* __restrict__ first,
                           int64_t* __restrict__ copies, int64_t* __restrict__ places, int64_t items, int experts) {
    STOKER_DYNAMIC_SHARED(int, shared);
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, bins = experts + 1;
    int* next = shared + warp * bins;  // of this warp and bin: place of the next item, counted from the block's first
    for (int i = threadIdx.x; i < kWarps * bins; i += kThreads) {
        shared[i] = 0;
    }
    __syncthreads();
    const int64_t begin = int64_t{blockIdx.x} * kChunk + warp * kItems;
    for (int i = lane; i < kItems; i += kWarpSize) {
        if (begin + i < items) {
            atomicAdd(&next[bin_of(choice[begin + i], experts)], 1);
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
        int before = 0;
        for (int w = 0; w < kWarps; ++w) {
            const int count = shared[w * bins + bin];
            shared[w * bins + bin] = before;
            before += count;
        }
    }
    __syncthreads();
    const int64_t* of_block = first + int64_t{blockIdx.x} * bins;
    for (int i = lane; i < kItems; i += kWarpSize) {
        const int64_t item = begin + i;
        // Beyond the end: a bin of its own, which nothing is taken from.
        const int bin = item < items ? bin_of(choice[item], experts) : bins;
        const unsigned same = __match_any_sync(kFullWarp, static_cast<unsigned>(bin));
        const int rank = __popc(same & ((1u << lane) - 1));
        const int base = item < items ? next[bin] : 0;
        __syncwarp();  // all have read
        if (item < items) {
            const int64_t place = of_block[bin] + base + rank;
            copies[place] = item;
            places[item] = place;
            if (rank == 0) {
                next[bin] = base + __popc(same);
            }
        }
        __syncwarp();
    }
}

// out[places[t, j]] = x[t]; a thread has one piece of a row.
template <class U>
__global__ void copy_rows(const U* __restrict__ x, const int64_t* __restrict__ places, U* __restrict__ out,
                          int64_t pieces_in_all, int64_t pieces, int k, int64_t rows) {
    const int64_t stride = int64_t{gridDim.x} * blockDim.x;
    for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < pieces_in_all; at += stride) {
        const int64_t token = at / pieces, piece = at - token * pieces;
        const U value = x[at];
        for (int j = 0; j < k; ++j) {
            const int64_t place = __ldg(places + token * k + j);
            if (place >= 0 && place < rows) {
                out[place * pieces + piece] = value;
            }
        }
    }
}

// y[t] = sum over j of weights[t, j] rows[places[t, j]], in the order of j; without weights each is 1.
template <class T, int N>
__global__ void sum_copies(const T* __restrict__ rows, const int64_t* __restrict__ places,
                           const Acc<T>* __restrict__ weights, T* __restrict__ y, int64_t packs_in_all, int64_t packs,
                           int k, int64_t count) {
    using A = Acc<T>;
    const int64_t stride = int64_t{gridDim.x} * blockDim.x;
    for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < packs_in_all; at += stride) {
        const int64_t token = at / packs, pack = at - token * packs;
        A sums[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            sums[i] = 0;
        }
        for (int begin = 0; begin < k; begin += kFlight) {
            Pack<T, N> copy[kFlight];
            A weight[kFlight];
            bool is_there[kFlight];
#pragma unroll
            for (int f = 0; f < kFlight; ++f) {
                const int64_t place = begin + f < k ? __ldg(places + token * k + begin + f) : -1;
                is_there[f] = place >= 0 && place < count;
                if (is_there[f]) {
                    copy[f] = load<T, N>(rows + (place * packs + pack) * N);
                    weight[f] = weights == nullptr ? A{1} : __ldg(weights + token * k + begin + f);
                }
            }
#pragma unroll
            for (int f = 0; f < kFlight; ++f) {
                if (is_there[f]) {
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        sums[i] += widen<A>(copy[f][i]) * weight[f];
                    }
                }
            }
        }
        Pack<T, N> out;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            out[i] = narrow<T>(sums[i]);
        }
        store<T, N>(y + at * N, out);
    }
}

// Like `store`, which the compiler takes apart where it cannot see that addresses differ.
template <class T, int N>
__device__ __forceinline__ void store_whole(T* address, const Pack<T, N>& pack) {
    if constexpr (N * sizeof(T) == sizeof(int4)) {
        int4 unit;
        memcpy(&unit, &pack, sizeof(unit));
        __stcs(reinterpret_cast<int4*>(address), unit);
    } else {
        store<T, N>(address, pack);
    }
}

// grad_rows[places[t, j]] = weights[t, j] grad_y[t]; grad_weights[t, j] = grad_y[t] . rows[places[t, j]]. A block per
// token: it keeps the gradient in registers as far as it fits. Dynamic shared memory: [warps, k].
template <class T, int N, int kBlock>
__global__ void unpermute_backward(const T* __restrict__ grad_y, const T* __restrict__ rows,
                                   const int64_t* __restrict__ places, const Acc<T>* __restrict__ weights,
                                   T* __restrict__ grad_rows, Acc<T>* __restrict__ grad_weights, int packs, int k,
                                   int64_t count) {
    using A = Acc<T>;
    constexpr int kKept = 4;
    STOKER_DYNAMIC_SHARED(A, dots);
    const int64_t token = blockIdx.x;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const T* grad = grad_y + token * packs * N;
    Pack<T, N> kept[kKept];
#pragma unroll
    for (int s = 0; s < kKept; ++s) {
        const int p = threadIdx.x + s * kBlock;
        if (p < packs) {
            kept[s] = load<T, N>(grad + int64_t{p} * N);
        }
    }
    for (int j = 0; j < k; ++j) {
        const int64_t place = __ldg(places + token * k + j);
        A dot = 0;
        if (place >= 0 && place < count) {  // alike in the whole block
            const A weight = __ldg(weights + token * k + j);
            const int64_t row = place * packs * N;
            const auto take = [&](Pack<T, N> g, int p) {
                const Pack<T, N> r = load<T, N>(rows + row + int64_t{p} * N);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const A wide = widen<A>(g[i]);
                    dot += wide * widen<A>(r[i]);
                    g[i] = narrow<T>(wide * weight);
                }
                store_whole<T, N>(grad_rows + row + int64_t{p} * N, g);
            };
#pragma unroll
            for (int s = 0; s < kKept; ++s) {
                const int p = threadIdx.x + s * kBlock;
                if (p < packs) {
                    take(kept[s], p);
                }
            }
            for (int p = threadIdx.x + kKept * kBlock; p < packs; p += kBlock) {
                take(load<T, N>(grad + int64_t{p} * N), p);
            }
        }
        dot = over_warp<Sum>(dot);
        if (lane == 0) {
            dots[warp * k + j] = dot;
        }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < k; j += kBlock) {
        A dot = 0;
        for (int w = 0; w < kBlock / kWarpSize; ++w) {
            dot += dots[w * k + j];
        }
        grad_weights[token * k + j] = dot;
    }
}

constexpr int kPerMultiprocessor = 2048 / kThreads;

unsigned blocks_for(int64_t threads, const Launch& launch) {
    return grid_for((threads + kThreads - 1) / kThreads, launch.device(), 4 * kPerMultiprocessor);
}

void check_places(const char* op, const Tensor& places, int64_t tokens, const Tensor& rows) {
    STOKER_CHECK(places.dim() == 2 && places.scalar_type() == ScalarType::Long, op, ": places are ", describe(places),
                 "; expected int64 [tokens, k]");
    STOKER_CHECK(places.size(0) == tokens && places.size(1) <= INT32_MAX, op, ": places are ", describe(places), " for ",
                 tokens, " tokens");
    check_same_device(op, rows, {&places});
}

std::tuple<Tensor, Tensor, Tensor> moe_sort(Tensor given_choice, int64_t experts) {
    STOKER_CHECK(given_choice.dim() == 2 && given_choice.scalar_type() == ScalarType::Long, "moe_sort: choice is ",
                 describe(given_choice), "; expected int64 [tokens, k]");
    STOKER_CHECK(experts >= 1 && experts < kMostBins, "moe_sort: ", experts, " experts; this kernel has 1 to ",
                 kMostBins - 1);
    const Tensor choice = dense(given_choice);
    const int64_t items = choice.numel(), bins = experts + 1;
    Tensor copies = new_tensor(choice, {items}, ScalarType::Long), places = new_like(choice);
    Tensor totals = new_tensor(choice, {experts}, ScalarType::Long);
    if (items == 0) {
        torch::stable::zero_(totals);
        return {copies, places, totals};
    }
    const Launch launch(choice);
    const int64_t blocks = (items + kChunk - 1) / kChunk;
    STOKER_CHECK(blocks <= INT32_MAX, "moe_sort: ", items, " choices; this kernel has up to 2^42");
    const Tensor counts = new_tensor(choice, {blocks, bins}, ScalarType::Long);
    const auto grid = static_cast<unsigned>(blocks);
    const auto bytes = static_cast<size_t>(bins) * sizeof(int);
    const int last = static_cast<int>(experts);
    STOKER_LAUNCH((sort_count), grid, kThreads, bytes, launch.stream(), data<int64_t>(choice), data<int64_t>(counts),
                  items, last);
    STOKER_LAUNCH((sort_scan), 1u, kMostBins, 0, launch.stream(), data<int64_t>(counts), data<int64_t>(totals), blocks,
                  last);
    STOKER_LAUNCH((sort_place), grid, kThreads, kWarps * bytes, launch.stream(), data<int64_t>(choice),
                  data<int64_t>(counts), data<int64_t>(copies), data<int64_t>(places), items, last);
    return {copies, places, totals};
}

template <class U>
void launch_copy(const Tensor& x, const Tensor& places, const Tensor& out, int64_t pieces) {
    const Launch launch(x);
    const int64_t all = x.size(0) * pieces;
    STOKER_LAUNCH((copy_rows<U>), blocks_for(all, launch), kThreads, 0, launch.stream(), data<U>(x),
                  data<int64_t>(places), data<U>(out), all, pieces, static_cast<int>(places.size(1)), out.size(0));
}

Tensor moe_permute(Tensor given_x, Tensor given_places, int64_t rows) {
    STOKER_CHECK(given_x.dim() == 2, "moe_permute: x is ", describe(given_x), "; expected [tokens, features]");
    check_places("moe_permute", given_places, given_x.size(0), given_x);
    STOKER_CHECK(rows >= 0 && rows <= given_places.numel(), "moe_permute: ", rows, " copies of ", given_places.numel(),
                 " choices");
    const Tensor x = dense(given_x), places = dense(given_places);
    Tensor out = new_tensor(x, {rows, x.size(1)}, x.scalar_type());
    if (out.numel() == 0) {
        return out;
    }
    const auto size = static_cast<int64_t>(x.element_size());
    const int64_t bytes = x.size(1) * size;
    if (is_aligned<16>(bytes, data<char>(x), data<char>(out))) {
        launch_copy<int4>(x, places, out, bytes / 16);
    } else if (size == 8) {
        launch_copy<int64_t>(x, places, out, x.size(1));
    } else if (size == 4) {
        launch_copy<int32_t>(x, places, out, x.size(1));
    } else if (size == 2) {
        launch_copy<int16_t>(x, places, out, x.size(1));
    } else {
        launch_copy<int8_t>(x, places, out, bytes);
    }
    return out;
}

Tensor moe_unpermute(Tensor given_rows, Tensor given_places, std::optional<Tensor> given_weights) {
    STOKER_CHECK(given_rows.dim() == 2, "moe_unpermute: rows are ", describe(given_rows),
                 "; expected [rows, features]");
    check_places("moe_unpermute", given_places, given_places.size(0), given_rows);
    const Tensor rows = dense(given_rows), places = dense(given_places);
    const Tensor weights = given_weights ? dense(*given_weights) : places;
    check_same_device("moe_unpermute", rows, {&weights});
    const int64_t tokens = places.size(0), width = rows.size(1);
    Tensor y = new_tensor(rows, {tokens, width}, rows.scalar_type());
    with_floating("moe_unpermute", "rows", rows.scalar_type(), [&](auto of_rows) {
        using T = typename decltype(of_rows)::type;
        using A = Acc<T>;
        STOKER_CHECK(!given_weights || (weights.scalar_type() == Of<A>::dtype && same_shape(weights, places)),
                     "moe_unpermute: weights are ", describe(weights), "; expected ", name_of(Of<A>::dtype),
                     ", one per place");
        if (tokens == 0 || width == 0) {
            return;
        }
        const Launch launch(rows);
        const auto run = [&](auto n) {
            const int64_t packs = width / n.value;
            STOKER_LAUNCH((sum_copies<T, n.value>), blocks_for(tokens * packs, launch), kThreads, 0, launch.stream(),
                          data<T>(rows), data<int64_t>(places), given_weights ? data<A>(weights) : static_cast<A*>(nullptr),
                          data<T>(y), tokens * packs, packs, static_cast<int>(places.size(1)), rows.size(0));
        };
        is_aligned<kVector<T>>(width, data<T>(rows), data<T>(y)) ? run(std::integral_constant<int, kVector<T>>{})
                                                                 : run(std::integral_constant<int, 1>{});
    });
    return y;
}

std::tuple<Tensor, Tensor> moe_unpermute_grad(Tensor given_grad_y, Tensor given_rows, Tensor given_places,
                                              Tensor given_weights) {
    STOKER_CHECK(given_rows.dim() == 2 && given_grad_y.dim() == 2 && given_rows.size(1) == given_grad_y.size(1) &&
                     given_rows.scalar_type() == given_grad_y.scalar_type(),
                 "moe_unpermute: gradient is ", describe(given_grad_y), ", rows are ", describe(given_rows));
    check_places("moe_unpermute", given_places, given_grad_y.size(0), given_rows);
    check_same_device("moe_unpermute", given_rows, {&given_grad_y, &given_weights});
    const Tensor grad_y = dense(given_grad_y), rows = dense(given_rows), places = dense(given_places);
    const Tensor weights = dense(given_weights);
    const int64_t tokens = places.size(0), width = rows.size(1), k = places.size(1);
    STOKER_CHECK(width <= INT32_MAX, "moe_unpermute: ", width, " features; expected less than 2^31");
    STOKER_CHECK(k <= 512, "moe_unpermute: ", k, " copies of a token; this kernel has gradients for up to 512");
    STOKER_CHECK(tokens <= INT32_MAX, "moe_unpermute: ", tokens, " tokens; this kernel has up to 2^31");
    Tensor grad_rows = new_like(rows), grad_weights = new_like(weights);
    with_floating("moe_unpermute", "rows", rows.scalar_type(), [&](auto of_rows) {
        using T = typename decltype(of_rows)::type;
        using A = Acc<T>;
        STOKER_CHECK(weights.scalar_type() == Of<A>::dtype && same_shape(weights, places), "moe_unpermute: weights are ",
                     describe(weights), "; expected ", name_of(Of<A>::dtype), ", one per place");
        if (weights.numel() == 0 || width == 0) {
            torch::stable::zero_(grad_weights);
            return;
        }
        const Launch launch(rows);
        const auto run = [&](auto n) {
            constexpr int kBlock = 128;
            const size_t bytes = static_cast<size_t>(k) * (kBlock / kWarpSize) * sizeof(A);
            STOKER_LAUNCH((unpermute_backward<T, n.value, kBlock>), static_cast<unsigned>(tokens), kBlock, bytes,
                          launch.stream(), data<T>(grad_y), data<T>(rows), data<int64_t>(places), data<A>(weights),
                          data<T>(grad_rows), data<A>(grad_weights), static_cast<int>(width / n.value),
                          static_cast<int>(k), rows.size(0));
        };
        const bool is_fit = is_aligned<kVector<T>>(width, data<T>(grad_y), data<T>(rows), data<T>(grad_rows));
        is_fit ? run(std::integral_constant<int, kVector<T>>{}) : run(std::integral_constant<int, 1>{});
    });
    return {grad_rows, grad_weights};
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("moe_sort(Tensor choice, int experts) -> (Tensor, Tensor, Tensor)");
    m.def("moe_permute(Tensor x, Tensor places, int rows) -> Tensor");
    m.def("moe_unpermute(Tensor rows, Tensor places, Tensor? weights) -> Tensor");
    m.def("moe_unpermute_grad(Tensor grad_y, Tensor rows, Tensor places, Tensor weights) -> (Tensor, Tensor)");
}

STOKER_KERNELS(m) {
    m.impl("moe_sort", TORCH_BOX(&stoker::moe_sort));
    m.impl("moe_permute", TORCH_BOX(&stoker::moe_permute));
    m.impl("moe_unpermute", TORCH_BOX(&stoker::moe_unpermute));
    m.impl("moe_unpermute_grad", TORCH_BOX(&stoker::moe_unpermute_grad));
}
