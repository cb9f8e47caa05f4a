// SPDX-License-Identifier: BSD-3-Clause
#include "emulated_calls.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "catch.h"
#include "core/reference.h"
#include "cuda/run.h"

namespace fused_mha::test {

using core::DType;
using core::WeightsMode;
using cuda_emulation::GlobalRange;

namespace {

/// Device memory of one call: what is named here may be touched, nothing else.
class DeviceMemory {
 public:
  void add(const Tensor& tensor, bool writable) { add(tensor.storage.data(), tensor.storage.size(), writable); }
  void add(const void* data, std::size_t bytes, bool writable) {
    if (bytes > 0) ranges_.push_back(std::make_unique<GlobalRange>(data, bytes, writable));
  }
  void add(const Problem& problem) {
    for (const Tensor* tensor :
         {&problem.query, &problem.key, &problem.value, &problem.key_padding_mask, &problem.attn_mask, &problem.sink}) {
      add(*tensor, false);
    }
  }

 private:
  std::vector<std::unique_ptr<GlobalRange>> ranges_;
};

struct AlignedBytes {
  explicit AlignedBytes(std::size_t bytes)
      : size((bytes + 255) / 256 * 256), data(size == 0 ? nullptr : std::aligned_alloc(256, size), &std::free) {
    // Not zeros: nothing may rely on them.
    if (size > 0) std::fill_n(static_cast<std::uint8_t*>(data.get()), size, std::uint8_t{0xFF});
  }
  std::size_t size;
  std::unique_ptr<void, decltype(&std::free)> data;
};

std::array<std::int64_t, 2> rng_numbers(const core::AttentionProblem& problem) {
  return {static_cast<std::int64_t>(problem.rng.seed), static_cast<std::int64_t>(problem.rng.offset)};
}

}  // namespace

ForwardResult run_forward(const Problem& p, WeightsMode mode, bool before_dropout) {
  const core::AttentionProblem& problem = p.problem;
  ForwardResult result;
  result.output =
      make_tensor(problem.query.dtype, {problem.batch, problem.heads, problem.query_length, problem.value_dim});
  const std::int64_t weight_heads = mode == WeightsMode::kPerHead ? problem.heads : 1;
  result.weights =
      make_tensor(problem.query.dtype, {problem.batch, weight_heads, problem.query_length, problem.key_length});
  if (problem.heads == 0) fill_zero(result.weights);  // a mean over no heads, which no kernel writes
  if (mode == WeightsMode::kAveraged) result.weights.view.strides[1] = 0;
  const auto rows = static_cast<std::size_t>(problem.batch * problem.heads * problem.query_length);
  result.row_max.resize(rows);
  result.row_sum.resize(rows);
  core::ForwardOutputs outputs;
  outputs.output = result.output.view;
  outputs.row_max = result.row_max.data();
  outputs.row_sum = result.row_sum.data();
  outputs.weights_mode = mode;
  outputs.weights_before_dropout = before_dropout;
  if (mode != WeightsMode::kNone) outputs.weights = result.weights.view;
  result.log_sum_exp = make_tensor(problem.query.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32,
                                   {problem.batch, problem.heads, problem.query_length, 1});
  outputs.log_sum_exp = result.log_sum_exp.view;
  const auto rng = rng_numbers(problem);
  const AlignedBytes workspace(cuda::forward_workspace_bytes(problem, outputs));
  DeviceMemory memory;
  memory.add(p);
  memory.add(result.output, true);
  memory.add(result.weights, true);
  memory.add(result.log_sum_exp, true);
  memory.add(result.row_max.data(), rows * sizeof(double), true);
  memory.add(result.row_sum.data(), rows * sizeof(double), true);
  memory.add(rng.data(), sizeof(rng), false);
  memory.add(workspace.data.get(), workspace.size, true);
  cuda::attention_forward(problem, outputs, {rng.data(), 1}, workspace.data.get(), nullptr);
  return result;
}

core::BackwardInputs Upstream::inputs() const {
  core::BackwardInputs inputs;
  if (output.view) inputs.grad_output = output.read();
  if (weights.view) inputs.grad_weights = weights.read();
  if (mode == WeightsMode::kAveraged) inputs.grad_weights.strides[1] = 0;
  if (log_sum_exp.view) inputs.grad_log_sum_exp = log_sum_exp.read();
  inputs.weights_mode = mode;
  inputs.weights_before_dropout = before_dropout;
  return inputs;
}

std::vector<std::uint8_t> run_dropout_mask(const core::AttentionProblem& problem) {
  const auto rng = rng_numbers(problem);
  std::vector<std::uint8_t> keep(
      static_cast<std::size_t>(problem.batch * problem.heads * problem.query_length * problem.key_length), 7);
  DeviceMemory memory;
  memory.add(rng.data(), sizeof(rng), false);
  memory.add(keep.data(), keep.size(), true);
  cuda::dropout_mask(problem, reinterpret_cast<bool*>(keep.data()), {rng.data(), 1}, nullptr);
  return keep;
}

BackwardResult run_backward(const Problem& p, const ForwardResult& forward, const Upstream& upstream) {
  const core::AttentionProblem& problem = p.problem;
  const DType dtype = problem.query.dtype;
  BackwardResult result;
  result.query = make_tensor(dtype, {problem.batch, problem.heads, problem.query_length, problem.head_dim});
  result.key = make_tensor(dtype, {problem.batch, problem.kv_heads, problem.key_length, problem.head_dim});
  result.value = make_tensor(dtype, {problem.batch, problem.kv_heads, problem.key_length, problem.value_dim});
  core::BackwardOutputs outputs;
  outputs.grad_query = result.query.view;
  outputs.grad_key = result.key.view;
  outputs.grad_value = result.value.view;
  if (problem.key_padding_mask && problem.key_padding_mask.dtype != DType::kBool) {
    result.key_padding_mask = make_tensor(problem.key_padding_mask.dtype, p.key_padding_mask.sizes);
    outputs.grad_key_padding_mask = result.key_padding_mask.view;
  }
  if (problem.attn_mask && problem.attn_mask.dtype != DType::kBool) {
    result.attn_mask = make_tensor(problem.attn_mask.dtype, p.attn_mask_sizes);
    outputs.grad_attn_mask = result.attn_mask.view;
    outputs.attn_mask_sizes = p.attn_mask_sizes;
  }
  if (problem.sink) {
    result.sink = make_tensor(problem.sink.dtype, p.sink.sizes);
    outputs.grad_sink = result.sink.view;
    outputs.sink_sizes = {p.sink.sizes[0], p.sink.sizes[1]};
  }
  core::BackwardInputs inputs = upstream.inputs();
  inputs.output = forward.output.read();
  inputs.row_max = forward.row_max.data();
  inputs.row_sum = forward.row_sum.data();
  const auto rng = rng_numbers(problem);
  const AlignedBytes workspace(cuda::backward_workspace_bytes(problem, inputs, outputs));
  DeviceMemory memory;
  memory.add(p);
  memory.add(forward.output, false);
  memory.add(forward.row_max.data(), forward.row_max.size() * sizeof(double), false);
  memory.add(forward.row_sum.data(), forward.row_sum.size() * sizeof(double), false);
  memory.add(upstream.output, false);
  memory.add(upstream.weights, false);
  memory.add(upstream.log_sum_exp, false);
  memory.add(rng.data(), sizeof(rng), false);
  memory.add(workspace.data.get(), workspace.size, true);
  for (const Tensor* tensor :
       {&result.query, &result.key, &result.value, &result.key_padding_mask, &result.attn_mask, &result.sink}) {
    memory.add(*tensor, true);
  }
  cuda::attention_backward(problem, inputs, outputs, {rng.data(), 1}, workspace.data.get(), nullptr);
  return result;
}

double relative_error(const Tensor& actual, const std::vector<double>& expected) {
  double worst = 0.0;
  double largest = 1.0;
  std::size_t i = 0;
  const auto [a, b, c, d] = actual.sizes;
  for (std::int64_t i0 = 0; i0 < a; ++i0) {
    for (std::int64_t i1 = 0; i1 < b; ++i1) {
      for (std::int64_t i2 = 0; i2 < c; ++i2) {
        for (std::int64_t i3 = 0; i3 < d; ++i3, ++i) {
          const double value = actual.get(i0, i1, i2, i3);
          if ((std::isnan(value) && std::isnan(expected[i])) || value == expected[i]) continue;
          if (!std::isfinite(value) || !std::isfinite(expected[i])) return std::numeric_limits<double>::quiet_NaN();
          worst = std::max(worst, std::abs(value - expected[i]));
          largest = std::max(largest, std::abs(expected[i]));
        }
      }
    }
  }
  return worst / largest;
}

double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0x1p-52;
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
    default:
      return 0x1p-23;
  }
}
namespace {

std::vector<double> summed_to(const core::AttentionProblem& problem, const std::array<std::int64_t, 4>& sizes,
                              const std::vector<double>& scores) {
  std::vector<double> sums(static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]), 0.0);
  std::size_t i = 0;
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      for (std::int64_t l = 0; l < problem.query_length; ++l) {
        for (std::int64_t s = 0; s < problem.key_length; ++s, ++i) {
          if (s >= problem.masked_keys()) continue;
          const std::int64_t at =
              ((n % sizes[0] * sizes[1] + h % sizes[1]) * sizes[2] + l % sizes[2]) * sizes[3] + s % sizes[3];
          sums[static_cast<std::size_t>(at)] += scores[i];
        }
      }
    }
  }
  return sums;
}

/// Gradients of the sink (N, H) in its own sizes.
std::vector<double> summed_over_sharers(const Problem& p, const std::vector<double>& grads) {
  const auto [samples, heads, one, other] = p.sink.sizes;
  std::vector<double> sums(static_cast<std::size_t>(samples * heads), 0.0);
  for (std::int64_t n = 0; n < p.problem.batch; ++n) {
    for (std::int64_t h = 0; h < p.problem.heads; ++h) {
      sums[static_cast<std::size_t>(n % samples * heads + h % heads)] +=
          grads[static_cast<std::size_t>(n * p.problem.heads + h)];
    }
  }
  return sums;
}

std::vector<double> averaged_over_heads(const core::AttentionProblem& problem, const std::vector<double>& weights) {
  const std::int64_t matrix = problem.query_length * problem.key_length;
  std::vector<double> average(static_cast<std::size_t>(problem.batch * matrix), 0.0);
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      for (std::int64_t i = 0; i < matrix; ++i) {
        average[static_cast<std::size_t>(n * matrix + i)] +=
            weights[static_cast<std::size_t>((n * problem.heads + h) * matrix + i)] /
            static_cast<double>(problem.heads);
      }
    }
  }
  return average;
}

}  // namespace

void check_case(const Case& c) { check_problem(c, *make_problem(c)); }

void check_problem(const Case& c, const Problem& p) {
  INFO(describe(c));
  const double epsilon = epsilon_of(c.dtype);
  const bool is_short = c.dtype == DType::kBFloat16 || c.dtype == DType::kFloat16;
  const bool is_narrow = std::max(c.D, c.Dv) <= 256;
  REQUIRE((cuda::tensor_cores_refuse(p.problem, false) == nullptr) == (is_short && is_narrow));
  REQUIRE((cuda::tensor_cores_refuse(p.problem, true) == nullptr) == (is_short && is_narrow));
  const core::ReferenceForward expected = core::reference_forward(p.problem);
  const std::vector<double>& weights = c.weights_before_dropout ? expected.probabilities : expected.weights;
  const std::vector<double> average = averaged_over_heads(p.problem, weights);
  const ForwardResult plain = run_forward(p, WeightsMode::kNone);
  CHECK(relative_error(plain.output, expected.output) <= kForwardEpsilons * epsilon);
  // A double's lowest number, added to sums that are kept in float, is that of float.
  const bool clamped = c.attn_mask == AttnMask::kLowest && c.mask_dtype == DType::kFloat64 && c.dtype != c.mask_dtype;
  if (!clamped) {
    CHECK(relative_error(plain.log_sum_exp, expected.log_sum_exp) <=
          kForwardEpsilons * epsilon_of(plain.log_sum_exp.view.dtype));
  }
  const bool is_averaged = c.seed % 2 == 0;
  const WeightsMode mode = is_averaged ? WeightsMode::kAveraged : WeightsMode::kPerHead;
  const ForwardResult weighted = run_forward(p, mode, c.weights_before_dropout);
  CHECK(weighted.output.storage == plain.output.storage);
  CHECK(relative_error(weighted.weights, is_averaged ? average : weights) <= kForwardEpsilons * epsilon);

  std::mt19937 random(c.seed + 1);
  Upstream upstream;
  upstream.output = make_tensor(c.dtype, plain.output.sizes, Layout::kHeadsInside);
  fill_random(upstream.output, random);
  if (c.seed % 3 == 0) {
    upstream.weights = make_tensor(c.dtype, weighted.weights.sizes);
    fill_random(upstream.weights, random);
    upstream.mode = mode;
    upstream.before_dropout = c.weights_before_dropout;
  }
  if (c.seed % 5 < 2) {
    upstream.log_sum_exp = make_tensor(plain.log_sum_exp.view.dtype, plain.log_sum_exp.sizes);
    fill_random(upstream.log_sum_exp, random);
  }
  INFO("through weights " << (c.seed % 3 == 0) << ", averaged " << is_averaged << ", through log-sum-exps "
                          << (c.seed % 5 < 2));
  const core::ReferenceBackward want = core::reference_backward(p.problem, upstream.inputs());
  const BackwardResult got = run_backward(p, plain, upstream);
  CHECK(relative_error(got.query, want.grad_query) <= kBackwardEpsilons * epsilon);
  CHECK(relative_error(got.key, want.grad_key) <= kBackwardEpsilons * epsilon);
  CHECK(relative_error(got.value, want.grad_value) <= kBackwardEpsilons * epsilon);
  if (got.key_padding_mask.view) {
    CHECK(relative_error(got.key_padding_mask, want.grad_key_padding_mask) <=
          kBackwardEpsilons * std::max(epsilon, epsilon_of(c.mask_dtype)));
  }
  if (got.attn_mask.view) {
    CHECK(relative_error(got.attn_mask, summed_to(p.problem, p.attn_mask_sizes, want.grad_scores)) <=
          kBackwardEpsilons * std::max(epsilon, epsilon_of(c.mask_dtype)));
  }
  if (got.sink.view) {
    CHECK(relative_error(got.sink, summed_over_sharers(p, want.grad_sink)) <=
          kBackwardEpsilons * std::max(epsilon, epsilon_of(c.mask_dtype)));
  }
}

}  // namespace fused_mha::test
