// One row of logits by one block: its statistics, its loss, its gradient. Knows no tensors; kernels and what is launched are
// cross_entropy.cu's and linear_cross_entropy.cu's.
//
// Statistics take one read of the row: every thread carries the largest logit that it has met and the sum of exponentials
// relative to it. A gradient is one read and one write, and may be written over its logits.
#pragma once

#include "numbers.cuh"
#include "reduce.cuh"

namespace stoker {
namespace {

constexpr int kFewThreads = 128;  // for rows of at most 4 * kFewThreads packs
constexpr int kManyThreads = 512;
constexpr int kResident = 1024;   // threads of a multiprocessor at least: 64 registers each

// Packs that a thread has in flight: 64 bytes where there are that many.
template <class T, int N>
constexpr int kUnroll = N * sizeof(T) > 16 ? 2 : 4;

__device__ __forceinline__ float exponential(float x) {
    return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
    return exp(x);
}
__device__ __forceinline__ float logarithm(float x) {
    return logf(x);
}
__device__ __forceinline__ double logarithm(double x) {
    return log(x);
}
__device__ __forceinline__ float hyperbolic_tangent(float x) {
    return tanhf(x);
}
__device__ __forceinline__ double hyperbolic_tangent(double x) {
    return tanh(x);
}

// A row as single elements up to the first that is aligned, packs of N, and fewer than N single elements behind them.
template <int N>
struct Cut {
    int head, packs, singles;

    template <class T>
    __device__ __forceinline__ Cut(const T* row, int width) {
        const auto offset = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % N);
        head = min(width, (N - offset) % N);
        packs = (width - head) / N;
        singles = width - packs * N;
    }
    // The k-th single element.
    __device__ __forceinline__ int at(int k) const { return k < head ? k : k + packs * N; }
};

// cap * tanh(x / cap) where there is a cap.
template <bool kCap, class A>
__device__ __forceinline__ A capped(A x, A cap) {
    if constexpr (kCap) {
        return cap * hyperbolic_tangent(x / cap);
    } else {
        return x;
    }
}

// The largest logit so far, and the sum of exponentials relative to it. NaN is no largest logit but makes the sum NaN.
template <class A>
struct Online {
    A maximum = -INFINITY;
    A sum = 0;

    // What the next `exponential(logit - base)` are relative to, once `top` is known to be among the logits.
    __device__ __forceinline__ A base(A top) {
        if (top > maximum) {
            sum *= exponential(maximum - top);
            maximum = top;
        }
        return maximum == -INFINITY ? A(0) : maximum;  // -inf - -inf would be NaN
    }

    // Over the block, in every thread.
    template <int kThreads>
    __device__ __forceinline__ void join() {
        const A top = over_block<Largest, kThreads>(maximum);
        sum = over_block<Sum, kThreads>(maximum == top ? sum : sum * exponential(maximum - top));
        maximum = top;
    }
};

template <class T, int N, int kThreads, bool kCap>
__device__ __forceinline__ Online<Acc<T>> statistics(const T* row, int width, Acc<T> cap) {
    using A = Acc<T>;
    const Cut<N> cut(row, width);
    Online<A> mine;
    if (N > 1 && static_cast<int>(threadIdx.x) < cut.singles) {
        const A logit = capped<kCap>(widen<A>(row[cut.at(threadIdx.x)]), cap);
        const A base = mine.base(logit);
        mine.sum += exponential(logit - base);
    }
    const T* packs = row + cut.head;
    constexpr int kCount = kUnroll<T, N>;
    for (int first = threadIdx.x; first < cut.packs; first += kCount * kThreads) {
        Pack<T, N> given[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            if (first + k * kThreads < cut.packs) {
                given[k] = load<T, N>(packs + int64_t{first + k * kThreads} * N);
            }
        }
        // Pack by pack, for all of them widened at once would not fit into registers.
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            if (first + k * kThreads < cut.packs) {
                A logits[N];
                A top = -INFINITY;
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    logits[i] = capped<kCap>(widen<A>(given[k][i]), cap);
                    top = logits[i] > top ? logits[i] : top;
                }
                const A base = mine.base(top);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    mine.sum += exponential(logits[i] - base);
                }
            }
        }
    }
    mine.template join<kThreads>();
    return mine;
}

// grad[c] = exp(logit[c] - shift) * factor, minus grad_loss at the target: a row.
template <class A>
struct Slope {
    A shift, factor, grad_loss;
    int64_t target;  // within the row; elsewhere if it is outside
};

// Both rows have their aligned elements at the same places, and may be one: a thread writes where it alone has read. It
// goes backwards, as a row's end is what was read last if it was read before.
template <class T, class G, int N, int kThreads, bool kCap>
__device__ __forceinline__ void write_gradient(const T* row, G* grad, int width, Acc<T> cap, Slope<Acc<T>> slope) {
    using A = Acc<T>;
    const Cut<N> cut(row, width);
    const auto gradient = [&](T given, int64_t c) {
        const A logit = capped<kCap>(widen<A>(given), cap);
        A result = exponential(logit - slope.shift) * slope.factor;
        result = c == slope.target ? result - slope.grad_loss : result;
        if constexpr (kCap) {
            result *= 1 - (logit / cap) * (logit / cap);
        }
        return narrow<G>(result);
    };
    const T* packs = row + cut.head;
    constexpr int kCount = kUnroll<T, N>;
    const int rounds = (cut.packs + kCount * kThreads - 1) / (kCount * kThreads);
    for (int round = rounds - 1; round >= 0; --round) {
        const int first = round * kCount * kThreads + threadIdx.x;
        Pack<T, N> given[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            if (first + k * kThreads < cut.packs) {
                given[k] = load<T, N>(packs + int64_t{first + k * kThreads} * N);
            }
        }
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            const int p = first + k * kThreads;
            if (p < cut.packs) {
                Pack<G, N> result;
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    result[i] = gradient(given[k][i], cut.head + int64_t{p} * N + i);
                }
                store<G, N>(grad + cut.head + int64_t{p} * N, result);
            }
        }
    }
    if (N > 1 && static_cast<int>(threadIdx.x) < cut.singles) {
        const int c = cut.at(threadIdx.x);
        grad[c] = gradient(row[c], c);
    }
}

template <class G, int N, int kThreads>
__device__ __forceinline__ void write_zeros(G* grad, int width) {
    const Cut<N> cut(grad, width);
    Pack<G, N> zeros;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        zeros[i] = narrow<G>(0.0f);
    }
    for (int p = threadIdx.x; p < cut.packs; p += kThreads) {
        store<G, N>(grad + cut.head + int64_t{p} * N, zeros);
    }
    if (N > 1 && static_cast<int>(threadIdx.x) < cut.singles) {
        grad[cut.at(threadIdx.x)] = zeros[0];
    }
}

struct Targets {
    const int64_t* classes;
    int64_t vocab_start, ignore_index;
};

template <class A>
struct Loss {
    A log_sum, lse, value;

    __device__ __forceinline__ Loss(const Online<A>& of, A target_logit, bool ignored, A z_loss)
        : log_sum(logarithm(of.sum)), lse(of.maximum + log_sum) {
        // Not lse - target_logit: at large logits that difference has lost the digits of log_sum.
        value = ignored ? A(0) : of.maximum - target_logit + log_sum;
        if (z_loss != A(0) && !ignored) {
            value += z_loss * lse * lse;
        }
    }
};

}  // namespace
}  // namespace stoker
