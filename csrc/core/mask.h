// SPDX-License-Identifier: BSD-3-Clause
//
// Who sees whom. What key_padding_mask, attn_mask, causality and always-visible keys mean: element by element
// (mask_sum, which the kernels' vectors are tested against), and by tile, where the kernels' loop bounds come from.
//
//   bool True = float -inf = hidden; any other float is added to the scaled score; is_causal hides s > l +
//   causal_offset; the last always_visible_keys keys are outside all of it.
//
// Keys that key_padding_mask hides are dropped before any kernel looks at them: attention does not depend on the
// order of keys, so the kernels work on the list of kept keys. attn_mask is classified once a call in tiles of
// kMaskTileRows x kMaskTileKeys, shared by all samples and heads that share the mask.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/inline.h"
#include "core/parallel.h"
#include "core/problem.h"

namespace fused_mha::core {

inline constexpr std::int64_t kMaskTileRows = 48;
inline constexpr std::int64_t kMaskTileKeys = 32;

enum class TileClass : std::uint8_t {
  kHidden,  // no element is visible
  kFree,    // every element is visible and nothing is added
  kMixed    // anything else: elements must be looked at
};

/// A mask element as the number it adds to the score; hidden is -inf whatever the dtype.
FUSED_MHA_INLINE double mask_element(const View& mask, std::int64_t offset) {
  switch (mask.dtype) {
    case DType::kBool:
      return static_cast<const std::uint8_t*>(mask.data)[offset] != 0 ? -std::numeric_limits<double>::infinity() : 0.0;
    case DType::kFloat64:
      return static_cast<const double*>(mask.data)[offset];
    case DType::kFloat32:
      return static_cast<const float*>(mask.data)[offset];
    case DType::kBFloat16:
      return to_float(static_cast<const BFloat16*>(mask.data)[offset]);
    case DType::kFloat16:
      return to_float(static_cast<const Float16*>(mask.data)[offset]);
  }
  return 0.0;
}

/// What all masks add to the score of (n, h, l, s); -inf where s is hidden. Two finite masks never add up to -inf in
/// double unless both are near its own limits; those are clamped to the lowest finite value.
double mask_sum(const AttentionProblem& problem, std::int64_t n, std::int64_t h, std::int64_t l, std::int64_t s);

FUSED_MHA_INLINE bool is_visible(const AttentionProblem& problem, std::int64_t n, std::int64_t h, std::int64_t l,
                                 std::int64_t s) {
  return mask_sum(problem, n, h, l, s) != -std::numeric_limits<double>::infinity();
}

/// Some ascending key positions s: first, first + 1, ... where `positions` is null, else positions[0 .. count).
struct KeySpan {
  const std::int64_t* positions = nullptr;
  std::int64_t first = 0;
  std::int64_t count = 0;

  FUSED_MHA_INLINE std::int64_t operator[](std::int64_t i) const { return positions ? positions[i] : first + i; }
  FUSED_MHA_INLINE KeySpan part(std::int64_t begin, std::int64_t size) const {
    return positions ? KeySpan{positions + begin, positions[begin], size} : KeySpan{nullptr, first + begin, size};
  }
};

class MaskPlan {
 public:
  MaskPlan(const AttentionProblem& problem, const Parallel& parallel);

  /// Keys of sample n that key_padding_mask leaves.
  FUSED_MHA_INLINE const KeySpan& kept_keys(std::int64_t n) const { return kept_data_[padding_is_shared_ ? 0 : n]; }

  /// Whether a finite key_padding_mask adds something to some score.
  FUSED_MHA_INLINE bool has_padding_bias() const { return has_padding_bias_; }

  /// Class of the tile of query rows [row_begin, row_end), all inside one tile of the row grid, and at most
  /// kMaskTileKeys keys.
  FUSED_MHA_INLINE TileClass tile_class(std::int64_t n, std::int64_t h, std::int64_t row_begin, std::int64_t row_end,
                                        const KeySpan& keys) const {
    if (keys.count == 0) return TileClass::kHidden;
    const std::int64_t lowest = keys[0];
    const std::int64_t highest = keys[keys.count - 1];
    const std::int64_t masked = masked_keys_;
    TileClass result = has_padding_bias_ ? TileClass::kMixed : TileClass::kFree;
    if (lowest >= masked) return result;
    const bool all_masked = highest < masked;
    if (is_causal_ && highest > row_begin + causal_offset_) {
      if (all_masked && lowest >= row_end + causal_offset_) return TileClass::kHidden;
      result = TileClass::kMixed;
    }
    if (attn_classes_ != nullptr) {
      const TileClass attn = attn_class(n, h, row_begin, lowest, all_masked ? highest : masked - 1);
      if (attn == TileClass::kHidden && all_masked) return TileClass::kHidden;
      if (attn != TileClass::kFree) result = TileClass::kMixed;
    }
    return result;
  }

  /// Whether attn_mask has to be read for a tile that is kMixed: false where it is free there.
  FUSED_MHA_INLINE bool attn_mask_matters(std::int64_t n, std::int64_t h, std::int64_t row_begin,
                                          const KeySpan& keys) const {
    if (attn_classes_ == nullptr || keys.count == 0 || keys[0] >= masked_keys_) return false;
    const std::int64_t highest = keys[keys.count - 1];
    return attn_class(n, h, row_begin, keys[0], highest < masked_keys_ ? highest : masked_keys_ - 1) !=
           TileClass::kFree;
  }

 private:
  FUSED_MHA_INLINE TileClass attn_class(std::int64_t n, std::int64_t h, std::int64_t row_begin, std::int64_t lowest,
                                        std::int64_t highest) const {
    const std::int64_t row_tile = mask_rows_ == 1 ? 0 : row_begin / kMaskTileRows;
    const TileClass* row =
        attn_classes_ +
        (((mask_batch_ == 1 ? 0 : n) * mask_heads_ + (mask_heads_ == 1 ? 0 : h)) * row_tiles_ + row_tile) * key_tiles_;
    TileClass result = row[lowest / kMaskTileKeys];
    for (std::int64_t tile = lowest / kMaskTileKeys + 1; tile <= highest / kMaskTileKeys; ++tile) {
      if (row[tile] != result) return TileClass::kMixed;
    }
    return result;
  }
  void find_kept_keys(const AttentionProblem& problem, const Parallel& parallel);
  void classify_attn_mask(const AttentionProblem& problem, const Parallel& parallel);

  std::vector<std::vector<std::int64_t>> positions_;
  std::vector<KeySpan> kept_;
  std::vector<TileClass> classes_;
  const KeySpan* kept_data_ = nullptr;
  const TileClass* attn_classes_ = nullptr;
  std::int64_t masked_keys_ = 0;
  std::int64_t mask_batch_ = 1;
  std::int64_t mask_heads_ = 1;
  std::int64_t mask_rows_ = 1;
  std::int64_t row_tiles_ = 1;
  std::int64_t key_tiles_ = 1;
  std::int64_t causal_offset_ = 0;
  bool is_causal_ = false;
  bool padding_is_shared_ = true;
  bool has_padding_bias_ = false;
};

}  // namespace fused_mha::core
