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

FUSED_MHA_INLINE Matrix matrix_of(const core::View& view, std::int64_t i0, std::int64_t i1) {
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

/// out[column][kWidth] = factor * rows, transposed; kWidth >= rows.count, zeros behind the last row. Writes up to
/// kLanes<T> elements beyond the end.
template <typename T, std::int64_t kWidth, typename Storage>
static void pack_transposed_from(const Storage* base, const Matrix& from, const KeySpan& rows, std::int64_t columns,
                                 T factor, T* out) {
  constexpr std::int64_t kStep = kLanes<T>;
  const Vec<T> scale = broadcast<T>(factor);
  for (std::int64_t row = 0; row < kWidth; row += kStep) {
    for (std::int64_t column = 0; column < columns; column += kStep) {
      Vec<T> square[kStep];
      for (std::int64_t i = 0; i < kStep; ++i) {
        square[i] = row + i < rows.count
                        ? load_some<T>(base + rows[row + i] * from.row_stride + column * from.column_stride,
                                       from.column_stride, columns - column)
                        : Vec<T>{};
      }
      transpose<T>(square);
      const std::int64_t count = columns - column < kStep ? columns - column : kStep;
      for (std::int64_t j = 0; j < count; ++j) {
        T* target = out + (column + j) * kWidth + row;
        if constexpr (kWidth % kStep == 0 || kWidth < kStep) {
          // Where kWidth < kStep the surplus lands where the next column is written afterwards.
          store<T>(target, square[j] * scale);
        } else {
          T lanes[kStep];
          store<T>(lanes, square[j] * scale);
          for (std::int64_t i = 0; i < kStep && row + i < kWidth; ++i) target[i] = lanes[i];
        }
      }
    }
  }
}

template <typename T, std::int64_t kWidth>
static void pack_transposed(const Matrix& from, const KeySpan& rows, std::int64_t columns, T factor, T* out) {
  with_storage<T>(from.data, from.dtype,
                  [&](const auto* base) { pack_transposed_from<T, kWidth>(base, from, rows, columns, factor, out); });
}

/// out[row][padded] = factor * rows, zeros behind the last column, and zero rows up to `padded_rows`. Returns whether
/// any element is NaN or infinite.
template <typename T>
static bool pack_rows(const Matrix& from, const KeySpan& rows, std::int64_t columns, std::int64_t padded,
                      std::int64_t padded_rows, T factor, T* out) {
  const Vec<T> scale = broadcast<T>(factor);
  Vec<T> probe{};  // stays 0 while everything is finite: inf * 0 and NaN * 0 are NaN
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

/// One row of `columns` results, times factor, into a strided row of the output's dtype.
template <typename T>
static void store_row(const T* from, std::int64_t columns, T factor, const core::MutableView& to, std::int64_t offset) {
  const std::int64_t stride = to.strides[3];
  with_storage<T>(to.data, to.dtype, [&](auto* base) {
    auto* target = base + offset;
    using Storage = std::remove_pointer_t<decltype(target)>;
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
  });
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
