// SPDX-License-Identifier: BSD-3-Clause
//
// The CPU kernels' doors. Each runs one whole call on the instruction set that cpu::active_isa() names.
//
// Sums are kept in float (double for float64 inputs) and rounded once. The same problem gives the same bits on one
// instruction set, whatever `parallel` does. Sizes of 0 are legal. A row that sees no key gets output 0, weights 0,
// gradient 0. Nothing hidden is read into a sum. Thread safe. Inputs must agree with the shapes that
// core/problem.h states; nothing is checked here.
#pragma once

#include "core/parallel.h"
#include "core/problem.h"
#include "cpu/isa.h"

namespace fused_mha::cpu {

/// Tiled online-softmax attention (Milakov and Gimelshein 2018; Dao et al., "FlashAttention", 2022).
void attention_forward(const core::AttentionProblem& problem, const core::ForwardOutputs& outputs,
                       const core::Parallel& parallel);

/// Gradients of the above by recomputation of the weights tile by tile (FlashAttention, section 3.2 and appendix B).
void attention_backward(const core::AttentionProblem& problem, const core::BackwardInputs& inputs,
                        const core::BackwardOutputs& outputs, const core::Parallel& parallel);

/// keep (N, H, L, S) contiguous, one byte an element: what core/dropout.h decides for problem.rng and dropout_p.
void dropout_mask(const core::AttentionProblem& problem, bool* keep, const core::Parallel& parallel);

}  // namespace fused_mha::cpu
