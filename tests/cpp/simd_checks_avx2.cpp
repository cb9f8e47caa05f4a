// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/simd/vec_avx2.h"

#include "simd_checks.inc"

fused_mha::test::SimdReport fused_mha::test::simd_report_avx2() { return fused_mha::cpu::avx2::simd_report(); }
