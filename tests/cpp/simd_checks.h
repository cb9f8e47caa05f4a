// SPDX-License-Identifier: BSD-3-Clause
//
// What each instruction set's vector operations are found to do, measured by code compiled for it.
#pragma once

#include <cstdint>

namespace fused_mha::test {

struct SimdReport {
  double exp2_float_ulp = 0.0;       // largest error on [-126, 127]
  double exp2_double_ulp = 0.0;      // largest error on [-1022, 1023]
  bool exp2_limits = false;          // -inf and very small give 0, NaN gives NaN
  double tanh_float_epsilons = 0.0;  // largest error of simd/tanh.h, absolute, by factors and by sums
  double tanh_double_epsilons = 0.0;
  bool tanh_limits = false;  // infinities, NaN, 0 and the ends of the factors' range
  double reciprocal_float_ulp = 0.0;
  double reciprocal_double_ulp = 0.0;
  bool transpose = false;
  bool select = false;  // and equal_bits
  bool nonzero_bits = false;
  bool multiply_wide = false;  // and at_least_bits
  bool reductions = false;
  int half_mismatches = 0;      // of all float16 and bfloat16, loaded
  int rounding_mismatches = 0;  // of many floats stored as either
};

SimdReport simd_report_generic();
SimdReport simd_report_avx2();
SimdReport simd_report_avx512();

}  // namespace fused_mha::test
