// SwiGLU, GeGLU and GELU: an activation, times a second factor where there is one, and their gradients.
//
// Every tensor is a matrix of rows with a stride, so halves of one projection are read where they lie. Blocks take
// equal shares of all packs of 16 bytes, whatever the length of a row. Only the inputs are kept for the backward pass.
#include <type_traits>

#include "numbers.cuh"
#include "tensors.h"

namespace stoker {
namespace {

constexpr int kThreads = 256;
constexpr int kForward = 4;   // packs of each input that a thread loads before it stores the first
constexpr int kBackward = 2;  // of three inputs

template <class T>
struct Matrix {
    const T* data;
    int64_t stride;  // elements from one row to the next
};

// rows x packs of N elements; a block's threads are apart by `step_rows` rows and `step_packs` packs.
struct Extent {
    int64_t all, packs, step_rows, step_packs;
};

// The packs of one thread, one after another: pack `index` of all, `pack` of row `row`.
struct Walk {
    int64_t index, row, pack;
    __device__ __forceinline__ Walk(const Extent& extent, int64_t first) : index(first), row(0), pack(first) {
        if (extent.packs < extent.all) {
            row = first / extent.packs;
            pack = first % extent.packs;
        }
    }
    __device__ __forceinline__ void next(const Extent& extent) {
        index += kThreads;
        row += extent.step_rows;
        pack += extent.step_packs;
        if (pack >= extent.packs) {
            pack -= extent.packs;
            ++row;
        }
    }
    template <int N, class T>
    __device__ __forceinline__ const T* in(const Matrix<T>& matrix) const {
        return matrix.data + row * matrix.stride + pack * N;
    }
};

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// 1 / x for 1 <= x <= 2, within an ulp: there is none of what a division branches for, once per element and pass.
__device__ __forceinline__ double reciprocal(double x) { return 1 / x; }
__device__ __forceinline__ float reciprocal(float x) {
#ifdef STOKER_EMULATION
    return 1 / x;
#else
    float guess;  // within 2^-23 of 1 / x (PTX ISA); Newton's step squares that
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
    return fmaf(guess, fmaf(-x, guess, 1.0f), guess);
#endif
}

// 1 / (1 + e^-x) and 1 / (1 + e^x) without cancellation; the exponential's argument is never positive.
template <class A>
struct Sigmoid {
    A value, rest;
    __device__ __forceinline__ explicit Sigmoid(A x) {
        const A small = exponential(-static_cast<A>(fabs(x)));
        const A near = reciprocal(A(1) + small), far = small * near;
        value = x < 0 ? far : near;
        rest = x < 0 ? near : far;
    }
};

struct Silu {
    template <class A>
    static __device__ __forceinline__ A value(A x) {
        return x * Sigmoid<A>(x).value;
    }
    template <class A>
    static __device__ __forceinline__ void gradient(A x, A& value, A& slope) {
        const Sigmoid<A> s(x);
        value = x * s.value;
        slope = s.value + value * s.rest;
    }
};

// The tanh form: (1 + tanh(z)) / 2 is the sigmoid of 2z, which unlike it keeps its digits where x is negative.
struct Gelu {
    static constexpr double kTwice = 1.5957691216057307118;  // 2 sqrt(2 / pi)
    static constexpr double kCubic = 0.044715;
    template <class A>
    static __device__ __forceinline__ A twice_z(A x) {
        return A(kTwice) * (x + A(kCubic) * x * x * x);
    }
    template <class A>
    static __device__ __forceinline__ A value(A x) {
        return x * Sigmoid<A>(twice_z(x)).value;
    }
    template <class A>
    static __device__ __forceinline__ void gradient(A x, A& value, A& slope) {
        const Sigmoid<A> s(twice_z(x));
        value = x * s.value;
        slope = s.value + value * s.rest * (A(kTwice) * (A(1) + A(3 * kCubic) * x * x));
    }
};

// y = activation(x) or activation(x) * up.
// claim: activation_(forward|backward)<.*, [48]>: 16-byte loads and stores
template <class Activation, bool kGated, class T, int N>
__global__ void activation_forward(Matrix<T> x, Matrix<T> up, T* __restrict__ y, Extent extent) {
    using A = Acc<T>;
    Pack<T, N> of_x[kForward], of_up[kForward];
    const int64_t first = int64_t{blockIdx.x} * kThreads * kForward + threadIdx.x;
    Walk walk(extent, first);
#pragma unroll
    for (int u = 0; u < kForward; ++u) {
        if (walk.index < extent.all) {
            of_x[u] = load<T, N>(walk.in<N>(x));
            if constexpr (kGated) {
                of_up[u] = load<T, N>(walk.in<N>(up));
            }
        }
        walk.next(extent);
    }
#pragma unroll
    for (int u = 0; u < kForward; ++u) {
        const int64_t index = first + u * kThreads;
        if (index < extent.all) {
            Pack<T, N> result;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                A value = Activation::value(widen<A>(of_x[u][i]));
                if constexpr (kGated) {
                    value *= widen<A>(of_up[u][i]);
                }
                result[i] = narrow<T>(value);
            }
            store<T, N>(y + index * N, result);
        }
    }
}

template <class Activation, bool kGated, class T, int N>
__global__ void activation_backward(Matrix<T> grad, Matrix<T> x, Matrix<T> up, T* __restrict__ grad_x,
                                    T* __restrict__ grad_up, Extent extent) {
    using A = Acc<T>;
    Pack<T, N> of_grad[kBackward], of_x[kBackward], of_up[kBackward];
    const int64_t first = int64_t{blockIdx.x} * kThreads * kBackward + threadIdx.x;
    Walk walk(extent, first);
#pragma unroll
    for (int u = 0; u < kBackward; ++u) {
        if (walk.index < extent.all) {
            of_grad[u] = load<T, N>(walk.in<N>(grad));
            of_x[u] = load<T, N>(walk.in<N>(x));
            if constexpr (kGated) {
                of_up[u] = load<T, N>(walk.in<N>(up));
            }
        }
        walk.next(extent);
    }
#pragma unroll
    for (int u = 0; u < kBackward; ++u) {
        const int64_t index = first + u * kThreads;
        if (index < extent.all) {
            Pack<T, N> for_x, for_up;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                A value, slope;
                Activation::gradient(widen<A>(of_x[u][i]), value, slope);
                const A g = widen<A>(of_grad[u][i]);
                if constexpr (kGated) {
                    for_x[i] = narrow<T>(g * widen<A>(of_up[u][i]) * slope);
                    for_up[i] = narrow<T>(g * value);
                } else {
                    for_x[i] = narrow<T>(g * slope);
                }
            }
            store<T, N>(grad_x + index * N, for_x);
            if constexpr (kGated) {
                store<T, N>(grad_up + index * N, for_up);
            }
        }
    }
}

void check_alike(const char* op, const char* name, const Tensor& x, const char* other_name, const Tensor& other) {
    check_same_device(op, x, {&other});
    STOKER_CHECK(other.scalar_type() == x.scalar_type() && same_shape(other, x), op, ": ", other_name, " is ",
                 describe(other), ", ", name, " is ", describe(x), "; both must be alike");
}

// The stride between rows, if the tensor is rows of its last dimension at equal distances; else 0.
int64_t stride_of_rows(const Tensor& tensor) {
    if (tensor.dim() < 2 || tensor.stride(-1) != 1) {
        return 0;
    }
    int64_t stride = 0, inside = 1;
    for (int64_t i = tensor.dim() - 2; i >= 0; --i) {
        if (tensor.size(i) == 1) {
            continue;
        }
        if (stride == 0) {
            stride = tensor.stride(i);
        } else if (tensor.stride(i) != stride * inside) {
            return 0;
        }
        inside *= tensor.size(i);
    }
    return stride;
}

// Inputs of one shape as matrices: one long row if all lie without gaps, else rows of the last dimension.
template <class T, size_t kInputs>
struct Inputs {
    Matrix<T> matrix[kInputs];
    std::vector<Tensor> held;
    int64_t rows = 1, width = 0;

    explicit Inputs(const std::vector<Tensor>& given) : held(given), width(given[0].numel()) {
        bool is_flat = true;
        for (Tensor& tensor : held) {
            if (!tensor.is_contiguous() && stride_of_rows(tensor) == 0) {
                tensor = dense(tensor);
            }
            is_flat = is_flat && tensor.is_contiguous();
        }
        if (!is_flat) {
            width = held[0].size(-1);
            rows = rows_of(held[0]);
        }
        for (size_t i = 0; i < kInputs; ++i) {
            matrix[i] = {data<T>(held[i]), is_flat ? 0 : held[i].is_contiguous() ? width : stride_of_rows(held[i])};
        }
    }

    template <int N>
    bool in_packs() const {
        bool fits = true;
        for (const Matrix<T>& m : matrix) {
            fits = fits && is_aligned<N>(width, m.data) && (rows == 1 || m.stride % N == 0);
        }
        return fits;
    }

    Extent extent(int pack) const {
        const int64_t packs = width / pack;
        return {rows * packs, packs, kThreads / packs, kThreads % packs};
    }
};

unsigned blocks_for(int64_t packs, int in_flight) {
    const int64_t blocks = (packs + kThreads * in_flight - 1) / (kThreads * in_flight);
    STOKER_CHECK(blocks <= INT32_MAX, "activation: ", packs, " packs; expected less than 2^41");
    return static_cast<unsigned>(blocks);
}

template <class T, class F>
void with_pack(bool in_packs, F&& function) {
    in_packs ? function(std::integral_constant<int, kVector<T>>{}) : function(std::integral_constant<int, 1>{});
}

template <class Activation, bool kGated>
Tensor forward(const char* op, const char* name, const Tensor& x, const Tensor& up) {
    if (kGated) {
        check_alike(op, name, x, "up", up);
    }
    Tensor y = new_like(x);
    with_floating(op, name, x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        if (x.numel() == 0) {
            return;
        }
        const Launch launch(x);
        const Inputs<T, 2> in({x, up});
        with_pack<T>(in.template in_packs<kVector<T>>(), [&](auto n) {
            const Extent extent = in.extent(n.value);
            STOKER_LAUNCH((activation_forward<Activation, kGated, T, n.value>), blocks_for(extent.all, kForward),
                          kThreads, 0, launch.stream(), in.matrix[0], in.matrix[1], data<T>(y), extent);
        });
    });
    return y;
}

template <class Activation, bool kGated>
std::tuple<Tensor, Tensor> backward(const char* op, const char* name, const Tensor& grad, const Tensor& x,
                                    const Tensor& up) {
    check_alike(op, name, x, "grad", grad);
    if (kGated) {
        check_alike(op, name, x, "up", up);
    }
    Tensor grad_x = new_like(x), grad_up = kGated ? new_like(x) : grad_x;
    with_floating(op, name, x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        if (x.numel() == 0) {
            return;
        }
        const Launch launch(x);
        const Inputs<T, 3> in({grad, x, up});
        with_pack<T>(in.template in_packs<kVector<T>>(), [&](auto n) {
            const Extent extent = in.extent(n.value);
            STOKER_LAUNCH((activation_backward<Activation, kGated, T, n.value>), blocks_for(extent.all, kBackward),
                          kThreads, 0, launch.stream(), in.matrix[0], in.matrix[1], in.matrix[2], data<T>(grad_x),
                          data<T>(grad_up), extent);
        });
    });
    return {grad_x, grad_up};
}

Tensor swiglu(Tensor gate, Tensor up) {
    return forward<Silu, true>("swiglu", "gate", gate, up);
}
std::tuple<Tensor, Tensor> swiglu_grad(Tensor grad, Tensor gate, Tensor up) {
    return backward<Silu, true>("swiglu", "gate", grad, gate, up);
}
Tensor geglu(Tensor gate, Tensor up) {
    return forward<Gelu, true>("geglu", "gate", gate, up);
}
std::tuple<Tensor, Tensor> geglu_grad(Tensor grad, Tensor gate, Tensor up) {
    return backward<Gelu, true>("geglu", "gate", grad, gate, up);
}
Tensor gelu(Tensor x) {
    return forward<Gelu, false>("gelu", "x", x, x);
}
Tensor gelu_grad(Tensor grad, Tensor x) {
    return std::get<0>(backward<Gelu, false>("gelu", "x", grad, x, x));
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
    m.def("swiglu_grad(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
    m.def("geglu(Tensor gate, Tensor up) -> Tensor");
    m.def("geglu_grad(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
    m.def("gelu(Tensor x) -> Tensor");
    m.def("gelu_grad(Tensor grad, Tensor x) -> Tensor");
}

STOKER_KERNELS(m) {
    m.impl("swiglu", TORCH_BOX(&stoker::swiglu));
    m.impl("swiglu_grad", TORCH_BOX(&stoker::swiglu_grad));
    m.impl("geglu", TORCH_BOX(&stoker::geglu));
    m.impl("geglu_grad", TORCH_BOX(&stoker::geglu_grad));
    m.impl("gelu", TORCH_BOX(&stoker::gelu));
    m.impl("gelu_grad", TORCH_BOX(&stoker::gelu_grad));
}
