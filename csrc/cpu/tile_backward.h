// SPDX-License-Identifier: BSD-3-Clause
//
// Gradients of one work item: a part of one head's keys against all rows that share them.
//
//   for each step of kBackwardKeys kept keys:          dK = dV = 0
//     for each block of kBlockRows rows that sees any of them:
//       P  = exp2(unit (t - row_max)) / row_sum         the forward pass's weights, t as in tile_forward.h
//       dP = dO V^T + gW                                the same register tile as the scores; a gW of weights before
//                                                       dropout is added behind Z
//       Z  = keep / (1 - p)
//       dS = P * (Z * dP - delta),  delta = rowsum(Z * P * dP), less the log-sum-exp's gradient
//       dV += (Z * P)^T dO,  dK += dS^T Q,  dQ += dS K  rank updates; sums stay in T
//   dQ, dK times scale
//
// (Dao et al., "FlashAttention", 2022, appendix B.4, with the gradient gW of returned weights added.) Hidden elements
// have P = dS = 0 by selection, so nothing that is not finite passes through them. Sums run over blocks in order: the
// same bits whatever the schedule.
#pragma once

#include "cpu/tile_forward.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// One block of rows, packed in both forms.
template <typename T, typename F = T>
struct GradRows {
  RowBlock block;
  F* queries = nullptr;  // [factors of D][kBlockRows], times query_factor unless they are pairs
  F* grads = nullptr;    // [factors of Dv][kBlockRows]
  F* packed_queries = nullptr;
  F* packed_grads = nullptr;
  const F* query_rows = nullptr;  // [factors of rows][padded D]: packed_queries, or the caller's own memory
  const F* grad_rows = nullptr;   // [factors of rows][padded Dv]: packed_grads, or the caller's own memory
  T* query_grad = nullptr;        // [kBlockRows][padded D], sums
  T row_max[kBlockRows];          // 0 where the row saw nothing
  T reciprocal[kBlockRows];       // 1 / row_sum, 0 where the row saw nothing
  T delta[kBlockRows];
  DropoutGroup dropout[kBlockRows];  // a step of keys ends inside a dropout group: the next one goes on from there
  bool packed = false;
  bool started = false;  // query_grad holds something
  bool not_finite = false;
};

template <typename T, typename F = T>
struct GradKeys {
  KeySpan keys;
  F* keys_transposed = nullptr;    // [group][factors of D][kGroupKeys]
  F* values_transposed = nullptr;  // [group][factors of Dv][kGroupKeys]
  F* packed_keys = nullptr;        // [factors of kBackwardKeys][padded D]
  const F* key_rows = nullptr;     // [factors of keys][padded D]: packed_keys, or the caller's own memory
  T* key_grad = nullptr;           // [kBackwardKeys][padded D]
  T* value_grad = nullptr;         // [kBackwardKeys][padded Dv]
  T* bias_grad = nullptr;          // [kBackwardKeys]
  T* key_bias = nullptr;           // [kBackwardKeys], null where key_padding_mask adds nothing
  bool keys_not_finite = false;
};

/// Pairs of keys of a step.
inline constexpr std::int64_t kKeyPairs = kBackwardKeys / 2;

/// The weights of a tile and the gradients of its scores, rows kBackwardKeys apart; as pairs also what the rank updates
/// multiply.
template <typename T, typename F = T>
struct GradTile {
  T* weights = nullptr;
  T* score_grads = nullptr;
  F* weight_pairs = nullptr;          // [pairs of rows][kBackwardKeys]
  F* score_grad_pairs = nullptr;      // [pairs of rows][kBackwardKeys]
  F* score_grad_key_pairs = nullptr;  // [kBlockRows][kKeyPairs]
  T* best = nullptr;                  // maxima that score_group and mask_tile leave, which nobody needs here
  TileMask<kBackwardKeys>* mask = nullptr;
};

template <typename T, typename F = T>
struct BackwardSizes {
  std::int64_t padded_d = 0;
  std::int64_t padded_dv = 0;
  std::int64_t queries = 0;  // elements of GradRows::queries
  std::int64_t grads = 0;    // elements of GradRows::grads

  explicit BackwardSizes(const core::AttentionProblem& problem)
      : padded_d(round_up(problem.head_dim, kLanes<T>)),
        padded_dv(round_up(problem.value_dim, kLanes<T>)),
        queries(kBlockRows * factors_of<F>(problem.head_dim)),
        grads(kBlockRows * factors_of<F>(problem.value_dim)) {}
};

template <typename T, typename F>
static void take_rows(Arena& arena, const BackwardSizes<T, F>& sizes, bool with_grad, GradRows<T, F>* rows,
                      std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    GradRows<T, F> carved;
    carved.queries = arena.take<F>(sizes.queries);
    carved.packed_queries = arena.take<F>(factors_of<F>(kBlockRows) * sizes.padded_d);
    carved.grads = arena.take<F>(sizes.grads);
    carved.packed_grads = arena.take<F>(factors_of<F>(kBlockRows) * sizes.padded_dv);
    if (with_grad) carved.query_grad = arena.take<T>(kBlockRows * sizes.padded_d);
    if (rows != nullptr) rows[i] = carved;
  }
}

template <typename T, typename F>
static GradKeys<T, F> take_keys(Arena& arena, const CallConstants& call, const BackwardSizes<T, F>& sizes) {
  const core::AttentionProblem& problem = *call.problem;
  GradKeys<T, F> keys;
  keys.keys_transposed = arena.take<F>(kBackwardKeys * factors_of<F>(problem.head_dim));
  keys.values_transposed = arena.take<F>(kBackwardKeys * factors_of<F>(problem.value_dim));
  keys.packed_keys = arena.take<F>(factors_of<F>(kBackwardKeys) * sizes.padded_d);
  keys.key_grad = arena.take<T>(kBackwardKeys * sizes.padded_d);
  keys.value_grad = arena.take<T>(kBackwardKeys * sizes.padded_dv);
  keys.bias_grad = arena.take<T>(kBackwardKeys);
  if (call.masks->has_padding_bias()) keys.key_bias = arena.take<T>(kBackwardKeys);
  return keys;
}

template <typename T, typename F = T>
static GradTile<T, F> take_tile(Arena& arena) {
  GradTile<T, F> tile;
  tile.weights = arena.take<T>(kBlockRows * kBackwardKeys);
  tile.score_grads = arena.take<T>(kBlockRows * kBackwardKeys);
  if constexpr (kIsPair<F>) {
    tile.weight_pairs = arena.take<F>(kBlockRows / 2 * kBackwardKeys);
    tile.score_grad_pairs = arena.take<F>(kBlockRows / 2 * kBackwardKeys);
    tile.score_grad_key_pairs = arena.take<F>(kBlockRows * kKeyPairs);
  }
  tile.best = arena.take<T>(kBlockRows * kLanes<T>);
  tile.mask = arena.take<TileMask<kBackwardKeys>>(1);
  return tile;
}

template <typename T, typename F>
static void pack_grad_rows(const BackwardPlan& plan, const BackwardSizes<T, F>& sizes, const RowBlock& block,
                           GradRows<T, F>& rows) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const KeySpan span{nullptr, block.row_begin, block.rows};
  const Matrix query = matrix_of(problem.query, block.n, block.h);
  rows.block = block;
  for (DropoutGroup& group : rows.dropout) group.group = -1;
  const std::int64_t width = score_rows_read(block.rows);
  rows.not_finite = pack_transposed_factors<T, kBlockRows, Probe::kYes>(
      query, span, problem.head_dim, static_cast<T>(plan.call.query_factor), rows.queries, width);
  rows.query_rows = rows_where_they_lie<T>(query, span, problem.head_dim, sizes.padded_d, rows.packed_queries);
  if (plan.inputs.grad_output) {
    const Matrix grad = matrix_of(plan.inputs.grad_output, block.n, block.h);
    rows.not_finite |=
        pack_transposed_factors<T, kBlockRows, Probe::kYes>(grad, span, problem.value_dim, T{1}, rows.grads, width);
    rows.grad_rows = rows_where_they_lie<T>(grad, span, problem.value_dim, sizes.padded_dv, rows.packed_grads);
  } else {
    for (std::int64_t i = 0; i < sizes.grads; ++i) rows.grads[i] = F{};
    for (std::int64_t i = 0; i < factors_of<F>(kBlockRows) * sizes.padded_dv; ++i) rows.packed_grads[i] = F{};
    rows.grad_rows = rows.packed_grads;
  }
  const std::int64_t statistic = (block.n * problem.heads + block.h) * problem.query_length + block.row_begin;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const T largest = static_cast<const T*>(plan.inputs.row_max)[statistic + row];
    const T sum = static_cast<const T*>(plan.inputs.row_sum)[statistic + row];
    rows.row_max[row] = largest == kMinusInfinity<T> ? T{0} : largest;
    rows.reciprocal[row] = sum == T{0} ? T{0} : T{1} / sum;
    rows.delta[row] = plan.row_deltas == nullptr ? T{0} : static_cast<const T*>(plan.row_deltas)[statistic + row];
  }
  rows.packed = true;
}

template <typename T, typename F>
static void pack_grad_keys(const CallConstants& call, const BackwardSizes<T, F>& sizes, std::int64_t n,
                           std::int64_t kv_head, GradKeys<T, F>& tile) {
  const core::AttentionProblem& problem = *call.problem;
  const Matrix key = matrix_of(problem.key, n, kv_head);
  tile.keys_not_finite = pack_key_groups<T, Probe::kYes>(key, tile.keys, problem.head_dim, tile.keys_transposed);
  pack_key_groups<T, Probe::kNo>(matrix_of(problem.value, n, kv_head), tile.keys, problem.value_dim,
                                 tile.values_transposed);
  tile.key_rows = rows_where_they_lie<T>(key, tile.keys, problem.head_dim, sizes.padded_d, tile.packed_keys);
  if (tile.key_bias != nullptr) load_key_bias<T>(problem, n, tile.keys, kBackwardKeys, tile.key_bias);
}

/// One row's gradient of returned weights for a group of keys, with the 1 / H of an average; zeros behind the keys.
template <typename T>
static void load_weight_grads(const BackwardPlan& plan, const RowBlock& block, std::int64_t row, const KeySpan& keys,
                              T* out) {
  const core::View& grad = plan.inputs.grad_weights;
  const bool averaged = plan.inputs.weights_mode == core::WeightsMode::kAveraged;
  const T share = averaged ? T{1} / static_cast<T>(plan.call.problem->heads) : T{1};
  const std::int64_t offset = grad.offset(block.n, averaged ? 0 : block.h, block.row_begin + row, 0);
  with_storage<T>(grad.data, grad.dtype, [&](const auto* base) {
    if (keys.positions == nullptr) {
      const auto* first = base + offset + keys.first * grad.strides[3];
      for (std::int64_t i = 0; i < kGroupKeys; i += kLanes<T>) {
        const std::int64_t left = keys.count - i;
        const Vec<T> some = left > 0 ? load_some<T>(first + i * grad.strides[3], grad.strides[3], left) : Vec<T>{};
        store<T>(out + i, some * share);
      }
      return;
    }
    for (std::int64_t i = 0; i < kGroupKeys; ++i) {
      out[i] = i < keys.count ? element_as<T>(base[offset + keys.positions[i] * grad.strides[3]]) * share : T{0};
    }
  });
}

/// Scores of the tile's visible groups, masked, into tile.weights.
template <typename T, typename F>
static void score_grad_tile(const CallConstants& call, const GradRows<T, F>& rows, const GradKeys<T, F>& keys,
                            GradTile<T, F>& tile, Prefetcher& prefetcher) {
  const std::int64_t depth = factors_of<F>(call.problem->head_dim);
  const T factor = static_cast<T>(call.query_factor);
  prefetcher.begin_tile();
  if (tile.mask->any_mixed) prefetch_masks<kBackwardKeys>(call, rows.block, keys.keys, *tile.mask, prefetcher);
  for (std::int64_t group = 0; group < TileMask<kBackwardKeys>::kGroups; ++group) {
    if (tile.mask->is_hidden(group)) continue;
    score_group<T, false, kBackwardKeys>(
        rows.queries, rows.block.rows, keys.keys_transposed + group * kGroupKeys * depth,
        keys.keys.count - group * kGroupKeys, depth, factor, tile.weights + group * kGroupKeys, tile.best, prefetcher);
  }
  if (tile.mask->any_mixed) {
    mask_tile<T, kBackwardKeys>(call, rows.block, keys.keys, keys.key_bias, tile.weights, tile.best, *tile.mask);
  }
}

/// Z * P and dS of one row, in place of scores and dO V^T.
template <typename T, typename F, bool kUnitIsOne>
FUSED_MHA_INLINE void gradient_row(const BackwardPlan& plan, const GradRows<T, F>& rows, std::int64_t row,
                                   const GradKeys<T, F>& keys, const std::uint32_t* keep, GradTile<T, F>& tile) {
  constexpr int kVectors = static_cast<int>(kGroupKeys) / kLanes<T>;
  const Vec<T> unit = broadcast<T>(static_cast<T>(plan.call.unit));
  const Vec<T> reference = broadcast<T>(rows.row_max[row]);
  const Vec<T> reciprocal = broadcast<T>(rows.reciprocal[row]);
  const Vec<T> delta = broadcast<T>(rows.delta[row]);
  const Vec<T> dropout_scale = broadcast<T>(static_cast<T>(plan.call.dropout_scale));
  for (std::int64_t group = 0; group < TileMask<kBackwardKeys>::kGroups; ++group) {
    if (tile.mask->is_hidden(group)) continue;
    T* weights = tile.weights + row * kBackwardKeys + group * kGroupKeys;
    T* score_grads = tile.score_grads + row * kBackwardKeys + group * kGroupKeys;
    T added[kGroupKeys];
    const bool adds_behind = plan.inputs.grad_weights && keep != nullptr && plan.inputs.weights_before_dropout;
    if (plan.inputs.grad_weights) {
      load_weight_grads<T>(plan, rows.block, row, group_of(keys.keys, group), added);
      for (std::int64_t i = 0; i < kGroupKeys && !adds_behind; ++i) score_grads[i] += added[i];
    }
    const bool mixed = tile.mask->is_mixed(group);
    const std::uint32_t visible = mixed ? tile.mask->visible[row][group] : 0xFFFFFFFFU;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vec<T> difference = load<T>(weights + v * kLanes<T>) - reference;
      if constexpr (!kUnitIsOne) difference = difference * unit;
      const Vec<T> p = exp2(difference) * reciprocal;
      Vec<T> kept = p;
      Vec<T> p_grad = load<T>(score_grads + v * kLanes<T>);
      if (keep != nullptr) {
        const std::uint32_t bits = keep[group] >> (v * kLanes<T>);
        kept = select<T>(bits, p * dropout_scale, Vec<T>{});
        p_grad = select<T>(bits, p_grad * dropout_scale, Vec<T>{});
        if (adds_behind) p_grad = p_grad + load<T>(added + v * kLanes<T>);
      }
      Vec<T> score_grad = p * (p_grad - delta);
      if (mixed) {
        // A row that holds NaN is NaN where it sees; what it cannot see stays 0.
        kept = select<T>(visible >> (v * kLanes<T>), kept, Vec<T>{});
        score_grad = select<T>(visible >> (v * kLanes<T>), score_grad, Vec<T>{});
      }
      store<T>(weights + v * kLanes<T>, kept);
      store<T>(score_grads + v * kLanes<T>, score_grad);
    }
  }
}

/// Where attn_mask's gradient will take up the tile's dS.
template <typename T>
static void prefetch_mask_gradient(const BackwardPlan& plan, const RowBlock& block, const KeySpan& keys,
                                   Prefetcher& prefetcher) {
  const core::MutableView& to = plan.outputs.grad_attn_mask;
  if (keys.positions != nullptr || to.strides[3] != 1) return;
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
  const std::int64_t n = plan.outputs.attn_mask_sizes[0] == 1 ? 0 : block.n;
  prefetcher.add_to_tile(
      static_cast<const std::byte*>(to.data) + to.offset(n, block.h, block.row_begin, keys.first) * kSize,
      to.strides[2] * kSize, block.rows, keys.count * kSize);
}

/// Fills tile.weights with Z * P and tile.score_grads with dS; hidden groups become 0 in both.
template <typename T, typename F>
static void gradient_tile(const BackwardPlan& plan, GradRows<T, F>& rows, const GradKeys<T, F>& keys,
                          GradTile<T, F>& tile, Prefetcher& prefetcher) {
  const CallConstants& call = plan.call;
  const std::int64_t value_depth = factors_of<F>(call.problem->value_dim);
  score_grad_tile<T>(call, rows, keys, tile, prefetcher);
  if (plan.adds_mask_gradient) prefetch_mask_gradient<T>(plan, rows.block, keys.keys, prefetcher);
  for (std::int64_t group = 0; group < TileMask<kBackwardKeys>::kGroups; ++group) {
    if (tile.mask->is_hidden(group)) {
      for (std::int64_t row = 0; row < rows.block.rows; ++row) {
        for (std::int64_t i = 0; i < kGroupKeys; i += kLanes<T>) {
          store<T>(tile.weights + row * kBackwardKeys + group * kGroupKeys + i, Vec<T>{});
          store<T>(tile.score_grads + row * kBackwardKeys + group * kGroupKeys + i, Vec<T>{});
        }
      }
    } else {
      score_group<T, false, kBackwardKeys>(rows.grads, rows.block.rows,
                                           keys.values_transposed + group * kGroupKeys * value_depth,
                                           keys.keys.count - group * kGroupKeys, value_depth, T{1},
                                           tile.score_grads + group * kGroupKeys, tile.best, prefetcher);
    }
  }
  for (std::int64_t row = 0; row < rows.block.rows; ++row) {
    std::uint32_t keep[TileMask<kBackwardKeys>::kGroups];
    if (call.has_dropout) {
      dropout_span_bits(call, rows.block.n, rows.block.h, rows.block.row_begin + row, keys.keys, rows.dropout[row],
                        keep);
    }
    const std::uint32_t* bits = call.has_dropout ? keep : nullptr;
    if (call.unit == 1.0) {
      gradient_row<T, F, true>(plan, rows, row, keys, bits, tile);
    } else {
      gradient_row<T, F, false>(plan, rows, row, keys, bits, tile);
    }
  }
}

/// The visible groups' hull: keys [begin, end) of the step, begin a multiple of kRankRowQuantum.
struct KeyHull {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

static KeyHull visible_hull(const TileMask<kBackwardKeys>& mask, std::int64_t keys) {
  std::int64_t first = 0;
  while (mask.is_hidden(first)) ++first;
  std::int64_t last = TileMask<kBackwardKeys>::kGroups - 1;
  while (mask.is_hidden(last)) --last;
  const std::int64_t end = (last + 1) * kGroupKeys;
  return {first * kGroupKeys / kRankRowQuantum * kRankRowQuantum, end < keys ? end : keys};
}

/// The three rank updates where an operand is not finite: only visible pairs may meet.
template <typename T, typename F>
static void accumulate_visible_grads(const BackwardSizes<T, F>& sizes, GradRows<T, F>& rows, GradKeys<T, F>& keys,
                                     const GradTile<T, F>& tile) {
  const auto add = [](T weight, const F* from, std::int64_t row, std::int64_t count, T* to) {
    const Vec<T> factor = broadcast<T>(weight);
    for (std::int64_t i = 0; i < count; i += kLanes<T>) {
      store<T>(to + i, fma(factor, load_row<T>(from, count, row, i), load<T>(to + i)));
    }
  };
  if (!rows.started) {
    for (std::int64_t i = 0; i < kBlockRows * sizes.padded_d; ++i) rows.query_grad[i] = T{0};
  }
  for (std::int64_t row = 0; row < rows.block.rows; ++row) {
    for (std::int64_t key = 0; key < keys.keys.count; ++key) {
      if (!tile.mask->sees(row, key)) continue;
      const T weight = rounded_to<F>(tile.weights[row * kBackwardKeys + key]);
      const T score_grad = rounded_to<F>(tile.score_grads[row * kBackwardKeys + key]);
      add(weight, rows.grad_rows, row, sizes.padded_dv, keys.value_grad + key * sizes.padded_dv);
      add(score_grad, rows.query_rows, row, sizes.padded_d, keys.key_grad + key * sizes.padded_d);
      add(score_grad, keys.key_rows, key, sizes.padded_d, rows.query_grad + row * sizes.padded_d);
    }
  }
}

/// Rounds the groups of keys in [begin, end) of a tile to the pairs that the rank updates multiply: along rows for dV
/// and dK, along keys for dQ. A last row without a partner gets zeros beside it.
template <typename T>
static void round_tile(const GradTile<T, BFloat16Pair>& tile, std::int64_t rows, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kStep = kLanes<T>;
  for (std::int64_t row = 0; row < rows; row += 2) {
    const bool is_last = row + 1 == rows;
    const T* weights = tile.weights + row * kBackwardKeys;
    const T* grads = tile.score_grads + row * kBackwardKeys;
    BFloat16Pair* weight_pairs = tile.weight_pairs + row / 2 * kBackwardKeys;
    BFloat16Pair* grad_pairs = tile.score_grad_pairs + row / 2 * kBackwardKeys;
    BFloat16Pair* key_pairs = tile.score_grad_key_pairs + row * kKeyPairs;
    const auto put = [](BFloat16Pair* to, Vec<T> pairs) { std::memcpy(to, &pairs, sizeof(pairs)); };
    for (std::int64_t key = begin; key < end; key += 2 * kStep) {
      Vec<T> first[2];
      Vec<T> second[2];
      for (int v = 0; v < 2; ++v) {
        const std::int64_t at = key + v * kStep;
        const Vec<T> weight = is_last ? Vec<T>{} : load<T>(weights + kBackwardKeys + at);
        put(weight_pairs + at, round_and_interleave(load<T>(weights + at), weight));
        first[v] = load<T>(grads + at);
        second[v] = is_last ? Vec<T>{} : load<T>(grads + kBackwardKeys + at);
        put(grad_pairs + at, round_and_interleave(first[v], second[v]));
      }
      put(key_pairs + key / 2, round_to_pairs(first[0], first[1]));
      put(key_pairs + kKeyPairs + key / 2, round_to_pairs(second[0], second[1]));
    }
  }
}

/// The three rank updates over the keys [begin, begin + count) of a tile.
template <typename T, typename F>
static void update_ranks(const BackwardSizes<T, F>& sizes, GradRows<T, F>& rows, GradKeys<T, F>& keys,
                         const GradTile<T, F>& tile, std::int64_t begin, std::int64_t count) {
  T* value_grad = keys.value_grad + begin * sizes.padded_dv;
  T* key_grad = keys.key_grad + begin * sizes.padded_d;
  const std::int64_t row_steps = factors_of<F>(rows.block.rows);
  const F* weights = nullptr;
  const F* score_grads = nullptr;
  if constexpr (kIsPair<F>) {
    const std::int64_t first_group = begin / kGroupKeys * kGroupKeys;
    round_tile<T>(tile, rows.block.rows, first_group, begin + round_up(count, kRankRowQuantum));
    weights = tile.weight_pairs + begin;
    score_grads = tile.score_grad_pairs + begin;
  } else {
    weights = tile.weights + begin;
    score_grads = tile.score_grads + begin;
  }
  rank_update<T, 1, kBackwardKeys>(weights, count, rows.grad_rows, sizes.padded_dv, row_steps, value_grad, true);
  rank_update<T, 1, kBackwardKeys>(score_grads, count, rows.query_rows, sizes.padded_d, row_steps, key_grad, true);
  const F* key_rows = keys.key_rows + factors_of<F>(begin) * sizes.padded_d;
  const std::int64_t key_steps = factors_of<F>(count);
  if constexpr (kIsPair<F>) {
    rank_update<T, kKeyPairs, 1>(tile.score_grad_key_pairs + begin / 2, rows.block.rows, key_rows, sizes.padded_d,
                                 key_steps, rows.query_grad, rows.started);
  } else {
    clear_rows_behind<kBackwardKeys>(tile.score_grads + begin, rows.block.rows, count);
    rank_update<T, kBackwardKeys, 1>(score_grads, rows.block.rows, key_rows, sizes.padded_d, key_steps, rows.query_grad,
                                     rows.started);
  }
}

template <typename T, typename F>
static void accumulate_grads(const BackwardPlan& plan, const BackwardSizes<T, F>& sizes, GradRows<T, F>& rows,
                             GradKeys<T, F>& keys, const GradTile<T, F>& tile) {
  if (plan.key_bias_partials != nullptr) {
    for (std::int64_t row = 0; row < rows.block.rows; ++row) {
      for (std::int64_t key = 0; key < kBackwardKeys; key += kLanes<T>) {
        store<T>(keys.bias_grad + key,
                 load<T>(keys.bias_grad + key) + load<T>(tile.score_grads + row * kBackwardKeys + key));
      }
    }
  }
  if ((tile.mask->any_mixed || tile.mask->any_hidden) && (rows.not_finite || keys.keys_not_finite)) {
    accumulate_visible_grads<T>(sizes, rows, keys, tile);
  } else {
    const KeyHull hull = visible_hull(*tile.mask, keys.keys.count);
    update_ranks<T>(sizes, rows, keys, tile, hull.begin, hull.end - hull.begin);
  }
  rows.started = true;
}

/// Adds a tile's dS to attn_mask's gradient, which nobody else adds to meanwhile; begins with it if `is_first`.
template <typename T, typename F>
static void add_mask_gradient(const BackwardPlan& plan, const RowBlock& block, const KeySpan& keys, bool is_first,
                              const GradTile<T, F>& tile) {
  const core::MutableView& to = plan.outputs.grad_attn_mask;
  const std::int64_t n = plan.outputs.attn_mask_sizes[0] == 1 ? 0 : block.n;
  const std::int64_t masked = plan.call.problem->masked_keys();
  std::int64_t count = keys.count;
  while (count > 0 && keys[count - 1] >= masked) --count;
  const bool in_order = keys.positions == nullptr && to.strides[3] == 1;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    T* target = static_cast<T*>(to.data) + to.offset(n, block.h, block.row_begin + row, 0);
    const T* from = tile.score_grads + row * kBackwardKeys;
    std::int64_t i = 0;
    if (in_order) {
      T* run = target + keys.first;
      for (; i + kLanes<T> <= count; i += kLanes<T>) {
        store<T>(run + i, is_first ? load<T>(from + i) : load<T>(run + i) + load<T>(from + i));
      }
    }
    for (; i < count; ++i) {
      T& element = target[keys[i] * to.strides[3]];
      element = is_first ? from[i] : element + from[i];
    }
  }
}

/// Writes a finished step's key and value gradients to the keys it stands for.
template <typename T, typename F>
static void store_key_grads(const BackwardPlan& plan, const BackwardSizes<T, F>& sizes, const BackwardItem& item,
                            const GradKeys<T, F>& keys) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const core::MutableView& key_grad = plan.outputs.grad_key;
  const core::MutableView& value_grad = plan.outputs.grad_value;
  for (std::int64_t i = 0; i < keys.keys.count; ++i) {
    const std::int64_t s = keys.keys[i];
    if (key_grad) {
      store_row<T>(keys.key_grad + i * sizes.padded_d, problem.head_dim, static_cast<T>(problem.scale), key_grad,
                   key_grad.offset(item.n, item.kv_head, s, 0));
    }
    if (value_grad) {
      store_row<T>(keys.value_grad + i * sizes.padded_dv, problem.value_dim, T{1}, value_grad,
                   value_grad.offset(item.n, item.kv_head, s, 0));
    }
    if (plan.key_bias_partials != nullptr) {
      static_cast<T*>(plan.key_bias_partials)[(item.n * problem.kv_heads + item.kv_head) * problem.key_length + s] =
          keys.bias_grad[i];
    }
  }
}

/// Keys that key_padding_mask hides get gradient 0.
template <typename T, typename F>
static void store_hidden_key_grads(const BackwardPlan& plan, const BackwardSizes<T, F>& sizes, const BackwardItem& item,
                                   GradKeys<T, F>& keys) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const KeySpan& kept = plan.call.masks->kept_keys(item.n);
  if (kept.count == problem.key_length) return;
  for (std::int64_t i = 0; i < sizes.padded_d; ++i) keys.key_grad[i] = T{0};
  for (std::int64_t i = 0; i < sizes.padded_dv; ++i) keys.value_grad[i] = T{0};
  keys.bias_grad[0] = T{0};
  std::int64_t next = 0;
  for (std::int64_t s = 0; s < problem.key_length; ++s) {
    if (next < kept.count && kept[next] == s) {
      ++next;
      continue;
    }
    keys.keys = {nullptr, s, 1};
    store_key_grads<T>(plan, sizes, item, keys);
  }
}

template <typename T, typename F>
static void store_query_grads(const BackwardPlan& plan, const BackwardSizes<T, F>& sizes, const RowBlock& block,
                              const T* sums) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const core::MutableView& to = plan.outputs.grad_query;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    store_row<T>(sums + row * sizes.padded_d, problem.head_dim, static_cast<T>(problem.scale), to,
                 to.offset(block.n, block.h, block.row_begin + row, 0));
  }
}

template <typename T, typename F>
static T* query_partial(const BackwardPlan& plan, const BackwardSizes<T, F>& sizes, std::int64_t n,
                        std::int64_t kv_head, std::int64_t split, std::int64_t block_index) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const std::int64_t blocks = problem.heads_per_kv_head() * plan.call.blocks_per_head;
  const std::int64_t part = (n * problem.kv_heads + kv_head) * plan.key_splits + split;
  return static_cast<T*>(plan.query_partials) + (part * blocks + block_index) * kBlockRows * sizes.padded_d;
}

template <typename T>
static std::size_t partial_row_elements(const BackwardPlan& plan) {
  return static_cast<std::size_t>(BackwardSizes<T>(*plan.call.problem).padded_d);
}

template <typename T, typename F>
struct BackwardScratch {
  GradRows<T, F>* rows = nullptr;
  GradKeys<T, F> keys;
  GradTile<T, F> tile;
  std::int64_t blocks = 0;
  Prefetcher prefetcher;

  std::size_t carve(const BackwardPlan& plan, const BackwardSizes<T, F>& sizes, std::byte* base) {
    Arena arena(base);
    blocks = plan.call.problem->heads_per_kv_head() * plan.call.blocks_per_head;
    rows = arena.take<GradRows<T, F>>(blocks);
    take_rows<T, F>(arena, sizes, plan.key_splits == 1, rows, blocks);
    keys = take_keys<T, F>(arena, plan.call, sizes);
    tile = take_tile<T, F>(arena);
    return arena.used();
  }
};

template <typename T, typename F = T>
static std::size_t backward_scratch(const BackwardPlan& plan) {
  return BackwardScratch<T, F>{}.carve(plan, BackwardSizes<T, F>(*plan.call.problem), nullptr);
}

/// One step of keys against every block of rows.
template <typename T, typename F>
static void backward_step(const BackwardPlan& plan, const BackwardSizes<T, F>& sizes, const BackwardItem& item,
                          BackwardScratch<T, F>& scratch) {
  const CallConstants& call = plan.call;
  GradKeys<T, F>& keys = scratch.keys;
  const std::int64_t first_head = item.kv_head * call.problem->heads_per_kv_head();
  const bool begins_mask_gradient = plan.begins_mask_gradient && (plan.outputs.attn_mask_sizes[0] > 1 || item.n == 0);
  pack_grad_keys<T>(call, sizes, item.n, item.kv_head, keys);
  const std::int64_t sums = round_up(keys.keys.count, kRankRowQuantum);
  for (std::int64_t i = 0; i < sums * sizes.padded_d; ++i) keys.key_grad[i] = T{0};
  for (std::int64_t i = 0; i < sums * sizes.padded_dv; ++i) keys.value_grad[i] = T{0};
  for (std::int64_t i = 0; i < kBackwardKeys; ++i) keys.bias_grad[i] = T{0};
  for (std::int64_t i = 0; i < scratch.blocks; ++i) {
    GradRows<T, F>& rows = scratch.rows[i];
    const RowBlock block = row_block(call, item.n, first_head + i / call.blocks_per_head, i % call.blocks_per_head);
    classify_tile<kBackwardKeys>(call, block, keys.keys, *scratch.tile.mask);
    if (!scratch.tile.mask->any_visible) {
      if (begins_mask_gradient) {
        for (std::int64_t k = 0; k < kBlockRows * kBackwardKeys; ++k) scratch.tile.score_grads[k] = T{0};
        add_mask_gradient<T>(plan, block, keys.keys, true, scratch.tile);
      }
      continue;
    }
    if (!rows.packed) pack_grad_rows<T>(plan, sizes, block, rows);
    gradient_tile<T>(plan, rows, keys, scratch.tile, scratch.prefetcher);
    if (plan.adds_mask_gradient) add_mask_gradient<T>(plan, block, keys.keys, begins_mask_gradient, scratch.tile);
    accumulate_grads<T>(plan, sizes, rows, keys, scratch.tile);
  }
  store_key_grads<T>(plan, sizes, item, keys);
}

/// What the item that comes after this one will read, and what this one will write.
template <typename T, typename F>
static void plan_prefetch(const BackwardPlan& plan, const BackwardItem& item, const BackwardItem& next,
                          BackwardScratch<T, F>& scratch) {
  const core::AttentionProblem& problem = *plan.call.problem;
  Prefetcher& prefetcher = scratch.prefetcher;
  const auto keys_of = [&](const BackwardItem& of) {
    const KeySpan& kept = plan.call.masks->kept_keys(of.n);
    const std::int64_t begin = kept.count * of.split / plan.key_splits;
    return kept.count == 0 ? kept : kept.part(begin, kept.count * (of.split + 1) / plan.key_splits - begin);
  };
  const auto add_rows = [&](const auto& view, const BackwardItem& of, std::int64_t columns) {
    for (std::int64_t i = 0; i < problem.heads_per_kv_head(); ++i) {
      prefetcher.add(matrix_of(view, of.n, of.kv_head * problem.heads_per_kv_head() + i),
                     {nullptr, 0, problem.query_length}, columns);
    }
  };
  const KeySpan keys = keys_of(item);
  prefetcher.add(matrix_of(plan.outputs.grad_key, item.n, item.kv_head), keys, problem.head_dim);
  prefetcher.add(matrix_of(plan.outputs.grad_value, item.n, item.kv_head), keys, problem.value_dim);
  if (plan.key_splits == 1) add_rows(plan.outputs.grad_query, item, problem.head_dim);
  const KeySpan next_keys = keys_of(next);
  prefetcher.add(matrix_of(problem.key, next.n, next.kv_head), next_keys, problem.head_dim);
  prefetcher.add(matrix_of(problem.value, next.n, next.kv_head), next_keys, problem.value_dim);
  if (next.n != item.n || next.kv_head != item.kv_head) {
    add_rows(problem.query, next, problem.head_dim);
    add_rows(plan.inputs.grad_output, next, problem.value_dim);
  }
  const std::int64_t tiles = (keys.count + kGroupKeys - 1) / kGroupKeys * (kBlockRows / kScoreRows);
  prefetcher.spread_over(2 * tiles * scratch.blocks);
}

/// One sample of an item.
template <typename T, typename F>
static void backward_sample(const BackwardPlan& plan, const BackwardItem& item, const BackwardItem& next,
                            std::byte* base) {
  const CallConstants& call = plan.call;
  const BackwardSizes<T, F> sizes(*call.problem);
  BackwardScratch<T, F> scratch;
  scratch.carve(plan, sizes, base);
  if (plan.key_splits > 1) {
    for (std::int64_t i = 0; i < scratch.blocks; ++i) {
      scratch.rows[i].query_grad = query_partial<T>(plan, sizes, item.n, item.kv_head, item.split, i);
    }
  }
  plan_prefetch<T>(plan, item, next, scratch);
  if (item.split == 0) store_hidden_key_grads<T>(plan, sizes, item, scratch.keys);
  const KeySpan& kept = call.masks->kept_keys(item.n);
  const std::int64_t steps = (kept.count + kBackwardKeys - 1) / kBackwardKeys;
  const std::int64_t end = steps * (item.split + 1) / plan.key_splits;
  for (std::int64_t step = steps * item.split / plan.key_splits; step < end; ++step) {
    const std::int64_t begin = step * kBackwardKeys;
    const std::int64_t left = kept.count - begin;
    scratch.keys.keys = kept.part(begin, left < kBackwardKeys ? left : kBackwardKeys);
    backward_step<T>(plan, sizes, item, scratch);
  }
  const std::int64_t first_head = item.kv_head * call.problem->heads_per_kv_head();
  for (std::int64_t i = 0; i < scratch.blocks; ++i) {
    GradRows<T, F>& rows = scratch.rows[i];
    if (!rows.started) {
      for (std::int64_t k = 0; k < kBlockRows * sizes.padded_d; ++k) rows.query_grad[k] = T{0};
    }
    if (plan.key_splits == 1 && plan.outputs.grad_query) {
      store_query_grads<T>(plan, sizes,
                           row_block(call, item.n, first_head + i / call.blocks_per_head, i % call.blocks_per_head),
                           rows.query_grad);
    }
  }
}

template <typename T, typename F = T>
static void backward_item(const BackwardPlan& plan, const BackwardItem& item, const BackwardItem& next,
                          std::byte* base) {
  for (std::int64_t n = item.n; n < item.n_end; ++n) {
    const BackwardItem sample{n, n + 1, item.kv_head, item.split};
    const BackwardItem after{n + 1, n + 2, item.kv_head, item.split};
    backward_sample<T, F>(plan, sample, n + 1 < item.n_end ? after : next, base);
  }
}

/// Adds up the splits' sums of one block of rows, first split first.
template <typename T>
static void reduce_query(const BackwardPlan& plan, std::int64_t n, std::int64_t h, std::int64_t block) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const BackwardSizes<T> sizes(problem);
  const std::int64_t kv_head = h / problem.heads_per_kv_head();
  const std::int64_t index = h % problem.heads_per_kv_head() * plan.call.blocks_per_head + block;
  T* sums = query_partial<T>(plan, sizes, n, kv_head, 0, index);
  for (std::int64_t split = 1; split < plan.key_splits; ++split) {
    const T* part = query_partial<T>(plan, sizes, n, kv_head, split, index);
    for (std::int64_t i = 0; i < kBlockRows * sizes.padded_d; i += kLanes<T>) {
      store<T>(sums + i, load<T>(sums + i) + load<T>(part + i));
    }
  }
  store_query_grads<T>(plan, sizes, row_block(plan.call, n, h, block), sums);
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
