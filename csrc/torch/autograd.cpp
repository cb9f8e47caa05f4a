// SPDX-License-Identifier: BSD-3-Clause
//
// Derivatives of the private operators, written as PyTorch's generated code has those of its own: a Node with saved
// variables, set_history, and tangents set on the results. So torch.func transforms, C++ and Python get the same.
//
//   _attention_forward   reverse mode: _attention_backward, fused       forward mode: unfused
//   _attention_backward  reverse and forward mode: unfused (derivatives.h)
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "torch/autograd_node.h"
#include "torch/call_record.h"
#include "torch/derivatives.h"
#include "torch/formula_node.h"
#include "torch/operators.h"
#include "torch/saved_arguments.h"
#include "torch/tangents.h"

namespace fused_mha::detail {
namespace {

std::array<at::Tensor, 6> to_array(const BackwardResult& result) {
  return std::apply([](const auto&... tensors) { return std::array<at::Tensor, 6>{tensors...}; }, result);
}

/// Gradient of _attention_backward: of grad_output, grad_weights, query, key, value, both masks and sink.
struct DoubleBackwardFormula {
  using Constants = AttentionArguments;
  static constexpr const char* kName = "FusedMhaAttentionBackwardBackward";
  static constexpr std::size_t kSaved = kArgumentTensors + 2;
  static constexpr std::size_t kResults = 0;
  static constexpr std::array<std::size_t, 8> kInputs{kArgumentTensors, kArgumentTensors + 1, 0, 1, 2, 3, 4, 5};
  static constexpr bool kIsTraceable = true;

  static variable_list gradients(const Constants& constants, const variable_list& saved,
                                 const variable_list& cotangents, const std::vector<bool>& wanted) {
    BackwardArguments backward;
    backward.grad_output = optional_tensor(saved[kArgumentTensors]);
    backward.grad_weights = optional_tensor(saved[kArgumentTensors + 1]);
    const auto of = first_of<std::array<at::Tensor, 6>>(cotangents);
    const auto result =
        unfused_double_backward(with_tensors(constants, saved), backward, of, first_of<std::array<bool, 8>>(wanted));
    return {result.begin(), result.end()};
  }
  static void collect(torch::autograd::CompiledNodeArgs& args, const Constants& constants) {
    collect_constants(args, constants);
  }
};

/// Gradient of _attention_forward.
struct BackwardFormula {
  using Constants = AttentionArguments;
  static constexpr const char* kName = "FusedMhaAttentionBackward";
  static constexpr std::size_t kSaved = kArgumentTensors + 3;
  static constexpr std::size_t kResults = 3;  // output, row_max, row_sum
  static constexpr std::array<std::size_t, 6> kInputs{0, 1, 2, 3, 4, 5};
  static constexpr bool kIsTraceable = true;

  static variable_list gradients(const Constants& constants, const variable_list& saved, const variable_list& incoming,
                                 const std::vector<bool>& wanted) {
    // row_max and row_sum have no gradients.
    if (!incoming[0].defined() && !incoming[1].defined()) return variable_list(wanted.size());
    const BackwardArguments backward{optional_tensor(incoming[0]), optional_tensor(incoming[1]),
                                     saved[kArgumentTensors], saved[kArgumentTensors + 1], saved[kArgumentTensors + 2]};
    const auto mask = first_of<GradientMask>(wanted);
    return only_wanted(to_array(call_backward(with_tensors(constants, saved), backward, mask)), wanted);
  }
  static void collect(torch::autograd::CompiledNodeArgs& args, const Constants& constants) {
    collect_constants(args, constants);
  }
};

ForwardResult attention_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                                         const at::Tensor& value, const OptionalTensor& key_padding_mask,
                                         const OptionalTensor& attn_mask, bool is_causal, double dropout_p,
                                         double scale, const OptionalTensor& rng_state, c10::SymInt always_visible_keys,
                                         std::int64_t weights_mode, bool bottom_right, const OptionalTensor& sink,
                                         bool weights_before_dropout) {
  const AttentionArguments arguments{query,        key,
                                     value,        key_padding_mask,
                                     attn_mask,    is_causal,
                                     dropout_p,    scale,
                                     rng_state,    always_visible_keys,
                                     weights_mode, bottom_right,
                                     sink,         weights_before_dropout};
  decltype(make_node<FormulaNode<BackwardFormula>>()) node;
  if (torch::autograd::compute_requires_grad(query, key, value, key_padding_mask, attn_mask, sink)) {
    node = make_node<FormulaNode<BackwardFormula>>();
    node->set_next_edges(torch::autograd::collect_next_edges(query, key, value, key_padding_mask, attn_mask, sink));
    node->save(without_tensors(arguments), tensors_of(arguments));
  }
  if (is_recording_calls()) {
    using torch::autograd::compute_requires_grad;
    note_derivatives(
        {compute_requires_grad(query), compute_requires_grad(key), compute_requires_grad(value),
         compute_requires_grad(key_padding_mask), compute_requires_grad(attn_mask), compute_requires_grad(sink)},
        has_tangent(arguments));
  }
  auto result = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return forward_operator().redispatch(keys & c10::after_autograd_keyset, query, key, value, key_padding_mask,
                                         attn_mask, is_causal, dropout_p, scale, rng_state, always_visible_keys,
                                         weights_mode, bottom_right, sink, weights_before_dropout);
  }();
  const auto& [output, weights, row_max, row_sum] = result;
  if (node) {
    torch::autograd::set_history(output, node);
    torch::autograd::set_history(weights_mode == 0 ? at::Tensor() : weights, node);
    node->save_results({output, row_max, row_sum});
    announce_node(node);
  }
  if (has_tangent(arguments)) {
    auto primals = arguments;
    for (auto* tensor : {&primals.query, &primals.key, &primals.value}) *tensor = tensor->_fw_primal(/*level=*/0);
    for (auto* optional : {&primals.key_padding_mask, &primals.attn_mask, &primals.sink})
      *optional = primal_of(*optional);
    const auto tangents =
        forward_tangents(primals, {tangent_of(query), tangent_of(key), tangent_of(value), tangent_of(key_padding_mask),
                                   tangent_of(attn_mask), tangent_of(sink)});
    set_tangent(output, tangents[0]);
    set_tangent(weights, tangents[1]);
  }
  return result;
}

BackwardResult attention_backward_autograd(c10::DispatchKeySet keys, const OptionalTensor& grad_output,
                                           const OptionalTensor& grad_weights, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& value,
                                           const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                           const at::Tensor& output, const at::Tensor& row_max,
                                           const at::Tensor& row_sum, bool is_causal, double dropout_p, double scale,
                                           const OptionalTensor& rng_state, c10::SymInt always_visible_keys,
                                           std::int64_t weights_mode, GradientMask output_mask, bool bottom_right,
                                           const OptionalTensor& sink, bool weights_before_dropout) {
  const AttentionArguments arguments{query,        key,
                                     value,        key_padding_mask,
                                     attn_mask,    is_causal,
                                     dropout_p,    scale,
                                     rng_state,    always_visible_keys,
                                     weights_mode, bottom_right,
                                     sink,         weights_before_dropout};
  const BackwardArguments backward{grad_output, grad_weights, output, row_max, row_sum};
  decltype(make_node<FormulaNode<DoubleBackwardFormula>>()) node;
  // output, row_max and row_sum are functions of the other arguments, and their derivatives are part of those'.
  if (torch::autograd::compute_requires_grad(grad_output, grad_weights, query, key, value, key_padding_mask, attn_mask,
                                             sink)) {
    node = make_node<FormulaNode<DoubleBackwardFormula>>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output, grad_weights, query, key, value,
                                                             key_padding_mask, attn_mask, sink));
    const auto [q, k, v, padding, bias, own_sink, state] = tensors_of(arguments);
    node->save(without_tensors(arguments), std::array<OptionalTensor, kArgumentTensors + 2>{
                                               q, k, v, padding, bias, own_sink, state, grad_output, grad_weights});
  }
  auto result = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return backward_operator().redispatch(keys & c10::after_autograd_keyset, grad_output, grad_weights, query, key,
                                          value, key_padding_mask, attn_mask, output, row_max, row_sum, is_causal,
                                          dropout_p, scale, rng_state, always_visible_keys, weights_mode, output_mask,
                                          bottom_right, sink, weights_before_dropout);
  }();
  const auto gradients = to_array(result);
  if (node) {
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      torch::autograd::set_history(output_mask[i] ? gradients[i] : at::Tensor(), node);
    }
    announce_node(node);
  }
  if (has_tangent(arguments, backward)) {
    const auto dual = unfused_backward(arguments, backward, output_mask);
    for (std::size_t i = 0; i < gradients.size(); ++i) set_tangent(gradients[i], tangent_of(optional_tensor(dual[i])));
  }
  return result;
}

}  // namespace
}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, Autograd, library) {
  library.impl("_attention_forward", &fused_mha::detail::attention_forward_autograd);
  library.impl("_attention_backward", &fused_mha::detail::attention_backward_autograd);
}
