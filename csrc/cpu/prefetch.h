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

  FUSED_MHA_INLINE void advance() {
    for (std::int64_t i = 0; i < rows_a_call_ && stream_ < count_; ++i) {
      const Stream& stream = streams_[stream_];
      const std::byte* row = stream.base + stream.rows[row_] * stream.row_bytes;
      for (std::int64_t byte = 0; byte < stream.bytes; byte += kLine) __builtin_prefetch(row + byte, 0, 2);
      if (++row_ < stream.rows.count) continue;
      row_ = 0;
      ++stream_;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;
  static constexpr int kStreams = 16;
  struct Stream {
    const std::byte* base = nullptr;
    KeySpan rows;
    std::int64_t row_bytes = 0;  // from one row to the next
    std::int64_t bytes = 0;      // wanted of each
  };

  Stream streams_[kStreams];
  int count_ = 0;
  int stream_ = 0;
  std::int64_t row_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t rows_a_call_ = 0;
};

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
