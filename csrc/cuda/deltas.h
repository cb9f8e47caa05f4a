// SPDX-License-Identifier: BSD-3-Clause
//
// What the softmax of a row takes off its gradients, before the backward kernels start:
//
//   delta (N, H, L) = sum_s P dP - dE = dO . O + sum_s W dW - dE
//
// W: returned weights, dW: their gradient, dE: that of the log-sum-exps. output_deltas_kernel makes the first sum and
// takes dE off, weight_deltas_kernel adds the second where returned weights have a gradient. A sink gets
//
//   d sink = - sum over the rows that share it of exp(sink - log-sum-exp) delta
#pragma once

#include "cuda/backward.h"

namespace fused_mha::cuda {

inline constexpr int kDeltaWarps = 4;

/// A warp a row.
template <typename Sum>
__global__ void __launch_bounds__(kDeltaWarps* kWarpSize)
    output_deltas_kernel(const __grid_constant__ BackwardCall backward) {
  const core::AttentionProblem& problem = backward.call.problem;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kDeltaWarps + threadIdx.x / kWarpSize;
  if (row >= problem.batch * problem.heads * problem.query_length) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::int64_t l = row % problem.query_length;
  const std::int64_t h = row / problem.query_length % problem.heads;
  const std::int64_t n = row / problem.query_length / problem.heads;
  const core::View& grad = backward.inputs.grad_output;
  const core::View& output = backward.inputs.output;
  Sum sum{0};
  if (grad) {
    for (std::int64_t column = lane; column < problem.value_dim; column += kWarpSize) {
      sum = multiply_add(load_element<Sum>(grad.data, grad.dtype, grad.offset(n, h, l, column)),
                         load_element<Sum>(output.data, output.dtype, output.offset(n, h, l, column)), sum);
    }
  }
  sum = sum_of_lanes<kWarpSize - 1>(sum);
  if (lane != 0) return;
  const core::View& of_log_sum = backward.inputs.grad_log_sum_exp;
  if (of_log_sum) sum -= element_of<Sum>(of_log_sum, of_log_sum.offset(n, h, l, 0));
  static_cast<Sum*>(backward.deltas)[row] = sum;
}

inline constexpr int kSinkThreads = 256;

/// A block a stored element of the sink, N * H of them at most.
template <typename Sum>
__global__ void __launch_bounds__(kSinkThreads) sink_gradient_kernel(const __grid_constant__ BackwardCall backward) {
  const Call& call = backward.call;
  const Factors<Sum>& factors = factors_of<Sum>(call);
  const auto samples = static_cast<int>(backward.outputs.sink_sizes[0]);
  const auto heads = static_cast<int>(backward.outputs.sink_sizes[1]);
  BlockIndex block;
  const int stored_head = block.take(heads);
  const int stored_sample = block.rest();
  Sum sum{0};
  for (int n = samples > 1 ? stored_sample : 0; n < (samples > 1 ? stored_sample + 1 : call.sizes.batch); ++n) {
    for (int h = heads > 1 ? stored_head : 0; h < (heads > 1 ? stored_head + 1 : call.sizes.heads); ++h) {
      const Sum sink = sink_of(call, factors, n, h);
      if (sink == kMinusInfinity<Sum>) continue;
      for (int l = static_cast<int>(threadIdx.x); l < call.sizes.queries; l += kSinkThreads) {
        const RowStatistics<Sum> row = load_statistics<Sum>(call.sizes, backward.inputs.row_max,
                                                            backward.inputs.row_sum, backward.deltas, n, h, l);
        sum -= exp2_of((sink - row.reference) * factors.unit) * row.reciprocal * row.delta;
      }
    }
  }
  auto* sums = dynamic_shared<Sum>();
  sum = sum_of_lanes<kWarpSize - 1>(sum);
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Sum total{0};
  for (int warp = 0; warp < kSinkThreads / kWarpSize; ++warp) total += sums[warp];
  const core::MutableView& to = backward.outputs.grad_sink;
  store_rounded(to.data, to.dtype, to.offset(stored_sample, stored_head, 0, 0), total);
}

template <typename Tiles>
struct DeltaMemory {
  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + Tiles::kRowTileBytes;
  static constexpr int kScratch = kKeys + 2 * Tiles::kColumnTileBytes;
  static constexpr int bytes(bool has_masks) { return kScratch + Tiles::scratch_bytes(has_masks); }
};

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    weight_deltas_kernel(const __grid_constant__ BackwardCall backward) {
  using Sum = typename Tiles::Sum;
  using Memory = DeltaMemory<Tiles>;
  const Call& call = backward.call;
  const core::AttentionProblem& problem = call.problem;
  BlockIndex block;
  TilePlace place;
  place.query_begin = block.take(backward.tiles) * Tiles::kRows;
  place.h = block.take(call.sizes.heads);
  place.n = block.rest();

  auto* memory = dynamic_shared<unsigned char>();
  Tiles tiles(memory + Memory::kScratch);
  const Factors<Sum>& factors = factors_of<Sum>(call);
  const core::PhiloxKey dropout = dropout_key(call);
  const bool drops = call.has_dropout && !backward.inputs.weights_before_dropout;
  const Sum dropout_scale = drops ? factors.dropout_scale : Sum{1};
  typename Tiles::RowTile queries(
      matrix_of<Tiles>(problem.query, place.n, place.h, call.sizes.queries, call.sizes.head_dim),
      memory + Memory::kQueries);
  typename Tiles::ColumnTile keys(
      matrix_of<Tiles>(problem.key, place.n, place.h / call.sizes.group, call.sizes.keys, call.sizes.head_dim),
      memory + Memory::kKeys);
  DropoutGroup<Tiles> dropout_group;
  RowStatistics<Sum> rows[Tiles::kRowSlots];
  Sum sums[Tiles::kRowSlots];
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
    rows[slot] = load_statistics<Sum>(call.sizes, backward.inputs.row_max, backward.inputs.row_sum, nullptr, place.n,
                                      place.h, place.query_begin + Tiles::row(slot));
    sums[slot] = Sum{0};
  }
  const int key_tiles = (call.sizes.keys + Tiles::kColumns - 1) / Tiles::kColumns;
  TileSchedule<Tiles, false> schedule(call, place, 0, key_tiles);
  TileStep step = schedule.next();
  int stage = 0;
  queries.request(place.query_begin);
  if (step.exists()) keys.request(step.index * Tiles::kColumns, stage);
  Tiles::commit();
  while (step.exists()) {
    const TileStep next = schedule.next();
    place.key_begin = step.index * Tiles::kColumns;
    Tiles::arrive();
    if (next.exists()) keys.request(next.index * Tiles::kColumns, 1 - stage);
    Tiles::commit();
    typename Tiles::Scores scores;
    std::uint32_t visible[Tiles::kRowSlots];
    std::uint32_t keep[Tiles::kRowSlots] = {};
    tiles.multiply(scores, queries, keys, stage);
    mask_scores<Tiles, false>(call, factors, place, step.kind, scores, visible, tiles.stages());
    if (drops) dropout_group.keep(call, dropout, place, keep);
    Sum* memory_of_warp = tiles.stages() + Tiles::warp() * Tiles::kStageElements;
#pragma unroll 1
    for (int first = 0; first < Tiles::kWarpRows; first += Tiles::kStageRows) {
      stage_weight_gradients<Tiles, false>(backward, place, first, memory_of_warp);
      for_each_unstaged<Tiles>(first, memory_of_warp, [&](Sum passed, int slot, int c) {
        const Sum weight = unnormalized_weight(call.has_bias, factors, scores.at(slot, c), rows[slot].reference) *
                           rows[slot].reciprocal * dropout_scale;
        const bool keeps = !drops || ((keep[slot] >> c) & 1U) != 0;
        if (keeps && ((visible[slot] >> c) & 1U) != 0) sums[slot] += weight * passed;
      });
    }
    stage = 1 - stage;
    step = next;
  }
  Tiles::arrive();  // no copy may outlive the block's use of shared memory
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
    const Sum sum = sum_of_lanes<Tiles::kLanesOfRow>(sums[slot]);
    const int l = place.query_begin + Tiles::row(slot);
    if (l < call.sizes.queries && Tiles::column(0) == 0) {
      static_cast<Sum*>(backward.deltas)[row_index(call.sizes, place.n, place.h, l)] += sum;
    }
  }
}

}  // namespace fused_mha::cuda
