// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/simd/vec_avx2.h"

#include "cpu/kernels.inc"

namespace fused_mha::cpu {

const IsaKernels& kernels_avx2() noexcept { return avx2::kKernels; }

}  // namespace fused_mha::cpu
