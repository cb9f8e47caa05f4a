// SPDX-License-Identifier: BSD-3-Clause
//
// Which weights dropout keeps: a pure function of (rng state, n, h, l, s), the same for every kernel, tile, thread
// count, instruction set and device.
//
// Keys are taken in groups of 128. Sixteen Philox counters (s / 128 * 16 + s % 16, l, h, n) serve a group; each gives
// eight 16-bit numbers, and key s takes number s % 128 / 16 of its counter. So sixteen neighbouring keys use the same
// number of sixteen neighbouring counters: a vector register holds them in order. An element is kept where its number
// is at least dropout_threshold(p), so p acts in steps of 2^-16; kept weights are scaled by 1 / (1 - p).
#pragma once

#include <cmath>
#include <cstdint>

#include "core/philox.h"
#include "core/problem.h"

namespace fused_mha::core {

inline constexpr std::int64_t kDropoutGroup = 128;
inline constexpr std::int64_t kDropoutLanes = 16;
inline constexpr int kDropoutNumbersPerCounter = 8;
inline constexpr int kDropoutRounds = 7;

/// The Philox key of a call: SplitMix64's mixing of seed and offset (Steele, Lea, Flood, OOPSLA 2014), so that calls
/// with neighbouring offsets share nothing.
FUSED_MHA_INLINE FUSED_MHA_HOST_DEVICE PhiloxKey dropout_key(RngState rng) {
  std::uint64_t mixed = rng.seed + 0x9E3779B97F4A7C15ULL * (rng.offset + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
  mixed ^= mixed >> 31;
  return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)};
}

/// An element is dropped where its 16-bit number is below this; 65536 drops everything.
FUSED_MHA_INLINE std::uint32_t dropout_threshold(double p) {
  return static_cast<std::uint32_t>(std::lround(p * 65536.0));
}

FUSED_MHA_INLINE double dropout_scale(double p) { return p >= 1.0 ? 0.0 : 1.0 / (1.0 - p); }

FUSED_MHA_INLINE FUSED_MHA_HOST_DEVICE PhiloxCounter dropout_counter(std::int64_t n, std::int64_t h, std::int64_t l,
                                                                     std::int64_t s) {
  return {static_cast<std::uint32_t>(s / kDropoutGroup * kDropoutLanes + s % kDropoutLanes),
          static_cast<std::uint32_t>(l), static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(n)};
}

/// One element's decision, computed alone.
FUSED_MHA_INLINE FUSED_MHA_HOST_DEVICE bool dropout_keeps(PhiloxKey key, std::uint32_t threshold, std::int64_t n,
                                                          std::int64_t h, std::int64_t l, std::int64_t s) {
  const PhiloxCounter words = philox<kDropoutRounds>(key, dropout_counter(n, h, l, s));
  const auto number = static_cast<int>(s % kDropoutGroup / kDropoutLanes);
  // No index that is known at run time only: for one the GPU's compiler would put the words into memory.
  const std::uint32_t low = number / 2 == 0 ? words[0] : words[1];
  const std::uint32_t high = number / 2 == 2 ? words[2] : words[3];
  const std::uint32_t word = number < 4 ? low : high;
  return (number % 2 == 0 ? word & 0xFFFFU : word >> 16) >= threshold;
}

}  // namespace fused_mha::core
