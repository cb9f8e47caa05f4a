// SPDX-License-Identifier: BSD-3-Clause
//
// Which tiles the tensor kernels have for operands of so many columns: chosen so that sums stay in registers, and
// shared memory leaves room for two thread blocks on a multiprocessor (one at 256 columns).
#pragma once

#include "cuda/kernels.h"
#include "cuda/tensor_tiles.h"

namespace fused_mha::cuda {

// Two tiles of 16 rows a warp use each operand that passes by twice.
template <typename T, int kDim, TilesFor kFor>
struct ForwardTilesOf {
  using Type = TensorTiles<T, kDim, 2, 4, (kDim == 128 && kFor == TilesFor::kAnyCall ? 32 : 64), kDim, false, kFor>;
};
template <typename T, TilesFor kFor>
struct ForwardTilesOf<T, 256, kFor> {
  using Type = TensorTiles<T, 256, 1, 4, 32, 256, false, kFor>;
};

// Rows are queries; also for returned weights and the gradients of masks.
template <typename T, int kDim, TilesFor kFor>
struct QueryTilesOf {
  using Type = TensorTiles<T, kDim, 1, 4, (kDim <= 64 ? 64 : kDim <= 128 ? 32 : 16), kDim, false, kFor>;
};

// Rows are keys.
template <typename T, int kDim, TilesFor kFor>
struct KeyTilesOf {
  using Type = TensorTiles<T, kDim, 1, 8, 64, kDim, true, kFor>;
};
template <typename T, TilesFor kFor>
struct KeyTilesOf<T, 128, kFor> {
  using Type = TensorTiles<T, 128, 1, 4, 32, 128, true, kFor>;
};
template <typename T, TilesFor kFor>
struct KeyTilesOf<T, 256, kFor> {
  using Type = TensorTiles<T, 256, 1, 4, 16, 128, true, kFor>;  // two gradients of 256 columns do not fit in registers
};

/// Tiles for plain calls alone pay where the others are short of registers.
constexpr bool has_plain_tiles(int dim) { return dim >= 128; }

/// body.operator()<dim>() for the columns that a problem is padded to.
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
ForwardKernels tensor_forward_kernels_of(int dim, bool is_plain) {
  return with_dim(dim, [&]<int kDim>() {
    using Tiles = typename ForwardTilesOf<T, kDim, TilesFor::kAnyCall>::Type;
    using WeightTiles = typename QueryTilesOf<T, kDim, TilesFor::kAnyCall>::Type;
    ForwardKernels kernels = forward_kernels_of<Tiles, WeightTiles>();
    if constexpr (has_plain_tiles(kDim)) {
      using PlainTiles = typename ForwardTilesOf<T, kDim, TilesFor::kPlainCalls>::Type;
      if (is_plain) kernels.forward = forward_kernel_of<PlainTiles>();
    }
    return kernels;
  });
}

template <typename T>
BackwardKernels tensor_backward_kernels_of(int dim, bool is_plain) {
  return with_dim(dim, [&]<int kDim>() {
    using KeyTiles = typename KeyTilesOf<T, kDim, TilesFor::kAnyCall>::Type;
    using QueryTiles = typename QueryTilesOf<T, kDim, TilesFor::kAnyCall>::Type;
    BackwardKernels kernels = backward_kernels_of<KeyTiles, QueryTiles>();
    if constexpr (has_plain_tiles(kDim)) {
      if (is_plain) {
        kernels.keys = keys_kernel_of<typename KeyTilesOf<T, kDim, TilesFor::kPlainCalls>::Type>();
        kernels.queries = queries_kernel_of<typename QueryTilesOf<T, kDim, TilesFor::kPlainCalls>::Type>();
      }
    }
    return kernels;
  });
}

}  // namespace fused_mha::cuda
