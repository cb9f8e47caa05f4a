// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/tensor_kernels.h"

namespace fused_mha::cuda {

template <>
ForwardKernels tensor_forward_kernels<bfloat16>(int dim) {
  return tensor_forward_kernels_of<bfloat16>(dim);
}

}  // namespace fused_mha::cuda
