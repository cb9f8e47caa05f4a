// SPDX-License-Identifier: BSD-3-Clause
//
// What every kernel is given of a call, by value, and the small functions that all of them share.
//
// Scores live in a unit in which exp is exp2 and the sum of two finite masks stays finite: a stored score t stands for
// the natural score t * unit * ln 2. unit is 1 without float masks and 4 with them (finfo.min / 4 * log2(e), twice, is
// still finite).
//
//   t = query_factor * (query . key) + bias_factor * masks         P = exp2(unit * (t - row_max)) / row_sum
//
// Sum is the type that sums are kept in: double for float64, float for everything else.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <type_traits>

#include "core/dropout.h"
#include "core/problem.h"
#include "cuda/device.h"

namespace fused_mha::cuda {

/// One byte a tile of a mask (masks.h), with stride 0 where the mask broadcasts; null data: every tile is mixed.
struct MaskClasses {
  const std::uint8_t* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
};

/// The problem's sizes. Positions fit in 32 bits, offsets do not.
struct Sizes {
  int batch = 0;
  int heads = 0;
  int kv_heads = 0;
  int group = 1;  // heads that share one of keys and values
  int queries = 0;
  int keys = 0;
  int masked_keys = 0;    // the keys behind are outside of all masks
  int causal_offset = 0;  // cut to what makes a difference
  int head_dim = 0;
  int value_dim = 0;
};

/// Numbers of the call in the type of sums: made on the host, so that kernels have them as constants, not in registers.
template <typename Sum>
struct Factors {
  Sum query_factor = Sum{1};
  Sum bias_factor = Sum{1};
  Sum unit = Sum{1};
  Sum dropout_scale = Sum{1};
  Sum scale = Sum{1};
};

struct Call {
  core::AttentionProblem problem;
  Sizes sizes;
  Factors<float> float_factors;
  Factors<double> double_factors;
  bool has_bias = false;  // scores are scaled before masks act on them, not when exp2 is taken
  bool has_dropout = false;
  std::uint32_t dropout_threshold = 0;
  std::uint32_t first_sample = 0;             // what dropout adds to n
  const std::int64_t* rng_numbers = nullptr;  // in device memory: a captured graph reads what is there when it runs
  std::int64_t rng_stride = 1;
  MaskClasses attn_classes;
  MaskClasses padding_classes;
};

/// Where the statistics of query l of (n, h) are.
__device__ __forceinline__ std::int64_t row_index(const Sizes& sizes, int n, int h, int l) {
  return (static_cast<std::int64_t>(n) * sizes.heads + h) * sizes.queries + l;
}

template <typename Sum>
inline constexpr Sum kMinusInfinity = -std::numeric_limits<Sum>::infinity();

template <typename Sum>
__device__ __forceinline__ const Factors<Sum>& factors_of(const Call& call) {
  if constexpr (std::is_same_v<Sum, double>) {
    return call.double_factors;
  } else {
    return call.float_factors;
  }
}

/// The Philox key of the call, had from device memory.
__device__ __forceinline__ core::PhiloxKey dropout_key(const Call& call) {
  if (!call.has_dropout) return {};
  return core::dropout_key(
      {static_cast<std::uint64_t>(call.rng_numbers[0]), static_cast<std::uint64_t>(call.rng_numbers[call.rng_stride])});
}
/// Which element of the grid of tiles a thread block works on: blockIdx.x taken apart, innermost dimension first.
class BlockIndex {
 public:
  __device__ BlockIndex() : rest_(blockIdx.x) {}
  __device__ int take(int size) {
    const auto result = static_cast<int>(rest_ % static_cast<unsigned>(size));
    rest_ /= static_cast<unsigned>(size);
    return result;
  }
  __device__ int rest() const { return static_cast<int>(rest_); }

 private:
  unsigned rest_;
};

/// body(first row, part of the output) for the tiles of Tiles::Careful that make up a tile of Tiles and a part of its
/// output. Other threads of the block may still be at what they did before.
template <typename Tiles, typename Body>
__device__ __forceinline__ void in_careful_parts(int first_row, int part, const Body& body) {
  if constexpr (!Tiles::kIsCareful) {
    using Careful = typename Tiles::Careful;
    static_assert(Tiles::kRows % Careful::kRows == 0 && Tiles::kOutput % Careful::kOutput == 0);
    constexpr int kParts = Tiles::kOutput / Careful::kOutput;
#pragma unroll 1
    for (int row = 0; row < Tiles::kRows; row += Careful::kRows) {
#pragma unroll 1
      for (int i = 0; i < kParts; ++i) {
        __syncthreads();
        body.template operator()<Careful>(first_row + row, part * kParts + i);
      }
    }
  }
}

/// Where a tile of scores lies.
struct TilePlace {
  int n = 0;
  int h = 0;
  int query_begin = 0;
  int key_begin = 0;
};

/// One (n, h) of a strided tensor: rows x columns elements, of which `rows` and `columns` exist.
struct Matrix {
  const void* data = nullptr;  // of element (0, 0)
  core::DType dtype = core::DType::kFloat32;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
  int rows = 0;
  int columns = 0;
};

template <typename Tiles>
__device__ __forceinline__ Matrix matrix_of(const core::View& view, int n, int h, int rows, int columns) {
  const std::size_t element = Tiles::kElementBytes != 0 ? Tiles::kElementBytes : core::size_of(view.dtype);
  const auto begin = static_cast<std::size_t>(view.offset(n, h, 0, 0)) * element;
  return {static_cast<const unsigned char*>(view.data) + begin,
          view.dtype,
          view.strides[2],
          view.strides[3],
          rows,
          columns};
}

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float exp2_of(float x) { return exp2_fast(x); }
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }
__device__ __forceinline__ float reciprocal_of(float x) { return reciprocal_fast(x); }
__device__ __forceinline__ double reciprocal_of(double x) { return 1.0 / x; }
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

/// An element of any floating dtype as a sum. Only float64 problems have elements of float64.
template <typename Sum>
__device__ __forceinline__ Sum load_element(const void* data, core::DType dtype, std::int64_t offset) {
  if constexpr (std::is_same_v<Sum, double>) {
    return static_cast<const double*>(data)[offset];
  } else {
    if (dtype == core::DType::kFloat32) return static_cast<const float*>(data)[offset];
    if (dtype == core::DType::kFloat16) return widen(static_cast<const half*>(data)[offset]);
    return widen(static_cast<const bfloat16*>(data)[offset]);
  }
}

/// Rounds to the dtype; any floating one.
template <typename Sum>
__device__ __forceinline__ void store_rounded(void* data, core::DType dtype, std::int64_t offset, Sum value) {
  switch (dtype) {
    case core::DType::kFloat64:
      static_cast<double*>(data)[offset] = static_cast<double>(value);
      break;
    case core::DType::kFloat32:
      static_cast<float*>(data)[offset] = static_cast<float>(value);
      break;
    case core::DType::kFloat16:
      static_cast<half*>(data)[offset] = narrow<half>(static_cast<float>(value));
      break;
    default:
      static_cast<bfloat16*>(data)[offset] = narrow<bfloat16>(static_cast<float>(value));
      break;
  }
}

/// The largest, or the sum, over lanes that differ in the bits of `lanes`.
template <int kLanes, typename Sum>
__device__ __forceinline__ Sum largest_of_lanes(Sum value) {
#pragma unroll
  for (int bit = 1; bit < kWarpSize; bit *= 2) {
    if ((kLanes & bit) != 0) value = larger(value, __shfl_xor_sync(kAllLanes, value, bit));
  }
  return value;
}
template <int kLanes, typename Sum>
__device__ __forceinline__ Sum sum_of_lanes(Sum value) {
#pragma unroll
  for (int bit = 1; bit < kWarpSize; bit *= 2) {
    if ((kLanes & bit) != 0) value += __shfl_xor_sync(kAllLanes, value, bit);
  }
  return value;
}

}  // namespace fused_mha::cuda
