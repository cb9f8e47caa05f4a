// SPDX-License-Identifier: BSD-3-Clause
//
// One attention call as the kernels see it: sizes, strides, pointers. No torch, no CUDA runtime.
//
//   score[n, h, l, s]  = scale * sum_d query[n, h, l, d] * key[n, hkv(h), s, d] + masks[n, h, l, s]
//   weight[n, h, l, s] = softmax over the visible s, times keep / (1 - dropout_p) under dropout; a sink adds
//                        exp(sink[n, h]) to the softmax's denominator
//   output[n, h, l, :] = sum_s weight[n, h, l, s] * value[n, hkv(h), s, :]
//
// Shapes: query (N, H, L, D), key (N, Hkv, S, D), value (N, Hkv, S, Dv), output (N, H, L, Dv); Hkv divides H and
// hkv(h) = h / (H / Hkv). Every view has free strides, counted in elements, 0 where it broadcasts.
#pragma once

#include <array>
#include <cstdint>

#include "core/dtype.h"
#include "core/inline.h"

namespace fused_mha::core {

/// A strided 4-D view that nobody owns; `data` is null for an argument that was not given.
template <typename Pointer>
struct BasicView {
  Pointer data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<std::int64_t, 4> strides{};

  FUSED_MHA_INLINE FUSED_MHA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  FUSED_MHA_INLINE FUSED_MHA_HOST_DEVICE std::int64_t offset(std::int64_t i0, std::int64_t i1, std::int64_t i2,
                                                             std::int64_t i3) const {
    return i0 * strides[0] + i1 * strides[1] + i2 * strides[2] + i3 * strides[3];
  }
};
using View = BasicView<const void*>;
using MutableView = BasicView<void*>;

/// The Philox key material: what a generator produced for this call.
struct RngState {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

struct AttentionProblem {
  std::int64_t batch = 0;         // N
  std::int64_t heads = 0;         // H
  std::int64_t kv_heads = 0;      // Hkv
  std::int64_t query_length = 0;  // L
  std::int64_t key_length = 0;    // S
  std::int64_t head_dim = 0;      // D
  std::int64_t value_dim = 0;     // Dv

  View query;             // (N, H, L, D)
  View key;               // (N, Hkv, S, D)
  View value;             // (N, Hkv, S, Dv)
  View key_padding_mask;  // (N, 1, 1, S - always_visible_keys), bool or floating; strides 0 in the middle
  View attn_mask;         // broadcast to (N, H, L, S - always_visible_keys), bool or floating

  View sink;  // broadcast to (N, H, 1, 1), floating

  bool is_causal = false;                // hides s > l + causal_offset
  std::int64_t causal_offset = 0;        // 0 counts from the top left, masked_keys() - L from the bottom right
  std::int64_t always_visible_keys = 0;  // so many of the last keys are outside all masks and causality
  double scale = 1.0;
  double dropout_p = 0.0;
  RngState rng;
  std::int64_t first_sample = 0;  // what dropout adds to n: of several problems that are one call, each has its own

  FUSED_MHA_INLINE FUSED_MHA_HOST_DEVICE std::int64_t masked_keys() const { return key_length - always_visible_keys; }
  FUSED_MHA_INLINE FUSED_MHA_HOST_DEVICE std::int64_t heads_per_kv_head() const {
    return kv_heads == 0 ? 0 : heads / kv_heads;
  }
};

/// What returned weights look like: (N, L, S) means over heads, or (N, H, L, S).
enum class WeightsMode : std::uint8_t { kNone = 0, kAveraged = 1, kPerHead = 2 };

/// Results of the forward pass. Statistics are contiguous (N, H, L) in the accumulation type (double for float64
/// inputs, float otherwise) and belong to the kernels: only attention_backward reads them. A sink counts as one more
/// key in both.
struct ForwardOutputs {
  MutableView output;   // (N, H, L, Dv), dtype of query
  void* row_max;        // largest score of the row, in the kernels' own unit; -inf where no key is visible
  void* row_sum;        // sum over visible s of exp(score - largest score); 0 where no key is visible
  MutableView weights;  // (N, 1, L, S) or (N, H, L, S), dtype of query; null data with WeightsMode::kNone
  WeightsMode weights_mode = WeightsMode::kNone;
  bool weights_before_dropout = false;  // weights are those that dropout is yet to act on
  MutableView log_sum_exp;              // (N, H, L, 1), floating: of the row's scores and sink; null: not wanted
};

/// What the backward pass reads beside the problem.
struct BackwardInputs {
  View grad_output;   // (N, H, L, Dv), dtype of query; null: zero
  View grad_weights;  // (N, 1, L, S) or (N, H, L, S), dtype of query; null: zero
  WeightsMode weights_mode = WeightsMode::kNone;
  bool weights_before_dropout = false;
  View grad_log_sum_exp;  // (N, H, L, 1), floating; null: zero
  View output;            // (N, H, L, Dv), as the forward pass returned it
  const void* row_max = nullptr;
  const void* row_sum = nullptr;
};

/// Gradients to write; null data for those nobody needs. Every element of a requested one is written.
struct BackwardOutputs {
  MutableView grad_query;             // (N, H, L, D), dtype of query
  MutableView grad_key;               // (N, Hkv, S, D), dtype of query
  MutableView grad_value;             // (N, Hkv, S, Dv), dtype of query
  MutableView grad_key_padding_mask;  // (N, 1, 1, S - always_visible_keys), floating
  MutableView grad_attn_mask;         // broadcast sizes below, stride 0 where a size is 1; floating
  std::array<std::int64_t, 4> attn_mask_sizes{1, 1, 1, 1};
  MutableView grad_sink;  // the sink's own N or 1 and H or 1, stride 0 where 1; floating
  std::array<std::int64_t, 2> sink_sizes{1, 1};
};

}  // namespace fused_mha::core
