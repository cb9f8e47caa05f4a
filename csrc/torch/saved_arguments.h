// SPDX-License-Identifier: BSD-3-Clause
//
// The arguments of an attention call as a FormulaNode keeps them: tensors in an order, and the rest as constants.
#pragma once

#include <array>

#include "torch/arguments.h"
#include "torch/formula_node.h"

namespace fused_mha::detail {

inline constexpr std::size_t kArgumentTensors = 7;

inline std::array<OptionalTensor, kArgumentTensors> tensors_of(const AttentionArguments& a) {
  return {a.query, a.key, a.value, a.key_padding_mask, a.attn_mask, a.sink, a.rng_state};
}

inline AttentionArguments without_tensors(AttentionArguments a) {
  a.query = a.key = a.value = at::Tensor();
  a.key_padding_mask = a.attn_mask = a.sink = a.rng_state = std::nullopt;
  return a;
}

/// `tensors` begin with those of tensors_of.
inline AttentionArguments with_tensors(AttentionArguments constants, const variable_list& tensors) {
  constants.query = tensors[0];
  constants.key = tensors[1];
  constants.value = tensors[2];
  constants.key_padding_mask = optional_tensor(tensors[3]);
  constants.attn_mask = optional_tensor(tensors[4]);
  constants.sink = optional_tensor(tensors[5]);
  constants.rng_state = optional_tensor(tensors[6]);
  return constants;
}

inline void collect_constants(torch::autograd::CompiledNodeArgs& args, const AttentionArguments& a) {
  args.collect(a.is_causal);
  args.collect(a.dropout_p);
  args.collect(a.scale);
  args.collect(a.always_visible_keys.guard_int(__FILE__, __LINE__));
  args.collect(a.weights_mode);
  args.collect(a.bottom_right);
  args.collect(a.weights_before_dropout);
}

}  // namespace fused_mha::detail
