// SPDX-License-Identifier: BSD-3-Clause
//
// Derivatives of _varlen_forward and _varlen_backward, in the manner of autograd.cpp. The first order is fused. Forward
// mode and the second order put each sequence into the row of a padded batch, whose mask hides what no sequence has,
// and take the unfused formulas of derivatives.h from there.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch/autograd_node.h"
#include "torch/call_record.h"
#include "torch/derivatives.h"
#include "torch/formula_node.h"
#include "torch/operators.h"
#include "torch/tangents.h"

namespace fused_mha::detail {
namespace {

using at::Tensor;
/// (total, H, X) <-> (N, H, longest, X)
class Padding {
 public:
  Padding(const Tensor& cu_seqlens, const c10::SymInt& total) {
    const auto ends = cu_seqlens.slice(0, 1).to(at::kLong);
    const auto starts = cu_seqlens.slice(0, 0, -1).to(at::kLong);
    lengths_ = ends - starts;
    if (ends.sym_numel() != 0) longest_ = lengths_.max().item().toSymInt();
    const auto positions = at::arange(longest_, lengths_.options());
    absent_ = positions >= lengths_.unsqueeze(1);
    // Where a sequence has no element some other stands, to be replaced.
    packed_index_ = (starts.unsqueeze(1) + positions).masked_fill(absent_, 0).flatten();
    const auto rows = at::arange(total, lengths_.options());
    const auto owners = at::searchsorted(ends, rows, /*out_int32=*/false, /*right=*/true);
    padded_index_ = owners * longest_ + rows - starts.index_select(0, owners);
  }

  Tensor pad(const Tensor& packed) const {
    if (!packed.defined()) return packed;
    const auto rows = packed.index_select(0, packed_index_).unflatten_symint(0, {absent_.sym_size(0), longest_});
    return rows.masked_fill(absent_.unsqueeze(-1).unsqueeze(-1), 0.0).transpose(1, 2);
  }

  Tensor unpad(const Tensor& padded) const {
    return padded.defined() ? padded.transpose(1, 2).flatten(0, 1).index_select(0, padded_index_) : padded;
  }

  const Tensor& lengths() const { return lengths_; }  // (N)
  const c10::SymInt& longest() const { return longest_; }
  const Tensor& absent() const { return absent_; }  // (N, longest), True where the sequence has ended

 private:
  c10::SymInt longest_ = 0;
  Tensor lengths_, absent_, packed_index_, padded_index_;
};

/// A varlen call as a padded one.
class PaddedCall {
 public:
  explicit PaddedCall(const VarlenArguments& a)
      : query_(a.cu_seqlens_q, a.query.sym_size(0)), key_(a.cu_seqlens_k, a.key.sym_size(0)) {
    arguments_.query = query_.pad(a.query);
    arguments_.key = key_.pad(a.key);
    arguments_.value = key_.pad(a.value);
    arguments_.dropout_p = a.dropout_p;
    arguments_.scale = a.scale;
    arguments_.rng_state = a.rng_state;
    if (has_tensor(a.sink)) arguments_.sink = a.sink->reshape({1, -1, 1, 1});
    auto hidden = query_.absent().unsqueeze(2).logical_or(key_.absent().unsqueeze(1));
    if (a.is_causal) {
      const auto rows = at::arange(query_.longest(), query_.lengths().options());
      const auto keys = at::arange(key_.longest(), query_.lengths().options());
      auto last = rows.unsqueeze(0);
      if (a.bottom_right) last = last + (key_.lengths() - query_.lengths()).unsqueeze(1);
      hidden = hidden.logical_or(keys > last.unsqueeze(2));
    }
    arguments_.attn_mask = hidden.unsqueeze(1);
  }

  const AttentionArguments& arguments() const { return arguments_; }
  const Padding& query() const { return query_; }
  const Padding& key() const { return key_; }

  BackwardArguments backward(const Tensor& grad_output) const {
    BackwardArguments result;
    result.grad_output = query_.pad(grad_output);
    return result;
  }

  /// Of query, key, value and sink, from those of the padded call.
  std::array<Tensor, 4> unpad(const std::array<Tensor, 4>& of) const {
    return {query_.unpad(of[0]), key_.unpad(of[1]), key_.unpad(of[2]), of[3].defined() ? of[3].flatten() : of[3]};
  }

  std::array<Tensor, 6> pad(const std::array<Tensor, 4>& of) const {
    return {query_.pad(of[0]), key_.pad(of[1]), key_.pad(of[2]),
            Tensor(),          Tensor(),        of[3].defined() ? of[3].reshape({1, -1, 1, 1}) : of[3]};
  }

 private:
  Padding query_, key_;
  AttentionArguments arguments_;
};

constexpr std::size_t kVarlenTensors = 7;

std::array<OptionalTensor, kVarlenTensors> tensors_of(const VarlenArguments& a) {
  return {a.query, a.key, a.value, a.cu_seqlens_q, a.cu_seqlens_k, a.rng_state, a.sink};
}

VarlenArguments without_tensors(VarlenArguments a) {
  a.query = a.key = a.value = a.cu_seqlens_q = a.cu_seqlens_k = Tensor();
  a.rng_state = a.sink = std::nullopt;
  return a;
}

/// `tensors` begin with those of tensors_of.
VarlenArguments with_tensors(VarlenArguments constants, const variable_list& tensors) {
  constants.query = tensors[0];
  constants.key = tensors[1];
  constants.value = tensors[2];
  constants.cu_seqlens_q = tensors[3];
  constants.cu_seqlens_k = tensors[4];
  constants.rng_state = optional_tensor(tensors[5]);
  constants.sink = optional_tensor(tensors[6]);
  return constants;
}

void collect_constants(torch::autograd::CompiledNodeArgs& args, const VarlenArguments& a) {
  args.collect(a.is_causal);
  args.collect(a.dropout_p);
  args.collect(a.scale);
  args.collect(a.bottom_right);
}

std::array<Tensor, 4> to_array(const VarlenBackwardResult& result) {
  return std::apply([](const auto&... tensors) { return std::array<Tensor, 4>{tensors...}; }, result);
}

/// Gradient of _varlen_backward: of grad_output, query, key, value and sink.
struct VarlenDoubleBackwardFormula {
  using Constants = VarlenArguments;
  static constexpr const char* kName = "FusedMhaVarlenBackwardBackward";
  static constexpr std::size_t kSaved = kVarlenTensors + 1;
  static constexpr std::size_t kResults = 0;
  static constexpr std::array<std::size_t, 5> kInputs{kVarlenTensors, 0, 1, 2, 6};
  static constexpr bool kIsTraceable = false;  // sizes of the padded batch depend on what cu_seqlens hold

  static variable_list gradients(const Constants& constants, const variable_list& saved,
                                 const variable_list& cotangents, const std::vector<bool>& wanted) {
    const PaddedCall padded(with_tensors(constants, saved));
    const auto of = padded.pad(first_of<std::array<Tensor, 4>>(cotangents));
    const auto result =
        unfused_double_backward(padded.arguments(), padded.backward(saved[kVarlenTensors]), of,
                                {wanted[0], false, wanted[1], wanted[2], wanted[3], false, false, wanted[4]});
    const auto [query, key, value, sink] = padded.unpad({result[2], result[3], result[4], result[7]});
    return {padded.query().unpad(result[0]), query, key, value, sink};
  }
  static void collect(torch::autograd::CompiledNodeArgs& args, const Constants& constants) {
    collect_constants(args, constants);
  }
};

/// Gradient of _varlen_forward.
struct VarlenBackwardFormula {
  using Constants = VarlenArguments;
  static constexpr const char* kName = "FusedMhaVarlenBackward";
  static constexpr std::size_t kSaved = kVarlenTensors + 3;
  static constexpr std::size_t kResults = 3;  // output, row_max, row_sum
  static constexpr std::array<std::size_t, 4> kInputs{0, 1, 2, 6};
  static constexpr bool kIsTraceable = true;

  static variable_list gradients(const Constants& constants, const variable_list& saved, const variable_list& incoming,
                                 const std::vector<bool>& wanted) {
    if (!incoming[0].defined()) return variable_list(wanted.size());
    const VarlenBackwardArguments backward{incoming[0], saved[kVarlenTensors], saved[kVarlenTensors + 1],
                                           saved[kVarlenTensors + 2]};
    const auto mask = first_of<VarlenGradientMask>(wanted);
    return only_wanted(to_array(call_varlen_backward(with_tensors(constants, saved), backward, mask)), wanted);
  }
  static void collect(torch::autograd::CompiledNodeArgs& args, const Constants& constants) {
    collect_constants(args, constants);
  }
};

bool has_tangent(const VarlenArguments& a) {
  using torch::autograd::isFwGradDefined;
  return isFwGradDefined(a.query) || isFwGradDefined(a.key) || isFwGradDefined(a.value) || isFwGradDefined(a.sink);
}

VarlenForwardResult varlen_forward_autograd(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                                            const Tensor& value, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                            bool is_causal, double dropout_p, double scale,
                                            const OptionalTensor& rng_state, bool bottom_right,
                                            const OptionalTensor& sink) {
  const VarlenArguments arguments{query,     key,   value,     cu_seqlens_q, cu_seqlens_k, is_causal,
                                  dropout_p, scale, rng_state, bottom_right, sink};
  using torch::autograd::compute_requires_grad;
  decltype(make_node<FormulaNode<VarlenBackwardFormula>>()) node;
  if (compute_requires_grad(query, key, value, sink)) {
    node = make_node<FormulaNode<VarlenBackwardFormula>>();
    node->set_next_edges(torch::autograd::collect_next_edges(query, key, value, sink));
    node->save(without_tensors(arguments), tensors_of(arguments));
  }
  if (is_recording_calls()) {
    note_derivatives({compute_requires_grad(query), compute_requires_grad(key), compute_requires_grad(value), false,
                      false, compute_requires_grad(sink)},
                     has_tangent(arguments));
  }
  auto result = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return varlen_forward_operator().redispatch(keys & c10::after_autograd_keyset, query, key, value, cu_seqlens_q,
                                                cu_seqlens_k, is_causal, dropout_p, scale, rng_state, bottom_right,
                                                sink);
  }();
  const auto& [output, row_max, row_sum] = result;
  if (node) {
    torch::autograd::set_history(output, node);
    node->save_results({output, row_max, row_sum});
    announce_node(node);
  }
  if (has_tangent(arguments)) {
    auto primals = arguments;
    for (auto* tensor : {&primals.query, &primals.key, &primals.value}) *tensor = tensor->_fw_primal(/*level=*/0);
    primals.sink = primal_of(sink);
    const PaddedCall padded(primals);
    const auto tangents = forward_tangents(
        padded.arguments(), padded.pad({tangent_of(query), tangent_of(key), tangent_of(value), tangent_of(sink)}));
    set_tangent(output, padded.query().unpad(tangents[0]));
  }
  return result;
}

VarlenBackwardResult varlen_backward_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Tensor& query,
                                              const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                                              const Tensor& cu_seqlens_k, const Tensor& output, const Tensor& row_max,
                                              const Tensor& row_sum, bool is_causal, double dropout_p, double scale,
                                              const OptionalTensor& rng_state, bool bottom_right,
                                              const OptionalTensor& sink, VarlenGradientMask output_mask) {
  const VarlenArguments arguments{query,     key,   value,     cu_seqlens_q, cu_seqlens_k, is_causal,
                                  dropout_p, scale, rng_state, bottom_right, sink};
  decltype(make_node<FormulaNode<VarlenDoubleBackwardFormula>>()) node;
  // output, row_max and row_sum are functions of the other arguments, and their derivatives are part of those'.
  if (torch::autograd::compute_requires_grad(grad_output, query, key, value, sink)) {
    node = make_node<FormulaNode<VarlenDoubleBackwardFormula>>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output, query, key, value, sink));
    const auto [q, k, v, starts_q, starts_k, state, own_sink] = tensors_of(arguments);
    node->save(without_tensors(arguments), std::array<OptionalTensor, kVarlenTensors + 1>{
                                               q, k, v, starts_q, starts_k, state, own_sink, grad_output});
  }
  auto result = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return varlen_backward_operator().redispatch(keys & c10::after_autograd_keyset, grad_output, query, key, value,
                                                 cu_seqlens_q, cu_seqlens_k, output, row_max, row_sum, is_causal,
                                                 dropout_p, scale, rng_state, bottom_right, sink, output_mask);
  }();
  const auto gradients = to_array(result);
  if (node) {
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      torch::autograd::set_history(output_mask[i] ? gradients[i] : Tensor(), node);
    }
    announce_node(node);
  }
  if (has_tangent(arguments) || torch::autograd::isFwGradDefined(grad_output)) {
    const PaddedCall padded(arguments);
    const auto dual = unfused_backward(padded.arguments(), padded.backward(grad_output),
                                       {output_mask[0], output_mask[1], output_mask[2], false, false, output_mask[3]});
    const auto unpadded = padded.unpad({dual[0], dual[1], dual[2], dual[5]});
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      set_tangent(gradients[i], tangent_of(optional_tensor(unpadded[i])));
    }
  }
  return result;
}

}  // namespace
}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, Autograd, library) {
  library.impl("_varlen_forward", &fused_mha::detail::varlen_forward_autograd);
  library.impl("_varlen_backward", &fused_mha::detail::varlen_backward_autograd);
}
