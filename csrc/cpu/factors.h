// SPDX-License-Identifier: BSD-3-Clause
//
// What the register tiles multiply: numbers of the type that sums have, or pairs of bfloat16 where an instruction
// multiplies two and adds both products to a float. The two of a pair are neighbours along the dimension that is summed
// over: D or Dv in scores, keys or rows in rank updates.
#pragma once

#include "cpu/pack.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

struct BFloat16Pair {
  BFloat16 first;
  BFloat16 second;
};

template <typename F>
inline constexpr bool kIsPair = std::is_same_v<F, BFloat16Pair>;

/// F that hold `count` numbers along the dimension that is summed over.
template <typename F>
FUSED_MHA_INLINE constexpr std::int64_t factors_of(std::int64_t count) {
  return kIsPair<F> ? (count + 1) / 2 : count;
}

template <typename T, typename F>
FUSED_MHA_INLINE Vec<T> load_factors(const F* from) {
  static_assert(sizeof(F) == sizeof(T));
  Vec<T> result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}

template <typename T, typename F>
FUSED_MHA_INLINE Vec<T> broadcast_factor(const F& factor) {
  return broadcast<T>(std::bit_cast<T>(factor));
}

/// a b + c, both products of a pair.
template <typename F, typename V>
FUSED_MHA_INLINE V multiply_add(V a, V b, V c) {
  if constexpr (kIsPair<F>) {
    return add_pair_products(a, b, c);
  } else {
    return fma(a, b, c);
  }
}

/// Number `index` of a row of factors.
template <typename T, typename F>
FUSED_MHA_INLINE T number_of(const F* row, std::int64_t index) {
  if constexpr (kIsPair<F>) {
    return core::to_float(index % 2 == 0 ? row[index / 2].first : row[index / 2].second);
  } else {
    return row[index];
  }
}

/// A number as it is when it has become part of an F.
template <typename F, typename T>
FUSED_MHA_INLINE T rounded_to(T number) {
  if constexpr (kIsPair<F>) {
    return core::to_float(core::to_bfloat16(number));
  } else {
    return number;
  }
}

/// A vector of row `row` of a matrix whose rows were packed by pack_row_factors, from column `column` on.
template <typename T, typename F>
FUSED_MHA_INLINE Vec<T> load_row(const F* rows, std::int64_t ld, std::int64_t row, std::int64_t column) {
  if constexpr (kIsPair<F>) {
    const auto pairs = std::bit_cast<VecUInt32>(load_factors<T>(rows + row / 2 * ld + column));
    return std::bit_cast<Vec<T>>(row % 2 == 0 ? pairs << 16 : pairs & 0xFFFF0000U);
  } else {
    return load<T>(rows + row * ld + column);
  }
}

/// Gathers whether any bfloat16 of the pairs it is shown is NaN or infinite.
class PairProbe {
 public:
  FUSED_MHA_INLINE void see(VecUInt32 pairs) {
    // An exponent of all ones carries into the sign's place.
    seen_ |= (pairs & 0x7F807F80U) + 0x00800080U;
  }
  FUSED_MHA_INLINE bool some_not_finite() const {
    std::uint32_t bits = 0;
    for (int lane = 0; lane < kLanes<float>; ++lane) bits |= seen_[lane];
    return (bits & 0x80008000U) != 0;
  }

 private:
  VecUInt32 seen_{};
};

/// Up to kLanes<float> pairs of neighbouring elements, zeros behind the `count` elements.
FUSED_MHA_INLINE VecFloat load_pairs(const BFloat16* from, std::int64_t stride, std::int64_t count) {
  constexpr std::int64_t kElements = std::int64_t{2} * kLanes<float>;
  BFloat16 elements[kElements] = {};
  if (stride == 1 && count >= kElements) {
    std::memcpy(elements, from, sizeof(elements));
  } else {
    for (std::int64_t i = 0; i < count && i < kElements; ++i) elements[i] = from[i * stride];
  }
  VecFloat result;
  std::memcpy(&result, elements, sizeof(result));
  return result;
}

/// out[factor of columns][kWidth] = the rows, transposed, times `factor` unless they are pairs; zeros behind the last
/// row up to `width` or the end of its vector; kWidth >= width >= rows.count. Returns whether any element is NaN or
/// infinite, if it is to look.
template <typename T, std::int64_t kWidth, Probe kProbe, typename F>
static bool pack_transposed_factors(const Matrix& from, const KeySpan& rows, std::int64_t columns, T factor, F* out,
                                    std::int64_t width = kWidth) {
  if constexpr (!kIsPair<F>) {
    return pack_transposed<T, kWidth, kProbe>(from, rows, columns, factor, out, width);
  } else {
    constexpr std::int64_t kStep = kLanes<float>;
    const auto* base = static_cast<const BFloat16*>(from.data);
    PairProbe probe;
    for (std::int64_t first = 0; first < width; first += kStep) {
      for (std::int64_t column = 0; column < columns; column += 2 * kStep) {
        const std::int64_t left = columns - column;
        VecFloat square[kStep];
        for (std::int64_t i = 0; i < kStep; ++i) {
          square[i] = VecFloat{};
          if (first + i >= rows.count) continue;
          const BFloat16* row = base + rows[first + i] * from.row_stride + column * from.column_stride;
          square[i] = load_pairs(row, from.column_stride, left);
          if constexpr (kProbe == Probe::kYes) probe.see(std::bit_cast<VecUInt32>(square[i]));
        }
        transpose<float>(square);
        BFloat16Pair* target = out + column / 2 * kWidth + first;
        for (std::int64_t j = 0; j < kStep && 2 * j < left; ++j) {
          std::memcpy(target + j * kWidth, &square[j], sizeof(square[j]));
        }
      }
    }
    return probe.some_not_finite();
  }
}

/// out[factor of rows][padded] = the rows, zeros behind the last column and for what is missing of the last pair.
/// Returns whether any element is NaN or infinite.
template <typename T, typename F>
static bool pack_row_factors(const Matrix& from, const KeySpan& rows, std::int64_t columns, std::int64_t padded,
                             F* out) {
  if constexpr (!kIsPair<F>) {
    return pack_rows<T>(from, rows, columns, padded, rows.count, T{1}, out);
  } else {
    const auto* base = static_cast<const BFloat16*>(from.data);
    PairProbe probe;
    for (std::int64_t row = 0; row < rows.count; row += 2) {
      const BFloat16* first = base + rows[row] * from.row_stride;
      const BFloat16* second = row + 1 < rows.count ? base + rows[row + 1] * from.row_stride : nullptr;
      BFloat16Pair* target = out + row / 2 * padded;
      for (std::int64_t column = 0; column < padded; column += kLanes<float>) {
        const std::int64_t offset = column * from.column_stride;
        const auto numbers = [&](const BFloat16* at) {
          return std::bit_cast<VecUInt32>(load_some<float>(at + offset, from.column_stride, columns - column));
        };
        VecUInt32 pairs = numbers(first) >> 16;
        if (second != nullptr) pairs |= numbers(second);
        probe.see(pairs);
        std::memcpy(target + column, &pairs, sizeof(pairs));
      }
    }
    return probe.some_not_finite();
  }
}

/// Whether any number of `count` factors, a multiple of the vector length, is NaN or infinite.
template <typename T, typename F>
static bool any_factor_not_finite(const F* factors, std::int64_t count) {
  if constexpr (!kIsPair<F>) {
    return any_not_finite<T>(factors, count);
  } else {
    PairProbe probe;
    for (std::int64_t i = 0; i < count; i += kLanes<T>) {
      probe.see(std::bit_cast<VecUInt32>(load_factors<T>(factors + i)));
    }
    return probe.some_not_finite();
  }
}

/// Rows of factors in place where they lie so, else packed into `packed`.
template <typename T, typename F>
static const F* rows_where_they_lie(const Matrix& from, const KeySpan& rows, std::int64_t columns, std::int64_t padded,
                                    F* packed) {
  if constexpr (!kIsPair<F>) {
    if (const T* in_place = rows_in_place<T>(from, rows, columns)) return in_place;
  }
  pack_row_factors<T>(from, rows, columns, padded, packed);
  return packed;
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
