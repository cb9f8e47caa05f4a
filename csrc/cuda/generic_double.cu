// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/generic_tiles.h"
#include "cuda/kernels.h"

namespace fused_mha::cuda {

template <>
ForwardKernels generic_forward_kernels<double>() {
  return forward_kernels_of<GenericTiles<double>, GenericTiles<double>>();
}

template <>
BackwardKernels generic_backward_kernels<double>() {
  return backward_kernels_of<GenericTiles<double>, GenericTiles<double>>();
}

}  // namespace fused_mha::cuda
