// SPDX-License-Identifier: BSD-3-Clause
//
// Masks on a tile of scores: which groups of keys need work at all, which elements are hidden, what is added. Reads
// attn_mask where it lies, in its own dtype and strides.
#pragma once

#include "core/mask.h"
#include "cpu/pack.h"
#include "cpu/plan.h"

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
  std::uint32_t visible[kBlockRows][kGroups];  // bit per key; written for visible groups of masked tiles only

  bool is_hidden(std::int64_t group) const { return classes[group] == core::TileClass::kHidden; }
  bool is_mixed(std::int64_t group) const { return classes[group] == core::TileClass::kMixed; }
  bool sees(std::int64_t row, std::int64_t key) const {
    return ((visible[row][key / kGroupKeys] >> (key % kGroupKeys)) & 1U) != 0;
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
  for (std::int64_t group = 0; group < TileMask<kKeys>::kGroups; ++group) {
    const KeySpan part = group_of(keys, group);
    core::TileClass result =
        call.masks->tile_class(block.n, block.h, block.row_begin, block.row_begin + block.rows, part);
    if (result == core::TileClass::kFree && part.count < kGroupKeys) result = core::TileClass::kMixed;
    mask.classes[group] = result;
    mask.reads_attn_mask[group] = result == core::TileClass::kMixed &&
                                  call.masks->attn_mask_matters(block.n, block.h, block.row_begin, part);
    mask.any_visible = mask.any_visible || result != core::TileClass::kHidden;
    mask.any_mixed = mask.any_mixed || result == core::TileClass::kMixed;
  }
}

/// Bits of the keys that exist and that causality leaves for row l.
FUSED_MHA_INLINE std::uint32_t structural_bits(const core::AttentionProblem& problem, const KeySpan& keys,
                                               std::int64_t l) {
  std::uint32_t bits = keys.count >= 32 ? 0xFFFFFFFFU : (1U << keys.count) - 1U;
  if (!problem.is_causal || keys[keys.count - 1] <= l) return bits;
  const std::int64_t masked = problem.masked_keys();
  if (keys.positions == nullptr && keys.first + keys.count <= masked) {
    const std::int64_t seen = l - keys.first + 1;
    return seen <= 0 ? 0 : seen >= 32 ? bits : bits & ((1U << seen) - 1U);
  }
  for (std::int64_t i = 0; i < keys.count; ++i) {
    if (keys[i] > l && keys[i] < masked) bits &= ~(1U << i);
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

/// Numbers of one mask row for a group of keys, gathered one by one; 0 where no mask reaches.
template <typename T>
static void gather_mask(const core::View& mask, std::int64_t row_offset, const KeySpan& keys, std::int64_t masked,
                        T* numbers) {
  for (std::int64_t i = 0; i < kGroupKeys; ++i) {
    const bool reached = i < keys.count && keys[i] < masked;
    numbers[i] = reached ? mask_number<T>(core::mask_element(mask, row_offset + keys[i] * mask.strides[3])) : T{0};
  }
}

static std::uint32_t gather_hidden_bits(const core::View& mask, std::int64_t row_offset, const KeySpan& keys,
                                        std::int64_t masked) {
  const auto* bytes = static_cast<const std::uint8_t*>(mask.data) + row_offset;
  std::uint32_t hidden = 0;
  for (std::int64_t i = 0; i < keys.count && keys[i] < masked; ++i) {
    hidden |= static_cast<std::uint32_t>(bytes[keys[i] * mask.strides[3]] != 0 ? 1 : 0) << i;
  }
  return hidden;
}

/// Whether a group's mask numbers lie side by side, in reach of whole vector loads.
FUSED_MHA_INLINE bool lies_in_order(const core::View& mask, const KeySpan& keys, std::int64_t masked) {
  return mask.strides[3] == 1 && keys.positions == nullptr && keys.count == kGroupKeys &&
         keys.first + kGroupKeys <= masked;
}

/// Calls body(vector index, vector) with the float mask's numbers for one row of a group.
template <typename T, typename Body>
FUSED_MHA_INLINE void for_mask_vectors(const core::View& mask, std::int64_t row_offset, const KeySpan& keys,
                                       std::int64_t masked, const Body& body) {
  constexpr int kVectors = static_cast<int>(kGroupKeys) / kLanes<T>;
  const auto from = [&]<typename Storage>(const Storage* row) {
    for (int v = 0; v < kVectors; ++v) body(v, load_as<T, Storage>(row + v * kLanes<T>));
  };
  if (lies_in_order(mask, keys, masked)) {
    const std::int64_t offset = row_offset + keys.first;
    switch (mask.dtype) {
      case DType::kFloat32: return from(static_cast<const float*>(mask.data) + offset);
      case DType::kBFloat16: return from(static_cast<const BFloat16*>(mask.data) + offset);
      case DType::kFloat16: return from(static_cast<const Float16*>(mask.data) + offset);
      case DType::kFloat64:
        if constexpr (std::is_same_v<T, double>) return from(static_cast<const double*>(mask.data) + offset);
        break;
      case DType::kBool: break;
    }
  }
  T numbers[kGroupKeys];
  gather_mask<T>(mask, row_offset, keys, masked, numbers);
  from(static_cast<const T*>(numbers));
}

/// Masks one row of a group in place: adds what is added, puts -inf where hidden. Returns the visibility bits; the
/// lanewise maximum is folded into `best`.
template <typename T>
FUSED_MHA_INLINE std::uint32_t mask_row(const CallConstants& call, const RowBlock& block, std::int64_t row,
                                        const KeySpan& keys, bool reads_attn_mask, const T* key_bias, T* scores,
                                        T* best) {
  constexpr int kVectors = static_cast<int>(kGroupKeys) / kLanes<T>;
  const core::AttentionProblem& problem = *call.problem;
  const std::int64_t l = block.row_begin + row;
  const Vec<T> factor = broadcast<T>(static_cast<T>(call.bias_factor));
  std::uint32_t visible = structural_bits(problem, keys, l);
  Vec<T> values[kVectors];
  for (int v = 0; v < kVectors; ++v) values[v] = load<T>(scores + v * kLanes<T>);
  if (reads_attn_mask) {
    const core::View& mask = problem.attn_mask;
    const std::int64_t offset = mask.offset(block.n, block.h, l, 0);
    const std::int64_t masked = problem.masked_keys();
    if (mask.dtype == DType::kBool) {
      visible &= ~(lies_in_order(mask, keys, masked)
                       ? nonzero_bits32(static_cast<const std::uint8_t*>(mask.data) + offset + keys.first)
                       : gather_hidden_bits(mask, offset, keys, masked));
    } else {
      const Vec<T> hidden = broadcast<T>(kMinusInfinity<T>);
      for_mask_vectors<T>(mask, offset, keys, masked, [&](int v, Vec<T> numbers) {
        visible &= ~(equal_bits<T>(numbers, hidden) << (v * kLanes<T>));
        values[v] = fma(numbers, factor, values[v]);
      });
    }
  }
  if (key_bias != nullptr) {
    for (int v = 0; v < kVectors; ++v) values[v] = fma(load<T>(key_bias + v * kLanes<T>), factor, values[v]);
  }
  Vec<T> largest = load<T>(best);
  for (int v = 0; v < kVectors; ++v) {
    values[v] = select<T>(visible >> (v * kLanes<T>), values[v], broadcast<T>(kMinusInfinity<T>));
    largest = max(largest, values[v]);
    store<T>(scores + v * kLanes<T>, values[v]);
  }
  store<T>(best, largest);
  return visible;
}

/// Masks all mixed groups of a tile. `scores` rows are kKeys apart, `key_bias` is null or one number a key, `best`
/// holds a vector a row.
template <typename T, std::int64_t kKeys>
static void mask_tile(const CallConstants& call, const RowBlock& block, const KeySpan& keys, const T* key_bias,
                      T* scores, T* best, TileMask<kKeys>& mask) {
  for (std::int64_t group = 0; group < TileMask<kKeys>::kGroups; ++group) {
    if (!mask.is_mixed(group)) {
      for (std::int64_t row = 0; row < block.rows; ++row) {
        mask.visible[row][group] = mask.is_hidden(group) ? 0U : 0xFFFFFFFFU;
      }
      continue;
    }
    const KeySpan part = group_of(keys, group);
    const T* bias = key_bias == nullptr ? nullptr : key_bias + group * kGroupKeys;
    for (std::int64_t row = 0; row < block.rows; ++row) {
      mask.visible[row][group] =
          mask_row<T>(call, block, row, part, mask.reads_attn_mask[group], bias,
                      scores + row * kKeys + group * kGroupKeys, best + row * kLanes<T>);
    }
  }
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
