// SPDX-License-Identifier: BSD-3-Clause
//
// Returned weights, from the row statistics that the forward kernel left.
//
//   weights (N, H, L, S) = keep / (1 - p) P, or (N, 1, L, S): their mean over heads; or P itself, before dropout
//
// A thread block has one tile of kRows queries x kColumns keys; heads are averaged inside it, in order, so that each
// element is written once. Every element is written: 0 where nothing is visible.
#pragma once

#include "cuda/dropout_bits.h"
#include "cuda/masks.h"
#include "cuda/online_softmax.h"

namespace fused_mha::cuda {

struct WeightsCall {
  Call call;
  core::ForwardOutputs outputs;
  int row_tiles = 1;
  int key_tiles = 1;
  int heads = 1;  // of the result: 1 where they are averaged
};

template <typename Tiles>
struct WeightsMemory {
  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + Tiles::kRowTileBytes;
  static constexpr int kScratch = kKeys + Tiles::kColumnTileBytes;
  static constexpr int bytes(bool has_masks) { return kScratch + Tiles::scratch_bytes(has_masks); }
};

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    attention_weights_kernel(const __grid_constant__ WeightsCall weights) {
  using Sum = typename Tiles::Sum;
  using Memory = WeightsMemory<Tiles>;
  const Call& call = weights.call;
  const core::AttentionProblem& problem = call.problem;
  BlockIndex block;
  TilePlace place;
  place.key_begin = block.take(weights.key_tiles) * Tiles::kColumns;
  place.query_begin = block.take(weights.row_tiles) * Tiles::kRows;
  const int stored_head = block.take(weights.heads);
  place.n = block.rest();
  const bool is_mean = weights.outputs.weights_mode == core::WeightsMode::kAveraged;
  const int first_head = is_mean ? 0 : stored_head;
  const int last_head = is_mean ? call.sizes.heads : stored_head + 1;

  auto* memory = dynamic_shared<unsigned char>();
  Tiles tiles(memory + Memory::kScratch);
  const Factors<Sum>& factors = factors_of<Sum>(call);
  const core::PhiloxKey dropout = dropout_key(call);
  const bool drops = call.has_dropout && !weights.outputs.weights_before_dropout;
  const Sum dropout_scale = drops ? factors.dropout_scale : Sum{1};
  typename Tiles::Scores total;
  Tiles::clear(total);
  for (place.h = first_head; place.h < last_head; ++place.h) {
    const TileKind kind = tile_kind<false>(call, place, Tiles::kRows, Tiles::kColumns);
    if (kind == TileKind::kHidden) continue;
    typename Tiles::RowTile queries(
        matrix_of<Tiles>(problem.query, place.n, place.h, call.sizes.queries, call.sizes.head_dim),
        memory + Memory::kQueries);
    typename Tiles::ColumnTile keys(
        matrix_of<Tiles>(problem.key, place.n, place.h / call.sizes.group, call.sizes.keys, call.sizes.head_dim),
        memory + Memory::kKeys);
    queries.request(place.query_begin);
    keys.request(place.key_begin);
    Tiles::commit();
    Tiles::arrive();
    typename Tiles::Scores scores;
    std::uint32_t visible[Tiles::kRowSlots];
    std::uint32_t keep[Tiles::kRowSlots] = {};
    tiles.multiply(scores, queries, keys, 0);
    mask_scores<Tiles, false>(call, factors, place, kind, scores, visible, tiles.stages());
    DropoutGroup<Tiles> dropout_group;
    if (drops) dropout_group.keep(call, dropout, place, keep);
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      const RowStatistics<Sum> row =
          load_statistics<Sum>(call.sizes, weights.outputs.row_max, weights.outputs.row_sum, nullptr, place.n, place.h,
                               place.query_begin + Tiles::row(slot));
#pragma unroll
      for (int c = 0; c < Tiles::kColumnSlots; ++c) {
        const Sum weight = unnormalized_weight(call.has_bias, factors, scores.at(slot, c), row.reference);
        // What is dropped is multiplied by 0 and not left out: a row that is NaN is NaN throughout.
        const bool keeps = !drops || ((keep[slot] >> c) & 1U) != 0;
        if (((visible[slot] >> c) & 1U) != 0) {
          total.at(slot, c) += weight * row.reciprocal * (keeps ? dropout_scale : Sum{0});
        }
      }
    }
    Tiles::arrive();  // the next head's copies overwrite what is read here
  }
  const Sum share = is_mean ? Sum{1} / static_cast<Sum>(call.sizes.heads) : Sum{1};
  const core::MutableView& to = weights.outputs.weights;
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
    const int l = place.query_begin + Tiles::row(slot);
    if (l >= call.sizes.queries) continue;
#pragma unroll
    for (int c = 0; c < Tiles::kColumnSlots; ++c) {
      const int s = place.key_begin + Tiles::column(c);
      if (s < call.sizes.keys) {
        store_rounded(to.data, to.dtype, to.offset(place.n, stored_head, l, s), total.at(slot, c) * share);
      }
    }
  }
}

}  // namespace fused_mha::cuda
