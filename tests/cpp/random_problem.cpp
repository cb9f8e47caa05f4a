// SPDX-License-Identifier: BSD-3-Clause
#include "random_problem.h"

#include <cmath>
#include <limits>
#include <sstream>

#include "core/mask.h"

namespace fused_mha::test {
namespace {

using core::DType;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double lowest_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return std::numeric_limits<double>::lowest();
    case DType::kFloat32:
      return std::numeric_limits<float>::lowest();
    case DType::kBFloat16:
      return core::to_float(core::BFloat16{0xFF7F});
    default:
      return -65504.0;
  }
}

/// Hides by True or by -inf, whatever the mask's dtype.
double hidden_value(DType dtype) { return dtype == DType::kBool ? 1.0 : -kInfinity; }

void fill_padding(const Case& c, std::int64_t keys, std::mt19937& random, Tensor& mask) {
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const DType dtype = mask.view.dtype;
  for (std::int64_t n = 0; n < c.N; ++n) {
    const auto cut = static_cast<std::int64_t>(uniform(random) * static_cast<double>(keys + 1));
    for (std::int64_t s = 0; s < keys; ++s) {
      bool hidden = false;
      if (c.padding == Padding::kRight) hidden = s >= cut;
      if (c.padding == Padding::kLeft) hidden = s < cut;
      if (c.padding == Padding::kScattered || c.padding == Padding::kBiasAndInfinity) hidden = uniform(random) < 0.4;
      if (c.padding == Padding::kAll) hidden = n == 0;
      const bool biased = c.padding == Padding::kBias || c.padding == Padding::kBiasAndInfinity;
      mask.set(n, 0, 0, s, hidden ? hidden_value(dtype) : biased ? uniform(random) * 4.0 - 2.0 : 0.0);
    }
  }
}

std::array<std::int64_t, 4> mask_sizes(const Case& c, std::int64_t keys) {
  switch (c.attn_mask) {
    case AttnMask::kPerHead:
      return {c.N, c.H, c.L, keys};
    case AttnMask::kBias:
      return {1, c.H, c.L, keys};
    case AttnMask::kRowOnly:
      return {c.N, 1, c.L, 1};
    case AttnMask::kKeyOnly:
      return {1, c.H, 1, keys};
    default:
      return {1, 1, c.L, keys};
  }
}

void fill_attn_mask(const Case& c, std::mt19937& random, Tensor& mask) {
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const DType dtype = mask.view.dtype;
  const auto value = [&](std::int64_t l, std::int64_t s) {
    const double chance = uniform(random);
    switch (c.attn_mask) {
      case AttnMask::kCausalBool:
        return s > l ? hidden_value(dtype) : 0.0;
      case AttnMask::kRandomBool:
        return chance < 0.5 ? hidden_value(dtype) : 0.0;
      case AttnMask::kBiasAndInfinity:
        return chance < 0.3 ? -kInfinity : chance * 4.0 - 2.0;
      case AttnMask::kLowest:
        return l % 2 == 0 || chance < 0.5 ? lowest_of(dtype) : chance;
      default:
        return dtype == DType::kBool ? (chance < 0.3 ? 1.0 : 0.0) : chance * 4.0 - 2.0;
    }
  };
  for (std::int64_t n = 0; n < mask.sizes[0]; ++n) {
    for (std::int64_t h = 0; h < mask.sizes[1]; ++h) {
      for (std::int64_t l = 0; l < mask.sizes[2]; ++l) {
        for (std::int64_t s = 0; s < mask.sizes[3]; ++s) mask.set(n, h, l, s, value(l, s));
      }
    }
  }
}

}  // namespace

double Tensor::get(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) const {
  const core::View element = read();
  if (element.dtype == DType::kBool) return static_cast<const bool*>(element.data)[element.offset(i0, i1, i2, i3)];
  return core::mask_element(element, element.offset(i0, i1, i2, i3));
}

void Tensor::set(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3, double value) {
  core::store_element(view.data, view.dtype, view.offset(i0, i1, i2, i3), value);
}

Tensor make_tensor(DType dtype, std::array<std::int64_t, 4> sizes, Layout layout) {
  Tensor tensor;
  tensor.sizes = sizes;
  tensor.view.dtype = dtype;
  const auto [a, b, c, d] = sizes;
  std::int64_t elements = a * b * c * d;
  switch (layout) {
    case Layout::kContiguous:
      tensor.view.strides = {b * c * d, c * d, d, 1};
      break;
    case Layout::kHeadsInside:
      tensor.view.strides = {b * c * d, d, b * d, 1};
      break;
    case Layout::kStrided:
      tensor.view.strides = {2 * b * c * d + 5, 2 * c * d + 3, 2 * d + 1, 2};
      elements = a * (2 * b * (c * d + c + 2) + 5) * 2 + 16;
      tensor.view.strides = {b * (c * (2 * d + 1) + 3) + 5, c * (2 * d + 1) + 3, 2 * d + 1, 2};
      break;
    case Layout::kShared:  // one head's memory stands for all
      tensor.view.strides = {c * d, 0, d, 1};
      break;
  }
  // NaN in every dtype: what nobody writes, and what nobody may read, shows.
  tensor.storage.assign(static_cast<std::size_t>(elements + 1) * core::size_of(dtype), std::byte{0xFF});
  tensor.view.data = tensor.storage.data();
  return tensor;
}

namespace {

template <typename Number>
void fill(Tensor& tensor, const Number& number) {
  for (std::int64_t i = 0; i < tensor.sizes[0]; ++i) {
    for (std::int64_t j = 0; j < tensor.sizes[1]; ++j) {
      for (std::int64_t k = 0; k < tensor.sizes[2]; ++k) {
        for (std::int64_t l = 0; l < tensor.sizes[3]; ++l) tensor.set(i, j, k, l, number());
      }
    }
  }
}

}  // namespace

void fill_random(Tensor& tensor, std::mt19937& random, double spread) {
  std::normal_distribution<double> normal(0.0, spread);
  fill(tensor, [&] { return normal(random); });
}

void fill_zero(Tensor& tensor) {
  fill(tensor, [] { return 0.0; });
}

std::unique_ptr<Problem> make_problem(const Case& c) {
  std::mt19937 random(c.seed);
  auto result = std::make_unique<Problem>();
  result->query = make_tensor(c.dtype, {c.N, c.H, c.L, c.D}, c.layout);
  result->key = make_tensor(c.dtype, {c.N, c.Hkv, c.S, c.D}, c.layout);
  result->value = make_tensor(c.dtype, {c.N, c.Hkv, c.S, c.Dv}, c.layout);
  fill_random(result->query, random);
  fill_random(result->key, random);
  fill_random(result->value, random);

  core::AttentionProblem& problem = result->problem;
  problem.batch = c.N;
  problem.heads = c.H;
  problem.kv_heads = c.Hkv;
  problem.query_length = c.L;
  problem.key_length = c.S;
  problem.head_dim = c.D;
  problem.value_dim = c.Dv;
  problem.query = result->query.read();
  problem.key = result->key.read();
  problem.value = result->value.read();
  problem.query.dtype = problem.key.dtype = problem.value.dtype = c.dtype;
  problem.is_causal = c.is_causal;
  problem.causal_offset = c.causal_offset;
  problem.always_visible_keys = c.always_visible_keys;
  problem.scale = 1.0 / std::sqrt(static_cast<double>(c.D));
  problem.dropout_p = c.dropout_p;
  problem.rng = {0x1234567ULL + c.seed, 0x9876543210ULL};

  const std::int64_t keys = c.S - c.always_visible_keys;
  if (c.padding != Padding::kNone) {
    const bool floating = c.padding == Padding::kBias || c.padding == Padding::kBiasAndInfinity;
    result->key_padding_mask = make_tensor(floating ? c.mask_dtype : DType::kBool, {c.N, 1, 1, keys});
    fill_padding(c, keys, random, result->key_padding_mask);
    problem.key_padding_mask = result->key_padding_mask.read();
    problem.key_padding_mask.strides[1] = problem.key_padding_mask.strides[2] = 0;
  }
  if (c.attn_mask != AttnMask::kNone) {
    const bool boolean = c.attn_mask == AttnMask::kCausalBool || c.attn_mask == AttnMask::kRandomBool;
    result->attn_mask_sizes = mask_sizes(c, keys);
    result->attn_mask = make_tensor(boolean ? DType::kBool : c.mask_dtype, result->attn_mask_sizes);
    fill_attn_mask(c, random, result->attn_mask);
    problem.attn_mask = result->attn_mask.read();
    for (std::size_t i = 0; i < 4; ++i) {
      if (result->attn_mask_sizes[i] == 1) problem.attn_mask.strides[i] = 0;
    }
  }
  if (c.sink != Sink::kNone) {
    const std::int64_t samples = c.sink == Sink::kPerSample ? c.N : 1;
    const std::int64_t heads = c.sink == Sink::kShared ? 1 : c.H;
    result->sink = make_tensor(c.mask_dtype, {samples, heads, 1, 1});
    fill_random(result->sink, random, 2.0);
    problem.sink = result->sink.read();
    if (samples == 1) problem.sink.strides[0] = 0;
    if (heads == 1) problem.sink.strides[1] = 0;
  }
  return result;
}

std::string describe(const Case& c) {
  std::ostringstream text;
  text << "N=" << c.N << " H=" << c.H << " Hkv=" << c.Hkv << " L=" << c.L << " S=" << c.S << " D=" << c.D
       << " Dv=" << c.Dv << " dtype=" << static_cast<int>(c.dtype) << " layout=" << static_cast<int>(c.layout)
       << " padding=" << static_cast<int>(c.padding) << " attn_mask=" << static_cast<int>(c.attn_mask)
       << " mask_dtype=" << static_cast<int>(c.mask_dtype) << " causal=" << c.is_causal
       << " causal_offset=" << c.causal_offset << " sink=" << static_cast<int>(c.sink)
       << " before_dropout=" << c.weights_before_dropout << " always_visible=" << c.always_visible_keys
       << " dropout=" << c.dropout_p << " seed=" << c.seed;
  return text.str();
}

}  // namespace fused_mha::test
