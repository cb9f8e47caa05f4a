// SPDX-License-Identifier: BSD-3-Clause
//
// Forward attention of one work item: some blocks of query rows that share a head of keys.
//
//   for each panel of some steps of kForwardKeys kept keys
//     for each block of kBlockRows rows, for each step of the panel that the block sees any key of
//       t = Q K^T + masks                          register tiles, masks only where a group is mixed
//       m' = max(m, rowmax t);  P = exp2(unit (t - m'))
//       sum = sum exp2(unit (m - m')) + rowsum P;  O = O exp2(unit (m - m')) + keep(P) V
//   output = O / (sum (1 - p));  row_max = m, row_sum = sum
//
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.) Sums in T. A row without
// visible keys keeps m = -inf, sum = 0, O = 0. A sink is a key whose value is 0, met before all others: m = sink,
// sum = 1. The order of sums depends on the row alone, never on the item.
#pragma once

#include "cpu/dropout_bits.h"
#include "cpu/factors.h"
#include "cpu/pack.h"
#include "cpu/tile_few_rows.h"
#include "cpu/tile_masks.h"
#include "cpu/tile_math.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// Carves aligned arrays from an item's scratch, or only adds up their sizes where there is none yet. A size beyond
/// what can be counted becomes the largest one, which no allocation grants.
class Arena {
 public:
  explicit Arena(std::byte* base) : base_(base) {}
  template <typename T>
  T* take(std::int64_t count) {
    const std::size_t begin = used_;
    std::size_t bytes = 0;
    if (__builtin_mul_overflow(static_cast<std::size_t>(count), sizeof(T), &bytes) ||
        __builtin_add_overflow(bytes, begin + 63, &used_)) {
      used_ = kTooLarge;
    }
    used_ = used_ / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }
  std::size_t used() const { return used_; }

 private:
  static constexpr std::size_t kTooLarge = std::numeric_limits<std::size_t>::max() / 2;

  std::byte* base_;
  std::size_t used_ = 0;
};

enum class Finiteness : std::uint8_t { kUnknown, kAllFinite, kSomeNot };

/// Keys and values of one step.
template <typename T, typename F>
struct KeyTile {
  KeySpan keys;
  std::int64_t step = 0;                         // of all steps of the item
  bool prepared = false;                         // packed: not before some block sees any of the keys
  F* keys_transposed = nullptr;                  // [group][factors of D][kGroupKeys]
  F* packed_values = nullptr;                    // [factors of kForwardKeys][padded Dv]
  const F* values = nullptr;                     // [factors of keys][padded Dv]: packed, or the caller's own memory
  T* key_bias = nullptr;                         // [kForwardKeys], null where key_padding_mask adds nothing
  Finiteness finiteness = Finiteness::kUnknown;  // of the values
};

/// Running state of one block of rows.
template <typename T, typename F>
struct RowState {
  RowBlock block;
  F* queries = nullptr;  // [factors of D][kBlockRows], times query_factor unless they are pairs
  T* output = nullptr;   // [kBlockRows][padded Dv], unnormalized
  T* row_max = nullptr;  // [kBlockRows]
  T* sums = nullptr;     // [kBlockRows][lanes], lanewise
  bool started = false;  // output holds something
};

/// What weights are made from: unnormalized P of every step, and the maximum it was taken against. A block's weights
/// are folded when it has met all keys; where those fit one panel, the next block uses the same memory again.
template <typename T>
struct WeightsPanel {
  /// [step][kBlockRows][kForwardKeys] of each block.
  T* tiles = nullptr;
  /// [step][kBlockRows] of each block; -inf where a row had seen nothing yet, so its zeros stay zeros.
  T* step_max = nullptr;
  /// [row of the item][kept keys, padded]: averages, or one head's weights of one block; null where they gather in the
  /// result itself.
  T* rows = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t steps = 0;
  bool averages = false;
  bool one_block = false;  // tiles and step_max are one block's

  T* tile(std::int64_t block_index, std::int64_t step) const {
    return tiles + ((one_block ? 0 : block_index) * steps + step) * kBlockRows * kForwardKeys;
  }
  T* tile_max(std::int64_t block_index, std::int64_t step) const {
    return step_max + ((one_block ? 0 : block_index) * steps + step) * kBlockRows;
  }
  T* row(std::int64_t block_index, std::int64_t row) const {
    return rows + ((averages ? block_index * kBlockRows : 0) + row) * row_stride;
  }
};

/// Whether a view's rows are numbers of T side by side.
template <typename T>
static bool is_row_of(const core::MutableView& view) {
  return view.dtype == (std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32) && view.strides[3] == 1;
}

template <typename T, typename F>
struct ForwardScratch {
  std::int64_t padded_dv = 0;
  std::int64_t max_blocks = 0;
  RowState<T, F>* states = nullptr;
  KeyTile<T, F> panel_keys[kWeightsPanelSteps];
  std::int64_t panel_steps = 0;  // that there is room for
  T* tile = nullptr;             // [kBlockRows][kForwardKeys]
  T* best = nullptr;             // [kBlockRows][lanes]
  TileMask<kForwardKeys>* mask = nullptr;
  WeightsPanel<T> panel;
  Prefetcher prefetcher;

  std::size_t carve(const ForwardPlan& plan, std::byte* base) {
    const core::AttentionProblem& problem = *plan.call.problem;
    Arena arena(base);
    padded_dv = round_up(problem.value_dim, kLanes<T>);
    max_blocks = plan.blocks_per_item;
    states = arena.take<RowState<T, F>>(max_blocks);
    F* queries = arena.take<F>(max_blocks * query_elements(problem));
    T* outputs = arena.take<T>(max_blocks * kBlockRows * padded_dv);
    T* row_max = arena.take<T>(max_blocks * kBlockRows);
    T* sums = arena.take<T>(max_blocks * kBlockRows * kLanes<T>);
    const std::int64_t most_steps = most_forward_steps(problem);
    const bool with_weights = plan.outputs.weights_mode != core::WeightsMode::kNone;
    panel.one_block = with_weights && weights_fit_one_panel(problem);
    panel_steps = most_steps < kPanelSteps || panel.one_block ? most_steps : kPanelSteps;
    for (std::int64_t i = 0; i < panel_steps; ++i) {
      panel_keys[i].keys_transposed = arena.take<F>(kForwardKeys * factors_of<F>(problem.head_dim));
      panel_keys[i].packed_values = arena.take<F>(factors_of<F>(kForwardKeys) * padded_dv);
      panel_keys[i].key_bias = plan.call.masks->has_padding_bias() ? arena.take<T>(kForwardKeys) : nullptr;
    }
    tile = arena.take<T>(kBlockRows * kForwardKeys);
    best = arena.take<T>(kBlockRows * kLanes<T>);
    mask = arena.take<TileMask<kForwardKeys>>(1);
    if (with_weights) {
      panel.steps = most_steps;
      panel.row_stride = round_up(problem.key_length, kLanes<T>);
      panel.averages = plan.outputs.weights_mode == core::WeightsMode::kAveraged;
      const std::int64_t held_blocks = panel.one_block ? 1 : max_blocks;
      panel.tiles = arena.take<T>(held_blocks * panel.steps * kBlockRows * kForwardKeys);
      panel.step_max = arena.take<T>(held_blocks * panel.steps * kBlockRows);
      if (!is_row_of<T>(plan.outputs.weights)) {
        panel.rows = arena.take<T>((panel.averages ? max_blocks : 1) * kBlockRows * panel.row_stride);
      }
    }
    if (base != nullptr) {
      for (std::int64_t i = 0; i < max_blocks; ++i) {
        states[i].queries = queries + i * query_elements(problem);
        states[i].output = outputs + i * kBlockRows * padded_dv;
        states[i].row_max = row_max + i * kBlockRows;
        states[i].sums = sums + i * kBlockRows * kLanes<T>;
      }
    }
    return arena.used();
  }

  static std::int64_t query_elements(const core::AttentionProblem& problem) {
    return kBlockRows * round_up(factors_of<F>(problem.head_dim), kLanes<T>);
  }
};

/// Keys as the score tiles read them; returns whether any element is NaN or infinite, if it is to look.
template <typename T, Probe kProbe, typename F>
static bool pack_key_groups(const Matrix& from, const KeySpan& keys, std::int64_t columns, F* out) {
  bool not_finite = false;
  for (std::int64_t group = 0; group * kGroupKeys < keys.count; ++group) {
    const KeySpan part = group_of(keys, group);
    F* target = out + group * kGroupKeys * factors_of<F>(columns);
    not_finite |= pack_transposed_factors<T, kGroupKeys, kProbe>(from, part, columns, T{1}, target, part.count);
  }
  return not_finite;
}

template <typename T, typename F>
static void begin_rows(const ForwardPlan& plan, std::int64_t padded_dv, const RowBlock& block, RowState<T, F>& state) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const Matrix query = matrix_of(problem.query, block.n, block.h);
  const KeySpan rows{nullptr, block.row_begin, block.rows};
  const T factor = static_cast<T>(plan.call.query_factor);
  state.block = block;
  state.started = plan.few_rows;
  if (plan.few_rows) {
    if constexpr (!kIsPair<F>) {
      pack_rows<T>(query, rows, problem.head_dim, round_up(problem.head_dim, kLanes<T>), kFewRows, factor,
                   state.queries);
    }
    for (std::int64_t i = 0; i < kFewRows * padded_dv; ++i) state.output[i] = T{0};
  } else {
    pack_transposed_factors<T, kBlockRows, Probe::kNo>(query, rows, problem.head_dim, factor, state.queries,
                                                       score_rows_read(block.rows));
  }
  for (std::int64_t row = 0; row < kBlockRows; ++row) state.row_max[row] = kMinusInfinity<T>;
  for (std::int64_t i = 0; i < kBlockRows * kLanes<T>; ++i) state.sums[i] = T{0};
}

/// Lets rows that begin_rows has begun see the sink, if there is one.
template <typename T, typename F>
static void begin_with_sink(const ForwardPlan& plan, std::int64_t padded_dv, RowState<T, F>& state) {
  const core::View& sink = plan.call.problem->sink;
  if (!sink) return;
  const double given = core::mask_element(sink, sink.offset(state.block.n, state.block.h, 0, 0));
  if (given == -std::numeric_limits<double>::infinity()) return;
  // Infinity would leave NaN where two of them are subtracted; all that matters of it is that nothing else counts.
  const T largest = std::numeric_limits<T>::max();
  const T score = mask_number<T>(given * plan.call.bias_factor);
  for (std::int64_t row = 0; row < kBlockRows; ++row) {
    state.row_max[row] = score > largest ? largest : score;
    state.sums[row * kLanes<T>] = score == score ? T{1} : score;
  }
  // The sum may have to shrink before the first value arrives, and the output with it.
  for (std::int64_t i = 0; i < kBlockRows * padded_dv; ++i) state.output[i] = T{0};
  state.started = true;
}

template <typename T, typename F>
static void prepare_key_tile(const ForwardPlan& plan, std::int64_t n, std::int64_t kv_head, std::int64_t padded_dv,
                             KeyTile<T, F>& tile) {
  const core::AttentionProblem& problem = *plan.call.problem;
  if (tile.key_bias != nullptr) load_key_bias<T>(problem, n, tile.keys, kForwardKeys, tile.key_bias);
  if (plan.few_rows) return;
  tile.finiteness = Finiteness::kUnknown;
  pack_key_groups<T, Probe::kNo>(matrix_of(problem.key, n, kv_head), tile.keys, problem.head_dim, tile.keys_transposed);
  tile.values = rows_where_they_lie<T>(matrix_of(problem.value, n, kv_head), tile.keys, problem.value_dim, padded_dv,
                                       tile.packed_values);
}

/// One number a row from kLanes<T> rows of a vector each.
template <typename T, typename Operation>
FUSED_MHA_INLINE Vec<T> reduce_rows(const T* rows, const Operation& operation) {
  Vec<T> lanes[kLanes<T>];
  for (int i = 0; i < kLanes<T>; ++i) lanes[i] = load<T>(rows + i * kLanes<T>);
  transpose<T>(lanes);
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = operation(lanes[i], lanes[i + width]);
  }
  return lanes[0];
}

/// exp2(unit (a - b)) for one pair.
template <typename T>
FUSED_MHA_INLINE T exp2_difference(T a, T b, T unit) {
  return exp2(broadcast<T>((a - b) * unit))[0];
}

/// Takes a tile's lanewise maxima into the rows' maxima, as many rows at a time as a vector has lanes, and shrinks sums
/// and outputs of the rows whose maximum grew. references[row]: what P is taken against, 0 for a row that has seen
/// nothing yet, so that exp2(-inf) makes its P 0.
template <typename T, typename F>
static void update_maxima(RowState<T, F>& state, std::int64_t padded_dv, T unit, const T* best, T* references) {
  for (std::int64_t first = 0; first < state.block.rows; first += kLanes<T>) {
    const Vec<T> found = reduce_rows<T>(best + first * kLanes<T>, [](Vec<T> a, Vec<T> b) { return max(a, b); });
    const Vec<T> previous = load<T>(state.row_max + first);
    const Vec<T> largest = max(found, previous);  // in this order a NaN score leaves the maximum alone
    const Vec<T> nothing = broadcast<T>(kMinusInfinity<T>);
    const Vec<T> reference = select<T>(equal_bits<T>(largest, nothing), Vec<T>{}, largest);
    store<T>(state.row_max + first, largest);
    store<T>(references + first, reference);
    std::uint32_t grown = ~equal_bits<T>(largest, previous) & ((1U << kLanes<T>)-1U);
    if (!state.started || grown == 0) continue;
    T shrinks[kLanes<T>];
    store<T>(shrinks, exp2((previous - reference) * broadcast<T>(unit)));
    for (; grown != 0; grown &= grown - 1U) {
      const int lane = std::countr_zero(grown);
      const Vec<T> shrink = broadcast<T>(shrinks[lane]);
      T* sums = state.sums + (first + lane) * kLanes<T>;
      store<T>(sums, load<T>(sums) * shrink);
      T* output = state.output + (first + lane) * padded_dv;
      for (std::int64_t i = 0; i < padded_dv; i += kLanes<T>) store<T>(output + i, load<T>(output + i) * shrink);
    }
  }
}

/// Turns one row of scores into P in place, as factors of the output, and adds it to the row's sum, not rounded; `keep`
/// drops elements of P from the output, not from the sum. Unless it is null, `copy` gets P too, what is dropped only if
/// `copy_all`, with zeros for hidden groups; it may be `scores` where both hold the same.
template <typename T, typename F, bool kUnitIsOne>
FUSED_MHA_INLINE void softmax_row(T* sums, T unit, const TileMask<kForwardKeys>& mask, T* scores, T reference,
                                  const std::uint32_t* keep, T* copy, bool copy_all) {
  constexpr int kVectors = static_cast<int>(kGroupKeys) / kLanes<T>;
  const Vec<T> offset = broadcast<T>(reference);
  Vec<T> sum = load<T>(sums);
  for (std::int64_t group = 0; group < TileMask<kForwardKeys>::kGroups; ++group) {
    if (mask.is_hidden(group)) {
      if (copy != nullptr) {
        for (int v = 0; v < kVectors; ++v) store<T>(copy + group * kGroupKeys + v * kLanes<T>, Vec<T>{});
      }
      continue;
    }
    T* part = scores + group * kGroupKeys;
    Vec<T> group_sum{};
    Vec<T> weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vec<T> difference = load<T>(part + v * kLanes<T>) - offset;
      if constexpr (!kUnitIsOne) difference = difference * broadcast<T>(unit);
      const Vec<T> p = exp2(difference);
      group_sum = v == 0 ? p : group_sum + p;
      const Vec<T> kept = keep == nullptr ? p : select<T>(keep[group] >> (v * kLanes<T>), p, Vec<T>{});
      if constexpr (!kIsPair<F>) store<T>(part + v * kLanes<T>, kept);
      weights[v] = kept;
      if (copy != nullptr && copy != scores) {
        store<T>(copy + group * kGroupKeys + v * kLanes<T>, copy_all ? p : kept);
      }
    }
    // Pairs take half of the row's memory: they never reach scores that are still to be read.
    if constexpr (kIsPair<F>) store<T>(scores + group * kGroupKeys / 2, round_to_pairs(weights[0], weights[1]));
    sum = sum + group_sum;
  }
  store<T>(sums, sum);
}

/// O += P V where a value is not finite: a weight of 0 must not meet it unless its row sees the key.
template <typename T, std::int64_t kKeys, typename F>
static void accumulate_visible(const TileMask<kKeys>& mask, const F* weights, std::int64_t rows, const F* values,
                               std::int64_t keys, std::int64_t ld, T* output) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t key = 0; key < keys; ++key) {
      if (!mask.sees(row, key)) continue;
      const Vec<T> weight = broadcast<T>(number_of<T>(weights + row * kKeys, key));
      for (std::int64_t i = 0; i < ld; i += kLanes<T>) {
        store<T>(output + row * ld + i, fma(weight, load_row<T>(values, ld, key, i), load<T>(output + row * ld + i)));
      }
    }
  }
}

/// Looked up once a step, and only where somebody asks.
template <typename T, typename F>
static bool values_not_finite(KeyTile<T, F>& tile, std::int64_t padded_dv) {
  if (tile.finiteness == Finiteness::kUnknown) {
    const bool some_not = any_factor_not_finite<T>(tile.values, factors_of<F>(tile.keys.count) * padded_dv);
    tile.finiteness = some_not ? Finiteness::kSomeNot : Finiteness::kAllFinite;
  }
  return tile.finiteness == Finiteness::kSomeNot;
}

template <typename T, typename F>
static void accumulate_output(KeyTile<T, F>& keys, const TileMask<kForwardKeys>& mask, std::int64_t padded_dv,
                              F* weights, RowState<T, F>& state) {
  if (mask.any_mixed && values_not_finite<T>(keys, padded_dv)) {
    if (!state.started) {
      for (std::int64_t i = 0; i < kBlockRows * padded_dv; ++i) state.output[i] = T{0};
    }
    accumulate_visible<T, kForwardKeys>(mask, weights, state.block.rows, keys.values, keys.keys.count, padded_dv,
                                        state.output);
    state.started = true;
    return;
  }
  std::int64_t group = 0;
  while (group < TileMask<kForwardKeys>::kGroups) {
    if (mask.is_hidden(group)) {
      ++group;
      continue;
    }
    const std::int64_t begin = group * kGroupKeys;
    while (group < TileMask<kForwardKeys>::kGroups && !mask.is_hidden(group)) ++group;
    const std::int64_t end = group * kGroupKeys < keys.keys.count ? group * kGroupKeys : keys.keys.count;
    const std::int64_t first = factors_of<F>(begin);
    const std::int64_t steps = factors_of<F>(end - begin);
    clear_rows_behind<kForwardKeys>(weights + first, state.block.rows, steps);
    rank_update<T, kForwardKeys, 1>(weights + first, state.block.rows, keys.values + first * padded_dv, padded_dv,
                                    steps, state.output, state.started);
    state.started = true;
  }
}

/// Raw scores of a block against a step's visible groups; lanewise maxima of the free ones go into `best`.
template <typename T, typename F>
static void score_tile_groups(const CallConstants& call, const KeyTile<T, F>& keys, const RowState<T, F>& state,
                              const TileMask<kForwardKeys>& mask, T* tile, T* best, Prefetcher& prefetcher) {
  const std::int64_t rows = state.block.rows;
  const std::int64_t depth = factors_of<F>(call.problem->head_dim);
  const T factor = static_cast<T>(call.query_factor);
  for (std::int64_t group = 0; group < TileMask<kForwardKeys>::kGroups; ++group) {
    if (mask.is_hidden(group)) continue;
    const F* columns = keys.keys_transposed + group * kGroupKeys * depth;
    T* scores = tile + group * kGroupKeys;
    const std::int64_t count = keys.keys.count - group * kGroupKeys;
    if (mask.is_mixed(group)) {
      score_group<T, false, kForwardKeys>(state.queries, rows, columns, count, depth, factor, scores, best, prefetcher);
    } else {
      score_group<T, true, kForwardKeys>(state.queries, rows, columns, count, depth, factor, scores, best, prefetcher);
    }
  }
}

/// One step for one block of rows.
template <typename T, typename F, bool kUnitIsOne>
static void forward_tile(const ForwardPlan& plan, ForwardScratch<T, F>& scratch, std::int64_t block_index,
                         KeyTile<T, F>& keys) {
  const CallConstants& call = plan.call;
  TileMask<kForwardKeys>& mask = *scratch.mask;
  RowState<T, F>& state = scratch.states[block_index];
  const RowBlock& block = state.block;
  T* panel_tile = scratch.panel.tiles == nullptr ? nullptr : scratch.panel.tile(block_index, keys.step);
  // Weights that are multiplied as they are returned stay where they are made.
  const bool in_place =
      panel_tile != nullptr && !kIsPair<F> && !(call.has_dropout && plan.outputs.weights_before_dropout);
  T* tile = in_place ? panel_tile : scratch.tile;
  scratch.prefetcher.begin_tile();
  if (mask.any_mixed) prefetch_masks<kForwardKeys>(call, block, keys.keys, mask, scratch.prefetcher);
  for (std::int64_t i = 0; i < kBlockRows * kLanes<T>; ++i) scratch.best[i] = kMinusInfinity<T>;
  const bool few_rows = !kIsPair<F> && plan.few_rows;
  if (few_rows) {
    if constexpr (!kIsPair<F>) {
      score_few_rows<T>(call, block, keys.keys, state.queries, mask, tile, scratch.best);
    }
  } else {
    score_tile_groups<T>(call, keys, state, mask, tile, scratch.best, scratch.prefetcher);
  }
  if (mask.any_mixed) {
    mask_tile<T, kForwardKeys>(call, block, keys.keys, keys.key_bias, tile, scratch.best, mask);
  }
  const T unit = static_cast<T>(call.unit);
  T references[kBlockRows];
  update_maxima<T>(state, scratch.padded_dv, unit, scratch.best, references);
  if (panel_tile != nullptr) {
    std::memcpy(scratch.panel.tile_max(block_index, keys.step), state.row_max, kBlockRows * sizeof(T));
  }
  for (std::int64_t row = 0; row < block.rows; ++row) {
    std::uint32_t keep[TileMask<kForwardKeys>::kGroups];
    if (call.has_dropout) {
      DropoutGroup group;
      dropout_span_bits(call, block.n, block.h, block.row_begin + row, keys.keys, group, keep);
    }
    T* copy = panel_tile == nullptr ? nullptr : panel_tile + row * kForwardKeys;
    softmax_row<T, F, kUnitIsOne>(state.sums + row * kLanes<T>, unit, mask, tile + row * kForwardKeys, references[row],
                                  call.has_dropout ? keep : nullptr, copy, plan.outputs.weights_before_dropout);
  }
  if (few_rows) {
    accumulate_few_rows<T>(call, block, keys.keys, mask, tile, scratch.padded_dv, state.output);
  } else {
    accumulate_output<T>(keys, mask, scratch.padded_dv, reinterpret_cast<F*>(tile), state);
  }
}

/// A block that sees nothing of a step: its weights there are 0.
template <typename T, typename F>
static void skip_tile(ForwardScratch<T, F>& scratch, std::int64_t block_index, const KeyTile<T, F>& keys) {
  const WeightsPanel<T>& panel = scratch.panel;
  if (panel.tiles == nullptr) return;
  T* tile = panel.tile(block_index, keys.step);
  T* tile_max = panel.tile_max(block_index, keys.step);
  for (std::int64_t i = 0; i < kBlockRows * kForwardKeys; ++i) tile[i] = T{0};
  for (std::int64_t row = 0; row < kBlockRows; ++row) tile_max[row] = kMinusInfinity<T>;
}

/// Length of the step that begins at kept key `begin`: runs are cut on the grid of dropout groups.
FUSED_MHA_INLINE std::int64_t forward_step(const KeySpan& kept, std::int64_t begin) {
  const std::int64_t left = kept.count - begin;
  const std::int64_t room = kept.positions == nullptr ? kForwardKeys - kept[begin] % kForwardKeys : kForwardKeys;
  return left < room ? left : room;
}

/// What a row without sums is multiplied by: 0 if it sees nothing, NaN where visible scores leave no number.
template <typename T>
static T empty_row_scale(const CallConstants& call, const RowBlock& block, std::int64_t row) {
  const KeySpan& kept = call.masks->kept_keys(block.n);
  const std::int64_t l = block.row_begin + row;
  for (std::int64_t begin = 0; begin < kept.count; begin += kGroupKeys) {
    const std::int64_t left = kept.count - begin;
    const KeySpan part = kept.part(begin, left < kGroupKeys ? left : kGroupKeys);
    if (call.masks->tile_class(block.n, block.h, l, l + 1, part) == core::TileClass::kHidden) continue;
    for (std::int64_t i = 0; i < part.count; ++i) {
      if (core::is_visible(*call.problem, block.n, block.h, l, part[i])) return std::numeric_limits<T>::quiet_NaN();
    }
  }
  return T{0};
}

/// Normalizes and writes a block's rows; leaves each row's scale in `scales`.
template <typename T, typename F>
static void finish_rows(const ForwardPlan& plan, const ForwardScratch<T, F>& scratch, RowState<T, F>& state,
                        T* scales) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const RowBlock& block = state.block;
  const core::MutableView& output = plan.outputs.output;
  const std::int64_t statistic = (block.n * problem.heads + block.h) * problem.query_length + block.row_begin;
  T* row_max = static_cast<T*>(plan.outputs.row_max) + statistic;
  T* row_sum = static_cast<T*>(plan.outputs.row_sum) + statistic;
  if (!state.started) {
    for (std::int64_t i = 0; i < kBlockRows * scratch.padded_dv; ++i) state.output[i] = T{0};
  }
  T sums[kBlockRows];
  for (std::int64_t first = 0; first < block.rows; first += kLanes<T>) {
    const Vec<T> sum = reduce_rows<T>(state.sums + first * kLanes<T>, [](Vec<T> a, Vec<T> b) { return a + b; });
    store<T>(sums + first, sum);
    store<T>(scales + first, broadcast<T>(static_cast<T>(plan.call.dropout_scale)) / sum);
  }
  for (std::int64_t row = 0; row < block.rows; ++row) {
    if (state.row_max[row] == kMinusInfinity<T> && sums[row] == T{0}) {
      scales[row] = empty_row_scale<T>(plan.call, block, row);
    }
    row_max[row] = state.row_max[row];
    // A row whose visible scores are all -inf has no weights: the backward pass must see that, too.
    row_sum[row] = scales[row] != scales[row] ? scales[row] : sums[row];
  }
  store_rows<T>(
      state.output, scratch.padded_dv, block.rows, problem.value_dim, [&](std::int64_t row) { return scales[row]; },
      output, output.offset(block.n, block.h, block.row_begin, 0));
}

/// Where the weights of a row's kept keys gather. `h` is 0 for averages.
template <typename T, typename F>
static T* gathering_row(const ForwardPlan& plan, const ForwardScratch<T, F>& scratch, std::int64_t block_index,
                        std::int64_t h, std::int64_t row) {
  if (scratch.panel.rows != nullptr) return scratch.panel.row(block_index, row);
  const RowBlock& block = scratch.states[block_index].block;
  const core::MutableView& to = plan.outputs.weights;
  const KeySpan& kept = plan.call.masks->kept_keys(block.n);
  T* first = static_cast<T*>(to.data) + to.offset(block.n, h, block.row_begin + row, 0);
  return kept.positions == nullptr ? first + kept.first : first;
}

/// Normalized weights of one finished block, to where they gather or added to what other heads left there.
template <typename T, typename F>
static void fold_weights(const ForwardPlan& plan, const ForwardScratch<T, F>& scratch, std::int64_t block_index,
                         const T* scales, bool adds) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const WeightsPanel<T>& panel = scratch.panel;
  const RowState<T, F>& state = scratch.states[block_index];
  const KeySpan& kept = plan.call.masks->kept_keys(state.block.n);
  const Vec<T> unit = broadcast<T>(static_cast<T>(plan.call.unit));
  const T share = panel.averages ? T{1} / static_cast<T>(problem.heads) : T{1};
  const T* row_sum = static_cast<const T*>(plan.outputs.row_sum) +
                     (state.block.n * problem.heads + state.block.h) * problem.query_length + state.block.row_begin;
  T shares[kBlockRows];
  T references[kBlockRows];
  for (std::int64_t row = 0; row < kBlockRows; ++row) {
    T scale = row < state.block.rows ? scales[row] : T{0};
    if (plan.outputs.weights_before_dropout && row < state.block.rows) {
      scale = row_sum[row] == T{0} ? T{0} : T{1} / row_sum[row];
    }
    shares[row] = scale * share;
    references[row] = state.row_max[row] == kMinusInfinity<T> ? T{0} : state.row_max[row];
  }
  std::int64_t step = 0;
  for (std::int64_t begin = 0; begin < kept.count; ++step) {
    const std::int64_t size = forward_step(kept, begin);
    const T* tile = panel.tile(block_index, step);
    const T* tile_max = panel.tile_max(block_index, step);
    T factors[kBlockRows];
    for (std::int64_t row = 0; row < kBlockRows; row += kLanes<T>) {
      const Vec<T> grown = (load<T>(tile_max + row) - load<T>(references + row)) * unit;
      store<T>(factors + row, exp2(grown) * load<T>(shares + row));
    }
    for (std::int64_t row = 0; row < state.block.rows; ++row) {
      const T* weights = tile + row * kForwardKeys;
      T* sums = gathering_row<T>(plan, scratch, block_index, panel.averages ? 0 : state.block.h, row) + begin;
      const Vec<T> factor = broadcast<T>(factors[row]);
      std::int64_t key = 0;
      for (; key + kLanes<T> <= size; key += kLanes<T>) {
        const Vec<T> before = adds ? load<T>(sums + key) : Vec<T>{};
        store<T>(sums + key, fma(load<T>(weights + key), factor, before));
      }
      for (; key < size; ++key) sums[key] = weights[key] * factors[row] + (adds ? sums[key] : T{0});
    }
    begin += size;
  }
}

/// Moves the numbers of kept keys to the keys' places, zeros between them. From the last one on: none moves to an
/// earlier place.
template <typename T>
static void spread_over_keys(const KeySpan& kept, std::int64_t key_length, T* numbers) {
  std::int64_t end = key_length;
  for (std::int64_t i = kept.count - 1; i >= 0; --i) {
    const std::int64_t s = kept.positions[i];
    const T number = numbers[i];
    for (std::int64_t hidden = s + 1; hidden < end; ++hidden) numbers[hidden] = T{0};
    numbers[s] = number;
    end = s;
  }
  for (std::int64_t hidden = 0; hidden < end; ++hidden) numbers[hidden] = T{0};
}

/// Writes finished weights of a block, zeros at keys that padding hides. `h` is 0 for averages.
template <typename T, typename F>
static void write_weights(const ForwardPlan& plan, const ForwardScratch<T, F>& scratch, std::int64_t block_index,
                          std::int64_t h) {
  const core::AttentionProblem& problem = *plan.call.problem;
  const WeightsPanel<T>& panel = scratch.panel;
  const RowBlock& block = scratch.states[block_index].block;
  const KeySpan& kept = plan.call.masks->kept_keys(block.n);
  const core::MutableView& to = plan.outputs.weights;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    T* weights = gathering_row<T>(plan, scratch, block_index, h, row);
    const std::int64_t offset = to.offset(block.n, h, block.row_begin + row, 0);
    const bool is_elsewhere = panel.rows != nullptr;
    if (kept.positions != nullptr) {
      spread_over_keys<T>(kept, problem.key_length, weights);
      if (is_elsewhere) store_row<T>(weights, problem.key_length, T{1}, to, offset);
      continue;
    }
    with_storage<T>(to.data, to.dtype, [&](auto* base) {
      using Storage = std::remove_pointer_t<decltype(base)>;
      const auto clear = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t s = begin; s < end; ++s) base[offset + s * to.strides[3]] = Storage{};
      };
      clear(0, kept.first);
      clear(kept.first + kept.count, problem.key_length);
    });
    if (is_elsewhere) store_row<T>(weights, kept.count, T{1}, to, offset + kept.first * to.strides[3]);
  }
}

/// One step for one block of rows, if the block sees any of its keys.
template <typename T, typename F>
static void visit_tile(const ForwardPlan& plan, ForwardScratch<T, F>& scratch, const ForwardItem& item,
                       std::int64_t kv_head, std::int64_t block_index, KeyTile<T, F>& keys) {
  const CallConstants& call = plan.call;
  classify_tile<kForwardKeys>(call, scratch.states[block_index].block, keys.keys, *scratch.mask);
  if (!scratch.mask->any_visible) return skip_tile<T>(scratch, block_index, keys);
  if (!keys.prepared) prepare_key_tile<T>(plan, item.n, kv_head, scratch.padded_dv, keys);
  keys.prepared = true;
  if (call.unit == 1.0) {
    forward_tile<T, F, true>(plan, scratch, block_index, keys);
  } else {
    forward_tile<T, F, false>(plan, scratch, block_index, keys);
  }
}

/// The item's part of the keys of (n, kv_head), for the first `count` row states; finished(block) when a block has met
/// the last of them. A block meets a whole panel before the next block does, so that its state stays in the L1 cache,
/// and the pages of its mask rows in the TLB.
template <typename T, typename F, typename Finished>
static void forward_rows(const ForwardPlan& plan, ForwardScratch<T, F>& scratch, const ForwardItem& item,
                         std::int64_t kv_head, std::int64_t count, const Finished& finished) {
  const KeySpan& kept = plan.call.masks->kept_keys(item.n);
  const std::int64_t end = kept.count * (item.split + 1) / plan.key_splits;
  std::int64_t step = 0;
  std::int64_t begin = kept.count * item.split / plan.key_splits;
  do {  // once even without keys: blocks end all the same
    std::int64_t steps = 0;
    for (; steps < scratch.panel_steps && begin < end; ++steps, ++step) {
      KeyTile<T, F>& keys = scratch.panel_keys[steps];
      const std::int64_t whole = forward_step(kept, begin);
      const std::int64_t size = whole < end - begin ? whole : end - begin;
      keys.keys = kept.part(begin, size);
      keys.step = step;
      keys.prepared = false;
      begin += size;
    }
    for (std::int64_t block = 0; block < count; ++block) {
      for (std::int64_t i = 0; i < steps; ++i) {
        visit_tile<T>(plan, scratch, item, kv_head, block, scratch.panel_keys[i]);
      }
      if (begin >= end) finished(block);
    }
  } while (begin < end);
}

/// One split's state of a block of few rows: outputs [kFewRows][padded Dv], maxima, lanewise sums.
template <typename T>
struct SplitState {
  T* output;
  T* row_max;  // [kFewRows, padded]
  T* sums;     // [kFewRows][lanes]

  static std::int64_t elements(const core::AttentionProblem& problem) {
    return kFewRows * (round_up(problem.value_dim, kLanes<T>) + kLanes<T>)+round_up(kFewRows, kLanes<T>);
  }
  SplitState(const ForwardPlan& plan, std::int64_t n, std::int64_t h, std::int64_t split) {
    const core::AttentionProblem& problem = *plan.call.problem;
    const std::int64_t index = (n * problem.heads + h) * plan.key_splits + split;
    output = static_cast<T*>(plan.split_states) + index * elements(problem);
    row_max = output + kFewRows * round_up(problem.value_dim, kLanes<T>);
    sums = row_max + round_up(kFewRows, kLanes<T>);
  }
};

template <typename T>
static std::size_t split_state_elements(const ForwardPlan& plan) {
  return static_cast<std::size_t>(SplitState<T>::elements(*plan.call.problem));
}

template <typename T, typename F>
static void save_split(const ForwardPlan& plan, const ForwardItem& item, std::int64_t padded_dv,
                       const RowState<T, F>& state) {
  const SplitState<T> saved(plan, state.block.n, state.block.h, item.split);
  for (std::int64_t i = 0; i < kFewRows * padded_dv; ++i) saved.output[i] = state.output[i];
  for (std::int64_t i = 0; i < kFewRows; ++i) saved.row_max[i] = state.row_max[i];
  for (std::int64_t i = 0; i < kFewRows * kLanes<T>; ++i) saved.sums[i] = state.sums[i];
}

FUSED_MHA_INLINE RowBlock row_block(const CallConstants& call, std::int64_t n, std::int64_t h, std::int64_t index) {
  const std::int64_t begin = index * kBlockRows;
  const std::int64_t left = call.problem->query_length - begin;
  return {n, h, begin, left < kBlockRows ? left : kBlockRows};
}

/// What the item that comes after this one will read, and what this one will write.
template <typename T, typename F>
static void plan_prefetch(const ForwardPlan& plan, const ForwardItem& item, const ForwardItem& next,
                          ForwardScratch<T, F>& scratch) {
  const CallConstants& call = plan.call;
  const core::AttentionProblem& problem = *call.problem;
  const auto add_rows = [&](const auto& view, const ForwardItem& of, std::int64_t columns) {
    const std::int64_t first_head = of.kv_head * problem.heads_per_kv_head();
    for (std::int64_t begin = of.block_begin; begin < of.block_end;) {
      const std::int64_t head = begin / call.blocks_per_head;
      const std::int64_t head_end = (head + 1) * call.blocks_per_head;
      const std::int64_t end = of.block_end < head_end ? of.block_end : head_end;
      const std::int64_t first_row = begin % call.blocks_per_head * kBlockRows;
      const std::int64_t last_row = (end - head * call.blocks_per_head) * kBlockRows;
      const std::int64_t row_end = last_row < problem.query_length ? last_row : problem.query_length;
      scratch.prefetcher.add(matrix_of(view, of.n, first_head + head), {nullptr, first_row, row_end - first_row},
                             columns);
      begin = end;
    }
  };
  const KeySpan& kept = call.masks->kept_keys(item.n);
  add_rows(plan.outputs.output, item, problem.value_dim);
  const bool same_rows = next.n == item.n && next.kv_head == item.kv_head && next.block_begin == item.block_begin;
  if (!same_rows) add_rows(problem.query, next, problem.head_dim);
  if (next.n != item.n || next.kv_head != item.kv_head) {
    const KeySpan& next_kept = call.masks->kept_keys(next.n);
    scratch.prefetcher.add(matrix_of(problem.key, next.n, next.kv_head), next_kept, problem.head_dim);
    scratch.prefetcher.add(matrix_of(problem.value, next.n, next.kv_head), next_kept, problem.value_dim);
  }
  const std::int64_t tiles = (kept.count + kGroupKeys - 1) / kGroupKeys * (kBlockRows / kScoreRows);
  scratch.prefetcher.spread_over(tiles * (item.block_end - item.block_begin));
}

/// Blocks of the heads that share the item's keys.
template <typename T, typename F>
static void forward_without_weights(const ForwardPlan& plan, const ForwardItem& item, ForwardScratch<T, F>& scratch) {
  const CallConstants& call = plan.call;
  const std::int64_t first_head = item.kv_head * call.problem->heads_per_kv_head();
  const std::int64_t count = item.block_end - item.block_begin;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t index = item.block_begin + i;
    begin_rows<T>(plan, scratch.padded_dv,
                  row_block(call, item.n, first_head + index / call.blocks_per_head, index % call.blocks_per_head),
                  scratch.states[i]);
    if (plan.key_splits == 1) begin_with_sink<T>(plan, scratch.padded_dv, scratch.states[i]);
  }
  forward_rows<T>(plan, scratch, item, item.kv_head, count, [&](std::int64_t block) {
    if (plan.key_splits > 1) {
      save_split<T>(plan, item, scratch.padded_dv, scratch.states[block]);
    } else {
      T scales[kBlockRows];
      finish_rows<T>(plan, scratch, scratch.states[block], scales);
    }
  });
}

/// The same blocks of the heads that share the item's keys, or of every head, so that averages stay in the item.
template <typename T, typename F>
static void forward_with_weights(const ForwardPlan& plan, const ForwardItem& item, const ForwardItem& next,
                                 ForwardScratch<T, F>& scratch) {
  const CallConstants& call = plan.call;
  const std::int64_t count = item.block_end - item.block_begin;
  const bool averages = plan.outputs.weights_mode == core::WeightsMode::kAveraged;
  const std::int64_t sharing = call.problem->heads_per_kv_head();
  const std::int64_t first_head = averages ? 0 : item.kv_head * sharing;
  const std::int64_t head_end = averages ? call.problem->heads : first_head + sharing;
  const auto of_head = [&](std::int64_t h) {
    const std::int64_t before = h % sharing * call.blocks_per_head;
    return ForwardItem{item.n, h / sharing, before + item.block_begin, before + item.block_end, 0};
  };
  for (std::int64_t h = first_head; h < head_end; ++h) {
    for (std::int64_t i = 0; i < count; ++i) {
      begin_rows<T>(plan, scratch.padded_dv, row_block(call, item.n, h, item.block_begin + i), scratch.states[i]);
      begin_with_sink<T>(plan, scratch.padded_dv, scratch.states[i]);
    }
    scratch.prefetcher = {};
    plan_prefetch<T>(plan, of_head(h), h + 1 < head_end ? of_head(h + 1) : next, scratch);
    forward_rows<T>(plan, scratch, item, h / sharing, count, [&](std::int64_t block) {
      T scales[kBlockRows];
      finish_rows<T>(plan, scratch, scratch.states[block], scales);
      fold_weights<T>(plan, scratch, block, scales, averages && h > 0);
      if (!averages) write_weights<T>(plan, scratch, block, h);
    });
  }
  for (std::int64_t i = 0; averages && i < count; ++i) write_weights<T>(plan, scratch, i, 0);
}

template <typename T, typename F = T>
static std::size_t forward_scratch(const ForwardPlan& plan) {
  if (kIsPair<F> && plan.few_rows) return forward_scratch<T>(plan);
  return ForwardScratch<T, F>{}.carve(plan, nullptr);
}

template <typename T, typename F = T>
static void forward_item(const ForwardPlan& plan, const ForwardItem& item, const ForwardItem& next, std::byte* base) {
  if (kIsPair<F> && plan.few_rows) return forward_item<T>(plan, item, next, base);
  ForwardScratch<T, F> scratch;
  scratch.carve(plan, base);
  if (plan.outputs.weights_mode == core::WeightsMode::kNone) {
    plan_prefetch<T>(plan, item, next, scratch);
    forward_without_weights<T>(plan, item, scratch);
  } else {
    forward_with_weights<T>(plan, item, next, scratch);
  }
}

/// Merges the splits of one head's rows, first split first, and writes the rows.
template <typename T>
static void merge_splits(const ForwardPlan& plan, std::int64_t n, std::int64_t h, std::byte* base) {
  ForwardScratch<T, T> scratch;
  scratch.carve(plan, base);
  const T unit = static_cast<T>(plan.call.unit);
  RowState<T, T>& state = scratch.states[0];
  begin_rows<T>(plan, scratch.padded_dv, row_block(plan.call, n, h, 0), state);
  begin_with_sink<T>(plan, scratch.padded_dv, state);
  for (std::int64_t split = 0; split < plan.key_splits; ++split) {
    const SplitState<T> saved(plan, n, h, split);
    for (std::int64_t row = 0; row < state.block.rows; ++row) {
      const T largest = saved.row_max[row] > state.row_max[row] ? saved.row_max[row] : state.row_max[row];
      const T reference = largest == kMinusInfinity<T> ? T{0} : largest;
      const Vec<T> old_factor = broadcast<T>(exp2_difference<T>(state.row_max[row], reference, unit));
      const Vec<T> new_factor = broadcast<T>(exp2_difference<T>(saved.row_max[row], reference, unit));
      const auto merge = [&](T* into, const T* from, std::int64_t count) {
        for (std::int64_t i = 0; i < count; i += kLanes<T>) {
          store<T>(into + i, load<T>(into + i) * old_factor + load<T>(from + i) * new_factor);
        }
      };
      state.row_max[row] = largest;
      merge(state.sums + row * kLanes<T>, saved.sums + row * kLanes<T>, kLanes<T>);
      merge(state.output + row * scratch.padded_dv, saved.output + row * scratch.padded_dv, scratch.padded_dv);
    }
  }
  T scales[kBlockRows];
  finish_rows<T>(plan, scratch, state, scales);
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
