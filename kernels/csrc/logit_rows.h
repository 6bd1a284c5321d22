// Rows of logits [..., classes] where they lie, and one number for each of them.
#pragma once

#include <climits>
#include <optional>

#include "tensors.h"

namespace stoker {
namespace {  // other files have other rows

// Rows of logits where they lie: evenly spaced and dense in themselves, else in a copy.
struct LogitRows {
    Tensor tensor;
    int64_t count, stride;
    int width;

    LogitRows(const char* op, const Tensor& logits) : tensor(logits), count(rows_of(logits)) {
        STOKER_CHECK(logits.dim() >= 1 && logits.size(-1) >= 1 && logits.size(-1) <= INT32_MAX - 65536, op,
                     ": logits is ", describe(logits), "; expected classes in the last dimension");
        STOKER_CHECK(count <= INT32_MAX, op, ": ", count, " rows of logits; expected less than 2^31");
        width = static_cast<int>(logits.size(-1));
        const std::optional<int64_t> spacing = spacing_of(logits, logits.dim() - 1);
        if (spacing && (width == 1 || logits.stride(-1) == 1)) {
            stride = *spacing;
        } else {
            tensor = dense(logits);
            stride = width;
        }
    }
};

inline void check_per_row(const char* op, const char* what, const Tensor& tensor, const Tensor& logits, ScalarType dtype) {
    bool fits = tensor.scalar_type() == dtype && tensor.dim() == logits.dim() - 1;
    for (int64_t i = 0; fits && i < tensor.dim(); ++i) {
        fits = tensor.size(i) == logits.size(i);
    }
    STOKER_CHECK(fits, op, ": ", what, " is ", describe(tensor), ", logits is ", describe(logits), "; expected one ",
                 name_of(dtype), " per row of logits");
    check_same_device(op, logits, {&tensor});
}

// One number per row, evenly spaced (0 apart in a gradient that was expanded), else in a copy.
struct PerRow {
    Tensor tensor;
    int64_t stride;

    explicit PerRow(const Tensor& given) : tensor(given) {
        const std::optional<int64_t> spacing = spacing_of(given, given.dim());
        tensor = spacing ? given : dense(given);
        stride = spacing.value_or(1);
    }
};

// Whether packs of N elements lie at the same places of the rows of two matrices.
template <int N, class T, class G>
bool are_alike(const T* a, int64_t a_stride, const G* b, int64_t b_stride) {
    const auto place = [](const auto* address) {
        return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) / sizeof(*address));
    };
    return (place(a) - place(b)) % N == 0 && (a_stride - b_stride) % N == 0;
}

}  // namespace
}  // namespace stoker
