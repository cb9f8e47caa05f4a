// SPDX-License-Identifier: BSD-3-Clause
//
// Pairs of bfloat16 beside vec_avx512.h: AVX512_BF16. Products are exact, sums are rounded to float; numbers below the
// normal range count as 0.
#pragma once

#include "cpu/simd/vec_avx512.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// c + both products of each pair of a and b.
FUSED_MHA_INLINE VecFloat add_pair_products(VecFloat a, VecFloat b, VecFloat c) {
  return _mm512_dpbf16_ps(c, std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(b));
}

/// The 32 numbers of two vectors, rounded, in order.
FUSED_MHA_INLINE VecFloat round_to_pairs(VecFloat low, VecFloat high) {
  return std::bit_cast<VecFloat>(_mm512_cvtne2ps_pbh(high, low));
}

/// Pairs of a number of `first` and one of `second`, rounded.
FUSED_MHA_INLINE VecFloat round_and_interleave(VecFloat first, VecFloat second) {
  alignas(64) static constexpr std::uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto rounded = std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  return std::bit_cast<VecFloat>(_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), rounded));
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
