// SPDX-License-Identifier: BSD-3-Clause
//
// The public attention operators, composites of the private ones, and the C++ functions that call them.
#include <fused_mha/additive_attention.h>
#include <fused_mha/attention.h>
#include <fused_mha/version.h>
#include <torch/library.h>

#include <cmath>

#include "core/problem.h"
#include "torch/checks.h"
#include "torch/operators.h"
#include "torch/rng.h"

namespace fused_mha {
namespace detail {
namespace {

/// Puts the dimensions that a query of rank 3, (N, L, D), or 2, (L, D), lacks into `tensor` of the same rank.
at::Tensor to_four_dimensions(at::Tensor tensor, std::int64_t rank) {
  if (rank < 3) tensor = tensor.unsqueeze(0);
  return rank < 4 ? tensor.unsqueeze(1) : tensor;
}

at::Tensor to_given_rank(const at::Tensor& output, std::int64_t rank) {
  if (rank == 4) return output;
  const auto without_heads = output.squeeze(1);
  return rank == 3 ? without_heads : without_heads.squeeze(0);
}

/// A mask that broadcasts to (N, L, S) beside a query (N, L, D), to (N, H, L, S) otherwise, in four dimensions.
at::Tensor mask_to_four_dimensions(const char* op, at::Tensor mask, std::int64_t rank) {
  TORCH_CHECK(mask.dim() <= 4, "fused_mha::", op, ": attn_mask must broadcast to (N, H, L, S), got shape ",
              shape_text(mask.sym_sizes()));
  while (mask.dim() < 3) mask = mask.unsqueeze(0);
  if (mask.dim() == 3) mask = mask.unsqueeze(rank == 3 ? 1 : 0);
  return mask;
}

double default_scale(const at::Tensor& query) {
  return 1.0 / std::sqrt(static_cast<double>(query.sym_size(-1).guard_int(__FILE__, __LINE__)));
}

/// What the public operators of dot-product scores have in common.
struct Choices {
  std::optional<double> scale;
  std::string_view causal_alignment;
  OptionalTensor sink;
};

/// What all public operators do: check, bring to four dimensions, draw, call, and give back the rank of the query.
template <typename Call>
std::tuple<at::Tensor, at::Tensor> run_with_four_dimensions(const char* op, AttentionArguments arguments,
                                                            const Call& call) {
  const auto rank = arguments.query.dim();
  for (auto* tensor : {&arguments.query, &arguments.key, &arguments.value}) {
    *tensor = to_four_dimensions(*tensor, rank);
  }
  auto& padding = arguments.key_padding_mask;
  if (has_tensor(padding) && rank == 2 && padding->dim() == 1) padding = padding->unsqueeze(0);
  auto& mask = arguments.attn_mask;
  const auto given_mask = mask;
  if (has_tensor(mask)) mask = mask_to_four_dimensions(op, *mask, rank);
  check_shapes(op, arguments, rank, given_mask);
  arguments.rng_state = draw_rng_state(arguments.dropout_p, arguments.query.device());
  const auto [output, weights, row_max, row_sum] = call(arguments);
  if (arguments.weights_mode == 0) return {to_given_rank(output, rank), weights};
  if (arguments.weights_mode == kLogSumExp) return {to_given_rank(output, rank), to_given_rank(weights, rank)};
  return {to_given_rank(output, rank), rank > 2 ? weights : weights.squeeze(0)};
}

std::tuple<at::Tensor, at::Tensor> run_attention(const char* op, AttentionArguments arguments, const Choices& choices) {
  arguments.bottom_right = is_bottom_right(op, choices.causal_alignment);
  arguments.sink = sink_of_heads(op, choices.sink);
  check_given(op, arguments);
  arguments.scale = choices.scale.has_value() ? *choices.scale : default_scale(arguments.query);
  return run_with_four_dimensions(op, std::move(arguments), call_forward);
}

std::tuple<at::Tensor, at::Tensor> run_additive_attention(const char* op, AttentionArguments arguments,
                                                          const at::Tensor& score_weight) {
  check_not_cuda(op, arguments.query);
  check_given(op, arguments);
  return run_with_four_dimensions(op, std::move(arguments), [&](const AttentionArguments& four_dimensional) {
    check_score_weight(op, four_dimensional, score_weight);
    return call_additive_forward(four_dimensional, score_weight);
  });
}

/// Without a head dimension there is one head, whose weights come without that dimension too.
std::int64_t weights_mode_of(const at::Tensor& query, bool average_attn_weights) {
  const bool averaged = average_attn_weights || query.dim() < 4;
  return static_cast<std::int64_t>(averaged ? core::WeightsMode::kAveraged : core::WeightsMode::kPerHead);
}

at::Tensor attention_composite(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask, bool is_causal,
                               double dropout_p, std::optional<double> scale, std::string_view causal_alignment,
                               const OptionalTensor& sink) {
  AttentionArguments arguments{query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p};
  return std::get<0>(run_attention("attention", std::move(arguments), {scale, causal_alignment, sink}));
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse_composite(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& key_padding_mask,
    const OptionalTensor& attn_mask, bool is_causal, double dropout_p, std::optional<double> scale,
    std::string_view causal_alignment, const OptionalTensor& sink) {
  AttentionArguments arguments{query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p};
  arguments.weights_mode = kLogSumExp;
  return run_attention("attention_with_lse", std::move(arguments), {scale, causal_alignment, sink});
}

std::tuple<at::Tensor, at::Tensor> attention_with_weights_composite(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& key_padding_mask,
    const OptionalTensor& attn_mask, bool is_causal, double dropout_p, std::optional<double> scale,
    bool average_attn_weights, std::string_view causal_alignment, const OptionalTensor& sink,
    bool weights_before_dropout) {
  AttentionArguments arguments{query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p};
  arguments.weights_mode = weights_mode_of(query, average_attn_weights);
  arguments.weights_before_dropout = weights_before_dropout;
  return run_attention("attention_with_weights", std::move(arguments), {scale, causal_alignment, sink});
}

at::Tensor additive_attention_composite(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const at::Tensor& score_weight, const OptionalTensor& key_padding_mask,
                                        const OptionalTensor& attn_mask, bool is_causal, double dropout_p) {
  AttentionArguments arguments{query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p};
  return std::get<0>(run_additive_attention("additive_attention", std::move(arguments), score_weight));
}

std::tuple<at::Tensor, at::Tensor> additive_attention_with_weights_composite(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& score_weight,
    const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask, bool is_causal, double dropout_p,
    bool average_attn_weights) {
  AttentionArguments arguments{query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p};
  arguments.weights_mode = weights_mode_of(query, average_attn_weights);
  return run_additive_attention("additive_attention_with_weights", std::move(arguments), score_weight);
}

at::Tensor attention_varlen_composite(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, bool is_causal,
                                      double dropout_p, std::optional<double> scale, std::string_view causal_alignment,
                                      const OptionalTensor& sink) {
  constexpr const char* kOp = "attention_varlen";
  check_not_cuda(kOp, query);
  VarlenArguments arguments{query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal, dropout_p};
  arguments.bottom_right = is_bottom_right(kOp, causal_alignment);
  if (has_tensor(sink)) arguments.sink = sink;
  check_varlen(kOp, arguments);
  arguments.scale = scale.has_value() ? *scale : default_scale(query);
  arguments.rng_state = draw_rng_state(dropout_p, query.device());
  return std::get<0>(call_varlen_forward(arguments));
}

}  // namespace
}  // namespace detail

const char* version() { return FUSED_MHA_VERSION; }

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  static const auto op = detail::find_operator<decltype(detail::attention_composite)>("fused_mha::attention");
  return op.call(query, key, value, detail::optional_tensor(options.key_padding_mask()),
                 detail::optional_tensor(options.attn_mask()), options.is_causal(), options.dropout_p(),
                 options.scale(), options.causal_alignment(), detail::optional_tensor(options.sink()));
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const AttentionOptions& options) {
  static const auto op =
      detail::find_operator<decltype(detail::attention_with_lse_composite)>("fused_mha::attention_with_lse");
  return op.call(query, key, value, detail::optional_tensor(options.key_padding_mask()),
                 detail::optional_tensor(options.attn_mask()), options.is_causal(), options.dropout_p(),
                 options.scale(), options.causal_alignment(), detail::optional_tensor(options.sink()));
}

at::Tensor attention_varlen(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                            const AttentionOptions& options) {
  TORCH_CHECK(!options.key_padding_mask().defined() && !options.attn_mask().defined(),
              "fused_mha::attention_varlen: key_padding_mask and attn_mask cannot be given: sequences have no padding");
  static const auto op =
      detail::find_operator<decltype(detail::attention_varlen_composite)>("fused_mha::attention_varlen");
  return op.call(query, key, value, cu_seqlens_q, cu_seqlens_k, options.is_causal(), options.dropout_p(),
                 options.scale(), options.causal_alignment(), detail::optional_tensor(options.sink()));
}

std::tuple<at::Tensor, at::Tensor> attention_with_weights(const at::Tensor& query, const at::Tensor& key,
                                                          const at::Tensor& value, const AttentionOptions& options) {
  static const auto op =
      detail::find_operator<decltype(detail::attention_with_weights_composite)>("fused_mha::attention_with_weights");
  return op.call(query, key, value, detail::optional_tensor(options.key_padding_mask()),
                 detail::optional_tensor(options.attn_mask()), options.is_causal(), options.dropout_p(),
                 options.scale(), options.average_attn_weights(), options.causal_alignment(),
                 detail::optional_tensor(options.sink()), options.weights_before_dropout());
}

at::Tensor additive_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const at::Tensor& score_weight, const AdditiveAttentionOptions& options) {
  static const auto op =
      detail::find_operator<decltype(detail::additive_attention_composite)>("fused_mha::additive_attention");
  return op.call(query, key, value, score_weight, detail::optional_tensor(options.key_padding_mask()),
                 detail::optional_tensor(options.attn_mask()), options.is_causal(), options.dropout_p());
}

std::tuple<at::Tensor, at::Tensor> additive_attention_with_weights(const at::Tensor& query, const at::Tensor& key,
                                                                   const at::Tensor& value,
                                                                   const at::Tensor& score_weight,
                                                                   const AdditiveAttentionOptions& options) {
  static const auto op = detail::find_operator<decltype(detail::additive_attention_with_weights_composite)>(
      "fused_mha::additive_attention_with_weights");
  return op.call(query, key, value, score_weight, detail::optional_tensor(options.key_padding_mask()),
                 detail::optional_tensor(options.attn_mask()), options.is_causal(), options.dropout_p(),
                 options.average_attn_weights());
}

}  // namespace fused_mha

TORCH_LIBRARY_IMPL(fused_mha, CompositeImplicitAutograd, library) {
  library.impl("attention", &fused_mha::detail::attention_composite);
  library.impl("attention_with_weights", &fused_mha::detail::attention_with_weights_composite);
  library.impl("attention_with_lse", &fused_mha::detail::attention_with_lse_composite);
  library.impl("additive_attention", &fused_mha::detail::additive_attention_composite);
  library.impl("additive_attention_with_weights", &fused_mha::detail::additive_attention_with_weights_composite);
  library.impl("attention_varlen", &fused_mha::detail::attention_varlen_composite);
}

// vmap does not look inside a composite unless told to.
TORCH_LIBRARY_IMPL(fused_mha, FuncTorchBatchedDecomposition, library) {
  library.impl("attention", &fused_mha::detail::attention_composite);
  library.impl("attention_with_weights", &fused_mha::detail::attention_with_weights_composite);
  library.impl("attention_with_lse", &fused_mha::detail::attention_with_lse_composite);
  library.impl("additive_attention", &fused_mha::detail::additive_attention_composite);
  library.impl("additive_attention_with_weights", &fused_mha::detail::additive_attention_with_weights_composite);
  library.impl("attention_varlen", &fused_mha::detail::attention_varlen_composite);
}
