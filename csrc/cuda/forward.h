// SPDX-License-Identifier: BSD-3-Clause
//
// Forward attention (Dao, "FlashAttention-2", 2023, algorithm 1): a thread block has kRows queries of one head and
// walks over the keys that any of them sees.
//
//   query (N, H, L, D), key (N, Hkv, S, D), value (N, Hkv, S, Dv), output (N, H, L, Dv)
//
//   for each visible tile of keys:
//     t = query_factor Q K^T + masks;  P, m, sum = online softmax;  O = O shrink + keep(P) V
//   output = O / (sum (1 - p));  row_max = m, row_sum = sum
//
// With splits > 1 a block has one part of the keys, leaves O, m and sum in the workspace, and merge_splits_kernel makes
// the output of them: sum over parts of exp2(unit (m_part - m)) O_part. A row that sees no key gets output 0, m = -inf,
// sum = 0. The order of sums depends on the shapes and the number of splits alone.
#pragma once

#include "cuda/dropout_bits.h"
#include "cuda/masks.h"
#include "cuda/online_softmax.h"

namespace fused_mha::cuda {

struct ForwardCall {
  Call call;
  core::ForwardOutputs outputs;
  int row_tiles = 1;
  int parts = 1;          // of the columns of the output
  int splits = 1;         // of the keys
  int keys_of_split = 0;  // a multiple of 64
  // With splits > 1, [splits][N * H * L] each, in the type of sums; split_outputs [splits][N * H * L][Dv].
  void* split_outputs = nullptr;
  void* split_max = nullptr;
  void* split_sum = nullptr;
};

template <typename Sum>
__device__ __forceinline__ void store_log_sum_exp(const ForwardCall& forward, std::int64_t n, std::int64_t h,
                                                  std::int64_t l, Sum value) {
  const core::MutableView& to = forward.outputs.log_sum_exp;
  if (to) store_rounded(to.data, to.dtype, to.offset(n, h, l, 0), value);
}

template <typename Tiles>
struct ForwardMemory {
  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + Tiles::kRowTileBytes;
  static constexpr int kValues = kKeys + Tiles::kColumnTileBytes;
  static constexpr int kScratch = kValues + Tiles::kColumnTileBytes;
  static constexpr int bytes(bool has_masks) { return kScratch + Tiles::scratch_bytes(has_masks); }
};

/// One tile of rows, from `place.query_begin` on, against the keys of a split, and one part of its output. False, with
/// nothing written, where a hidden element may have met an infinity or NaN of `value` and Tiles cannot keep them apart.
template <typename Tiles>
__device__ __forceinline__ bool attend(const ForwardCall& forward, TilePlace place, int split, int part,
                                       unsigned char* memory) {
  using Sum = typename Tiles::Sum;
  using Memory = ForwardMemory<Tiles>;
  const Call& call = forward.call;
  const core::AttentionProblem& problem = call.problem;
  const int kv_head = place.h / call.sizes.group;
  Tiles tiles(memory + Memory::kScratch);
  const Factors<Sum>& factors = factors_of<Sum>(call);
  const core::PhiloxKey dropout = dropout_key(call);
  typename Tiles::RowTile queries(
      matrix_of<Tiles>(problem.query, place.n, place.h, call.sizes.queries, call.sizes.head_dim),
      memory + Memory::kQueries);
  typename Tiles::ColumnTile keys(matrix_of<Tiles>(problem.key, place.n, kv_head, call.sizes.keys, call.sizes.head_dim),
                                  memory + Memory::kKeys);
  typename Tiles::ColumnTile values(
      matrix_of<Tiles>(problem.value, place.n, kv_head, call.sizes.keys, call.sizes.value_dim),
      memory + Memory::kValues);

  const int first_key = split * forward.keys_of_split;
  const int last_key =
      forward.keys_of_split < call.sizes.keys - first_key ? first_key + forward.keys_of_split : call.sizes.keys;
  TileSchedule<Tiles, false> schedule(call, place, first_key / Tiles::kColumns,
                                      (last_key + Tiles::kColumns - 1) / Tiles::kColumns);
  OnlineSoftmax<Tiles> softmax;
  if (split == 0) softmax.begin_with_sink(call, factors, place.n, place.h);
  DropoutGroup<Tiles> dropout_group;
  typename Tiles::Output output;
  output.clear();

  TileStep step = schedule.next();
  queries.request(place.query_begin);
  if (step.exists()) keys.request(step.index * Tiles::kColumns);
  Tiles::commit();
  while (step.exists()) {
    const TileStep next = schedule.next();
    place.key_begin = step.index * Tiles::kColumns;
    Tiles::arrive();  // keys; and the values of the tile before are done with
    values.request(place.key_begin);
    Tiles::commit();

    typename Tiles::Scores scores;
    std::uint32_t visible[Tiles::kRowSlots];
    tiles.multiply(scores, queries, keys, 0);
    mask_scores<Tiles, false>(call, factors, place, step.kind, scores, visible, tiles.stages());
    softmax.add(call, factors, scores, output);
    if (call.has_dropout) {
      std::uint32_t keep[Tiles::kRowSlots];
      dropout_group.keep(call, dropout, place, keep);
#pragma unroll
      for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
#pragma unroll
        for (int c = 0; c < Tiles::kColumnSlots; ++c) {
          if (((keep[slot] >> c) & 1U) == 0) scores.at(slot, c) = Sum{0};
        }
      }
    }
    typename Tiles::Operand weights = Tiles::operand_of(scores);
    const bool look = step.kind != TileKind::kFree;
    if (tiles.arrive_and_look(look, 0, values)) return false;
    if (next.exists()) keys.request(next.index * Tiles::kColumns);
    Tiles::commit();
    tiles.accumulate(output, weights, visible, look, values, 0, part);
    step = next;
  }
  Tiles::arrive();  // no copy may outlive the block's use of shared memory
  softmax.finish();

  const bool is_split = forward.splits > 1;
  const std::int64_t all_rows = problem.batch * problem.heads * problem.query_length;
  const std::int64_t first_row = row_index(call.sizes, place.n, place.h, place.query_begin);
  if (part == 0) {
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      const int l = place.query_begin + Tiles::row(slot);
      if (l >= call.sizes.queries || Tiles::column(0) != 0) continue;
      const std::int64_t at = (is_split ? split * all_rows : 0) + first_row + Tiles::row(slot);
      static_cast<Sum*>(is_split ? forward.split_max : forward.outputs.row_max)[at] = softmax.row_max[slot];
      static_cast<Sum*>(is_split ? forward.split_sum : forward.outputs.row_sum)[at] = softmax.row_sum[slot];
      if (!is_split) {
        store_log_sum_exp(forward, place.n, place.h, l,
                          log_sum_exp_of(factors, softmax.row_max[slot], softmax.row_sum[slot]));
      }
    }
  }
  if (is_split) {
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      const int row = Tiles::row(slot);
      if (place.query_begin + row >= call.sizes.queries) continue;
      Sum* to = static_cast<Sum*>(forward.split_outputs) + (split * all_rows + first_row + row) * call.sizes.value_dim;
#pragma unroll
      for (int c = 0; c < Tiles::kOutputSlots; ++c) {
        const int at = part * Tiles::kOutput + Tiles::column(c);
        if (at < call.sizes.value_dim) to[at] = output.at(slot, c);
      }
    }
  } else {
    Tiles::store(output, forward.outputs.output, place.n, place.h, place.query_begin, call.sizes.queries, part,
                 call.sizes.value_dim, [&](int slot) {
                   const Sum sum = softmax.row_sum[slot];
                   return sum == Sum{0} ? Sum{0} : factors.dropout_scale * reciprocal_of(sum);
                 });
  }
  return true;
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    attention_forward_kernel(const __grid_constant__ ForwardCall forward) {
  BlockIndex block;
  const int split = block.take(forward.splits);
  const int part = block.take(forward.parts);
  int row_tile = block.take(forward.row_tiles);
  // Under causality the last rows see the most keys: they start first.
  if (forward.call.problem.is_causal) row_tile = forward.row_tiles - 1 - row_tile;
  TilePlace place;
  place.h = block.take(forward.call.sizes.heads);
  place.n = block.rest();
  place.query_begin = row_tile * Tiles::kRows;
  auto* memory = dynamic_shared<unsigned char>();
  if (attend<Tiles>(forward, place, split, part, memory)) return;
  in_careful_parts<Tiles>(place.query_begin, part, [&]<typename Careful>(int first_row, int careful_part) {
    place.query_begin = first_row;
    attend<Careful>(forward, place, split, careful_part, memory);
  });
}

inline constexpr int kMergeWarps = 4;

/// A warp a row.
template <typename Sum>
__global__ void __launch_bounds__(kMergeWarps* kWarpSize, 4)
    merge_splits_kernel(const __grid_constant__ ForwardCall forward) {
  const core::AttentionProblem& problem = forward.call.problem;
  const Factors<Sum>& factors = factors_of<Sum>(forward.call);
  const std::int64_t all_rows = problem.batch * problem.heads * problem.query_length;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kMergeWarps + threadIdx.x / kWarpSize;
  if (row >= all_rows) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const auto* split_max = static_cast<const Sum*>(forward.split_max);
  const auto* split_sum = static_cast<const Sum*>(forward.split_sum);
  const auto* split_outputs = static_cast<const Sum*>(forward.split_outputs);
  Sum row_max = kMinusInfinity<Sum>;
  for (int split = 0; split < forward.splits; ++split) {
    row_max = larger(row_max, split_max[split * all_rows + row]);
  }
  const Sum reference = reference_of(row_max);
  Sum sum{0};
  for (int split = 0; split < forward.splits; ++split) {
    const std::int64_t at = split * all_rows + row;
    sum += split_sum[at] * exp2_of((split_max[at] - reference) * factors.unit);
  }
  const Sum factor = sum == Sum{0} ? Sum{0} : factors.dropout_scale * reciprocal_of(sum);
  const std::int64_t l = row % problem.query_length;
  const std::int64_t h = row / problem.query_length % problem.heads;
  const std::int64_t n = row / problem.query_length / problem.heads;
  for (std::int64_t column = lane; column < problem.value_dim; column += kWarpSize) {
    Sum total{0};
    for (int split = 0; split < forward.splits; ++split) {
      const std::int64_t at = split * all_rows + row;
      total += split_outputs[at * problem.value_dim + column] * exp2_of((split_max[at] - reference) * factors.unit);
    }
    const core::MutableView& to = forward.outputs.output;
    store_rounded(to.data, to.dtype, to.offset(n, h, l, column), total * factor);
  }
  if (lane == 0) {
    static_cast<Sum*>(forward.outputs.row_max)[row] = row_max;
    static_cast<Sum*>(forward.outputs.row_sum)[row] = sum;
    store_log_sum_exp(forward, n, h, l, log_sum_exp_of(factors, row_max, sum));
  }
}

}  // namespace fused_mha::cuda
