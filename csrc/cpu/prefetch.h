// SPDX-License-Identifier: BSD-3-Clause
//
// Lines of memory that will be wanted soon, asked for a few at a time while the register tiles compute: a head's first
// touch would otherwise wait for the memory line by line, a tenth of the time at L = 512 (benchmark row "forward
// float32 L=512"). Only visible keys are named, as everywhere.
#pragma once

#include "cpu/pack.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

class Prefetcher {
 public:
  /// Rows to ask for. What does not fit the list, or does not lie in rows, is left out: it is only a hint.
  void add(const Matrix& from, const KeySpan& rows, std::int64_t columns) {
    if (from.data == nullptr || from.column_stride != 1 || rows.count <= 0 || count_ == kStreams) return;
    const auto size = static_cast<std::int64_t>(core::size_of(from.dtype));
    streams_[count_++] = {static_cast<const std::byte*>(from.data), rows, from.row_stride * size, columns * size};
    rows_ += rows.count;
  }

  /// Spreads the rows over about `calls` calls of advance().
  void spread_over(std::int64_t calls) { rows_a_call_ = calls > 0 ? (rows_ + calls - 1) / calls : 0; }

  /// Forgets what earlier tiles asked for.
  void begin_tile() {
    tile_streams_ = 0;
    tile_stream_ = 0;
    tile_row_ = 0;
  }

  /// Rows of `bytes` that the tile at hand will need when its products are done: they go first, some each call, in the
  /// order in which they are named.
  void add_to_tile(const std::byte* first, std::int64_t row_bytes, std::int64_t rows, std::int64_t bytes) {
    if (rows > 0 && tile_streams_ < kTileStreams)
      tile_[tile_streams_++] = {first, {nullptr, 0, rows}, row_bytes, bytes};
  }

  FUSED_MHA_INLINE void advance() {
    for (std::int64_t i = 0; i < kTileRowsACall && tile_stream_ < tile_streams_; ++i) {
      tile_[tile_stream_].ask(tile_row_);
      if (++tile_row_ < tile_[tile_stream_].rows.count) continue;
      tile_row_ = 0;
      ++tile_stream_;
    }
    for (std::int64_t i = 0; i < rows_a_call_ && stream_ < count_; ++i) {
      streams_[stream_].ask(row_);
      if (++row_ < streams_[stream_].rows.count) continue;
      row_ = 0;
      ++stream_;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;
  static constexpr int kStreams = 16;
  static constexpr int kTileStreams = 2;
  /// A block's rows of a float mask are then there before its last quarter of score tiles begins, and no burst of them
  /// fills the buffers that the tiles' own misses need (benchmark row "forward float mask (L,S)").
  static constexpr std::int64_t kTileRowsACall = 4;
  struct Stream {
    const std::byte* base = nullptr;
    KeySpan rows;
    std::int64_t row_bytes = 0;  // from one row to the next
    std::int64_t bytes = 0;      // wanted of each

    FUSED_MHA_INLINE void ask(std::int64_t row) const {
      const std::byte* first = base + rows[row] * row_bytes;
      for (std::int64_t byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(first + byte, 0, 2);
    }
  };

  Stream streams_[kStreams];
  Stream tile_[kTileStreams];
  int tile_streams_ = 0;
  int tile_stream_ = 0;
  std::int64_t tile_row_ = 0;
  int count_ = 0;
  int stream_ = 0;
  std::int64_t row_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t rows_a_call_ = 0;
};

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
