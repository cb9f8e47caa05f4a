// SPDX-License-Identifier: BSD-3-Clause
//
// What run.cpp works out once a call and hands to the kernels: derived numbers, work items, scratch sizes. The same
// for every instruction set, so nothing here is compiled by a kernel unit except plain reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dropout.h"
#include "core/inline.h"
#include "core/mask.h"
#include "core/problem.h"

namespace fused_mha::cpu {

/// Query rows of a block: the row grid of core::MaskPlan.
inline constexpr std::int64_t kBlockRows = core::kMaskTileRows;
/// Keys of a group: the key grid of core::MaskPlan, and the width of one packed stripe of keys.
inline constexpr std::int64_t kGroupKeys = core::kMaskTileKeys;
/// Keys of a forward step. 128 is also the dropout group, so that a step needs no more than its own random numbers.
inline constexpr std::int64_t kForwardKeys = 128;
/// Forward steps whose packed keys are kept at once: with values in place 256 KiB at D = 64, beside the blocks' state
/// in the L2 cache.
inline constexpr std::int64_t kPanelSteps = 8;
/// Steps that a head's keys can take. A run of kept keys may begin inside a step of the key grid: one step more than
/// its length asks for.
FUSED_MHA_INLINE constexpr std::int64_t most_forward_steps(const core::AttentionProblem& problem) {
  return problem.key_length / kForwardKeys + 2;
}
/// The same where weights are returned: a block of rows that meets all keys before the next one begins can leave its
/// weights' memory to it (benchmark row "forward averaged weights").
inline constexpr std::int64_t kWeightsPanelSteps = 16;
FUSED_MHA_INLINE constexpr bool weights_fit_one_panel(const core::AttentionProblem& problem) {
  return most_forward_steps(problem) <= kWeightsPanelSteps;
}
/// Keys of a backward step: 48 x 96 weights and their gradients are 36 KiB, next to the L1 data cache.
inline constexpr std::int64_t kBackwardKeys = 96;

/// Query rows of a head up to which nothing is packed: keys and values are used too seldom to pay for it.
inline constexpr std::int64_t kFewRows = 4;
/// Rows and keys of one owner of attn_mask's gradient: its sums fit the L2 cache, and what it packs is used often.
inline constexpr std::int64_t kMaskGradientRows = 4 * kBlockRows;
inline constexpr std::int64_t kMaskGradientKeys = 8 * kBackwardKeys;

/// Philox's key as every round sees it, wide enough to be broadcast from memory.
struct DropoutRoundKeys {
  std::uint64_t first[core::kDropoutRounds] = {};
  std::uint64_t second[core::kDropoutRounds] = {};
};

/// Numbers that all tiles of a call share.
///
/// Scores live in a unit in which exp is exp2 and sums of two finite masks stay finite: a stored score t stands for
/// the natural score t * unit * ln 2. unit is 1 where no float mask is given and 4 otherwise (finfo.min / 4 * log2(e)
/// twice is still finite).
struct CallConstants {
  const core::AttentionProblem* problem = nullptr;
  const core::MaskPlan* masks = nullptr;
  double query_factor = 1.0;  // scale * log2(e) / unit: folded into the packed queries
  double bias_factor = 1.0;   // log2(e) / unit: what a mask's number is multiplied by
  double unit = 1.0;
  bool has_dropout = false;
  DropoutRoundKeys dropout_keys;
  std::uint32_t dropout_threshold = 0;
  double dropout_scale = 1.0;
  std::int64_t blocks_per_head = 0;  // row blocks of one head
};

struct ForwardPlan {
  CallConstants call;
  core::ForwardOutputs outputs;
  std::int64_t blocks_per_item = 1;
  bool few_rows = false;         // at most kFewRows rows a head
  std::int64_t key_splits = 1;   // with few rows: parts that the keys are split into; a function of the shapes only
  void* split_states = nullptr;  // (N, H, key_splits) states to merge, null where key_splits is 1
};

/// Row blocks [block_begin, block_end) of the heads that share `kv_head`, head after head. With weights wanted, the
/// same row blocks of each of these heads; of every head of sample n if they are averaged.
struct ForwardItem {
  std::int64_t n = 0;
  std::int64_t kv_head = 0;
  std::int64_t block_begin = 0;
  std::int64_t block_end = 0;
  std::int64_t split = 0;
};

struct BackwardPlan {
  CallConstants call;
  core::BackwardInputs inputs;
  core::BackwardOutputs outputs;
  std::int64_t key_splits = 1;        // parts that a head's keys are split into; a function of the shapes only
  void* query_partials = nullptr;     // (N, Hkv, key_splits, rows, padded D) sums, null where key_splits is 1
  void* key_bias_partials = nullptr;  // (N, Hkv, S) column sums of the score gradients; null if nobody asks
  bool adds_mask_gradient = false;    // attn_mask's gradient is summed up beside the others, one sample after another
  bool begins_mask_gradient = false;  // it is not zero before: its first sample keeps every key, and so writes it all
  void* row_deltas = nullptr;         // (N, H, L) sum over s of weight * its gradient, in the accumulation type
};

/// Part `split` of the keys of (n, kv_head), against all rows of the heads that share them, for samples n to n_end.
struct BackwardItem {
  std::int64_t n = 0;
  std::int64_t n_end = 0;
  std::int64_t kv_head = 0;
  std::int64_t split = 0;
};

/// One stored row tile (and key tile) of the attn_mask's gradient: its owner sums over everything that broadcasts.
struct MaskGradientItem {
  std::int64_t n = 0;
  std::int64_t h = 0;
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
};

/// Additive scores: the attention's own plan, and v (1, H, 1, D) with stride 0 where heads share it. The problem's
/// scale is 1.
struct AdditiveForwardPlan {
  CallConstants call;
  core::View score_weight;
  core::ForwardOutputs outputs;
  std::int64_t blocks_per_item = 1;  // 1 where weights are returned
};

/// Row blocks [block_begin, block_end) of heads [head_begin, head_end): of one head, or of all where weights are
/// averaged.
struct AdditiveItem {
  std::int64_t n = 0;
  std::int64_t head_begin = 0;
  std::int64_t head_end = 0;
  std::int64_t block_begin = 0;
  std::int64_t block_end = 0;
};

struct AdditiveBackwardPlan {
  BackwardPlan attention;
  core::View score_weight;
  void* weight_partials = nullptr;  // (N, H, key_splits, padded D) sums, zero before; null if nobody asks
};

/// One instruction set's kernels for one accumulation type.
struct KernelTable {
  std::size_t (*forward_scratch)(const ForwardPlan&);
  // `next`: the item that the caller expects to work on after this one; its memory is asked for beforehand.
  void (*forward)(const ForwardPlan&, const ForwardItem&, const ForwardItem& next, std::byte* scratch);
  std::size_t (*split_state_elements)(const ForwardPlan&);  // of one (n, h, split)
  void (*merge_splits)(const ForwardPlan&, std::int64_t n, std::int64_t h, std::byte* scratch);
  std::size_t (*delta_scratch)(const BackwardPlan&);
  void (*delta)(const BackwardPlan&, std::int64_t n, std::int64_t h, std::int64_t block, std::byte* scratch);
  std::size_t (*backward_scratch)(const BackwardPlan&);
  void (*backward)(const BackwardPlan&, const BackwardItem&, const BackwardItem& next, std::byte* scratch);
  std::size_t (*partial_row_elements)(const BackwardPlan&);  // padded D
  void (*reduce_query)(const BackwardPlan&, std::int64_t n, std::int64_t h, std::int64_t block);
  std::size_t (*mask_gradient_scratch)(const BackwardPlan&);
  void (*mask_gradient)(const BackwardPlan&, const MaskGradientItem&, std::byte* scratch);
  void (*dropout_row)(const CallConstants&, std::int64_t n, std::int64_t h, std::int64_t l, bool* keep);
  std::size_t (*additive_forward_scratch)(const AdditiveForwardPlan&);
  void (*additive_forward)(const AdditiveForwardPlan&, const AdditiveItem&, std::byte* scratch);
  std::size_t (*additive_backward_scratch)(const AdditiveBackwardPlan&);  // of the next two
  void (*additive_weight_delta)(const AdditiveBackwardPlan&, std::int64_t n, std::int64_t h, std::int64_t block,
                                std::byte* scratch);
  void (*additive_backward)(const AdditiveBackwardPlan&, const BackwardItem&, std::byte* scratch);
  std::size_t (*additive_mask_gradient_scratch)(const AdditiveBackwardPlan&);
  void (*additive_mask_gradient)(const AdditiveBackwardPlan&, const MaskGradientItem&, std::byte* scratch);
};

struct IsaKernels {
  KernelTable single;         // sums in float
  KernelTable double_single;  // sums in double
  KernelTable bfloat16;       // for bfloat16 tensors, sums in float
};

const IsaKernels& kernels_generic() noexcept;
const IsaKernels& kernels_avx2() noexcept;
const IsaKernels& kernels_avx512() noexcept;
const IsaKernels& kernels_avx512bf16() noexcept;

}  // namespace fused_mha::cpu
