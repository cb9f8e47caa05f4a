// SPDX-License-Identifier: BSD-3-Clause
//
// From tensors to what the kernels take. Checks have passed before; nothing is copied.
#pragma once

#include <vector>

#include "core/problem.h"
#include "torch/arguments.h"

namespace fused_mha::detail {

core::RngState rng_state_of(const at::Tensor& rng_state);

/// The rng state is filled in where the host can read it; kernels of other devices read it where it lies.
core::AttentionProblem to_problem(const AttentionArguments& arguments);

/// Only what a dropout mask of the sizes (N, H, L, S) depends on.
core::AttentionProblem to_dropout_problem(at::IntArrayRef sizes, double dropout_p);

/// What the kernels return as weights.
inline core::WeightsMode kernel_weights_mode(const AttentionArguments& arguments) {
  return arguments.weights_mode == kLogSumExp ? core::WeightsMode::kNone
                                              : static_cast<core::WeightsMode>(arguments.weights_mode);
}

core::ForwardOutputs to_outputs(const AttentionArguments& arguments, const ForwardResult& result);

core::BackwardInputs to_backward_inputs(const AttentionArguments& arguments, const BackwardArguments& backward);

core::BackwardOutputs to_backward_outputs(const BackwardResult& result, const GradientMask& wanted);

/// (1, H, 1, D) from score_weight (D) or (H, D).
core::View to_score_weight(const at::Tensor& score_weight);
core::MutableView to_grad_score_weight(const at::Tensor& gradient, bool is_wanted);

/// The sequences of a packed batch as problems of one call, each with what it writes or reads.
struct VarlenForwardProblems {
  std::vector<core::AttentionProblem> problems;
  std::vector<core::ForwardOutputs> outputs;
};
struct VarlenBackwardProblems {
  std::vector<core::AttentionProblem> problems;
  std::vector<core::BackwardInputs> inputs;
  std::vector<core::BackwardOutputs> outputs;
};

/// Refuses cu_seqlens that do not ascend from 0 to the number of rows.
VarlenForwardProblems to_varlen_forward(const char* op, const VarlenArguments& arguments,
                                        const VarlenForwardResult& result);
VarlenBackwardProblems to_varlen_backward(const char* op, const VarlenArguments& arguments,
                                          const VarlenBackwardArguments& backward, const VarlenBackwardResult& result,
                                          const VarlenGradientMask& wanted);

}  // namespace fused_mha::detail
