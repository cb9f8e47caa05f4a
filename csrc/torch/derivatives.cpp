// SPDX-License-Identifier: BSD-3-Clause
#include "torch/derivatives.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <limits>

#include "core/dropout.h"
#include "core/problem.h"
#include "torch/checks.h"
#include "torch/operators.h"

namespace fused_mha::detail {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor transposed(const Tensor& tensor) { return tensor.transpose(-2, -1); }

Tensor row_sum(const Tensor& tensor) { return tensor.sum(-1, /*keepdim=*/true); }

/// a + b, where an undefined tensor is zero.
Tensor sum_of(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a + b : a;
}

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Something with a row for each query or for each key, ready for products. Where masks hide, what is not finite stands
/// apart, so that 0 times it cannot reach a result that must not see it.
struct Operand {
  Tensor finite;      // in the accumulation type, 0 where not finite
  Tensor not_finite;  // the same shape, 1 where not finite; undefined where nothing hides: `finite` is then as given
};

/// The forward pass up to the weights, in the accumulation type, with as many key/value heads as query heads.
class Unfused {
 public:
  explicit Unfused(const AttentionArguments& arguments);

  const Operand& query() const { return query_; }
  const Operand& key() const { return key_; }
  const Operand& value() const { return value_; }
  const Tensor& probabilities() const { return probabilities_; }
  Tensor weights() const { return dropped(probabilities_); }

  /// After dropout: an undefined tensor stays so.
  Tensor dropped(const Tensor& tensor) const { return tensor.defined() && keep_.defined() ? tensor * keep_ : tensor; }

  /// An undefined tensor stays so.
  Tensor in_accumulation_type(const Tensor& tensor) const {
    return tensor.defined() ? tensor.to(accumulation_) : tensor;
  }

  /// Something of query's or output's shape, or of key's or value's, made ready as these were.
  Operand row_operand(const Tensor& tensor) const;
  Operand key_operand(const Tensor& tensor) const;

  /// rows keys^T, (N, H, L, S): 0 where hidden.
  Tensor rows_by_keys(const Operand& rows, const Operand& keys) const;
  /// weights keys (N, H, L, ...) and weights^T rows (N, H, S, ...), for weights that are 0 where hidden.
  Tensor weighted_keys(const Tensor& weights, const Operand& keys) const;
  Tensor weighted_rows(const Tensor& weights, const Operand& rows) const;

  /// (N, H, L, S) with zeros where hidden.
  Tensor visible_only(const Tensor& tensor) const {
    return hidden_.defined() ? tensor.masked_fill(hidden_, 0.0) : tensor;
  }

  /// rowsum(P x) + p_sink x_sink: the mean of x over keys and sink; x_sink, (N, H, L, 1) or less, may be undefined.
  Tensor mean(const Tensor& tensor, const Tensor& of_sink = {}) const {
    const auto of_keys = row_sum(probabilities_ * tensor);
    return of_sink.defined() ? of_keys + sink_probability_ * of_sink : of_keys;
  }

  /// P (x - mean(x, x_sink)): the change of the softmax for a change of the scores, and the other way. A row whose mean
  /// is NaN has it in its visible part only.
  Tensor through_softmax(const Tensor& tensor, const Tensor& of_sink = {}) const {
    return visible_only(probabilities_ * (tensor - mean(tensor, of_sink)));
  }

  /// p_sink of the header comment, (N, H, L, 1); undefined without a sink.
  const Tensor& sink_probability() const { return sink_probability_; }

  /// dP and delta of the header comment.
  Tensor grad_of_probabilities(const BackwardArguments& backward) const;
  Tensor delta(const BackwardArguments& backward, const Tensor& grad_of_probabilities) const;

  /// Gradients of the arguments from (N, H, L, S) or per-head ones, in the arguments' shapes and dtypes.
  Tensor as_query(const Tensor& gradient) const { return gradient.to(arguments_.query.scalar_type()); }
  Tensor as_key(const Tensor& gradient) const;
  Tensor as_key_padding_mask(const Tensor& gradient) const;
  Tensor as_attn_mask(const Tensor& gradient) const;
  Tensor as_sink(const Tensor& gradient) const;
  /// What is returned beside the output, from its (N, H, L, S) before dropout and, of log-sum-exps, (N, H, L, 1).
  Tensor as_returned(const Tensor& before_dropout, const Tensor& of_rows) const;

  /// Change of the scores for changes of query, key and masks, any of which may be undefined; visible part only.
  Tensor score_change(const Tensor& query, const Tensor& key, const Tensor& key_padding_mask,
                      const Tensor& attn_mask) const;

 private:
  /// Over S' keys, to S: false or zero for those that are always visible.
  Tensor over_all_keys(const Tensor& mask) const;
  void read_masks();
  void compute_probabilities();
  Operand operand(const Tensor& wide) const;

  const AttentionArguments& arguments_;
  at::ScalarType accumulation_;
  Operand query_, key_, value_;
  Tensor hidden_;   // bool, broadcastable to (N, H, L, S); undefined where nothing hides
  Tensor visible_;  // 1 where not hidden, with sizes L and S; undefined with hidden_
  Tensor bias_;     // what is added to the scores, broadcastable; undefined where nothing is
  Tensor probabilities_, sink_probability_;
  Tensor keep_;  // Z of the header comment; undefined without dropout
};

Unfused::Unfused(const AttentionArguments& arguments)
    : arguments_(arguments), accumulation_(at::toOpMathType(arguments.query.scalar_type())) {
  read_masks();
  query_ = row_operand(arguments.query);
  key_ = key_operand(arguments.key);
  value_ = key_operand(arguments.value);
  if (arguments.dropout_p > 0.0) {
    const auto keep =
        dropout_mask_operator().call(*arguments.rng_state, arguments.batch(), arguments.heads(),
                                     arguments.query_length(), arguments.key_length(), arguments.dropout_p);
    keep_ = keep.to(accumulation_) * core::dropout_scale(arguments.dropout_p);
  }
  compute_probabilities();
}

Tensor Unfused::over_all_keys(const Tensor& mask) const {
  if (sizes_known_equal(arguments_.always_visible_keys, 0)) return mask;
  const auto sizes = mask.sym_sizes();
  const auto expanded = mask.expand_symint({sizes[0], sizes[1], sizes[2], arguments_.masked_keys()});
  return at::constant_pad_nd_symint(expanded, {0, arguments_.always_visible_keys}, 0);
}

void Unfused::read_masks() {
  std::vector<Tensor> masks;
  if (has_tensor(arguments_.key_padding_mask)) {
    masks.push_back(arguments_.key_padding_mask->unsqueeze(1).unsqueeze(1));
  }
  if (has_tensor(arguments_.attn_mask)) masks.push_back(*arguments_.attn_mask);
  const auto hide = [&](const Tensor& hidden) { hidden_ = hidden_.defined() ? hidden_.logical_or(hidden) : hidden; };
  for (const auto& mask : masks) {
    if (mask.scalar_type() == at::kBool) {
      hide(mask);
      continue;
    }
    const auto hidden = mask == -kInfinity;
    hide(hidden);
    bias_ = sum_of(bias_, mask.masked_fill(hidden, 0.0).to(accumulation_));
  }
  if (bias_.defined()) {
    // Two finite masks never hide together, whatever their sum overflows to.
    const double lowest = accumulation_ == at::kDouble ? std::numeric_limits<double>::lowest()
                                                       : double{std::numeric_limits<float>::lowest()};
    bias_ = over_all_keys(bias_.clamp_min(lowest));
  }
  if (arguments_.is_causal) {
    const auto all = at::ones_symint({1, 1, arguments_.query_length(), arguments_.masked_keys()},
                                     arguments_.query.options().dtype(at::kBool));
    hide(arguments_.bottom_right ? all.tril(-1).flip({-2, -1}) : all.triu(1));
  }
  if (!hidden_.defined()) return;
  hidden_ = over_all_keys(hidden_);
  const auto sizes = hidden_.sym_sizes();
  visible_ = hidden_.logical_not()
                 .expand_symint({sizes[0], sizes[1], arguments_.query_length(), arguments_.key_length()})
                 .to(accumulation_);
}

Operand Unfused::operand(const Tensor& wide) const {
  if (!hidden_.defined()) return {wide, Tensor()};
  const auto not_finite = wide.isfinite().logical_not();
  return {wide.masked_fill(not_finite, 0.0), not_finite.to(accumulation_)};
}

Operand Unfused::row_operand(const Tensor& tensor) const { return operand(tensor.to(accumulation_)); }

Operand Unfused::key_operand(const Tensor& tensor) const {
  auto wide = tensor.to(accumulation_);
  const auto heads = arguments_.heads();
  const auto kv_heads = arguments_.kv_heads();
  if (!sizes_known_equal(heads, kv_heads)) {
    wide = wide.unsqueeze(2)
               .expand_symint({wide.sym_size(0), kv_heads, heads / kv_heads, wide.sym_size(2), wide.sym_size(3)})
               .flatten(1, 2);
  }
  return operand(wide);
}

Tensor Unfused::rows_by_keys(const Operand& rows, const Operand& keys) const {
  auto product = at::matmul(rows.finite, transposed(keys.finite));
  if (!hidden_.defined()) return product;
  // What a row's softmax makes of one score that is not finite it makes of the whole row.
  const auto seen = at::matmul(visible_, row_sum(keys.not_finite)) + row_sum(rows.not_finite);
  return visible_only(product.masked_fill(seen > 0, kNaN));
}

Tensor Unfused::weighted_keys(const Tensor& weights, const Operand& keys) const {
  const auto product = at::matmul(weights, keys.finite);
  return hidden_.defined() ? product.masked_fill(at::matmul(visible_, keys.not_finite) > 0, kNaN) : product;
}

Tensor Unfused::weighted_rows(const Tensor& weights, const Operand& rows) const {
  const auto product = at::matmul(transposed(weights), rows.finite);
  return hidden_.defined() ? product.masked_fill(at::matmul(transposed(visible_), rows.not_finite) > 0, kNaN) : product;
}

void Unfused::compute_probabilities() {
  auto scores = sum_of(rows_by_keys(query_, key_) * arguments_.scale, bias_);
  if (hidden_.defined()) scores = scores.masked_fill(hidden_, -kInfinity);
  if (has_tensor(arguments_.sink)) {
    const auto sizes = scores.sym_sizes();
    const auto sink = arguments_.sink->to(accumulation_).expand_symint({sizes[0], sizes[1], sizes[2], 1});
    const auto with_sink = at::softmax(at::cat({scores, sink}, -1), -1);
    probabilities_ = with_sink.narrow_symint(-1, 0, sizes[3]);
    sink_probability_ = with_sink.narrow_symint(-1, sizes[3], 1);
    // Neither key nor sink: no NaN may come of it.
    sink_probability_ = sink_probability_.masked_fill(sink == -kInfinity, 0.0);
  } else {
    probabilities_ = at::softmax(scores, -1);
  }
  // For rows that see nothing, whose softmax is NaN, and for hidden keys of rows that are NaN.
  probabilities_ = visible_only(probabilities_);
}

Tensor Unfused::grad_of_probabilities(const BackwardArguments& b) const {
  Tensor gradient;
  if (has_tensor(b.grad_output)) gradient = rows_by_keys(row_operand(*b.grad_output), value_);
  Tensor of_weights;
  if (has_tensor(b.grad_weights) && arguments_.weights_mode != kLogSumExp) {
    of_weights = b.grad_weights->to(accumulation_);
    if (static_cast<core::WeightsMode>(arguments_.weights_mode) == core::WeightsMode::kAveraged) {
      of_weights = (of_weights / c10::Scalar(arguments_.heads())).unsqueeze(1);
    }
    of_weights = of_weights.expand_as(probabilities_);
  }
  gradient =
      arguments_.weights_before_dropout ? sum_of(dropped(gradient), of_weights) : dropped(sum_of(gradient, of_weights));
  return gradient.defined() ? visible_only(gradient) : at::zeros_like(probabilities_);
}

Tensor Unfused::delta(const BackwardArguments& b, const Tensor& grad_of_probabilities) const {
  auto of_weights = mean(grad_of_probabilities);
  if (!has_tensor(b.grad_weights) || arguments_.weights_mode != kLogSumExp) return of_weights;
  return of_weights - b.grad_weights->unsqueeze(-1);
}

Tensor Unfused::as_key(const Tensor& gradient) const {
  auto summed = gradient;
  const auto heads = arguments_.heads();
  const auto kv_heads = arguments_.kv_heads();
  if (!sizes_known_equal(heads, kv_heads)) {
    summed =
        summed.reshape_symint({summed.sym_size(0), kv_heads, heads / kv_heads, summed.sym_size(2), summed.sym_size(3)})
            .sum(2);
  }
  return summed.to(arguments_.key.scalar_type());
}

Tensor Unfused::as_key_padding_mask(const Tensor& gradient) const {
  return gradient.narrow_symint(-1, 0, arguments_.masked_keys())
      .sum({1, 2})
      .to(arguments_.key_padding_mask->scalar_type());
}

Tensor Unfused::as_attn_mask(const Tensor& gradient) const {
  return gradient.narrow_symint(-1, 0, arguments_.masked_keys())
      .sum_to_size_symint(arguments_.attn_mask->sym_sizes())
      .to(arguments_.attn_mask->scalar_type());
}

Tensor Unfused::as_sink(const Tensor& gradient) const {
  return gradient.sum_to_size_symint(arguments_.sink->sym_sizes()).to(arguments_.sink->scalar_type());
}

Tensor Unfused::as_returned(const Tensor& before_dropout, const Tensor& of_rows) const {
  if (arguments_.weights_mode == kLogSumExp) return of_rows.squeeze(-1);
  const auto per_head = arguments_.weights_before_dropout ? before_dropout : dropped(before_dropout);
  const bool averaged = static_cast<core::WeightsMode>(arguments_.weights_mode) == core::WeightsMode::kAveraged;
  return (averaged ? per_head.mean(1) : per_head).to(arguments_.query.scalar_type());
}

Tensor Unfused::score_change(const Tensor& query, const Tensor& key, const Tensor& key_padding_mask,
                             const Tensor& attn_mask) const {
  Tensor change;
  if (query.defined()) change = rows_by_keys(row_operand(query), key_) * arguments_.scale;
  if (key.defined()) change = sum_of(change, rows_by_keys(query_, key_operand(key)) * arguments_.scale);
  if (key_padding_mask.defined()) {
    change = sum_of(change, over_all_keys(key_padding_mask.to(accumulation_).unsqueeze(1).unsqueeze(1)));
  }
  if (attn_mask.defined()) change = sum_of(change, over_all_keys(attn_mask.to(accumulation_)));
  return change.defined() ? visible_only(change.expand_as(probabilities_)) : at::zeros_like(probabilities_);
}

bool is_dual(const OptionalTensor& tensor) { return torch::autograd::isFwGradDefined(tensor); }

/// The formulas are exact in their own dtypes: an autocast that surrounds the backward pass must not lower them.
c10::impl::ExcludeDispatchKeyGuard without_autocast() {
  return c10::impl::ExcludeDispatchKeyGuard(c10::autocast_dispatch_keyset);
}

}  // namespace

bool has_tangent(const AttentionArguments& a) {
  return is_dual(a.query) || is_dual(a.key) || is_dual(a.value) || is_dual(a.key_padding_mask) ||
         is_dual(a.attn_mask) || is_dual(a.sink);
}

bool has_tangent(const AttentionArguments& a, const BackwardArguments& b) {
  return has_tangent(a) || is_dual(b.grad_output) || is_dual(b.grad_weights);
}

std::array<Tensor, 2> forward_tangents(const AttentionArguments& a, const std::array<Tensor, 6>& of) {
  const auto guard = without_autocast();
  const Unfused unfused(a);
  const auto change = unfused.score_change(of[0], of[1], of[3], of[4]);
  const auto of_sink = unfused.in_accumulation_type(of[5]);
  const auto probabilities = unfused.through_softmax(change, of_sink);
  auto output = unfused.weighted_keys(unfused.dropped(probabilities), unfused.value());
  if (of[2].defined()) output = output + unfused.weighted_keys(unfused.weights(), unfused.key_operand(of[2]));
  return {unfused.as_query(output),
          a.weights_mode == 0 ? Tensor() : unfused.as_returned(probabilities, unfused.mean(change, of_sink))};
}

std::array<Tensor, 6> unfused_backward(const AttentionArguments& a, const BackwardArguments& b,
                                       const GradientMask& wanted) {
  const auto guard = without_autocast();
  const Unfused unfused(a);
  const auto grad_probabilities = unfused.grad_of_probabilities(b);
  const auto delta = unfused.delta(b, grad_probabilities);
  const auto grad_scores = unfused.visible_only(unfused.probabilities() * (grad_probabilities - delta));

  std::array<Tensor, 6> gradients;
  if (wanted[0]) gradients[0] = unfused.as_query(unfused.weighted_keys(grad_scores, unfused.key()) * a.scale);
  if (wanted[1]) gradients[1] = unfused.as_key(unfused.weighted_rows(grad_scores, unfused.query()) * a.scale);
  if (wanted[2]) {
    gradients[2] = has_tensor(b.grad_output)
                       ? unfused.as_key(unfused.weighted_rows(unfused.weights(), unfused.row_operand(*b.grad_output)))
                       : at::zeros_like(a.value);
  }
  if (wanted[3]) gradients[3] = unfused.as_key_padding_mask(grad_scores);
  if (wanted[4]) gradients[4] = unfused.as_attn_mask(grad_scores);
  if (wanted[5]) gradients[5] = unfused.as_sink(-unfused.sink_probability() * delta);
  return gradients;
}

std::array<Tensor, 8> unfused_double_backward(const AttentionArguments& a, const BackwardArguments& b,
                                              const std::array<Tensor, 6>& of, const std::array<bool, 8>& wanted) {
  const auto guard = without_autocast();
  const Unfused unfused(a);
  const auto& probabilities = unfused.probabilities();
  const auto weights = unfused.weights();
  const auto grad_probabilities = unfused.grad_of_probabilities(b);
  const auto delta = unfused.delta(b, grad_probabilities);
  const auto centred = grad_probabilities - delta;
  const auto grad_scores = unfused.visible_only(probabilities * centred);

  // Cotangents, from the results back: dQ, dK and dM reach dS through `change`, d sink through of_sink_score, dV
  // reaches W through of_value.
  const auto change = unfused.score_change(of[0], of[1], of[3], of[4]);
  const auto of_sink_score = unfused.in_accumulation_type(of[5]);
  const auto mean_change = unfused.mean(change, of_sink_score);
  const auto of_grad_probabilities = unfused.visible_only(probabilities * (change - mean_change));
  const auto of_grad_weights = unfused.dropped(of_grad_probabilities);
  const auto of_value = of[2].defined() ? unfused.key_operand(of[2]) : Operand();
  const auto grad_output = has_tensor(b.grad_output) ? unfused.row_operand(*b.grad_output) : Operand();

  auto of_probabilities = change * centred - mean_change * grad_probabilities;
  if (of[2].defined() && has_tensor(b.grad_output)) {
    of_probabilities = of_probabilities + unfused.dropped(unfused.rows_by_keys(grad_output, of_value));
  }
  const auto of_sink_probability = of_sink_score.defined() ? -delta * of_sink_score : Tensor();
  const auto mean_of_probabilities = unfused.mean(of_probabilities, of_sink_probability);
  const auto of_scores = unfused.visible_only(probabilities * (of_probabilities - mean_of_probabilities));

  std::array<Tensor, 8> result;
  if (wanted[0]) {
    auto of_output = unfused.weighted_keys(of_grad_weights, unfused.value());
    if (of[2].defined()) of_output = of_output + unfused.weighted_keys(weights, of_value);
    result[0] = unfused.as_query(of_output);
  }
  if (wanted[1]) result[1] = unfused.as_returned(of_grad_probabilities, mean_change);
  if (wanted[2]) {
    auto of_query = unfused.weighted_keys(of_scores, unfused.key());
    if (of[1].defined()) of_query = of_query + unfused.weighted_keys(grad_scores, unfused.key_operand(of[1]));
    result[2] = unfused.as_query(of_query * a.scale);
  }
  if (wanted[3]) {
    auto of_key = unfused.weighted_rows(of_scores, unfused.query());
    if (of[0].defined()) of_key = of_key + unfused.weighted_rows(grad_scores, unfused.row_operand(of[0]));
    result[3] = unfused.as_key(of_key * a.scale);
  }
  if (wanted[4] && has_tensor(b.grad_output)) {
    result[4] = unfused.as_key(unfused.weighted_rows(of_grad_weights, grad_output));
  }
  if (wanted[5]) result[5] = unfused.as_key_padding_mask(of_scores);
  if (wanted[6]) result[6] = unfused.as_attn_mask(of_scores);
  if (wanted[7]) {
    const auto& of_sink = of_sink_probability;
    const auto centred_of_sink = of_sink.defined() ? of_sink - mean_of_probabilities : -mean_of_probabilities;
    result[7] = unfused.as_sink(unfused.sink_probability() * centred_of_sink);
  }
  return result;
}

}  // namespace fused_mha::detail
