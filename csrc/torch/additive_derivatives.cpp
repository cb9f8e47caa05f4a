// SPDX-License-Identifier: BSD-3-Clause
#include "torch/additive_derivatives.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "torch/checks.h"
#include "torch/derivatives.h"

namespace fused_mha::detail {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// a + b, where an undefined tensor is zero.
Tensor sum_of(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a + b : a;
}

/// What a mask hides, as bool.
Tensor hidden_by(const Tensor& mask) { return mask.scalar_type() == at::kBool ? mask : mask == -kInfinity; }

/// The scores and what derivatives need of them, (N, H, L, S, D) in the accumulation type.
class AdditiveScores {
 public:
  AdditiveScores(const AttentionArguments& arguments, const Tensor& score_weight)
      : arguments_(arguments),
        score_weight_(score_weight),
        accumulation_(at::toOpMathType(arguments.query.scalar_type())) {
    read_masks();
    weight_ = as_factor(score_weight);
    tanh_ = at::tanh(sum_of_features(arguments.query, arguments.key));
    slope_ = 1.0 - tanh_ * tanh_;
  }

  const Tensor& tanh() const { return tanh_; }
  const Tensor& slope() const { return slope_; }
  const Tensor& weight() const { return weight_; }

  /// Something of score_weight's shape, to be multiplied with (N, H, L, S, D).
  Tensor as_factor(const Tensor& weight) const {
    const auto wide = weight.to(accumulation_);
    return wide.dim() == 2 ? wide.unsqueeze(1).unsqueeze(1) : wide;
  }

  /// query[l] + key[s], 0 where hidden; either may be undefined, which is 0.
  Tensor sum_of_features(const Tensor& query, const Tensor& key) const {
    Tensor sum;
    if (query.defined()) sum = query.to(accumulation_).unsqueeze(3);
    if (key.defined()) sum = sum_of(sum, with_all_heads(key.to(accumulation_)).unsqueeze(2));
    if (!sum.defined() || !hidden_.defined()) return sum;
    return sum.masked_fill(hidden_.unsqueeze(-1), 0.0);
  }

  /// Change of the scores, (N, H, L, S), for changes of the sums of features, of score_weight and of attn_mask;
  /// undefined where all of these are.
  Tensor change(const Tensor& of_sums, const Tensor& of_weight, const Tensor& of_attn_mask) const {
    Tensor change;
    if (of_sums.defined()) change = (weight_ * slope_ * of_sums).sum(-1);
    if (of_weight.defined()) change = sum_of(change, (as_factor(of_weight) * tanh_).sum(-1));
    if (of_attn_mask.defined()) change = sum_of(change, of_attn_mask.to(accumulation_));
    if (!change.defined()) return change;
    return change.expand_symint(
        {arguments_.batch(), arguments_.heads(), arguments_.query_length(), arguments_.key_length()});
  }

  /// The same call as attention of queries 0 whose mask is the scores.
  AttentionArguments as_plain() const {
    auto scores = (weight_ * tanh_).sum(-1);
    if (has_tensor(arguments_.attn_mask)) {
      const auto& mask = *arguments_.attn_mask;
      const auto hidden = hidden_by(mask);
      if (mask.scalar_type() != at::kBool) {
        // A finite number must not hide, whatever it overflows to.
        const double lowest = accumulation_ == at::kDouble ? std::numeric_limits<double>::lowest()
                                                           : double{std::numeric_limits<float>::lowest()};
        scores = scores + mask.masked_fill(hidden, 0.0).to(accumulation_).clamp_min(lowest);
      }
      scores = scores.masked_fill(hidden, -kInfinity);
    }
    auto plain = arguments_;
    const auto options = arguments_.query.options();
    plain.query = at::zeros_symint({arguments_.batch(), arguments_.heads(), arguments_.query_length(), 1}, options);
    plain.key = at::zeros_symint({arguments_.batch(), arguments_.kv_heads(), arguments_.key_length(), 1}, options);
    plain.attn_mask = scores;
    return plain;
  }

  /// Gradients in the arguments' shapes and dtypes, from (N, H, L, S, D) or, of the mask, (N, H, L, S).
  Tensor as_query(const Tensor& gradient) const { return gradient.sum(3).to(arguments_.query.scalar_type()); }
  Tensor as_key(const Tensor& gradient) const {
    auto summed = gradient.sum(2);
    const auto heads = arguments_.heads();
    const auto kv_heads = arguments_.kv_heads();
    if (!sizes_known_equal(heads, kv_heads)) {
      summed =
          summed
              .reshape_symint({summed.sym_size(0), kv_heads, heads / kv_heads, summed.sym_size(2), summed.sym_size(3)})
              .sum(2);
    }
    return summed.to(arguments_.key.scalar_type());
  }
  Tensor as_score_weight(const Tensor& gradient) const {
    const auto per_head = gradient.sum(at::IntArrayRef{0, 2, 3});
    return (score_weight_.dim() == 2 ? per_head : per_head.sum(0)).to(score_weight_.scalar_type());
  }
  Tensor as_attn_mask(const Tensor& gradient) const {
    return gradient.sum_to_size_symint(arguments_.attn_mask->sym_sizes()).to(arguments_.attn_mask->scalar_type());
  }

 private:
  void read_masks() {
    const auto hide = [&](const Tensor& hidden) { hidden_ = hidden_.defined() ? hidden_.logical_or(hidden) : hidden; };
    if (has_tensor(arguments_.key_padding_mask)) {
      hide(hidden_by(*arguments_.key_padding_mask).unsqueeze(1).unsqueeze(1));
    }
    if (has_tensor(arguments_.attn_mask)) hide(hidden_by(*arguments_.attn_mask));
    if (arguments_.is_causal) {
      hide(at::ones_symint({1, 1, arguments_.query_length(), arguments_.key_length()},
                           arguments_.query.options().dtype(at::kBool))
               .triu(1));
    }
  }

  Tensor with_all_heads(const Tensor& tensor) const {
    const auto heads = arguments_.heads();
    const auto kv_heads = arguments_.kv_heads();
    if (sizes_known_equal(heads, kv_heads)) return tensor;
    return tensor.unsqueeze(2)
        .expand_symint({tensor.sym_size(0), kv_heads, heads / kv_heads, tensor.sym_size(2), tensor.sym_size(3)})
        .flatten(1, 2);
  }

  const AttentionArguments& arguments_;
  const Tensor& score_weight_;
  at::ScalarType accumulation_;
  Tensor hidden_;  // bool, broadcastable to (N, H, L, S); undefined where nothing hides
  Tensor weight_, tanh_, slope_;
};

/// The formulas are exact in their own dtypes: an autocast that surrounds them must not lower them.
c10::impl::ExcludeDispatchKeyGuard without_autocast() {
  return c10::impl::ExcludeDispatchKeyGuard(c10::autocast_dispatch_keyset);
}

}  // namespace

std::array<Tensor, 2> additive_forward_tangents(const AttentionArguments& a, const Tensor& score_weight,
                                                const std::array<Tensor, 6>& of) {
  const auto guard = without_autocast();
  const AdditiveScores scores(a, score_weight);
  const auto change = scores.change(scores.sum_of_features(of[0], of[1]), of[3], of[5]);
  return forward_tangents(scores.as_plain(), {Tensor(), Tensor(), of[2], of[4], change});
}

std::array<Tensor, 6> unfused_additive_backward(const AttentionArguments& a, const Tensor& score_weight,
                                                const BackwardArguments& b, const AdditiveGradientMask& wanted) {
  const auto guard = without_autocast();
  const AdditiveScores scores(a, score_weight);
  const auto plain = unfused_backward(scores.as_plain(), b, {false, false, wanted[2], wanted[4], true});
  const auto grad_scores = plain[4].unsqueeze(-1);
  std::array<Tensor, 6> gradients;
  if (wanted[0] || wanted[1]) {
    const auto of_sum = grad_scores * scores.weight() * scores.slope();
    if (wanted[0]) gradients[0] = scores.as_query(of_sum);
    if (wanted[1]) gradients[1] = scores.as_key(of_sum);
  }
  gradients[2] = plain[2];
  if (wanted[3]) gradients[3] = scores.as_score_weight(grad_scores * scores.tanh());
  gradients[4] = plain[3];
  if (wanted[5]) gradients[5] = scores.as_attn_mask(plain[4]);
  return gradients;
}

std::array<Tensor, 8> unfused_additive_double_backward(const AttentionArguments& a, const Tensor& score_weight,
                                                       const BackwardArguments& b, const std::array<Tensor, 6>& of,
                                                       const std::array<bool, 8>& wanted) {
  const auto guard = without_autocast();
  const AdditiveScores scores(a, score_weight);
  const auto& tanh = scores.tanh();
  const auto& slope = scores.slope();
  const auto& weight = scores.weight();
  const auto plain = scores.as_plain();

  const auto direction = scores.sum_of_features(of[0], of[1]);
  const auto change = scores.change(direction, of[3], of[5]);
  const auto grad_scores = unfused_backward(plain, b, {false, false, false, false, true})[4].unsqueeze(-1);
  const auto of_plain = unfused_double_backward(plain, b, {Tensor(), Tensor(), of[2], of[4], change},
                                                {wanted[0], wanted[1], false, false, wanted[4], wanted[6], true});
  const auto of_scores = of_plain[6].unsqueeze(-1);

  std::array<Tensor, 8> result;
  result[0] = of_plain[0];
  result[1] = of_plain[1];
  result[4] = of_plain[4];
  result[6] = of_plain[5];
  if (wanted[2] || wanted[3]) {
    auto of_sum = of_scores * weight * slope;
    if (direction.defined()) of_sum = of_sum - 2.0 * grad_scores * weight * tanh * slope * direction;
    if (of[3].defined()) of_sum = of_sum + grad_scores * scores.as_factor(of[3]) * slope;
    if (wanted[2]) result[2] = scores.as_query(of_sum);
    if (wanted[3]) result[3] = scores.as_key(of_sum);
  }
  if (wanted[5]) {
    auto of_weight = of_scores * tanh;
    if (direction.defined()) of_weight = of_weight + grad_scores * slope * direction;
    result[5] = scores.as_score_weight(of_weight);
  }
  if (wanted[7]) result[7] = scores.as_attn_mask(of_plain[6]);
  return result;
}

}  // namespace fused_mha::detail
