// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/simd/vec_generic.h"

#include "cpu/kernels.inc"

namespace fused_mha::cpu {

const IsaKernels& kernels_generic() noexcept { return generic::kKernels; }

}  // namespace fused_mha::cpu
