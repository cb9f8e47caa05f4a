// SPDX-License-Identifier: BSD-3-Clause
//
// Philox4x32, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011), section 4. A pure function of (key, counter): any element's number can be had in any order.
// Seven rounds are the fewest that pass BigCrush (table 2 there); ten are its conservative default.
#pragma once

#include <array>
#include <cstdint>

#include "core/inline.h"

namespace fused_mha::core {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

inline constexpr std::uint32_t kPhiloxMultiplier0 = 0xD2511F53U;
inline constexpr std::uint32_t kPhiloxMultiplier1 = 0xCD9E8D57U;
inline constexpr std::uint32_t kPhiloxWeyl0 = 0x9E3779B9U;
inline constexpr std::uint32_t kPhiloxWeyl1 = 0xBB67AE85U;

template <int kRounds>
FUSED_MHA_INLINE FUSED_MHA_HOST_DEVICE PhiloxCounter philox(PhiloxKey key, PhiloxCounter counter) {
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = static_cast<std::uint64_t>(kPhiloxMultiplier0) * counter[0];
    const std::uint64_t product1 = static_cast<std::uint64_t>(kPhiloxMultiplier1) * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += kPhiloxWeyl0;
    key[1] += kPhiloxWeyl1;
  }
  return counter;
}

}  // namespace fused_mha::core
