// SPDX-License-Identifier: BSD-3-Clause
//
// The module: torch::nn::MultiheadAttention's constructor and more, with the parameters, names and initial numbers (for
// the same seed) of Python's nn.MultiheadAttention and fused_mha.MultiheadAttention, so that a saved state loads in
// either.
#pragma once

#include <fused_mha/export.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace fused_mha {

/// Example: `MultiheadAttentionOptions(512, 8).dropout(0.1).batch_first(true)`.
struct FUSED_MHA_API MultiheadAttentionOptions {
  MultiheadAttentionOptions(std::int64_t embed_dim, std::int64_t num_heads);

  /// Width E of query and output; num_heads divides it unless head_dim is given.
  TORCH_ARG(std::int64_t, embed_dim);

  TORCH_ARG(std::int64_t, num_heads);

  /// Probability of an attention weight to become 0 in training.
  TORCH_ARG(double, dropout) = 0.0;

  /// Whether the in- and out-projections have a bias.
  TORCH_ARG(bool, bias) = true;

  /// One more key and value, learnt, the same for every sample and visible to every query.
  TORCH_ARG(bool, add_bias_kv) = false;

  /// One more key and value of zeros, visible to every query.
  TORCH_ARG(bool, add_zero_attn) = false;

  /// Width of key. Default: embed_dim.
  TORCH_ARG(std::optional<std::int64_t>, kdim) = std::nullopt;

  /// Width of value. Default: embed_dim.
  TORCH_ARG(std::optional<std::int64_t>, vdim) = std::nullopt;

  /// Batched inputs are (N, L, E) rather than (L, N, E).
  TORCH_ARG(bool, batch_first) = false;

  /// D, the width of a head of queries and keys. Default: embed_dim / num_heads.
  TORCH_ARG(std::optional<std::int64_t>, head_dim) = std::nullopt;

  /// Dv, the width of a head of values. Default: head_dim.
  TORCH_ARG(std::optional<std::int64_t>, v_head_dim) = std::nullopt;

  /// Hkv, the heads of keys and values, which groups of num_heads / Hkv query heads share. Default: num_heads.
  TORCH_ARG(std::optional<std::int64_t>, num_kv_heads) = std::nullopt;

  /// Width of the output. Default: embed_dim.
  TORCH_ARG(std::optional<std::int64_t>, out_dim) = std::nullopt;

  /// "bottom_right": is_causal hides s > l + S - L instead of s > l. Default: "top_left".
  TORCH_ARG(std::string, causal_alignment) = "top_left";

  /// Return weights that dropout is yet to act on.
  TORCH_ARG(bool, weights_before_dropout) = false;

  /// "zero" adds exp(0) to each softmax's denominator, "learned" exp(sink[h]) of a parameter. Default: neither.
  TORCH_ARG(std::optional<std::string>, sink) = std::nullopt;
};

/// Example: `MultiheadAttentionForwardOptions().key_padding_mask(mask).need_weights(false)`.
struct FUSED_MHA_API MultiheadAttentionForwardOptions {
  /// (N, S), or (S) for unbatched inputs. bool True hides, a floating mask is added.
  TORCH_ARG(torch::Tensor, key_padding_mask);

  /// Whether to return weights.
  TORCH_ARG(bool, need_weights) = true;

  /// (L, S), (N*H, L, S) or anything that broadcasts to (N, H, L, S). bool True hides, a floating mask is added.
  TORCH_ARG(torch::Tensor, attn_mask);

  /// Weights averaged over heads, (N, L, S), or for each head, (N, H, L, S).
  TORCH_ARG(bool, average_attn_weights) = true;

  /// Hides s > l, or what causal_alignment says. Where an attn_mask is given the mask decides and this changes nothing.
  TORCH_ARG(bool, is_causal) = false;
};

class FUSED_MHA_API MultiheadAttentionImpl : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  MultiheadAttentionImpl(std::int64_t embed_dim, std::int64_t num_heads)
      : MultiheadAttentionImpl(MultiheadAttentionOptions(embed_dim, num_heads)) {}
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options);

  /// Output in the layout of query, (L, N, E), (N, L, E) with batch_first or (L, E), of width out_dim, and the weights,
  /// after dropout unless options say otherwise; undefined with need_weights(false).
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& query, const torch::Tensor& key,
                                                   const torch::Tensor& value,
                                                   const MultiheadAttentionForwardOptions& options = {});

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  MultiheadAttentionOptions options;

  /// (3*E, E), in general (H*D + Hkv*D + Hkv*Dv, E): the three in-projections, where key and value are as wide as
  /// query; undefined otherwise.
  torch::Tensor in_proj_weight;
  /// (H*D, E), (Hkv*D, kdim) and (Hkv*Dv, vdim) otherwise.
  torch::Tensor q_proj_weight, k_proj_weight, v_proj_weight;
  /// (3*E), in general (H*D + Hkv*D + Hkv*Dv); undefined without bias.
  torch::Tensor in_proj_bias;
  /// (1, 1, Hkv*D) and (1, 1, Hkv*Dv); undefined without add_bias_kv.
  torch::Tensor bias_k, bias_v;
  /// (H); undefined unless the sink is learned.
  torch::Tensor sink;
  torch::nn::Linear out_proj = nullptr;

 private:
  /// Widths of projected query, key and value.
  std::array<std::int64_t, 3> widths() const;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(MultiheadAttentionForwardOptions())})
};

/// Holder of a MultiheadAttentionImpl, as torch::nn has them.
TORCH_MODULE(MultiheadAttention);

}  // namespace fused_mha
