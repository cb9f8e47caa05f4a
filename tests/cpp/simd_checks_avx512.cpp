// SPDX-License-Identifier: BSD-3-Clause
#define FUSED_MHA_ISA avx512
#include "cpu/simd/vec_avx512.h"

#include "simd_checks.inc"

fused_mha::test::SimdReport fused_mha::test::simd_report_avx512() { return fused_mha::cpu::avx512::simd_report(); }
