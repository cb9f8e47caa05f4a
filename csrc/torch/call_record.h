// SPDX-License-Identifier: BSD-3-Clause
//
// What attention calls chose, noted for fused_mha.explain. The kernels' doors note their own calls, with the plan that
// they are about to run, so that an explanation cannot differ from what happens. Notes belong to the thread that asked
// for them; where nobody asked, a door pays for one look at a thread-local variable.
#pragma once

#include <ATen/core/Tensor.h>
#include <fused_mha/export.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/run.h"

namespace fused_mha::detail {

struct AttentionArguments;
struct VarlenArguments;

/// One call of _attention_forward, _varlen_forward or _additive_attention_forward. Masks, sink and score_weight are ""
/// where none was given, else dtype and shape.
struct CallRecord {
  std::string device;
  std::string dtype;
  bool is_packed = false;  // attention_varlen: L and S are those of the longest sequences
  std::int64_t N = 0, H = 0, Hkv = 0, L = 0, S = 0, D = 0, Dv = 0;
  std::int64_t always_visible_keys = 0;
  std::string key_padding_mask;
  std::string attn_mask;
  bool is_causal = false;
  bool bottom_right = false;
  std::string sink;
  std::string score_weight;  // of additive attention, which has no sink
  double dropout_p = 0.0;
  std::int64_t weights_mode = 0;  // core::WeightsMode or kLogSumExp
  bool weights_before_dropout = false;
  // query, key, value, key_padding_mask, attn_mask, and sink or score_weight: those that autograd will ask for
  std::array<bool, 6> gradients{};
  bool has_tangent = false;     // a forward-mode derivative is computed beside, unfused
  cpu::ForwardDescription cpu;  // of a call on the CPU; of an additive one what it says of the masks holds
  // Of a call on a CUDA device: why forward and backward do not run on tensor cores; "" where they do.
  std::string cuda_forward_refusal;
  std::string cuda_backward_refusal;
};

/// The calling thread notes its calls from now on; those noted before are forgotten.
FUSED_MHA_API void start_call_records();

/// Ends it. The calls since then.
FUSED_MHA_API std::vector<CallRecord> take_call_records();

bool is_recording_calls();

/// All of a record that does not depend on the kernels.
CallRecord record_of(const AttentionArguments& arguments, const core::AttentionProblem& problem);
/// One record for all sequences, with the sizes of the longest.
CallRecord record_of(const VarlenArguments& arguments, const std::vector<core::AttentionProblem>& problems);
CallRecord record_of(const AttentionArguments& arguments, const at::Tensor& score_weight,
                     const core::AttentionProblem& problem);

/// What autograd found about the call that this thread is about to make.
void note_derivatives(const std::array<bool, 6>& gradients, bool has_tangent);

/// The call itself; what note_derivatives said goes into it.
void note_call(CallRecord record);

}  // namespace fused_mha::detail
