// SPDX-License-Identifier: BSD-3-Clause
//
// Autocast: query, key and value go to the autocast dtype, masks and sinks stay as they are. It is done at the private
// operator to which every public one leads, so that none can be forgotten.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "torch/operators.h"

namespace fused_mha::detail {
namespace {

template <at::DeviceType device_type>
ForwardResult attention_forward_autocast(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                         const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                         bool is_causal, double dropout_p, double scale,
                                         const OptionalTensor& rng_state, c10::SymInt always_visible_keys,
                                         std::int64_t weights_mode, bool bottom_right, const OptionalTensor& sink,
                                         bool weights_before_dropout) {
  const c10::impl::ExcludeDispatchKeyGuard once(
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device_type)));
  const auto dtype = at::autocast::get_autocast_dtype(device_type);
  const auto cast = [&](const at::Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, device_type); };
  return call_forward({cast(query), cast(key), cast(value), key_padding_mask, attn_mask, is_causal, dropout_p, scale,
                       rng_state, always_visible_keys, weights_mode, bottom_right, sink, weights_before_dropout});
}

template <at::DeviceType device_type>
ForwardResult additive_attention_forward_autocast(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const at::Tensor& score_weight,
                                                  const OptionalTensor& key_padding_mask,
                                                  const OptionalTensor& attn_mask, bool is_causal, double dropout_p,
                                                  const OptionalTensor& rng_state, std::int64_t weights_mode) {
  const c10::impl::ExcludeDispatchKeyGuard once(
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device_type)));
  const auto dtype = at::autocast::get_autocast_dtype(device_type);
  const auto cast = [&](const at::Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, device_type); };
  return call_additive_forward(additive_arguments(cast(query), cast(key), cast(value), key_padding_mask, attn_mask,
                                                  is_causal, dropout_p, rng_state, weights_mode),
                               cast(score_weight));
}

template <at::DeviceType device_type>
VarlenForwardResult varlen_forward_autocast(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                            const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                            bool is_causal, double dropout_p, double scale,
                                            const OptionalTensor& rng_state, bool bottom_right,
                                            const OptionalTensor& sink) {
  const c10::impl::ExcludeDispatchKeyGuard once(
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device_type)));
  const auto dtype = at::autocast::get_autocast_dtype(device_type);
  const auto cast = [&](const at::Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, device_type); };
  return call_varlen_forward({cast(query), cast(key), cast(value), cu_seqlens_q, cu_seqlens_k, is_causal, dropout_p,
                              scale, rng_state, bottom_right, sink});
}

}  // namespace
}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, AutocastCPU, library) {
  library.impl("_attention_forward", &fused_mha::detail::attention_forward_autocast<at::kCPU>);
  library.impl("_additive_attention_forward", &fused_mha::detail::additive_attention_forward_autocast<at::kCPU>);
  library.impl("_varlen_forward", &fused_mha::detail::varlen_forward_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(fused_mha, AutocastCUDA, library) {
  library.impl("_attention_forward", &fused_mha::detail::attention_forward_autocast<at::kCUDA>);
  library.impl("_additive_attention_forward", &fused_mha::detail::additive_attention_forward_autocast<at::kCUDA>);
  library.impl("_varlen_forward", &fused_mha::detail::varlen_forward_autocast<at::kCUDA>);
}
