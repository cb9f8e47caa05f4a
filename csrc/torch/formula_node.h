// SPDX-License-Identifier: BSD-3-Clause
//
// An autograd node whose gradients are a formula of saved tensors, of constants, and of the incoming gradients. Eager
// mode runs the formula; compiled autograd puts a call of it into its graph and traces through it.
//
// A Formula has
//   Constants         copyable, what the formula needs beside tensors
//   kName             of the node, as anomaly detection shows it
//   kSaved, kResults  how many tensors are saved, and how many of these, the last ones, are the node's own results
//   kInputs           which of the saved tensors each edge leads to
//   kIsTraceable      whether the formula can be traced; otherwise compiled autograd leaves its graph for it
//   gradients(constants, saved, incoming, wanted)   one for each edge, undefined where it is not wanted
//   collect(args, constants)                        hands over all constants: a graph serves calls that have the same
#pragma once

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <vector>

#include "torch/arguments.h"
#include "torch/autograd_node.h"

namespace fused_mha::detail {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

template <typename Formula>
class FormulaNode : public torch::autograd::TraceableFunction {
 public:
  using Constants = typename Formula::Constants;

  /// What is known before the call; its results are saved after it.
  template <std::size_t kCount>
  void save(const Constants& constants, const std::array<OptionalTensor, kCount>& tensors) {
    static_assert(kCount + Formula::kResults == Formula::kSaved);
    constants_ = constants;
    for (std::size_t i = 0; i < kCount; ++i) saved_[i] = SavedVariable(tensors[i], /*is_output=*/false);
  }
  void save_results(const std::array<at::Tensor, Formula::kResults>& results) {
    for (std::size_t i = 0; i < results.size(); ++i) {
      saved_[kFirstResult + i] = SavedVariable(results[i], /*is_output=*/true);
    }
  }

  std::string name() const override { return Formula::kName; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& saved : saved_) saved.reset_data();
  }

  variable_list apply(variable_list&& incoming) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return gradients(constants_, unpack(), incoming, wanted());
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    for (std::size_t i = 0; i < saved_.size(); ++i) args.collect(saved_[i], i >= kFirstResult);
    Formula::collect(args, constants_);
  }

  variable_list apply_with_saved(const variable_list& incoming, torch::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    for (auto& saved : saved_) swap.before(saved);
    std::vector<at::IValue> arguments;
    for (const auto& tensor : unpack()) arguments.emplace_back(tensor);
    const std::vector<at::TypePtr> types(arguments.size(), at::TensorType::get());
    auto formula = [constants = constants_, wanted = wanted()](const variable_list& of_results,
                                                               const std::vector<at::IValue>& tensors) {
      variable_list saved;
      for (const auto& tensor : tensors) saved.push_back(tensor.toTensor());
      auto result = gradients(constants, saved, of_results, wanted);
      // Eager mode skips what is undefined; a graph adds what it is given.
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        if (wanted[i] && !result[i].defined()) result[i] = at::zeros_like(saved[Formula::kInputs[i]]);
      }
      return result;
    };
    const auto& python = compiled::getPyCompilerInterface();
    // As a custom function it gets a name of its own each time: it holds the constants of this call.
    const auto bound = python->bind_function(swap.get_py_compiler(), name(), std::move(formula), types,
                                             /*is_custom_function=*/true, Formula::kIsTraceable);
    const auto metadata = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    auto result =
        python->call_function(swap.get_py_compiler(), "apply_functional", bound, incoming, arguments, metadata);
    for (auto& saved : saved_) swap.after(saved);
    return result;
  }

 private:
  static constexpr std::size_t kFirstResult = Formula::kSaved - Formula::kResults;

  static variable_list gradients(const Constants& constants, const variable_list& saved, const variable_list& incoming,
                                 const std::vector<bool>& wanted) {
    if (std::none_of(incoming.begin(), incoming.end(), [](const auto& tensor) { return tensor.defined(); })) {
      return variable_list(wanted.size());
    }
    return Formula::gradients(constants, saved, incoming, wanted);
  }

  variable_list unpack() {
    variable_list tensors;
    tensors.reserve(saved_.size());
    for (std::size_t i = 0; i < saved_.size(); ++i) {
      tensors.push_back(i < kFirstResult ? saved_[i].unpack() : saved_[i].unpack(getptr()));
    }
    return tensors;
  }

  std::vector<bool> wanted() const {
    std::vector<bool> wanted(num_outputs());
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    return wanted;
  }

  std::array<SavedVariable, Formula::kSaved> saved_;
  Constants constants_;
};

/// The first elements of what autograd hands over as lists.
template <typename Array, typename List>
Array first_of(const List& list) {
  Array array{};
  std::copy_n(list.begin(), array.size(), array.begin());
  return array;
}

/// A list of gradients, undefined where none is wanted.
template <typename Array>
variable_list only_wanted(const Array& gradients, const std::vector<bool>& wanted) {
  variable_list list(gradients.begin(), gradients.end());
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!wanted[i]) list[i] = at::Tensor();
  }
  return list;
}

}  // namespace fused_mha::detail
