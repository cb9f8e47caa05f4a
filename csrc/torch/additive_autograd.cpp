// SPDX-License-Identifier: BSD-3-Clause
//
// Derivatives of the private operators of additive attention, by the same means as those in autograd.cpp.
//
//   _additive_attention_forward   reverse mode: _additive_attention_backward, fused       forward mode: unfused
//   _additive_attention_backward  reverse and forward mode: unfused (additive_derivatives.h)
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>

#include "torch/additive_derivatives.h"
#include "torch/autograd_node.h"
#include "torch/call_record.h"
#include "torch/derivatives.h"
#include "torch/operators.h"
#include "torch/tangents.h"

namespace fused_mha::detail {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::TraceableFunction;
using torch::autograd::variable_list;

/// An additive call's arguments as a node keeps them.
class SavedAdditiveArguments {
 public:
  void save(const AttentionArguments& arguments, const at::Tensor& score_weight) {
    saved_ = {SavedVariable(arguments.query, false),
              SavedVariable(arguments.key, false),
              SavedVariable(arguments.value, false),
              SavedVariable(score_weight, false),
              SavedVariable(arguments.key_padding_mask, false),
              SavedVariable(arguments.attn_mask, false),
              SavedVariable(arguments.rng_state, false)};
    is_causal_ = arguments.is_causal;
    dropout_p_ = arguments.dropout_p;
    weights_mode_ = arguments.weights_mode;
  }

  AttentionArguments unpack() const {
    return additive_arguments(saved_[0].unpack(), saved_[1].unpack(), saved_[2].unpack(),
                              optional_tensor(saved_[4].unpack()), optional_tensor(saved_[5].unpack()), is_causal_,
                              dropout_p_, optional_tensor(saved_[6].unpack()), weights_mode_);
  }
  at::Tensor score_weight() const { return saved_[3].unpack(); }

  void release() {
    for (auto& saved : saved_) saved.reset_data();
  }

 private:
  std::array<SavedVariable, 7> saved_;
  bool is_causal_ = false;
  double dropout_p_ = 0.0;
  std::int64_t weights_mode_ = 0;
};

std::array<at::Tensor, 6> to_array(const AdditiveBackwardResult& result) {
  return std::apply([](const auto&... tensors) { return std::array<at::Tensor, 6>{tensors...}; }, result);
}

/// Gradient of _additive_attention_backward.
struct AdditiveDoubleBackward : public TraceableFunction {
  SavedAdditiveArguments arguments;
  SavedVariable grad_output;
  SavedVariable grad_weights;

  std::string name() const override { return "FusedMhaAdditiveAttentionBackwardBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    arguments.release();
    grad_output.reset_data();
    grad_weights.reset_data();
  }

  variable_list apply(variable_list&& cotangents) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::array<at::Tensor, 6> of;
    std::copy(cotangents.begin(), cotangents.end(), of.begin());
    std::array<bool, 8> wanted{};
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    if (std::none_of(of.begin(), of.end(), [](const auto& tensor) { return tensor.defined(); })) {
      return variable_list(wanted.size());
    }
    BackwardArguments backward;
    backward.grad_output = optional_tensor(grad_output.unpack());
    backward.grad_weights = optional_tensor(grad_weights.unpack());
    const auto result =
        unfused_additive_double_backward(arguments.unpack(), arguments.score_weight(), backward, of, wanted);
    return {result.begin(), result.end()};
  }
};

/// Gradient of _additive_attention_forward.
struct AdditiveBackward : public TraceableFunction {
  SavedAdditiveArguments arguments;
  SavedVariable output;
  SavedVariable row_max;
  SavedVariable row_sum;

  std::string name() const override { return "FusedMhaAdditiveAttentionBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    arguments.release();
    for (auto* saved : {&output, &row_max, &row_sum}) saved->reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    AdditiveGradientMask wanted{};
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    if (!gradients[0].defined() && !gradients[1].defined()) return variable_list(wanted.size());
    const BackwardArguments backward{optional_tensor(gradients[0]), optional_tensor(gradients[1]),
                                     output.unpack(getptr()), row_max.unpack(getptr()), row_sum.unpack(getptr())};
    auto result = to_array(call_additive_backward(arguments.unpack(), arguments.score_weight(), backward, wanted));
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (!wanted[i]) result[i] = at::Tensor();
    }
    return {result.begin(), result.end()};
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
  decltype(make_node<AdditiveBackward>()) node;
  if (torch::autograd::compute_requires_grad(query, key, value, score_weight, key_padding_mask, attn_mask)) {
    node = make_node<AdditiveBackward>();
    node->set_next_edges(
        torch::autograd::collect_next_edges(query, key, value, score_weight, key_padding_mask, attn_mask));
    node->arguments.save(arguments, score_weight);
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
    node->output = SavedVariable(output, true);
    node->row_max = SavedVariable(row_max, true);
    node->row_sum = SavedVariable(row_sum, true);
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
  decltype(make_node<AdditiveDoubleBackward>()) node;
  // output, row_max and row_sum are functions of the other arguments, and their derivatives are part of those'.
  if (torch::autograd::compute_requires_grad(grad_output, grad_weights, query, key, value, score_weight,
                                             key_padding_mask, attn_mask)) {
    node = make_node<AdditiveDoubleBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output, grad_weights, query, key, value, score_weight,
                                                             key_padding_mask, attn_mask));
    node->arguments.save(arguments, score_weight);
    node->grad_output = SavedVariable(grad_output, false);
    node->grad_weights = SavedVariable(grad_weights, false);
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
