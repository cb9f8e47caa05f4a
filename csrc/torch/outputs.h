// SPDX-License-Identifier: BSD-3-Clause
//
// Allocation of results: one place for every device and for Meta, so that real and fake results have equal strides.
#pragma once

#include "torch/arguments.h"

namespace fused_mha::detail {

/// Uninitialised and dense, dimensions lying in memory in the order in which those of `like` do.
at::Tensor empty_in_order_of(const at::Tensor& like, c10::SymIntArrayRef sizes);

/// output in query's order; weights (0,), (N, L, S) or (N, H, L, S), or log-sum-exps (N, H, L) as row_max; row_max and
/// row_sum (N, H, L), contiguous, in the accumulation type. Uninitialised.
ForwardResult allocate_forward(const AttentionArguments& arguments);

/// output in query's order; row_max and row_sum (total_q * H), in the accumulation type. Uninitialised.
VarlenForwardResult allocate_varlen_forward(const VarlenArguments& arguments);

/// As allocate_backward; the gradient of sink (N, H) in the accumulation type, one for each sequence.
VarlenBackwardResult allocate_varlen_backward(const VarlenArguments& arguments, const VarlenGradientMask& wanted);

/// Each gradient in the sizes, dtype and memory order of its input; (0,) where not wanted. Uninitialised.
BackwardResult allocate_backward(const AttentionArguments& arguments, const GradientMask& wanted);

/// The same with grad_score_weight, contiguous.
AdditiveBackwardResult allocate_additive_backward(const AttentionArguments& arguments, const at::Tensor& score_weight,
                                                  const AdditiveGradientMask& wanted);

}  // namespace fused_mha::detail
