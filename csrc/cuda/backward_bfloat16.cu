// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/tensor_kernels.h"

namespace fused_mha::cuda {

template <>
BackwardKernels tensor_backward_kernels<bfloat16>(int dim) {
  return tensor_backward_kernels_of<bfloat16>(dim);
}

}  // namespace fused_mha::cuda
