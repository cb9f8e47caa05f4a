// SPDX-License-Identifier: BSD-3-Clause
//
// What CUDA tensors are told, in place of the dispatcher's own message, by operators without a CUDA kernel: by some in
// every build, by all in a build without CUDA.
#include <torch/library.h>

#include "torch/cuda_build.h"

namespace fused_mha::detail {
namespace {

void refuse(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": has no CUDA kernel. Hint: move its tensors to the CPU");
}

[[maybe_unused]] void refuse_in_this_build(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": has no CUDA kernel in this build", kNoCudaHint);
}

}  // namespace
}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, CUDA, library) {
  for (const char* name : {"_additive_attention_forward", "_additive_attention_backward", "_varlen_forward",
                           "_varlen_backward", "_mask_tiles"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fused_mha::detail::refuse>());
  }
#if !FUSED_MHA_HAS_CUDA
  for (const char* name : {"_attention_forward", "_attention_backward", "dropout_mask"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fused_mha::detail::refuse_in_this_build>());
  }
#endif
}
