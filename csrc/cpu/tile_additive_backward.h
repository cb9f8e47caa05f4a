// SPDX-License-Identifier: BSD-3-Clause
//
// Gradients of attention with additive scores, one work item: a part of one head's keys against all rows that share
// them. Weights P and score gradients dS of a tile as in tile_backward.h, scores as in tile_additive.h; then, with
// r = r(q + k) of simd/tanh.h made again from the factors,
//
//   dq[l][d] = 4 v[d] sum_s dS r (1 - r)       dk[s][d] = 4 v[d] sum_l dS r (1 - r)       dv[d] = -2 sum_ls dS r
//
// (dv without sum_ls dS, which is 0: the scores of a row may all grow by the same number.) Here the lanes of a vector
// are features, so that all three sums are vectors. Sums in T, in an order that does not depend on the schedule.
// A hidden pair takes no part: dS = 0 by selection, and where features may be NaN it is skipped.
#pragma once

#include "cpu/tile_additive.h"
#include "cpu/tile_mask_gradient.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// One block of rows against one step of keys, and what both are packed into.
template <typename T>
struct AdditiveGradScratch {
  std::int64_t padded_d = 0;
  std::int64_t padded_dv = 0;

  RowBlock block;
  Features<T> rows;        // [kBlockRows][padded D]
  T* grads = nullptr;      // dO: [Dv][kBlockRows]
  T* grad_rows = nullptr;  // dO: [kBlockRows][padded Dv]
  ScoreWeight<T> score_weight;
  T row_max[kBlockRows];     // 0 where the row saw nothing
  T reciprocal[kBlockRows];  // 1 / row_sum, 0 where the row saw nothing
  T delta[kBlockRows];
  bool grads_not_finite = false;

  KeySpan keys;
  Features<T> keys_transposed;  // [D][kBackwardKeys]; not with few rows
  Features<T> key_rows;         // [kBackwardKeys][padded D]
  T* values = nullptr;          // [Dv][kBackwardKeys], or with few rows [kBackwardKeys][padded Dv]
  T* key_bias = nullptr;        // [kBackwardKeys], null where key_padding_mask adds nothing

  T* weights = nullptr;      // P, then Z P: [kBlockRows][kBackwardKeys]
  T* score_grads = nullptr;  // dP, then dS
  T* best = nullptr;         // what mask_tile wants; not used
  TileMask<kBackwardKeys>* mask = nullptr;

  void carve(const CallConstants& call, Arena& arena) {
    const core::AttentionProblem& problem = *call.problem;
    padded_d = round_up(problem.head_dim, kLanes<T>);
    padded_dv = round_up(problem.value_dim, kLanes<T>);
    rows = take_features<T>(arena, kBlockRows * padded_d);
    grads = arena.take<T>(kBlockRows * problem.value_dim + kLanes<T>);
    grad_rows = arena.take<T>(kBlockRows * padded_dv);
    score_weight = take_score_weight<T>(arena, padded_d);
    keys_transposed = take_features<T>(arena, kBackwardKeys * problem.head_dim + kLanes<T>);
    key_rows = take_features<T>(arena, kBackwardKeys * padded_d);
    values = arena.take<T>(kBackwardKeys * padded_dv + kLanes<T>);
    if (call.masks->has_padding_bias()) key_bias = arena.take<T>(kBackwardKeys);
    weights = arena.take<T>(kBlockRows * kBackwardKeys);
    score_grads = arena.take<T>(kBlockRows * kBackwardKeys);
    best = arena.take<T>(kBlockRows * kLanes<T>);
    mask = arena.take<TileMask<kBackwardKeys>>(1);
  }
};

template <typename T>
static void pack_additive_grad_rows(const AdditiveBackwardPlan& plan, const RowBlock& block,
                                    AdditiveGradScratch<T>& scratch) {
  const BackwardPlan& attention = plan.attention;
  const core::AttentionProblem& problem = *attention.call.problem;
  const KeySpan span{nullptr, block.row_begin, block.rows};
  scratch.block = block;
  pack_score_weight<T>(attention.call, plan.score_weight, block.h, scratch.padded_d, scratch.score_weight);
  const bool few = has_few_rows(problem);
  pack_row_features<T>(problem.query, block.n, block.h, span, problem.head_dim, scratch.padded_d, block.rows, !few,
                       scratch.rows);
  if (attention.inputs.grad_output) {
    const Matrix grad = matrix_of(attention.inputs.grad_output, block.n, block.h);
    if (!few) pack_transposed<T, kBlockRows, Probe::kNo>(grad, span, problem.value_dim, T{1}, scratch.grads);
    scratch.grads_not_finite =
        pack_rows<T>(grad, span, problem.value_dim, scratch.padded_dv, block.rows, T{1}, scratch.grad_rows);
  }
  const std::int64_t statistic = (block.n * problem.heads + block.h) * problem.query_length + block.row_begin;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const T largest = static_cast<const T*>(attention.inputs.row_max)[statistic + row];
    const T sum = static_cast<const T*>(attention.inputs.row_sum)[statistic + row];
    scratch.row_max[row] = largest == kMinusInfinity<T> ? T{0} : largest;
    scratch.reciprocal[row] = sum == T{0} ? T{0} : T{1} / sum;
    scratch.delta[row] = static_cast<const T*>(attention.row_deltas)[statistic + row];
  }
}

template <typename T>
static void pack_additive_grad_keys(const AdditiveBackwardPlan& plan, std::int64_t n, std::int64_t kv_head,
                                    AdditiveGradScratch<T>& scratch) {
  const core::AttentionProblem& problem = *plan.attention.call.problem;
  const bool few = has_few_rows(problem);
  const Matrix value = matrix_of(problem.value, n, kv_head);
  pack_row_features<T>(problem.key, n, kv_head, scratch.keys, problem.head_dim, scratch.padded_d, scratch.keys.count,
                       !few, scratch.key_rows);
  if (few) {
    pack_rows<T>(value, scratch.keys, problem.value_dim, scratch.padded_dv, scratch.keys.count, T{1}, scratch.values);
  } else {
    pack_key_features<T, kBackwardKeys>(problem.key, n, kv_head, scratch.keys, problem.head_dim, true,
                                        scratch.keys_transposed);
    pack_transposed<T, kBackwardKeys, Probe::kNo>(value, scratch.keys, problem.value_dim, T{1}, scratch.values);
  }
  if (scratch.key_bias != nullptr) load_key_bias<T>(problem, n, scratch.keys, kBackwardKeys, scratch.key_bias);
}

/// dP + gW, P and dS of one row, in place of dO V^T and scores; hidden pairs become 0.
template <typename T>
static void additive_gradient_row(const BackwardPlan& plan, std::int64_t row, const std::uint32_t* keep,
                                  AdditiveGradScratch<T>& scratch) {
  constexpr int kVectors = static_cast<int>(kGroupKeys) / kLanes<T>;
  const TileMask<kBackwardKeys>& mask = *scratch.mask;
  const Vec<T> unit = broadcast<T>(static_cast<T>(plan.call.unit));
  const Vec<T> reference = broadcast<T>(scratch.row_max[row]);
  const Vec<T> reciprocal = broadcast<T>(scratch.reciprocal[row]);
  const Vec<T> delta = broadcast<T>(scratch.delta[row]);
  const Vec<T> dropout_scale = broadcast<T>(static_cast<T>(plan.call.dropout_scale));
  for (std::int64_t group = 0; group < TileMask<kBackwardKeys>::kGroups; ++group) {
    T* weights = scratch.weights + row * kBackwardKeys + group * kGroupKeys;
    T* score_grads = scratch.score_grads + row * kBackwardKeys + group * kGroupKeys;
    if (mask.is_hidden(group)) {
      for (std::int64_t i = 0; i < kGroupKeys; ++i) weights[i] = score_grads[i] = T{0};
      continue;
    }
    T added[kGroupKeys] = {};
    if (plan.inputs.grad_weights) {
      load_weight_grads<T>(plan, scratch.block, row, group_of(scratch.keys, group), added);
    }
    const std::uint32_t visible = mask.is_mixed(group) ? mask.visible[row][group] : 0xFFFFFFFFU;
    for (int v = 0; v < kVectors; ++v) {
      const Vec<T> p = exp2((load<T>(weights + v * kLanes<T>) - reference) * unit) * reciprocal;
      Vec<T> kept = p;
      Vec<T> p_grad = load<T>(score_grads + v * kLanes<T>) + load<T>(added + v * kLanes<T>);
      if (keep != nullptr) {
        const std::uint32_t bits = keep[group] >> (v * kLanes<T>);
        kept = select<T>(bits, p * dropout_scale, Vec<T>{});
        p_grad = select<T>(bits, p_grad * dropout_scale, Vec<T>{});
      }
      const std::uint32_t seen = visible >> (v * kLanes<T>);
      store<T>(weights + v * kLanes<T>, select<T>(seen, kept, Vec<T>{}));
      store<T>(score_grads + v * kLanes<T>, select<T>(seen, p * (p_grad - delta), Vec<T>{}));
    }
  }
}

/// Fills `weights` with Z P and `score_grads` with dS for the rows and keys at hand, whose masks are classified.
template <typename T>
static void additive_gradient_tile(const AdditiveBackwardPlan& plan, AdditiveGradScratch<T>& scratch) {
  const BackwardPlan& attention = plan.attention;
  const CallConstants& call = attention.call;
  const bool few = has_few_rows(*call.problem);
  additive_scores<T, kBackwardKeys>(call, scratch.block, scratch.rows, scratch.padded_d,
                                    few ? scratch.key_rows : scratch.keys_transposed, scratch.keys, scratch.key_bias,
                                    scratch.score_weight, *scratch.mask, scratch.weights, scratch.best);
  if (attention.inputs.grad_output && few) {
    const std::int64_t ld = scratch.padded_dv;
    const auto dot = [ld](const T* row, const T* value) {
      Vec<T> sum{};
      for (std::int64_t i = 0; i < ld; i += kLanes<T>) sum = fma(load<T>(row + i), load<T>(value + i), sum);
      return sum;
    };
    few_row_products<T, kBackwardKeys>(scratch.grad_rows, scratch.block.rows, ld, scratch.values, scratch.keys.count,
                                       ld, *scratch.mask, dot, scratch.score_grads);
  } else if (attention.inputs.grad_output) {
    rank_update<T, 1, kBlockRows>(scratch.grads, scratch.block.rows, scratch.values, kBackwardKeys,
                                  call.problem->value_dim, scratch.score_grads, false);
  } else {
    for (std::int64_t i = 0; i < kBlockRows * kBackwardKeys; ++i) scratch.score_grads[i] = T{0};
  }
  for (std::int64_t row = 0; row < scratch.block.rows; ++row) {
    std::uint32_t keep[TileMask<kBackwardKeys>::kGroups];
    if (call.has_dropout) {
      DropoutGroup group;
      dropout_span_bits(call, scratch.block.n, scratch.block.h, scratch.block.row_begin + row, scratch.keys, group,
                        keep);
    }
    additive_gradient_row<T>(attention, row, call.has_dropout ? keep : nullptr, scratch);
  }
}

/// sum_s W gW of a block's rows, added to the deltas.
template <typename T>
static void additive_weight_delta_block(const AdditiveBackwardPlan& plan, std::int64_t n, std::int64_t h,
                                        std::int64_t index, std::byte* base) {
  const BackwardPlan& attention = plan.attention;
  const CallConstants& call = attention.call;
  const core::AttentionProblem& problem = *call.problem;
  const RowBlock block = row_block(call, n, h, index);
  const KeySpan& kept = call.masks->kept_keys(n);
  T* deltas = static_cast<T*>(attention.row_deltas) + (n * problem.heads + h) * problem.query_length + block.row_begin;
  Arena arena(base);
  AdditiveGradScratch<T> scratch;
  scratch.carve(call, arena);
  pack_additive_grad_rows<T>(plan, block, scratch);
  for (std::int64_t begin = 0; begin < kept.count; begin += kBackwardKeys) {
    const std::int64_t left = kept.count - begin;
    scratch.keys = kept.part(begin, left < kBackwardKeys ? left : kBackwardKeys);
    classify_tile<kBackwardKeys>(call, block, scratch.keys, *scratch.mask);
    if (!scratch.mask->any_visible) continue;
    pack_additive_grad_keys<T>(plan, n, h / problem.heads_per_kv_head(), scratch);
    additive_gradient_tile<T>(plan, scratch);
    for (std::int64_t row = 0; row < block.rows; ++row) {
      Vec<T> sum{};
      for (std::int64_t group = 0; group < TileMask<kBackwardKeys>::kGroups; ++group) {
        if (scratch.mask->is_hidden(group)) continue;
        const std::uint32_t visible = scratch.mask->is_mixed(group) ? scratch.mask->visible[row][group] : 0xFFFFFFFFU;
        T added[kGroupKeys];
        load_weight_grads<T>(attention, block, row, group_of(scratch.keys, group), added);
        for (std::int64_t i = 0; i < kGroupKeys; i += kLanes<T>) {
          // A gradient that is not finite must not meet the weight 0 of a hidden key.
          const Vec<T> grad = select<T>(visible >> i, load<T>(added + i), Vec<T>{});
          sum = fma(load<T>(scratch.weights + row * kBackwardKeys + group * kGroupKeys + i), grad, sum);
        }
      }
      deltas[row] += reduce_add<T>(sum);
    }
  }
}

/// Sums over a tile's pairs, in units of 1 / (4 v): see the header. All rows of features `ld` apart.
template <typename T>
struct FeatureGrads {
  T* query = nullptr;         // [kBlockRows], of the block at hand
  T* key = nullptr;           // [kBackwardKeys], times 4 v: heads that share the key differ in v
  T* score_weight = nullptr;  // [ld]: sum dS r
};

/// kRows rows and one vector of features, over all keys of a tile.
template <typename T, bool kFactors, int kRows>
FUSED_MHA_INLINE void feature_grad_tile(const T* __restrict rows, const T* __restrict keys, std::int64_t ld,
                                        std::int64_t key_count, const T* __restrict score_grads, Vec<T> four_v,
                                        T* __restrict query_grad, T* __restrict key_grad, T* __restrict weight_grad) {
  const Vec<T> zero{};
  Vec<T> row[kRows];
  Vec<T> row_sum[kRows];
  Vec<T> rest_sum{};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    row[r] = load<T>(rows + r * ld);
    row_sum[r] = zero;
  }
  for (std::int64_t key = 0; key < key_count; ++key) {
    const Vec<T> column = load<T>(keys + key * ld);
    Vec<T> key_sum{};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> score_grad = broadcast<T>(score_grads[r * kBackwardKeys + key]);
      const Vec<T> rest = tanh_rest<T, kFactors>(row[r], column);
      const Vec<T> slope = fma(-rest, rest, rest);
      row_sum[r] = fma(score_grad, slope, row_sum[r]);
      key_sum = fma(score_grad, slope, key_sum);
      rest_sum = fma(score_grad, rest, rest_sum);
    }
    store<T>(key_grad + key * ld, fma(four_v, key_sum, load<T>(key_grad + key * ld)));
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) store<T>(query_grad + r * ld, load<T>(query_grad + r * ld) + row_sum[r]);
  store<T>(weight_grad, load<T>(weight_grad) + rest_sum);
}

/// The same pair by pair: features that are not finite, which only a row that sees them may meet.
template <typename T>
static void add_visible_feature_grads(const AdditiveGradScratch<T>& scratch, std::int64_t column, Vec<T> four_v,
                                      const FeatureGrads<T>& grads) {
  const std::int64_t ld = scratch.padded_d;
  for (std::int64_t row = 0; row < scratch.block.rows; ++row) {
    for (std::int64_t key = 0; key < scratch.keys.count; ++key) {
      if (!scratch.mask->sees(row, key)) continue;
      feature_grad_tile<T, false, 1>(scratch.rows.raw + row * ld + column, scratch.key_rows.raw + key * ld + column, ld,
                                     1, scratch.score_grads + row * kBackwardKeys + key, four_v,
                                     grads.query + row * ld + column, grads.key + key * ld + column,
                                     grads.score_weight + column);
    }
  }
}

template <typename T>
static void add_feature_grads(const AdditiveBackwardPlan& plan, const AdditiveGradScratch<T>& scratch,
                              const FeatureGrads<T>& grads) {
  constexpr int kRows = kRegisters == 32 ? 6 : 2;
  const std::int64_t ld = scratch.padded_d;
  const std::int64_t rows = scratch.block.rows;
  const bool by_factors = scratch.rows.has_factors && scratch.key_rows.has_factors;
  const bool by_pairs =
      (scratch.rows.not_finite || scratch.key_rows.not_finite) && (scratch.mask->any_mixed || scratch.mask->any_hidden);
  // score_weight holds -2 v in the unit of scores.
  const Vec<T> to_four_v = broadcast<T>(static_cast<T>(-2.0 / plan.attention.call.bias_factor));
  for (std::int64_t column = 0; column < ld; column += kLanes<T>) {
    const Vec<T> four_v = load<T>(scratch.score_weight.weight + column) * to_four_v;
    if (by_pairs) {
      add_visible_feature_grads<T>(scratch, column, four_v, grads);
      continue;
    }
    const auto add = [&]<bool kFactors, int kCount>(std::bool_constant<kFactors>, std::integral_constant<int, kCount>,
                                                    std::int64_t row) {
      const T* row_features = kFactors ? scratch.rows.factors : scratch.rows.raw;
      const T* key_features = kFactors ? scratch.key_rows.factors : scratch.key_rows.raw;
      feature_grad_tile<T, kFactors, kCount>(row_features + row * ld + column, key_features + column, ld,
                                             scratch.keys.count, scratch.score_grads + row * kBackwardKeys, four_v,
                                             grads.query + row * ld + column, grads.key + column,
                                             grads.score_weight + column);
    };
    std::int64_t row = 0;
    if (!by_factors) {
      for (; row < rows; ++row) add(std::false_type{}, std::integral_constant<int, 1>{}, row);
      continue;
    }
    for (; row + kRows <= rows; row += kRows) add(std::true_type{}, std::integral_constant<int, kRows>{}, row);
    for (; row < rows; ++row) add(std::true_type{}, std::integral_constant<int, 1>{}, row);
  }
}

/// dV += (Z P)^T dO.
template <typename T>
static void add_value_grads(const AdditiveGradScratch<T>& scratch, T* value_grad) {
  const std::int64_t ld = scratch.padded_dv;
  if (!scratch.grads_not_finite || !(scratch.mask->any_mixed || scratch.mask->any_hidden)) {
    rank_update<T, 1, kBackwardKeys>(scratch.weights, kBackwardKeys, scratch.grad_rows, ld, scratch.block.rows,
                                     value_grad, true);
    return;
  }
  for (std::int64_t row = 0; row < scratch.block.rows; ++row) {
    for (std::int64_t key = 0; key < scratch.keys.count; ++key) {
      if (!scratch.mask->sees(row, key)) continue;
      const Vec<T> weight = broadcast<T>(scratch.weights[row * kBackwardKeys + key]);
      for (std::int64_t i = 0; i < ld; i += kLanes<T>) {
        T* to = value_grad + key * ld + i;
        store<T>(to, fma(weight, load<T>(scratch.grad_rows + row * ld + i), load<T>(to)));
      }
    }
  }
}

/// Sums of one item.
template <typename T>
struct AdditiveBackwardScratch {
  AdditiveGradScratch<T> tile;
  std::int64_t blocks = 0;
  T* query_grad = nullptr;   // [blocks][kBlockRows][padded D], in units of 1 / (4 v)
  T* key_grad = nullptr;     // [kBackwardKeys][padded D]
  T* value_grad = nullptr;   // [kBackwardKeys][padded Dv]
  T* bias_grad = nullptr;    // [kBackwardKeys]
  T* weight_grad = nullptr;  // [heads that share the keys][padded D], in units of -1 / 2

  std::size_t carve(const AdditiveBackwardPlan& plan, std::byte* base) {
    const core::AttentionProblem& problem = *plan.attention.call.problem;
    Arena arena(base);
    tile.carve(plan.attention.call, arena);
    blocks = problem.heads_per_kv_head() * plan.attention.call.blocks_per_head;
    query_grad = arena.take<T>(blocks * kBlockRows * tile.padded_d);
    key_grad = arena.take<T>(kBackwardKeys * tile.padded_d);
    value_grad = arena.take<T>(kBackwardKeys * tile.padded_dv);
    bias_grad = arena.take<T>(kBackwardKeys);
    weight_grad = arena.take<T>(problem.heads_per_kv_head() * tile.padded_d);
    return arena.used();
  }
};

template <typename T>
static std::size_t additive_backward_scratch(const AdditiveBackwardPlan& plan) {
  return AdditiveBackwardScratch<T>{}.carve(plan, nullptr);
}

template <typename T>
static void fill_zero(T* numbers, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) numbers[i] = T{0};
}

/// Writes one key's gradients: row `index` of the sums.
template <typename T>
static void store_additive_key_grads(const BackwardPlan& plan, const BackwardItem& item, std::int64_t s,
                                     std::int64_t index, const AdditiveBackwardScratch<T>& scratch) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const core::MutableView& key = plan.outputs.grad_key;
  const core::MutableView& value = plan.outputs.grad_value;
  if (key) {
    store_row<T>(scratch.key_grad + index * scratch.tile.padded_d, problem.head_dim, T{1}, key,
                 key.offset(item.n, item.kv_head, s, 0));
  }
  if (value) {
    store_row<T>(scratch.value_grad + index * scratch.tile.padded_dv, problem.value_dim, T{1}, value,
                 value.offset(item.n, item.kv_head, s, 0));
  }
  if (plan.key_bias_partials != nullptr) {
    static_cast<T*>(plan.key_bias_partials)[(item.n * problem.kv_heads + item.kv_head) * problem.key_length + s] =
        scratch.bias_grad[index];
  }
}

/// One step of keys against every block of rows.
template <typename T>
static void additive_backward_step(const AdditiveBackwardPlan& plan, const BackwardItem& item,
                                   AdditiveBackwardScratch<T>& scratch) {
  const BackwardPlan& attention = plan.attention;
  const CallConstants& call = attention.call;
  AdditiveGradScratch<T>& tile = scratch.tile;
  const std::int64_t first_head = item.kv_head * call.problem->heads_per_kv_head();
  bool packed = false;
  for (std::int64_t i = 0; i < scratch.blocks; ++i) {
    const std::int64_t head = i / call.blocks_per_head;
    const RowBlock block = row_block(call, item.n, first_head + head, i % call.blocks_per_head);
    classify_tile<kBackwardKeys>(call, block, tile.keys, *tile.mask);
    if (!tile.mask->any_visible) continue;
    if (!packed) pack_additive_grad_keys<T>(plan, item.n, item.kv_head, tile);
    packed = true;
    pack_additive_grad_rows<T>(plan, block, tile);
    additive_gradient_tile<T>(plan, tile);
    if (attention.inputs.grad_output) add_value_grads<T>(tile, scratch.value_grad);
    add_feature_grads<T>(plan, tile,
                         {scratch.query_grad + i * kBlockRows * tile.padded_d, scratch.key_grad,
                          scratch.weight_grad + head * tile.padded_d});
    for (std::int64_t row = 0; row < block.rows; ++row) {
      for (std::int64_t key = 0; key < kBackwardKeys; key += kLanes<T>) {
        store<T>(scratch.bias_grad + key,
                 load<T>(scratch.bias_grad + key) + load<T>(tile.score_grads + row * kBackwardKeys + key));
      }
    }
  }
}

/// The item's query sums times 4 v: to grad_query, or to where the splits' sums are added up.
template <typename T>
static void finish_additive_query_grads(const AdditiveBackwardPlan& plan, const BackwardItem& item,
                                        AdditiveBackwardScratch<T>& scratch) {
  const BackwardPlan& attention = plan.attention;
  const CallConstants& call = attention.call;
  const core::AttentionProblem& problem = *call.problem;
  const core::MutableView& to = attention.outputs.grad_query;
  const std::int64_t ld = scratch.tile.padded_d;
  T* four_v = scratch.tile.score_weight.weight;
  for (std::int64_t i = 0; i < scratch.blocks; ++i) {
    const std::int64_t h = item.kv_head * problem.heads_per_kv_head() + i / call.blocks_per_head;
    const RowBlock block = row_block(call, item.n, h, i % call.blocks_per_head);
    pack_score_weight<T>(plan.score_weight, h, problem.head_dim, ld, T{4}, four_v);
    T* sums = scratch.query_grad + i * kBlockRows * ld;
    for (std::int64_t row = 0; row < block.rows; ++row) {
      for (std::int64_t d = 0; d < ld; d += kLanes<T>) {
        store<T>(sums + row * ld + d, load<T>(sums + row * ld + d) * load<T>(four_v + d));
      }
      if (attention.key_splits == 1) {
        store_row<T>(sums + row * ld, problem.head_dim, T{1}, to, to.offset(item.n, h, block.row_begin + row, 0));
      }
    }
    if (attention.key_splits > 1) {
      const std::int64_t part = (item.n * problem.kv_heads + item.kv_head) * attention.key_splits + item.split;
      T* partial = static_cast<T*>(attention.query_partials) + (part * scratch.blocks + i) * kBlockRows * ld;
      for (std::int64_t k = 0; k < kBlockRows * ld; ++k) partial[k] = sums[k];
    }
  }
}

template <typename T>
static void additive_backward_item(const AdditiveBackwardPlan& plan, const BackwardItem& item, std::byte* base) {
  const BackwardPlan& attention = plan.attention;
  const CallConstants& call = attention.call;
  const core::AttentionProblem& problem = *call.problem;
  AdditiveBackwardScratch<T> scratch;
  scratch.carve(plan, base);
  AdditiveGradScratch<T>& tile = scratch.tile;
  const auto clear_key_sums = [&] {
    fill_zero<T>(scratch.key_grad, kBackwardKeys * tile.padded_d);
    fill_zero<T>(scratch.value_grad, kBackwardKeys * tile.padded_dv);
    fill_zero<T>(scratch.bias_grad, kBackwardKeys);
  };
  fill_zero<T>(scratch.query_grad, scratch.blocks * kBlockRows * tile.padded_d);
  fill_zero<T>(scratch.weight_grad, problem.heads_per_kv_head() * tile.padded_d);
  const KeySpan& kept = call.masks->kept_keys(item.n);
  if (item.split == 0 && kept.count < problem.key_length) {
    clear_key_sums();
    std::int64_t next = 0;
    for (std::int64_t s = 0; s < problem.key_length; ++s) {
      if (next < kept.count && kept[next] == s) {
        ++next;
      } else {
        store_additive_key_grads<T>(attention, item, s, 0, scratch);
      }
    }
  }
  const std::int64_t steps = (kept.count + kBackwardKeys - 1) / kBackwardKeys;
  const std::int64_t end = steps * (item.split + 1) / attention.key_splits;
  for (std::int64_t step = steps * item.split / attention.key_splits; step < end; ++step) {
    const std::int64_t begin = step * kBackwardKeys;
    const std::int64_t left = kept.count - begin;
    tile.keys = kept.part(begin, left < kBackwardKeys ? left : kBackwardKeys);
    clear_key_sums();
    additive_backward_step<T>(plan, item, scratch);
    for (std::int64_t i = 0; i < tile.keys.count; ++i) {
      store_additive_key_grads<T>(attention, item, tile.keys[i], i, scratch);
    }
  }
  if (attention.outputs.grad_query) finish_additive_query_grads<T>(plan, item, scratch);
  if (plan.weight_partials != nullptr) {
    for (std::int64_t head = 0; head < problem.heads_per_kv_head(); ++head) {
      const std::int64_t h = item.kv_head * problem.heads_per_kv_head() + head;
      T* partial = static_cast<T*>(plan.weight_partials) +
                   ((item.n * problem.heads + h) * attention.key_splits + item.split) * tile.padded_d;
      for (std::int64_t d = 0; d < tile.padded_d; ++d)
        partial[d] = T{-2} * scratch.weight_grad[head * tile.padded_d + d];
    }
  }
}

/// Sums of one item of attn_mask's gradient.
template <typename T>
struct AdditiveMaskGradientScratch {
  AdditiveGradScratch<T> tile;
  T* sums = nullptr;  // [rows of the item, or 1][keys of the item, or 1]

  std::size_t carve(const AdditiveBackwardPlan& plan, std::byte* base) {
    Arena arena(base);
    tile.carve(plan.attention.call, arena);
    sums = arena.take<T>(kMaskGradientRows * kMaskGradientKeys);
    return arena.used();
  }
};

template <typename T>
static std::size_t additive_mask_gradient_scratch(const AdditiveBackwardPlan& plan) {
  return AdditiveMaskGradientScratch<T>{}.carve(plan, nullptr);
}

/// Adds what rows [row_begin, row_end) of one head add to an item.
template <typename T>
static void add_additive_head(const AdditiveBackwardPlan& plan, const MaskGradientItem& item, std::int64_t n,
                              std::int64_t h, std::int64_t row_begin, std::int64_t row_end,
                              AdditiveMaskGradientScratch<T>& scratch) {
  const BackwardPlan& attention = plan.attention;
  const CallConstants& call = attention.call;
  const bool by_row = attention.outputs.attn_mask_sizes[2] > 1;
  const bool by_key = attention.outputs.attn_mask_sizes[3] > 1;
  const std::int64_t width = by_key ? item.key_end - item.key_begin : 1;
  const KeySpan& kept = call.masks->kept_keys(n);
  AdditiveGradScratch<T>& tile = scratch.tile;
  std::int64_t begin = lower_bound(kept, item.key_begin);
  const std::int64_t end = lower_bound(kept, by_key ? item.key_end : call.problem->masked_keys());
  for (; begin < end; begin += kBackwardKeys) {
    tile.keys = kept.part(begin, end - begin < kBackwardKeys ? end - begin : kBackwardKeys);
    bool packed = false;
    for (std::int64_t index = row_begin / kBlockRows; index * kBlockRows < row_end; ++index) {
      const RowBlock block = row_block(call, n, h, index);
      classify_tile<kBackwardKeys>(call, block, tile.keys, *tile.mask);
      if (!tile.mask->any_visible) continue;
      if (!packed) pack_additive_grad_keys<T>(plan, n, h / call.problem->heads_per_kv_head(), tile);
      packed = true;
      pack_additive_grad_rows<T>(plan, block, tile);
      additive_gradient_tile<T>(plan, tile);
      for (std::int64_t row = 0; row < block.rows; ++row) {
        T* to = scratch.sums + (by_row ? block.row_begin + row - item.row_begin : 0) * width;
        const T* from = tile.score_grads + row * kBackwardKeys;
        for (std::int64_t i = 0; i < tile.keys.count; ++i) to[by_key ? tile.keys[i] - item.key_begin : 0] += from[i];
      }
    }
  }
}

template <typename T>
static void additive_mask_gradient_item(const AdditiveBackwardPlan& plan, const MaskGradientItem& item,
                                        std::byte* base) {
  const core::AttentionProblem& problem = *plan.attention.call.problem;
  const std::array<std::int64_t, 4>& stored = plan.attention.outputs.attn_mask_sizes;
  AdditiveMaskGradientScratch<T> scratch;
  scratch.carve(plan, base);
  fill_zero<T>(scratch.sums, kMaskGradientRows * kMaskGradientKeys);
  const bool by_row = stored[2] > 1;
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    if (stored[0] > 1 && n != item.n) continue;
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      if (stored[1] > 1 && h != item.h) continue;
      add_additive_head<T>(plan, item, n, h, by_row ? item.row_begin : 0, by_row ? item.row_end : problem.query_length,
                           scratch);
    }
  }
  store_mask_gradient<T>(plan.attention, item, scratch.sums);
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
