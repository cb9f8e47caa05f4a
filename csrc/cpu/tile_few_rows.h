// SPDX-License-Identifier: BSD-3-Clause
//
// One or a few query rows, as in decoding: every key and value is used a few times only, so nothing is packed.
// Shapes as in core/problem.h with L <= kFewRows; sums in T; keys in hidden groups are skipped, hidden keys of mixed
// groups never meet a value.
//
//   score[row][key] = q . k          along D, keys read where they lie; a vector of keys is summed up at once
//   output[row][:] += P[row][key] v  values read where they lie
//
// Bound by memory. Keys are split over items where there are few heads; the splits' maxima, sums and outputs are
// merged in order (the second half of algorithm 3 of Milakov and Gimelshein). No torch. Part of a kernel unit.
#pragma once

#include "cpu/pack.h"
#include "cpu/tile_masks.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// Asks for the row that will be read kRowsAhead rows later: one stream of rows does not keep the memory busy by
/// itself.
template <typename Storage>
FUSED_MHA_INLINE void prefetch_row(const Storage* row, const Matrix& from, std::int64_t columns) {
  constexpr std::int64_t kRowsAhead = 16;
  constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(Storage));
  const Storage* ahead = row + kRowsAhead * from.row_stride;
  for (std::int64_t column = 0; column < columns; column += kLine)
    __builtin_prefetch(ahead + column * from.column_stride);
}

/// Scores of kRows rows (queries [kRows][padded], zeros behind `depth`) against the keys; tile rows are kForwardKeys
/// apart, columns behind the last key are 0 up to the next multiple of kGroupKeys.
template <typename T, int kRows, typename Storage>
static void few_scores(const Storage* base, const Matrix& from, const KeySpan& keys, std::int64_t depth,
                       std::int64_t padded, const T* queries, T* tile) {
  constexpr int kStep = kLanes<T>;
  const std::int64_t columns = (keys.count + kGroupKeys - 1) / kGroupKeys * kGroupKeys;
  for (std::int64_t first = 0; first < columns; first += kStep) {
    Vec<T> products[kRows][kStep];
    for (int i = 0; i < kStep; ++i) {
      Vec<T> sums[kRows] = {};
      if (first + i < keys.count) {
        const Storage* key = base + keys[first + i] * from.row_stride;
        prefetch_row(key, from, depth);
        for (std::int64_t d = 0; d < padded; d += kStep) {
          const Vec<T> part = load_some<T>(key + d * from.column_stride, from.column_stride, depth - d);
          for (int row = 0; row < kRows; ++row) sums[row] = fma(load<T>(queries + row * padded + d), part, sums[row]);
        }
      }
      for (int row = 0; row < kRows; ++row) products[row][i] = sums[row];
    }
    for (int row = 0; row < kRows; ++row) {
      transpose<T>(products[row]);
      for (int width = kStep / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) products[row][i] = products[row][i] + products[row][i + width];
      }
      store<T>(tile + row * kForwardKeys + first, products[row][0]);
    }
  }
}

/// output[row] += P[row] V for kRows rows, kVectors vectors of columns from `column` on.
template <typename T, int kRows, int kVectors, typename Storage>
FUSED_MHA_INLINE void few_outputs_tile(const Storage* base, const Matrix& from, const KeySpan& keys,
                                       std::int64_t columns, std::int64_t column, std::int64_t padded,
                                       const TileMask<kForwardKeys>& mask, std::int64_t rows, const T* weights,
                                       T* output) {
  Vec<T> sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) sums[row][v] = load<T>(output + row * padded + column + v * kLanes<T>);
  }
  for (std::int64_t key = 0; key < keys.count; ++key) {
    if (mask.is_hidden(key / kGroupKeys)) continue;
    const Storage* value = base + keys[key] * from.row_stride;
    if (column == 0) prefetch_row(value, from, columns);
    Vec<T> part[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t begin = column + v * kLanes<T>;
      part[v] = load_some<T>(value + begin * from.column_stride, from.column_stride, columns - begin);
    }
    for (int row = 0; row < kRows; ++row) {
      // A hidden value may be NaN: a weight of 0 must not meet it.
      if (row < rows && mask.is_mixed(key / kGroupKeys) && !mask.sees(row, key)) continue;
      const Vec<T> weight = broadcast<T>(weights[row * kForwardKeys + key]);
      for (int v = 0; v < kVectors; ++v) sums[row][v] = fma(weight, part[v], sums[row][v]);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) store<T>(output + row * padded + column + v * kLanes<T>, sums[row][v]);
  }
}

template <typename T, int kRows, typename Storage>
static void few_outputs(const Storage* base, const Matrix& from, const KeySpan& keys, std::int64_t columns,
                        std::int64_t padded, const TileMask<kForwardKeys>& mask, std::int64_t rows, const T* weights,
                        T* output) {
  constexpr int kVectors = 4;
  std::int64_t column = 0;
  for (; column + kVectors * kLanes<T> <= padded; column += kVectors * kLanes<T>) {
    few_outputs_tile<T, kRows, kVectors>(base, from, keys, columns, column, padded, mask, rows, weights, output);
  }
  for (; column < padded; column += kLanes<T>) {
    few_outputs_tile<T, kRows, 1>(base, from, keys, columns, column, padded, mask, rows, weights, output);
  }
}

/// Calls body(integral_constant) with a row count that has its own code and is at least `rows` <= kFewRows.
template <typename Body>
FUSED_MHA_INLINE void with_few_rows(std::int64_t rows, const Body& body) {
  static_assert(kFewRows == 4);
  if (rows == 1) {
    body(std::integral_constant<int, 1>{});
  } else if (rows == 2) {
    body(std::integral_constant<int, 2>{});
  } else {
    body(std::integral_constant<int, 4>{});
  }
}

/// Scores of a block of few rows against a step's keys; the free groups' lanewise maxima go into `best`.
template <typename T>
static void score_few_rows(const CallConstants& call, const RowBlock& block, const KeySpan& keys, const T* queries,
                           const TileMask<kForwardKeys>& mask, T* tile, T* best) {
  const core::AttentionProblem& problem = *call.problem;
  const Matrix from = matrix_of(problem.key, block.n, block.h / problem.heads_per_kv_head());
  const std::int64_t padded = round_up(problem.head_dim, kLanes<T>);
  with_few_rows(block.rows, [&](auto rows) {
    with_storage<T>(from.data, from.dtype, [&](const auto* base) {
      few_scores<T, decltype(rows)::value>(base, from, keys, problem.head_dim, padded, queries, tile);
    });
  });
  for (std::int64_t row = 0; row < block.rows; ++row) {
    Vec<T> largest = load<T>(best + row * kLanes<T>);
    for (std::int64_t i = 0; i < keys.count; i += kLanes<T>) {
      const std::int64_t group = i / kGroupKeys;
      if (mask.is_mixed(group) || mask.is_hidden(group)) continue;
      largest = max(largest, load<T>(tile + row * kForwardKeys + i));
    }
    store<T>(best + row * kLanes<T>, largest);
  }
}

/// output += P V for a block of few rows; `output` [kBlockRows][padded Dv] already holds what is added to.
template <typename T>
static void accumulate_few_rows(const CallConstants& call, const RowBlock& block, const KeySpan& keys,
                                const TileMask<kForwardKeys>& mask, const T* weights, std::int64_t padded_dv,
                                T* output) {
  const core::AttentionProblem& problem = *call.problem;
  const Matrix from = matrix_of(problem.value, block.n, block.h / problem.heads_per_kv_head());
  with_few_rows(block.rows, [&](auto rows) {
    with_storage<T>(from.data, from.dtype, [&](const auto* base) {
      few_outputs<T, decltype(rows)::value>(base, from, keys, problem.value_dim, padded_dv, mask, block.rows, weights,
                                            output);
    });
  });
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
