// SPDX-License-Identifier: BSD-3-Clause
//
// What this build has of CUDA, for messages. CMake defines FUSED_MHA_HAS_CUDA as 1 or 0.
#pragma once

namespace fused_mha::detail {

inline constexpr bool kHasCudaKernels = FUSED_MHA_HAS_CUDA != 0;

inline constexpr const char* kNoCudaHint =
    ". Hint: build fused_mha where nvcc is, with FORCE_CUDA=1 in the environment";

}  // namespace fused_mha::detail
