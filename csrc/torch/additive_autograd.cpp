// SPDX-License-Identifier: BSD-3-Clause
//
// Derivatives of the private operators of additive attention, by the same means as those in autograd.cpp.
//
//   _additive_attention_forward   reverse mode: _additive_attention_backward, fused       forward mode: unfused
//   _additive_attention_backward  reverse and forward mode: unfused (additive_derivatives.h)
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch/additive_derivatives.h"
#include "torch/autograd_node.h"
#include "torch/call_record.h"
#include "torch/derivatives.h"
#include "torch/formula_node.h"
#include "torch/operators.h"
#include "torch/saved_arguments.h"
#include "torch/tangents.h"

namespace fused_mha::detail {
namespace {

/// score_weight comes after the tensors of tensors_of.
constexpr std::size_t kAdditiveTensors = kArgumentTensors + 1;

std::array<at::Tensor, 6> to_array(const AdditiveBackwardResult& result) {
  return std::apply([](const auto&... tensors) { return std::array<at::Tensor, 6>{tensors...}; }, result);
}

/// Gradient of _additive_attention_backward: of grad_output, grad_weights, query, key, value, score_weight, both masks.
struct AdditiveDoubleBackwardFormula {
  using Constants = AttentionArguments;
  static constexpr const char* kName = "FusedMhaAdditiveAttentionBackwardBackward";
  static constexpr std::size_t kSaved = kAdditiveTensors + 2;
  static constexpr std::size_t kResults = 0;
  static constexpr std::array<std::size_t, 8> kInputs{
      kAdditiveTensors, kAdditiveTensors + 1, 0, 1, 2, kArgumentTensors, 3, 4};
  static constexpr bool kIsTraceable = true;

  static variable_list gradients(const Constants& constants, const variable_list& saved,
                                 const variable_list& cotangents, const std::vector<bool>& wanted) {
    BackwardArguments backward;
    backward.grad_output = optional_tensor(saved[kAdditiveTensors]);
    backward.grad_weights = optional_tensor(saved[kAdditiveTensors + 1]);
    const auto result = unfused_additive_double_backward(with_tensors(constants, saved), saved[kArgumentTensors],
                                                         backward, first_of<std::array<at::Tensor, 6>>(cotangents),
                                                         first_of<std::array<bool, 8>>(wanted));
    return {result.begin(), result.end()};
  }
  static void collect(torch::autograd::CompiledNodeArgs& args, const Constants& constants) {
    collect_constants(args, constants);
  }
};

/// Gradient of _additive_attention_forward.
struct AdditiveBackwardFormula {
  using Constants = AttentionArguments;
  static constexpr const char* kName = "FusedMhaAdditiveAttentionBackward";
  static constexpr std::size_t kSaved = kAdditiveTensors + 3;
  static constexpr std::size_t kResults = 3;  // output, row_max, row_sum
  static constexpr std::array<std::size_t, 6> kInputs{0, 1, 2, kArgumentTensors, 3, 4};
  static constexpr bool kIsTraceable = true;

  static variable_list gradients(const Constants& constants, const variable_list& saved, const variable_list& incoming,
                                 const std::vector<bool>& wanted) {
    if (!incoming[0].defined() && !incoming[1].defined()) return variable_list(wanted.size());
    const BackwardArguments backward{optional_tensor(incoming[0]), optional_tensor(incoming[1]),
                                     saved[kAdditiveTensors], saved[kAdditiveTensors + 1], saved[kAdditiveTensors + 2]};
    const auto result = call_additive_backward(with_tensors(constants, saved), saved[kArgumentTensors], backward,
                                               first_of<AdditiveGradientMask>(wanted));
    return only_wanted(to_array(result), wanted);
  }
  static void collect(torch::autograd::CompiledNodeArgs& args, const Constants& constants) {
    collect_constants(args, constants);
  }
};

bool is_dual(const at::Tensor& tensor) { return torch::autograd::isFwGradDefined(tensor); }

ForwardResult additive_attention_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& query,
                                                  const at::Tensor& key, const at::Tensor& value,
                                                  const at::Tensor& score_weight,
                                                  const OptionalTensor& key_padding_mask,
                                                  const OptionalTensor& attn_mask, bool is_causal, double dropout_p,
                                                  const OptionalTensor& rng_state, std::int64_t weights_mode) {
  const auto arguments =
      additive_arguments(query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p, rng_state, weights_mode);
  decltype(make_node<FormulaNode<AdditiveBackwardFormula>>()) node;
  if (torch::autograd::compute_requires_grad(query, key, value, score_weight, key_padding_mask, attn_mask)) {
    node = make_node<FormulaNode<AdditiveBackwardFormula>>();
    node->set_next_edges(
        torch::autograd::collect_next_edges(query, key, value, score_weight, key_padding_mask, attn_mask));
    const auto [q, k, v, padding, bias, sink, state] = tensors_of(arguments);
    node->save(without_tensors(arguments),
               std::array<OptionalTensor, kAdditiveTensors>{q, k, v, padding, bias, sink, state, score_weight});
  }
  const bool is_forward_mode = has_tangent(arguments) || is_dual(score_weight);
  if (is_recording_calls()) {
    using torch::autograd::compute_requires_grad;
    note_derivatives({compute_requires_grad(query), compute_requires_grad(key), compute_requires_grad(value),
                      compute_requires_grad(key_padding_mask), compute_requires_grad(attn_mask),
                      compute_requires_grad(score_weight)},
                     is_forward_mode);
  }
  auto result = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return additive_forward_operator().redispatch(keys & c10::after_autograd_keyset, query, key, value, score_weight,
                                                  key_padding_mask, attn_mask, is_causal, dropout_p, rng_state,
                                                  weights_mode);
  }();
  const auto& [output, weights, row_max, row_sum] = result;
  if (node) {
    torch::autograd::set_history(output, node);
    torch::autograd::set_history(weights_mode == 0 ? at::Tensor() : weights, node);
    node->save_results({output, row_max, row_sum});
    announce_node(node);
  }
  if (is_forward_mode) {
    auto primals = arguments;
    for (auto* tensor : {&primals.query, &primals.key, &primals.value}) *tensor = tensor->_fw_primal(/*level=*/0);
    for (auto* mask : {&primals.key_padding_mask, &primals.attn_mask}) *mask = primal_of(*mask);
    const auto tangents =
        additive_forward_tangents(primals, score_weight._fw_primal(/*level=*/0),
                                  {tangent_of(query), tangent_of(key), tangent_of(value), tangent_of(score_weight),
                                   tangent_of(key_padding_mask), tangent_of(attn_mask)});
    set_tangent(output, tangents[0]);
    set_tangent(weights, tangents[1]);
  }
  return result;
}

AdditiveBackwardResult additive_attention_backward_autograd(
    c10::DispatchKeySet keys, const OptionalTensor& grad_output, const OptionalTensor& grad_weights,
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& score_weight,
    const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask, const at::Tensor& output,
    const at::Tensor& row_max, const at::Tensor& row_sum, bool is_causal, double dropout_p,
    const OptionalTensor& rng_state, std::int64_t weights_mode, AdditiveGradientMask output_mask) {
  const auto arguments =
      additive_arguments(query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p, rng_state, weights_mode);
  const BackwardArguments backward{grad_output, grad_weights, output, row_max, row_sum};
  decltype(make_node<FormulaNode<AdditiveDoubleBackwardFormula>>()) node;
  // output, row_max and row_sum are functions of the other arguments, and their derivatives are part of those'.
  if (torch::autograd::compute_requires_grad(grad_output, grad_weights, query, key, value, score_weight,
                                             key_padding_mask, attn_mask)) {
    node = make_node<FormulaNode<AdditiveDoubleBackwardFormula>>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output, grad_weights, query, key, value, score_weight,
                                                             key_padding_mask, attn_mask));
    const auto [q, k, v, padding, bias, sink, state] = tensors_of(arguments);
    node->save(without_tensors(arguments),
               std::array<OptionalTensor, kAdditiveTensors + 2>{q, k, v, padding, bias, sink, state, score_weight,
                                                                grad_output, grad_weights});
  }
  auto result = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return additive_backward_operator().redispatch(
        keys & c10::after_autograd_keyset, grad_output, grad_weights, query, key, value, score_weight, key_padding_mask,
        attn_mask, output, row_max, row_sum, is_causal, dropout_p, rng_state, weights_mode, output_mask);
  }();
  const auto gradients = to_array(result);
  if (node) {
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      torch::autograd::set_history(output_mask[i] ? gradients[i] : at::Tensor(), node);
    }
    announce_node(node);
  }
  if (has_tangent(arguments, backward) || is_dual(score_weight)) {
    const auto dual = unfused_additive_backward(arguments, score_weight, backward, output_mask);
    for (std::size_t i = 0; i < gradients.size(); ++i) set_tangent(gradients[i], tangent_of(optional_tensor(dual[i])));
  }
  return result;
}

}  // namespace
}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, Autograd, library) {
  library.impl("_additive_attention_forward", &fused_mha::detail::additive_attention_forward_autograd);
  library.impl("_additive_attention_backward", &fused_mha::detail::additive_attention_backward_autograd);
}
