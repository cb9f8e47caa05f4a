// SPDX-License-Identifier: BSD-3-Clause
//
// Attention and its gradients written in PyTorch's own differentiable operations: not fused, with tensors of shape
// (N, H, L, S). Forward-mode and second-order derivatives come from here; first-order ones never do.
//
//   S = scale Q K^T + M
//   P = softmax of S over visible keys and sink, 0 where hidden
//   Z = keep / (1 - dropout_p)
//   W = P Z
//   O = W V
//   lse = log-sum-exp of S and sink
//
//   dP = (dO V^T + gW) Z, or dO V^T Z + gW where weights are returned from before dropout
//   delta = rowsum(P dP) - glse
//   dS = P (dP - delta)
//   dQ = scale dS K
//   dK = scale dS^T Q
//   dV = W^T dO
//   dM = dS
//   d sink = -p_sink delta
//
// Sums are kept in float (double for float64 inputs). What is hidden changes nothing, be it NaN; a visible number that
// is not finite makes NaN of all that it has a part in.
#pragma once

#include <array>

#include "torch/arguments.h"

namespace fused_mha::detail {

/// Whether a forward-mode tangent reaches one of the tensors.
bool has_tangent(const AttentionArguments& arguments);
bool has_tangent(const AttentionArguments& arguments, const BackwardArguments& backward);

/// Tangents of output and weights (undefined with weights_mode 0) for those `of` query, key, value, key_padding_mask,
/// attn_mask and sink, any of which may be undefined; differentiable by any mode.
std::array<at::Tensor, 2> forward_tangents(const AttentionArguments& arguments, const std::array<at::Tensor, 6>& of);

/// Gradients of query, key, value, key_padding_mask, attn_mask, sink, differentiable by any mode; undefined if not
/// wanted.
std::array<at::Tensor, 6> unfused_backward(const AttentionArguments& arguments, const BackwardArguments& backward,
                                           const GradientMask& wanted);

/// Cotangents of _attention_backward's grad_output, grad_weights, query, key, value, key_padding_mask, attn_mask,
/// sink for the cotangents `of` of its results, any of which may be undefined; undefined if not wanted.
std::array<at::Tensor, 8> unfused_double_backward(const AttentionArguments& arguments,
                                                  const BackwardArguments& backward,
                                                  const std::array<at::Tensor, 6>& of,
                                                  const std::array<bool, 8>& wanted);

}  // namespace fused_mha::detail
