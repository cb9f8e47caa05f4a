// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/generic_tiles.h"
#include "cuda/kernels.h"

namespace fused_mha::cuda {

template <>
ForwardKernels generic_forward_kernels<float>() {
  return forward_kernels_of<GenericTiles<float>, GenericTiles<float>>();
}

template <>
BackwardKernels generic_backward_kernels<float>() {
  return backward_kernels_of<GenericTiles<float>, GenericTiles<float>>();
}

}  // namespace fused_mha::cuda
