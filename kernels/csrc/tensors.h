// Between torch and the kernels, through torch's stable ABI only (no ATen, no c10): checks with one clear error, new
// tensors, the dtype of a tensor as a type, the stream to launch on, and registration under the right device.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#ifndef STOKER_EMULATION
#include <dlfcn.h>
#endif

#include "device.cuh"

// Schemas: STOKER_LIBRARY(m) { m.def("name(Tensor x) -> Tensor"); }
// Kernels: STOKER_KERNELS(m) { m.impl("name", TORCH_BOX(&function)); }
#ifdef STOKER_EMULATION
#define STOKER_DEVICE CPU
#else
#define STOKER_DEVICE CUDA
#endif
#define STOKER_LIBRARY(m) STABLE_TORCH_LIBRARY_FRAGMENT(stoker, m)
#define STOKER_KERNELS(m) STOKER_KERNELS_FOR(STOKER_DEVICE, m)
#define STOKER_KERNELS_FOR(device, m) STABLE_TORCH_LIBRARY_IMPL(stoker, device, m)

// STOKER_CHECK(condition, "rmsnorm: weight is ", describe(weight), ", expected ...")
#define STOKER_CHECK(condition, ...)         \
    do {                                     \
        if (!(condition)) {                  \
            ::stoker::refuse(__VA_ARGS__); \
        }                                    \
    } while (false)

namespace stoker {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Words>
[[noreturn]] void refuse(const Words&... words) {
    std::ostringstream text;
    (text << ... << words);
    throw std::runtime_error(text.str());
}

inline const char* name_of(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Float: return "float32";
        case ScalarType::BFloat16: return "bfloat16";
        case ScalarType::Half: return "float16";
        case ScalarType::Double: return "float64";
        case ScalarType::Long: return "int64";
        case ScalarType::Int: return "int32";
        case ScalarType::Byte: return "uint8";
        case ScalarType::Bool: return "bool";
        default: return "another dtype";
    }
}

// "bfloat16 [2, 3]"
inline std::string describe(const Tensor& tensor) {
    std::ostringstream text;
    text << name_of(tensor.scalar_type()) << " [";
    for (int64_t i = 0; i < tensor.dim(); ++i) {
        text << (i == 0 ? "" : ", ") << tensor.size(i);
    }
    text << "]";
    return text.str();
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
    if (a.dim() != b.dim()) {
        return false;
    }
    for (int64_t i = 0; i < a.dim(); ++i) {
        if (a.size(i) != b.size(i)) {
            return false;
        }
    }
    return true;
}

// The dispatcher sends a call here when any argument is on this device; the others may still be elsewhere.
inline void check_same_device(const char* op, const Tensor& first, std::initializer_list<const Tensor*> others) {
    for (const Tensor* other : others) {
        STOKER_CHECK(other->is_cpu() == first.is_cpu() && other->get_device_index() == first.get_device_index(), op,
                     ": tensors are on different devices");
    }
}

// Product of all sizes but the last.
inline int64_t rows_of(const Tensor& tensor) {
    int64_t rows = 1;
    for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
        rows *= tensor.size(i);
    }
    return rows;
}

// Elements from one index to the next of the first `dims` dimensions taken as one; none if that is not one number.
inline std::optional<int64_t> spacing_of(const Tensor& tensor, int64_t dims) {
    std::optional<int64_t> spacing;
    int64_t next = 0;
    for (int64_t i = dims - 1; i >= 0; --i) {
        if (tensor.size(i) == 1) {
            continue;
        }
        if (spacing && tensor.stride(i) != next) {
            return std::nullopt;
        }
        spacing = spacing.value_or(tensor.stride(i));
        next = tensor.stride(i) * tensor.size(i);
    }
    return spacing.value_or(0);
}

inline Tensor dense(const Tensor& tensor) {
    return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Contiguous, of this shape and device.
inline Tensor new_like(const Tensor& tensor, std::optional<ScalarType> dtype = std::nullopt) {
    return torch::stable::new_empty(tensor, tensor.sizes(), dtype);
}

inline Tensor new_tensor(const Tensor& on_device_of, std::vector<int64_t> shape, ScalarType dtype) {
    return torch::stable::new_empty(on_device_of, {shape.data(), shape.size()}, dtype);
}

template <class T>
T* data(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

// Whether rows of `width` elements that begin at these addresses can be read in pieces of 16 bytes.
template <int N, class... T>
bool is_aligned(int64_t width, const T*... addresses) {
    return width % N == 0 && ((reinterpret_cast<uintptr_t>(addresses) % 16 == 0) && ...);
}

// ---- dtypes as types

template <class T>
struct Of {
    using type = T;
    static constexpr ScalarType dtype = std::is_same_v<T, float>           ? ScalarType::Float
                                        : std::is_same_v<T, __nv_bfloat16> ? ScalarType::BFloat16
                                        : std::is_same_v<T, __half>        ? ScalarType::Half
                                                                           : ScalarType::Double;
};

// Calls function(Of<T>{}) for the floating dtype. float64 exists in the emulated build only, for gradcheck.
template <class F>
void with_floating(const char* op, const char* what, ScalarType dtype, F&& function) {
    switch (dtype) {
        case ScalarType::Float: return function(Of<float>{});
        case ScalarType::BFloat16: return function(Of<__nv_bfloat16>{});
        case ScalarType::Half: return function(Of<__half>{});
#ifdef STOKER_EMULATION
        case ScalarType::Double: return function(Of<double>{});
#endif
        default: refuse(op, ": ", what, " is ", name_of(dtype), "; expected float32, bfloat16 or float16");
    }
}

// Calls function(Of<W>{}) for a parameter's dtype beside activations in T: T itself or float32.
template <class T, class F>
void with_parameter(const char* op, const char* what, ScalarType dtype, F&& function) {
    if (dtype == Of<T>::dtype) {
        return function(Of<T>{});
    }
    if constexpr (!std::is_same_v<T, float>) {
        if (dtype == ScalarType::Float) {
            return function(Of<float>{});
        }
    }
    refuse(op, ": ", what, " is ", name_of(dtype), "; beside ", name_of(Of<T>::dtype), " expected that or float32");
}

// ---- where to launch

// Makes the tensor's device current while it lives, and knows the stream that torch works on there.
class Launch {
  public:
#ifdef STOKER_EMULATION
    explicit Launch(const Tensor&) {}
    void* stream() const { return nullptr; }
    int device() const { return 0; }
#else
    explicit Launch(const Tensor& tensor) : device_(tensor.get_device_index()), guard_(device_) {}
    // Not in libtorch_cpu, and only newer headers have a way around it: looked up, so that this library loads without CUDA.
    void* stream() const {
        using Getter = int32_t (*)(int32_t, void**);
        static const auto getter = reinterpret_cast<Getter>(of_torch_cuda("aoti_torch_get_current_cuda_stream"));
        STOKER_CHECK(getter != nullptr, "this torch has no CUDA");
        void* stream = nullptr;
        STOKER_CHECK(getter(device_, &stream) == 0, "no current stream on device ", device_);
        return stream;
    }
    int device() const { return device_; }

  private:
    // Python loads torch's libraries with RTLD_LOCAL: no other library finds their symbols without asking the one by name.
    static void* of_torch_cuda(const char* symbol) {
        void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        return dlsym(library == nullptr ? RTLD_DEFAULT : library, symbol);
    }

    int32_t device_;
    torch::stable::accelerator::DeviceGuard guard_;
#endif
};

}  // namespace stoker
