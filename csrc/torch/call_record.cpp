// SPDX-License-Identifier: BSD-3-Clause
#include "torch/call_record.h"

#include <optional>
#include <utility>

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

}  // namespace

void start_call_records() { notes_of_thread().emplace(); }

std::vector<CallRecord> take_call_records() {
  auto notes = std::exchange(notes_of_thread(), std::nullopt);
  return notes ? std::move(notes->calls) : std::vector<CallRecord>{};
}

bool is_recording_calls() { return notes_of_thread().has_value(); }

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
