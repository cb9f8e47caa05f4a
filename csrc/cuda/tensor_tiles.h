// SPDX-License-Identifier: BSD-3-Clause
//
// Tiles on tensor cores: kRows x kColumns scores of float16 or bfloat16 operands with up to kDim columns, sums in
// float.
//
//   multiply     scores (rows x columns)  = left (rows x kDim) . right (columns x kDim)^T
//   accumulate   output (rows x kOutput) += scores . right (columns x kDim)[:, part]
//
// A warp has 16 * kRowTiles rows. With g = lane / 4 and t = lane % 4, a thread has rows g and g + 8 of each 16, and
// columns 8 b + 2 t and 8 b + 2 t + 1 for every b. That is at once what mma.m16n8k16 leaves as a result and what it
// wants as its left operand, so scores become the left operand of accumulate() without leaving their registers. With
// kSpread a warp's rows are not neighbours but the keys that share dropout's counters: see warp_row().
#pragma once

#include "cuda/copy.h"
#include "cuda/dropout_bits.h"

namespace fused_mha::cuda {

template <typename T, int kDimension, int kRowTiles, int kWarpCount, int kColumnCount, int kOutputColumns = kDimension,
          bool kSpread = false, bool kCareful = false>
struct TensorTiles {
  using Sum = float;
  // Whether a hidden element does not meet what is in a tile that passes, be it infinite or NaN.
  static constexpr bool kIsCareful = kCareful;
  static constexpr std::size_t kElementBytes = sizeof(T);
  static constexpr int kDim = kDimension;
  static constexpr int kWarps = kWarpCount;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kWarps;
  static constexpr int kColumns = kColumnCount;
  static constexpr int kOutput = kOutputColumns;
  static constexpr int kRowSlots = 2 * kRowTiles;
  static constexpr int kColumnSlots = kColumns / 4;
  static constexpr int kOutputSlots = kOutput / 4;
  static constexpr int kBlocks = kThreads == 128 ? 2 : 1;  // of a multiprocessor at once, at the least
  static constexpr int kLanesOfRow = 3;                    // bits of the lane that differ inside a row
  static constexpr int kLanesOfColumn = 28;                // and inside a column
  static_assert(kColumns % 16 == 0 && kColumnSlots <= 32 && kOutput % 16 == 0);
  static_assert(!kSpread || kRowTiles == 1);
  // What takes over where a tile that passes is not finite: few registers, not fast. At least as many columns as
  // threads fill at once.
  static constexpr int kCarefulColumns = kThreads * kChunk / kDim > 16 ? kThreads* kChunk / kDim : 16;
  using Careful = TensorTiles<T, kDim, 1, kWarps, kCarefulColumns, (kOutput > 64 ? 64 : kOutput), kSpread, true>;

  struct Scores {
    float value[kRowTiles][kColumns / 8][4];
    __device__ __forceinline__ float& at(int slot, int c) { return value[slot / 2][c / 2][slot % 2 * 2 + c % 2]; }
  };
  struct Output {
    float value[kRowTiles][kOutput / 8][4];
    __device__ __forceinline__ float& at(int slot, int c) { return value[slot / 2][c / 2][slot % 2 * 2 + c % 2]; }
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int slot = 0; slot < kRowSlots; ++slot) {
#pragma unroll
        for (int c = 0; c < kOutputSlots; ++c) at(slot, c) = 0.0F;
      }
    }
  };

  /// Scores as mma wants them at the left: half the registers.
  struct Packed {
    std::uint32_t value[kColumns / 16][kRowTiles][4];
  };
  using Operand = std::conditional_t<kIsCareful, Scores, Packed>;

  static __device__ __forceinline__ Operand operand_of(const Scores& scores) {
    if constexpr (kIsCareful) {
      return scores;
    } else {
      Packed packed;
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* pair = scores.value[m][2 * k + i / 2] + i % 2 * 2;
            packed.value[k][m][i] = made_here(pack2<T>(pair[0], pair[1]));
          }
        }
      }
      return packed;
    }
  }

  static __device__ __forceinline__ void clear(Scores& scores) {
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
#pragma unroll
      for (int c = 0; c < kColumnSlots; ++c) scores.at(slot, c) = 0.0F;
    }
  }

  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  // Keys of a tile that one counter of dropout decides for, and residues s % 16 that a warp has, where rows are spread.
  static constexpr int kKeysOfCounter = kRows / 16;
  static constexpr int kWarpResidues = kSpread ? 16 / kKeysOfCounter : 1;

  /// Tile row of the warp's row i.
  static __device__ __forceinline__ int warp_row(int i) {
    if constexpr (kSpread) {
      return spread_row<kRows>(warp(), i);
    } else {
      return warp() * kWarpRows + i;
    }
  }
  /// Which of the warp's rows a row slot is.
  static __device__ __forceinline__ int warp_slot(int slot) { return slot / 2 * 16 + slot % 2 * 8 + lane() / 4; }
  // Positions in a tile as a lane's own number and a constant: comparisons and addresses then need one register, not
  // one for each slot.
  static __device__ __forceinline__ int row_base() { return warp_row(lane() / 4); }
  static __device__ __forceinline__ int column_base() { return lane() % 4 * 2; }
  static __device__ constexpr int row_step(int slot) {
    return kSpread ? slot * 8 / kKeysOfCounter : slot / 2 * 16 + slot % 2 * 8;
  }
  static __device__ constexpr int column_step(int c) { return c / 2 * 8 + c % 2; }
  static __device__ __forceinline__ int row(int slot) { return row_base() + row_step(slot); }
  static __device__ __forceinline__ int column(int c) { return column_base() + column_step(c); }

  // Dropout with keys in columns: the residues s % 16 of a thread's columns.
  static constexpr int kCountersOfRow = 4;
  static __device__ __forceinline__ int residue(int i) { return lane() % 4 * 2 + i % 2 + i / 2 * 8; }

  /// Dropout with keys in rows, which must be spread: each lane asks a part of the warp's counters and all share.
  static __device__ __forceinline__ void keep_keys_in_rows(const Call& call, core::PhiloxKey key,
                                                           const TilePlace& place, std::uint32_t (&keep)[kRowSlots]) {
    if constexpr (kSpread) {
      constexpr int kCounters = kWarpResidues * kColumns;
      static_assert(kCounters % kWarpSize == 0 && kCounters / kWarpSize <= 4);
      const int group = place.key_begin / kGroupKeys;
      std::uint32_t word = 0;
#pragma unroll 1  // one generator at a time: side by side they would take all registers
      for (int i = 0; i < kCounters / kWarpSize; ++i) {
        const int counter = lane() + i * kWarpSize;
        word |= keep_eight(call, key, place, place.query_begin + counter % kColumns, group,
                           warp() * kWarpResidues + counter / kColumns)
                << (8 * i);
      }
      // Of row slot 0 and column slot 0: the number of the key in its counter, and the counter. Other slots are
      // constants away; both row slots find their counters in the same lane.
      static_assert(8 / kKeysOfCounter * kColumns % kWarpSize == 0);
      const auto row = made_here(static_cast<unsigned>(lane()) / 4);
      const unsigned number = static_cast<unsigned>(place.key_begin % kGroupKeys / 16) + row % kKeysOfCounter;
      const unsigned counter = row / kKeysOfCounter * kColumns + static_cast<unsigned>(lane()) % 4 * 2;
      constexpr unsigned kSecondRow = 8 / kKeysOfCounter * kColumns / kWarpSize * 8;
      keep[0] = 0;
      keep[1] = 0;
#pragma unroll
      for (int c = 0; c < kColumnSlots; ++c) {
        const unsigned at = counter + static_cast<unsigned>(column_step(c));
        const std::uint32_t found =
            __shfl_sync(kAllLanes, word, static_cast<int>(at % kWarpSize)) >> (at / kWarpSize * 8 + number);
        keep[0] |= (found & 1U) << c;
        keep[1] |= ((found >> kSecondRow) & 1U) << c;
      }
    }
  }

  // ---- Memory ----

  using RowTile = SharedTile<T, kRows, kDim, kThreads, kSpread>;
  using ColumnTile = SharedTile<T, kColumns, kDim, kThreads>;
  static constexpr int kRowTileBytes = RowTile::kElements * static_cast<int>(sizeof(T));
  static constexpr int kColumnTileBytes = ColumnTile::kElements * static_cast<int>(sizeof(T));

  // Matrices of (l, s) pass through shared memory 8 rows at a time. The pitch puts the four columns that neighbouring
  // lanes read in different banks.
  static constexpr int kStageRows = 8;
  static constexpr int kStageSlots = 1;
  static constexpr int kStagePitch = kColumns + 8;
  static constexpr int kStageElements = kStageRows * kStagePitch;

  static constexpr int kFlagBytes = 128;
  static_assert(2 * kWarps * sizeof(std::uint32_t) <= kFlagBytes);
  static constexpr int scratch_bytes(bool has_masks) {
    return kFlagBytes + (has_masks ? kWarps * kStageElements * static_cast<int>(sizeof(float)) : 0);
  }

  __device__ explicit TensorTiles(unsigned char* scratch)
      : flags_(reinterpret_cast<std::uint32_t*>(scratch)), stages_(reinterpret_cast<float*>(scratch + kFlagBytes)) {}

  __device__ float* stages() const { return stages_; }

  static __device__ __forceinline__ void commit() { cp_async_commit(); }

  /// Waits until all that was requested is there, for every thread of the block; all have finished what they did
  /// before.
  static __device__ __forceinline__ void arrive() {
    cp_async_wait<0>();
    __syncthreads();
  }

  /// The same; says whether, with `look`, any of the tiles' stages holds an infinity or a NaN that accumulate() would
  /// let hidden elements meet. One barrier is between two looks at the same stage.
  template <typename... ColumnTiles>
  __device__ __forceinline__ bool arrive_and_look(bool look, int stage, const ColumnTiles&... tiles) const {
    cp_async_wait<0>();
    if constexpr (kIsCareful) {
      __syncthreads();
      return false;
    }
    if (look) {
      bool found = false;
      ((found = found || tiles.own_part_is_not_finite(stage)), ...);
      found = __any_sync(kAllLanes, found);
      if (lane() == 0) flags_[stage * kWarps + warp()] = found ? 1U : 0U;
    }
    __syncthreads();
    if (!look) return false;
    std::uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) any |= flags_[stage * kWarps + i];
    return any != 0;
  }

  // ---- Products ----

  static constexpr int k16Rows = 16 * kDim * static_cast<int>(sizeof(T));  // bytes; 16 rows on, the swizzle is the same

  static __device__ __forceinline__ SharedAddress chunk_address(const T* tile, int row, int chunk) {
    return shared_address(tile) + chunk_offset<kDim>(row, chunk) * static_cast<int>(sizeof(T));
  }

  /// The address of chunk c + `chunks` of the same row, from that of chunk c, which is 0 or 1 behind the multiple of
  /// the chunks that a swizzle permutes; `chunks` is even and known when compiled.
  static __device__ __forceinline__ SharedAddress next_chunk(SharedAddress address, int chunks) {
    constexpr int kPermuted = kDim % 64 == 0 ? 8 : 4;
    constexpr int kBytes = kChunk * static_cast<int>(sizeof(T));
    return (address ^ static_cast<SharedAddress>(chunks % kPermuted * kBytes)) +
           chunks / kPermuted * kPermuted * kBytes;
  }

  static __device__ __forceinline__ void multiply(Scores& scores, const RowTile& left, const ColumnTile& right,
                                                  int stage) {
    clear(scores);
    const int lane_here = made_here(lane());
    // ldmatrix of the left operand: lanes 0-15 name the rows of the first eight columns, 16-31 of the next eight.
    const SharedAddress left_first = chunk_address(left.stage(0), warp() * kWarpRows + lane_here % 16, lane_here / 16);
    // Of the right one: 16 rows (two of mma's column blocks), the first eight columns and the next.
    const SharedAddress right_first =
        chunk_address(right.stage(stage), lane_here % 8 + lane_here / 16 * 8, lane_here / 8 % 2);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t a[kRowTiles][4];
      const SharedAddress left_here = next_chunk(left_first, 2 * k);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ldmatrix_x4(a[m], left_here + m * k16Rows);
      const SharedAddress right_here = next_chunk(right_first, 2 * k);
#pragma unroll
      for (int b = 0; b < kColumns / 16; ++b) {
        std::uint32_t r[4];
        ldmatrix_x4(r, right_here + b * k16Rows);
        const std::uint32_t low[2] = {r[0], r[1]};
        const std::uint32_t high[2] = {r[2], r[3]};
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16<T>(scores.value[m][2 * b], a[m], low);
          mma_m16n8k16<T>(scores.value[m][2 * b + 1], a[m], high);
        }
      }
    }
  }

  /// Spoils `weights`.
  static __device__ __forceinline__ void accumulate(Output& output, Operand& weights,
                                                    const std::uint32_t (&visible)[kRowSlots], bool /*has_hidden*/,
                                                    const ColumnTile& right, int stage, int part) {
    if constexpr (kIsCareful) {
      accumulate_visible(output, weights, visible, right.stage(stage), part * kOutput);
    } else {
      accumulate_all(output, weights, right.stage(stage), part);
    }
  }

  /// Writes a thread's part of the output, times factor(row slot), where it exists.
  template <typename FactorOf>
  static __device__ __forceinline__ void store(Output& output, const core::MutableView& to, int n, int h, int first_row,
                                               int rows, int part, int columns, const FactorOf& factor_of) {
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      const int at_row = first_row + row(slot);
      if (at_row >= rows) continue;
      T* to_row = static_cast<T*>(to.data) + to.offset(n, h, at_row, 0);
      const float factor = factor_of(slot);
      const bool in_pairs = to.strides[3] == 1 && reinterpret_cast<std::uintptr_t>(to_row) % (2 * sizeof(T)) == 0;
#pragma unroll
      for (int c = 0; c < kOutputSlots; c += 2) {
        const int at = part * kOutput + column(c);
        const float first = output.at(slot, c) * factor;
        const float second = output.at(slot, c + 1) * factor;
        if (in_pairs && at + 1 < columns) {
          *reinterpret_cast<std::uint32_t*>(to_row + at) = pack2<T>(first, second);
        } else {
          if (at < columns) to_row[at * to.strides[3]] = narrow<T>(first);
          if (at + 1 < columns) to_row[(at + 1) * to.strides[3]] = narrow<T>(second);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void accumulate_all(Output& output, const Packed& weights, const T* tile,
                                                        int part) {
    // Transposed ldmatrix: lanes 0-15 name 16 rows of the first eight columns, 16-31 of the next eight.
    const int lane_here = made_here(lane());
    const SharedAddress first =
        chunk_address(tile, lane_here % 16, lane_here / 16) + part * kOutput * static_cast<int>(sizeof(T));
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
      for (int b = 0; b < kOutput / 16; ++b) {
        std::uint32_t r[4];
        ldmatrix_x4_trans(r, next_chunk(first, 2 * b) + k * k16Rows);
        const std::uint32_t low[2] = {r[0], r[1]};
        const std::uint32_t high[2] = {r[2], r[3]};
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16<T>(output.value[m][2 * b], weights.value[k][m], low);
          mma_m16n8k16<T>(output.value[m][2 * b + 1], weights.value[k][m], high);
        }
      }
    }
  }

  /// One weight at a time; the four lanes of a row hand theirs round.
  static __device__ void accumulate_visible(Output& output, Scores& weights, const std::uint32_t (&visible)[kRowSlots],
                                            const T* tile, int first_column) {
    const int first = first_column + lane() % 4 * 2;
#pragma unroll 1
    for (int block = 0; block < kColumns / 8; ++block) {
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const int source = lane() / 4 * 4 + i / 2;
        const int bit = block * 2 + i % 2;
        float weight[kRowSlots];
        bool sees[kRowSlots];
#pragma unroll
        for (int slot = 0; slot < kRowSlots; ++slot) {
          const float mine = i % 2 == 0 ? weights.at(slot, 0) : weights.at(slot, 1);
          weight[slot] = widen(narrow<T>(__shfl_sync(kAllLanes, mine, source)));
          sees[slot] = ((__shfl_sync(kAllLanes, visible[slot], source) >> bit) & 1U) != 0;
        }
        const int row = block * 8 + i;
#pragma unroll
        for (int b = 0; b < kOutput / 8; ++b) {
          const int column = first + b * 8;
          const float2 pair = unpack2<T>(*reinterpret_cast<const std::uint32_t*>(
              tile + chunk_offset<kDim>(row, column / kChunk) + column % kChunk));
#pragma unroll
          for (int slot = 0; slot < kRowSlots; ++slot) {
            if (sees[slot]) {
              output.at(slot, 2 * b) = multiply_add(weight[slot], pair.x, output.at(slot, 2 * b));
              output.at(slot, 2 * b + 1) = multiply_add(weight[slot], pair.y, output.at(slot, 2 * b + 1));
            }
          }
        }
      }
      // The next block of weights moves to the front: registers have no index.
#pragma unroll
      for (int slot = 0; slot < kRowSlots; ++slot) {
#pragma unroll
        for (int c = 0; c + 2 < kColumnSlots; ++c) weights.at(slot, c) = weights.at(slot, c + 2);
      }
    }
  }

  std::uint32_t* flags_;
  float* stages_;
};

}  // namespace fused_mha::cuda
