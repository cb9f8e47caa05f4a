// SPDX-License-Identifier: BSD-3-Clause
//
// Masks on the device: what they mean is core/mask.h's, element by element (mask_sum).
//
//   classes    what classify_masks.h found before: a class for each kClassRows x kClassKeys elements of a mask
//   schedule   the tiles of scores that a thread block visits: hidden ones never
//   elements   in mixed tiles the masks are read where they lie, any dtype, any stride
//
// A hidden element's score is -inf and its bit in `visible` 0; NaN in what it was made from ends there.
#pragma once

#include "cuda/call.h"

namespace fused_mha::cuda {

inline constexpr int kClassRows = 64;
inline constexpr int kClassKeys = 64;

enum class MaskClass : std::uint8_t { kHidden, kFree, kMixed };

/// What has to be done about masks in a tile of scores.
enum class TileKind : int {
  kHidden,    // nothing is visible
  kFree,      // everything is, and nothing is added
  kGeometry,  // causality or the end of the keys cuts through it
  kMasked     // attn_mask or key_padding_mask has to be read as well
};

template <typename Sum, typename Element>
__device__ __forceinline__ Sum mask_number(Element element) {
  if constexpr (std::is_same_v<Element, std::uint8_t>) {
    return element != 0 ? kMinusInfinity<Sum> : Sum{0};
  } else if constexpr (std::is_same_v<Element, double> && std::is_same_v<Sum, float>) {
    // A finite double must not become infinite by rounding.
    constexpr float kLargest = std::numeric_limits<float>::max();
    const float rounded = static_cast<float>(element);
    if (element < -kLargest && element != kMinusInfinity<double>) return -kLargest;
    if (element > kLargest && element != -kMinusInfinity<double>) return kLargest;
    return rounded;
  } else if constexpr (sizeof(Element) == 2) {
    return widen(element);
  } else {
    return static_cast<Sum>(element);
  }
}

/// body(typed pointer to the mask's elements); bool as bytes.
template <typename Body>
__device__ __forceinline__ void with_elements(const core::View& mask, const Body& body) {
  switch (mask.dtype) {
    case core::DType::kBool:
      return body(static_cast<const std::uint8_t*>(mask.data));
    case core::DType::kFloat64:
      return body(static_cast<const double*>(mask.data));
    case core::DType::kFloat32:
      return body(static_cast<const float*>(mask.data));
    case core::DType::kBFloat16:
      return body(static_cast<const bfloat16*>(mask.data));
    case core::DType::kFloat16:
      return body(static_cast<const half*>(mask.data));
  }
}

/// One element of a floating view of any dtype, as a sum.
template <typename Sum>
__device__ __forceinline__ Sum element_of(const core::View& view, std::int64_t offset) {
  Sum number{0};
  with_elements(view, [&](const auto* elements) { number = mask_number<Sum>(elements[offset]); });
  return number;
}

// ---- Schedule ----

/// The class of all class tiles that rows [row_begin, row_end) and keys [key_begin, key_end) touch.
__device__ inline MaskClass class_of_range(const MaskClasses& classes, int n, int h, int row_begin, int row_end,
                                           int key_begin, int key_end) {
  if (classes.data == nullptr) return MaskClass::kMixed;
  const std::uint8_t* of_head = classes.data + n * classes.batch_stride + h * classes.head_stride;
  const int first_row = row_begin / kClassRows;
  const int last_row = classes.row_stride == 0 ? first_row : (row_end - 1) / kClassRows;
  const int last_key = (key_end - 1) / kClassKeys;
  auto result = MaskClass::kMixed;
  bool first = true;
  for (int row = first_row; row <= last_row; ++row) {
    for (int key = key_begin / kClassKeys; key <= last_key; ++key) {
      const auto found = static_cast<MaskClass>(of_head[row * classes.row_stride + key]);
      if (!first && found != result) return MaskClass::kMixed;
      result = found;
      first = false;
    }
  }
  return result;
}

/// The kind of the tile with `rows` queries and `keys` keys at `place`. What lies beyond the last query does not count,
/// or is hidden, with kKeysInRows: a NaN of a key must not meet it in the sum over queries.
template <bool kKeysInRows>
__device__ inline TileKind tile_kind(const Call& call, const TilePlace& place, int rows, int keys) {
  const core::AttentionProblem& problem = call.problem;
  const int masked = call.sizes.masked_keys;
  const int key_end = place.key_begin + keys < call.sizes.keys ? place.key_begin + keys : call.sizes.keys;
  const int row_end = place.query_begin + rows < call.sizes.queries ? place.query_begin + rows : call.sizes.queries;
  if (place.key_begin >= key_end || place.query_begin >= row_end) return TileKind::kHidden;
  const bool has_tail =
      place.key_begin + keys > call.sizes.keys || (kKeysInRows && place.query_begin + rows > call.sizes.queries);
  auto kind = has_tail ? TileKind::kGeometry : TileKind::kFree;
  if (place.key_begin >= masked) return kind;
  const bool all_masked = key_end <= masked;
  const int masked_end = all_masked ? key_end : masked;
  if (problem.is_causal && masked_end - 1 > place.query_begin + call.sizes.causal_offset) {
    if (all_masked && place.key_begin >= row_end + call.sizes.causal_offset) return TileKind::kHidden;
    kind = TileKind::kGeometry;
  }
  if (problem.key_padding_mask) {
    const MaskClass found = class_of_range(call.padding_classes, place.n, 0, 0, 1, place.key_begin, masked_end);
    if (found == MaskClass::kHidden && all_masked) return TileKind::kHidden;
    if (found != MaskClass::kFree) kind = TileKind::kMasked;
  }
  if (problem.attn_mask) {
    const MaskClass found =
        class_of_range(call.attn_classes, place.n, place.h, place.query_begin, row_end, place.key_begin, masked_end);
    if (found == MaskClass::kHidden && all_masked) return TileKind::kHidden;
    if (found != MaskClass::kFree) kind = TileKind::kMasked;
  }
  return kind;
}

struct TileStep {
  int index = -1;  // of the tile in its dimension; -1 behind the last
  TileKind kind = TileKind::kHidden;

  __device__ bool exists() const { return index >= 0; }
};

/// The visible tiles of a thread block, in ascending order: over keys for its queries, or over queries for its keys.
/// Every lane looks at one tile, so a warp knows 32 tiles by one look. All lanes of the block call it together.
template <typename Tiles, bool kKeysInRows>
class TileSchedule {
 public:
  /// `place`: the block's own rows; tiles [begin, end) of the other dimension.
  __device__ TileSchedule(const Call& call, const TilePlace& place, int begin, int end)
      : call_(call), place_(place), base_(begin - kWarpSize), end_(end) {}

  __device__ TileStep next() {
    while (visible_ == 0) {
      base_ += kWarpSize;
      if (base_ >= end_) return {};
      look();
    }
    const int bit = __ffs(static_cast<int>(visible_)) - 1;
    visible_ &= visible_ - 1;
    const bool masked = ((masked_ >> bit) & 1U) != 0;
    const bool geometry = ((geometry_ >> bit) & 1U) != 0;
    return {base_ + bit, masked ? TileKind::kMasked : geometry ? TileKind::kGeometry : TileKind::kFree};
  }

 private:
  __device__ void look() {
    const int index = base_ + static_cast<int>(threadIdx.x) % kWarpSize;
    TilePlace place = place_;
    auto kind = TileKind::kHidden;
    if (index < end_) {
      const int begin = index * Tiles::kColumns;
      if constexpr (kKeysInRows) {
        place.query_begin = begin;
        kind = tile_kind<true>(call_, place, Tiles::kColumns, Tiles::kRows);
      } else {
        place.key_begin = begin;
        kind = tile_kind<false>(call_, place, Tiles::kRows, Tiles::kColumns);
      }
    }
    visible_ = __ballot_sync(kAllLanes, kind != TileKind::kHidden);
    geometry_ = __ballot_sync(kAllLanes, kind == TileKind::kGeometry);
    masked_ = __ballot_sync(kAllLanes, kind == TileKind::kMasked);
  }

  const Call& call_;
  TilePlace place_;
  int base_;
  int end_;
  std::uint32_t visible_ = 0;
  std::uint32_t geometry_ = 0;
  std::uint32_t masked_ = 0;
};

// ---- Elements ----

/// Calls body(staged, l, s) for kStageRows of the warp's rows of a tile, `staged` being the element's place in the
/// warp's own shared memory. Lanes walk along the keys, as matrices of (l, s) lie.
template <typename Tiles, bool kKeysInRows, typename Body>
__device__ __forceinline__ void for_each_staged(const TilePlace& place, int first_row, typename Tiles::Sum* stage,
                                                const Body& body) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll 2
  for (int index = lane; index < Tiles::kStageRows * Tiles::kColumns; index += kWarpSize) {
    const int row = kKeysInRows ? index % Tiles::kStageRows : index / Tiles::kColumns;
    const int column = kKeysInRows ? index / Tiles::kStageRows : index % Tiles::kColumns;
    const int tile_row = Tiles::warp_row(first_row + row);
    body(stage[row * Tiles::kStagePitch + column], place.query_begin + (kKeysInRows ? column : tile_row),
         place.key_begin + (kKeysInRows ? tile_row : column));
  }
}

/// Stages what the masks add, in the unit of scores, -inf where they hide.
template <typename Tiles, bool kKeysInRows>
__device__ __forceinline__ void stage_masks(const Call& call, const Factors<typename Tiles::Sum>& factors,
                                            const TilePlace& place, int first_row, typename Tiles::Sum* stage) {
  using Sum = typename Tiles::Sum;
  const core::AttentionProblem& problem = call.problem;
  const auto is_reached = [&](int l, int s) { return s < call.sizes.masked_keys && l < call.sizes.queries; };
  if (problem.attn_mask) {
    const core::View& mask = problem.attn_mask;
    with_elements(mask, [&](const auto* elements) {
      elements += mask.offset(place.n, place.h, 0, 0);
      for_each_staged<Tiles, kKeysInRows>(place, first_row, stage, [&](Sum& staged, int l, int s) {
        staged = is_reached(l, s)
                     ? mask_number<Sum>(elements[l * mask.strides[2] + s * mask.strides[3]]) * factors.bias_factor
                     : Sum{0};
      });
    });
  } else {
    for_each_staged<Tiles, kKeysInRows>(place, first_row, stage, [](Sum& staged, int, int) { staged = Sum{0}; });
  }
  if (problem.key_padding_mask) {
    const core::View& mask = problem.key_padding_mask;
    with_elements(mask, [&](const auto* elements) {
      elements += mask.offset(place.n, 0, 0, 0);
      for_each_staged<Tiles, kKeysInRows>(place, first_row, stage, [&](Sum& staged, int l, int s) {
        if (!is_reached(l, s) || staged == kMinusInfinity<Sum>) return;
        const Sum number = mask_number<Sum>(elements[s * mask.strides[3]]);
        staged = number == kMinusInfinity<Sum> ? number : staged + number * factors.bias_factor;
      });
    });
  }
}

/// Calls body(staged, slot, c) for each of a thread's elements among the kStageRows that were staged.
template <typename Tiles, typename Body>
__device__ __forceinline__ void for_each_unstaged(int first_row, const typename Tiles::Sum* stage, const Body& body) {
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
    if (slot / Tiles::kStageSlots * Tiles::kStageRows != first_row) continue;
    const typename Tiles::Sum* row =
        stage + (Tiles::warp_slot(slot) - first_row) * Tiles::kStagePitch + Tiles::column_base();
#pragma unroll
    for (int c = 0; c < Tiles::kColumnSlots; ++c) body(row[Tiles::column_step(c)], slot, c);
  }
}

/// Makes scores of products: scales them where call.has_bias, adds what is added, hides what is hidden. Bit c of
/// visible[r] says whether column slot c of row slot r is visible. `stages`: Tiles::kStageElements for each warp.
template <typename Tiles, bool kKeysInRows>
__device__ __forceinline__ void mask_scores(const Call& call, const Factors<typename Tiles::Sum>& factors,
                                            const TilePlace& place, TileKind kind, typename Tiles::Scores& scores,
                                            std::uint32_t (&visible)[Tiles::kRowSlots], typename Tiles::Sum* stages) {
  using Sum = typename Tiles::Sum;
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) visible[slot] = 0xFFFFFFFFU;
  if (kind == TileKind::kMasked) {
    Sum* stage = stages + Tiles::warp() * Tiles::kStageElements;
#pragma unroll 1
    for (int first = 0; first < Tiles::kWarpRows; first += Tiles::kStageRows) {
      __syncwarp();
      stage_masks<Tiles, kKeysInRows>(call, factors, place, first, stage);
      __syncwarp();
      for_each_unstaged<Tiles>(first, stage, [&](Sum added, int slot, int c) {
        Sum& score = scores.at(slot, c);
        if (call.has_bias) score = multiply_add(score, factors.query_factor, added);
        if (added == kMinusInfinity<Sum>) {
          score = added;
          visible[slot] &= ~(1U << c);
        }
      });
    }
  } else if (call.has_bias) {
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
#pragma unroll
      for (int c = 0; c < Tiles::kColumnSlots; ++c) scores.at(slot, c) *= factors.query_factor;
    }
  }
  if (kind == TileKind::kFree) return;
  // An element's key is base + step of one dimension of the tile, its query of the other; steps are constants.
  const int key_base = place.key_begin + (kKeysInRows ? Tiles::row_base() : Tiles::column_base());
  const int query_base = place.query_begin + (kKeysInRows ? Tiles::column_base() : Tiles::row_base());
  const int keys_left = call.sizes.keys - key_base;
  const int queries_left = kKeysInRows ? call.sizes.queries - query_base : std::numeric_limits<int>::max();
  const int masked_left = call.sizes.masked_keys - key_base;
  // Key k is in query q's past where k - q <= diagonal.
  const int diagonal =
      call.problem.is_causal ? query_base + call.sizes.causal_offset - key_base : std::numeric_limits<int>::max();
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
#pragma unroll
    for (int c = 0; c < Tiles::kColumnSlots; ++c) {
      const int key = kKeysInRows ? Tiles::row_step(slot) : Tiles::column_step(c);
      const int query = kKeysInRows ? Tiles::column_step(c) : Tiles::row_step(slot);
      const bool is_future = key - query > diagonal && key < masked_left;
      if (key >= keys_left || query >= queries_left || is_future) {
        scores.at(slot, c) = kMinusInfinity<Sum>;
        visible[slot] &= ~(1U << c);
      }
    }
  }
}

}  // namespace fused_mha::cuda
