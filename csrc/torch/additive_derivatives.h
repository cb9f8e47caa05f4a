// SPDX-License-Identifier: BSD-3-Clause
//
// Additive attention and its gradients in PyTorch's own differentiable operations: not fused, with tensors of shape
// (N, H, L, S, D). Forward-mode and second-order derivatives come from here; first-order ones never do.
//
//   T = tanh(q + k)        U = 1 - T^2        S = sum_d v T + M        P, W, O and dS as in derivatives.h
//   dq = v sum_s dS U      dk = v sum_l dS U      dv = sum_ls dS T     dM = dS
//
// All that follows the scores is derivatives.h's: the scores go there as a float mask beside queries of 0. Hidden pairs
// have q + k = 0 here, so NaN there stays out.
#pragma once

#include <array>

#include "torch/arguments.h"

namespace fused_mha::detail {

/// Tangents of output and weights (undefined with weights_mode 0) for those `of` query, key, value, score_weight,
/// key_padding_mask and attn_mask, any of which may be undefined; differentiable by any mode.
std::array<at::Tensor, 2> additive_forward_tangents(const AttentionArguments& arguments, const at::Tensor& score_weight,
                                                    const std::array<at::Tensor, 6>& of);

/// Gradients of query, key, value, score_weight, key_padding_mask, attn_mask, differentiable by any mode; undefined if
/// not wanted.
std::array<at::Tensor, 6> unfused_additive_backward(const AttentionArguments& arguments, const at::Tensor& score_weight,
                                                    const BackwardArguments& backward,
                                                    const AdditiveGradientMask& wanted);

/// Cotangents of _additive_attention_backward's grad_output, grad_weights, query, key, value, score_weight,
/// key_padding_mask, attn_mask for the cotangents `of` of its results, any of which may be undefined; undefined if not
/// wanted.
std::array<at::Tensor, 8> unfused_additive_double_backward(const AttentionArguments& arguments,
                                                           const at::Tensor& score_weight,
                                                           const BackwardArguments& backward,
                                                           const std::array<at::Tensor, 6>& of,
                                                           const std::array<bool, 8>& wanted);

}  // namespace fused_mha::detail
