// SPDX-License-Identifier: BSD-3-Clause
//
// Tiles by plain multiply-adds: 64 x 64 scores of operands of any dtype, stride and number of columns. The same
// interface as tensor_tiles.h, so that the same kernels run on both.
//
//   multiply     scores (rows x columns)  = left (rows x D) . right (columns x D)^T, any D
//   accumulate   output (rows x kOutput) += scores . right (columns x Dv)[:, part]: more columns are parts of their own
//
// Operands come from global memory, kStep of the summed dimension at a time. A thread has rows y + 16 r and columns x +
// 16 c: with s % 16 the same for all its keys, one counter of dropout serves four of its elements.
#pragma once

#include "cuda/dropout_bits.h"

namespace fused_mha::cuda {

/// A matrix and the rows of it that were requested, for each of two stages.
struct GenericTile {
  Matrix matrix;
  int first[2] = {0, 0};

  __device__ GenericTile(const Matrix& from, void* /*memory*/) : matrix(from) {}
  __device__ __forceinline__ void request(int first_row, int stage = 0) {
    if (stage == 0) {
      first[0] = first_row;
    } else {
      first[1] = first_row;
    }
  }
  __device__ __forceinline__ int first_of(int stage) const { return stage == 0 ? first[0] : first[1]; }
};

template <typename SumType>
struct GenericTiles {
  using Sum = SumType;
  static constexpr bool kIsCareful = true;
  static constexpr std::size_t kElementBytes = 0;  // float tiles take three dtypes
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocks = 1;
  static constexpr int kRows = 64;
  static constexpr int kColumns = 64;
  static constexpr int kOutput = 64;
  static constexpr int kRowSlots = 4;
  static constexpr int kColumnSlots = 4;
  static constexpr int kOutputSlots = 4;
  static constexpr int kWarpRows = 8;
  static constexpr int kLanesOfRow = 15;
  static constexpr int kLanesOfColumn = 16;

  struct Scores {
    Sum value[4][4];
    __device__ __forceinline__ Sum& at(int slot, int c) { return value[slot][c]; }
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int slot = 0; slot < 4; ++slot) {
#pragma unroll
        for (int c = 0; c < 4; ++c) value[slot][c] = Sum{0};
      }
    }
  };
  using Output = Scores;
  using Operand = Scores;
  static __device__ __forceinline__ Operand operand_of(const Scores& scores) { return scores; }
  static __device__ __forceinline__ void clear(Scores& scores) { scores.clear(); }

  static __device__ __forceinline__ int x() { return static_cast<int>(threadIdx.x) % 16; }
  static __device__ __forceinline__ int y() { return static_cast<int>(threadIdx.x) / 16; }
  static __device__ __forceinline__ int row_base() { return y(); }
  static __device__ __forceinline__ int column_base() { return x(); }
  static __device__ constexpr int row_step(int slot) { return 16 * slot; }
  static __device__ constexpr int column_step(int c) { return 16 * c; }
  static __device__ __forceinline__ int row(int slot) { return row_base() + row_step(slot); }
  static __device__ __forceinline__ int column(int c) { return column_base() + column_step(c); }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  static __device__ __forceinline__ int warp_row(int i) { return 2 * warp() + i % 2 + i / 2 * 16; }
  static __device__ __forceinline__ int warp_slot(int slot) { return y() % 2 + 2 * slot; }

  static constexpr int kCountersOfRow = 1;
  static __device__ __forceinline__ int residue(int /*i*/) { return x(); }

  static __device__ __forceinline__ void keep_keys_in_rows(const Call& call, core::PhiloxKey key,
                                                           const TilePlace& place, std::uint32_t (&keep)[kRowSlots]) {
    const int group = place.key_begin / kGroupKeys;
    const int first_number = place.key_begin % kGroupKeys / 16;
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) keep[slot] = 0;
#pragma unroll
    for (int c = 0; c < kColumnSlots; ++c) {
      const std::uint32_t eight = keep_eight(call, key, place, place.query_begin + column(c), group, y());
#pragma unroll
      for (int slot = 0; slot < kRowSlots; ++slot) keep[slot] |= ((eight >> (first_number + slot)) & 1U) << c;
    }
  }

  // ---- Memory: parts of two operands, [kStep][64]; weights, [column][row]; visibility, a word a row and column slot.
  // What masks add passes through the memory of the weights before those are there.

  using RowTile = GenericTile;
  using ColumnTile = GenericTile;
  static constexpr int kRowTileBytes = 0;
  static constexpr int kColumnTileBytes = 0;
  static constexpr int kStep = 16;
  static constexpr int kPitch = 64 + 1;
  static constexpr int kStageRows = 8;
  static constexpr int kStageSlots = 4;
  static constexpr int kStagePitch = kColumns;
  static constexpr int kStageElements = kStageRows * kStagePitch;
  static constexpr int scratch_bytes(bool /*has_masks*/) {
    return (2 * kStep + kColumns) * kPitch * static_cast<int>(sizeof(Sum)) +
           kRows * kColumnSlots * static_cast<int>(sizeof(std::uint32_t));
  }

  __device__ explicit GenericTiles(unsigned char* scratch)
      : left_(reinterpret_cast<Sum*>(scratch)),
        right_(left_ + kStep * kPitch),
        weights_(right_ + kStep * kPitch),
        visible_(reinterpret_cast<std::uint32_t*>(weights_ + kColumns * kPitch)) {}

  __device__ Sum* stages() const { return weights_; }

  static __device__ __forceinline__ void commit() {}
  static __device__ __forceinline__ void arrive() { __syncthreads(); }
  /// Nothing is looked for: accumulate() looks at every weight's visibility.
  template <typename... ColumnTiles>
  static __device__ __forceinline__ bool arrive_and_look(bool /*look*/, int /*stage*/,
                                                         const ColumnTiles&... /*tiles*/) {
    __syncthreads();
    return false;
  }

  // ---- Products ----

  __device__ void multiply(Scores& scores, const RowTile& left, const ColumnTile& right, int stage) const {
    scores.clear();
    const int depth = left.matrix.columns;
    for (int begin = 0; begin < depth; begin += kStep) {
      __syncthreads();
      load_transposed(left.matrix, left.first_of(0), begin, left_);
      load_transposed(right.matrix, right.first_of(stage), begin, right_);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        Sum a[4];
        Sum b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = left_[k * kPitch + row(i)];
          b[i] = right_[k * kPitch + column(i)];
        }
#pragma unroll
        for (int slot = 0; slot < 4; ++slot) {
#pragma unroll
          for (int c = 0; c < 4; ++c) scores.at(slot, c) = multiply_add(a[slot], b[c], scores.at(slot, c));
        }
      }
    }
  }

  __device__ void accumulate(Output& output, Operand& weights, const std::uint32_t (&visible)[kRowSlots],
                             bool has_hidden, const ColumnTile& right, int stage, int part) const {
    __syncthreads();
#pragma unroll
    for (int slot = 0; slot < 4; ++slot) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        weights_[column(c) * kPitch + row(slot)] = weights.at(slot, c);
        const unsigned bits = __ballot_sync(kAllLanes, ((visible[slot] >> c) & 1U) != 0);
        if (x() == 0) visible_[row(slot) * 4 + c] = y() % 2 == 0 ? bits & 0xFFFFU : bits >> 16;
      }
    }
    const int first = right.first_of(stage);
#pragma unroll 1
    for (int begin = 0; begin < kColumns; begin += kStep) {
      __syncthreads();
      load_rows(right.matrix, first + begin, part * kOutput, right_);
      __syncthreads();
      std::uint32_t sees[4];
#pragma unroll
      for (int slot = 0; slot < 4; ++slot) sees[slot] = has_hidden ? visible_[row(slot) * 4 + begin / kStep] : 0xFFFFU;
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        Sum b[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) b[c] = right_[k * kPitch + column(c)];
#pragma unroll
        for (int slot = 0; slot < 4; ++slot) {
          if (((sees[slot] >> k) & 1U) == 0) continue;
          const Sum weight = weights_[(begin + k) * kPitch + row(slot)];
#pragma unroll
          for (int c = 0; c < 4; ++c) output.at(slot, c) = multiply_add(weight, b[c], output.at(slot, c));
        }
      }
    }
  }

  template <typename FactorOf>
  static __device__ void store(Output& output, const core::MutableView& to, int n, int h, int first_row, int rows,
                               int part, int columns, const FactorOf& factor_of) {
#pragma unroll
    for (int slot = 0; slot < 4; ++slot) {
      const int at_row = first_row + row(slot);
      if (at_row >= rows) continue;
      const Sum factor = factor_of(slot);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = part * kOutput + column(c);
        if (at < columns) store_rounded(to.data, to.dtype, to.offset(n, h, at_row, at), output.at(slot, c) * factor);
      }
    }
  }

 private:
  static_assert(kStep * 64 % kThreads == 0 && kStep == 16);

  /// to[k][row] = matrix[first + row][begin + k], 0 where there is none.
  static __device__ void load_transposed(const Matrix& matrix, int first, int begin, Sum* to) {
#pragma unroll
    for (int step = 0; step < kStep * 64 / kThreads; ++step) {
      const int index = static_cast<int>(threadIdx.x) + step * kThreads;
      const int k = index % kStep;
      const int row = index / kStep;
      to[k * kPitch + row] = element(matrix, first + row, begin + k);
    }
  }

  /// to[k][column] = matrix[first + k][begin + column], 0 where there is none.
  static __device__ void load_rows(const Matrix& matrix, int first, int begin, Sum* to) {
#pragma unroll
    for (int step = 0; step < kStep * 64 / kThreads; ++step) {
      const int index = static_cast<int>(threadIdx.x) + step * kThreads;
      const int column = index % 64;
      const int k = index / 64;
      to[k * kPitch + column] = element(matrix, first + k, begin + column);
    }
  }

  static __device__ __forceinline__ Sum element(const Matrix& matrix, int row, int column) {
    if (row >= matrix.rows || column >= matrix.columns) return Sum{0};
    return load_element<Sum>(matrix.data, matrix.dtype, row * matrix.row_stride + column * matrix.column_stride);
  }

  Sum* left_;
  Sum* right_;
  Sum* weights_;
  std::uint32_t* visible_;
};

}  // namespace fused_mha::cuda
