// SPDX-License-Identifier: BSD-3-Clause
//
// AVX-512 F, BW, DQ and VL. The including unit names the namespace: two units share this file.
#pragma once

#include <immintrin.h>

#define FUSED_MHA_VECTOR_BYTES 64
#include "cpu/simd/vec.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

using portable::element_as;
using portable::load;
using portable::store;

/// Register tiles, see tile_math.h: 32 registers hold 12 x 2 sums (scores) or 6 x 4 (outputs).
inline constexpr int kRegisters = 32;
inline constexpr int kScoreRows = 12;
inline constexpr int kScoreVectors = 2;
/// Whether load_transposed_floats exists.
inline constexpr bool kHasLoadTransposedFloats = true;

template <typename T>
FUSED_MHA_INLINE Vec<T> broadcast(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_set1_ps(value);
  } else {
    return _mm512_set1_pd(value);
  }
}

FUSED_MHA_INLINE VecFloat fma(VecFloat a, VecFloat b, VecFloat c) { return _mm512_fmadd_ps(a, b, c); }
FUSED_MHA_INLINE VecDouble fma(VecDouble a, VecDouble b, VecDouble c) { return _mm512_fmadd_pd(a, b, c); }
FUSED_MHA_INLINE VecFloat max(VecFloat a, VecFloat b) { return _mm512_max_ps(a, b); }
FUSED_MHA_INLINE VecDouble max(VecDouble a, VecDouble b) { return _mm512_max_pd(a, b); }

/// An estimate of 14 bits and Newton's steps: a third of the time of a division.
FUSED_MHA_INLINE VecFloat reciprocal(VecFloat x) {
  const VecFloat one = broadcast<float>(1.0F);
  const VecFloat estimate = _mm512_rcp14_ps(x);
  return fma(estimate, fma(-x, estimate, one), estimate);
}

FUSED_MHA_INLINE VecDouble reciprocal(VecDouble x) {
  const VecDouble one = broadcast<double>(1.0);
  VecDouble estimate = _mm512_rcp14_pd(x);
  estimate = fma(estimate, fma(-x, estimate, one), estimate);
  return fma(estimate, fma(-x, estimate, one), estimate);
}

template <typename T>
FUSED_MHA_INLINE Vec<T> select(std::uint32_t bits, Vec<T> value, Vec<T> otherwise) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), otherwise, value);
  } else {
    return _mm512_mask_blend_pd(static_cast<__mmask8>(bits), otherwise, value);
  }
}

template <typename T>
FUSED_MHA_INLINE std::uint32_t equal_bits(Vec<T> a, Vec<T> b) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
  } else {
    return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ);
  }
}

FUSED_MHA_INLINE std::uint32_t nonzero_bits32(const std::uint8_t* bytes) {
  __m256i value;
  std::memcpy(&value, bytes, sizeof(value));
  return _mm256_test_epi8_mask(value, value);
}

template <typename T>
FUSED_MHA_INLINE T reduce_add(Vec<T> value) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_reduce_add_ps(value);
  } else {
    return _mm512_reduce_add_pd(value);
  }
}

/// As portable::exp2, without its cut below: vscalef rounds into the subnormals and maps -inf to 0.
FUSED_MHA_INLINE VecFloat exp2(VecFloat x) {
  const VecFloat r = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  VecFloat p = broadcast<float>(kExp2Float[0]);
  for (int i = 1; i < 7; ++i) p = fma(p, r, broadcast<float>(kExp2Float[i]));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}

FUSED_MHA_INLINE VecDouble exp2(VecDouble x) {
  const VecDouble whole = _mm512_roundscale_pd(x, 0x08);
  const VecDouble r = _mm512_reduce_pd(x, 0x08);  // x - round(x), 0 for infinities
  VecDouble p = broadcast<double>(kExp2Double[0]);
  for (int i = 1; i < 14; ++i) p = fma(p, r, broadcast<double>(kExp2Double[i]));
  return _mm512_scalef_pd(p, whole);
}

template <typename T, typename Storage>
FUSED_MHA_INLINE Vec<T> load_as(const Storage* from) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Storage, core::BFloat16>) {
    __m256i half;
    std::memcpy(&half, from, sizeof(half));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  } else if constexpr (std::is_same_v<T, float> && std::is_same_v<Storage, core::Float16>) {
    __m256i half;
    std::memcpy(&half, from, sizeof(half));
    return _mm512_cvtph_ps(half);
  } else {
    return portable::load_as<T, Storage>(from);
  }
}

template <typename T, typename Storage>
FUSED_MHA_INLINE void store_as(Storage* to, Vec<T> value) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Storage, core::Float16>) {
    const __m256i half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &half, sizeof(half));
  } else if constexpr (std::is_same_v<T, float> && std::is_same_v<Storage, core::BFloat16>) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
    std::memcpy(to, &half, sizeof(half));
  } else {
    portable::store_as<T, Storage>(to, value);
  }
}

FUSED_MHA_INLINE __mmask16 first_lanes(std::int64_t count) { return static_cast<__mmask16>((1U << count) - 1U); }

template <typename T, typename Storage>
FUSED_MHA_INLINE Vec<T> load_part(const Storage* from, std::int64_t count) {
  const __mmask16 lanes = first_lanes(count);
  if constexpr (std::is_same_v<Storage, double>) {
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>(lanes), from);
  } else if constexpr (std::is_same_v<T, double>) {
    return portable::load_part<T, Storage>(from, count);
  } else if constexpr (std::is_same_v<Storage, float>) {
    return _mm512_maskz_loadu_ps(lanes, from);
  } else {
    const __m256i half = _mm256_maskz_loadu_epi16(lanes, from);
    if constexpr (std::is_same_v<Storage, core::BFloat16>) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    } else {
      return _mm512_cvtph_ps(half);
    }
  }
}

template <typename T, typename Storage>
FUSED_MHA_INLINE void store_part(Storage* to, Vec<T> value, std::int64_t count) {
  const __mmask16 lanes = first_lanes(count);
  if constexpr (std::is_same_v<Storage, double>) {
    _mm512_mask_storeu_pd(to, static_cast<__mmask8>(lanes), value);
  } else if constexpr (std::is_same_v<Storage, float>) {
    _mm512_mask_storeu_ps(to, lanes, value);
  } else {
    Storage rounded[kLanes<T>];
    store_as<T, Storage>(rounded, value);
    __m256i half;
    std::memcpy(&half, rounded, sizeof(half));
    _mm256_mask_storeu_epi16(to, lanes, half);
  }
}

template <typename T>
FUSED_MHA_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  if constexpr (std::is_same_v<T, float>) {
    __m512 pairs[16];
    for (int i = 0; i < 16; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    __m512 quads[16];  // quads[4 g + c]: columns c, c + 4, c + 8, c + 12 of rows 4 g .. 4 g + 3
    for (int i = 0; i < 16; i += 4) {
      quads[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      quads[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
      quads[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      quads[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
    }
    for (int c = 0; c < 4; ++c) {
      const __m512 low01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);
      const __m512 low23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
      const __m512 high01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xDD);
      const __m512 high23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xDD);
      rows[c] = _mm512_shuffle_f32x4(low01, low23, 0x88);
      rows[c + 8] = _mm512_shuffle_f32x4(low01, low23, 0xDD);
      rows[c + 4] = _mm512_shuffle_f32x4(high01, high23, 0x88);
      rows[c + 12] = _mm512_shuffle_f32x4(high01, high23, 0xDD);
    }
  } else {
    __m512d pairs[8];
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm512_unpacklo_pd(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_pd(rows[i], rows[i + 1]);
    }
    for (int c = 0; c < 2; ++c) {
      const __m512d low01 = _mm512_shuffle_f64x2(pairs[c], pairs[2 + c], 0x88);
      const __m512d low23 = _mm512_shuffle_f64x2(pairs[4 + c], pairs[6 + c], 0x88);
      const __m512d high01 = _mm512_shuffle_f64x2(pairs[c], pairs[2 + c], 0xDD);
      const __m512d high23 = _mm512_shuffle_f64x2(pairs[4 + c], pairs[6 + c], 0xDD);
      rows[c] = _mm512_shuffle_f64x2(low01, low23, 0x88);
      rows[c + 4] = _mm512_shuffle_f64x2(low01, low23, 0xDD);
      rows[c + 2] = _mm512_shuffle_f64x2(high01, high23, 0x88);
      rows[c + 6] = _mm512_shuffle_f64x2(high01, high23, 0xDD);
    }
  }
}

/// transpose of the 16 rows that row(0), row(1), ... point at. Inserting quarters as they are loaded halves the
/// shuffles.
template <typename RowPointer>
FUSED_MHA_INLINE void load_transposed_floats(const RowPointer& row, VecFloat (&columns)[16]) {
  for (int quarter = 0; quarter < 4; ++quarter) {
    __m512 parts[4];  // parts[r]: four columns of rows r, r + 4, r + 8, r + 12
    for (int r = 0; r < 4; ++r) {
      parts[r] = _mm512_zextps128_ps512(_mm_loadu_ps(row(r) + 4 * quarter));
      parts[r] = _mm512_insertf32x4(parts[r], _mm_loadu_ps(row(4 + r) + 4 * quarter), 1);
      parts[r] = _mm512_insertf32x4(parts[r], _mm_loadu_ps(row(8 + r) + 4 * quarter), 2);
      parts[r] = _mm512_insertf32x4(parts[r], _mm_loadu_ps(row(12 + r) + 4 * quarter), 3);
    }
    const __m512 low01 = _mm512_unpacklo_ps(parts[0], parts[1]);
    const __m512 high01 = _mm512_unpackhi_ps(parts[0], parts[1]);
    const __m512 low23 = _mm512_unpacklo_ps(parts[2], parts[3]);
    const __m512 high23 = _mm512_unpackhi_ps(parts[2], parts[3]);
    columns[4 * quarter] = _mm512_shuffle_ps(low01, low23, 0x44);
    columns[4 * quarter + 1] = _mm512_shuffle_ps(low01, low23, 0xEE);
    columns[4 * quarter + 2] = _mm512_shuffle_ps(high01, high23, 0x44);
    columns[4 * quarter + 3] = _mm512_shuffle_ps(high01, high23, 0xEE);
  }
}

/// vpmuludq reads the low halves only.
FUSED_MHA_INLINE VecUInt64 multiply_wide(VecUInt64 a, std::uint32_t b) {
  return std::bit_cast<VecUInt64>(_mm512_mul_epu32(std::bit_cast<__m512i>(a), _mm512_set1_epi32(static_cast<int>(b))));
}

FUSED_MHA_INLINE std::uint32_t at_least_bits(VecUInt32 a, std::uint32_t b) {
  return _mm512_cmpge_epu32_mask(std::bit_cast<__m512i>(a), _mm512_set1_epi32(static_cast<int>(b)));
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
