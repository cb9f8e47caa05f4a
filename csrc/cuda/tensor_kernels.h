// SPDX-License-Identifier: BSD-3-Clause
//
// Which tiles the tensor kernels have for operands of so many columns: chosen so that sums stay in registers, and
// shared memory leaves room for two thread blocks on a multiprocessor (one at 256 columns).
#pragma once

#include "cuda/kernels.h"
#include "cuda/tensor_tiles.h"

namespace fused_mha::cuda {

// Two tiles of 16 rows a warp use each operand that passes by twice.
template <typename T, int kDim>
struct ForwardTilesOf {
  using Type = TensorTiles<T, kDim, 2, 4, 64>;
};
template <typename T>
struct ForwardTilesOf<T, 256> {
  using Type = TensorTiles<T, 256, 1, 4, 32>;
};

// Rows are queries; also for returned weights and the gradients of masks.
template <typename T, int kDim>
struct QueryTilesOf {
  using Type = TensorTiles<T, kDim, 1, 4, (kDim <= 64 ? 64 : 32)>;
};
template <typename T>
struct QueryTilesOf<T, 256> {
  using Type = TensorTiles<T, 256, 1, 4, 16>;
};

// Rows are keys.
template <typename T, int kDim>
struct KeyTilesOf {
  using Type = TensorTiles<T, kDim, 1, 8, 64, kDim, true>;
};
template <typename T>
struct KeyTilesOf<T, 128> {
  using Type = TensorTiles<T, 128, 1, 4, 32, 128, true>;
};
template <typename T>
struct KeyTilesOf<T, 256> {
  using Type = TensorTiles<T, 256, 1, 4, 16, 128, true>;  // two gradients of 256 columns do not fit in registers
};

template <typename T>
ForwardKernels tensor_forward_kernels_of(int dim) {
  switch (dim) {
    case 32:
      return forward_kernels_of<typename ForwardTilesOf<T, 32>::Type, typename QueryTilesOf<T, 32>::Type>();
    case 64:
      return forward_kernels_of<typename ForwardTilesOf<T, 64>::Type, typename QueryTilesOf<T, 64>::Type>();
    case 128:
      return forward_kernels_of<typename ForwardTilesOf<T, 128>::Type, typename QueryTilesOf<T, 128>::Type>();
    default:
      return forward_kernels_of<typename ForwardTilesOf<T, 256>::Type, typename QueryTilesOf<T, 256>::Type>();
  }
}

template <typename T>
BackwardKernels tensor_backward_kernels_of(int dim) {
  switch (dim) {
    case 32:
      return backward_kernels_of<typename KeyTilesOf<T, 32>::Type, typename QueryTilesOf<T, 32>::Type>();
    case 64:
      return backward_kernels_of<typename KeyTilesOf<T, 64>::Type, typename QueryTilesOf<T, 64>::Type>();
    case 128:
      return backward_kernels_of<typename KeyTilesOf<T, 128>::Type, typename QueryTilesOf<T, 128>::Type>();
    default:
      return backward_kernels_of<typename KeyTilesOf<T, 256>::Type, typename QueryTilesOf<T, 256>::Type>();
  }
}

}  // namespace fused_mha::cuda
