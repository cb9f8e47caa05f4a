// SPDX-License-Identifier: BSD-3-Clause
#include "torch/call_record.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "torch/checks.h"

namespace fused_mha::detail {
namespace {

struct Notes {
  std::vector<CallRecord> calls;
  std::array<bool, 6> gradients{};
  bool has_tangent = false;
};

std::optional<Notes>& notes_of_thread() {
  thread_local std::optional<Notes> notes;
  return notes;
}

std::string tensor_text(const OptionalTensor& tensor) {
  if (!has_tensor(tensor)) return "";
  return std::string(c10::getDtypeNames(tensor->scalar_type()).first) + " " + shape_text(tensor->sym_sizes());
}

}  // namespace

void start_call_records() { notes_of_thread().emplace(); }

std::vector<CallRecord> take_call_records() {
  auto notes = std::exchange(notes_of_thread(), std::nullopt);
  return notes ? std::move(notes->calls) : std::vector<CallRecord>{};
}

bool is_recording_calls() { return notes_of_thread().has_value(); }

CallRecord record_of(const AttentionArguments& a, const core::AttentionProblem& problem) {
  CallRecord record;
  record.device = a.query.device().str();
  record.dtype = c10::getDtypeNames(a.query.scalar_type()).first;
  record.N = problem.batch;
  record.H = problem.heads;
  record.Hkv = problem.kv_heads;
  record.L = problem.query_length;
  record.S = problem.key_length;
  record.D = problem.head_dim;
  record.Dv = problem.value_dim;
  record.always_visible_keys = problem.always_visible_keys;
  record.key_padding_mask = tensor_text(a.key_padding_mask);
  record.attn_mask = tensor_text(a.attn_mask);
  record.is_causal = a.is_causal;
  record.bottom_right = a.bottom_right;
  record.sink = tensor_text(a.sink);
  record.dropout_p = a.dropout_p;
  record.weights_mode = a.weights_mode;
  record.weights_before_dropout = a.weights_before_dropout;
  return record;
}

CallRecord record_of(const AttentionArguments& a, const at::Tensor& score_weight,
                     const core::AttentionProblem& problem) {
  auto record = record_of(a, problem);
  record.score_weight = tensor_text(score_weight);
  return record;
}

CallRecord record_of(const VarlenArguments& a, const std::vector<core::AttentionProblem>& problems) {
  CallRecord record;
  record.device = a.query.device().str();
  record.dtype = c10::getDtypeNames(a.query.scalar_type()).first;
  record.is_packed = true;
  record.N = static_cast<std::int64_t>(problems.size());
  record.H = a.query.size(1);
  record.Hkv = a.key.size(1);
  record.D = a.query.size(2);
  record.Dv = a.value.size(2);
  record.is_causal = a.is_causal;
  record.bottom_right = a.bottom_right;
  record.sink = tensor_text(a.sink);
  record.dropout_p = a.dropout_p;
  for (const auto& problem : problems) {
    record.L = std::max(record.L, problem.query_length);
    record.S = std::max(record.S, problem.key_length);
  }
  return record;
}

void note_derivatives(const std::array<bool, 6>& gradients, bool has_tangent) {
  auto& notes = notes_of_thread();
  if (!notes) return;
  notes->gradients = gradients;
  notes->has_tangent = has_tangent;
}

void note_call(CallRecord record) {
  auto& notes = notes_of_thread();
  if (!notes) return;
  record.gradients = std::exchange(notes->gradients, {});
  record.has_tangent = std::exchange(notes->has_tangent, false);
  notes->calls.push_back(std::move(record));
}

}  // namespace fused_mha::detail
