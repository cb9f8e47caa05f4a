// SPDX-License-Identifier: BSD-3-Clause
//
// The gradient of a float mask, in the mask's own broadcast shape:
//
//   dM (sizes) = sum of dS over every n, h, l or s along which the mask broadcasts
//
// A stored tile has one owner, a thread block that makes dS again for all that shares the tile, adds it up in registers
// in a fixed order and writes it once: no atomics, no tensor of N * H * L * S elements. key_padding_mask is a mask of
// sizes (N, 1, 1, S).
#pragma once

#include "cuda/backward.h"

namespace fused_mha::cuda {

struct MaskGradientCall {
  BackwardCall backward;
  core::MutableView to;
  // As stored: 1 where the mask broadcasts.
  int batch = 1;
  int heads = 1;
  int rows = 1;
  int keys = 1;
  int row_tiles = 1;
  int key_tiles = 1;
};

template <typename Tiles>
struct MaskGradientMemory {
  static constexpr int kQueries = 0;
  static constexpr int kGrads = kQueries + Tiles::kRowTileBytes;
  static constexpr int kKeys = kGrads + Tiles::kRowTileBytes;
  static constexpr int kValues = kKeys + Tiles::kColumnTileBytes;
  static constexpr int kScratch = kValues + Tiles::kColumnTileBytes;
  static constexpr int kColumnSums = kScratch + Tiles::scratch_bytes(true);
  static constexpr int kBytes =
      kColumnSums + Tiles::kWarps * Tiles::kColumns * static_cast<int>(sizeof(typename Tiles::Sum));
};

/// Adds dS of the tile at `place` to `total`. All threads of the block come here together.
template <typename Tiles>
__device__ __forceinline__ void add_score_gradient(const BackwardCall& backward,
                                                   const Factors<typename Tiles::Sum>& factors, core::PhiloxKey dropout,
                                                   const TilePlace& place, unsigned char* memory,
                                                   typename Tiles::Scores& total) {
  using Sum = typename Tiles::Sum;
  using Memory = MaskGradientMemory<Tiles>;
  const Call& call = backward.call;
  const core::AttentionProblem& problem = call.problem;
  const TileKind kind = tile_kind<false>(call, place, Tiles::kRows, Tiles::kColumns);
  if (kind == TileKind::kHidden) return;
  Tiles tiles(memory + Memory::kScratch);
  const int kv_head = place.h / call.sizes.group;
  typename Tiles::RowTile queries(
      matrix_of<Tiles>(problem.query, place.n, place.h, call.sizes.queries, call.sizes.head_dim),
      memory + Memory::kQueries);
  typename Tiles::RowTile grads(grad_output_of<Tiles>(backward, place.n, place.h), memory + Memory::kGrads);
  typename Tiles::ColumnTile keys(matrix_of<Tiles>(problem.key, place.n, kv_head, call.sizes.keys, call.sizes.head_dim),
                                  memory + Memory::kKeys);
  typename Tiles::ColumnTile values(
      matrix_of<Tiles>(problem.value, place.n, kv_head, call.sizes.keys, call.sizes.value_dim),
      memory + Memory::kValues);
  queries.request(place.query_begin);
  grads.request(place.query_begin);
  keys.request(place.key_begin);
  values.request(place.key_begin);
  Tiles::commit();
  RowStatistics<Sum> rows[Tiles::kRowSlots];
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
    rows[slot] = load_statistics<Sum>(call.sizes, backward.inputs.row_max, backward.inputs.row_sum, backward.deltas,
                                      place.n, place.h, place.query_begin + Tiles::row(slot));
  }
  Tiles::arrive();
  typename Tiles::Scores weights;
  typename Tiles::Scores score_grads;
  std::uint32_t visible[Tiles::kRowSlots];
  std::uint32_t keep[Tiles::kRowSlots] = {};
  tiles.multiply(weights, queries, keys, 0);
  mask_scores<Tiles, false>(call, factors, place, kind, weights, visible, tiles.stages());
  tiles.multiply(score_grads, grads, values, 0);
  DropoutGroup<Tiles> dropout_group;
  if (call.has_dropout) dropout_group.keep(call, dropout, place, keep);
  differentiate<Tiles, false>(backward, factors, place, kind, visible, keep, weights, score_grads, tiles.stages(),
                              [&](int slot, int) { return rows[slot]; });
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
#pragma unroll
    for (int c = 0; c < Tiles::kColumnSlots; ++c) {
      // Keys that are always visible lie outside of the masks.
      if (place.key_begin + Tiles::column(c) < call.sizes.masked_keys) total.at(slot, c) += score_grads.at(slot, c);
    }
  }
  Tiles::arrive();  // the next tile's copies overwrite what is read here
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    mask_gradient_kernel(const __grid_constant__ MaskGradientCall mask) {
  using Sum = typename Tiles::Sum;
  const BackwardCall& backward = mask.backward;
  const Sizes& sizes = backward.call.sizes;
  const bool by_row = mask.rows > 1;
  const bool by_key = mask.keys > 1;
  BlockIndex block;
  const int key_begin = block.take(mask.key_tiles) * Tiles::kColumns;
  const int row_begin = block.take(mask.row_tiles) * Tiles::kRows;
  const int h = block.take(mask.heads);
  const int n = block.rest();
  const int row_end = by_row ? row_begin + 1 : sizes.queries;
  const int key_end = by_key ? key_begin + 1 : sizes.masked_keys;

  auto* memory = dynamic_shared<unsigned char>();
  const Factors<Sum>& factors = factors_of<Sum>(backward.call);
  const core::PhiloxKey dropout = dropout_key(backward.call);
  typename Tiles::Scores total;
  Tiles::clear(total);
  TilePlace place;
  for (place.n = mask.batch > 1 ? n : 0; place.n < (mask.batch > 1 ? n + 1 : sizes.batch); ++place.n) {
    for (place.h = mask.heads > 1 ? h : 0; place.h < (mask.heads > 1 ? h + 1 : sizes.heads); ++place.h) {
      for (place.query_begin = row_begin; place.query_begin < row_end; place.query_begin += Tiles::kRows) {
        for (place.key_begin = key_begin; place.key_begin < key_end; place.key_begin += Tiles::kColumns) {
          add_score_gradient<Tiles>(backward, factors, dropout, place, memory, total);
        }
      }
    }
  }

  const auto store = [&](int l, int s, Sum value) {
    if (l < mask.rows && s < mask.keys) store_rounded(mask.to.data, mask.to.dtype, mask.to.offset(n, h, l, s), value);
  };
  if (by_row && by_key) {
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
#pragma unroll
      for (int c = 0; c < Tiles::kColumnSlots; ++c) {
        store(row_begin + Tiles::row(slot), key_begin + Tiles::column(c), total.at(slot, c));
      }
    }
    return;
  }
  if (by_row) {
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      Sum sum{0};
#pragma unroll
      for (int c = 0; c < Tiles::kColumnSlots; ++c) sum += total.at(slot, c);
      sum = sum_of_lanes<Tiles::kLanesOfRow>(sum);
      if (Tiles::column(0) == 0) store(row_begin + Tiles::row(slot), 0, sum);
    }
    return;
  }
  // Columns: a thread's rows, then the lanes, then the warps.
  auto* sums = reinterpret_cast<Sum*>(memory + MaskGradientMemory<Tiles>::kColumnSums);
#pragma unroll
  for (int c = 0; c < Tiles::kColumnSlots; ++c) {
    Sum sum{0};
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) sum += total.at(slot, c);
    sum = sum_of_lanes<Tiles::kLanesOfColumn>(sum);
    if ((threadIdx.x % kWarpSize & Tiles::kLanesOfColumn) == 0) {
      sums[Tiles::warp() * Tiles::kColumns + Tiles::column(c)] = sum;
    }
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  Sum sum{0};
  if (by_key) {
    if (column >= Tiles::kColumns) return;
    for (int warp = 0; warp < Tiles::kWarps; ++warp) sum += sums[warp * Tiles::kColumns + column];
    store(0, key_begin + column, sum);
  } else if (column == 0) {
    for (int i = 0; i < Tiles::kWarps * Tiles::kColumns; ++i) sum += sums[i];
    store(0, 0, sum);
  }
}

}  // namespace fused_mha::cuda
