// SPDX-License-Identifier: BSD-3-Clause
//
// The operators' schemas. Public ones are composites of private ones, which are pure: they take the state of the
// random generator as a tensor, so none of them is tagged as random (at::randint, which draws the state, is).
#include <torch/library.h>

TORCH_LIBRARY(fused_mha, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};

  library.def(
      "attention(Tensor query, Tensor key, Tensor value, *, Tensor? key_padding_mask=None, Tensor? attn_mask=None, "
      "bool is_causal=False, float dropout_p=0.0, float? scale=None, str causal_alignment='top_left', "
      "Tensor? sink=None) -> Tensor",
      tags);
  library.def(
      "attention_with_weights(Tensor query, Tensor key, Tensor value, *, Tensor? key_padding_mask=None, "
      "Tensor? attn_mask=None, bool is_causal=False, float dropout_p=0.0, float? scale=None, "
      "bool average_attn_weights=True, str causal_alignment='top_left', Tensor? sink=None, "
      "bool weights_before_dropout=False) -> (Tensor output, Tensor weights)",
      tags);
  library.def(
      "attention_with_lse(Tensor query, Tensor key, Tensor value, *, Tensor? key_padding_mask=None, "
      "Tensor? attn_mask=None, bool is_causal=False, float dropout_p=0.0, float? scale=None, "
      "str causal_alignment='top_left', Tensor? sink=None) -> (Tensor output, Tensor lse)",
      tags);
  library.def(
      "attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, "
      "bool is_causal=False, float dropout_p=0.0, float? scale=None, str causal_alignment='top_left', "
      "Tensor? sink=None) -> Tensor",
      tags);
  library.def(
      "multi_head_attention_forward(Tensor query, Tensor key, Tensor value, SymInt embed_dim_to_check, int num_heads, "
      "Tensor? in_proj_weight, Tensor? in_proj_bias, Tensor? bias_k, Tensor? bias_v, bool add_zero_attn, "
      "float dropout_p, Tensor out_proj_weight, Tensor? out_proj_bias, bool training=True, "
      "Tensor? key_padding_mask=None, bool need_weights=True, Tensor? attn_mask=None, "
      "bool use_separate_proj_weight=False, Tensor? q_proj_weight=None, Tensor? k_proj_weight=None, "
      "Tensor? v_proj_weight=None, Tensor? static_k=None, Tensor? static_v=None, bool average_attn_weights=True, "
      "bool is_causal=False, bool batch_first=False) -> (Tensor output, Tensor? weights)",
      tags);
  library.def(
      "additive_attention(Tensor query, Tensor key, Tensor value, Tensor score_weight, *, "
      "Tensor? key_padding_mask=None, Tensor? attn_mask=None, bool is_causal=False, float dropout_p=0.0) -> Tensor",
      tags);
  library.def(
      "additive_attention_with_weights(Tensor query, Tensor key, Tensor value, Tensor score_weight, *, "
      "Tensor? key_padding_mask=None, Tensor? attn_mask=None, bool is_causal=False, float dropout_p=0.0, "
      "bool average_attn_weights=True) -> (Tensor output, Tensor weights)",
      tags);
  library.def("dropout_mask(Tensor rng_state, SymInt N, SymInt H, SymInt L, SymInt S, float dropout_p) -> Tensor",
              tags);

  library.def(
      "_multi_head_attention_projected(Tensor query, Tensor key, Tensor value, int num_heads, Tensor? bias_k, "
      "Tensor? bias_v, bool add_zero_attn, float dropout_p, Tensor? key_padding_mask, bool need_weights, "
      "Tensor? attn_mask, bool average_attn_weights, bool is_causal, bool batch_first, int? num_kv_heads=None, "
      "str causal_alignment='top_left', Tensor? sink=None, bool weights_before_dropout=False) "
      "-> (Tensor context, Tensor? weights)",
      tags);
  library.def(
      "_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask, Tensor? attn_mask, "
      "bool is_causal, float dropout_p, float scale, Tensor? rng_state, SymInt always_visible_keys, int weights_mode, "
      "bool bottom_right=False, Tensor? sink=None, bool weights_before_dropout=False) "
      "-> (Tensor output, Tensor weights, Tensor row_max, Tensor row_sum)",
      tags);
  library.def(
      "_attention_backward(Tensor? grad_output, Tensor? grad_weights, Tensor query, Tensor key, Tensor value, "
      "Tensor? key_padding_mask, Tensor? attn_mask, Tensor output, Tensor row_max, Tensor row_sum, bool is_causal, "
      "float dropout_p, float scale, Tensor? rng_state, SymInt always_visible_keys, int weights_mode, "
      "bool[6] output_mask, bool bottom_right=False, Tensor? sink=None, bool weights_before_dropout=False) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_key_padding_mask, Tensor grad_attn_mask, "
      "Tensor grad_sink)",
      tags);
  library.def(
      "_varlen_forward(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "bool is_causal, float dropout_p, float scale, Tensor? rng_state, bool bottom_right, Tensor? sink) "
      "-> (Tensor output, Tensor row_max, Tensor row_sum)",
      tags);
  library.def(
      "_varlen_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, Tensor output, Tensor row_max, Tensor row_sum, bool is_causal, float dropout_p, "
      "float scale, Tensor? rng_state, bool bottom_right, Tensor? sink, bool[4] output_mask) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sink)",
      tags);
  library.def(
      "_mask_tiles(Tensor query, Tensor key, Tensor? key_padding_mask, Tensor? attn_mask, bool is_causal) -> Tensor");
  library.def(
      "_additive_attention_forward(Tensor query, Tensor key, Tensor value, Tensor score_weight, "
      "Tensor? key_padding_mask, Tensor? attn_mask, bool is_causal, float dropout_p, Tensor? rng_state, "
      "int weights_mode) -> (Tensor output, Tensor weights, Tensor row_max, Tensor row_sum)",
      tags);
  library.def(
      "_additive_attention_backward(Tensor? grad_output, Tensor? grad_weights, Tensor query, Tensor key, Tensor value, "
      "Tensor score_weight, Tensor? key_padding_mask, Tensor? attn_mask, Tensor output, Tensor row_max, "
      "Tensor row_sum, bool is_causal, float dropout_p, Tensor? rng_state, int weights_mode, bool[6] output_mask) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_score_weight, "
      "Tensor grad_key_padding_mask, Tensor grad_attn_mask)",
      tags);
}
