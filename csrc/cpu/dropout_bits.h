// SPDX-License-Identifier: BSD-3-Clause
//
// core/dropout.h's decisions, many at a time, as bits: bit i of word i / 32 says that the span's key i is kept.
#pragma once

#include "core/dropout.h"
#include "cpu/pack.h"
#include "cpu/plan.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// core::philox on as many counters as a vector has 64-bit lanes; each word sits in the low half of its lane.
FUSED_MHA_INLINE void philox_lanes(const DropoutRoundKeys& keys, VecUInt64 (&counter)[4]) {
#pragma GCC unroll 8
  for (int round = 0; round < core::kDropoutRounds; ++round) {
    const VecUInt64 product0 = multiply_wide(counter[0], core::kPhiloxMultiplier0);
    const VecUInt64 product1 = multiply_wide(counter[2], core::kPhiloxMultiplier1);
    counter[0] = (product1 >> 32) ^ counter[1] ^ keys.first[round];
    counter[1] = product1;
    counter[2] = (product0 >> 32) ^ counter[3] ^ keys.second[round];
    counter[3] = product0;
  }
}

/// 0, 2, 4, ...
FUSED_MHA_INLINE VecUInt64 even_numbers() {
  static constexpr std::uint64_t kNumbers[8] = {0, 2, 4, 6, 8, 10, 12, 14};
  VecUInt64 numbers;
  std::memcpy(&numbers, kNumbers, sizeof(numbers));
  return numbers;
}

/// The 128 decisions of one dropout group, in key order.
struct DropoutGroup {
  std::int64_t group = -1;
  std::uint32_t words[4] = {};

  /// Works the group out unless it is the one at hand: neighbouring steps of one row share it.
  void set(const CallConstants& call, std::int64_t n, std::int64_t h, std::int64_t l, std::int64_t wanted) {
    if (group == wanted) return;
    group = wanted;
    std::uint32_t numbers[core::kDropoutNumbersPerCounter] = {};  // 16 bits each
    if (call.dropout_threshold <= 0xFFFFU) {
      const std::uint32_t bound = call.dropout_threshold << 16;
      constexpr int kStep = kLanes<float>;
      for (int lane = 0; lane < core::kDropoutLanes; lane += kStep) {
        // Even and odd counters apart: the product of two 32-bit numbers fills 64 bits.
        VecUInt64 even[4];
        VecUInt64 odd[4];
        even[0] = even_numbers() + static_cast<std::uint64_t>(group * core::kDropoutLanes + lane);
        odd[0] = even[0] + 1U;
        even[1] = odd[1] = VecUInt64{} + static_cast<std::uint64_t>(l);
        even[2] = odd[2] = VecUInt64{} + static_cast<std::uint64_t>(h);
        even[3] = odd[3] = VecUInt64{} + static_cast<std::uint64_t>(n + call.problem->first_sample);
        philox_lanes(call.dropout_keys, even);
        philox_lanes(call.dropout_keys, odd);
        for (int word = 0; word < 4; ++word) {
          const auto joined = std::bit_cast<VecUInt32>((even[word] & 0xFFFFFFFFULL) | (odd[word] << 32));
          numbers[2 * word] |= at_least_bits(joined << 16, bound) << lane;
          numbers[2 * word + 1] |= at_least_bits(joined, bound) << lane;
        }
      }
    }
    for (int word = 0; word < 4; ++word) words[word] = numbers[2 * word] | (numbers[2 * word + 1] << 16);
  }
};

/// Decisions for up to 128 keys of a span; bits[word] for word < ceil(count / 32). `cache` belongs to the row.
static void dropout_span_bits(const CallConstants& call, std::int64_t n, std::int64_t h, std::int64_t l,
                              const KeySpan& keys, DropoutGroup& cache, std::uint32_t* bits) {
  const std::int64_t words = (keys.count + 31) / 32;
  const std::int64_t first_group = keys[0] / core::kDropoutGroup;
  cache.set(call, n, h, l, first_group);
  if (keys.positions == nullptr && keys.first % core::kDropoutGroup == 0) {
    for (std::int64_t word = 0; word < words; ++word) bits[word] = cache.words[word];
    return;
  }
  if (keys.positions == nullptr) {
    // A run of up to 128 keys touches two groups at most; the last word serves the last shift.
    std::uint32_t both[9] = {};
    for (int i = 0; i < 4; ++i) both[i] = cache.words[i];
    if (keys[keys.count - 1] / core::kDropoutGroup != first_group) {
      cache.set(call, n, h, l, first_group + 1);
      for (int i = 0; i < 4; ++i) both[4 + i] = cache.words[i];
    }
    const auto start = static_cast<int>(keys.first % core::kDropoutGroup);
    const int shift = start % 32;
    for (std::int64_t word = 0; word < words; ++word) {
      const std::uint32_t low = both[start / 32 + word] >> shift;
      bits[word] = shift == 0 ? low : low | (both[start / 32 + word + 1] << (32 - shift));
    }
    return;
  }
  for (std::int64_t word = 0; word < words; ++word) bits[word] = 0;
  for (std::int64_t i = 0; i < keys.count; ++i) {
    cache.set(call, n, h, l, keys[i] / core::kDropoutGroup);
    const auto inside = static_cast<int>(keys[i] % core::kDropoutGroup);
    bits[i / 32] |= ((cache.words[inside / 32] >> (inside % 32)) & 1U) << (i % 32);
  }
}

/// One row of core::dropout_keeps: keep[s] for all s.
template <typename T>
static void dropout_row(const CallConstants& call, std::int64_t n, std::int64_t h, std::int64_t l, bool* keep) {
  const std::int64_t length = call.problem->key_length;
  DropoutGroup cache;
  for (std::int64_t s = 0; s < length; ++s) {
    cache.set(call, n, h, l, s / core::kDropoutGroup);
    const auto inside = static_cast<int>(s % core::kDropoutGroup);
    keep[s] = ((cache.words[inside / 32] >> (inside % 32)) & 1U) != 0;
  }
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
