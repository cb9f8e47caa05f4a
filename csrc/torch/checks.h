// SPDX-License-Identifier: BSD-3-Clause
//
// Every check of what callers pass, in one place. A message names the operator and the argument, says what it must be
// and what it is, and adds a hint where there is a usual cause.
//
// TypeError for a dtype that no call takes, ValueError for a number out of range and for batch sizes that differ,
// RuntimeError for the rest. Sizes are compared as symbolic ones, so that a traced size that may vary stays free.
#pragma once

#include <string>
#include <string_view>

#include "torch/arguments.h"

namespace fused_mha::detail {

/// Ranks, dtypes and layouts of what a public operator was given, and dropout_p: all that must hold before sizes can be
/// looked at. Under autocast, which converts them later, the dtypes of query, key and value need not agree yet.
void check_given(const char* op, const AttentionArguments& arguments);

/// Everything about the arguments of attention_varlen but the numbers in cu_seqlens, which a kernel has to read. Under
/// autocast the dtypes of query, key and value need not agree.
void check_varlen(const char* op, const VarlenArguments& arguments);

/// Everything about the arguments of _varlen_forward, those numbers apart.
void check_varlen_forward(const char* op, const VarlenArguments& arguments);

/// The same for _varlen_backward.
void check_varlen_backward(const char* op, const VarlenArguments& arguments, const VarlenBackwardArguments& backward,
                           const VarlenGradientMask& wanted);

/// rng_state of two int64 numbers, and the sizes (N, H, L, S) of the mask that it is to give.
void check_dropout_mask(const char* op, const at::Tensor& rng_state, c10::SymIntArrayRef sizes, double dropout_p);

/// Sizes of an attention call. Arguments are four-dimensional here; `rank` is what the caller's query had, so that
/// messages show sizes as the caller wrote them.
void check_shapes(const char* op, const AttentionArguments& arguments, std::int64_t rank,
                  const OptionalTensor& given_attn_mask = std::nullopt);

/// Everything about the arguments of _attention_forward: ranks, sizes, dtypes, layouts, devices, numbers.
void check_forward(const char* op, const AttentionArguments& arguments);

/// The same for _attention_backward.
void check_backward(const char* op, const AttentionArguments& arguments, const BackwardArguments& backward,
                    const GradientMask& wanted);

/// For operators that have no CUDA kernel in any build.
void check_not_cuda(const char* op, const at::Tensor& query);

/// score_weight of an additive call: (D) or (H, D), beside arguments that passed check_given and check_shapes.
void check_score_weight(const char* op, const AttentionArguments& arguments, const at::Tensor& score_weight);

/// Everything about the arguments of _additive_attention_forward and _additive_attention_backward.
void check_additive_forward(const char* op, const AttentionArguments& arguments, const at::Tensor& score_weight);
void check_additive_backward(const char* op, const AttentionArguments& arguments, const at::Tensor& score_weight,
                             const BackwardArguments& backward, const AdditiveGradientMask& wanted);

/// query, key, value, masks and numbers of a multi-head call, in the module's layout: (L, N, E), (N, L, E) or (L, E).
void check_multi_head(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask, std::int64_t num_heads,
                      double dropout_p, bool batch_first);

/// Whether causality counts from the bottom right: the two names that callers may use.
bool is_bottom_right(const char* op, std::string_view causal_alignment);

/// A sink as callers give it, (H), in four dimensions.
OptionalTensor sink_of_heads(const char* op, const OptionalTensor& sink);

/// "(2, 5)"
std::string shape_text(c10::SymIntArrayRef sizes);

/// Equal, now or, for sizes that tracing does not know, as a condition checked at run time.
inline bool sizes_equal(const c10::SymInt& a, const c10::SymInt& b) {
  return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

/// Known to be equal; false where tracing cannot know.
inline bool sizes_known_equal(const c10::SymInt& a, const c10::SymInt& b) {
  return a.sym_eq(b).guard_or_false(__FILE__, __LINE__);
}

}  // namespace fused_mha::detail
