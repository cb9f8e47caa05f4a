// SPDX-License-Identifier: BSD-3-Clause
//
// The CPU kernels' doors. Each runs one whole call on the instruction set that cpu::active_isa() names.
//
// Sums are kept in float (double for float64 inputs) and rounded once. The same problem gives the same bits on one
// instruction set, whatever `parallel` does. Sizes of 0 are legal. A row that sees no key gets output 0, weights 0,
// gradient 0. Nothing hidden is read into a sum. Thread safe. Inputs must agree with the shapes that
// core/problem.h states; nothing is checked here.
#pragma once

#include <cstdint>
#include <span>

#include "core/parallel.h"
#include "core/problem.h"
#include "cpu/isa.h"

namespace fused_mha::cpu {

/// Tiled online-softmax attention (Milakov and Gimelshein 2018; Dao et al., "FlashAttention", 2022).
void attention_forward(const core::AttentionProblem& problem, const core::ForwardOutputs& outputs,
                       const core::Parallel& parallel);

/// Gradients of the above by recomputation of the weights tile by tile (FlashAttention, section 3.2 and appendix B).
void attention_backward(const core::AttentionProblem& problem, const core::BackwardInputs& inputs,
                        const core::BackwardOutputs& outputs, const core::Parallel& parallel);

/// The same with additive scores, score = sum_d score_weight[h][d] tanh(query[l][d] + key[s][d]), instead of dot
/// products; problem.scale is 1. score_weight (1, H, 1, D) has the dtype of query and stride 0 where heads share it. No
/// exponential for a pair of query and key: see tile_additive.h.
void additive_attention_forward(const core::AttentionProblem& problem, const core::View& score_weight,
                                const core::ForwardOutputs& outputs, const core::Parallel& parallel);

/// `grad_score_weight` like score_weight; null data where nobody needs it.
void additive_attention_backward(const core::AttentionProblem& problem, const core::View& score_weight,
                                 const core::BackwardInputs& inputs, const core::BackwardOutputs& outputs,
                                 const core::MutableView& grad_score_weight, const core::Parallel& parallel);

/// Several problems of one dtype as one call, such as the sequences of a packed batch: threads share the work of all.
/// Each has the results that it would have alone.
void attention_forward(std::span<const core::AttentionProblem> problems, std::span<const core::ForwardOutputs> outputs,
                       const core::Parallel& parallel);
void attention_backward(std::span<const core::AttentionProblem> problems, std::span<const core::BackwardInputs> inputs,
                        std::span<const core::BackwardOutputs> outputs, const core::Parallel& parallel);

/// What attention_forward chooses for a problem, and what the masks leave of it.
struct ForwardDescription {
  Isa isa = Isa::kGeneric;
  bool few_rows = false;              // nothing is packed, keys are read where they lie
  std::int64_t few_rows_limit = 0;    // rows a head up to which that is so
  std::int64_t key_splits = 1;        // parts that few rows' keys are split into
  std::int64_t work_items = 0;        // what threads pull
  int threads = 1;                    // that take part
  double multiply_adds = 0.0;         // of the whole problem, as if nothing were hidden
  double serial_multiply_adds = 0.0;  // below which one thread takes all
  std::int64_t kept_keys = 0;         // key_padding_mask leaves, of all samples
  std::int64_t all_keys = 0;          // N * S
  bool has_padding_bias = false;      // key_padding_mask adds finite numbers
  std::int64_t tile_rows = 0;         // of a tile of the counts below
  std::int64_t tile_keys = 0;
  std::int64_t hidden_tiles = 0;  // skipped
  std::int64_t free_tiles = 0;    // no mask is read
  std::int64_t mixed_tiles = 0;   // masks are read element by element
  std::int64_t backward_key_splits = 1;
};

/// The description of attention_forward(problem, ..., parallel) with weights returned as `weights_mode` says. Reads the
/// masks; computes no attention.
ForwardDescription describe_forward(const core::AttentionProblem& problem, core::WeightsMode weights_mode,
                                    const core::Parallel& parallel);

/// The same for several problems as one call: sums of the counts, few_rows where all have few, the most splits.
ForwardDescription describe_forward(std::span<const core::AttentionProblem> problems, core::WeightsMode weights_mode,
                                    const core::Parallel& parallel);

/// keep (N, H, L, S) contiguous, one byte an element: what core/dropout.h decides for problem.rng and dropout_p.
void dropout_mask(const core::AttentionProblem& problem, bool* keep, const core::Parallel& parallel);

}  // namespace fused_mha::cpu
