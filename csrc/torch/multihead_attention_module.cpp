// SPDX-License-Identifier: BSD-3-Clause
#include <fused_mha/multihead_attention.h>
#include <torch/nn/init.h>

#include "torch/checks.h"
#include "torch/multi_head_attention.h"
#include "torch/operators.h"

namespace fused_mha {
namespace {

void check_options(const MultiheadAttentionOptions& options) {
  constexpr const char* kPrefix = "fused_mha::MultiheadAttention: ";
  const auto width = options.embed_dim();
  const auto heads = options.num_heads();
  TORCH_CHECK_VALUE(width > 0 && heads > 0, kPrefix, "embed_dim and num_heads must be positive, got ", width, " and ",
                    heads);
  TORCH_CHECK(options.head_dim().has_value() || width % heads == 0, kPrefix, "num_heads must divide embed_dim, ", width,
              ", got ", heads, ". Hint: head_dim sets the width of heads apart from embed_dim");
  for (const auto& [name, size] :
       {std::pair("head_dim", options.head_dim()), std::pair("v_head_dim", options.v_head_dim()),
        std::pair("num_kv_heads", options.num_kv_heads()), std::pair("out_dim", options.out_dim())}) {
    TORCH_CHECK_VALUE(size.value_or(1) > 0, kPrefix, name, " must be positive, got ", size.value_or(1));
  }
  TORCH_CHECK_VALUE(heads % options.num_kv_heads().value_or(heads) == 0, kPrefix,
                    "num_kv_heads must divide num_heads = ", heads, ", got ", options.num_kv_heads().value_or(heads));
  detail::is_bottom_right("MultiheadAttention", options.causal_alignment());
  const auto sink = options.sink().value_or("zero");
  TORCH_CHECK_VALUE(sink == "zero" || sink == "learned", kPrefix, "sink must be 'zero' or 'learned', or absent, got '",
                    sink, "'");
}

}  // namespace

MultiheadAttentionOptions::MultiheadAttentionOptions(std::int64_t embed_dim, std::int64_t num_heads)
    : embed_dim_(embed_dim), num_heads_(num_heads) {}

MultiheadAttentionImpl::MultiheadAttentionImpl(const MultiheadAttentionOptions& options) : options(options) {
  // NOLINTNEXTLINE(clang-analyzer-optin.cplusplus.VirtualCall): as all modules of torch::nn do
  reset();
}

std::array<std::int64_t, 3> MultiheadAttentionImpl::widths() const {
  const auto head_dim = options.head_dim().value_or(options.embed_dim() / options.num_heads());
  const auto kv_heads = options.num_kv_heads().value_or(options.num_heads());
  return {options.num_heads() * head_dim, kv_heads * head_dim, kv_heads * options.v_head_dim().value_or(head_dim)};
}

void MultiheadAttentionImpl::reset() {
  check_options(options);
  const auto width = options.embed_dim();
  const auto key_width = options.kdim().value_or(width);
  const auto value_width = options.vdim().value_or(width);
  const auto [query_rows, key_rows, value_rows] = widths();

  // Created and drawn in the order of the Python module, so that one seed gives both the same numbers.
  if (key_width == width && value_width == width) {
    in_proj_weight = register_parameter("in_proj_weight", torch::empty({query_rows + key_rows + value_rows, width}));
  } else {
    q_proj_weight = register_parameter("q_proj_weight", torch::empty({query_rows, width}));
    k_proj_weight = register_parameter("k_proj_weight", torch::empty({key_rows, key_width}));
    v_proj_weight = register_parameter("v_proj_weight", torch::empty({value_rows, value_width}));
  }
  if (options.bias()) {
    in_proj_bias = register_parameter("in_proj_bias", torch::empty({query_rows + key_rows + value_rows}));
  }
  const auto kv_heads = options.num_kv_heads().value_or(options.num_heads());
  const auto context_width = value_rows / kv_heads * options.num_heads();
  const auto out_width = options.out_dim().value_or(width);
  out_proj = register_module(
      "out_proj", torch::nn::Linear(torch::nn::LinearOptions(context_width, out_width).bias(options.bias())));
  if (options.add_bias_kv()) {
    bias_k = register_parameter("bias_k", torch::empty({1, 1, key_rows}));
    bias_v = register_parameter("bias_v", torch::empty({1, 1, value_rows}));
  }
  if (options.sink() == "learned") sink = register_parameter("sink", torch::empty({options.num_heads()}));
  reset_parameters();
}

void MultiheadAttentionImpl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  for (const auto& weight : {in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight}) {
    if (weight.defined()) torch::nn::init::xavier_uniform_(weight);
  }
  if (in_proj_bias.defined()) {
    torch::nn::init::zeros_(in_proj_bias);
    torch::nn::init::zeros_(out_proj->bias);
  }
  for (const auto& bias : {bias_k, bias_v}) {
    if (bias.defined()) torch::nn::init::xavier_normal_(bias);
  }
  if (sink.defined()) torch::nn::init::zeros_(sink);
}

void MultiheadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "fused_mha::MultiheadAttention(embed_dim=" << options.embed_dim()
         << ", num_heads=" << options.num_heads() << ", dropout=" << options.dropout() << ", bias=" << options.bias()
         << ", add_bias_kv=" << options.add_bias_kv() << ", add_zero_attn=" << options.add_zero_attn()
         << ", kdim=" << options.kdim().value_or(options.embed_dim())
         << ", vdim=" << options.vdim().value_or(options.embed_dim()) << ", batch_first=" << options.batch_first();
  if (options.head_dim()) stream << ", head_dim=" << *options.head_dim();
  if (options.v_head_dim()) stream << ", v_head_dim=" << *options.v_head_dim();
  if (options.num_kv_heads()) stream << ", num_kv_heads=" << *options.num_kv_heads();
  if (options.out_dim()) stream << ", out_dim=" << *options.out_dim();
  if (options.causal_alignment() != "top_left") stream << ", causal_alignment=" << options.causal_alignment();
  if (options.weights_before_dropout()) stream << ", weights_before_dropout=true";
  if (options.sink()) stream << ", sink=" << *options.sink();
  stream << ")";
}

std::tuple<torch::Tensor, torch::Tensor> MultiheadAttentionImpl::forward(
    const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& value,
    const MultiheadAttentionForwardOptions& forward_options) {
  using detail::optional_tensor;
  const auto key_padding_mask = optional_tensor(forward_options.key_padding_mask());
  const auto attn_mask = optional_tensor(forward_options.attn_mask());
  const double dropout_p = is_training() ? options.dropout() : 0.0;
  detail::check_multi_head("MultiheadAttention", query, key, value, key_padding_mask, attn_mask, options.num_heads(),
                           options.dropout(), options.batch_first());
  const detail::InProjection weights{optional_tensor(in_proj_weight), optional_tensor(q_proj_weight),
                                     optional_tensor(k_proj_weight),  optional_tensor(v_proj_weight),
                                     optional_tensor(in_proj_bias),   widths()};
  const auto [projected_query, projected_key, projected_value] = detail::project_inputs(query, key, value, weights);
  static const auto op =
      detail::find_operator<detail::ProjectedSignature>("fused_mha::_multi_head_attention_projected");
  const auto given_sink = options.sink() == "zero" ? projected_query.new_zeros({options.num_heads()}) : sink;
  const auto [context, attention_weights] =
      op.call(projected_query, projected_key, projected_value, options.num_heads(), optional_tensor(bias_k),
              optional_tensor(bias_v), options.add_zero_attn(), dropout_p, key_padding_mask,
              forward_options.need_weights(), attn_mask, forward_options.average_attn_weights(),
              forward_options.is_causal(), options.batch_first(), options.num_kv_heads(), options.causal_alignment(),
              optional_tensor(given_sink), options.weights_before_dropout());
  return {out_proj->forward(context), attention_weights.value_or(torch::Tensor())};
}

}  // namespace fused_mha
