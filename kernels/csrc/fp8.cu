// float8 with one scale per tensor: the largest magnitude, then every number times its scale, rounded to the nearest even
// and cut off at the format's largest; a transposed copy comes out of the same pass.
//
// The largest is taken as whole numbers: the bits of magnitudes order like their values, with NaN above infinity, so one
// NaN makes the scale and all numbers NaN. Each block leaves its own, and each block of the second pass takes them all.
//
// claim: amax_of_blocks<.*>: 16-byte loads
// claim: quantize_(flat|both)<.*>: 16-byte loads and stores
#include <cuda_fp8.h>

#include "numbers.cuh"
#include "reduce.cuh"
#include "tensors.h"

namespace stoker {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 16;  // elements of a thread at once: 16 bytes of float8
constexpr int kTile = 64;   // rows and columns of a block that transposes
constexpr int kTileRow = kTile + 4;

__device__ __forceinline__ unsigned magnitude(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits & 0x7fffffffu;
}

// Elements in whole pieces by all threads, the rest one by one; not aligned: all one by one.
template <class T>
__global__ void amax_of_blocks(const T* __restrict__ x, unsigned* __restrict__ highest, int64_t elements, bool is_fit) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    const int64_t me = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t pieces = is_fit ? elements / kPiece : 0;
    unsigned most = 0;
    for (int64_t p = me; p < pieces; p += stride) {
        const Pack<T, kPiece> pack = load<T, kPiece>(x + p * kPiece);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
            most = max(most, magnitude(widen<float>(pack[i])));
        }
    }
    for (int64_t i = pieces * kPiece + me; i < elements; i += stride) {
        most = max(most, magnitude(widen<float>(x[i])));
    }
    most = over_block<Largest, kThreads>(most);
    if (threadIdx.x == 0) {
        highest[blockIdx.x] = most;
    }
}

template <bool kWide>
constexpr double kLargest = kWide ? 57344.0 : 448.0;  // e5m2, e4m3

// From what the first pass left; in double, as the reference has it. The first block writes it down.
template <bool kWide>
__device__ __forceinline__ float scale_of(const unsigned* highest, int blocks, double smallest, float* scale) {
    __shared__ float shared;
    unsigned most = 0;
    for (int b = threadIdx.x; b < blocks; b += kThreads) {
        most = max(most, highest[b]);
    }
    most = over_block<Largest, kThreads>(most);
    if (threadIdx.x == 0) {
        float amax;
        memcpy(&amax, &most, sizeof(amax));
        const double divisor = static_cast<double>(amax) < smallest ? smallest : static_cast<double>(amax);
        shared = static_cast<float>(kLargest<kWide> / divisor);
        if (blockIdx.x == 0) {
            *scale = shared;
        }
    }
    __syncthreads();
    return shared;
}

template <bool kWide>
__device__ __forceinline__ uint8_t to_fp8(float value) {
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, kWide ? __NV_E5M2 : __NV_E4M3);
}

template <class T, bool kWide>
__device__ __forceinline__ Pack<uint8_t, kPiece> quantized(const Pack<T, kPiece>& pack, float scale) {
    Pack<uint8_t, kPiece> out;
#pragma unroll
    for (int i = 0; i < kPiece; i += 2) {
        const float2 pair{widen<float>(pack[i]) * scale, widen<float>(pack[i + 1]) * scale};
        const __nv_fp8x2_storage_t both = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, kWide ? __NV_E5M2 : __NV_E4M3);
        out[i] = static_cast<uint8_t>(both & 0xff);
        out[i + 1] = static_cast<uint8_t>(both >> 8);
    }
    return out;
}

template <class T, bool kWide>
__global__ void quantize_flat(const T* __restrict__ x, const unsigned* __restrict__ highest, int blocks,
                              uint8_t* __restrict__ out, float* __restrict__ scale_out, int64_t elements,
                              double smallest, bool is_fit) {
    const float scale = scale_of<kWide>(highest, blocks, smallest, scale_out);
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    const int64_t me = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t pieces = is_fit ? elements / kPiece : 0;
    for (int64_t p = me; p < pieces; p += stride) {
        store<uint8_t, kPiece>(out + p * kPiece, quantized<T, kWide>(load<T, kPiece>(x + p * kPiece), scale));
    }
    for (int64_t i = pieces * kPiece + me; i < elements; i += stride) {
        out[i] = to_fp8<kWide>(widen<float>(x[i]) * scale);
    }
}

// x [rows, columns] to out, alike, and turned [columns, rows]. A thread has 16 neighbours of a row, then of a column.
template <class T, bool kWide>
__global__ void quantize_both(const T* __restrict__ x, const unsigned* __restrict__ highest, int blocks,
                              uint8_t* __restrict__ out, uint8_t* __restrict__ turned, float* __restrict__ scale_out,
                              int64_t rows, int64_t columns, double smallest, bool is_fit) {
    __shared__ __align__(16) uint8_t tile[kTile][kTileRow];  // by column
    const float scale = scale_of<kWide>(highest, blocks, smallest, scale_out);
    const int64_t across = (columns + kTile - 1) / kTile, tiles = across * ((rows + kTile - 1) / kTile);
    const int line = threadIdx.x / (kTile / kPiece), begin = threadIdx.x % (kTile / kPiece) * kPiece;
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        const int64_t first_row = t / across * kTile, first_column = t % across * kTile;
        const int64_t row = first_row + line, column = first_column + begin;
        if (row < rows && column < columns) {
            const int64_t at = row * columns + column;
            if (is_fit) {
                const Pack<uint8_t, kPiece> pack = quantized<T, kWide>(load<T, kPiece>(x + at), scale);
                store<uint8_t, kPiece>(out + at, pack);
#pragma unroll
                for (int i = 0; i < kPiece; ++i) {
                    tile[begin + i][line] = pack[i];
                }
            } else {
                for (int i = 0; i < kPiece && column + i < columns; ++i) {
                    const uint8_t value = to_fp8<kWide>(widen<float>(x[at + i]) * scale);
                    out[at + i] = value;
                    tile[begin + i][line] = value;
                }
            }
        }
        __syncthreads();
        const int64_t turned_row = first_column + line, turned_column = first_row + begin;
        if (turned_row < columns && turned_column < rows) {
            const int64_t at = turned_row * rows + turned_column;
            if (is_fit) {
                Pack<uint8_t, kPiece> pack;
                memcpy(&pack, &tile[line][begin], kPiece);
                store<uint8_t, kPiece>(turned + at, pack);
            } else {
                for (int i = 0; i < kPiece && turned_column + i < rows; ++i) {
                    turned[at + i] = tile[line][begin + i];
                }
            }
        }
        __syncthreads();
    }
}

// float32, bfloat16 and float16: there is no gradient to check in float64.
template <class F>
void with_values(ScalarType dtype, F&& function) {
    STOKER_CHECK(dtype != ScalarType::Double, "quantize_fp8: x is float64; expected float32, bfloat16 or float16");
    with_floating("quantize_fp8", "x", dtype, [&](auto of_x) {
        if constexpr (!std::is_same_v<typename decltype(of_x)::type, double>) {
            function(of_x);
        }
    });
}

struct Result {
    Tensor values, turned, scale;
};

template <class T, bool kWide>
void launch_all(const Tensor& x, const Result& result, bool with_turned, double smallest) {
    const Launch launch(x);
    const int64_t elements = x.numel();
    const bool is_fit = is_aligned<1>(1, data<T>(x), data<uint8_t>(result.values));
    const unsigned blocks = grid_for(std::max<int64_t>((elements + kThreads * kPiece - 1) / (kThreads * kPiece), 1),
                                     launch.device(), 8);
    const Tensor highest = new_tensor(x, {blocks}, ScalarType::Int);
    STOKER_LAUNCH((amax_of_blocks<T>), blocks, kThreads, 0, launch.stream(), data<T>(x), data<unsigned>(highest),
                  elements, is_fit);
    if (!with_turned) {
        STOKER_LAUNCH((quantize_flat<T, kWide>), blocks, kThreads, 0, launch.stream(), data<T>(x),
                      data<unsigned>(highest), static_cast<int>(blocks), data<uint8_t>(result.values),
                      data<float>(result.scale), elements, smallest, is_fit);
        return;
    }
    const int64_t rows = x.size(0), columns = x.size(1);
    const int64_t tiles = ((rows + kTile - 1) / kTile) * ((columns + kTile - 1) / kTile);
    const bool rows_fit = is_fit && rows % kPiece == 0 && columns % kPiece == 0 &&
                          is_aligned<1>(1, data<uint8_t>(result.turned));
    STOKER_LAUNCH((quantize_both<T, kWide>), grid_for(std::max<int64_t>(tiles, 1), launch.device(), 8), kThreads, 0,
                  launch.stream(), data<T>(x), data<unsigned>(highest), static_cast<int>(blocks),
                  data<uint8_t>(result.values), data<uint8_t>(result.turned), data<float>(result.scale), rows, columns,
                  smallest, rows_fit);
}

Result quantize(const Tensor& given_x, bool is_wide, bool with_turned, double smallest) {
    STOKER_CHECK(!with_turned || given_x.dim() == 2, "quantize_fp8: x is ", describe(given_x),
                 "; expected [rows, columns] for a transposed copy");
    const Tensor x = dense(given_x);
    const ScalarType dtype = is_wide ? ScalarType::Float8_e5m2 : ScalarType::Float8_e4m3fn;
    Result result{new_like(x, dtype), x, new_tensor(x, {}, ScalarType::Float)};
    if (with_turned) {
        result.turned = new_tensor(x, {x.size(1), x.size(0)}, dtype);
    }
    with_values(x.scalar_type(), [&](auto of_x) {
        using T = typename decltype(of_x)::type;
        is_wide ? launch_all<T, true>(x, result, with_turned, smallest)
                : launch_all<T, false>(x, result, with_turned, smallest);
    });
    return result;
}

std::tuple<Tensor, Tensor> quantize_fp8(Tensor x, bool is_wide, double smallest) {
    Result result = quantize(x, is_wide, false, smallest);
    return {result.values, result.scale};
}

std::tuple<Tensor, Tensor, Tensor> quantize_fp8_transposed(Tensor x, bool is_wide, double smallest) {
    Result result = quantize(x, is_wide, true, smallest);
    return {result.values, result.scale, result.turned};
}

}  // namespace
}  // namespace stoker

STOKER_LIBRARY(m) {
    m.def("quantize_fp8(Tensor x, bool is_wide, float smallest) -> (Tensor, Tensor)");
    m.def("quantize_fp8_transposed(Tensor x, bool is_wide, float smallest) -> (Tensor, Tensor, Tensor)");
}

STOKER_KERNELS(m) {
    m.impl("quantize_fp8", TORCH_BOX(&stoker::quantize_fp8));
    m.impl("quantize_fp8_transposed", TORCH_BOX(&stoker::quantize_fp8_transposed));
}
