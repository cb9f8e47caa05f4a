// SPDX-License-Identifier: BSD-3-Clause
//
// The vector type that the kernels are written in, built on the compilers' vector extension (gcc and clang): the
// portable operations. vec_avx2.h and vec_avx512.h replace those for which an instruction set has something better.
//
// Included once by each instruction set's kernel unit, which defines FUSED_MHA_ISA (the namespace that keeps the
// units apart) and FUSED_MHA_VECTOR_BYTES.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/dtype.h"
#include "core/inline.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

/// Integer type as wide as T.
template <typename T>
using IntOf = std::conditional_t<sizeof(T) == 8, std::int64_t, std::int32_t>;

inline constexpr int kVectorBytes = FUSED_MHA_VECTOR_BYTES;

template <typename T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

typedef float VecFloat __attribute__((vector_size(FUSED_MHA_VECTOR_BYTES)));
typedef double VecDouble __attribute__((vector_size(FUSED_MHA_VECTOR_BYTES)));
typedef std::int32_t VecInt32 __attribute__((vector_size(FUSED_MHA_VECTOR_BYTES)));
typedef std::int64_t VecInt64 __attribute__((vector_size(FUSED_MHA_VECTOR_BYTES)));
typedef std::uint32_t VecUInt32 __attribute__((vector_size(FUSED_MHA_VECTOR_BYTES)));
typedef std::uint64_t VecUInt64 __attribute__((vector_size(FUSED_MHA_VECTOR_BYTES)));

template <typename T>
using Vec = std::conditional_t<std::is_same_v<T, double>, VecDouble, VecFloat>;
template <typename T>
using VecInt = std::conditional_t<std::is_same_v<T, double>, VecInt64, VecInt32>;

/// 2^r on [0, 1), relative error at most 2.1e-9 (minimax with p(0) = 1), highest power first.
inline constexpr float kExp2Float[] = {2.1612914954e-04F,
                                       1.2467846446e-03F,
                                       9.6754515669e-03F,
                                       5.5485280619e-02F,
                                       2.4022930555e-01F,
                                       6.9314704444e-01F,
                                       1.0F};
/// 2^r on [-0.5, 0.5], Taylor to degree 13, truncation below 1e-17, highest power first.
inline constexpr double kExp2Double[] = {1.3691488853904128e-12, 2.5678435993488206e-11,
                                         4.4455382718708116e-10, 7.0549116208011233e-09,
                                         1.0178086009239699e-07, 1.3215486790144307e-06,
                                         1.5252733804059840e-05, 1.5403530393381608e-04,
                                         1.3333558146428443e-03, 9.6181291076284768e-03,
                                         5.5504108664821580e-02, 2.4022650695910071e-01,
                                         6.9314718055994531e-01, 1.0};

namespace portable {

template <typename T>
FUSED_MHA_INLINE Vec<T> load(const T* from) {
  Vec<T> result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}

template <typename T>
FUSED_MHA_INLINE void store(T* to, Vec<T> value) {
  std::memcpy(to, &value, sizeof(value));
}

template <typename T>
FUSED_MHA_INLINE Vec<T> broadcast(T value) {
  return value - Vec<T>{};  // x - 0 is x for every x, so no subtraction is left
}

/// a * b + c, contracted to one rounding where the instruction set has it.
template <typename V>
FUSED_MHA_INLINE V fma(V a, V b, V c) {
  return a * b + c;
}

/// 1 / x, at most 1 ulp for 2^-120 <= |x| <= 2^120 (2^-1000, 2^1000); NaN gives NaN.
template <typename V>
FUSED_MHA_INLINE V reciprocal(V x) {
  return 1 / x;
}

/// The larger; b where either is NaN.
template <typename V>
FUSED_MHA_INLINE V max(V a, V b) {
  return a > b ? a : b;
}

/// All-ones lanes where the bit (lane 0 lowest) is set.
template <typename T>
FUSED_MHA_INLINE VecInt<T> lane_mask(std::uint32_t bits) {
  VecInt<T> result;
  for (int lane = 0; lane < kLanes<T>; ++lane) result[lane] = -static_cast<IntOf<T>>((bits >> lane) & 1U);
  return result;
}

/// `value` where the lane's bit is set, `otherwise` elsewhere.
template <typename T>
FUSED_MHA_INLINE Vec<T> select(std::uint32_t bits, Vec<T> value, Vec<T> otherwise) {
  return lane_mask<T>(bits) ? value : otherwise;
}

/// Bit per lane: a == b.
template <typename T>
FUSED_MHA_INLINE std::uint32_t equal_bits(Vec<T> a, Vec<T> b) {
  std::uint32_t bits = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) bits |= static_cast<std::uint32_t>(a[lane] == b[lane] ? 1 : 0) << lane;
  return bits;
}

/// Bit per byte of 32: the byte is not 0.
FUSED_MHA_INLINE std::uint32_t nonzero_bits32(const std::uint8_t* bytes) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<std::uint32_t>(bytes[i] != 0 ? 1 : 0) << i;
  return bits;
}

template <typename T>
FUSED_MHA_INLINE T reduce_add(Vec<T> value) {
  // Halves are added pairwise: the tree that wide registers use too.
  T lanes[kLanes<T>];
  std::memcpy(lanes, &value, sizeof(value));
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

/// 2^x. float: at most 2 ulp for x in [-126, 127], 0 below -126; double: at most 2 ulp for x in [-1022, 1023], 0
/// below. NaN gives NaN, -inf gives 0.
FUSED_MHA_INLINE VecFloat exp2(VecFloat x) {
  const VecFloat clamped = max(broadcast<float>(-127.0F), x);
  // Adding 1.5 * 2^23 rounds to an integer; half a unit less beforehand turns rounding into floor.
  const VecFloat magic = broadcast<float>(12582912.0F);
  const VecFloat shifted = (clamped - 0.5F) + magic;
  const VecFloat r = clamped - (shifted - magic);
  VecFloat p = broadcast<float>(kExp2Float[0]);
  for (int i = 1; i < 7; ++i) p = fma(p, r, broadcast<float>(kExp2Float[i]));
  const VecInt32 exponent = std::bit_cast<VecInt32>(shifted) << 23;
  const VecFloat scaled = std::bit_cast<VecFloat>(std::bit_cast<VecInt32>(p) + exponent);
  return x < -126.0F ? VecFloat{} : (x == x ? scaled : x);
}

FUSED_MHA_INLINE VecDouble exp2(VecDouble x) {
  const VecDouble clamped = max(broadcast<double>(-1023.0), x);
  const VecDouble magic = broadcast<double>(6755399441055744.0);  // 1.5 * 2^52
  const VecDouble shifted = clamped + magic;
  const VecDouble r = clamped - (shifted - magic);
  VecDouble p = broadcast<double>(kExp2Double[0]);
  for (int i = 1; i < 14; ++i) p = fma(p, r, broadcast<double>(kExp2Double[i]));
  const VecInt64 exponent = std::bit_cast<VecInt64>(shifted) << 52;
  const VecDouble scaled = std::bit_cast<VecDouble>(std::bit_cast<VecInt64>(p) + exponent);
  return x < -1022.0 ? VecDouble{} : (x == x ? scaled : x);
}

template <typename T, typename Storage>
FUSED_MHA_INLINE T element_as(const Storage& element) {
  if constexpr (std::is_arithmetic_v<Storage>) {
    return static_cast<T>(element);
  } else {
    return static_cast<T>(core::to_float(element));
  }
}

/// kLanes<T> elements of storage type Storage as T.
template <typename T, typename Storage>
FUSED_MHA_INLINE Vec<T> load_as(const Storage* from) {
  if constexpr (std::is_same_v<T, Storage>) {
    return load<T>(from);
  } else {
    T lanes[kLanes<T>];
    for (int lane = 0; lane < kLanes<T>; ++lane) lanes[lane] = element_as<T>(from[lane]);
    return load<T>(lanes);
  }
}

/// kLanes<T> elements rounded to Storage.
template <typename T, typename Storage>
FUSED_MHA_INLINE void store_as(Storage* to, Vec<T> value) {
  if constexpr (std::is_same_v<T, Storage>) {
    store<T>(to, value);
  } else {
    T lanes[kLanes<T>];
    std::memcpy(lanes, &value, sizeof(value));
    for (int lane = 0; lane < kLanes<T>; ++lane) {
      if constexpr (std::is_same_v<Storage, core::BFloat16>) {
        to[lane] = core::to_bfloat16(static_cast<float>(lanes[lane]));
      } else if constexpr (std::is_same_v<Storage, core::Float16>) {
        to[lane] = core::to_float16(static_cast<float>(lanes[lane]));
      } else {
        to[lane] = static_cast<Storage>(lanes[lane]);
      }
    }
  }
}

/// The first `count` < kLanes<T> elements, zeros behind them; nothing beyond them is touched.
template <typename T, typename Storage>
FUSED_MHA_INLINE Vec<T> load_part(const Storage* from, std::int64_t count) {
  T lanes[kLanes<T>] = {};
  for (std::int64_t lane = 0; lane < count; ++lane) lanes[lane] = element_as<T>(from[lane]);
  return load<T>(lanes);
}

/// Stores the first `count` < kLanes<T> elements, rounded to Storage.
template <typename T, typename Storage>
FUSED_MHA_INLINE void store_part(Storage* to, Vec<T> value, std::int64_t count) {
  Storage rounded[kLanes<T>];
  store_as<T, Storage>(rounded, value);
  for (std::int64_t lane = 0; lane < count; ++lane) to[lane] = rounded[lane];
}

/// rows[i] holds row i of a square of kLanes<T> rows; afterwards rows[j] holds its column j.
template <typename T>
FUSED_MHA_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  T square[kLanes<T>][kLanes<T>];
  for (int i = 0; i < kLanes<T>; ++i) {
    for (int j = 0; j < kLanes<T>; ++j) square[j][i] = rows[i][j];
  }
  for (int j = 0; j < kLanes<T>; ++j) rows[j] = load<T>(square[j]);
}

/// 32-bit numbers in the low halves of 64-bit lanes; what the high halves hold does not matter.
FUSED_MHA_INLINE VecUInt64 multiply_wide(VecUInt64 a, std::uint32_t b) {
  return (a & 0xFFFFFFFFULL) * static_cast<std::uint64_t>(b);
}

/// Bit per lane: a >= b as unsigned numbers.
FUSED_MHA_INLINE std::uint32_t at_least_bits(VecUInt32 a, std::uint32_t b) {
  std::uint32_t bits = 0;
  for (int lane = 0; lane < kLanes<float>; ++lane) bits |= static_cast<std::uint32_t>(a[lane] >= b ? 1 : 0) << lane;
  return bits;
}

}  // namespace portable
}  // namespace fused_mha::cpu::FUSED_MHA_ISA
