// SPDX-License-Identifier: BSD-3-Clause
//
// Forward attention with additive scores, one work item: some blocks of query rows of one head, or one block of every
// head where weights are averaged.
//
//   score[l][s] = sum_d v[d] tanh(q[l][d] + k[s][d])  =  sum_d v[d]  -  2 sum_d v[d] r(q[l][d] + k[s][d])
//   softmax, dropout, masks, output as in tile_forward.h
//
// with r of simd/tanh.h; the first sum keeps scores as small as they are and costs a pair nothing. r comes from factors
// exp(2q), exp(2k) that are made once for a row and once for a key: a pair costs a reciprocal and four multiply-adds a
// feature, no exponential, and nothing of L * S * D elements exists. Rows too few to repay the factors, and features
// beyond kFactorRange (or NaN), take r from the sum instead.
//
// Shapes: q (N, H, L, D), k (N, Hkv, S, D), v (1, H, 1, D); free strides. Sums in T. The order of sums depends on the
// row alone, never on the item. (Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and
// translate", 2015, appendix A.1.2.)
#pragma once

#include "cpu/dropout_bits.h"
#include "cpu/pack.h"
#include "cpu/simd/tanh.h"
#include "cpu/tile_forward.h"
#include "cpu/tile_masks.h"
#include "cpu/tile_math.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// Query rows of a head up to which neither factors nor register tiles pay: a step of a decoder.
inline constexpr std::int64_t kFewAdditiveRows = 2;

FUSED_MHA_INLINE bool has_few_rows(const core::AttentionProblem& problem) {
  return problem.query_length <= kFewAdditiveRows;
}

/// Query or key features, packed, and their factors.
template <typename T>
struct Features {
  T* raw = nullptr;
  T* factors = nullptr;
  bool has_factors = false;
  bool not_finite = false;  // of rows only
};

template <typename T>
static Features<T> take_features(Arena& arena, std::int64_t count) {
  return {arena.take<T>(count), arena.take<T>(count)};
}

/// Fills `factors` from `raw`, a multiple of the vector length, if all of it is within kFactorRange.
template <typename T>
static void make_factors(Features<T>& features, std::int64_t count) {
  const Vec<T> bound = broadcast<T>(kFactorRange<T>);
  VecInt<T> within = Vec<T>{} == Vec<T>{};
  for (std::int64_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> x = load<T>(features.raw + i);
    within = within & (x <= bound) & (x >= -bound);
  }
  features.has_factors = true;
  for (int lane = 0; lane < kLanes<T>; ++lane) features.has_factors = features.has_factors && within[lane] != 0;
  if (!features.has_factors) return;
  for (std::int64_t i = 0; i < count; i += kLanes<T>)
    store<T>(features.factors + i, tanh_factor<T>(load<T>(features.raw + i)));
}

/// Rows of features as they are, rows `padded` apart, zeros behind.
template <typename T>
static void pack_row_features(const core::View& view, std::int64_t n, std::int64_t h, const KeySpan& rows,
                              std::int64_t depth, std::int64_t padded, std::int64_t padded_rows, bool with_factors,
                              Features<T>& features) {
  features.not_finite = pack_rows<T>(matrix_of(view, n, h), rows, depth, padded, padded_rows, T{1}, features.raw);
  features.has_factors = false;
  if (with_factors) make_factors<T>(features, padded_rows * padded);
}

/// Keys of features side by side: [depth][kKeys].
template <typename T, std::int64_t kKeys>
static void pack_key_features(const core::View& view, std::int64_t n, std::int64_t kv_head, const KeySpan& keys,
                              std::int64_t depth, bool with_factors, Features<T>& features) {
  pack_transposed<T, kKeys, Probe::kNo>(matrix_of(view, n, kv_head), keys, depth, T{1}, features.raw);
  features.has_factors = false;
  if (with_factors) make_factors<T>(features, depth * kKeys);
}

/// Features that are summed up before their sum is added to the others': fewer roundings of large sums.
inline constexpr std::int64_t kFeaturesPerSum = 8;

/// v of one head as the sums want it, in the unit of CallConstants.
template <typename T>
struct ScoreWeight {
  T* weight = nullptr;  // [padded D]: -2 v, zeros behind
  T* starts = nullptr;  // what sums of kFeaturesPerSum features start with: their sum of v
  T* lanes = nullptr;   // [lanes]: the same where every lane sums up each lanes-th feature
};

template <typename T>
static ScoreWeight<T> take_score_weight(Arena& arena, std::int64_t padded) {
  return {arena.take<T>(padded), arena.take<T>(padded), arena.take<T>(kLanes<T>)};
}

/// v of one head times `factor`, zeros up to `padded`.
template <typename T>
static void pack_score_weight(const core::View& view, std::int64_t h, std::int64_t depth, std::int64_t padded, T factor,
                              T* out) {
  pack_rows<T>(matrix_of(view, 0, h), {nullptr, 0, 1}, depth, padded, 1, factor, out);
}

template <typename T>
static void pack_score_weight(const CallConstants& call, const core::View& view, std::int64_t h, std::int64_t padded,
                              const ScoreWeight<T>& out) {
  const std::int64_t depth = call.problem->head_dim;
  pack_score_weight<T>(view, h, depth, padded, static_cast<T>(-2.0 * call.bias_factor), out.weight);
  for (std::int64_t d = 0; d < depth; ++d) {
    T& start = out.starts[d / kFeaturesPerSum];
    start = (d % kFeaturesPerSum == 0 ? T{0} : start) - out.weight[d] / T{2};
  }
  Vec<T> lanes{};
  for (std::int64_t d = 0; d < padded; d += kLanes<T>)
    lanes = fma(load<T>(out.weight + d), broadcast<T>(T(-0.5)), lanes);
  store<T>(out.lanes, lanes);
}

template <typename T, bool kFactors>
FUSED_MHA_INLINE Vec<T> tanh_rest(Vec<T> query, Vec<T> key) {
  if constexpr (kFactors) {
    return tanh_rest_from_factors<T>(query, key);
  } else {
    return tanh_rest_from_sum<T>(query + key);
  }
}

/// One register tile of scores: out[r][c] = sum_d v[d] (1 - 2 r(rows[r][d], keys[d][c])); rows of `out` and of `keys`
/// are kKeys apart.
template <typename T, bool kFactors, int kRows, int kVectors, std::int64_t kKeys>
FUSED_MHA_INLINE void additive_tile(const T* __restrict rows, std::int64_t ld, const T* __restrict keys,
                                    const T* __restrict weight, const T* __restrict starts, std::int64_t depth,
                                    T* __restrict out) {
  Vec<T> totals[kRows][kVectors] = {};
  for (std::int64_t first = 0; first < depth; first += kFeaturesPerSum) {
    const std::int64_t end = depth - first < kFeaturesPerSum ? depth : first + kFeaturesPerSum;
    const Vec<T> start = broadcast<T>(starts[first / kFeaturesPerSum]);
    Vec<T> sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = start;
    }
    for (std::int64_t d = first; d < end; ++d) {
      const Vec<T> factor = broadcast<T>(weight[d]);
      Vec<T> columns[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) columns[v] = load<T>(keys + d * kKeys + v * kLanes<T>);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec<T> row = broadcast<T>(rows[r * ld + d]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = fma(factor, tanh_rest<T, kFactors>(row, columns[v]), sums[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) totals[r][v] = totals[r][v] + sums[r][v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store<T>(out + r * kKeys + v * kLanes<T>, totals[r][v]);
  }
}

/// All rows of a block against one group of keys.
template <typename T, bool kFactors, std::int64_t kKeys>
[[gnu::noinline]] static void additive_group(const T* rows, std::int64_t row_count, std::int64_t ld, const T* keys,
                                             const ScoreWeight<T>& v, std::int64_t depth, T* out) {
  constexpr int kRows = kRegisters == 32 ? 4 : 2;
  constexpr int kVectors = 2;
  static_assert(kGroupKeys % (kVectors * kLanes<T>) == 0);
  for (std::int64_t column = 0; column < kGroupKeys; column += kVectors * kLanes<T>) {
    std::int64_t row = 0;
    for (; row + kRows <= row_count; row += kRows) {
      additive_tile<T, kFactors, kRows, kVectors, kKeys>(rows + row * ld, ld, keys + column, v.weight, v.starts, depth,
                                                         out + row * kKeys + column);
    }
    for (; row < row_count; ++row) {
      additive_tile<T, kFactors, 1, kVectors, kKeys>(rows + row * ld, ld, keys + column, v.weight, v.starts, depth,
                                                     out + row * kKeys + column);
    }
  }
}

/// out[r][c] = product(row, key), a vector whose lanes are added up; `rows` and `keys` are row_ld and key_ld apart, and
/// columns behind the last key become 0 up to the next multiple of kGroupKeys. Hidden groups are left out.
template <typename T, std::int64_t kKeys, typename Product>
static void few_row_products(const T* rows, std::int64_t row_count, std::int64_t row_ld, const T* keys,
                             std::int64_t key_count, std::int64_t key_ld, const TileMask<kKeys>& mask,
                             const Product& product, T* out) {
  for (std::int64_t row = 0; row < row_count; ++row) {
    for (std::int64_t first = 0; first < kKeys; first += kLanes<T>) {
      if (mask.is_hidden(first / kGroupKeys)) continue;
      Vec<T> products[kLanes<T>];
      for (int i = 0; i < kLanes<T>; ++i) {
        products[i] = first + i < key_count ? product(rows + row * row_ld, keys + (first + i) * key_ld) : Vec<T>{};
      }
      transpose<T>(products);
      for (int width = kLanes<T> / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) products[i] = products[i] + products[i + width];
      }
      store<T>(out + row * kKeys + first, products[0]);
    }
  }
}

/// Scores of a block's rows against a tile's visible groups, masked. Keys lie side by side, or with few rows one behind
/// the other, `ld` apart. `best` is what mask_tile wants.
template <typename T, std::int64_t kKeys>
static void additive_scores(const CallConstants& call, const RowBlock& block, const Features<T>& rows, std::int64_t ld,
                            const Features<T>& key_features, const KeySpan& keys, const T* key_bias,
                            const ScoreWeight<T>& v, TileMask<kKeys>& mask, T* scores, T* best) {
  const std::int64_t depth = call.problem->head_dim;
  const bool by_factors = rows.has_factors && key_features.has_factors;
  if (has_few_rows(*call.problem)) {
    const auto score = [&](const T* row, const T* key) {
      Vec<T> sum = load<T>(v.lanes);
      for (std::int64_t d = 0; d < ld; d += kLanes<T>) {
        sum = fma(load<T>(v.weight + d), tanh_rest_from_sum<T>(load<T>(row + d) + load<T>(key + d)), sum);
      }
      return sum;
    };
    few_row_products<T, kKeys>(rows.raw, block.rows, ld, key_features.raw, keys.count, ld, mask, score, scores);
    if (mask.any_mixed) mask_tile<T, kKeys>(call, block, keys, key_bias, scores, best, mask);
    return;
  }
  for (std::int64_t group = 0; group < TileMask<kKeys>::kGroups; ++group) {
    if (mask.is_hidden(group)) continue;
    const std::int64_t column = group * kGroupKeys;
    if (by_factors) {
      additive_group<T, true, kKeys>(rows.factors, block.rows, ld, key_features.factors + column, v, depth,
                                     scores + column);
    } else {
      additive_group<T, false, kKeys>(rows.raw, block.rows, ld, key_features.raw + column, v, depth, scores + column);
    }
  }
  if (mask.any_mixed) mask_tile<T, kKeys>(call, block, keys, key_bias, scores, best, mask);
}

/// Running state of one block of rows, as RowState of tile_forward.h.
template <typename T>
struct AdditiveRows {
  RowBlock block;
  Features<T> features;  // [kBlockRows][padded D]
  T* output = nullptr;   // [kBlockRows][padded Dv], unnormalized
  T* row_max = nullptr;  // [kBlockRows]
  T* sums = nullptr;     // [kBlockRows]
};

template <typename T>
struct AdditiveForwardScratch {
  std::int64_t padded_d = 0;
  std::int64_t padded_dv = 0;
  AdditiveRows<T>* rows = nullptr;
  KeySpan keys;
  Features<T> key_features;  // [D][kForwardKeys], or with few rows [kForwardKeys][padded D]
  T* values = nullptr;       // [kForwardKeys][padded Dv]
  T* key_bias = nullptr;     // [kForwardKeys], null where key_padding_mask adds nothing
  bool values_not_finite = false;
  ScoreWeight<T> weight;
  T* tile = nullptr;  // [kBlockRows][kForwardKeys]
  T* best = nullptr;
  TileMask<kForwardKeys>* mask = nullptr;
  T* panel = nullptr;     // [kBlockRows][panel_stride]: unnormalized weights of one block, where they are returned
  T* average = nullptr;   // the same, normalized and added up over heads
  T* step_max = nullptr;  // [kBlockRows][steps]: what the panel's part of a step was taken against
  std::int64_t panel_stride = 0;
  std::int64_t steps = 0;

  std::size_t carve(const AdditiveForwardPlan& plan, std::byte* base) {
    const core::AttentionProblem& problem = *plan.call.problem;
    Arena arena(base);
    padded_d = round_up(problem.head_dim, kLanes<T>);
    padded_dv = round_up(problem.value_dim, kLanes<T>);
    rows = arena.take<AdditiveRows<T>>(plan.blocks_per_item);
    for (std::int64_t i = 0; i < plan.blocks_per_item; ++i) {
      AdditiveRows<T> carved;
      carved.features = take_features<T>(arena, kBlockRows * padded_d);
      carved.output = arena.take<T>(kBlockRows * padded_dv);
      carved.row_max = arena.take<T>(kBlockRows);
      carved.sums = arena.take<T>(kBlockRows);
      if (base != nullptr) rows[i] = carved;
    }
    key_features = take_features<T>(arena, kForwardKeys * padded_d + kLanes<T>);
    values = arena.take<T>(kForwardKeys * padded_dv);
    if (plan.call.masks->has_padding_bias()) key_bias = arena.take<T>(kForwardKeys);
    weight = take_score_weight<T>(arena, padded_d);
    tile = arena.take<T>(kBlockRows * kForwardKeys);
    best = arena.take<T>(kBlockRows * kLanes<T>);
    mask = arena.take<TileMask<kForwardKeys>>(1);
    if (plan.outputs.weights_mode != core::WeightsMode::kNone) {
      panel_stride = round_up(problem.key_length, kForwardKeys);
      steps = panel_stride / kForwardKeys;
      panel = arena.take<T>(kBlockRows * panel_stride);
      step_max = arena.take<T>(kBlockRows * steps);
      if (plan.outputs.weights_mode == core::WeightsMode::kAveraged) average = arena.take<T>(kBlockRows * panel_stride);
    }
    return arena.used();
  }
};

template <typename T>
static void begin_additive_rows(const AdditiveForwardPlan& plan, const AdditiveForwardScratch<T>& scratch,
                                const RowBlock& block, AdditiveRows<T>& rows) {
  const core::AttentionProblem& problem = *plan.call.problem;
  rows.block = block;
  const bool few = has_few_rows(problem);
  pack_row_features<T>(problem.query, block.n, block.h, {nullptr, block.row_begin, block.rows}, problem.head_dim,
                       scratch.padded_d, block.rows, !few, rows.features);
  for (std::int64_t i = 0; i < (few ? block.rows : kBlockRows) * scratch.padded_dv; ++i) rows.output[i] = T{0};
  for (std::int64_t row = 0; row < kBlockRows; ++row) {
    rows.row_max[row] = kMinusInfinity<T>;
    rows.sums[row] = T{0};
  }
}

/// Turns one row of scores into P in place: takes its maximum into the row's, shrinks what the row holds, adds to its
/// sum. `keep` drops elements of P from the output, not from the sum. Hidden groups become 0.
template <typename T>
static void additive_softmax_row(T unit, const TileMask<kForwardKeys>& mask, const std::uint32_t* keep,
                                 std::int64_t padded_dv, T* scores, T* row_max, T* row_sum, T* output) {
  constexpr int kVectors = static_cast<int>(kGroupKeys) / kLanes<T>;
  Vec<T> lanes = broadcast<T>(kMinusInfinity<T>);
  for (std::int64_t group = 0; group < TileMask<kForwardKeys>::kGroups; ++group) {
    if (mask.is_hidden(group)) continue;
    for (int v = 0; v < kVectors; ++v) lanes = max(load<T>(scores + group * kGroupKeys + v * kLanes<T>), lanes);
  }
  T largest = *row_max;  // a NaN score leaves the maximum alone
  for (int lane = 0; lane < kLanes<T>; ++lane) largest = lanes[lane] > largest ? lanes[lane] : largest;
  const T reference = largest == kMinusInfinity<T> ? T{0} : largest;
  if (largest != *row_max) {
    const Vec<T> shrink = exp2(broadcast<T>((*row_max - reference) * unit));
    *row_sum *= shrink[0];
    for (std::int64_t i = 0; i < padded_dv; i += kLanes<T>) store<T>(output + i, load<T>(output + i) * shrink);
    *row_max = largest;
  }
  Vec<T> sum{};
  for (std::int64_t group = 0; group < TileMask<kForwardKeys>::kGroups; ++group) {
    for (int v = 0; v < kVectors; ++v) {
      T* part = scores + group * kGroupKeys + v * kLanes<T>;
      if (mask.is_hidden(group)) {
        store<T>(part, Vec<T>{});
        continue;
      }
      const Vec<T> p = exp2((load<T>(part) - broadcast<T>(reference)) * broadcast<T>(unit));
      sum = sum + p;
      store<T>(part, keep == nullptr ? p : select<T>(keep[group] >> (v * kLanes<T>), p, Vec<T>{}));
    }
  }
  *row_sum += reduce_add<T>(sum);
}

/// output += P V, row by row: few rows, or a value that is not finite and that a weight of 0 must not meet.
template <typename T>
static void add_visible_values(const TileMask<kForwardKeys>& mask, const T* weights, std::int64_t rows, const T* values,
                               std::int64_t keys, std::int64_t ld, T* output) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t key = 0; key < keys; ++key) {
      if (!mask.sees(row, key)) continue;
      const Vec<T> weight = broadcast<T>(weights[row * kForwardKeys + key]);
      for (std::int64_t i = 0; i < ld; i += kLanes<T>) {
        store<T>(output + row * ld + i, fma(weight, load<T>(values + key * ld + i), load<T>(output + row * ld + i)));
      }
    }
  }
}

template <typename T>
static void additive_forward_tile(const AdditiveForwardPlan& plan, AdditiveForwardScratch<T>& scratch,
                                  std::int64_t step, AdditiveRows<T>& rows) {
  const CallConstants& call = plan.call;
  const TileMask<kForwardKeys>& mask = *scratch.mask;
  const RowBlock& block = rows.block;
  additive_scores<T, kForwardKeys>(call, block, rows.features, scratch.padded_d, scratch.key_features, scratch.keys,
                                   scratch.key_bias, scratch.weight, *scratch.mask, scratch.tile, scratch.best);
  for (std::int64_t row = 0; row < block.rows; ++row) {
    std::uint32_t keep[TileMask<kForwardKeys>::kGroups];
    if (call.has_dropout) {
      DropoutGroup group;
      dropout_span_bits(call, block.n, block.h, block.row_begin + row, scratch.keys, group, keep);
    }
    T* scores = scratch.tile + row * kForwardKeys;
    additive_softmax_row<T>(static_cast<T>(call.unit), mask, call.has_dropout ? keep : nullptr, scratch.padded_dv,
                            scores, rows.row_max + row, rows.sums + row, rows.output + row * scratch.padded_dv);
    if (scratch.panel != nullptr) {
      scratch.step_max[row * scratch.steps + step] = rows.row_max[row];
      T* copy = scratch.panel + row * scratch.panel_stride + step * kForwardKeys;
      for (std::int64_t i = 0; i < kForwardKeys; i += kLanes<T>) store<T>(copy + i, load<T>(scores + i));
    }
  }
  if (has_few_rows(*call.problem) || (scratch.values_not_finite && (mask.any_mixed || mask.any_hidden))) {
    add_visible_values<T>(mask, scratch.tile, block.rows, scratch.values, scratch.keys.count, scratch.padded_dv,
                          rows.output);
  } else {
    clear_rows_behind<kForwardKeys>(scratch.tile, block.rows, scratch.keys.count);
    rank_update<T, kForwardKeys, 1>(scratch.tile, block.rows, scratch.values, scratch.padded_dv, scratch.keys.count,
                                    rows.output, true);
  }
}

/// A block that sees nothing of a step: its weights there are 0.
template <typename T>
static void skip_additive_tile(AdditiveForwardScratch<T>& scratch, std::int64_t step, std::int64_t rows) {
  if (scratch.panel == nullptr) return;
  for (std::int64_t row = 0; row < rows; ++row) {
    scratch.step_max[row * scratch.steps + step] = kMinusInfinity<T>;
    T* part = scratch.panel + row * scratch.panel_stride + step * kForwardKeys;
    for (std::int64_t i = 0; i < kForwardKeys; ++i) part[i] = T{0};
  }
}

/// All keys of (n, kv_head), for the first `count` row states.
template <typename T>
static void additive_forward_rows(const AdditiveForwardPlan& plan, AdditiveForwardScratch<T>& scratch, std::int64_t n,
                                  std::int64_t kv_head, std::int64_t count) {
  const CallConstants& call = plan.call;
  const core::AttentionProblem& problem = *call.problem;
  const KeySpan& kept = call.masks->kept_keys(n);
  const bool few = has_few_rows(problem);
  bool with_factors = false;
  for (std::int64_t i = 0; i < count; ++i) with_factors = with_factors || scratch.rows[i].features.has_factors;
  for (std::int64_t step = 0; step * kForwardKeys < kept.count; ++step) {
    const std::int64_t left = kept.count - step * kForwardKeys;
    scratch.keys = kept.part(step * kForwardKeys, left < kForwardKeys ? left : kForwardKeys);
    bool prepared = false;
    for (std::int64_t i = 0; i < count; ++i) {
      AdditiveRows<T>& rows = scratch.rows[i];
      classify_tile<kForwardKeys>(call, rows.block, scratch.keys, *scratch.mask);
      if (!scratch.mask->any_visible) {
        skip_additive_tile<T>(scratch, step, rows.block.rows);
        continue;
      }
      if (!prepared) {
        if (few) {
          pack_row_features<T>(problem.key, n, kv_head, scratch.keys, problem.head_dim, scratch.padded_d,
                               scratch.keys.count, false, scratch.key_features);
        } else {
          pack_key_features<T, kForwardKeys>(problem.key, n, kv_head, scratch.keys, problem.head_dim, with_factors,
                                             scratch.key_features);
        }
        scratch.values_not_finite = pack_rows<T>(matrix_of(problem.value, n, kv_head), scratch.keys, problem.value_dim,
                                                 scratch.padded_dv, scratch.keys.count, T{1}, scratch.values);
        if (scratch.key_bias != nullptr) {
          load_key_bias<T>(problem, n, scratch.keys, kForwardKeys, scratch.key_bias);
        }
        prepared = true;
      }
      additive_forward_tile<T>(plan, scratch, step, rows);
    }
  }
}

static bool sees_any_key(const CallConstants& call, std::int64_t n, std::int64_t h, std::int64_t l) {
  const KeySpan& kept = call.masks->kept_keys(n);
  for (std::int64_t group = 0; group * kGroupKeys < kept.count; ++group) {
    const KeySpan part = group_of(kept, group);
    if (call.masks->tile_class(n, h, l, l + 1, part) == core::TileClass::kHidden) continue;
    for (std::int64_t i = 0; i < part.count; ++i) {
      if (core::is_visible(*call.problem, n, h, l, part[i])) return true;
    }
  }
  return false;
}

/// Normalizes and writes a block's rows; leaves each row's scale in `scales`: 0 for a row that sees nothing, NaN where
/// visible scores leave no number.
template <typename T>
static void finish_additive_rows(const AdditiveForwardPlan& plan, const AdditiveForwardScratch<T>& scratch,
                                 const AdditiveRows<T>& rows, T* scales) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const core::MutableView& output = plan.outputs.output;
  const RowBlock& block = rows.block;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const std::int64_t l = block.row_begin + row;
    T sum = rows.sums[row];
    if (rows.row_max[row] == kMinusInfinity<T> && sum == T{0}) {
      scales[row] = sees_any_key(plan.call, block.n, block.h, l) ? std::numeric_limits<T>::quiet_NaN() : T{0};
      sum = scales[row];  // the backward pass must see the NaN, too
    } else {
      scales[row] = static_cast<T>(plan.call.dropout_scale) / sum;
    }
    store_row<T>(rows.output + row * scratch.padded_dv, problem.value_dim, scales[row], output,
                 output.offset(block.n, block.h, l, 0));
    const std::int64_t statistic = (block.n * problem.heads + block.h) * problem.query_length + l;
    static_cast<T*>(plan.outputs.row_max)[statistic] = rows.row_max[row];
    static_cast<T*>(plan.outputs.row_sum)[statistic] = sum;
  }
}

/// Normalizes the panel of a finished block in place and, where weights are averaged, adds it to the average.
template <typename T>
static void fold_additive_weights(const AdditiveForwardPlan& plan, const AdditiveForwardScratch<T>& scratch,
                                  const AdditiveRows<T>& rows, const T* scales, bool is_first_head) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const std::int64_t steps = (plan.call.masks->kept_keys(rows.block.n).count + kForwardKeys - 1) / kForwardKeys;
  const T share = scratch.average == nullptr ? T{1} : T{1} / static_cast<T>(problem.heads);
  for (std::int64_t row = 0; row < rows.block.rows; ++row) {
    const T reference = rows.row_max[row] == kMinusInfinity<T> ? T{0} : rows.row_max[row];
    for (std::int64_t step = 0; step < steps; ++step) {
      const T difference = scratch.step_max[row * scratch.steps + step] - reference;
      const Vec<T> factor =
          exp2(broadcast<T>(difference * static_cast<T>(plan.call.unit))) * broadcast<T>(scales[row] * share);
      const std::int64_t first = row * scratch.panel_stride + step * kForwardKeys;
      for (std::int64_t i = first; i < first + kForwardKeys; i += kLanes<T>) {
        const Vec<T> weights = load<T>(scratch.panel + i) * factor;
        if (scratch.average == nullptr) {
          store<T>(scratch.panel + i, weights);
        } else {
          store<T>(scratch.average + i, is_first_head ? weights : load<T>(scratch.average + i) + weights);
        }
      }
    }
  }
}

/// Writes finished weights of a block, zeros at keys that padding hides. `h` is 0 for averages.
template <typename T>
static void write_additive_weights(const AdditiveForwardPlan& plan, const AdditiveForwardScratch<T>& scratch,
                                   const RowBlock& block, std::int64_t h) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const KeySpan& kept = plan.call.masks->kept_keys(block.n);
  const core::MutableView& to = plan.outputs.weights;
  const T* source = scratch.average == nullptr ? scratch.panel : scratch.average;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const T* weights = source + row * scratch.panel_stride;
    const std::int64_t offset = to.offset(block.n, h, block.row_begin + row, 0);
    if (kept.count < problem.key_length) {
      const T zero{0};
      for (std::int64_t s = 0; s < problem.key_length; ++s)
        store_row<T>(&zero, 1, T{1}, to, offset + s * to.strides[3]);
    }
    if (kept.positions == nullptr) {
      store_row<T>(weights, kept.count, T{1}, to, offset + kept.first * to.strides[3]);
    } else {
      for (std::int64_t i = 0; i < kept.count; ++i) {
        store_row<T>(weights + i, 1, T{1}, to, offset + kept.positions[i] * to.strides[3]);
      }
    }
  }
}

template <typename T>
static std::size_t additive_forward_scratch(const AdditiveForwardPlan& plan) {
  return AdditiveForwardScratch<T>{}.carve(plan, nullptr);
}

template <typename T>
static void additive_forward_item(const AdditiveForwardPlan& plan, const AdditiveItem& item, std::byte* base) {
  const CallConstants& call = plan.call;
  const core::AttentionProblem& problem = *call.problem;
  AdditiveForwardScratch<T> scratch;
  scratch.carve(plan, base);
  const std::int64_t count = item.block_end - item.block_begin;
  T scales[kBlockRows];
  for (std::int64_t h = item.head_begin; h < item.head_end; ++h) {
    pack_score_weight<T>(call, plan.score_weight, h, scratch.padded_d, scratch.weight);
    for (std::int64_t i = 0; i < count; ++i) {
      begin_additive_rows<T>(plan, scratch, row_block(call, item.n, h, item.block_begin + i), scratch.rows[i]);
    }
    additive_forward_rows<T>(plan, scratch, item.n, h / problem.heads_per_kv_head(), count);
    for (std::int64_t i = 0; i < count; ++i) {
      finish_additive_rows<T>(plan, scratch, scratch.rows[i], scales);
      if (scratch.panel == nullptr) continue;
      fold_additive_weights<T>(plan, scratch, scratch.rows[i], scales, h == item.head_begin);
      if (scratch.average == nullptr) write_additive_weights<T>(plan, scratch, scratch.rows[i].block, h);
    }
  }
  if (scratch.average != nullptr) write_additive_weights<T>(plan, scratch, scratch.rows[0].block, 0);
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
