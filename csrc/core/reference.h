// SPDX-License-Identifier: BSD-3-Clause
//
// Attention by its formulas, in double, element by element: what every kernel is tested against. Slow on purpose; one
// obvious loop for each sum, masks asked from core/mask.h one element at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "core/problem.h"

namespace fused_mha::core {

struct ReferenceForward {
  std::vector<double> output;         // (N, H, L, Dv)
  std::vector<double> weights;        // (N, H, L, S), after dropout
  std::vector<double> probabilities;  // (N, H, L, S), before dropout
  std::vector<double> sink_weights;   // (N, H, L); 0 without a sink
  std::vector<double> log_sum_exp;    // (N, H, L); -inf where neither key nor sink is seen
};

/// Scores that are hidden are never computed; a row without visible keys is 0.
ReferenceForward reference_forward(const AttentionProblem& problem);

struct ReferenceBackward {
  std::vector<double> grad_query;             // (N, H, L, D)
  std::vector<double> grad_key;               // (N, Hkv, S, D)
  std::vector<double> grad_value;             // (N, Hkv, S, Dv)
  std::vector<double> grad_scores;            // (N, H, L, S): attn_mask's gradient before it is summed
  std::vector<double> grad_key_padding_mask;  // (N, S - always_visible_keys)
  std::vector<double> grad_sink;              // (N, H), before it is summed
};

/// Reads the gradients among `inputs`; null data means zero.
ReferenceBackward reference_backward(const AttentionProblem& problem, const BackwardInputs& inputs);

}  // namespace fused_mha::core
