// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/tensor_kernels.h"

namespace fused_mha::cuda {

template <>
BackwardKernels tensor_backward_kernels<half>(int dim) {
  return tensor_backward_kernels_of<half>(dim);
}

}  // namespace fused_mha::cuda
