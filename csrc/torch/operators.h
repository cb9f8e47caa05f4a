// SPDX-License-Identifier: BSD-3-Clause
//
// Typed handles of the operators that schema.cpp defines. Every call goes through the dispatcher, so that autograd,
// autocast, tracing and tensor subclasses see it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "torch/arguments.h"

namespace fused_mha::detail {

using ForwardSignature = ForwardResult(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                       bool is_causal, double dropout_p, double scale, const OptionalTensor& rng_state,
                                       c10::SymInt always_visible_keys, std::int64_t weights_mode, bool bottom_right,
                                       const OptionalTensor& sink, bool weights_before_dropout);

using BackwardSignature = BackwardResult(const OptionalTensor& grad_output, const OptionalTensor& grad_weights,
                                         const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                         const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                         const at::Tensor& output, const at::Tensor& row_max, const at::Tensor& row_sum,
                                         bool is_causal, double dropout_p, double scale,
                                         const OptionalTensor& rng_state, c10::SymInt always_visible_keys,
                                         std::int64_t weights_mode, GradientMask output_mask, bool bottom_right,
                                         const OptionalTensor& sink, bool weights_before_dropout);

using AdditiveForwardSignature = ForwardResult(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                               const at::Tensor& score_weight, const OptionalTensor& key_padding_mask,
                                               const OptionalTensor& attn_mask, bool is_causal, double dropout_p,
                                               const OptionalTensor& rng_state, std::int64_t weights_mode);

using AdditiveBackwardSignature = AdditiveBackwardResult(
    const OptionalTensor& grad_output, const OptionalTensor& grad_weights, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& score_weight,
    const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask, const at::Tensor& output,
    const at::Tensor& row_max, const at::Tensor& row_sum, bool is_causal, double dropout_p,
    const OptionalTensor& rng_state, std::int64_t weights_mode, AdditiveGradientMask output_mask);

using DropoutMaskSignature = at::Tensor(const at::Tensor& rng_state, c10::SymInt batch, c10::SymInt heads,
                                        c10::SymInt query_length, c10::SymInt key_length, double dropout_p);

using VarlenForwardSignature = VarlenForwardResult(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                                                   const at::Tensor& cu_seqlens_k, bool is_causal, double dropout_p,
                                                   double scale, const OptionalTensor& rng_state, bool bottom_right,
                                                   const OptionalTensor& sink);

using VarlenBackwardSignature = VarlenBackwardResult(const at::Tensor& grad_output, const at::Tensor& query,
                                                     const at::Tensor& key, const at::Tensor& value,
                                                     const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                                     const at::Tensor& output, const at::Tensor& row_max,
                                                     const at::Tensor& row_sum, bool is_causal, double dropout_p,
                                                     double scale, const OptionalTensor& rng_state, bool bottom_right,
                                                     const OptionalTensor& sink, VarlenGradientMask output_mask);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline const c10::TypedOperatorHandle<ForwardSignature>& forward_operator() {
  static const auto handle = find_operator<ForwardSignature>("fused_mha::_attention_forward");
  return handle;
}

inline const c10::TypedOperatorHandle<BackwardSignature>& backward_operator() {
  static const auto handle = find_operator<BackwardSignature>("fused_mha::_attention_backward");
  return handle;
}

inline const c10::TypedOperatorHandle<AdditiveForwardSignature>& additive_forward_operator() {
  static const auto handle = find_operator<AdditiveForwardSignature>("fused_mha::_additive_attention_forward");
  return handle;
}

inline const c10::TypedOperatorHandle<AdditiveBackwardSignature>& additive_backward_operator() {
  static const auto handle = find_operator<AdditiveBackwardSignature>("fused_mha::_additive_attention_backward");
  return handle;
}

inline const c10::TypedOperatorHandle<DropoutMaskSignature>& dropout_mask_operator() {
  static const auto handle = find_operator<DropoutMaskSignature>("fused_mha::dropout_mask");
  return handle;
}

inline const c10::TypedOperatorHandle<VarlenForwardSignature>& varlen_forward_operator() {
  static const auto handle = find_operator<VarlenForwardSignature>("fused_mha::_varlen_forward");
  return handle;
}

inline const c10::TypedOperatorHandle<VarlenBackwardSignature>& varlen_backward_operator() {
  static const auto handle = find_operator<VarlenBackwardSignature>("fused_mha::_varlen_backward");
  return handle;
}

inline VarlenForwardResult call_varlen_forward(const VarlenArguments& a) {
  return varlen_forward_operator().call(a.query, a.key, a.value, a.cu_seqlens_q, a.cu_seqlens_k, a.is_causal,
                                        a.dropout_p, a.scale, a.rng_state, a.bottom_right, a.sink);
}

inline VarlenBackwardResult call_varlen_backward(const VarlenArguments& a, const VarlenBackwardArguments& b,
                                                 VarlenGradientMask wanted) {
  return varlen_backward_operator().call(b.grad_output, a.query, a.key, a.value, a.cu_seqlens_q, a.cu_seqlens_k,
                                         b.output, b.row_max, b.row_sum, a.is_causal, a.dropout_p, a.scale, a.rng_state,
                                         a.bottom_right, a.sink, wanted);
}

inline ForwardResult call_forward(const AttentionArguments& a) {
  return forward_operator().call(a.query, a.key, a.value, a.key_padding_mask, a.attn_mask, a.is_causal, a.dropout_p,
                                 a.scale, a.rng_state, a.always_visible_keys, a.weights_mode, a.bottom_right, a.sink,
                                 a.weights_before_dropout);
}

inline BackwardResult call_backward(const AttentionArguments& a, const BackwardArguments& b, GradientMask wanted) {
  return backward_operator().call(b.grad_output, b.grad_weights, a.query, a.key, a.value, a.key_padding_mask,
                                  a.attn_mask, b.output, b.row_max, b.row_sum, a.is_causal, a.dropout_p, a.scale,
                                  a.rng_state, a.always_visible_keys, a.weights_mode, wanted, a.bottom_right, a.sink,
                                  a.weights_before_dropout);
}

inline ForwardResult call_additive_forward(const AttentionArguments& a, const at::Tensor& score_weight) {
  return additive_forward_operator().call(a.query, a.key, a.value, score_weight, a.key_padding_mask, a.attn_mask,
                                          a.is_causal, a.dropout_p, a.rng_state, a.weights_mode);
}

inline AdditiveBackwardResult call_additive_backward(const AttentionArguments& a, const at::Tensor& score_weight,
                                                     const BackwardArguments& b, AdditiveGradientMask wanted) {
  return additive_backward_operator().call(b.grad_output, b.grad_weights, a.query, a.key, a.value, score_weight,
                                           a.key_padding_mask, a.attn_mask, b.output, b.row_max, b.row_sum, a.is_causal,
                                           a.dropout_p, a.rng_state, a.weights_mode, wanted);
}

}  // namespace fused_mha::detail
