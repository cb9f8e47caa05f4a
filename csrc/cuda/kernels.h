// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels as host code sees them: what shape of tiles they have, how much shared memory they want, how they are
// started. Each list is compiled by a translation unit of its own.
#pragma once

#include <cstdint>

#include "cuda/backward.h"
#include "cuda/deltas.h"
#include "cuda/forward.h"
#include "cuda/mask_gradient.h"
#include "cuda/weights.h"

namespace fused_mha::cuda {

struct TileShape {
  int rows = 0;
  int columns = 0;
  int output = 0;  // columns of one part of the output
};

template <typename CallType>
struct Kernel {
  TileShape shape;
  int bytes = 0;
  int bytes_with_stages = 0;  // where matrices of (l, s) are read: masks, gradients of weights
  void (*start)(const CallType&, std::int64_t blocks, int shared_bytes, cudaStream_t) = nullptr;
};

struct ForwardKernels {
  Kernel<ForwardCall> forward;
  Kernel<WeightsCall> weights;
};

struct BackwardKernels {
  Kernel<BackwardCall> keys;
  Kernel<BackwardCall> queries;
  Kernel<BackwardCall> weight_deltas;
  Kernel<MaskGradientCall> mask_gradient;
};

/// Columns that a tensor kernel of this problem is compiled for; more than any are 0.
constexpr int padded_dim(std::int64_t head_dim, std::int64_t value_dim) {
  const std::int64_t larger_dim = head_dim > value_dim ? head_dim : value_dim;
  for (const int dim : {32, 64, 128, 256}) {
    if (larger_dim <= dim) return dim;
  }
  return 0;
}

template <typename T>
ForwardKernels tensor_forward_kernels(int dim);  // T: half, bfloat16
template <typename T>
BackwardKernels tensor_backward_kernels(int dim);
template <typename Sum>
ForwardKernels generic_forward_kernels();  // Sum: float for all but float64, double
template <typename Sum>
BackwardKernels generic_backward_kernels();

/// The grid is one-dimensional: 2^31 - 1 blocks, whatever batch and heads are.
dim3 grid_of(const char* name, std::int64_t blocks);

template <typename Tiles>
constexpr TileShape shape_of() {
  return {Tiles::kRows, Tiles::kColumns, Tiles::kOutput};
}

template <typename Tiles>
Kernel<ForwardCall> forward_kernel_of() {
  return {shape_of<Tiles>(), ForwardMemory<Tiles>::bytes(false), ForwardMemory<Tiles>::bytes(true),
          [](const ForwardCall& call, std::int64_t blocks, int shared_bytes, cudaStream_t stream) {
            launch("attention_forward_kernel", &attention_forward_kernel<Tiles>,
                   grid_of("attention_forward_kernel", blocks), dim3(Tiles::kThreads),
                   static_cast<std::size_t>(shared_bytes), stream, call);
          }};
}

template <typename Tiles, typename WeightTiles>
ForwardKernels forward_kernels_of() {
  ForwardKernels kernels;
  kernels.forward = forward_kernel_of<Tiles>();
  kernels.weights = {shape_of<WeightTiles>(), WeightsMemory<WeightTiles>::bytes(false),
                     WeightsMemory<WeightTiles>::bytes(true),
                     [](const WeightsCall& call, std::int64_t blocks, int shared_bytes, cudaStream_t stream) {
                       launch("attention_weights_kernel", &attention_weights_kernel<WeightTiles>,
                              grid_of("attention_weights_kernel", blocks), dim3(WeightTiles::kThreads),
                              static_cast<std::size_t>(shared_bytes), stream, call);
                     }};
  return kernels;
}

template <typename KeyTiles>
Kernel<BackwardCall> keys_kernel_of() {
  return {shape_of<KeyTiles>(), BackwardMemory<KeyTiles>::bytes(false), BackwardMemory<KeyTiles>::bytes(true),
          [](const BackwardCall& call, std::int64_t blocks, int shared_bytes, cudaStream_t stream) {
            launch("backward_keys_kernel", &backward_keys_kernel<KeyTiles>, grid_of("backward_keys_kernel", blocks),
                   dim3(KeyTiles::kThreads), static_cast<std::size_t>(shared_bytes), stream, call);
          }};
}

template <typename QueryTiles>
Kernel<BackwardCall> queries_kernel_of() {
  return {shape_of<QueryTiles>(), BackwardMemory<QueryTiles>::bytes(false), BackwardMemory<QueryTiles>::bytes(true),
          [](const BackwardCall& call, std::int64_t blocks, int shared_bytes, cudaStream_t stream) {
            launch("backward_queries_kernel", &backward_queries_kernel<QueryTiles>,
                   grid_of("backward_queries_kernel", blocks), dim3(QueryTiles::kThreads),
                   static_cast<std::size_t>(shared_bytes), stream, call);
          }};
}

template <typename KeyTiles, typename QueryTiles>
BackwardKernels backward_kernels_of() {
  BackwardKernels kernels;
  kernels.keys = keys_kernel_of<KeyTiles>();
  kernels.queries = queries_kernel_of<QueryTiles>();
  kernels.weight_deltas = {
      shape_of<QueryTiles>(), DeltaMemory<QueryTiles>::bytes(false), DeltaMemory<QueryTiles>::bytes(true),
      [](const BackwardCall& call, std::int64_t blocks, int shared_bytes, cudaStream_t stream) {
        launch("weight_deltas_kernel", &weight_deltas_kernel<QueryTiles>, grid_of("weight_deltas_kernel", blocks),
               dim3(QueryTiles::kThreads), static_cast<std::size_t>(shared_bytes), stream, call);
      }};
  kernels.mask_gradient = {
      shape_of<QueryTiles>(), MaskGradientMemory<QueryTiles>::kBytes, MaskGradientMemory<QueryTiles>::kBytes,
      [](const MaskGradientCall& call, std::int64_t blocks, int shared_bytes, cudaStream_t stream) {
        launch("mask_gradient_kernel", &mask_gradient_kernel<QueryTiles>, grid_of("mask_gradient_kernel", blocks),
               dim3(QueryTiles::kThreads), static_cast<std::size_t>(shared_bytes), stream, call);
      }};
  return kernels;
}

}  // namespace fused_mha::cuda
