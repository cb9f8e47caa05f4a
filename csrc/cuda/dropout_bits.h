// SPDX-License-Identifier: BSD-3-Clause
//
// core/dropout.h's decisions for a tile of scores: bit c of word r says that column slot c of row slot r is kept.
//
// A counter decides for the eight keys of a group of 128 that have its residue s % 16. Tiles are laid out so that a
// thread, or a warp, needs all or half of them.
#pragma once

#include "cuda/call.h"

namespace fused_mha::cuda {

inline constexpr int kGroupKeys = static_cast<int>(core::kDropoutGroup);
inline constexpr int kResidues = static_cast<int>(core::kDropoutLanes);

/// Bit j: whether key s = group * 128 + 16 j + residue of (n, h, l) is kept, (n, h) those of `place`.
__device__ __forceinline__ std::uint32_t keep_eight(const Call& call, core::PhiloxKey key, const TilePlace& place,
                                                    int l, int group, int residue) {
  const std::uint32_t threshold = call.dropout_threshold;
  const core::PhiloxCounter words = core::philox<core::kDropoutRounds>(
      key, core::dropout_counter(call.first_sample + static_cast<std::uint32_t>(place.n), place.h, l,
                                 group * kGroupKeys + residue));
  std::uint32_t bits = 0;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    bits |= ((words[word] & 0xFFFFU) >= threshold ? 1U : 0U) << (2 * word);
    bits |= ((words[word] >> 16) >= threshold ? 1U : 0U) << (2 * word + 1);
  }
  return bits;
}

/// For tiles with keys in columns: a thread's decisions for a whole group of 128 keys, kept from tile to tile.
template <typename Tiles>
class DropoutGroup {
 public:
  /// keep[r] for the tile at `place`.
  __device__ void keep(const Call& call, core::PhiloxKey key, const TilePlace& place,
                       std::uint32_t (&keep)[Tiles::kRowSlots]) {
    const int group = place.key_begin / kGroupKeys;
    if (group != group_) {
      group_ = group;
#pragma unroll
      for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
        bits_[slot] = 0;
        const int l = place.query_begin + Tiles::row(slot);
#pragma unroll 1  // one generator at a time: side by side they would take all registers
        for (int i = 0; i < Tiles::kCountersOfRow; ++i) {
          const std::uint32_t eight = keep_eight(call, key, place, l, group, Tiles::residue(i));
#pragma unroll
          for (int j = 0; j < core::kDropoutNumbersPerCounter; ++j) {
            bits_[slot] |= ((eight >> j) & 1U) << (j * Tiles::kCountersOfRow + i);
          }
        }
      }
    }
    const int shift = place.key_begin % kGroupKeys / kResidues * Tiles::kCountersOfRow;
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) keep[slot] = bits_[slot] >> shift;
  }

 private:
  int group_ = -1;
  std::uint32_t bits_[Tiles::kRowSlots];
};

}  // namespace fused_mha::cuda
