// SPDX-License-Identifier: BSD-3-Clause
//
// The CUDA kernels' doors. Each starts one whole call on a stream of the current device and returns at once; nothing
// waits for the device or reads its memory, so a call can be captured in a graph.
//
// All pointers are to device memory. Sums are kept in float (double for float64 inputs) and rounded once. The same
// problem gives the same bits on the same kind of card. Sizes of 0 are legal. A row that sees no key gets output 0,
// weights 0, gradient 0. Nothing hidden is read into a sum. Inputs must agree with the shapes that core/problem.h
// states; nothing is checked here. A kernel that cannot start is a std::runtime_error with its name.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"

struct CUstream_st;

namespace fused_mha::cuda {

using Stream = CUstream_st*;

/// Where the random state of a call lies, read when the kernels run: seed = numbers[0], offset = numbers[stride]. The
/// problem's own rng is not looked at.
struct DeviceRngState {
  const std::int64_t* numbers = nullptr;
  std::int64_t stride = 1;
};

/// Why forward (or backward) of this problem does not run on tensor cores on the current device; null where it does.
const char* tensor_cores_refuse(const core::AttentionProblem& problem, bool is_backward);

/// Bytes of uninitialised device memory, aligned to 256, that the call below wants as `workspace`; null is fine for 0.
std::size_t forward_workspace_bytes(const core::AttentionProblem& problem, const core::ForwardOutputs& outputs);

/// Tiled online-softmax attention, and its weights where they are asked for.
void attention_forward(const core::AttentionProblem& problem, const core::ForwardOutputs& outputs, DeviceRngState rng,
                       void* workspace, Stream stream);

std::size_t backward_workspace_bytes(const core::AttentionProblem& problem, const core::BackwardInputs& inputs,
                                     const core::BackwardOutputs& outputs);

/// Gradients of the above by recomputation of the weights tile by tile.
void attention_backward(const core::AttentionProblem& problem, const core::BackwardInputs& inputs,
                        const core::BackwardOutputs& outputs, DeviceRngState rng, void* workspace, Stream stream);

/// keep (N, H, L, S) contiguous, one byte an element: what core/dropout.h decides for the problem's sizes and
/// dropout_p.
void dropout_mask(const core::AttentionProblem& problem, bool* keep, DeviceRngState rng, Stream stream);

}  // namespace fused_mha::cuda
