// SPDX-License-Identifier: BSD-3-Clause
//
// Tiles of 16-bit elements in shared memory: kRows x kDim, filled from a Matrix, zeros where it has no element.
//
// A row's 16-byte chunks are permuted so that ldmatrix, which reads eight rows at one chunk, and its transposed form
// meet each bank once: chunk c of row r lies at c ^ (r % 8) where rows are whole 128-byte lines, else at c ^ (r / 2 %
// 4). Rows that lie in aligned chunks are copied by cp.async; others, any stride or alignment, element by element.
#pragma once

#include "cuda/call.h"

namespace fused_mha::cuda {

inline constexpr int kChunk = 8;  // 16-bit elements in 16 bytes

template <int kDim>
__device__ __forceinline__ int swizzle_of_row(int row) {
  static_assert(kDim % 32 == 0);
  return kDim % 64 == 0 ? row & 7 : (row >> 1) & 3;
}

/// Where a chunk begins, in elements.
template <int kDim>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return row * kDim + (chunk ^ swizzle_of_row<kDim>(row)) * kChunk;
}

/// Row i of the sixteen that a warp has of kRows, where a warp's rows are those that agree in row % 16, or in as many
/// neighbouring remainders as it takes.
template <int kRows>
__device__ __forceinline__ int spread_row(int warp, int i) {
  constexpr int kOfRemainder = kRows / 16;
  return i % kOfRemainder * 16 + warp * (16 / kOfRemainder) + i / kOfRemainder;
}

/// Whether every chunk of every row can be copied as it is.
template <typename T>
__device__ __forceinline__ bool lies_in_chunks(const Matrix& matrix) {
  return matrix.column_stride == 1 && matrix.columns % kChunk == 0 &&
         reinterpret_cast<std::uintptr_t>(matrix.data) % (kChunk * sizeof(T)) == 0 && matrix.row_stride % kChunk == 0;
}

/// A tile (of several stages, one behind the other) and the matrix that it shows a part of. With kSpread the sixteen
/// rows that a warp reads, which lie spread over the matrix (spread_row), are neighbours in shared memory.
template <typename T, int kRows, int kDim, int kThreads, bool kSpread = false>
struct SharedTile {
  static constexpr int kElements = kRows * kDim;
  static constexpr int kChunksOfRow = kDim / kChunk;
  static constexpr int kRowsOfStep = kThreads / kChunksOfRow;
  static constexpr int kSteps = kRows / kRowsOfStep;
  static_assert(kThreads % kChunksOfRow == 0 && kRows % kRowsOfStep == 0);

  Matrix matrix;
  T* memory;
  bool in_chunks;

  __device__ SharedTile(const Matrix& from, void* to)
      : matrix(from), memory(static_cast<T*>(to)), in_chunks(lies_in_chunks<T>(from)) {}

  __device__ T* stage(int index) const { return memory + index * kElements; }

  /// Which row behind the first that is asked for lies in a row of shared memory.
  static __device__ __forceinline__ int matrix_row(int row) {
    return kSpread ? spread_row<kRows>(row / 16, row % 16) : row;
  }

  /// Starts to copy rows first, first + 1, ...; the caller commits.
  __device__ __forceinline__ void request(int first, int stage_index = 0) const {
    const int thread = made_here(static_cast<int>(threadIdx.x));
    const int chunk = thread % kChunksOfRow;
    const int first_row = thread / kChunksOfRow;
    T* tile = stage(stage_index);
    const T* begin = static_cast<const T*>(matrix.data);
    // Rows of the tile that exist, for this thread's chunk.
    const int rows = chunk * kChunk < matrix.columns ? matrix.rows - first : 0;
    if (in_chunks) {
      // Rows behind the last have addresses too; nothing is read there.
      const auto address = [&](int row) {
        return reinterpret_cast<std::uintptr_t>(begin + static_cast<std::int64_t>(first + row) * matrix.row_stride +
                                                chunk * kChunk);
      };
      std::uintptr_t from = address(first_row);
      const auto row_bytes = static_cast<std::uintptr_t>(matrix.row_stride) * sizeof(T);
      const SharedAddress to = shared_address(tile) + 2 * chunk_offset<kDim>(first_row, chunk);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // first_row < kRowsOfStep, both powers of two: a row's swizzle is that of first_row and that of the step.
        constexpr int kChunkBytes = 16;
        const int swizzle = swizzle_of_row<kDim>(step * kRowsOfStep) * kChunkBytes;
        const int row = matrix_row(first_row + step * kRowsOfStep);
        if constexpr (kSpread) from = address(row);
        cp_async_16((to ^ swizzle) + step * kRowsOfStep * kDim * sizeof(T), reinterpret_cast<const void*>(from),
                    row < rows);
        from += kRowsOfStep * row_bytes;
      }
    } else {
#pragma unroll 1
      for (int row = first_row; row < kRows; row += kRowsOfStep) {
        const int from_row = matrix_row(row);
        const T* from = begin + static_cast<std::int64_t>(first + from_row) * matrix.row_stride;
        T* to = tile + chunk_offset<kDim>(row, chunk);
#pragma unroll 1
        for (int column = chunk * kChunk; column < (chunk + 1) * kChunk; ++column, ++to) {
          *to = from_row < rows && column < matrix.columns ? from[column * matrix.column_stride] : T{0};
        }
      }
    }
  }

  /// Whether a chunk that this thread copied holds an infinity or a NaN. Needs no barrier: it looks at its own.
  __device__ bool own_part_is_not_finite(int stage_index) const {
    constexpr std::uint32_t kExponent = std::is_same_v<T, half> ? 0x7C00U : 0x7F80U;
    const T* tile = stage(stage_index);
    const int thread = made_here(static_cast<int>(threadIdx.x));
    bool found = false;
#pragma unroll 2
    for (int step = 0; step < kSteps; ++step) {
      const uint4 value = *reinterpret_cast<const uint4*>(
          tile + chunk_offset<kDim>(thread / kChunksOfRow + step * kRowsOfStep, thread % kChunksOfRow));
      const std::uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (const std::uint32_t word : words) {
        found = found || (word & kExponent) == kExponent || ((word >> 16) & kExponent) == kExponent;
      }
    }
    return found;
  }
};

}  // namespace fused_mha::cuda
