// Stochastic rounding of float32 to bfloat16 with bits that depend on an element's place in the whole tensor only; the
// same bits as kernels/rounding.py. Owns where a local element lies, and which 16 bits it gets.
#pragma once

#include "multi_tensor.cuh"
#include "philox.cuh"

namespace stoker {

// A local part of a tensor. Its rows are those of all leading dimensions; after dimensions that are whole have been
// merged with the one in front of them, at most three are left: local row r lies in global row
// base + r % size[1] + (r / size[1]) % size[0] * step[1] + r / size[1] / size[0] * step[0].
struct Place {
    uint64_t seed;
    int64_t width;   // of the local part
    int64_t start;   // its first column
    int64_t groups;  // counters per global row: eight columns each
    int64_t base, size[2], step[2];
    uint32_t update, site;

    __device__ __forceinline__ int64_t global_row(int64_t row) const {
        if (size[1] == 0) {  // one dimension
            return base + row;
        }
        const int64_t outer = row / size[1];
        return base + (row - outer * size[1]) + outer % size[0] * step[1] + outer / size[0] * step[0];
    }

    __device__ __forceinline__ Words words(int64_t global_row, int64_t column) const {
        const int64_t counter = global_row * groups + column / 8;
        return philox({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), update, site}, seed);
    }
};

// The 16-bit words of N local elements from `index` on. One call of the generator where they lie in one row and in one
// group of N, which is so for all packs if widths and starts are multiples of N; else one per element.
template <int N>
__device__ __forceinline__ Pack<uint32_t, N> rounding_words(const Place& place, int64_t index) {
    int64_t row = index / place.width;
    int64_t column = index - row * place.width;
    Pack<uint32_t, N> out;
    const auto half = [](const Words& w, int k) {
        const uint32_t word = k < 4 ? (k < 2 ? w.w0 : w.w1) : (k < 6 ? w.w2 : w.w3);
        return k % 2 == 0 ? word & 0xffffu : word >> 16;
    };
    const int64_t c = place.start + column;
    if (N > 1 && c % N == 0 && column + N <= place.width) {
        const Words w = place.words(place.global_row(row), c);
        const bool upper = N == 4 && c % 8 == 4;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            out[i] = N == 4 && upper ? half(w, 4 + i % 4) : half(w, i);
        }
        return out;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int64_t mine = place.start + column;
        out[i] = half(place.words(place.global_row(row), mine), static_cast<int>(mine % 8));
        if (++column == place.width) {
            column = 0;
            ++row;
        }
    }
    return out;
}

// Up or down in magnitude: `word` is added below the bits that stay. Infinity and NaN stay.
__device__ __forceinline__ __nv_bfloat16 round_by(float value, uint32_t word) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        return narrow<__nv_bfloat16>(value);
    }
    return __ushort_as_bfloat16(static_cast<unsigned short>((bits + word) >> 16));
}

// ---- on the host

// Addresses as an op gets them: four numbers (seed, update, site, dimensions) for each tensor, then its start and its shape.
class Places {
  public:
    Places(const char* op, const std::vector<int64_t>& numbers) : op_(op), numbers_(numbers) {}

    // The next tensor's.
    Place next(const Tensor& local) {
        const int64_t seed = take(), update = take(), site = take(), dims = take();
        STOKER_CHECK(0 <= update && update <= UINT32_MAX && 0 <= site && site <= INT32_MAX, op_, ": update ", update,
                     " or site ", site, " is out of range");
        STOKER_CHECK(dims >= 1 && dims == local.dim(), op_, ": an address of ", dims, " dimensions for ", describe(local));
        std::vector<int64_t> start(dims), shape(dims);
        for (int64_t& number : start) {
            number = take();
        }
        for (int64_t& number : shape) {
            number = take();
        }
        for (int64_t d = 0; d < dims; ++d) {
            STOKER_CHECK(0 <= start[d] && start[d] <= shape[d] - local.size(d), op_, ": ", describe(local),
                         " does not lie in the whole at dimension ", d);
        }
        Place place{};
        place.seed = static_cast<uint64_t>(seed);
        place.update = static_cast<uint32_t>(update);
        place.site = static_cast<uint32_t>(site) + (1u << 31);
        place.width = local.size(-1);
        place.start = start.back();
        place.groups = (shape.back() + 7) / 8;
        lay_out_rows(place, local, start, shape);
        return place;
    }

    void check_finished() const {
        STOKER_CHECK(next_ == numbers_.size(), op_, ": addresses for more tensors than there are");
    }

  private:
    int64_t take() {
        STOKER_CHECK(next_ < numbers_.size(), op_, ": addresses for fewer tensors than there are");
        return numbers_[next_++];
    }

    void lay_out_rows(Place& place, const Tensor& local, const std::vector<int64_t>& start,
                      const std::vector<int64_t>& shape) const {
        struct Dimension {
            int64_t size, start, whole;
        };
        std::vector<Dimension> rows;
        for (size_t d = 0; d + 1 < start.size(); ++d) {
            const Dimension mine{local.size(static_cast<int64_t>(d)), start[d], shape[d]};
            if (!rows.empty() && mine.size == mine.whole) {
                Dimension& outer = rows.back();
                outer = {outer.size * mine.whole, outer.start * mine.whole, outer.whole * mine.whole};
            } else {
                rows.push_back(mine);
            }
        }
        STOKER_CHECK(rows.size() <= 3, op_, ": ", describe(local), " is cut in more than three of its leading dimensions");
        if (rows.size() <= 1) {
            place.base = rows.empty() ? 0 : rows[0].start;
            return;
        }
        if (rows.size() == 2) {
            rows.insert(rows.begin(), Dimension{1, 0, 1});
        }
        place.size[0] = rows[1].size;
        place.size[1] = rows[2].size;
        place.step[1] = rows[2].whole;
        place.step[0] = rows[1].whole * rows[2].whole;
        place.base = rows[0].start * place.step[0] + rows[1].start * place.step[1] + rows[2].start;
    }

    const char* op_;
    const std::vector<int64_t>& numbers_;
    size_t next_ = 0;
};

}  // namespace stoker
