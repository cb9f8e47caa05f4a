// SPDX-License-Identifier: BSD-3-Clause
//
// Multi-head attention around the kernels: projections, heads, appended keys, masks as modules take them. Everything
// between the projections and the kernels is a view, except that appending keys copies the projected ones.
#pragma once

#include <tuple>

#include "torch/arguments.h"

namespace fused_mha::detail {

/// `packed` (3*E, E), or one weight each; `bias` (3*E).
struct InProjection {
  OptionalTensor packed;
  OptionalTensor query, key, value;
  OptionalTensor bias;
};

/// Query, key and value after in-projection. Where they are one tensor, or key and value are, so is the product, and
/// the results are views of it.
std::tuple<at::Tensor, at::Tensor, at::Tensor> project_inputs(const at::Tensor& query, const at::Tensor& key,
                                                              const at::Tensor& value, const InProjection& weights);

using ProjectedSignature = std::tuple<at::Tensor, OptionalTensor>(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, std::int64_t num_heads,
    const OptionalTensor& bias_k, const OptionalTensor& bias_v, bool add_zero_attn, double dropout_p,
    const OptionalTensor& key_padding_mask, bool need_weights, const OptionalTensor& attn_mask,
    bool average_attn_weights, bool is_causal, bool batch_first);

}  // namespace fused_mha::detail
