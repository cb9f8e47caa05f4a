// SPDX-License-Identifier: BSD-3-Clause
//
// Masked attention with additive scores (Bahdanau, Cho and Bengio, 2015), as torch.ops.fused_mha.additive_attention in
// Python.
//
//   score[n, h, l, s]  = sum over d of score_weight[h, d] * tanh(query[n, h, l, d] + key[n, h, s, d]) + masks
//   output[n, h, l, :] = sum over visible s of dropout(softmax over visible s of score) * value[n, h, s, :]
//
// query and key hold features of one width D, what the projections W_q q and W_k k gave (with a bias, if any, in one of
// them); both are made outside, by at::linear. Shapes: query (N, H, L, D), key (N, Hkv, S, D), value (N, Hkv, S, Dv),
// score_weight (D), shared by heads, or (H, D); output (N, H, L, Dv). Nothing is scaled. Without H, (N, L, D), there is
// one head; (L, D) is one sample besides. Strides, masks, empty rows, dtypes, dropout and determinism as in
// attention.h.
//
// Differentiable in query, key, value, score_weight, floating masks and through the weights. Neither pass makes a
// tensor of N * H * L * S elements or more, unless per-head weights are asked for; second-order and forward-mode
// derivatives do.
#pragma once

#include <ATen/core/Tensor.h>
#include <fused_mha/export.h>
#include <torch/arg.h>

#include <tuple>

namespace fused_mha {

/// Example: `AdditiveAttentionOptions().key_padding_mask(mask).dropout_p(0.1)`.
struct FUSED_MHA_API AdditiveAttentionOptions {
  /// (N, S). Undefined: nothing is padding.
  TORCH_ARG(at::Tensor, key_padding_mask);

  /// Broadcastable to (N, H, L, S). Undefined: none.
  TORCH_ARG(at::Tensor, attn_mask);

  /// Hides s > l beside what the masks hide.
  TORCH_ARG(bool, is_causal) = false;

  /// Probability of a weight to become 0, in [0, 1]; the others are scaled by 1 / (1 - dropout_p).
  TORCH_ARG(double, dropout_p) = 0.0;

  /// Weights averaged over heads, (N, L, S), or for each head. Only additive_attention_with_weights looks at it.
  TORCH_ARG(bool, average_attn_weights) = true;
};

FUSED_MHA_API at::Tensor additive_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                            const at::Tensor& score_weight,
                                            const AdditiveAttentionOptions& options = {});

/// Output and weights after dropout.
FUSED_MHA_API std::tuple<at::Tensor, at::Tensor> additive_attention_with_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& score_weight,
    const AdditiveAttentionOptions& options = {});

}  // namespace fused_mha
