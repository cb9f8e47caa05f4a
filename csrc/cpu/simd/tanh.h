// SPDX-License-Identifier: BSD-3-Clause
//
// tanh of many sums x + y, by what it lacks to 1:
//
//   tanh(t) = 1 - 2 r(t),   r(t) = 1 / (1 + exp(2 t)),   tanh'(t) = 4 r (1 - r)
//
//   from_factors  r = 1 / (1 + exp(2x) exp(2y)): no exponential for a pair, only one for each x and each y before
//   from_sum      r = 1 / (1 + exp(2 (x + y))), for numbers beyond kFactorRange, whose factors would overflow
//
// Either gives 1 - 2 r within 2 epsilons of tanh(x + y), absolute (tests/cpp/test_simd.cpp). NaN gives NaN; infinities
// give the limits. No torch. Part of a kernel unit: include after simd/vec_*.h.
#pragma once

#include "cpu/simd/vec.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// Largest magnitude of x and y whose factors may be multiplied: 1 + exp(2x) exp(2y) stays below 2^122 (2^984).
template <typename T>
inline constexpr T kFactorRange = std::is_same_v<T, double> ? T{170} : T{21};

template <typename T>
inline constexpr T kTwiceLog2e = static_cast<T>(2.8853900817779268);

/// Coefficients of exp(y) for |y| <= ln(2) / 2, highest power first: Taylor's, cut off below 6e-9 (float), 5e-18.
template <typename T>
inline constexpr T kExpPowers[] = {
    T(1) / 6227020800, T(1) / 479001600, T(1) / 39916800, T(1) / 3628800, T(1) / 362880, T(1) / 40320, T(1) / 5040,
    T(1) / 720,        T(1) / 120,       T(1) / 24,       T(1) / 6,       T(1) / 2,      T(1),         T(1)};

/// exp(2x) for |x| <= kFactorRange, hardly more than its last rounding away. 2x = n ln(2) + y with a whole n: y is
/// exact to its own last digit, since n times the upper part of ln(2) / 2 is a number of T.
template <typename T>
FUSED_MHA_INLINE Vec<T> tanh_factor(Vec<T> x) {
  constexpr bool kDouble = std::is_same_v<T, double>;
  constexpr T kUpper = kDouble ? T(0x1.62e42fefa2p-2) : T(0x1.62e4p-2);
  constexpr T kLower = kDouble ? T(3.6855012825838994e-13) : T(7.143034101547086e-07);
  constexpr int kPowers = 14;
  const Vec<T> magic = broadcast<T>(kDouble ? T(6755399441055744.0) : T(12582912.0));  // 1.5 * 2^52, 1.5 * 2^23
  const Vec<T> shifted = fma(x, broadcast<T>(kTwiceLog2e<T>), magic);
  const Vec<T> whole = shifted - magic;
  const Vec<T> half = fma(whole, broadcast<T>(-kLower), fma(whole, broadcast<T>(-kUpper), x));
  const Vec<T> y = half + half;
  constexpr int kFirst = kDouble ? 0 : kPowers - 8;
  Vec<T> p = broadcast<T>(kExpPowers<T>[kFirst]);
  for (int i = kFirst + 1; i < kPowers; ++i) p = fma(p, y, broadcast<T>(kExpPowers<T>[i]));
  const VecInt<T> exponent = std::bit_cast<VecInt<T>>(shifted) << (kDouble ? 52 : 23);
  return std::bit_cast<Vec<T>>(std::bit_cast<VecInt<T>>(p) + exponent);
}

/// r from the factors of x and y.
template <typename T>
FUSED_MHA_INLINE Vec<T> tanh_rest_from_factors(Vec<T> x_factor, Vec<T> y_factor) {
  return reciprocal(fma(x_factor, y_factor, broadcast<T>(T{1})));
}

/// r from x + y.
template <typename T>
FUSED_MHA_INLINE Vec<T> tanh_rest_from_sum(Vec<T> sum) {
  // Beyond these r is 1 or below half an epsilon of 1; within them exp2 and the reciprocal are exact enough.
  constexpr T kLargest = std::is_same_v<T, double> ? T{500} : T{60};
  const Vec<T> exponent = sum * broadcast<T>(kTwiceLog2e<T>);
  const Vec<T> not_below = max(broadcast<T>(-kLargest), exponent);  // in this order NaN stays
  const Vec<T> clamped = -max(broadcast<T>(-kLargest), -not_below);
  return reciprocal(exp2(clamped) + broadcast<T>(T{1}));
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
