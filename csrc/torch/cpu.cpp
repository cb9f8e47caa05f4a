// SPDX-License-Identifier: BSD-3-Clause
//
// The CPU kernels of the operators: check, allocate, run.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/run.h"
#include "torch/call_record.h"
#include "torch/checks.h"
#include "torch/huge_pages.h"
#include "torch/operators.h"
#include "torch/outputs.h"
#include "torch/to_problem.h"

namespace fused_mha::detail {
namespace {

/// PyTorch's own threads: at::set_num_threads holds, and a call from inside a parallel region stays serial.
core::Parallel torch_threads() {
  core::Parallel parallel;
  parallel.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  parallel.run = [](int workers, const std::function<void(int)>& body) {
    at::parallel_for(0, workers, 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto worker = begin; worker < end; ++worker) body(static_cast<int>(worker));
    });
  };
  return parallel;
}

ForwardResult attention_forward_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                    const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                    bool is_causal, double dropout_p, double scale, const OptionalTensor& rng_state,
                                    c10::SymInt always_visible_keys, std::int64_t weights_mode, bool bottom_right,
                                    const OptionalTensor& sink, bool weights_before_dropout) {
  const AttentionArguments arguments{query,        key,
                                     value,        key_padding_mask,
                                     attn_mask,    is_causal,
                                     dropout_p,    scale,
                                     rng_state,    always_visible_keys,
                                     weights_mode, bottom_right,
                                     sink,         weights_before_dropout};
  check_forward("_attention_forward", arguments);
  auto result = allocate_forward(arguments);
  advise_huge_pages(result);
  const auto problem = to_problem(arguments);
  if (is_recording_calls()) {
    auto record = record_of(arguments, problem);
    record.cpu = cpu::describe_forward(problem, kernel_weights_mode(arguments), torch_threads());
    note_call(std::move(record));
  }
  cpu::attention_forward(problem, to_outputs(arguments, result), torch_threads());
  return result;
}

BackwardResult attention_backward_cpu(const OptionalTensor& grad_output, const OptionalTensor& grad_weights,
                                      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                      const at::Tensor& output, const at::Tensor& row_max, const at::Tensor& row_sum,
                                      bool is_causal, double dropout_p, double scale, const OptionalTensor& rng_state,
                                      c10::SymInt always_visible_keys, std::int64_t weights_mode,
                                      GradientMask output_mask, bool bottom_right, const OptionalTensor& sink,
                                      bool weights_before_dropout) {
  const AttentionArguments arguments{query,        key,
                                     value,        key_padding_mask,
                                     attn_mask,    is_causal,
                                     dropout_p,    scale,
                                     rng_state,    always_visible_keys,
                                     weights_mode, bottom_right,
                                     sink,         weights_before_dropout};
  const BackwardArguments backward{grad_output, grad_weights, output, row_max, row_sum};
  check_backward("_attention_backward", arguments, backward, output_mask);
  auto result = allocate_backward(arguments, output_mask);
  advise_huge_pages(result);
  cpu::attention_backward(to_problem(arguments), to_backward_inputs(arguments, backward),
                          to_backward_outputs(result, output_mask), torch_threads());
  return result;
}

ForwardResult additive_attention_forward_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             const at::Tensor& score_weight, const OptionalTensor& key_padding_mask,
                                             const OptionalTensor& attn_mask, bool is_causal, double dropout_p,
                                             const OptionalTensor& rng_state, std::int64_t weights_mode) {
  const auto arguments =
      additive_arguments(query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p, rng_state, weights_mode);
  check_additive_forward("_additive_attention_forward", arguments, score_weight);
  auto result = allocate_forward(arguments);
  advise_huge_pages(result);
  const auto problem = to_problem(arguments);
  if (is_recording_calls()) {
    auto record = record_of(arguments, score_weight, problem);
    record.cpu = cpu::describe_forward(problem, kernel_weights_mode(arguments), torch_threads());
    note_call(std::move(record));
  }
  cpu::additive_attention_forward(problem, to_score_weight(score_weight), to_outputs(arguments, result),
                                  torch_threads());
  return result;
}

AdditiveBackwardResult additive_attention_backward_cpu(
    const OptionalTensor& grad_output, const OptionalTensor& grad_weights, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& score_weight,
    const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask, const at::Tensor& output,
    const at::Tensor& row_max, const at::Tensor& row_sum, bool is_causal, double dropout_p,
    const OptionalTensor& rng_state, std::int64_t weights_mode, AdditiveGradientMask output_mask) {
  const auto arguments =
      additive_arguments(query, key, value, key_padding_mask, attn_mask, is_causal, dropout_p, rng_state, weights_mode);
  const BackwardArguments backward{grad_output, grad_weights, output, row_max, row_sum};
  check_additive_backward("_additive_attention_backward", arguments, score_weight, backward, output_mask);
  auto result = allocate_additive_backward(arguments, score_weight, output_mask);
  advise_huge_pages(result);
  const auto& [grad_query, grad_key, grad_value, grad_score_weight, grad_padding, grad_mask] = result;
  cpu::additive_attention_backward(to_problem(arguments), to_score_weight(score_weight),
                                   to_backward_inputs(arguments, backward),
                                   to_backward_outputs({grad_query, grad_key, grad_value, grad_padding, grad_mask, {}},
                                                       without_score_weight(output_mask)),
                                   to_grad_score_weight(grad_score_weight, output_mask[3]), torch_threads());
  return result;
}

constexpr const char* kVarlen = "attention_varlen";

VarlenForwardResult varlen_forward_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, bool is_causal,
                                       double dropout_p, double scale, const OptionalTensor& rng_state,
                                       bool bottom_right, const OptionalTensor& sink) {
  const VarlenArguments arguments{query,     key,   value,     cu_seqlens_q, cu_seqlens_k, is_causal,
                                  dropout_p, scale, rng_state, bottom_right, sink};
  check_varlen_forward(kVarlen, arguments);
  auto result = allocate_varlen_forward(arguments);
  advise_huge_pages(result);
  const auto forward = to_varlen_forward(kVarlen, arguments, result);
  if (is_recording_calls()) {
    auto record = record_of(arguments, forward.problems);
    record.cpu = cpu::describe_forward(forward.problems, core::WeightsMode::kNone, torch_threads());
    note_call(std::move(record));
  }
  cpu::attention_forward(forward.problems, forward.outputs, torch_threads());
  return result;
}

VarlenBackwardResult varlen_backward_cpu(const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key,
                                         const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                                         const at::Tensor& cu_seqlens_k, const at::Tensor& output,
                                         const at::Tensor& row_max, const at::Tensor& row_sum, bool is_causal,
                                         double dropout_p, double scale, const OptionalTensor& rng_state,
                                         bool bottom_right, const OptionalTensor& sink,
                                         VarlenGradientMask output_mask) {
  const VarlenArguments arguments{query,     key,   value,     cu_seqlens_q, cu_seqlens_k, is_causal,
                                  dropout_p, scale, rng_state, bottom_right, sink};
  const VarlenBackwardArguments backward{grad_output, output, row_max, row_sum};
  check_varlen_backward(kVarlen, arguments, backward, output_mask);
  auto result = allocate_varlen_backward(arguments, output_mask);
  advise_huge_pages(result);
  const auto problems = to_varlen_backward(kVarlen, arguments, backward, result, output_mask);
  cpu::attention_backward(problems.problems, problems.inputs, problems.outputs, torch_threads());
  auto& grad_sink = std::get<3>(result);
  if (output_mask[3]) grad_sink = grad_sink.sum(0).to(sink->scalar_type());
  return result;
}

at::Tensor dropout_mask_cpu(const at::Tensor& rng_state, std::int64_t batch, std::int64_t heads,
                            std::int64_t query_length, std::int64_t key_length, double dropout_p) {
  check_dropout_mask("dropout_mask", rng_state, {batch, heads, query_length, key_length}, dropout_p);
  auto keep = at::empty({batch, heads, query_length, key_length}, rng_state.options().dtype(at::kBool));
  if (keep.numel() == 0) return keep;
  auto problem = to_dropout_problem(keep.sizes(), dropout_p);
  problem.rng = rng_state_of(rng_state);
  cpu::dropout_mask(problem, keep.mutable_data_ptr<bool>(), torch_threads());
  return keep;
}

}  // namespace
}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, CPU, library) {
  library.impl("_attention_forward", &fused_mha::detail::attention_forward_cpu);
  library.impl("_attention_backward", &fused_mha::detail::attention_backward_cpu);
  library.impl("_additive_attention_forward", &fused_mha::detail::additive_attention_forward_cpu);
  library.impl("_additive_attention_backward", &fused_mha::detail::additive_attention_backward_cpu);
  library.impl("_varlen_forward", &fused_mha::detail::varlen_forward_cpu);
  library.impl("_varlen_backward", &fused_mha::detail::varlen_backward_cpu);
  library.impl("dropout_mask", &fused_mha::detail::dropout_mask_cpu);
}
