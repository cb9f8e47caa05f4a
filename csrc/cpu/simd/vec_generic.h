// SPDX-License-Identifier: BSD-3-Clause
//
// 16-byte vectors with nothing but the compiler's vector extension: any processor.
#pragma once

#define FUSED_MHA_ISA generic
#define FUSED_MHA_VECTOR_BYTES 16
#include "cpu/simd/vec.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

using namespace portable;  // NOLINT(google-build-using-namespace)

/// Register tiles, see tile_math.h: 16 registers hold 6 x 2 sums, two columns and one row.
inline constexpr int kRegisters = 16;
inline constexpr int kScoreRows = 6;
inline constexpr int kScoreVectors = 2;
/// Whether load_transposed_floats exists.
inline constexpr bool kHasLoadTransposedFloats = false;

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
