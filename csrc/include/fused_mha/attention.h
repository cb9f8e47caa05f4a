// SPDX-License-Identifier: BSD-3-Clause
//
// Masked attention on tensors, as torch.ops.fused_mha.attention in Python.
//
//   output[n, h, l, :] = sum over visible s of dropout(softmax over visible s of scale * q . k + masks) * value[n, h,
//   s, :]
//
// Shapes: query (N, H, L, D), key (N, Hkv, S, D), value (N, Hkv, S, Dv), output (N, H, L, Dv); Hkv divides H. Without
// H, (N, L, D), there is one head; (L, D) is one sample besides. Strides are free and nothing is copied; the output
// keeps the query's memory order. Any of N, H, L, S may be 0. dtypes: float32, float64, bfloat16, float16.
//
// In every mask bool True hides, a floating mask is added to the scaled scores, and -inf hides. What is hidden is not
// read. A query that sees no key gets output 0, weights 0 and gradient 0. Differentiable in query, key, value, floating
// masks, sink and through the weights; deterministic; safe to call from several threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <fused_mha/export.h>
#include <torch/arg.h>

#include <optional>
#include <string>
#include <tuple>

namespace fused_mha {

/// Example: `AttentionOptions().key_padding_mask(mask).is_causal(true)`.
struct FUSED_MHA_API AttentionOptions {
  /// (N, S). Undefined: nothing is padding.
  TORCH_ARG(at::Tensor, key_padding_mask);

  /// Broadcastable to (N, H, L, S). Undefined: none.
  TORCH_ARG(at::Tensor, attn_mask);

  /// Hides s > l beside what the masks hide.
  TORCH_ARG(bool, is_causal) = false;

  /// "bottom_right": causality hides s > l + S - L instead, so that the last query sees every key. Default: "top_left".
  TORCH_ARG(std::string, causal_alignment) = "top_left";

  /// Probability of a weight to become 0, in [0, 1]; the others are scaled by 1 / (1 - dropout_p).
  TORCH_ARG(double, dropout_p) = 0.0;

  /// Factor of query . key. Default: 1 / sqrt(D).
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;

  /// (H), floating: adds exp(sink[h]) to the softmax's denominator, as a key would whose value is 0. Undefined: none.
  TORCH_ARG(at::Tensor, sink);

  /// Weights averaged over heads, (N, L, S), or for each head, (N, H, L, S). Only attention_with_weights looks at it.
  TORCH_ARG(bool, average_attn_weights) = true;

  /// Return the weights that dropout is yet to act on. Only attention_with_weights looks at it.
  TORCH_ARG(bool, weights_before_dropout) = false;
};

FUSED_MHA_API at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                   const AttentionOptions& options = {});

/// Output, and each row's log-sum-exp of scores and sink, (N, H, L), float32 (float64 for float64): the logarithm of
/// what the row was divided by, -inf for a row that sees nothing. Differentiable, too.
FUSED_MHA_API std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                                    const at::Tensor& value,
                                                                    const AttentionOptions& options = {});

/// Output and weights, after dropout unless options say otherwise. Averaged weights cost no tensor of shape (N, H, L,
/// S).
FUSED_MHA_API std::tuple<at::Tensor, at::Tensor> attention_with_weights(const at::Tensor& query, const at::Tensor& key,
                                                                        const at::Tensor& value,
                                                                        const AttentionOptions& options = {});

/// Sequences of any lengths one behind the other, without padding: query (total_q, H, D), key (total_k, Hkv, D), value
/// (total_k, Hkv, Dv). Sequence n has the rows cu_seqlens_q[n] to cu_seqlens_q[n + 1] and the keys cu_seqlens_k[n] to
/// cu_seqlens_k[n + 1]; both are int32 or int64, (N + 1), and ascend from 0 to the totals. Output (total_q, H, Dv).
/// Options without masks; causality is counted in each sequence. One run of the kernels for all sequences.
FUSED_MHA_API at::Tensor attention_varlen(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                          const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                          const AttentionOptions& options = {});

}  // namespace fused_mha
