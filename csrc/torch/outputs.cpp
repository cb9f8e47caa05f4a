// SPDX-License-Identifier: BSD-3-Clause
#include "torch/outputs.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <numeric>
#include <vector>

#include "core/problem.h"
#include "torch/checks.h"

namespace fused_mha::detail {
namespace {

/// Dimensions of `like` from the slowest to the fastest in memory. Broadcast dimensions (stride 0) have no order of
/// their own and stay where they are.
std::vector<std::size_t> memory_order(const at::Tensor& like) {
  const auto strides = like.sym_strides();
  std::vector<std::size_t> order(strides.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto is_faster = [&](std::size_t a, std::size_t b) {
    if (TORCH_GUARD_OR_FALSE(strides[a].sym_eq(0)) || TORCH_GUARD_OR_FALSE(strides[b].sym_eq(0))) return false;
    return TORCH_GUARD_OR_FALSE(strides[a].sym_lt(strides[b]));
  };
  for (std::size_t i = 1; i < order.size(); ++i) {
    for (std::size_t j = i; j > 0 && is_faster(order[j - 1], order[j]); --j) std::swap(order[j - 1], order[j]);
  }
  return order;
}

at::Tensor empty_like_input(const at::Tensor& input, bool wanted) {
  return wanted ? empty_in_order_of(input, input.sym_sizes()) : at::empty({0}, input.options());
}

at::Tensor empty_like_input(const OptionalTensor& input, bool wanted, const at::Tensor& otherwise_like) {
  return wanted ? empty_like_input(*input, true) : at::empty({0}, otherwise_like.options());
}

at::TensorOptions statistics_options(const at::Tensor& query) {
  return query.options().dtype(at::toOpMathType(query.scalar_type()));
}

at::Tensor allocate_weights(const AttentionArguments& a) {
  const auto options = a.query.options();
  if (a.weights_mode == kLogSumExp) {
    return at::empty_symint({a.batch(), a.heads(), a.query_length()}, statistics_options(a.query));
  }
  switch (static_cast<core::WeightsMode>(a.weights_mode)) {
    case core::WeightsMode::kAveraged:
      // The mean over no heads: no kernel runs to write it.
      if (sizes_known_equal(a.heads(), 0)) {
        return at::zeros_symint({a.batch(), a.query_length(), a.key_length()}, options);
      }
      return at::empty_symint({a.batch(), a.query_length(), a.key_length()}, options);
    case core::WeightsMode::kPerHead:
      return at::empty_symint({a.batch(), a.heads(), a.query_length(), a.key_length()}, options);
    case core::WeightsMode::kNone:
      break;
  }
  return at::empty({0}, options);
}

}  // namespace

at::Tensor empty_in_order_of(const at::Tensor& like, c10::SymIntArrayRef sizes) {
  const auto order = memory_order(like);
  std::vector<c10::SymInt> strides(sizes.size());
  c10::SymInt stride = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    strides[*dim] = stride;
    // An empty dimension must not make the strides of others 0: those mean broadcasting.
    stride = stride * sizes[*dim].max(1);
  }
  return at::empty_strided_symint(sizes, strides, like.options());
}

ForwardResult allocate_forward(const AttentionArguments& a) {
  const auto statistics = statistics_options(a.query);
  const std::vector<c10::SymInt> rows{a.batch(), a.heads(), a.query_length()};
  return {empty_in_order_of(a.query, {a.batch(), a.heads(), a.query_length(), a.value.sym_size(3)}),
          allocate_weights(a), at::empty_symint(rows, statistics), at::empty_symint(rows, statistics)};
}

VarlenForwardResult allocate_varlen_forward(const VarlenArguments& a) {
  const std::vector<c10::SymInt> rows{a.query.sym_size(0) * a.query.sym_size(1)};
  const auto statistics = statistics_options(a.query);
  return {empty_in_order_of(a.query, {a.query.sym_size(0), a.query.sym_size(1), a.value.sym_size(2)}),
          at::empty_symint(rows, statistics), at::empty_symint(rows, statistics)};
}

VarlenBackwardResult allocate_varlen_backward(const VarlenArguments& a, const VarlenGradientMask& wanted) {
  const auto sequences = a.cu_seqlens_q.sym_size(0) - 1;
  const auto statistics = statistics_options(a.query);
  return {empty_like_input(a.query, wanted[0]), empty_like_input(a.key, wanted[1]),
          empty_like_input(a.value, wanted[2]),
          wanted[3] ? at::empty_symint({sequences, a.query.sym_size(1)}, statistics) : at::empty({0}, statistics)};
}

BackwardResult allocate_backward(const AttentionArguments& a, const GradientMask& wanted) {
  return {empty_like_input(a.query, wanted[0]),
          empty_like_input(a.key, wanted[1]),
          empty_like_input(a.value, wanted[2]),
          empty_like_input(a.key_padding_mask, wanted[3], a.query),
          empty_like_input(a.attn_mask, wanted[4], a.query),
          empty_like_input(a.sink, wanted[5], a.query)};
}

AdditiveBackwardResult allocate_additive_backward(const AttentionArguments& a, const at::Tensor& score_weight,
                                                  const AdditiveGradientMask& wanted) {
  auto [query, key, value, padding, mask, sink] = allocate_backward(a, without_score_weight(wanted));
  return {query, key, value, empty_like_input(score_weight, wanted[3]), padding, mask};
}

}  // namespace fused_mha::detail
