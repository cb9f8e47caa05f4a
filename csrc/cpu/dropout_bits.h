// SPDX-License-Identifier: BSD-3-Clause
//
// core/dropout.h's decisions, many at a time, as bits: bit i of word i / 32 says that the span's key i is kept.
#pragma once

#include "core/dropout.h"
#include "cpu/pack.h"
#include "cpu/plan.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// The 128 decisions of one dropout group, in key order.
static void dropout_group_bits(const CallConstants& call, std::int64_t n, std::int64_t h, std::int64_t l,
                               std::int64_t group, std::uint32_t (&words)[4]) {
  constexpr int kStep = kLanes<float>;
  std::uint32_t numbers[core::kDropoutNumbersPerCounter] = {};  // 16 bits each
  if (call.dropout_threshold <= 0xFFFFU) {
    const std::uint32_t bound = call.dropout_threshold << 16;
    for (int lane = 0; lane < core::kDropoutLanes; lane += kStep) {
      VecInt32 counter[4] = {};
      for (int i = 0; i < kStep; ++i) {
        counter[0][i] = static_cast<std::int32_t>(group * core::kDropoutLanes + lane + i);
      }
      counter[1] = VecInt32{} + static_cast<std::int32_t>(l);
      counter[2] = VecInt32{} + static_cast<std::int32_t>(h);
      counter[3] = VecInt32{} + static_cast<std::int32_t>(n);
      std::uint32_t key0 = call.dropout_key[0];
      std::uint32_t key1 = call.dropout_key[1];
      for (int round = 0; round < core::kPhiloxRounds; ++round) {
        const auto product0 = multiply_wide(counter[0], core::kPhiloxMultiplier0);
        const auto product1 = multiply_wide(counter[2], core::kPhiloxMultiplier1);
        counter[0] = product1.high ^ counter[1] ^ static_cast<std::int32_t>(key0);
        counter[1] = product1.low;
        counter[2] = product0.high ^ counter[3] ^ static_cast<std::int32_t>(key1);
        counter[3] = product0.low;
        key0 += core::kPhiloxWeyl0;
        key1 += core::kPhiloxWeyl1;
      }
      for (int word = 0; word < 4; ++word) {
        numbers[2 * word] |= at_least_bits(counter[word] << 16, bound) << lane;
        numbers[2 * word + 1] |= at_least_bits(counter[word], bound) << lane;
      }
    }
  }
  for (int word = 0; word < 4; ++word) words[word] = numbers[2 * word] | (numbers[2 * word + 1] << 16);
}

/// Decisions for up to 128 keys of a span; bits[word] for word < ceil(count / 32).
static void dropout_span_bits(const CallConstants& call, std::int64_t n, std::int64_t h, std::int64_t l,
                              const KeySpan& keys, std::uint32_t* bits) {
  const std::int64_t words = (keys.count + 31) / 32;
  std::int64_t group = keys[0] / core::kDropoutGroup;
  if (keys.positions == nullptr) {
    // A run of up to 128 keys touches two groups at most; the fifth word serves the last shift.
    std::uint32_t both[9] = {};
    std::uint32_t one[4];
    dropout_group_bits(call, n, h, l, group, one);
    for (int i = 0; i < 4; ++i) both[i] = one[i];
    if (keys[keys.count - 1] / core::kDropoutGroup != group) {
      dropout_group_bits(call, n, h, l, group + 1, one);
      for (int i = 0; i < 4; ++i) both[4 + i] = one[i];
    }
    const auto start = static_cast<int>(keys.first % core::kDropoutGroup);
    const int shift = start % 32;
    for (std::int64_t word = 0; word < words; ++word) {
      const std::uint32_t low = both[start / 32 + word] >> shift;
      bits[word] = shift == 0 ? low : low | (both[start / 32 + word + 1] << (32 - shift));
    }
    return;
  }
  std::uint32_t one[4];
  dropout_group_bits(call, n, h, l, group, one);
  for (std::int64_t word = 0; word < words; ++word) bits[word] = 0;
  for (std::int64_t i = 0; i < keys.count; ++i) {
    const std::int64_t s = keys[i];
    if (s / core::kDropoutGroup != group) {
      group = s / core::kDropoutGroup;
      dropout_group_bits(call, n, h, l, group, one);
    }
    const auto inside = static_cast<int>(s % core::kDropoutGroup);
    bits[i / 32] |= ((one[inside / 32] >> (inside % 32)) & 1U) << (i % 32);
  }
}

/// One row of core::dropout_keeps: keep[s] for all s.
template <typename T>
static void dropout_row(const CallConstants& call, std::int64_t n, std::int64_t h, std::int64_t l, bool* keep) {
  const std::int64_t length = call.problem->key_length;
  for (std::int64_t s = 0; s < length; s += core::kDropoutGroup) {
    std::uint32_t words[4];
    dropout_group_bits(call, n, h, l, s / core::kDropoutGroup, words);
    for (std::int64_t i = 0; i < core::kDropoutGroup && s + i < length; ++i) {
      keep[s + i] = ((words[i / 32] >> (i % 32)) & 1U) != 0;
    }
  }
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
