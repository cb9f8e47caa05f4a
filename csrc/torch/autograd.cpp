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
#include "torch/operators.h"
#include "torch/tangents.h"

namespace fused_mha::detail {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::TraceableFunction;
using torch::autograd::variable_list;

/// AttentionArguments as a node keeps them.
class SavedArguments {
 public:
  void save(const AttentionArguments& arguments) {
    query_ = SavedVariable(arguments.query, false);
    key_ = SavedVariable(arguments.key, false);
    value_ = SavedVariable(arguments.value, false);
    key_padding_mask_ = SavedVariable(arguments.key_padding_mask, false);
    attn_mask_ = SavedVariable(arguments.attn_mask, false);
    sink_ = SavedVariable(arguments.sink, false);
    rng_state_ = SavedVariable(arguments.rng_state, false);
    scalars_ = arguments;
    scalars_.query = scalars_.key = scalars_.value = at::Tensor();
    scalars_.key_padding_mask = scalars_.attn_mask = scalars_.sink = scalars_.rng_state = std::nullopt;
  }

  AttentionArguments unpack() const {
    auto arguments = scalars_;
    arguments.query = query_.unpack();
    arguments.key = key_.unpack();
    arguments.value = value_.unpack();
    arguments.key_padding_mask = optional_tensor(key_padding_mask_.unpack());
    arguments.attn_mask = optional_tensor(attn_mask_.unpack());
    arguments.sink = optional_tensor(sink_.unpack());
    arguments.rng_state = optional_tensor(rng_state_.unpack());
    return arguments;
  }

  void release() {
    for (auto* saved : {&query_, &key_, &value_, &key_padding_mask_, &attn_mask_, &sink_, &rng_state_}) {
      saved->reset_data();
    }
  }

 private:
  SavedVariable query_, key_, value_, key_padding_mask_, attn_mask_, sink_, rng_state_;
  AttentionArguments scalars_;  // its tensors are left empty
};

/// One for each result that is differentiable, undefined where it is not wanted.
template <std::size_t kCount>
variable_list to_list(const std::array<at::Tensor, kCount>& tensors) {
  return {tensors.begin(), tensors.end()};
}

std::array<at::Tensor, 6> to_array(const BackwardResult& result) {
  return std::apply([](const auto&... tensors) { return std::array<at::Tensor, 6>{tensors...}; }, result);
}

/// Gradient of _attention_backward.
struct AttentionDoubleBackward : public TraceableFunction {
  SavedArguments arguments;
  SavedVariable grad_output;
  SavedVariable grad_weights;

  std::string name() const override { return "FusedMhaAttentionBackwardBackward"; }

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
    return to_list(unfused_double_backward(arguments.unpack(), backward, of, wanted));
  }
};

/// Gradient of _attention_forward.
struct AttentionBackward : public TraceableFunction {
  SavedArguments arguments;
  SavedVariable output;
  SavedVariable row_max;
  SavedVariable row_sum;

  std::string name() const override { return "FusedMhaAttentionBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    arguments.release();
    for (auto* saved : {&output, &row_max, &row_sum}) saved->reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    GradientMask wanted{};
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    if (!gradients[0].defined() && !gradients[1].defined()) return variable_list(wanted.size());
    const BackwardArguments backward{optional_tensor(gradients[0]), optional_tensor(gradients[1]),
                                     output.unpack(getptr()), row_max.unpack(getptr()), row_sum.unpack(getptr())};
    auto result = to_array(call_backward(arguments.unpack(), backward, wanted));
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (!wanted[i]) result[i] = at::Tensor();
    }
    return to_list(result);
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
  decltype(make_node<AttentionBackward>()) node;
  if (torch::autograd::compute_requires_grad(query, key, value, key_padding_mask, attn_mask, sink)) {
    node = make_node<AttentionBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(query, key, value, key_padding_mask, attn_mask, sink));
    node->arguments.save(arguments);
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
    node->output = SavedVariable(output, true);
    node->row_max = SavedVariable(row_max, true);
    node->row_sum = SavedVariable(row_sum, true);
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
  decltype(make_node<AttentionDoubleBackward>()) node;
  // output, row_max and row_sum are functions of the other arguments, and their derivatives are part of those'.
  if (torch::autograd::compute_requires_grad(grad_output, grad_weights, query, key, value, key_padding_mask, attn_mask,
                                             sink)) {
    node = make_node<AttentionDoubleBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output, grad_weights, query, key, value,
                                                             key_padding_mask, attn_mask, sink));
    node->arguments.save(arguments);
    node->grad_output = SavedVariable(grad_output, false);
    node->grad_weights = SavedVariable(grad_weights, false);
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
