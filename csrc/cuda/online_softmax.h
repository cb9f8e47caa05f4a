// SPDX-License-Identifier: BSD-3-Clause
//
// Softmax of rows whose scores arrive tile by tile (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018, algorithm 3), and weights had again from what it leaves.
//
//   m' = max(m, rowmax t)     P = exp2(unit (t - m'))     sum' = sum exp2(unit (m - m')) + rowsum P
//
// m stays where a tile exceeds it by less than 2^8 in exp2: such weights and sums are no less exact, and what was added
// up before seldom has to shrink. So m is the largest score or up to that much less.
//
// A thread adds up its own columns; rows are added over lanes once, at the end. A row that has seen nothing has m =
// -inf, sum = 0; exp2 is taken against 0 then, so its weights are 0. A NaN score never becomes a maximum and makes the
// sum NaN. A sink is a key whose value is 0, met before all others: m = sink, sum = 1.
#pragma once

#include "cuda/masks.h"

namespace fused_mha::cuda {

/// What exp2 is taken against.
template <typename Sum>
__device__ __forceinline__ Sum reference_of(Sum row_max) {
  return row_max == kMinusInfinity<Sum> ? Sum{0} : row_max;
}

/// exp2(unit (t - reference)). Where scores are not `scaled` yet the unit is 1: one multiply-add. Where they are the
/// difference comes first: unit * t alone may be infinite.
template <typename Sum>
__device__ __forceinline__ Sum unnormalized_weight(bool scaled, const Factors<Sum>& factors, Sum score, Sum reference) {
  return scaled ? exp2_of((score - reference) * factors.unit)
                : exp2_of(multiply_add(score, factors.query_factor, -reference));
}

/// The score of the sink of (n, h), in the unit of scores; -inf without one. Infinity would leave NaN where two of them
/// are subtracted; all that matters of it is that nothing else counts.
template <typename Sum>
__device__ __forceinline__ Sum sink_of(const Call& call, const Factors<Sum>& factors, int n, int h) {
  const core::View& sink = call.problem.sink;
  if (!sink) return kMinusInfinity<Sum>;
  const Sum score = element_of<Sum>(sink, sink.offset(n, h, 0, 0)) * factors.bias_factor;
  constexpr Sum kLargest = std::numeric_limits<Sum>::max();
  return score > kLargest ? kLargest : score;
}

/// log sum exp of a row's scores, in the unit that they had before they were scaled for exp2; -inf where nothing is
/// seen.
template <typename Sum>
__device__ __forceinline__ Sum log_sum_exp_of(const Factors<Sum>& factors, Sum row_max, Sum row_sum) {
  constexpr auto kLn2 = static_cast<Sum>(std::numbers::ln2);
  return row_sum == Sum{0} ? kMinusInfinity<Sum> : row_max * (factors.unit * kLn2) + log_of(row_sum);
}

template <typename Tiles>
struct OnlineSoftmax {
  using Sum = typename Tiles::Sum;
  static constexpr auto kSlack = Sum{8};
  Sum row_max[Tiles::kRowSlots];
  Sum row_sum[Tiles::kRowSlots];

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      row_max[slot] = kMinusInfinity<Sum>;
      row_sum[slot] = Sum{0};
    }
  }

  /// Lets rows that have seen nothing yet see the sink of (n, h), if there is one.
  __device__ __forceinline__ void begin_with_sink(const Call& call, const Factors<Sum>& factors, int n, int h) {
    const Sum sink = sink_of(call, factors, n, h);
    if (sink == kMinusInfinity<Sum>) return;
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      row_max[slot] = sink;
      row_sum[slot] = Tiles::column(0) != 0 ? Sum{0} : sink == sink ? Sum{1} : sink;
    }
  }

  /// Scores become weights; where a maximum is raised, the output of the tiles before shrinks.
  __device__ __forceinline__ void add(const Call& call, const Factors<Sum>& factors, typename Tiles::Scores& scores,
                                      typename Tiles::Output& output) {
    Sum shrink[Tiles::kRowSlots];
    bool is_raised = false;
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      Sum tile_max = scores.at(slot, 0);
#pragma unroll
      for (int c = 1; c < Tiles::kColumnSlots; ++c) tile_max = larger(tile_max, scores.at(slot, c));
      tile_max = largest_of_lanes<Tiles::kLanesOfRow>(tile_max);
      if (!call.has_bias) tile_max *= factors.query_factor;
      const Sum before = row_max[slot];
      const bool raises = (tile_max - before) * factors.unit > kSlack;  // -inf - -inf is NaN: no
      shrink[slot] = raises ? exp2_of((before - tile_max) * factors.unit) : Sum{1};
      row_max[slot] = raises ? tile_max : before;
      is_raised = is_raised || raises;
    }
    if (__any_sync(kAllLanes, is_raised)) {
#pragma unroll
      for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
        row_sum[slot] *= shrink[slot];
#pragma unroll
        for (int c = 0; c < Tiles::kOutputSlots; ++c) output.at(slot, c) *= shrink[slot];
      }
    }
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      const Sum reference = reference_of(row_max[slot]);
      Sum sum = row_sum[slot];
#pragma unroll
      for (int c = 0; c < Tiles::kColumnSlots; ++c) {
        const Sum weight = unnormalized_weight(call.has_bias, factors, scores.at(slot, c), reference);
        scores.at(slot, c) = weight;
        sum += weight;
      }
      row_sum[slot] = sum;
    }
  }

  /// Adds the rows' sums over their lanes.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
      row_sum[slot] = sum_of_lanes<Tiles::kLanesOfRow>(row_sum[slot]);
    }
  }
};

/// A finished row, as the backward pass and returned weights need it: its normalized weight of a score t is
/// exp2(unit (t - reference)) * reciprocal.
template <typename Sum>
struct RowStatistics {
  Sum reference = Sum{0};
  Sum reciprocal = Sum{0};
  Sum delta = Sum{0};  // sum over s of weight * its gradient
};

/// Row l of (n, h); all 0, which makes weights 0, behind the last. `deltas` may be null.
template <typename Sum>
__device__ __forceinline__ RowStatistics<Sum> load_statistics(const Sizes& sizes, const void* row_max,
                                                              const void* row_sum, const void* deltas, int n, int h,
                                                              int l) {
  RowStatistics<Sum> row;
  if (l >= sizes.queries) return row;
  const std::int64_t at = row_index(sizes, n, h, l);
  row.reference = reference_of(static_cast<const Sum*>(row_max)[at]);
  const Sum sum = static_cast<const Sum*>(row_sum)[at];
  row.reciprocal = sum == Sum{0} ? Sum{0} : reciprocal_of(sum);
  if (deltas != nullptr) row.delta = static_cast<const Sum*>(deltas)[at];
  return row;
}

}  // namespace fused_mha::cuda
