// SPDX-License-Identifier: BSD-3-Clause
//
// Multi-head attention around the kernels: projections, heads, appended keys, masks as modules take them. Everything
// between the projections and the kernels is a view, except that appending keys copies the projected ones.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "torch/arguments.h"

namespace fused_mha::detail {

/// `packed` (sum of widths, E), or one weight each; `bias` (sum of widths).
struct InProjection {
  OptionalTensor packed;
  OptionalTensor query, key, value;
  OptionalTensor bias;
  std::optional<std::array<std::int64_t, 3>> widths = std::nullopt;  // of the results; E each where absent
};

/// Query, key and value after in-projection. Where they are one tensor, or key and value are, so is the product, and
/// the results are views of it.
std::tuple<at::Tensor, at::Tensor, at::Tensor> project_inputs(const at::Tensor& query, const at::Tensor& key,
                                                              const at::Tensor& value, const InProjection& weights);

using ProjectedSignature = std::tuple<at::Tensor, OptionalTensor>(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, std::int64_t num_heads,
    const OptionalTensor& bias_k, const OptionalTensor& bias_v, bool add_zero_attn, double dropout_p,
    const OptionalTensor& key_padding_mask, bool need_weights, const OptionalTensor& attn_mask,
    bool average_attn_weights, bool is_causal, bool batch_first, std::optional<std::int64_t> num_kv_heads,
    std::string_view causal_alignment, const OptionalTensor& sink, bool weights_before_dropout);

}  // namespace fused_mha::detail
