// SPDX-License-Identifier: BSD-3-Clause
//
// The arguments of one attention call, gathered once at a kernel's door so that everything behind it takes one thing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace fused_mha::detail {

using OptionalTensor = std::optional<at::Tensor>;

/// A weights_mode: the log-sum-exp of each row, (N, H, L), is returned in the place of weights.
inline constexpr std::int64_t kLogSumExp = 3;

/// query (N, H, L, D), key (N, Hkv, S, D), value (N, Hkv, S, Dv); key_padding_mask (N, S'), attn_mask four-dimensional
/// and broadcastable to (N, H, L, S'), where S' = S - always_visible_keys; sink four-dimensional and broadcastable to
/// (N, H, 1, 1); rng_state two int64 numbers.
struct AttentionArguments {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  OptionalTensor key_padding_mask = std::nullopt;
  OptionalTensor attn_mask = std::nullopt;
  bool is_causal = false;
  double dropout_p = 0.0;
  double scale = 1.0;
  OptionalTensor rng_state = std::nullopt;
  c10::SymInt always_visible_keys = 0;
  std::int64_t weights_mode = 0;  // core::WeightsMode or kLogSumExp: what is returned beside the output
  bool bottom_right = false;      // causality hides s > l + S' - L instead of s > l
  OptionalTensor sink = std::nullopt;
  bool weights_before_dropout = false;

  c10::SymInt batch() const { return query.sym_size(0); }
  c10::SymInt heads() const { return query.sym_size(1); }
  c10::SymInt kv_heads() const { return key.sym_size(1); }
  c10::SymInt query_length() const { return query.sym_size(2); }
  c10::SymInt key_length() const { return key.sym_size(2); }
  c10::SymInt masked_keys() const { return key_length() - always_visible_keys; }
};

/// Those of an additive call, but for score_weight: nothing scales its scores.
inline AttentionArguments additive_arguments(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                             bool is_causal, double dropout_p, const OptionalTensor& rng_state,
                                             std::int64_t weights_mode) {
  return {query,
          key,
          value,
          key_padding_mask,
          attn_mask,
          is_causal,
          dropout_p,
          /*scale=*/1.0,
          rng_state,
          /*always_visible_keys=*/0,
          weights_mode};
}

/// What the backward pass reads beside the arguments; gradients are absent where they are zero.
struct BackwardArguments {
  OptionalTensor grad_output;
  OptionalTensor grad_weights;
  at::Tensor output;
  at::Tensor row_max;
  at::Tensor row_sum;
};

/// Which of query, key, value, key_padding_mask, attn_mask, sink want a gradient.
using GradientMask = std::array<bool, 6>;

/// Which of query, key, value, score_weight, key_padding_mask, attn_mask of an additive call want a gradient.
using AdditiveGradientMask = std::array<bool, 6>;

/// output, weights (or log-sum-exps), row_max, row_sum
using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
/// Gradients of the same six; an empty (0,) tensor where none was asked for.
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// The same with that of score_weight after that of value.
using AdditiveBackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// The attention's part of what an additive call wants.
inline GradientMask without_score_weight(const AdditiveGradientMask& wanted) {
  return {wanted[0], wanted[1], wanted[2], wanted[4], wanted[5], false};
}

/// Sequences one behind the other without padding: query (T, H, D), key (Tk, Hkv, D), value (Tk, Hkv, Dv), where
/// sequence n has the rows cu_seqlens_q[n] to cu_seqlens_q[n + 1] and the keys cu_seqlens_k[n] to cu_seqlens_k[n + 1];
/// sink (H).
struct VarlenArguments {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor cu_seqlens_q;
  at::Tensor cu_seqlens_k;
  bool is_causal = false;
  double dropout_p = 0.0;
  double scale = 1.0;
  OptionalTensor rng_state = std::nullopt;
  bool bottom_right = false;
  OptionalTensor sink = std::nullopt;
};

/// output, row_max, row_sum
using VarlenForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

struct VarlenBackwardArguments {
  at::Tensor grad_output;
  at::Tensor output;
  at::Tensor row_max;
  at::Tensor row_sum;
};

/// Which of query, key, value, sink want a gradient.
using VarlenGradientMask = std::array<bool, 4>;

/// Their gradients; an empty (0,) tensor where none was asked for.
using VarlenBackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline bool has_tensor(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

/// A tensor that may be undefined as an optional one.
inline OptionalTensor optional_tensor(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

}  // namespace fused_mha::detail
