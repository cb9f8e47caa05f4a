// SPDX-License-Identifier: BSD-3-Clause
#include "torch/multi_head_attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <cmath>

#include "core/problem.h"
#include "torch/checks.h"
#include "torch/operators.h"
#include "torch/rng.h"

namespace fused_mha::detail {
namespace {

constexpr const char* kForward = "multi_head_attention_forward";
constexpr const char* kProjected = "_multi_head_attention_projected";

/// Where N, L and H are: the module's (L, N, E), (N, L, E) or (L, E) on one side, (N, H, L, D) on the other.
struct Layout {
  bool batched;
  bool batch_first;
  std::int64_t num_heads;

  /// (N, H, L, D) from the module's layout; a view.
  at::Tensor split_heads(const at::Tensor& tensor) const { return split_heads(tensor, num_heads); }
  at::Tensor split_heads(const at::Tensor& tensor, std::int64_t head_count) const {
    const auto heads = tensor.unflatten_symint(-1, {head_count, tensor.sym_size(-1) / head_count});
    if (!batched) return heads.transpose(0, 1).unsqueeze(0);
    return batch_first ? heads.transpose(1, 2) : heads.permute({1, 2, 0, 3});
  }

  /// The other way; a view of what the kernels return.
  at::Tensor join_heads(const at::Tensor& tensor) const {
    if (!batched) return tensor.squeeze(0).transpose(0, 1).flatten(1);
    return (batch_first ? tensor.transpose(1, 2) : tensor.permute({2, 0, 1, 3})).flatten(2);
  }

  /// (N*H, S, D), as static_k and static_v are, to (N, H, S, D).
  at::Tensor split_static(const char* name, const at::Tensor& tensor, const c10::SymInt& batch) const {
    TORCH_CHECK(tensor.dim() == 3 && sizes_equal(tensor.sym_size(0), batch * num_heads), "fused_mha::", kForward, ": ",
                name, " must have shape (N*H, S, D) with N*H = ", batch * num_heads, ", got ",
                shape_text(tensor.sym_sizes()));
    return tensor.unflatten(0, {-1, num_heads});
  }
};

/// How a call wants its attention done, apart from the tensors.
struct Choices {
  double dropout_p;
  bool need_weights;
  bool average_attn_weights;
  bool is_causal;
  std::string_view causal_alignment = "top_left";
  OptionalTensor sink = std::nullopt;
  bool weights_before_dropout = false;
};

/// The keys and values that bias_k, bias_v and add_zero_attn put behind the others.
struct AppendedKeys {
  OptionalTensor bias_k, bias_v;
  bool zero;

  std::int64_t count() const { return (has_tensor(bias_k) ? 1 : 0) + (zero ? 1 : 0); }

  void check(const char* op) const {
    TORCH_CHECK(has_tensor(bias_k) == has_tensor(bias_v), "fused_mha::", op,
                ": bias_k and bias_v must both be given or neither");
  }

  at::Tensor append(const char* op, const char* name, const at::Tensor& tensor, const OptionalTensor& bias) const {
    if (count() == 0) return tensor;
    const auto sizes = tensor.sym_sizes();
    // (N, H, 1, D) without naming a size, which torch.jit.trace would record as a number.
    const auto zeros = at::constant_pad_nd(tensor.slice(2, 0, 0), {0, 0, 0, 1});
    std::vector<at::Tensor> parts{tensor};
    if (has_tensor(bias)) {
      TORCH_CHECK(
          sizes_equal(bias->sym_numel(), sizes[1] * sizes[3]) && sizes_equal(bias->sym_size(-1), bias->sym_numel()),
          "fused_mha::", op, ": ", name, " must have shape (1, 1, Hkv*D) = (1, 1, ", sizes[1] * sizes[3], "), got ",
          shape_text(bias->sym_sizes()));
      const auto heads = bias->to(tensor.scalar_type()).reshape_symint({1, sizes[1], 1, sizes[3]});
      parts.push_back(heads.expand_as(zeros));
    }
    if (zero) parts.push_back(zeros);
    return at::cat(parts, 2);
  }
};

/// (L, S), (N*H, L, S), (N, L, S) or (H, L, S) where it is clear which, or four dimensions, to four; a view.
at::Tensor attn_mask_of_heads(const char* op, const at::Tensor& mask, const AttentionArguments& a) {
  if (mask.dim() == 4) return mask;
  if (mask.dim() == 2) return mask.unsqueeze(0).unsqueeze(0);
  const auto& first = mask.sym_size(0);
  if (sizes_known_equal(first, a.batch() * a.heads())) return mask.unflatten_symint(0, {-1, a.heads()});
  const bool fits_batch = sizes_known_equal(first, a.batch());
  const bool fits_heads = sizes_known_equal(first, a.heads()) || sizes_known_equal(first, 1);
  TORCH_CHECK(fits_batch != fits_heads || sizes_known_equal(first, 1), "fused_mha::", op,
              ": attn_mask must have shape (N*H, L, S) = ",
              shape_text({a.batch() * a.heads(), a.query_length(), a.key_length()}), ", got ",
              shape_text(mask.sym_sizes()),
              fits_batch ? ". Hint: N and H are equal here, so say which is meant: (N, 1, L, S) or (1, H, L, S)" : "");
  return mask.unsqueeze(fits_heads ? 0 : 1);
}

/// Attention over heads; masks as the module takes them.
std::tuple<at::Tensor, OptionalTensor> attend(const char* op, const Layout& layout, const at::Tensor& query,
                                              const at::Tensor& key, const at::Tensor& value,
                                              const AppendedKeys& appended, const OptionalTensor& key_padding_mask,
                                              const OptionalTensor& attn_mask, const Choices& choices) {
  appended.check(op);
  AttentionArguments arguments;
  arguments.query = query;
  arguments.key = key;
  arguments.value = value;
  if (has_tensor(key_padding_mask)) {
    arguments.key_padding_mask = layout.batched ? *key_padding_mask : key_padding_mask->unsqueeze(0);
  }
  if (has_tensor(attn_mask)) arguments.attn_mask = attn_mask_of_heads(op, *attn_mask, arguments);
  arguments.bottom_right = is_bottom_right(op, choices.causal_alignment);
  arguments.sink = sink_of_heads(op, choices.sink);
  arguments.weights_before_dropout = choices.weights_before_dropout;
  check_shapes(op, arguments, 4);

  arguments.key = appended.append(op, "bias_k", key, appended.bias_k);
  arguments.value = appended.append(op, "bias_v", value, appended.bias_v);
  arguments.always_visible_keys = appended.count();
  // A given mask decides; is_causal is then no more than a hint about it.
  arguments.is_causal = choices.is_causal && !has_tensor(attn_mask);
  arguments.dropout_p = choices.dropout_p;
  arguments.scale = 1.0 / std::sqrt(static_cast<double>(query.sym_size(-1).guard_int(__FILE__, __LINE__)));
  if (choices.need_weights) {
    arguments.weights_mode = static_cast<std::int64_t>(choices.average_attn_weights ? core::WeightsMode::kAveraged
                                                                                    : core::WeightsMode::kPerHead);
  }
  arguments.rng_state = draw_rng_state(choices.dropout_p, query.device());
  const auto [output, weights, row_max, row_sum] = call_forward(arguments);
  auto context = layout.join_heads(output);
  if (!choices.need_weights) return {std::move(context), std::nullopt};
  return {std::move(context), layout.batched ? weights : weights.squeeze(0)};
}

void check_divisible(const char* op, const char* name, const at::Tensor& tensor, std::int64_t heads,
                     const char* heads_name = "num_heads") {
  TORCH_CHECK(sizes_equal(tensor.sym_size(-1) % heads, 0), "fused_mha::", op, ": ", heads_name,
              " must divide the width of ", name, ", ", tensor.sym_size(-1), ", got ", heads);
}

std::tuple<at::Tensor, OptionalTensor> projected_composite(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, std::int64_t num_heads,
    const OptionalTensor& bias_k, const OptionalTensor& bias_v, bool add_zero_attn, double dropout_p,
    const OptionalTensor& key_padding_mask, bool need_weights, const OptionalTensor& attn_mask,
    bool average_attn_weights, bool is_causal, bool batch_first, std::optional<std::int64_t> num_kv_heads,
    std::string_view causal_alignment, const OptionalTensor& sink, bool weights_before_dropout) {
  check_multi_head(kProjected, query, key, value, key_padding_mask, attn_mask, num_heads, dropout_p, batch_first);
  const auto kv_heads = num_kv_heads.value_or(num_heads);
  const auto* kv_heads_name = num_kv_heads.has_value() ? "num_kv_heads" : "num_heads";
  TORCH_CHECK_VALUE(kv_heads > 0, "fused_mha::", kProjected, ": num_kv_heads must be positive, got ", kv_heads);
  check_divisible(kProjected, "query", query, num_heads);
  check_divisible(kProjected, "key", key, kv_heads, kv_heads_name);
  check_divisible(kProjected, "value", value, kv_heads, kv_heads_name);
  const Layout layout{query.dim() == 3, batch_first, num_heads};
  return attend(
      kProjected, layout, layout.split_heads(query), layout.split_heads(key, kv_heads),
      layout.split_heads(value, kv_heads), {bias_k, bias_v, add_zero_attn}, key_padding_mask, attn_mask,
      {dropout_p, need_weights, average_attn_weights, is_causal, causal_alignment, sink, weights_before_dropout});
}

void check_projections(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const c10::SymInt& embed_dim_to_check, const InProjection& in, bool separate) {
  const auto width = query.sym_size(-1);
  TORCH_CHECK(sizes_equal(width, embed_dim_to_check), "fused_mha::", kForward,
              ": query must have width E = ", embed_dim_to_check, ", got shape ", shape_text(query.sym_sizes()));
  if (separate) {
    TORCH_CHECK(has_tensor(in.query) && has_tensor(in.key) && has_tensor(in.value), "fused_mha::", kForward,
                ": use_separate_proj_weight needs q_proj_weight, k_proj_weight and v_proj_weight");
    return;
  }
  TORCH_CHECK(has_tensor(in.packed), "fused_mha::", kForward,
              ": in_proj_weight must be given where use_separate_proj_weight is False");
  TORCH_CHECK(in.packed->dim() == 2 && sizes_equal(in.packed->sym_size(0), width * 3) &&
                  sizes_equal(in.packed->sym_size(1), width),
              "fused_mha::", kForward, ": in_proj_weight must have shape (3*E, E) = ", shape_text({width * 3, width}),
              ", got ", shape_text(in.packed->sym_sizes()));
  for (const auto& [name, tensor] : {std::pair("key", &key), std::pair("value", &value)}) {
    TORCH_CHECK(sizes_equal(tensor->sym_size(-1), width), "fused_mha::", kForward, ": ", name,
                " must have the width of query, E = ", width, ", got shape ", shape_text(tensor->sym_sizes()),
                ". Hint: other widths need use_separate_proj_weight (kdim and vdim at the module)");
  }
}

std::tuple<at::Tensor, OptionalTensor> multi_head_attention_composite(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, c10::SymInt embed_dim_to_check,
    std::int64_t num_heads, const OptionalTensor& in_proj_weight, const OptionalTensor& in_proj_bias,
    const OptionalTensor& bias_k, const OptionalTensor& bias_v, bool add_zero_attn, double dropout_p,
    const at::Tensor& out_proj_weight, const OptionalTensor& out_proj_bias, bool training,
    const OptionalTensor& key_padding_mask, bool need_weights, const OptionalTensor& attn_mask,
    bool use_separate_proj_weight, const OptionalTensor& q_proj_weight, const OptionalTensor& k_proj_weight,
    const OptionalTensor& v_proj_weight, const OptionalTensor& static_k, const OptionalTensor& static_v,
    bool average_attn_weights, bool is_causal, bool batch_first) {
  check_multi_head(kForward, query, key, value, key_padding_mask, attn_mask, num_heads, dropout_p, batch_first);
  InProjection in{in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, in_proj_bias};
  check_projections(query, key, value, embed_dim_to_check, in, use_separate_proj_weight);
  check_divisible(kForward, "query", query, num_heads);
  TORCH_CHECK(!(has_tensor(bias_k) && has_tensor(static_k)) && !(has_tensor(bias_v) && has_tensor(static_v)),
              "fused_mha::", kForward, ": bias_k and bias_v cannot be added to static_k and static_v");
  if (use_separate_proj_weight) in.packed = std::nullopt;

  const Layout layout{query.dim() == 3, batch_first, num_heads};
  const auto [projected_query, projected_key, projected_value] = project_inputs(query, key, value, in);
  const auto q = layout.split_heads(projected_query);
  const auto k = has_tensor(static_k) ? layout.split_static("static_k", *static_k, q.sym_size(0))
                                      : layout.split_heads(projected_key);
  const auto v = has_tensor(static_v) ? layout.split_static("static_v", *static_v, q.sym_size(0))
                                      : layout.split_heads(projected_value);
  auto [context, weights] =
      attend(kForward, layout, q, k, v, {bias_k, bias_v, add_zero_attn}, key_padding_mask, attn_mask,
             {training ? dropout_p : 0.0, need_weights, average_attn_weights, is_causal});
  return {at::linear(context, out_proj_weight, out_proj_bias), std::move(weights)};
}

/// Parts of a packed bias or weight along its first dimension; absent where it is.
std::vector<OptionalTensor> split_rows(const OptionalTensor& tensor, c10::SymIntArrayRef sizes) {
  if (!has_tensor(tensor)) return std::vector<OptionalTensor>(sizes.size());
  const auto parts = tensor->split_with_sizes_symint(sizes, 0);
  return {parts.begin(), parts.end()};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> project_inputs(const at::Tensor& query, const at::Tensor& key,
                                                              const at::Tensor& value, const InProjection& weights) {
  const auto width = query.sym_size(-1);
  std::vector<c10::SymInt> widths(3, width);
  if (weights.widths.has_value()) std::copy(weights.widths->begin(), weights.widths->end(), widths.begin());
  if (!has_tensor(weights.packed)) {
    const auto bias = split_rows(weights.bias, widths);
    return {at::linear(query, *weights.query, bias[0]), at::linear(key, *weights.key, bias[1]),
            at::linear(value, *weights.value, bias[2])};
  }
  if (key.is_same(value) && query.is_same(key)) {
    const auto product = at::linear(query, *weights.packed, weights.bias);
    // Without naming a size, which torch.jit.trace would record as a number, where that can be.
    const auto parts = weights.widths.has_value() ? product.split_with_sizes_symint(widths, -1) : product.chunk(3, -1);
    return {parts[0], parts[1], parts[2]};
  }
  if (key.is_same(value)) {
    const std::vector<c10::SymInt> both{widths[0], widths[1] + widths[2]};
    const auto weight = split_rows(weights.packed, both);
    const auto bias = split_rows(weights.bias, both);
    const auto product = at::linear(key, *weight[1], bias[1]);
    const auto parts =
        weights.widths.has_value() ? product.split_with_sizes_symint({widths[1], widths[2]}, -1) : product.chunk(2, -1);
    return {at::linear(query, *weight[0], bias[0]), parts[0], parts[1]};
  }
  const auto weight = split_rows(weights.packed, widths);
  return project_inputs(query, key, value,
                        {std::nullopt, weight[0], weight[1], weight[2], weights.bias, weights.widths});
}

}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, CompositeImplicitAutograd, library) {
  library.impl("multi_head_attention_forward", &fused_mha::detail::multi_head_attention_composite);
  library.impl("_multi_head_attention_projected", &fused_mha::detail::projected_composite);
}

// vmap does not look inside a composite unless told to.
TORCH_LIBRARY_IMPL(fused_mha, FuncTorchBatchedDecomposition, library) {
  library.impl("multi_head_attention_forward", &fused_mha::detail::multi_head_attention_composite);
  library.impl("_multi_head_attention_projected", &fused_mha::detail::projected_composite);
}

// torch.jit.trace records what these are made of: its tracer knows no optional result.
TORCH_LIBRARY_IMPL(fused_mha, Tracer, library) {
  library.impl("multi_head_attention_forward", torch::CppFunction::makeFallthrough());
  library.impl("_multi_head_attention_projected", torch::CppFunction::makeFallthrough());
}
