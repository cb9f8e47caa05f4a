// SPDX-License-Identifier: BSD-3-Clause
//
// AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#define FUSED_MHA_ISA avx2
#define FUSED_MHA_VECTOR_BYTES 32
#include "cpu/simd/vec.h"

namespace fused_mha::cpu::FUSED_MHA_ISA {

using portable::element_as;
using portable::exp2;
using portable::load;
using portable::reciprocal;
using portable::reduce_add;
using portable::store;

inline constexpr int kRegisters = 16;
inline constexpr int kScoreRows = 6;
inline constexpr int kScoreVectors = 2;
/// Whether load_transposed_floats exists.
inline constexpr bool kHasLoadTransposedFloats = false;

template <typename T>
FUSED_MHA_INLINE Vec<T> broadcast(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm256_set1_ps(value);
  } else {
    return _mm256_set1_pd(value);
  }
}

FUSED_MHA_INLINE VecFloat fma(VecFloat a, VecFloat b, VecFloat c) { return _mm256_fmadd_ps(a, b, c); }
FUSED_MHA_INLINE VecDouble fma(VecDouble a, VecDouble b, VecDouble c) { return _mm256_fmadd_pd(a, b, c); }
FUSED_MHA_INLINE VecFloat max(VecFloat a, VecFloat b) { return _mm256_max_ps(a, b); }
FUSED_MHA_INLINE VecDouble max(VecDouble a, VecDouble b) { return _mm256_max_pd(a, b); }

template <typename T>
FUSED_MHA_INLINE Vec<T> select(std::uint32_t bits, Vec<T> value, Vec<T> otherwise) {
  if constexpr (std::is_same_v<T, float>) {
    const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane_bit);
    return _mm256_blendv_ps(otherwise, value, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane_bit)));
  } else {
    const __m256i lane_bit = _mm256_setr_epi64x(1, 2, 4, 8);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi64x(static_cast<long long>(bits)), lane_bit);
    return _mm256_blendv_pd(otherwise, value, _mm256_castsi256_pd(_mm256_cmpeq_epi64(set, lane_bit)));
  }
}

template <typename T>
FUSED_MHA_INLINE std::uint32_t equal_bits(Vec<T> a, Vec<T> b) {
  if constexpr (std::is_same_v<T, float>) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
  } else {
    return static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_EQ_OQ)));
  }
}

FUSED_MHA_INLINE std::uint32_t nonzero_bits32(const std::uint8_t* bytes) {
  __m256i value;
  std::memcpy(&value, bytes, sizeof(value));
  return ~static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(value, _mm256_setzero_si256())));
}

template <typename T, typename Storage>
FUSED_MHA_INLINE Vec<T> load_as(const Storage* from) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Storage, core::BFloat16>) {
    __m128i half;
    std::memcpy(&half, from, sizeof(half));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  } else if constexpr (std::is_same_v<T, float> && std::is_same_v<Storage, core::Float16>) {
    __m128i half;
    std::memcpy(&half, from, sizeof(half));
    return _mm256_cvtph_ps(half);
  } else {
    return portable::load_as<T, Storage>(from);
  }
}

template <typename T, typename Storage>
FUSED_MHA_INLINE void store_as(Storage* to, Vec<T> value) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Storage, core::Float16>) {
    const __m128i half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &half, sizeof(half));
  } else {
    portable::store_as<T, Storage>(to, value);
  }
}

/// vmaskmovps takes lanes whose sign bit is set: a window into eight set and eight clear words.
FUSED_MHA_INLINE __m256i first_lanes(std::int64_t count) {
  alignas(32) static constexpr std::int32_t kWindow[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  __m256i lanes;
  std::memcpy(&lanes, kWindow + 8 - count, sizeof(lanes));
  return lanes;
}

template <typename T, typename Storage>
FUSED_MHA_INLINE Vec<T> load_part(const Storage* from, std::int64_t count) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Storage, float>) {
    return _mm256_maskload_ps(from, first_lanes(count));
  } else {
    return portable::load_part<T, Storage>(from, count);
  }
}

template <typename T, typename Storage>
FUSED_MHA_INLINE void store_part(Storage* to, Vec<T> value, std::int64_t count) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Storage, float>) {
    _mm256_maskstore_ps(to, first_lanes(count), value);
  } else {
    portable::store_part<T, Storage>(to, value, count);
  }
}

template <typename T>
FUSED_MHA_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  if constexpr (std::is_same_v<T, float>) {
    __m256 pairs[8];
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    __m256 quads[8];
    for (int i = 0; i < 8; i += 4) {
      quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
      quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
      rows[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
      rows[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
  } else {
    const __m256d low01 = _mm256_unpacklo_pd(rows[0], rows[1]);
    const __m256d high01 = _mm256_unpackhi_pd(rows[0], rows[1]);
    const __m256d low23 = _mm256_unpacklo_pd(rows[2], rows[3]);
    const __m256d high23 = _mm256_unpackhi_pd(rows[2], rows[3]);
    rows[0] = _mm256_permute2f128_pd(low01, low23, 0x20);
    rows[1] = _mm256_permute2f128_pd(high01, high23, 0x20);
    rows[2] = _mm256_permute2f128_pd(low01, low23, 0x31);
    rows[3] = _mm256_permute2f128_pd(high01, high23, 0x31);
  }
}

/// vpmuludq reads the low halves only.
FUSED_MHA_INLINE VecUInt64 multiply_wide(VecUInt64 a, std::uint32_t b) {
  return std::bit_cast<VecUInt64>(_mm256_mul_epu32(std::bit_cast<__m256i>(a), _mm256_set1_epi32(static_cast<int>(b))));
}

FUSED_MHA_INLINE std::uint32_t at_least_bits(VecUInt32 a, std::uint32_t b) {
  const __m256i value = std::bit_cast<__m256i>(a);
  const __m256i bound = _mm256_set1_epi32(static_cast<int>(b));
  const __m256i at_least = _mm256_cmpeq_epi32(_mm256_max_epu32(value, bound), value);
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(at_least)));
}

}  // namespace fused_mha::cpu::FUSED_MHA_ISA
