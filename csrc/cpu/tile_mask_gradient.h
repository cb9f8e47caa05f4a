// SPDX-License-Identifier: BSD-3-Clause
//
// What the backward pass needs beside its main loop, block of rows by block of rows:
//
//   delta[l] = sum_s Z P dP      = dO . O, plus sum_s W gW where returned weights W have a gradient
//   dM[l, s] = sum of dS over every (n, h) and over l or s where attn_mask broadcasts
//
// A stored tile of attn_mask has one owner, which computes dS again for everything that shares the tile and writes
// it once: no atomics, a fixed order of sums, no tensor of N * H * L * S elements.
#pragma once

#include "cpu/tile_backward.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

template <typename T>
struct DeltaScratch {
  GradRows<T>* rows = nullptr;
  GradKeys<T> keys;
  GradTile<T> tile;
  Prefetcher prefetcher;  // without a next item: asks for masks only

  std::size_t carve(const BackwardPlan& plan, const BackwardSizes<T>& sizes, std::byte* base) {
    Arena arena(base);
    if (!plan.inputs.grad_weights) return 0;
    rows = arena.take<GradRows<T>>(1);
    take_rows<T>(arena, sizes, false, rows, 1);
    keys = take_keys<T>(arena, plan.call, sizes);
    tile = take_tile<T>(arena);
    return arena.used();
  }
};

template <typename T>
static std::size_t delta_scratch(const BackwardPlan& plan) {
  return DeltaScratch<T>{}.carve(plan, BackwardSizes<T>(*plan.call.problem), nullptr);
}

/// dO . O of one row.
template <typename T>
static T output_delta(const BackwardPlan& plan, const RowBlock& block, std::int64_t row) {
  const core::View& grad = plan.inputs.grad_output;
  const core::View& output = plan.inputs.output;
  const std::int64_t l = block.row_begin + row;
  const std::int64_t columns = plan.call.problem->value_dim;
  Vec<T> sum{};
  with_storage<T>(grad.data, grad.dtype, [&](const auto* base) {
    const auto* grad_row = base + grad.offset(block.n, block.h, l, 0);
    const auto* output_row = static_cast<decltype(base)>(output.data) + output.offset(block.n, block.h, l, 0);
    for (std::int64_t i = 0; i < columns; i += kLanes<T>) {
      sum = fma(load_some<T>(grad_row + i * grad.strides[3], grad.strides[3], columns - i),
                load_some<T>(output_row + i * output.strides[3], output.strides[3], columns - i), sum);
    }
  });
  return reduce_add<T>(sum);
}

/// sum_s W gW of a block's rows, added to `deltas`.
template <typename T>
static void add_weight_deltas(const BackwardPlan& plan, const BackwardSizes<T>& sizes, const RowBlock& block,
                              DeltaScratch<T>& scratch, T* deltas) {
  const CallConstants& call = plan.call;
  const KeySpan& kept = call.masks->kept_keys(block.n);
  GradRows<T>& rows = *scratch.rows;
  BackwardPlan returned = plan;  // what gives the weights as they were returned
  if (plan.inputs.weights_before_dropout) returned.call.has_dropout = false;
  pack_grad_rows<T>(plan, sizes, block, rows);
  for (std::int64_t row = 0; row < block.rows; ++row) rows.delta[row] = T{0};
  for (std::int64_t begin = 0; begin < kept.count; begin += kBackwardKeys) {
    const std::int64_t left = kept.count - begin;
    scratch.keys.keys = kept.part(begin, left < kBackwardKeys ? left : kBackwardKeys);
    classify_tile<kBackwardKeys>(call, block, scratch.keys.keys, *scratch.tile.mask);
    if (!scratch.tile.mask->any_visible) continue;
    pack_grad_keys<T>(call, sizes, block.n, block.h / call.problem->heads_per_kv_head(), scratch.keys);
    gradient_tile<T>(returned, rows, scratch.keys, scratch.tile, scratch.prefetcher);
    for (std::int64_t row = 0; row < block.rows; ++row) {
      Vec<T> sum{};
      for (std::int64_t group = 0; group < TileMask<kBackwardKeys>::kGroups; ++group) {
        if (scratch.tile.mask->is_hidden(group)) continue;
        T added[kGroupKeys];
        load_weight_grads<T>(plan, block, row, group_of(scratch.keys.keys, group), added);
        const T* weights = scratch.tile.weights + row * kBackwardKeys + group * kGroupKeys;
        const bool mixed = scratch.tile.mask->is_mixed(group);
        for (std::int64_t i = 0; i < kGroupKeys; i += kLanes<T>) {
          Vec<T> grad = load<T>(added + i);
          // A gradient that is not finite must not meet the weight 0 of a hidden key.
          if (mixed) grad = select<T>(scratch.tile.mask->visible[row][group] >> i, grad, Vec<T>{});
          sum = fma(load<T>(weights + i), grad, sum);
        }
      }
      deltas[row] += reduce_add<T>(sum);
    }
  }
}

template <typename T>
static void delta_block(const BackwardPlan& plan, std::int64_t n, std::int64_t h, std::int64_t index, std::byte* base) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const RowBlock block = row_block(plan.call, n, h, index);
  T* deltas = static_cast<T*>(plan.row_deltas) + (n * problem.heads + h) * problem.query_length + block.row_begin;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    deltas[row] = plan.inputs.grad_output ? output_delta<T>(plan, block, row) : T{0};
  }
  if (plan.inputs.grad_weights) {
    const BackwardSizes<T> sizes(problem);
    DeltaScratch<T> scratch;
    scratch.carve(plan, sizes, base);
    add_weight_deltas<T>(plan, sizes, block, scratch, deltas);
  }
}

template <typename T>
struct MaskGradientScratch {
  GradRows<T>* rows = nullptr;
  GradKeys<T> keys;
  GradTile<T> tile;
  Prefetcher prefetcher;  // as above
  T* sums = nullptr;      // [rows of the item, or 1][keys of the item, or 1]

  std::size_t carve(const BackwardPlan& plan, const BackwardSizes<T>& sizes, std::byte* base) {
    Arena arena(base);
    rows = arena.take<GradRows<T>>(kMaskGradientRows / kBlockRows);
    take_rows<T>(arena, sizes, false, rows, kMaskGradientRows / kBlockRows);
    keys = take_keys<T>(arena, plan.call, sizes);
    tile = take_tile<T>(arena);
    sums = arena.take<T>(kMaskGradientRows * kMaskGradientKeys);
    return arena.used();
  }
};

template <typename T>
static std::size_t mask_gradient_scratch(const BackwardPlan& plan) {
  return MaskGradientScratch<T>{}.carve(plan, BackwardSizes<T>(*plan.call.problem), nullptr);
}

/// First index of the span whose key is at least s.
static std::int64_t lower_bound(const KeySpan& keys, std::int64_t s) {
  std::int64_t low = 0;
  std::int64_t high = keys.count;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (keys[middle] < s) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Adds a tile's dS where the item keeps its sums.
template <typename T>
static void add_tile(const BackwardPlan& plan, const MaskGradientItem& item, const GradRows<T>& rows,
                     const KeySpan& keys, const GradTile<T>& tile, T* sums) {
  const bool by_row = plan.outputs.attn_mask_sizes[2] > 1;
  const bool by_key = plan.outputs.attn_mask_sizes[3] > 1;
  const std::int64_t width = by_key ? item.key_end - item.key_begin : 1;
  for (std::int64_t row = 0; row < rows.block.rows; ++row) {
    T* to = sums + (by_row ? rows.block.row_begin + row - item.row_begin : 0) * width;
    const T* from = tile.score_grads + row * kBackwardKeys;
    if (!by_key) {
      for (std::int64_t i = 0; i < keys.count; ++i) to[0] += from[i];
    } else if (keys.positions == nullptr) {
      T* start = to + keys.first - item.key_begin;
      for (std::int64_t i = 0; i < keys.count; ++i) start[i] += from[i];
    } else {
      for (std::int64_t i = 0; i < keys.count; ++i) to[keys.positions[i] - item.key_begin] += from[i];
    }
  }
}

/// Everything that one head adds to an item: at most kMaskGradientRows of its rows.
template <typename T>
static void add_head(const BackwardPlan& plan, const BackwardSizes<T>& sizes, const MaskGradientItem& item,
                     std::int64_t n, std::int64_t h, std::int64_t row_begin, std::int64_t row_end,
                     MaskGradientScratch<T>& scratch) {
  const CallConstants& call = plan.call;
  const KeySpan& kept = call.masks->kept_keys(n);
  const std::int64_t key_end = plan.outputs.attn_mask_sizes[3] > 1 ? item.key_end : call.problem->masked_keys();
  const std::int64_t blocks = (row_end - row_begin + kBlockRows - 1) / kBlockRows;
  for (std::int64_t i = 0; i < blocks; ++i) scratch.rows[i].packed = false;
  std::int64_t begin = lower_bound(kept, item.key_begin);
  const std::int64_t end = lower_bound(kept, key_end);
  for (; begin < end; begin += kBackwardKeys) {
    scratch.keys.keys = kept.part(begin, end - begin < kBackwardKeys ? end - begin : kBackwardKeys);
    bool packed = false;
    for (std::int64_t i = 0; i < blocks; ++i) {
      const RowBlock block = row_block(call, n, h, row_begin / kBlockRows + i);
      classify_tile<kBackwardKeys>(call, block, scratch.keys.keys, *scratch.tile.mask);
      if (!scratch.tile.mask->any_visible) continue;
      if (!packed) pack_grad_keys<T>(call, sizes, n, h / call.problem->heads_per_kv_head(), scratch.keys);
      packed = true;
      if (!scratch.rows[i].packed) pack_grad_rows<T>(plan, sizes, block, scratch.rows[i]);
      gradient_tile<T>(plan, scratch.rows[i], scratch.keys, scratch.tile, scratch.prefetcher);
      add_tile<T>(plan, item, scratch.rows[i], scratch.keys.keys, scratch.tile, scratch.sums);
    }
  }
}

/// Writes the item's sums in the mask's dtype, which need not be that of the query.
template <typename T>
static void store_mask_gradient(const BackwardPlan& plan, const MaskGradientItem& item, const T* sums) {
  const core::MutableView& to = plan.outputs.grad_attn_mask;
  const std::int64_t rows = plan.outputs.attn_mask_sizes[2] > 1 ? item.row_end - item.row_begin : 1;
  const std::int64_t keys = plan.outputs.attn_mask_sizes[3] > 1 ? item.key_end - item.key_begin : 1;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t offset = to.offset(item.n, item.h, item.row_begin + row, item.key_begin);
    for (std::int64_t key = 0; key < keys; ++key) {
      core::store_element(to.data, to.dtype, offset + key * to.strides[3], static_cast<double>(sums[row * keys + key]));
    }
  }
}

template <typename T>
static void mask_gradient_item(const BackwardPlan& plan, const MaskGradientItem& item, std::byte* base) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const BackwardSizes<T> sizes(problem);
  MaskGradientScratch<T> scratch;
  scratch.carve(plan, sizes, base);
  for (std::int64_t i = 0; i < kMaskGradientRows * kMaskGradientKeys; ++i) scratch.sums[i] = T{0};
  const std::array<std::int64_t, 4>& stored = plan.outputs.attn_mask_sizes;
  const bool by_row = stored[2] > 1;
  const std::int64_t row_begin = by_row ? item.row_begin : 0;
  const std::int64_t row_end = by_row ? item.row_end : problem.query_length;
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    if (stored[0] > 1 && n != item.n) continue;
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      if (stored[1] > 1 && h != item.h) continue;
      for (std::int64_t begin = row_begin; begin < row_end; begin += kMaskGradientRows) {
        const std::int64_t end = row_end - begin < kMaskGradientRows ? row_end : begin + kMaskGradientRows;
        add_head<T>(plan, sizes, item, n, h, begin, end, scratch);
      }
    }
  }
  store_mask_gradient<T>(plan, item, scratch.sums);
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
