// SPDX-License-Identifier: BSD-3-Clause
#define FUSED_MHA_ISA avx512
#include "cpu/simd/vec_avx512.h"

#include "cpu/kernels.inc"

namespace fused_mha::cpu {

const IsaKernels& kernels_avx512() noexcept { return avx512::kKernels; }

}  // namespace fused_mha::cpu
