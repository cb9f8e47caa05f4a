// SPDX-License-Identifier: BSD-3-Clause
//
// Attention problems with their storage, for tests: any dtype, layout and kind of mask, filled by a seed.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "core/problem.h"

namespace fused_mha::test {

enum class Layout { kContiguous, kHeadsInside, kStrided, kShared };
enum class Padding { kNone, kRight, kLeft, kScattered, kAll, kBias, kBiasAndInfinity };
enum class AttnMask { kNone, kCausalBool, kRandomBool, kBias, kBiasAndInfinity, kPerHead, kRowOnly, kKeyOnly, kLowest };
enum class Sink { kNone, kShared, kPerHead, kPerSample };

struct Case {
  std::int64_t N = 1, H = 1, Hkv = 1, L = 1, S = 1, D = 1, Dv = 1;
  core::DType dtype = core::DType::kFloat32;
  Layout layout = Layout::kContiguous;
  Padding padding = Padding::kNone;
  AttnMask attn_mask = AttnMask::kNone;
  core::DType mask_dtype = core::DType::kFloat32;
  bool is_causal = false;
  std::int64_t causal_offset = 0;
  Sink sink = Sink::kNone;
  bool weights_before_dropout = false;
  std::int64_t always_visible_keys = 0;
  double dropout_p = 0.0;
  std::uint32_t seed = 0;
};

std::string describe(const Case& c);

/// Memory that starts where torch's does, so that kernels may read it in place.
template <typename T>
struct CacheLineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{64};

  CacheLineAllocator() = default;
  template <typename U>
  CacheLineAllocator(const CacheLineAllocator<U>&) {}  // NOLINT(google-explicit-constructor): as allocators convert
  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kAlignment)); }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, kAlignment); }
  friend bool operator==(const CacheLineAllocator&, const CacheLineAllocator&) { return true; }
};

/// A 4-D tensor that owns its memory.
struct Tensor {
  std::vector<std::byte, CacheLineAllocator<std::byte>> storage;
  std::array<std::int64_t, 4> sizes{};
  core::MutableView view;

  core::View read() const { return {view.data, view.dtype, view.strides}; }
  double get(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) const;
  void set(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3, double value);
};

Tensor make_tensor(core::DType dtype, std::array<std::int64_t, 4> sizes, Layout layout = Layout::kContiguous);

struct Problem {
  Tensor query, key, value, key_padding_mask, attn_mask, sink;
  std::array<std::int64_t, 4> attn_mask_sizes{1, 1, 1, 1};
  core::AttentionProblem problem;
};

std::unique_ptr<Problem> make_problem(const Case& c);

void fill_random(Tensor& tensor, std::mt19937& random, double spread = 1.0);
void fill_zero(Tensor& tensor);

}  // namespace fused_mha::test
