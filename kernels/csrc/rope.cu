// Rotary position embedding of queries and keys in one launch, out of place or in place; backwards it is the same
// kernel with the opposite angle.
//
// A warp turns one token. Its lanes lie side by side along a head's pairs and keep those pairs' cosines and sines in
// registers, while they go from head to head, first of q, then of k, several heads at once.
#include "numbers.cuh"
#include "tensors.h"

namespace stoker {
namespace {

constexpr int kWarps = 4;     // per block: tokens at once
constexpr int kInFlight = 4;  // heads that a lane loads before it stores the first

// [B, S, heads, width] as read and as written. Strides in elements; features lie side by side.
template <class T>
struct Heads {
    const T* from;
    T* to;
    int64_t from_row, from_token, from_head;
    int64_t to_row, to_token, to_head;
    int count;
};

// [B, S, pairs].
template <class A>
struct Angles {
    const A* cos;
    const A* sin;
    int64_t row, token;
    int pairs;
    A sign;
};

// Both of one token.
template <class T>
struct Token {
    const T *from_q, *from_k;
    T *to_q, *to_k;
    __device__ __forceinline__ Token(const Heads<T>& q, const Heads<T>& k, int64_t row, int64_t token)
        : from_q(q.from + row * q.from_row + token * q.from_token),
          from_k(k.from + row * k.from_row + token * k.from_token),
          to_q(q.to + row * q.to_row + token * q.to_token),
          to_k(k.to + row * k.to_row + token * k.to_token) {}
    __device__ __forceinline__ const T* from(const Heads<T>& q, const Heads<T>& k, int head) const {
        return head < q.count ? from_q + head * q.from_head : from_k + (head - q.count) * k.from_head;
    }
    __device__ __forceinline__ T* to(const Heads<T>& q, const Heads<T>& k, int head) const {
        return head < q.count ? to_q + head * q.to_head : to_k + (head - q.count) * k.to_head;
    }
};

// N pairs (a, b) in two packs: halves have all of one's a, then all of b; interleaved, a and b take turns.
template <bool kInterleaved, class T, int N>
__device__ __forceinline__ void turn(Pack<T, N> (&x)[2], const Pack<Acc<T>, N>& cos, const Pack<Acc<T>, N>& sin) {
    using A = Acc<T>;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        T& a = kInterleaved ? x[2 * i / N][2 * i % N] : x[0][i];
        T& b = kInterleaved ? x[(2 * i + 1) / N][(2 * i + 1) % N] : x[1][i];
        const A wide_a = widen<A>(a), wide_b = widen<A>(b);
        a = narrow<T>(wide_a * cos[i] - wide_b * sin[i]);
        b = narrow<T>(wide_b * cos[i] + wide_a * sin[i]);
    }
}

// Both packs of a pair are read before either is written, by one lane: `to` may be `from`.
// claim: rope_kernel<\w+, [48], .*>: 16-byte loads and stores
template <class T, int N, bool kInterleaved>
__global__ void rope_kernel(Heads<T> q, Heads<T> k, Angles<Acc<T>> angles, int64_t rows, int64_t length, int width,
                            bool copies_rest) {
    using A = Acc<T>;
    const int lane = threadIdx.x % kWarpSize;
    const int heads = q.count + k.count;
    const int columns = angles.pairs / N;
    const int side_by_side = columns < kWarpSize ? columns : kWarpSize;
    const int groups = side_by_side > 0 ? kWarpSize / side_by_side : 0;
    const int group = side_by_side > 0 ? lane / side_by_side : 0;
    const int second = kInterleaved ? N : angles.pairs;  // from a lane's first pack to its second
    const int64_t warps = int64_t{gridDim.x} * kWarps;
    for (int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize; t < rows * length; t += warps) {
        const int64_t row = t / length, place = t % length;
        const Token<T> token(q, k, row, place);
        if (group < groups) {
            for (int column = lane % side_by_side; column < columns; column += side_by_side) {
                const int64_t angle = row * angles.row + place * angles.token + int64_t{column} * N;
                const Pack<A, N> cos = load<A, N>(angles.cos + angle);
                Pack<A, N> sin = load<A, N>(angles.sin + angle);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    sin[i] *= angles.sign;
                }
                const int first = kInterleaved ? 2 * column * N : column * N;
                for (int begin = group; begin < heads; begin += groups * kInFlight) {
                    Pack<T, N> x[kInFlight][2];
#pragma unroll
                    for (int u = 0; u < kInFlight; ++u) {
                        const int head = begin + u * groups;
                        if (head < heads) {
                            const T* from = token.from(q, k, head) + first;
                            x[u][0] = load<T, N>(from);
                            x[u][1] = load<T, N>(from + second);
                        }
                    }
#pragma unroll
                    for (int u = 0; u < kInFlight; ++u) {
                        const int head = begin + u * groups;
                        if (head < heads) {
                            T* to = token.to(q, k, head) + first;
                            turn<kInterleaved>(x[u], cos, sin);
                            store<T, N>(to, x[u][0]);
                            store<T, N>(to + second, x[u][1]);
                        }
                    }
                }
            }
        }
        if (copies_rest) {
            const int rest = width / N - 2 * columns;
            for (int64_t i = lane; i < int64_t{heads} * rest; i += kWarpSize) {
                const int head = static_cast<int>(i / rest);
                const int64_t at = 2 * int64_t{angles.pairs} + i % rest * N;
                store<T, N>(token.to(q, k, head) + at, load<T, N>(token.from(q, k, head) + at));
            }
        }
    }
}

bool has_neighbours(const Tensor& tensor) {
    return tensor.size(-1) <= 1 || tensor.stride(-1) == 1;
}

// Whether every element has a place of its own, as far as sizes and strides tell.
bool overlaps_itself(const Tensor& tensor) {
    std::vector<std::pair<int64_t, int64_t>> steps;
    for (int64_t i = 0; i < tensor.dim(); ++i) {
        if (tensor.size(i) > 1) {
            steps.emplace_back(tensor.stride(i), tensor.size(i));
        }
    }
    std::sort(steps.begin(), steps.end());
    int64_t extent = 0;
    for (const auto& [stride, size] : steps) {
        if (stride <= extent) {
            return true;
        }
        extent += stride * (size - 1);
    }
    return false;
}

void check(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, int64_t sign) {
    check_same_device("rope", q, {&k, &cos, &sin});
    STOKER_CHECK(q.dim() == 4 && k.dim() == 4 && q.size(0) == k.size(0) && q.size(1) == k.size(1) &&
                     q.size(3) == k.size(3),
                 "rope: q is ", describe(q), ", k is ", describe(k), "; expected [B, S, heads, features] of one "
                 "B, S and number of features");
    STOKER_CHECK(q.scalar_type() == k.scalar_type(), "rope: q is ", describe(q), ", k is ", describe(k),
                 "; expected one dtype");
    const ScalarType wide = q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    STOKER_CHECK(cos.dim() == 3 && same_shape(cos, sin) && cos.size(0) == q.size(0) && cos.size(1) == q.size(1) &&
                     2 * cos.size(2) <= q.size(3) && cos.scalar_type() == wide && sin.scalar_type() == wide,
                 "rope: cos is ", describe(cos), ", sin is ", describe(sin), ", q is ", describe(q), "; expected ",
                 name_of(wide), " [B, S, at most half of the features]");
    STOKER_CHECK(q.size(3) <= INT32_MAX && q.size(2) + k.size(2) <= INT32_MAX, "rope: q is ", describe(q), ", k is ",
                 describe(k), "; expected less than 2^31 heads and features");
    STOKER_CHECK(sign == 1 || sign == -1, "rope: sign is ", sign, "; expected 1 or -1");
}

template <class T>
Heads<T> heads_of(const Tensor& from, const Tensor& to) {
    return {data<T>(from),  data<T>(to),    from.stride(0), from.stride(1), from.stride(2),
            to.stride(0),   to.stride(1),   to.stride(2),   static_cast<int>(from.size(2))};
}

// Whether every head begins where N elements can be read at once.
template <int N, class T>
bool is_aligned(const Heads<T>& x, int64_t rows, int64_t length) {
    const auto fits = [&](int64_t row, int64_t token, int64_t head) {
        return (rows == 1 || row % N == 0) && (length == 1 || token % N == 0) && (x.count <= 1 || head % N == 0);
    };
    return x.count == 0 || (stoker::is_aligned<N>(N, x.from, x.to) && fits(x.from_row, x.from_token, x.from_head) &&
                            fits(x.to_row, x.to_token, x.to_head));
}

void launch(const Tensor& q, const Tensor& k, const Tensor& to_q, const Tensor& to_k, const Tensor& given_cos,
            const Tensor& given_sin, bool interleaved, int64_t sign) {
    const bool as_given = has_neighbours(given_cos) && has_neighbours(given_sin) &&
                          given_cos.stride(0) == given_sin.stride(0) && given_cos.stride(1) == given_sin.stride(1);
    const Tensor cos = as_given ? given_cos : dense(given_cos), sin = as_given ? given_sin : dense(given_sin);
    const int64_t rows = q.size(0), length = q.size(1);
    const int width = static_cast<int>(q.size(3)), pairs = static_cast<int>(cos.size(2));
    with_floating("rope", "q", q.scalar_type(), [&](auto of_q) {
        using T = typename decltype(of_q)::type;
        using A = Acc<T>;
        const bool in_place = to_q.data_ptr() == q.data_ptr() && to_k.data_ptr() == k.data_ptr();
        const bool copies_rest = !in_place && width > 2 * pairs;
        if (rows * length * (q.size(2) + k.size(2)) == 0 || (pairs == 0 && !copies_rest)) {
            return;
        }
        const Heads<T> of_query = heads_of<T>(q, to_q), of_key = heads_of<T>(k, to_k);
        const Angles<A> angles{data<A>(cos), data<A>(sin), cos.stride(0), cos.stride(1), pairs, static_cast<A>(sign)};
        const Launch launch(q);
        const int64_t blocks = std::min<int64_t>((rows * length + kWarps - 1) / kWarps, INT32_MAX);
        const auto run = [&](auto n, auto is_interleaved) {
            STOKER_LAUNCH((rope_kernel<T, n.value, is_interleaved.value>), static_cast<unsigned>(blocks),
                          kWarps * kWarpSize, 0, launch.stream(), of_query, of_key, angles, rows, length, width,
                          copies_rest);
        };
        constexpr int kPack = kVector<T>;
        const bool in_packs = width % kPack == 0 && is_aligned<kPack>(of_query, rows, length) &&
                              is_aligned<kPack>(of_key, rows, length) &&
                              stoker::is_aligned<kPack>(pairs, angles.cos, angles.sin) &&
                              (rows == 1 || angles.row % kPack == 0) && (length == 1 || angles.token % kPack == 0);
        const auto by_pack = [&](auto is_interleaved) {
            in_packs ? run(std::integral_constant<int, kPack>{}, is_interleaved)
                     : run(std::integral_constant<int, 1>{}, is_interleaved);
        };
        interleaved ? by_pack(std::true_type{}) : by_pack(std::false_type{});
    });
}

std::tuple<Tensor, Tensor> rope(Tensor given_q, Tensor given_k, Tensor cos, Tensor sin, bool interleaved,
                                int64_t sign) {
    check(given_q, given_k, cos, sin, sign);
    const Tensor q = has_neighbours(given_q) ? given_q : dense(given_q);
    const Tensor k = has_neighbours(given_k) ? given_k : dense(given_k);
    Tensor to_q = new_like(q), to_k = new_like(k);
    launch(q, k, to_q, to_k, cos, sin, interleaved, sign);
    return {to_q, to_k};
}

void rope_in_place(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, int64_t sign) {
    check(q, k, cos, sin, sign);
    for (const Tensor* x : {&q, &k}) {
        STOKER_CHECK(has_neighbours(*x) && !overlaps_itself(*x), "rope: in place, features must lie side by side and "
                     "every element in a place of its own");
    }
    STOKER_CHECK(q.data_ptr() != k.data_ptr() || q.numel() == 0 || k.numel() == 0, "rope: in place, q and k must be "
                 "two tensors");
    launch(q, k, q, k, cos, sin, interleaved, sign);
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, int sign) -> (Tensor, Tensor)");
    m.def("rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool interleaved, int sign) -> ()");
}

STOKER_KERNELS(m) {
    m.impl("rope", TORCH_BOX(&stoker::rope));
    m.impl("rope_", TORCH_BOX(&stoker::rope_in_place));
}
