// SPDX-License-Identifier: BSD-3-Clause
//
// Strided tensors of any dtype into the layouts that the register tiles read, and back. Rows are named by a KeySpan,
// so that keys hidden by key_padding_mask are never touched.
#pragma once

#include "core/mask.h"
#include "cpu/plan.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

using core::BFloat16;
using core::DType;
using core::Float16;
using core::KeySpan;

FUSED_MHA_INLINE std::int64_t round_up(std::int64_t value, std::int64_t quantum) {
  return (value + quantum - 1) / quantum * quantum;
}

/// Two dimensions of a view: rows named by a span, columns 0, 1, ...
struct Matrix {
  const void* data = nullptr;  // element of row 0, column 0
  DType dtype = DType::kFloat32;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
};

template <typename Pointer>
FUSED_MHA_INLINE Matrix matrix_of(const core::BasicView<Pointer>& view, std::int64_t i0, std::int64_t i1) {
  if (!view) return {};
  const auto* bytes = static_cast<const std::byte*>(view.data);
  return {bytes + view.offset(i0, i1, 0, 0) * static_cast<std::int64_t>(core::size_of(view.dtype)), view.dtype,
          view.strides[2], view.strides[3]};
}

/// Calls body(storage pointer) with the matrix's data as what it is. T decides: double kernels see double only.
template <typename T, typename Data, typename Body>
FUSED_MHA_INLINE void with_storage(Data* data, DType dtype, const Body& body) {
  constexpr bool kConst = std::is_const_v<Data>;
  const auto cast = [&]<typename Storage>(Storage) {
    using Element = std::conditional_t<kConst, const Storage, Storage>;
    body(static_cast<Element*>(data));
  };
  if constexpr (std::is_same_v<T, double>) {
    cast(double{});
  } else if (dtype == DType::kBFloat16) {
    cast(BFloat16{});
  } else if (dtype == DType::kFloat16) {
    cast(Float16{});
  } else {
    cast(float{});
  }
}

/// Up to kLanes<T> elements, zeros behind them.
template <typename T, typename Storage>
FUSED_MHA_INLINE Vec<T> load_some(const Storage* from, std::int64_t stride, std::int64_t count) {
  if (stride == 1) return count >= kLanes<T> ? load_as<T, Storage>(from) : load_part<T, Storage>(from, count);
  T lanes[kLanes<T>] = {};
  for (std::int64_t i = 0; i < count && i < kLanes<T>; ++i) lanes[i] = element_as<T>(from[i * stride]);
  return load<T>(lanes);
}

/// square[j] = column j of the kLanes<T> rows that row(0), row(1), ... point at.
template <typename T, typename RowPointer>
FUSED_MHA_INLINE void load_transposed(const RowPointer& row, Vec<T> (&square)[kLanes<T>]) {
  using Storage = std::remove_cvref_t<decltype(*row(0))>;
  if constexpr (kHasLoadTransposedFloats && std::is_same_v<T, float> && std::is_same_v<Storage, float>) {
    load_transposed_floats(row, square);
  } else {
    for (std::int64_t i = 0; i < kLanes<T>; ++i) square[i] = load_as<T, Storage>(row(i));
    transpose<T>(square);
  }
}

/// Whether packing looks for numbers that are not finite, which costs an instruction a vector.
enum class Probe : std::uint8_t { kNo, kYes };

/// How rows lie: one behind the other or where they are listed, their columns side by side; or in any way.
enum class Rows : std::uint8_t { kInOrder, kListed, kAnywhere };

/// pack_transposed for one storage type.
template <typename T, std::int64_t kWidth, Probe kProbe, Rows kRows, bool kScales, typename Storage>
static bool pack_transposed_from(const Storage* base, const Matrix& from, const KeySpan& rows, std::int64_t columns,
                                 T factor, T* out, std::int64_t width) {
  constexpr std::int64_t kStep = kLanes<T>;
  static_assert(kWidth % kStep == 0);
  const Vec<T> scale = broadcast<T>(factor);
  Vec<T> probe{};  // stays 0 while everything is finite: inf * 0 and NaN * 0 are NaN
  for (std::int64_t first = 0; first < width; first += kStep) {
    const std::int64_t height = rows.count - first;
    for (std::int64_t column = 0; column < columns; column += kStep) {
      const std::int64_t left = columns - column < kStep ? columns - column : kStep;
      Vec<T> square[kStep];
      if (kRows == Rows::kInOrder && height >= kStep && left == kStep) {
        const Storage* corner = base + rows[first] * from.row_stride + column;
        load_transposed<T>([&](std::int64_t i) { return corner + i * from.row_stride; }, square);
      } else if (kRows == Rows::kListed && height >= kStep && left == kStep) {
        const std::int64_t* listed = rows.positions + first;
        load_transposed<T>([&](std::int64_t i) { return base + listed[i] * from.row_stride + column; }, square);
      } else {
        for (std::int64_t i = 0; i < kStep; ++i) {
          square[i] = i < height ? load_some<T>(base + rows[first + i] * from.row_stride + column * from.column_stride,
                                                from.column_stride, left)
                                 : Vec<T>{};
        }
        transpose<T>(square);
      }
      T* target = out + column * kWidth + first;
      for (std::int64_t j = 0; j < left; ++j) {
        if constexpr (kProbe == Probe::kYes) probe = fma(square[j], Vec<T>{}, probe);
        store<T>(target + j * kWidth, kScales ? square[j] * scale : square[j]);
      }
    }
  }
  if constexpr (kProbe == Probe::kNo) return false;
  const T sum = reduce_add<T>(probe);
  return sum != sum;
}

/// out[column][kWidth] = factor * rows, transposed, zeros behind the last row up to `width` or the end of its vector;
/// kWidth >= width >= rows.count. Returns whether any element is NaN or infinite, if it is to look.
template <typename T, std::int64_t kWidth, Probe kProbe>
static bool pack_transposed(const Matrix& from, const KeySpan& rows, std::int64_t columns, T factor, T* out,
                            std::int64_t width = kWidth) {
  bool not_finite = false;
  with_storage<T>(from.data, from.dtype, [&](const auto* base) {
    const auto pack = [&]<Rows kRows, bool kScales>() {
      return pack_transposed_from<T, kWidth, kProbe, kRows, kScales>(base, from, rows, columns, factor, out, width);
    };
    if (from.column_stride != 1) {
      not_finite = pack.template operator()<Rows::kAnywhere, true>();
    } else if (rows.positions != nullptr) {
      not_finite = pack.template operator()<Rows::kListed, true>();
    } else if (factor == T{1}) {
      not_finite = pack.template operator()<Rows::kInOrder, false>();
    } else {
      not_finite = pack.template operator()<Rows::kInOrder, true>();
    }
  });
  return not_finite;
}

/// The rows as the register tiles want their right operand, if they lie so in memory: whole aligned vectors, one row
/// behind the other. Rows further apart would fall on few lines of the L1 cache. Null where they have to be packed.
template <typename T>
FUSED_MHA_INLINE const T* rows_in_place(const Matrix& from, const KeySpan& rows, std::int64_t columns) {
  const bool same_type = from.dtype == (std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32);
  if (!same_type || from.column_stride != 1 || from.row_stride != columns || rows.positions != nullptr) return nullptr;
  const T* first = static_cast<const T*>(from.data) + rows.first * columns;
  const bool aligned = reinterpret_cast<std::uintptr_t>(first) % kVectorBytes == 0 && columns % kLanes<T> == 0;
  return aligned ? first : nullptr;
}

/// Whether any of `count` elements, a multiple of the vector length, is NaN or infinite.
template <typename T>
static bool any_not_finite(const T* elements, std::int64_t count) {
  Vec<T> probe{};
  for (std::int64_t i = 0; i < count; i += kLanes<T>) probe = fma(load<T>(elements + i), Vec<T>{}, probe);
  const T sum = reduce_add<T>(probe);
  return sum != sum;
}

/// out[row][padded] = factor * rows, zeros behind the last column, and zero rows up to `padded_rows`. Returns whether
/// any element is NaN or infinite.
template <typename T>
static bool pack_rows(const Matrix& from, const KeySpan& rows, std::int64_t columns, std::int64_t padded,
                      std::int64_t padded_rows, T factor, T* out) {
  const Vec<T> scale = broadcast<T>(factor);
  Vec<T> probe{};  // as above
  with_storage<T>(from.data, from.dtype, [&](const auto* base) {
    for (std::int64_t row = 0; row < rows.count; ++row) {
      const auto* source = base + rows[row] * from.row_stride;
      T* target = out + row * padded;
      for (std::int64_t column = 0; column < padded; column += kLanes<T>) {
        const Vec<T> value = load_some<T>(source + column * from.column_stride, from.column_stride, columns - column);
        probe = fma(value, Vec<T>{}, probe);
        store<T>(target + column, value * scale);
      }
    }
  });
  for (std::int64_t i = rows.count * padded; i < padded_rows * padded; ++i) out[i] = T{0};
  const T sum = reduce_add<T>(probe);
  return sum != sum;
}

template <typename T, typename Storage>
FUSED_MHA_INLINE void store_row_as(const T* from, std::int64_t columns, T factor, Storage* target,
                                   std::int64_t stride) {
  std::int64_t column = 0;
  if (stride == 1) {
    for (; column + kLanes<T> <= columns; column += kLanes<T>) {
      store_as<T, Storage>(target + column, load<T>(from + column) * factor);
    }
    if (column < columns) {
      store_part<T, Storage>(target + column, load_part<T, T>(from + column, columns - column) * factor,
                             columns - column);
    }
    return;
  }
  Storage rounded[kLanes<T>];
  for (; column < columns; column += kLanes<T>) {
    const std::int64_t count = columns - column < kLanes<T> ? columns - column : kLanes<T>;
    store_as<T, Storage>(rounded, load_some<T, T>(from + column, 1, count) * factor);
    for (std::int64_t i = 0; i < count; ++i) target[(column + i) * stride] = rounded[i];
  }
}

/// One row of `columns` results, times factor, into a strided row of the output's dtype.
template <typename T>
static void store_row(const T* from, std::int64_t columns, T factor, const core::MutableView& to, std::int64_t offset) {
  with_storage<T>(to.data, to.dtype,
                  [&](auto* base) { store_row_as<T>(from, columns, factor, base + offset, to.strides[3]); });
}

/// `rows` rows that lie `ld` apart, row i times factor(i), to rows `offset`, `offset + to.strides[2]`, ...
template <typename T, typename Factor>
static void store_rows(const T* from, std::int64_t ld, std::int64_t rows, std::int64_t columns, const Factor& factor,
                       const core::MutableView& to, std::int64_t offset) {
  with_storage<T>(to.data, to.dtype, [&](auto* base) {
    for (std::int64_t row = 0; row < rows; ++row) {
      store_row_as<T>(from + row * ld, columns, factor(row), base + offset + row * to.strides[2], to.strides[3]);
    }
  });
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
