// SPDX-License-Identifier: BSD-3-Clause
//
// Element types the kernels know, and how 16-bit floats widen to float. No torch, no CUDA runtime.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/inline.h"

namespace fused_mha::core {

enum class DType : std::uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16, kBool };

FUSED_MHA_INLINE constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kBool:
      return 1;
  }
  return 0;
}

/// Storage of a bfloat16: the upper half of a float's bits.
struct BFloat16 {
  std::uint16_t bits;
};

/// Storage of an IEEE 754 binary16.
struct Float16 {
  std::uint16_t bits;
};

FUSED_MHA_INLINE float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

FUSED_MHA_INLINE float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000U) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1FU;
  const std::uint32_t fraction = value.bits & 0x3FFU;
  if (exponent == 0x1FU) {
    return std::bit_cast<float>(sign | 0x7F800000U | (fraction << 13));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (fraction << 13));
  }
  // Subnormal or zero: fraction * 2^-24 is exact in float.
  const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

/// Round to nearest, ties to even. NaN stays NaN (quiet).
FUSED_MHA_INLINE BFloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x0040U)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16)};
}

/// Round to nearest, ties to even; beyond the range gives infinity. NaN stays NaN (quiet).
FUSED_MHA_INLINE Float16 to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) {
    return {static_cast<std::uint16_t>(sign | 0x7E00U)};
  }
  if (magnitude >= 0x477FF000U) {  // rounds to 65536 or more
    return {static_cast<std::uint16_t>(sign | 0x7C00U)};
  }
  if (magnitude < 0x38800000U) {  // below 2^-14: the sum's low bits are the subnormal fraction
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U))};
  }
  const std::uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13))};
}

/// data[offset] = value, rounded to `dtype`; for bool, whether it is not 0.
FUSED_MHA_INLINE void store_element(void* data, DType dtype, std::int64_t offset, double value) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(data)[offset] = value;
      break;
    case DType::kFloat32:
      static_cast<float*>(data)[offset] = static_cast<float>(value);
      break;
    case DType::kBFloat16:
      static_cast<BFloat16*>(data)[offset] = to_bfloat16(static_cast<float>(value));
      break;
    case DType::kFloat16:
      static_cast<Float16*>(data)[offset] = to_float16(static_cast<float>(value));
      break;
    case DType::kBool:
      static_cast<bool*>(data)[offset] = value != 0.0;
      break;
  }
}

}  // namespace fused_mha::core
