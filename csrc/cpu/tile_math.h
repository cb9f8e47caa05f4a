// SPDX-License-Identifier: BSD-3-Clause
//
// The register tiles: small matrix products whose sums stay in registers. Everything else moves data to them.
//
//   score_tile    out[r][c] = sum_d a[d][r] * b[d][c]       rows kScoreRows, columns kScoreVectors vectors; less at
//   ends rank_update   out[r][c] (+)= sum_k a(r, k) * b[k][c]    rows and columns chosen to fill the registers
//
// What is multiplied is of type F: T, the type of the sums, or BFloat16Pair, two neighbours along the dimension that is
// summed over. Depths, steps and leading dimensions count F.
//
// No torch. Part of a kernel unit: include after simd/vec_*.h.
#pragma once

#include "cpu/factors.h"
#include "cpu/plan.h"
#include "cpu/prefetch.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// One register tile of scores. a: [depth][kBlockRows], b: [depth][kGroupKeys], pointing at the tile's first row and
/// column; out: rows kLd apart. With kTrackMax the lanewise maximum of each row is folded into best[r * lanes]. Pairs
/// cannot hold `factor` without another rounding: their sums are multiplied by it.
template <typename T, int kRows, int kVectors, bool kTrackMax, std::int64_t kLd, typename F>
FUSED_MHA_INLINE void score_tile(const F* __restrict a, const F* __restrict b, std::int64_t depth, T factor,
                                 T* __restrict out, T* __restrict best) {
  Vec<T> sums[kRows][kVectors] = {};
  for (std::int64_t d = 0; d < depth; ++d) {
    Vec<T> columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) columns[v] = load_factors<T>(b + d * kGroupKeys + v * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> row = broadcast_factor<T>(a[d * kBlockRows + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add<F>(row, columns[v], sums[r][v]);
    }
  }
  if constexpr (kIsPair<F>) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = sums[r][v] * broadcast<T>(factor);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store<T>(out + r * kLd + v * kLanes<T>, sums[r][v]);
    if constexpr (kTrackMax) {
      Vec<T> largest = load<T>(best + r * kLanes<T>);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) largest = max(largest, sums[r][v]);
      store<T>(best + r * kLanes<T>, largest);
    }
  }
}

/// Rows of the tiles that a block's last rows go into where few are left.
inline constexpr int kScoreTailRows = kScoreRows / 3;
static_assert(kBlockRows % kScoreRows == 0 && kScoreRows % kScoreTailRows == 0);

/// Rows that score_group reads for `rows` rows: [depth][kBlockRows] has to hold numbers up to there.
constexpr std::int64_t score_rows_read(std::int64_t rows) {
  const std::int64_t left = rows % kScoreRows;
  const std::int64_t tail = (left + kScoreTailRows - 1) / kScoreTailRows * kScoreTailRows;
  return rows - left + tail;
}

/// score_group for columns of kVectors vectors.
template <typename T, int kVectors, bool kTrackMax, std::int64_t kLd, typename F>
FUSED_MHA_INLINE void score_columns(const F* a, std::int64_t rows, const F* b, std::int64_t depth, T factor, T* out,
                                    T* best, Prefetcher& prefetcher) {
  std::int64_t row = 0;
  // Two tails cost less than a whole tile, three the same.
  for (; row + 2 * kScoreTailRows < rows; row += kScoreRows) {
    prefetcher.advance();
    score_tile<T, kScoreRows, kVectors, kTrackMax, kLd>(a + row, b, depth, factor, out + row * kLd,
                                                        best + row * kLanes<T>);
  }
  for (; row < rows; row += kScoreTailRows) {
    score_tile<T, kScoreTailRows, kVectors, kTrackMax, kLd>(a + row, b, depth, factor, out + row * kLd,
                                                            best + row * kLanes<T>);
  }
}

/// `rows` rows of a block against one group of `keys` keys: out[row][0 .. kGroupKeys). What is behind the last key's
/// vector stays as it was.
template <typename T, bool kTrackMax, std::int64_t kLd, typename F>
[[gnu::noinline]] static void score_group(const F* a, std::int64_t rows, const F* b, std::int64_t keys,
                                          std::int64_t depth, T factor, T* out, T* best, Prefetcher& prefetcher) {
  constexpr std::int64_t kColumns = static_cast<std::int64_t>(kScoreVectors) * kLanes<T>;
  for (std::int64_t column = 0; column < kGroupKeys && column < keys; column += kColumns) {
    if (keys - column > kLanes<T>) {
      score_columns<T, kScoreVectors, kTrackMax, kLd>(a, rows, b + column, depth, factor, out + column, best,
                                                      prefetcher);
    } else {
      score_columns<T, 1, kTrackMax, kLd>(a, rows, b + column, depth, factor, out + column, best, prefetcher);
    }
  }
}

/// Rows of a rank update whose tile is `vectors` wide: what leaves registers for the columns and one row.
constexpr int rank_update_rows(int vectors) {
  if (kRegisters == 32) return vectors == 4 ? 6 : vectors == 3 ? 8 : vectors == 2 ? 12 : 24;
  return vectors == 2 ? 6 : 12;
}
inline constexpr int kMaxRankVectors = kRegisters == 32 ? 4 : 2;
/// Every rank_update_rows() divides this: row counts are rounded up to a multiple of the tile's rows only.
inline constexpr std::int64_t kRankRowQuantum = 24;

/// One register tile; element a(r, k) is a[r * kRowStride + k * kStepStride].
template <typename T, int kVectors, std::int64_t kRowStride, std::int64_t kStepStride, typename F>
FUSED_MHA_INLINE void rank_update_tile(const F* __restrict a, const F* __restrict b, std::int64_t ldb,
                                       std::int64_t steps, T* __restrict out, std::int64_t ldo, bool accumulate) {
  constexpr int kRows = rank_update_rows(kVectors);
  Vec<T> sums[kRows][kVectors] = {};
  for (std::int64_t k = 0; k < steps; ++k) {
    Vec<T> columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) columns[v] = load_factors<T>(b + k * ldb + v * kLanes<T>);
#pragma GCC unroll 24
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> row = broadcast_factor<T>(a[r * kRowStride + k * kStepStride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add<F>(row, columns[v], sums[r][v]);
    }
  }
  // What is there is added at the end, not begun with: sums of sums of `steps` terms round less than one long sum.
  if (accumulate) {
#pragma GCC unroll 24
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = sums[r][v] + load<T>(out + r * ldo + v * kLanes<T>);
    }
  }
#pragma GCC unroll 24
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store<T>(out + r * ldo + v * kLanes<T>, sums[r][v]);
  }
}

template <typename T, int kVectors, std::int64_t kRowStride, std::int64_t kStepStride, typename F>
[[gnu::noinline]] static void rank_update_columns(const F* a, std::int64_t rows, const F* b, std::int64_t ldb,
                                                  std::int64_t steps, T* out, std::int64_t ldo, bool accumulate) {
  constexpr std::int64_t kRows = rank_update_rows(kVectors);
  for (std::int64_t r = 0; r < rows; r += kRows) {
    rank_update_tile<T, kVectors, kRowStride, kStepStride>(a + r * kRowStride, b, ldb, steps, out + r * ldo, ldo,
                                                           accumulate);
  }
}

/// out (rows, columns) (+)= a b, with columns a multiple of the vector length and b, out rows `ld` apart. Rows up to
/// the next multiple of kRankRowQuantum may be written: buffers are that long.
template <typename T, std::int64_t kRowStride, std::int64_t kStepStride, typename F>
static void rank_update(const F* a, std::int64_t rows, const F* b, std::int64_t ld, std::int64_t steps, T* out,
                        bool accumulate) {
  const std::int64_t vectors = ld / kLanes<T>;
  const std::int64_t parts = (vectors + kMaxRankVectors - 1) / kMaxRankVectors;
  std::int64_t column = 0;
  for (std::int64_t part = 0; part < parts; ++part) {
    // Even parts: 5 vectors go as 3 + 2, not as 4 + 1, whose last tile would wait for its own sums.
    const std::int64_t width = vectors * (part + 1) / parts - vectors * part / parts;
    const F* columns = b + column;
    T* target = out + column;
    if constexpr (kMaxRankVectors == 4) {
      if (width == 4) {
        rank_update_columns<T, 4, kRowStride, kStepStride>(a, rows, columns, ld, steps, target, ld, accumulate);
      } else if (width == 3) {
        rank_update_columns<T, 3, kRowStride, kStepStride>(a, rows, columns, ld, steps, target, ld, accumulate);
      }
    }
    if (width == 2) {
      rank_update_columns<T, 2, kRowStride, kStepStride>(a, rows, columns, ld, steps, target, ld, accumulate);
    } else if (width == 1) {
      rank_update_columns<T, 1, kRowStride, kStepStride>(a, rows, columns, ld, steps, target, ld, accumulate);
    }
    column += width * kLanes<T>;
  }
}

/// Zeros in `columns` columns of the rows behind `rows` that a rank update may read. Nobody needs what becomes of them,
/// but what the memory held before may be denormal numbers, and products of those take a hundred times as long.
template <std::int64_t kLd, typename F>
FUSED_MHA_INLINE void clear_rows_behind(F* tile, std::int64_t rows, std::int64_t columns) {
  const std::int64_t end = (rows + kRankRowQuantum - 1) / kRankRowQuantum * kRankRowQuantum;
  for (std::int64_t row = rows; row < end; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) tile[row * kLd + column] = F{};
  }
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
