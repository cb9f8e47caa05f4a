// SPDX-License-Identifier: BSD-3-Clause
//
// Masks on a tile of scores: which groups of keys need work at all, which elements are hidden, what is added. Reads
// attn_mask where it lies, in its own dtype and strides.
#pragma once

#include "core/mask.h"
#include "cpu/pack.h"
#include "cpu/plan.h"
#include "cpu/prefetch.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

template <typename T>
inline constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

/// What the masks say of one tile: a class per group of keys and, in mixed groups, a visibility bit per element.
template <std::int64_t kKeys>
struct TileMask {
  static constexpr std::int64_t kGroups = kKeys / kGroupKeys;
  core::TileClass classes[kGroups];
  bool reads_attn_mask[kGroups];
  bool any_visible = false;
  bool any_mixed = false;
  bool any_hidden = false;
  std::uint32_t visible[kBlockRows][kGroups];  // bit per key; written for mixed groups only

  bool is_hidden(std::int64_t group) const { return classes[group] == core::TileClass::kHidden; }
  bool is_mixed(std::int64_t group) const { return classes[group] == core::TileClass::kMixed; }
  bool sees(std::int64_t row, std::int64_t key) const {
    const std::int64_t group = key / kGroupKeys;
    if (!is_mixed(group)) return !is_hidden(group);
    return ((visible[row][group] >> (key % kGroupKeys)) & 1U) != 0;
  }
};

/// Rows [row_begin, row_begin + rows) of head h of sample n.
struct RowBlock {
  std::int64_t n = 0;
  std::int64_t h = 0;
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
};

FUSED_MHA_INLINE KeySpan group_of(const KeySpan& keys, std::int64_t group) {
  const std::int64_t begin = group * kGroupKeys;
  const std::int64_t left = keys.count - begin;
  return left <= 0 ? KeySpan{nullptr, 0, 0} : keys.part(begin, left < kGroupKeys ? left : kGroupKeys);
}

template <std::int64_t kKeys>
static void classify_tile(const CallConstants& call, const RowBlock& block, const KeySpan& keys,
                          TileMask<kKeys>& mask) {
  mask.any_visible = false;
  mask.any_mixed = false;
  mask.any_hidden = false;
  for (std::int64_t group = 0; group < TileMask<kKeys>::kGroups; ++group) {
    const KeySpan part = group_of(keys, group);
    core::TileClass result =
        call.masks->tile_class(block.n, block.h, block.row_begin, block.row_begin + block.rows, part);
    if (result == core::TileClass::kFree && part.count < kGroupKeys) result = core::TileClass::kMixed;
    mask.classes[group] = result;
    mask.reads_attn_mask[group] =
        result == core::TileClass::kMixed && call.masks->attn_mask_matters(block.n, block.h, block.row_begin, part);
    mask.any_visible = mask.any_visible || result != core::TileClass::kHidden;
    mask.any_mixed = mask.any_mixed || result == core::TileClass::kMixed;
    mask.any_hidden = mask.any_hidden || result == core::TileClass::kHidden;
  }
}

/// Bits of the keys that exist.
FUSED_MHA_INLINE std::uint32_t existing_bits(const KeySpan& keys) {
  return keys.count >= kGroupKeys ? 0xFFFFFFFFU : (1U << keys.count) - 1U;
}

/// Bits of the keys that causality leaves for a row whose last visible key is `last`.
FUSED_MHA_INLINE std::uint32_t causal_bits(const KeySpan& keys, std::int64_t masked, std::int64_t last) {
  if (keys.positions == nullptr && keys.first + keys.count <= masked) {
    const std::int64_t seen = last - keys.first + 1;
    return seen <= 0 ? 0U : seen >= kGroupKeys ? 0xFFFFFFFFU : (1U << seen) - 1U;
  }
  std::uint32_t bits = 0xFFFFFFFFU;
  for (std::int64_t i = 0; i < keys.count; ++i) {
    if (keys[i] > last && keys[i] < masked) bits &= ~(1U << i);
  }
  return bits;
}

/// A mask's number in the accumulation type. A finite double must not become infinite by rounding to float.
template <typename T>
FUSED_MHA_INLINE T mask_number(double value) {
  if constexpr (std::is_same_v<T, float>) {
    constexpr double kLargest = std::numeric_limits<float>::max();
    if (value > kLargest && value != std::numeric_limits<double>::infinity()) return std::numeric_limits<float>::max();
    if (value < -kLargest && value != -std::numeric_limits<double>::infinity()) {
      return std::numeric_limits<float>::lowest();
    }
  }
  return static_cast<T>(value);
}

/// Keys of a group that attn_mask reaches: its first ones.
FUSED_MHA_INLINE std::int64_t reached_keys(const KeySpan& keys, std::int64_t masked) {
  std::int64_t reached = keys.count;
  while (reached > 0 && keys[reached - 1] >= masked) --reached;
  return reached;
}

/// Where the numbers of the keys that are reached lie, from the first of their row.
struct MaskOffsets {
  std::int64_t reached = 0;
  std::int64_t offsets[kGroupKeys];

  MaskOffsets(const core::View& mask, const KeySpan& keys, std::int64_t masked) : reached(reached_keys(keys, masked)) {
    for (std::int64_t i = 0; i < reached; ++i) offsets[i] = keys[i] * mask.strides[3];
  }
};

/// How attn_mask acts on one row of a group of keys: apply(row, values, visible) adds what is added and clears the bits
/// of what is hidden. One type a way of lying in memory, so that the choice is made outside the loop over rows.
struct NoAttnMask {
  template <typename T, int kVectors>
  FUSED_MHA_INLINE void apply(std::int64_t, Vec<T>, Vec<T> (&)[kVectors], std::uint32_t&) const {}
};

struct BoolInOrder {
  const std::uint8_t* first;  // of row 0, key 0
  std::int64_t row_stride;

  template <typename T, int kVectors>
  FUSED_MHA_INLINE void apply(std::int64_t row, Vec<T>, Vec<T> (&)[kVectors], std::uint32_t& visible) const {
    visible &= ~nonzero_bits32(first + row * row_stride);
  }
};

/// The last group of a row, or one that attn_mask ends in.
struct BoolPart {
  const std::uint8_t* first;
  std::int64_t row_stride;
  std::int64_t reached;

  template <typename T, int kVectors>
  FUSED_MHA_INLINE void apply(std::int64_t row, Vec<T>, Vec<T> (&)[kVectors], std::uint32_t& visible) const {
    std::uint8_t bytes[kGroupKeys] = {};
    std::memcpy(bytes, first + row * row_stride, static_cast<std::size_t>(reached));
    visible &= ~nonzero_bits32(bytes);
  }
};

struct BoolGathered {
  const std::uint8_t* first_row;
  std::int64_t row_stride;
  const MaskOffsets& keys;

  template <typename T, int kVectors>
  FUSED_MHA_INLINE void apply(std::int64_t row, Vec<T>, Vec<T> (&)[kVectors], std::uint32_t& visible) const {
    const std::uint8_t* bytes = first_row + row * row_stride;
    std::uint32_t hidden = 0;
    for (std::int64_t i = 0; i < keys.reached; ++i) {
      hidden |= static_cast<std::uint32_t>(bytes[keys.offsets[i]] != 0 ? 1 : 0) << i;
    }
    visible &= ~hidden;
  }
};

/// Adds numbers(v), the numbers of vector v, to each vector of scores.
template <typename T, int kVectors, typename Numbers>
FUSED_MHA_INLINE void add_numbers(const Numbers& numbers, Vec<T> factor, Vec<T> (&values)[kVectors],
                                  std::uint32_t& visible) {
  for (int v = 0; v < kVectors; ++v) {
    const Vec<T> added = numbers(v);
    visible &= ~(equal_bits<T>(added, broadcast<T>(kMinusInfinity<T>)) << (v * kLanes<T>));
    values[v] = fma(added, factor, values[v]);
  }
}

template <typename Storage>
struct FloatInOrder {
  const Storage* first;
  std::int64_t row_stride;

  template <typename T, int kVectors>
  FUSED_MHA_INLINE void apply(std::int64_t row, Vec<T> factor, Vec<T> (&values)[kVectors],
                              std::uint32_t& visible) const {
    const Storage* numbers = first + row * row_stride;
    add_numbers<T, kVectors>([&](int v) { return load_as<T, Storage>(numbers + v * kLanes<T>); }, factor, values,
                             visible);
  }
};

template <typename Storage>
struct FloatPart {
  const Storage* first;
  std::int64_t row_stride;
  std::int64_t reached;

  template <typename T, int kVectors>
  FUSED_MHA_INLINE void apply(std::int64_t row, Vec<T> factor, Vec<T> (&values)[kVectors],
                              std::uint32_t& visible) const {
    const Storage* numbers = first + row * row_stride;
    const auto some = [&](int v) {
      const std::int64_t left = reached - v * kLanes<T>;
      return left > 0 ? load_some<T>(numbers + v * kLanes<T>, 1, left) : Vec<T>{};
    };
    add_numbers<T, kVectors>(some, factor, values, visible);
  }
};

/// Numbers that do not lie side by side, those of keys that padding scatters above all.
template <typename Storage>
struct FloatGathered {
  const Storage* first_row;
  std::int64_t row_stride;
  const MaskOffsets& keys;

  template <typename T, int kVectors>
  FUSED_MHA_INLINE void apply(std::int64_t row, Vec<T> factor, Vec<T> (&values)[kVectors],
                              std::uint32_t& visible) const {
    const Storage* from = first_row + row * row_stride;
    T numbers[kGroupKeys] = {};
    for (std::int64_t i = 0; i < keys.reached; ++i) numbers[i] = element_as<T>(from[keys.offsets[i]]);
    add_numbers<T, kVectors>([&](int v) { return load<T>(numbers + v * kLanes<T>); }, factor, values, visible);
  }
};

/// Doubles for sums in float: beyond float's range they are clamped, one by one.
struct DoubleClamped {
  const double* first_row;
  std::int64_t row_stride;
  const MaskOffsets& keys;

  template <typename T, int kVectors>
  FUSED_MHA_INLINE void apply(std::int64_t row, Vec<T> factor, Vec<T> (&values)[kVectors],
                              std::uint32_t& visible) const {
    const double* from = first_row + row * row_stride;
    T numbers[kGroupKeys] = {};
    for (std::int64_t i = 0; i < keys.reached; ++i) numbers[i] = mask_number<T>(from[keys.offsets[i]]);
    add_numbers<T, kVectors>([&](int v) { return load<T>(numbers + v * kLanes<T>); }, factor, values, visible);
  }
};

/// A mixed group of one tile: scores, maxima and visibility bits of its rows.
template <typename T>
struct MixedGroup {
  KeySpan keys;
  const T* key_bias = nullptr;  // [kGroupKeys] or null
  T* scores = nullptr;          // rows `ld` apart
  std::int64_t ld = 0;
  T* best = nullptr;                 // a vector a row
  std::uint32_t* visible = nullptr;  // rows `visible_ld` apart
  std::int64_t visible_ld = 0;
};

/// Masks a mixed group in place: adds what is added, puts -inf where hidden, folds each row's lanewise maximum into
/// `best` and writes its visibility bits.
template <typename T, typename AttnMask>
static void mask_group(const CallConstants& call, const RowBlock& block, const MixedGroup<T> group,
                       const AttnMask attn_mask) {
  constexpr int kVectors = static_cast<int>(kGroupKeys) / kLanes<T>;
  const core::AttentionProblem& problem = *call.problem;
  const KeySpan keys = group.keys;
  const std::int64_t masked = problem.masked_keys();
  const bool is_causal = problem.is_causal && keys[keys.count - 1] > block.row_begin + problem.causal_offset;
  const std::uint32_t existing = existing_bits(keys);
  const Vec<T> factor = broadcast<T>(static_cast<T>(call.bias_factor));
  const Vec<T> hidden = broadcast<T>(kMinusInfinity<T>);
  // Locals: what is reached through a pointer would be read again after every store.
  const T* key_bias = group.key_bias;
  T* scores = group.scores;
  T* best = group.best;
  std::uint32_t* bits = group.visible;
  const std::int64_t rows = block.rows;
  const std::int64_t first_last = block.row_begin + problem.causal_offset;
  for (std::int64_t row = 0; row < rows; ++row) {
    std::uint32_t visible = existing;
    if (is_causal) visible &= causal_bits(keys, masked, first_last + row);
    Vec<T> values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = load<T>(scores + v * kLanes<T>);
    attn_mask.template apply<T, kVectors>(row, factor, values, visible);
    if (key_bias != nullptr) {
      for (int v = 0; v < kVectors; ++v) values[v] = fma(load<T>(key_bias + v * kLanes<T>), factor, values[v]);
    }
    Vec<T> largest = load<T>(best);
    for (int v = 0; v < kVectors; ++v) {
      values[v] = select<T>(visible >> (v * kLanes<T>), values[v], hidden);
      largest = max(largest, values[v]);
      store<T>(scores + v * kLanes<T>, values[v]);
    }
    store<T>(best, largest);
    *bits = visible;
    scores += group.ld;
    best += kLanes<T>;
    bits += group.visible_ld;
  }
}

/// mask_group with a float attn_mask of this type.
template <typename T, typename Storage>
static void mask_group_by_numbers(const CallConstants& call, const RowBlock& block, const MixedGroup<T>& group,
                                  const Storage* first_row, bool side_by_side, std::int64_t reached) {
  const core::View& mask = call.problem->attn_mask;
  const std::int64_t row_stride = mask.strides[2];
  if (side_by_side && reached == kGroupKeys) {
    mask_group<T>(call, block, group, FloatInOrder<Storage>{first_row + group.keys.first, row_stride});
  } else if (side_by_side) {
    mask_group<T>(call, block, group, FloatPart<Storage>{first_row + group.keys.first, row_stride, reached});
  } else {
    const MaskOffsets keys(mask, group.keys, call.problem->masked_keys());
    mask_group<T>(call, block, group, FloatGathered<Storage>{first_row, row_stride, keys});
  }
}

/// mask_group with attn_mask read as it lies.
template <typename T>
static void mask_group_by_attn_mask(const CallConstants& call, const RowBlock& block, const MixedGroup<T>& group) {
  const core::View& mask = call.problem->attn_mask;
  const std::int64_t masked = call.problem->masked_keys();
  const std::int64_t reached = reached_keys(group.keys, masked);
  const std::int64_t first_row = mask.offset(block.n, block.h, block.row_begin, 0);
  const std::int64_t row_stride = mask.strides[2];
  const bool side_by_side = mask.strides[3] == 1 && group.keys.positions == nullptr;
  const auto by_numbers = [&]<typename Storage>(const Storage* data) {
    mask_group_by_numbers<T>(call, block, group, data + first_row, side_by_side, reached);
  };
  switch (mask.dtype) {
    case DType::kBool: {
      const auto* bytes = static_cast<const std::uint8_t*>(mask.data) + first_row;
      if (side_by_side && reached == kGroupKeys) {
        mask_group<T>(call, block, group, BoolInOrder{bytes + group.keys.first, row_stride});
      } else if (side_by_side) {
        mask_group<T>(call, block, group, BoolPart{bytes + group.keys.first, row_stride, reached});
      } else {
        const MaskOffsets keys(mask, group.keys, masked);
        mask_group<T>(call, block, group, BoolGathered{bytes, row_stride, keys});
      }
      return;
    }
    case DType::kFloat32:
      return by_numbers(static_cast<const float*>(mask.data));
    case DType::kBFloat16:
      return by_numbers(static_cast<const BFloat16*>(mask.data));
    case DType::kFloat16:
      return by_numbers(static_cast<const Float16*>(mask.data));
    case DType::kFloat64:
      if constexpr (std::is_same_v<T, double>) {
        return by_numbers(static_cast<const double*>(mask.data));
      } else {
        const MaskOffsets keys(mask, group.keys, masked);
        return mask_group<T>(call, block, group,
                             DoubleClamped{static_cast<const double*>(mask.data) + first_row, row_stride, keys});
      }
  }
}

/// Masks all mixed groups of a tile. `scores` rows are kKeys apart, `key_bias` is null or one number a key, `best`
/// holds a vector a row.
template <typename T, std::int64_t kKeys>
static void mask_tile(const CallConstants& call, const RowBlock& block, const KeySpan& keys, const T* key_bias,
                      T* scores, T* best, TileMask<kKeys>& mask) {
  for (std::int64_t index = 0; index < TileMask<kKeys>::kGroups; ++index) {
    if (!mask.is_mixed(index)) continue;
    const std::int64_t first = index * kGroupKeys;
    const MixedGroup<T> group{group_of(keys, index),
                              key_bias == nullptr ? nullptr : key_bias + first,
                              scores + first,
                              kKeys,
                              best,
                              &mask.visible[0][index],
                              TileMask<kKeys>::kGroups};
    if (mask.reads_attn_mask[index]) {
      mask_group_by_attn_mask<T>(call, block, group);
    } else {
      mask_group<T>(call, block, group, NoAttnMask{});
    }
  }
}

/// Has the mask numbers that mask_tile will read asked for while the scores are computed.
template <std::int64_t kKeys>
static void prefetch_masks(const CallConstants& call, const RowBlock& block, const KeySpan& keys,
                           const TileMask<kKeys>& mask, Prefetcher& prefetcher) {
  const core::View& attn_mask = call.problem->attn_mask;
  if (!attn_mask || keys.positions != nullptr || attn_mask.strides[3] != 1) return;
  std::int64_t first = 0;
  std::int64_t end = TileMask<kKeys>::kGroups;
  while (first < end && !mask.reads_attn_mask[first]) ++first;
  while (first < end && !mask.reads_attn_mask[end - 1]) --end;
  if (first == end) return;
  const auto size = static_cast<std::int64_t>(core::size_of(attn_mask.dtype));
  const std::int64_t key = keys.first + first * kGroupKeys;
  prefetcher.add_to_tile(
      static_cast<const std::byte*>(attn_mask.data) + attn_mask.offset(block.n, block.h, block.row_begin, key) * size,
      attn_mask.strides[2] * size, block.rows, (end - first) * kGroupKeys * size);
}

/// key_padding_mask's numbers for a span of kept keys, zeros up to `padded`.
template <typename T>
static void load_key_bias(const core::AttentionProblem& problem, std::int64_t n, const KeySpan& keys,
                          std::int64_t padded, T* bias) {
  const core::View& mask = problem.key_padding_mask;
  const std::int64_t masked = problem.masked_keys();
  for (std::int64_t i = 0; i < padded; ++i) {
    const bool reached = i < keys.count && keys[i] < masked;
    bias[i] = reached ? mask_number<T>(core::mask_element(mask, mask.offset(n, 0, 0, keys[i]))) : T{0};
  }
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
