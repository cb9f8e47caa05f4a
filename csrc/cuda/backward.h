// SPDX-License-Identifier: BSD-3-Clause
//
// Gradients of attention by making the weights again, tile by tile (Dao et al., "FlashAttention", 2022, appendix B.4),
// in the form without atomics: seven products of the size of Q K^T, every sum in a fixed order.
//
//   grad_output (N, H, L, Dv), grad_weights (N, 1 or H, L, S), deltas (N, H, L); the others as in forward.h
//
//   P     = exp2(unit (t - row_max)) / row_sum
//   dP    = keep / (1 - p) (dO V^T + dW)              what the output and returned weights pass down; dW outside of
//                                                     the bracket where weights are returned as before dropout
//   dS    = P (dP - delta)                            delta from deltas.h
//   dV    = (keep / (1 - p) P)^T dO      dK = scale dS^T Q      backward_keys_kernel: its keys against all queries
//   dQ    = scale dS K                                          backward_queries_kernel: its queries against all keys
//
// backward_keys_kernel has keys in the rows of its tiles, so that P^T and dS^T are left operands as they are. Hidden
// elements of P and dS are 0 whatever they were made from. Grouped heads: the block of a key walks over all heads that
// share it.
#pragma once

#include "cuda/dropout_bits.h"
#include "cuda/masks.h"
#include "cuda/online_softmax.h"

namespace fused_mha::cuda {

struct BackwardCall {
  Call call;
  core::BackwardInputs inputs;
  core::BackwardOutputs outputs;
  void* deltas = nullptr;  // (N, H, L), in the type of sums
  int tiles = 1;           // of the block's own dimension
  int parts = 1;           // of the columns of the gradients
};

/// The gradient of the output as a matrix; without one, a matrix of zeros.
template <typename Tiles>
__device__ inline Matrix grad_output_of(const BackwardCall& backward, int n, int h) {
  const Sizes& sizes = backward.call.sizes;
  if (!backward.inputs.grad_output) return matrix_of<Tiles>(backward.call.problem.query, n, h, 0, sizes.value_dim);
  return matrix_of<Tiles>(backward.inputs.grad_output, n, h, sizes.queries, sizes.value_dim);
}

/// Stages what returned weights pass down to kStageRows of the warp's rows.
template <typename Tiles, bool kKeysInRows>
__device__ __forceinline__ void stage_weight_gradients(const BackwardCall& backward, const TilePlace& place,
                                                       int first_row, typename Tiles::Sum* stage) {
  using Sum = typename Tiles::Sum;
  const Sizes& sizes = backward.call.sizes;
  const core::View& grad = backward.inputs.grad_weights;
  const std::int64_t offset = grad.offset(place.n, place.h, 0, 0);
  const Sum share =
      backward.inputs.weights_mode == core::WeightsMode::kAveraged ? Sum{1} / static_cast<Sum>(sizes.heads) : Sum{1};
  __syncwarp();
  for_each_staged<Tiles, kKeysInRows>(place, first_row, stage, [&](Sum& staged, int l, int s) {
    const bool exists = l < sizes.queries && s < sizes.keys;
    staged = exists
                 ? load_element<Sum>(grad.data, grad.dtype, offset + l * grad.strides[2] + s * grad.strides[3]) * share
                 : Sum{0};
  });
  __syncwarp();
}

/// What dropout lets through.
template <typename Tiles>
__device__ __forceinline__ void drop(const std::uint32_t (&keep)[Tiles::kRowSlots],
                                     const Factors<typename Tiles::Sum>& factors, typename Tiles::Scores& scores) {
  using Sum = typename Tiles::Sum;
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
#pragma unroll
    for (int c = 0; c < Tiles::kColumnSlots; ++c) {
      scores.at(slot, c) = ((keep[slot] >> c) & 1U) != 0 ? scores.at(slot, c) * factors.dropout_scale : Sum{0};
    }
  }
}

/// Scores become weights behind dropout, and dO V^T becomes dS. `statistics_of(slot, c)` is the row of softmax that the
/// element belongs to.
template <typename Tiles, bool kKeysInRows, typename StatisticsOf>
__device__ __forceinline__ void differentiate(const BackwardCall& backward, const Factors<typename Tiles::Sum>& factors,
                                              const TilePlace& place, TileKind kind,
                                              const std::uint32_t (&visible)[Tiles::kRowSlots],
                                              const std::uint32_t (&keep)[Tiles::kRowSlots],
                                              typename Tiles::Scores& scores, typename Tiles::Scores& grads,
                                              typename Tiles::Sum* stages, const StatisticsOf& statistics_of) {
  using Sum = typename Tiles::Sum;
  const Call& call = backward.call;
  const bool drops = call.has_dropout;
  const bool drops_first = drops && backward.inputs.weights_before_dropout;
  if (drops_first) drop<Tiles>(keep, factors, grads);
  if (backward.inputs.grad_weights) {
    Sum* stage = stages + Tiles::warp() * Tiles::kStageElements;
#pragma unroll 1
    for (int first = 0; first < Tiles::kWarpRows; first += Tiles::kStageRows) {
      stage_weight_gradients<Tiles, kKeysInRows>(backward, place, first, stage);
      for_each_unstaged<Tiles>(first, stage, [&](Sum passed, int slot, int c) { grads.at(slot, c) += passed; });
    }
  }
  if (drops && !drops_first) drop<Tiles>(keep, factors, grads);
#pragma unroll
  for (int c = 0; c < Tiles::kColumnSlots; ++c) {
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      const RowStatistics<Sum> row = statistics_of(slot, c);
      const Sum weight =
          unnormalized_weight(call.has_bias, factors, scores.at(slot, c), row.reference) * row.reciprocal;
      scores.at(slot, c) = weight;
      grads.at(slot, c) = weight * (grads.at(slot, c) - row.delta);
    }
  }
  if (drops) drop<Tiles>(keep, factors, scores);
  if (kind == TileKind::kFree) return;
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
#pragma unroll
    for (int c = 0; c < Tiles::kColumnSlots; ++c) {
      if (((visible[slot] >> c) & 1U) != 0) continue;
      scores.at(slot, c) = Sum{0};
      grads.at(slot, c) = Sum{0};
    }
  }
}

/// A block's own two tiles, of kRows, and two that pass by, of kColumns, in two stages.
template <typename Tiles>
struct BackwardMemory {
  static constexpr int kFirstOwn = 0;
  static constexpr int kSecondOwn = kFirstOwn + Tiles::kRowTileBytes;
  static constexpr int kFirstPassing = kSecondOwn + Tiles::kRowTileBytes;
  static constexpr int kSecondPassing = kFirstPassing + 2 * Tiles::kColumnTileBytes;
  static constexpr int kStatistics = kSecondPassing + 2 * Tiles::kColumnTileBytes;
  static constexpr int kStatisticsBytes =
      2 * Tiles::kColumns * static_cast<int>(sizeof(RowStatistics<typename Tiles::Sum>));
  static constexpr int kScratch = kStatistics + kStatisticsBytes;
  static_assert(kStatisticsBytes % 128 == 0);
  static constexpr int bytes(bool has_masks) { return kScratch + Tiles::scratch_bytes(has_masks); }
};

/// The gradients of one tile of keys and values, and one part of their columns. False as in forward.h.
template <typename Tiles>
__device__ __forceinline__ bool differentiate_keys(const BackwardCall& backward, TilePlace place, int kv_head, int part,
                                                   unsigned char* memory) {
  using Sum = typename Tiles::Sum;
  using Memory = BackwardMemory<Tiles>;
  const Call& call = backward.call;
  const core::AttentionProblem& problem = call.problem;
  Tiles tiles(memory + Memory::kScratch);
  auto* statistics = reinterpret_cast<RowStatistics<Sum>*>(memory + Memory::kStatistics);
  const Factors<Sum>& factors = factors_of<Sum>(call);
  const core::PhiloxKey dropout = dropout_key(call);
  typename Tiles::RowTile keys(matrix_of<Tiles>(problem.key, place.n, kv_head, call.sizes.keys, call.sizes.head_dim),
                               memory + Memory::kFirstOwn);
  typename Tiles::RowTile values(
      matrix_of<Tiles>(problem.value, place.n, kv_head, call.sizes.keys, call.sizes.value_dim),
      memory + Memory::kSecondOwn);
  keys.request(place.key_begin);
  values.request(place.key_begin);

  typename Tiles::Output key_grad;
  typename Tiles::Output value_grad;
  key_grad.clear();
  value_grad.clear();
  const int query_tiles = (call.sizes.queries + Tiles::kColumns - 1) / Tiles::kColumns;
  for (int i = 0; i < call.sizes.group; ++i) {
    place.h = kv_head * call.sizes.group + i;
    typename Tiles::ColumnTile queries(
        matrix_of<Tiles>(problem.query, place.n, place.h, call.sizes.queries, call.sizes.head_dim),
        memory + Memory::kFirstPassing);
    typename Tiles::ColumnTile grads(grad_output_of<Tiles>(backward, place.n, place.h),
                                     memory + Memory::kSecondPassing);
    const auto request = [&](const TileStep& step, int stage) {
      if (!step.exists()) return;
      const int first = step.index * Tiles::kColumns;
      queries.request(first, stage);
      grads.request(first, stage);
      for (int at = static_cast<int>(threadIdx.x); at < Tiles::kColumns; at += Tiles::kThreads) {
        statistics[stage * Tiles::kColumns + at] =
            load_statistics<Sum>(call.sizes, backward.inputs.row_max, backward.inputs.row_sum, backward.deltas, place.n,
                                 place.h, first + at);
      }
    };
    TileSchedule<Tiles, true> schedule(call, place, 0, query_tiles);
    TileStep step = schedule.next();
    int stage = 0;
    request(step, stage);
    Tiles::commit();
    while (step.exists()) {
      const TileStep next = schedule.next();
      place.query_begin = step.index * Tiles::kColumns;
      const bool look = step.kind != TileKind::kFree;
      if (tiles.arrive_and_look(look, stage, queries, grads)) return false;
      request(next, 1 - stage);
      Tiles::commit();

      typename Tiles::Scores weights;
      typename Tiles::Scores score_grads;
      std::uint32_t visible[Tiles::kRowSlots];
      std::uint32_t keep[Tiles::kRowSlots] = {};
      tiles.multiply(weights, keys, queries, stage);
      mask_scores<Tiles, true>(call, factors, place, step.kind, weights, visible, tiles.stages());
      tiles.multiply(score_grads, values, grads, stage);
      if (call.has_dropout) Tiles::keep_keys_in_rows(call, dropout, place, keep);
      differentiate<Tiles, true>(backward, factors, place, step.kind, visible, keep, weights, score_grads,
                                 tiles.stages(),
                                 [&](int, int c) { return statistics[stage * Tiles::kColumns + Tiles::column(c)]; });
      typename Tiles::Operand for_values = Tiles::operand_of(weights);
      typename Tiles::Operand for_keys = Tiles::operand_of(score_grads);
      tiles.accumulate(value_grad, for_values, visible, look, grads, stage, part);
      tiles.accumulate(key_grad, for_keys, visible, look, queries, stage, part);
      stage = 1 - stage;
      step = next;
    }
    Tiles::arrive();  // the next head begins with the first stage again
  }
  if (backward.outputs.grad_key) {
    Tiles::store(key_grad, backward.outputs.grad_key, place.n, kv_head, place.key_begin, call.sizes.keys, part,
                 call.sizes.head_dim, [&](int) { return factors.scale; });
  }
  if (backward.outputs.grad_value) {
    Tiles::store(value_grad, backward.outputs.grad_value, place.n, kv_head, place.key_begin, call.sizes.keys, part,
                 call.sizes.value_dim, [](int) { return Sum{1}; });
  }
  return true;
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    backward_keys_kernel(const __grid_constant__ BackwardCall backward) {
  BlockIndex block;
  const int part = block.take(backward.parts);
  TilePlace place;
  place.key_begin = block.take(backward.tiles) * Tiles::kRows;
  const int kv_head = block.take(backward.call.sizes.kv_heads);
  place.n = block.rest();
  auto* memory = dynamic_shared<unsigned char>();
  if (differentiate_keys<Tiles>(backward, place, kv_head, part, memory)) return;
  in_careful_parts<Tiles>(place.key_begin, part, [&]<typename Careful>(int first_row, int careful_part) {
    place.key_begin = first_row;
    differentiate_keys<Careful>(backward, place, kv_head, careful_part, memory);
  });
}

/// The gradient of one tile of queries, and one part of its columns. False as in forward.h.
template <typename Tiles>
__device__ __forceinline__ bool differentiate_queries(const BackwardCall& backward, TilePlace place, int part,
                                                      unsigned char* memory) {
  using Sum = typename Tiles::Sum;
  using Memory = BackwardMemory<Tiles>;
  const Call& call = backward.call;
  const core::AttentionProblem& problem = call.problem;
  const int kv_head = place.h / call.sizes.group;
  Tiles tiles(memory + Memory::kScratch);
  const Factors<Sum>& factors = factors_of<Sum>(call);
  const core::PhiloxKey dropout = dropout_key(call);
  typename Tiles::RowTile queries(
      matrix_of<Tiles>(problem.query, place.n, place.h, call.sizes.queries, call.sizes.head_dim),
      memory + Memory::kFirstOwn);
  typename Tiles::RowTile grads(grad_output_of<Tiles>(backward, place.n, place.h), memory + Memory::kSecondOwn);
  typename Tiles::ColumnTile keys(matrix_of<Tiles>(problem.key, place.n, kv_head, call.sizes.keys, call.sizes.head_dim),
                                  memory + Memory::kFirstPassing);
  typename Tiles::ColumnTile values(
      matrix_of<Tiles>(problem.value, place.n, kv_head, call.sizes.keys, call.sizes.value_dim),
      memory + Memory::kSecondPassing);
  queries.request(place.query_begin);
  grads.request(place.query_begin);
  RowStatistics<Sum> rows[Tiles::kRowSlots];
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
    rows[slot] = load_statistics<Sum>(call.sizes, backward.inputs.row_max, backward.inputs.row_sum, backward.deltas,
                                      place.n, place.h, place.query_begin + Tiles::row(slot));
  }
  DropoutGroup<Tiles> dropout_group;
  typename Tiles::Output query_grad;
  query_grad.clear();

  const auto request = [&](const TileStep& step, int stage) {
    if (!step.exists()) return;
    keys.request(step.index * Tiles::kColumns, stage);
    values.request(step.index * Tiles::kColumns, stage);
  };
  const int key_tiles = (call.sizes.keys + Tiles::kColumns - 1) / Tiles::kColumns;
  TileSchedule<Tiles, false> schedule(call, place, 0, key_tiles);
  TileStep step = schedule.next();
  int stage = 0;
  request(step, stage);
  Tiles::commit();
  while (step.exists()) {
    const TileStep next = schedule.next();
    place.key_begin = step.index * Tiles::kColumns;
    const bool look = step.kind != TileKind::kFree;
    if (tiles.arrive_and_look(look, stage, keys)) return false;
    request(next, 1 - stage);
    Tiles::commit();

    typename Tiles::Scores weights;
    typename Tiles::Scores score_grads;
    std::uint32_t visible[Tiles::kRowSlots];
    std::uint32_t keep[Tiles::kRowSlots] = {};
    tiles.multiply(weights, queries, keys, stage);
    mask_scores<Tiles, false>(call, factors, place, step.kind, weights, visible, tiles.stages());
    tiles.multiply(score_grads, grads, values, stage);
    if (call.has_dropout) dropout_group.keep(call, dropout, place, keep);
    differentiate<Tiles, false>(backward, factors, place, step.kind, visible, keep, weights, score_grads,
                                tiles.stages(), [&](int slot, int) { return rows[slot]; });
    typename Tiles::Operand for_queries = Tiles::operand_of(score_grads);
    tiles.accumulate(query_grad, for_queries, visible, look, keys, stage, part);
    stage = 1 - stage;
    step = next;
  }
  Tiles::arrive();  // no copy may outlive the block's use of shared memory
  Tiles::store(query_grad, backward.outputs.grad_query, place.n, place.h, place.query_begin, call.sizes.queries, part,
               call.sizes.head_dim, [&](int) { return factors.scale; });
  return true;
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    backward_queries_kernel(const __grid_constant__ BackwardCall backward) {
  BlockIndex block;
  const int part = block.take(backward.parts);
  int row_tile = block.take(backward.tiles);
  if (backward.call.problem.is_causal) row_tile = backward.tiles - 1 - row_tile;  // the longest rows first
  TilePlace place;
  place.query_begin = row_tile * Tiles::kRows;
  place.h = block.take(backward.call.sizes.heads);
  place.n = block.rest();
  auto* memory = dynamic_shared<unsigned char>();
  if (differentiate_queries<Tiles>(backward, place, part, memory)) return;
  in_careful_parts<Tiles>(place.query_begin, part, [&]<typename Careful>(int first_row, int careful_part) {
    place.query_begin = first_row;
    differentiate_queries<Careful>(backward, place, careful_part, memory);
  });
}

}  // namespace fused_mha::cuda
