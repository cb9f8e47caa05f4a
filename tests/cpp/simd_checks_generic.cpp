// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/simd/vec_generic.h"

#include "simd_checks.inc"

fused_mha::test::SimdReport fused_mha::test::simd_report_generic() { return fused_mha::cpu::generic::simd_report(); }
