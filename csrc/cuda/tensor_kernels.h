// SPDX-License-Identifier: BSD-3-Clause
//
// Which tiles the tensor kernels have for operands of so many columns: chosen so that sums stay in registers, and
// shared memory leaves room for two thread blocks on a multiprocessor (one at 256 columns).
#pragma once

#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/tensor_tiles.h"

namespace fused_mha::cuda {

// Two tiles of 16 rows a warp use each operand that passes by twice.
template <typename T, int kDim>
using ForwardTiles =
    std::conditional_t<kDim == 256, TensorTiles<T, 256, 1, 4, 32>, TensorTiles<T, kDim, 2, 4, (kDim == 128 ? 32 : 64)>>;

// Rows are queries; also for returned weights and the gradients of masks.
template <typename T, int kDim>
using QueryTiles = TensorTiles<T, kDim, 1, 4,
                               (kDim <= 64    ? 64
                                : kDim == 128 ? 32
                                              : 16)>;

// Rows are keys. Two gradients of 256 columns do not fit in registers.
template <typename T, int kDim>
using KeyTiles = std::conditional_t<kDim <= 64, TensorTiles<T, kDim, 1, 8, 64, kDim, true>,
                                    TensorTiles<T, kDim, 1, 4, (kDim == 128 ? 32 : 16), 128, true>>;

/// body.operator()<columns>() for the columns that a problem is padded to.
template <typename Body>
auto with_dim(int dim, const Body& body) {
  switch (dim) {
    case 32:
      return body.template operator()<32>();
    case 64:
      return body.template operator()<64>();
    case 128:
      return body.template operator()<128>();
    default:
      return body.template operator()<256>();
  }
}

template <typename T>
ForwardKernels tensor_forward_kernels_of(int dim) {
  return with_dim(dim, [&]<int kDim>() { return forward_kernels_of<ForwardTiles<T, kDim>, QueryTiles<T, kDim>>(); });
}

template <typename T>
BackwardKernels tensor_backward_kernels_of(int dim) {
  return with_dim(dim, [&]<int kDim>() { return backward_kernels_of<KeyTiles<T, kDim>, QueryTiles<T, kDim>>(); });
}

}  // namespace fused_mha::cuda
