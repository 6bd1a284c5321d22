// The norms backwards: kernels and their launch. With n = (x - mean) * rstd and g' = grad_y * (weight + offset)
//     grad_x = rstd * (g' - mean(g') - n * mean(g' * n)) + grad_total      (RMSNorm: without mean(g'), and mean = 0)
//     grad_weight = sum over rows of grad_y * n, grad_bias = sum over rows of grad_y
// Each element of grad_y, x and grad_total is read once, each of grad_x written once; a wide row beyond the registers is
// read twice. Blocks walk over rows and leave one row of partial sums each, which sum_rows adds up.
#pragma once

#include "norm.cuh"

namespace stoker::norm {

template <class T, bool kCentred>
struct Backward {
    static constexpr int kParameters = kCentred ? 2 : 1;  // weight, bias

    const T* grad_y;
    Rows grad_y_rows;
    const T* x;
    Rows x_rows;
    const T* grad_total;  // or nullptr; rows without gaps, as are those of grad_x
    T* grad_x;
    const Acc<T>* mean;  // LayerNorm's
    const Acc<T>* rstd;
    Parameter<T> weight;
    Acc<T>* partial;  // [blocks, kParameters, width]
    int64_t rows;
    int width;
    Acc<T> offset;

    __device__ __forceinline__ Acc<T> centre(int64_t row) const {
        if constexpr (kCentred) {
            return mean[row];
        }
        return 0;
    }
};

// What one pack adds to the sums of its row (mean(g' n), mean(g')) and of its columns (weight, bias).
template <bool kCentred, class A, class T, int N>
__device__ __forceinline__ void add_pack(const Pack<T, N>& g, const Pack<T, N>& x, const Pack<A, N>& factor, A offset,
                                         A centre, A scale, A* along, Pack<A, N>* of_columns) {
    const Pack<A, N> grads = widened<A>(g), values = widened<A>(x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const A grad = grads[i];
        const A of_weight = grad * ((values[i] - centre) * scale);
        const A weighted = factor[i] + offset;
        of_columns[0][i] += of_weight;
        along[0] += of_weight * weighted;
        if constexpr (kCentred) {
            of_columns[1][i] += grad;
            along[1] += grad * weighted;
        }
    }
}

template <bool kCentred, class A, class T, int N>
__device__ __forceinline__ Pack<T, N> input_grad(const Pack<T, N>& g, const Pack<T, N>& x, const Pack<T, N>& before,
                                                 const Pack<A, N>& factor, A offset, A centre, A scale,
                                                 const A* along) {
    const Pack<A, N> grads = widened<A>(g), values = widened<A>(x);
    Pack<A, N> result = widened<A>(before);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        A grad = grads[i] * (factor[i] + offset) - (values[i] - centre) * scale * along[0];
        if constexpr (kCentred) {
            grad -= along[1];
        }
        result[i] += grad * scale;
    }
    return narrowed<T>(result);
}

constexpr int kNarrowRowsBackward = 2;  // per thread at once

// claim: norm::backward_(narrow|wide)<\w+, [48], \w+>: 16-byte loads and stores
// Not read in pieces of 16 bytes are rows of odd widths only: the compiler may do with them as it likes.
// claim: norm::backward_wide<\w+, 1, \w+>: may spill: widths of models are multiples of 8
template <class T, int N, bool kCentred>
__global__ void __launch_bounds__(kNarrowThreads) backward_narrow(Backward<T, kCentred> b, int lanes) {
    using A = Acc<T>;
    constexpr int kRows = kNarrowRowsBackward, kParameters = Backward<T, kCentred>::kParameters;
    const int at = static_cast<int>(threadIdx.x) % lanes * N;
    const bool is_in = at < b.width;
    const int groups = static_cast<int>(blockDim.x) / lanes;
    const Pack<A, N> factor = is_in ? b.weight.template load<N>(at) : Pack<A, N>{};
    Pack<A, N> of_columns[kParameters] = {};
    const int64_t step = int64_t{gridDim.x} * groups * kRows;
    for (int64_t base = int64_t{blockIdx.x} * groups * kRows; base < b.rows; base += step) {
        const int64_t first = base + threadIdx.x / lanes;
        Pack<T, N> g[kRows], x[kRows], before[kRows];
        A centre[kRows], scale[kRows], along[kRows * kParameters] = {};
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const int64_t row = first + k * groups;
            const bool is_there = is_in && row < b.rows;
            g[k] = is_there ? load<T, N>(b.grad_y + b.grad_y_rows.at(row) + at) : Pack<T, N>{};
            x[k] = is_there ? load<T, N>(b.x + b.x_rows.at(row) + at) : Pack<T, N>{};
            before[k] =
                is_there && b.grad_total != nullptr ? load<T, N>(b.grad_total + row * b.width + at) : Pack<T, N>{};
            centre[k] = is_there ? b.centre(row) : A(0);
            scale[k] = is_there ? b.rstd[row] : A(0);
        }
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            add_pack<kCentred>(g[k], x[k], factor, b.offset, centre[k], scale[k], along + k * kParameters, of_columns);
        }
        group_sums(along, lanes);
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const int64_t row = first + k * groups;
            hold_packed(g[k]);
            hold_packed(x[k]);
            if (is_in && row < b.rows) {
#pragma unroll
                for (int i = 0; i < kParameters; ++i) {
                    along[k * kParameters + i] /= static_cast<A>(b.width);
                }
                store<T, N>(b.grad_x + row * b.width + at,
                            input_grad<kCentred>(g[k], x[k], before[k], factor, b.offset, centre[k], scale[k],
                                                 along + k * kParameters));
            }
        }
    }
    // The groups of a block meet: element i of every thread side by side, so that no two lanes want the same bank.
    __shared__ A of_threads[N * kNarrowThreads];
    for (int parameter = 0; parameter < kParameters; ++parameter) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; ++i) {
            of_threads[i * kNarrowThreads + threadIdx.x] = of_columns[parameter][i];
        }
        __syncthreads();
        for (int column = threadIdx.x; column < b.width; column += blockDim.x) {
            A sum = 0;
            for (int group = 0; group < groups; ++group) {
                sum += of_threads[column % N * kNarrowThreads + group * lanes + column / N];
            }
            b.partial[(int64_t{blockIdx.x} * kParameters + parameter) * b.width + column] = sum;
        }
    }
}

// Threads of a block, and packs per thread that stay in registers with their columns' sums: as 65,536 registers allow.
constexpr int kWideThreadsBackward = 512;
constexpr int kBackwardKept = 2;

template <class T, int N, bool kCentred>
__global__ void __launch_bounds__(kWideThreadsBackward) backward_wide(Backward<T, kCentred> b) {
    using A = Acc<T>;
    constexpr int kKept = kBackwardKept, kParameters = Backward<T, kCentred>::kParameters;
    const int step = static_cast<int>(blockDim.x) * N;
    const int begin = static_cast<int>(threadIdx.x) * N;
    // A column belongs to one thread, so its sum needs no barrier. Those beyond the registers are held in memory.
    A* partial = b.partial + int64_t{blockIdx.x} * kParameters * b.width;
    const auto leave = [&](const Pack<A, N>* of_columns, int at) {
#pragma unroll
        for (int i = 0; i < kParameters; ++i) {
            store<A, N>(partial + int64_t{i} * b.width + at, of_columns[i]);
        }
    };
    Pack<A, N> of_columns[kKept][kParameters] = {};
    for (int at = begin + kKept * step; at < b.width; at += step) {
        leave(of_columns[0], at);  // zeros
    }
    int turn = 0;
    for (int64_t row = blockIdx.x; row < b.rows; row += gridDim.x, turn ^= 1) {
        const T* grad_y = b.grad_y + b.grad_y_rows.at(row);
        const T* x = b.x + b.x_rows.at(row);
        const T* grad_total = b.grad_total == nullptr ? nullptr : b.grad_total + row * b.width;
        T* grad_x = b.grad_x + row * b.width;
        const A centre = b.centre(row), scale = b.rstd[row];
        Pack<T, N> kept_g[kKept], kept_x[kKept], before[kKept];
        A along[kParameters] = {};
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            const int at = begin + k * step;
            kept_g[k] = at < b.width ? load<T, N>(grad_y + at) : Pack<T, N>{};
            kept_x[k] = at < b.width ? load<T, N>(x + at) : Pack<T, N>{};
            before[k] = at < b.width && grad_total != nullptr ? load<T, N>(grad_total + at) : Pack<T, N>{};
        }
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            const int at = begin + k * step;
            if (at < b.width) {
                add_pack<kCentred>(kept_g[k], kept_x[k], b.weight.template load<N>(at), b.offset, centre, scale, along,
                                   of_columns[k]);
            }
        }
        for (int at = begin + kKept * step; at < b.width; at += step) {
            Pack<A, N> of_tail[kParameters];
#pragma unroll
            for (int i = 0; i < kParameters; ++i) {
                of_tail[i] = load<A, N>(partial + int64_t{i} * b.width + at);
            }
            add_pack<kCentred>(load<T, N>(grad_y + at), load<T, N>(x + at), b.weight.template load<N>(at), b.offset,
                               centre, scale, along, of_tail);
            leave(of_tail, at);
        }
        block_sums(along, turn);
#pragma unroll
        for (int i = 0; i < kParameters; ++i) {
            along[i] /= static_cast<A>(b.width);
        }
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            const int at = begin + k * step;
            hold_packed(kept_g[k]);
            hold_packed(kept_x[k]);
            if (at < b.width) {
                store<T, N>(grad_x + at, input_grad<kCentred>(kept_g[k], kept_x[k], before[k],
                                                              b.weight.template load<N>(at), b.offset, centre, scale,
                                                              along));
            }
        }
        for (int at = begin + kKept * step; at < b.width; at += step) {
            const Pack<T, N> added = grad_total == nullptr ? Pack<T, N>{} : load<T, N>(grad_total + at);
            store<T, N>(grad_x + at, input_grad<kCentred>(load<T, N>(grad_y + at), load<T, N>(x + at), added,
                                                          b.weight.template load<N>(at), b.offset, centre, scale,
                                                          along));
        }
    }
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
        if (begin + k * step < b.width) {
            leave(of_columns[k], begin + k * step);
        }
    }
}

// Blocks walk over at least so many rows, or the partial sums would be a good part of what is written.
constexpr int64_t kRowsPerBlock = 4;
constexpr int kMostResident = 16;  // blocks per multiprocessor

// Fills grad_x; returns the partial sums [blocks, kParameters * width], whose rows are to be added up.
// aligned: rows and parameters begin at multiples of 16 bytes.
template <class T, bool kCentred>
Tensor launch_backward(Backward<T, kCentred> b, bool aligned, const Tensor& on_device_of, const Launch& launch) {
    Tensor partial = on_device_of;
    const auto with_partial = [&](unsigned blocks) {
        partial = new_tensor(on_device_of, {int64_t{blocks}, int64_t{b.kParameters} * b.width}, Of<Acc<T>>::dtype);
        b.partial = data<Acc<T>>(partial);
    };
    by_width<T>(
        b.width, aligned,
        [&](auto n) {
            const int lanes = lanes_for(b.width / n.value);
            const unsigned threads = whole_warps(b.rows * lanes, kNarrowThreads);
            const int64_t rows_at_once = int64_t{threads} / lanes * kNarrowRowsBackward;
            const int resident =
                resident_blocks(&backward_narrow<T, n.value, kCentred>, threads, launch.device(), kMostResident);
            const unsigned blocks = grid_for((b.rows + rows_at_once - 1) / rows_at_once, launch.device(), resident);
            with_partial(blocks);
            STOKER_LAUNCH((backward_narrow<T, n.value, kCentred>), blocks, threads, 0, launch.stream(), b, lanes);
        },
        [&](auto n) {
            constexpr int kMost = kWideThreadsBackward, kKept = kBackwardKept;
            const unsigned threads = whole_warps((b.width / n.value + kKept - 1) / kKept, kMost);
            const int resident =
                resident_blocks(&backward_wide<T, n.value, kCentred>, threads, launch.device(), kMostResident);
            const int64_t most = (b.rows + kRowsPerBlock - 1) / kRowsPerBlock;
            const unsigned blocks = grid_for(most, launch.device(), resident);
            with_partial(blocks);
            STOKER_LAUNCH((backward_wide<T, n.value, kCentred>), blocks, threads, 0, launch.stream(), b);
        });
    return partial;
}

}  // namespace stoker::norm
