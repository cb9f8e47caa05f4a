// SPDX-License-Identifier: BSD-3-Clause
//
// The Meta kernels: what the others check and allocate, and no more. Fake tensors, torch.compile and torch.export run
// these, with sizes that may be symbols.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "torch/checks.h"
#include "torch/operators.h"
#include "torch/outputs.h"

namespace fused_mha::detail {
namespace {

ForwardResult attention_forward_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                     const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                     bool is_causal, double dropout_p, double scale, const OptionalTensor& rng_state,
                                     c10::SymInt always_visible_keys, std::int64_t weights_mode, bool bottom_right,
                                     const OptionalTensor& sink, bool weights_before_dropout) {
  const AttentionArguments arguments{query,        key,
                                     value,        key_padding_mask,
                                     attn_mask,    is_causal,
                                     dropout_p,    scale,
                                     rng_state,    always_visible_keys,
                                     weights_mode, bottom_right,
                                     sink,         weights_before_dropout};
  check_forward("_attention_forward", arguments);
  return allocate_forward(arguments);
}

BackwardResult attention_backward_meta(const OptionalTensor& grad_output, const OptionalTensor& grad_weights,
                                       const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                       const at::Tensor& output, const at::Tensor& row_max, const at::Tensor& row_sum,
                                       bool is_causal, double dropout_p, double scale, const OptionalTensor& rng_state,
                                       c10::SymInt always_visible_keys, std::int64_t weights_mode,
                                       GradientMask output_mask, bool bottom_right, const OptionalTensor& sink,
                                       bool weights_before_dropout) {
  const AttentionArguments arguments{query,        key,
                                     value,        key_padding_mask,
                                     attn_mask,    is_causal,
                                     dropout_p,    scale,
                                     rng_state,    always_visible_keys,
                                     weights_mode, bottom_right,
                                     sink,         weights_before_dropout};
  check_backward("_attention_backward", arguments, {grad_output, grad_weights, output, row_max, row_sum}, output_mask);
  return allocate_backward(arguments, output_mask);
}

ForwardResult additive_attention_forward_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                              const at::Tensor& score_weight, const OptionalTensor& key_padding_mask,
                                              const OptionalTensor& attn_mask, bool is_causal, double dropout_p,
                                              const OptionalTensor& rng_state, std::int64_t weights_mode) {
  const auto arguments =
      additive_arguments(query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p, rng_state, weights_mode);
  check_additive_forward("_additive_attention_forward", arguments, score_weight);
  return allocate_forward(arguments);
}

AdditiveBackwardResult additive_attention_backward_meta(
    const OptionalTensor& grad_output, const OptionalTensor& grad_weights, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& score_weight,
    const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask, const at::Tensor& output,
    const at::Tensor& row_max, const at::Tensor& row_sum, bool is_causal, double dropout_p,
    const OptionalTensor& rng_state, std::int64_t weights_mode, AdditiveGradientMask output_mask) {
  const auto arguments =
      additive_arguments(query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p, rng_state, weights_mode);
  check_additive_backward("_additive_attention_backward", arguments, score_weight,
                          {grad_output, grad_weights, output, row_max, row_sum}, output_mask);
  return allocate_additive_backward(arguments, score_weight, output_mask);
}

VarlenForwardResult varlen_forward_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, bool is_causal,
                                        double dropout_p, double scale, const OptionalTensor& rng_state,
                                        bool bottom_right, const OptionalTensor& sink) {
  const VarlenArguments arguments{query,     key,   value,     cu_seqlens_q, cu_seqlens_k, is_causal,
                                  dropout_p, scale, rng_state, bottom_right, sink};
  check_varlen_forward("attention_varlen", arguments);
  return allocate_varlen_forward(arguments);
}

VarlenBackwardResult varlen_backward_meta(const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                                          const at::Tensor& cu_seqlens_k, const at::Tensor& output,
                                          const at::Tensor& row_max, const at::Tensor& row_sum, bool is_causal,
                                          double dropout_p, double scale, const OptionalTensor& rng_state,
                                          bool bottom_right, const OptionalTensor& sink,
                                          VarlenGradientMask output_mask) {
  const VarlenArguments arguments{query,     key,   value,     cu_seqlens_q, cu_seqlens_k, is_causal,
                                  dropout_p, scale, rng_state, bottom_right, sink};
  check_varlen_backward("attention_varlen", arguments, {grad_output, output, row_max, row_sum}, output_mask);
  auto result = allocate_varlen_backward(arguments, output_mask);
  auto& grad_sink = std::get<3>(result);
  if (output_mask[3]) grad_sink = at::empty_symint(sink->sym_sizes(), sink->options());
  return result;
}

at::Tensor dropout_mask_meta(const at::Tensor& rng_state, c10::SymInt batch, c10::SymInt heads,
                             c10::SymInt query_length, c10::SymInt key_length, double dropout_p) {
  const std::vector<c10::SymInt> sizes{batch, heads, query_length, key_length};
  check_dropout_mask("dropout_mask", rng_state, sizes, dropout_p);
  return at::empty_symint(sizes, rng_state.options().dtype(at::kBool));
}

}  // namespace
}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, Meta, library) {
  library.impl("_attention_forward", &fused_mha::detail::attention_forward_meta);
  library.impl("_attention_backward", &fused_mha::detail::attention_backward_meta);
  library.impl("_additive_attention_forward", &fused_mha::detail::additive_attention_forward_meta);
  library.impl("_additive_attention_backward", &fused_mha::detail::additive_attention_backward_meta);
  library.impl("_varlen_forward", &fused_mha::detail::varlen_forward_meta);
  library.impl("_varlen_backward", &fused_mha::detail::varlen_backward_meta);
  library.impl("dropout_mask", &fused_mha::detail::dropout_mask_meta);
}
