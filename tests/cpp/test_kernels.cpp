// SPDX-License-Identifier: BSD-3-Clause
//
// Every instruction set's kernels against core/reference.h, over random problems of every kind.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "catch.h"
#include "core/dropout.h"
#include "core/mask.h"
#include "core/reference.h"
#include "cpu/run.h"
#include "random_problem.h"

namespace fused_mha::test {
namespace {

using core::DType;
using core::WeightsMode;

core::Parallel threads(int count) {
  core::Parallel parallel;
  parallel.threads = count;
  parallel.run = [](int workers, const std::function<void(int)>& body) {
    std::vector<std::thread> pool;
    for (int worker = 0; worker < workers; ++worker) pool.emplace_back(body, worker);
    for (std::thread& thread : pool) thread.join();
  };
  return parallel;
}

struct ForwardResult {
  Tensor output;
  Tensor weights;
  Tensor log_sum_exp;
  std::vector<double> row_max;  // storage of either accumulation type
  std::vector<double> row_sum;
};

ForwardResult run_forward(const Problem& p, WeightsMode mode, int thread_count = 1, bool before_dropout = false) {
  const core::AttentionProblem& problem = p.problem;
  ForwardResult result;
  result.output =
      make_tensor(problem.query.dtype, {problem.batch, problem.heads, problem.query_length, problem.value_dim});
  const std::int64_t weight_heads = mode == WeightsMode::kPerHead ? problem.heads : 1;
  result.weights =
      make_tensor(problem.query.dtype, {problem.batch, weight_heads, problem.query_length, problem.key_length});
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
  cpu::attention_forward(problem, outputs, threads(thread_count));
  return result;
}

struct BackwardResult {
  Tensor query, key, value, key_padding_mask, attn_mask, sink;
};

/// `given` has the gradients; what the forward pass left is added here.
BackwardResult run_backward(const Problem& p, const ForwardResult& forward, const core::BackwardInputs& given,
                            int thread_count = 1) {
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
  core::BackwardInputs inputs = given;
  inputs.output = forward.output.read();
  inputs.row_max = forward.row_max.data();
  inputs.row_sum = forward.row_sum.data();
  cpu::attention_backward(problem, inputs, outputs, threads(thread_count));
  return result;
}

/// Largest difference to the expected values, relative to their largest magnitude, or to 1, the size of the random
/// inputs, where cancellation makes them smaller. NaN where either side alone is NaN, or infinite.
/// An infinity must meet its like.
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

/// The same bits in every element; a tensor's storage holds a byte or two more.
bool equal_elements(const Tensor& a, const Tensor& b) {
  const auto bytes =
      static_cast<std::size_t>(a.sizes[0] * a.sizes[1] * a.sizes[2] * a.sizes[3]) * core::size_of(a.view.dtype);
  return std::equal(a.storage.begin(), a.storage.begin() + static_cast<std::ptrdiff_t>(bytes), b.storage.begin());
}

/// Units in which errors are allowed: the storage's epsilon.
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
constexpr double kForwardEpsilons = 16.0;
constexpr double kBackwardEpsilons = 256.0;  // gradients that cancel: a row with one key, many rows a sum

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

void check_case(const Case& c) {
  INFO(describe(c));
  const std::unique_ptr<Problem> p = make_problem(c);
  const double epsilon = epsilon_of(c.dtype);
  const core::ReferenceForward expected = core::reference_forward(p->problem);
  const std::vector<double>& weights = c.weights_before_dropout ? expected.probabilities : expected.weights;
  const std::vector<double> average = averaged_over_heads(p->problem, weights);
  const ForwardResult plain = run_forward(*p, WeightsMode::kNone);
  const ForwardResult averaged = run_forward(*p, WeightsMode::kAveraged, 1, c.weights_before_dropout);
  const ForwardResult per_head = run_forward(*p, WeightsMode::kPerHead, 2, c.weights_before_dropout);
  CHECK(relative_error(plain.output, expected.output) <= kForwardEpsilons * epsilon);
  CHECK(averaged.output.storage == per_head.output.storage);
  // Without weights the keys of few rows are split over threads, which changes the order of sums.
  if (c.L > 4) CHECK(plain.output.storage == averaged.output.storage);
  CHECK(relative_error(averaged.weights, average) <= kForwardEpsilons * epsilon);
  CHECK(relative_error(per_head.weights, weights) <= kForwardEpsilons * epsilon);
  // A double's lowest number, added to sums that are kept in float, is that of float.
  const bool clamped = c.attn_mask == AttnMask::kLowest && c.mask_dtype == DType::kFloat64 && c.dtype != c.mask_dtype;
  const double statistics_epsilon = epsilon_of(plain.log_sum_exp.view.dtype);
  if (!clamped) {
    CHECK(relative_error(plain.log_sum_exp, expected.log_sum_exp) <= kForwardEpsilons * statistics_epsilon);
  }

  std::mt19937 random(c.seed + 1);
  Tensor grad_output = make_tensor(c.dtype, plain.output.sizes, Layout::kHeadsInside);
  Tensor grad_weights = make_tensor(c.dtype, averaged.weights.sizes);
  fill_random(grad_output, random);
  fill_random(grad_weights, random);
  Tensor grad_log_sum_exp = make_tensor(plain.log_sum_exp.view.dtype, plain.log_sum_exp.sizes);
  fill_random(grad_log_sum_exp, random);
  for (const WeightsMode mode : {WeightsMode::kNone, WeightsMode::kAveraged}) {
    INFO("weights mode " << static_cast<int>(mode));
    core::BackwardInputs inputs;
    inputs.grad_output = grad_output.read();
    inputs.weights_mode = mode;
    if (mode == WeightsMode::kNone) {
      inputs.grad_log_sum_exp = grad_log_sum_exp.read();
    } else {
      inputs.grad_weights = grad_weights.read();
      inputs.weights_before_dropout = c.weights_before_dropout;
    }
    const core::ReferenceBackward want = core::reference_backward(p->problem, inputs);
    const BackwardResult got = run_backward(*p, plain, inputs);
    CHECK(relative_error(got.query, want.grad_query) <= kBackwardEpsilons * epsilon);
    CHECK(relative_error(got.key, want.grad_key) <= kBackwardEpsilons * epsilon);
    CHECK(relative_error(got.value, want.grad_value) <= kBackwardEpsilons * epsilon);
    if (got.key_padding_mask.view) {
      CHECK(relative_error(got.key_padding_mask, want.grad_key_padding_mask) <=
            kBackwardEpsilons * std::max(epsilon, epsilon_of(c.mask_dtype)));
    }
    if (got.attn_mask.view) {
      CHECK(relative_error(got.attn_mask, summed_to(p->problem, p->attn_mask_sizes, want.grad_scores)) <=
            kBackwardEpsilons * std::max(epsilon, epsilon_of(c.mask_dtype)));
    }
    if (got.sink.view) {
      std::vector<double> sums(static_cast<std::size_t>(p->sink.sizes[0] * p->sink.sizes[1]), 0.0);
      for (std::int64_t n = 0; n < c.N; ++n) {
        for (std::int64_t h = 0; h < c.H; ++h) {
          const std::int64_t at = n % p->sink.sizes[0] * p->sink.sizes[1] + h % p->sink.sizes[1];
          sums[static_cast<std::size_t>(at)] += want.grad_sink[static_cast<std::size_t>(n * c.H + h)];
        }
      }
      CHECK(relative_error(got.sink, sums) <= kBackwardEpsilons * std::max(epsilon, epsilon_of(c.mask_dtype)));
    }
    const BackwardResult again = run_backward(*p, plain, inputs, 3);
    CHECK(got.query.storage == again.query.storage);
    CHECK(got.key.storage == again.key.storage);
    CHECK(got.value.storage == again.value.storage);
    CHECK(got.attn_mask.storage == again.attn_mask.storage);
    CHECK(got.sink.storage == again.sink.storage);
  }
}

std::int64_t pick_from(std::mt19937& random, std::initializer_list<std::int64_t> choices) {
  return *(choices.begin() + std::uniform_int_distribution<std::size_t>(0, choices.size() - 1)(random));
}

Case random_case(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<std::int64_t> choices) { return pick_from(random, choices); };
  Case c;
  c.N = pick({1, 2, 3});
  c.Hkv = pick({1, 2});
  c.H = c.Hkv * pick({1, 1, 3});
  c.L = pick({1, 2, 3, 15, 31, 33, 47, 48, 49, 65, 97, 130});
  c.S = pick({1, 2, 3, 15, 31, 32, 33, 65, 95, 96, 97, 128, 130, 260, 300});
  c.D = pick({1, 3, 5, 8, 16, 20, 32, 33, 64, 80});
  c.Dv = pick({1, 4, 7, 16, 24, 32, 40, 64, 72, 100, 130});
  c.dtype = static_cast<DType>(pick({0, 0, 0, 1, 2, 3}));
  c.layout = static_cast<Layout>(pick({0, 1, 2, 3}));
  c.padding = static_cast<Padding>(pick({0, 1, 2, 3, 4, 5, 6}));
  c.attn_mask = static_cast<AttnMask>(pick({0, 1, 2, 3, 4, 5, 6, 7, 8}));
  c.mask_dtype = static_cast<DType>(pick({0, 0, 1, 2, 3}));
  // -65504 is finite, but a score beside it has no digits left in float: nothing to compare.
  if (c.attn_mask == AttnMask::kLowest && c.mask_dtype == DType::kFloat16) c.mask_dtype = DType::kFloat32;
  c.is_causal = pick({0, 0, 1}) == 1;
  c.always_visible_keys = std::min(pick({0, 0, 0, 1, 2}), c.S);
  c.dropout_p = std::uniform_int_distribution<int>(0, 3)(random) == 0 ? 0.3 : 0.0;
  c.seed = random();
  std::mt19937 options(c.seed);
  const auto option = [&](std::initializer_list<std::int64_t> choices) { return pick_from(options, choices); };
  c.causal_offset = option({0, 0, c.S - c.always_visible_keys - c.L, 1, -5});
  c.sink = static_cast<Sink>(option({0, 0, 1, 2, 3}));
  c.weights_before_dropout = option({0, 1}) == 1;
  return c;
}

class IsaGuard {
 public:
  explicit IsaGuard(cpu::Isa isa) : before_(cpu::active_isa()) { cpu::set_active_isa(isa); }
  ~IsaGuard() { cpu::set_active_isa(before_); }
  IsaGuard(const IsaGuard&) = delete;
  IsaGuard& operator=(const IsaGuard&) = delete;

 private:
  cpu::Isa before_;
};

}  // namespace

TEST_CASE("random problems agree with the reference on every instruction set") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const IsaGuard guard(isa);
    INFO("instruction set " << cpu::isa_name(isa));
    std::mt19937 random(20240 + static_cast<unsigned>(isa));
    for (int i = 0; i < 60; ++i) {
      Case c = random_case(random);
      // All that this set adds; other dtypes have the kernels of avx512.
      if (isa == cpu::Isa::kAvx512Bf16) c.dtype = DType::kBFloat16;
      check_case(c);
    }
  }
}

TEST_CASE("long rows over many steps agree with the reference") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const IsaGuard guard(isa);
    INFO("instruction set " << cpu::isa_name(isa));
    Case c{.N = 1, .H = 2, .Hkv = 1, .L = 200, .S = 1000, .D = 16, .Dv = 16};
    check_case(c);
    c.padding = Padding::kScattered;
    c.is_causal = true;
    check_case(c);
  }
}

TEST_CASE("bfloat16 over many blocks and steps agrees with the reference") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const IsaGuard guard(isa);
    INFO("instruction set " << cpu::isa_name(isa));
    // Odd sizes, so that pairs along every dimension miss a partner; heads of keys that queries share.
    Case c{.N = 1, .H = 2, .Hkv = 1, .L = 151, .S = 233, .D = 37, .Dv = 51, .dtype = DType::kBFloat16};
    for (const Padding padding : {Padding::kNone, Padding::kLeft, Padding::kScattered, Padding::kBiasAndInfinity}) {
      c.padding = padding;
      c.layout = padding == Padding::kLeft ? Layout::kHeadsInside : Layout::kStrided;
      c.is_causal = padding == Padding::kScattered;
      c.dropout_p = padding == Padding::kLeft ? 0.2 : 0.0;
      check_case(c);
    }
  }
}

TEST_CASE("few rows over many keys agree with the reference") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const IsaGuard guard(isa);
    INFO("instruction set " << cpu::isa_name(isa));
    for (const std::int64_t rows : {1, 2, 3, 4}) {
      for (const Padding padding : {Padding::kNone, Padding::kLeft, Padding::kScattered, Padding::kBiasAndInfinity}) {
        Case c{.N = 2, .H = 4, .Hkv = 2, .L = rows, .S = 1700, .D = 20, .Dv = 70, .padding = padding};
        c.dtype = rows == 2 ? DType::kBFloat16 : rows == 3 ? DType::kFloat64 : DType::kFloat32;
        c.layout = Layout::kHeadsInside;
        c.dropout_p = rows == 4 ? 0.25 : 0.0;
        c.sink = rows == 1 ? Sink::kPerHead : Sink::kNone;
        c.is_causal = rows == 3;
        c.causal_offset = c.S - c.L;
        check_case(c);
      }
    }
  }
}

TEST_CASE("what is hidden is never read") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const IsaGuard guard(isa);
      INFO("instruction set " << cpu::isa_name(isa) << " dtype " << static_cast<int>(dtype));
      Case c{.N = 1, .H = 1, .Hkv = 1, .L = 61, .S = 71, .D = 7, .Dv = 8, .dtype = dtype, .is_causal = true, .seed = 3};
      const std::unique_ptr<Problem> clean = make_problem(c);
      const std::unique_ptr<Problem> dirty = make_problem(c);
      // Key 50 is hidden from rows below 50, in the same tile as rows that see it.
      dirty->value.set(0, 0, 50, 3, std::numeric_limits<double>::quiet_NaN());
      dirty->key.set(0, 0, 55, 2, std::numeric_limits<double>::infinity());
      const ForwardResult expected = run_forward(*clean, WeightsMode::kNone);
      const ForwardResult actual = run_forward(*dirty, WeightsMode::kNone);
      Tensor grad = make_tensor(dtype, expected.output.sizes);
      for (std::int64_t l = 0; l < 50; ++l) {
        for (std::int64_t d = 0; d < 8; ++d) {
          grad.set(0, 0, l, d, 1.0 + static_cast<double>(d));
          REQUIRE(actual.output.get(0, 0, l, d) ==
                  Approx(expected.output.get(0, 0, l, d)).epsilon(kForwardEpsilons * epsilon_of(dtype)));
        }
      }
      CHECK(std::isnan(actual.output.get(0, 0, 50, 3)));
      core::BackwardInputs inputs;
      inputs.grad_output = grad.read();
      const BackwardResult grads = run_backward(*dirty, actual, inputs);
      const BackwardResult clean_grads = run_backward(*clean, expected, inputs);
      for (std::int64_t l = 0; l < 50; ++l) {
        for (std::int64_t d = 0; d < 7; ++d) {
          REQUIRE(grads.query.get(0, 0, l, d) ==
                  Approx(clean_grads.query.get(0, 0, l, d)).margin(kForwardEpsilons * epsilon_of(dtype)));
        }
      }
    }
  }
}

TEST_CASE("several problems as one call have the results that each has alone") {
  std::mt19937 random(31);
  for (const int thread_count : {1, 3}) {
    std::vector<Case> cases;
    for (int i = 0; i < 7; ++i) {
      Case c = random_case(random);
      c.dtype = DType::kFloat32;
      cases.push_back(c);
    }
    std::vector<std::unique_ptr<Problem>> problems;
    std::vector<ForwardResult> alone;
    std::vector<BackwardResult> alone_backward;
    std::vector<ForwardResult> together;
    std::vector<BackwardResult> together_backward;
    std::vector<Tensor> grads;
    std::vector<core::AttentionProblem> views;
    std::vector<core::ForwardOutputs> outputs;
    std::vector<core::BackwardInputs> inputs;
    std::vector<core::BackwardOutputs> gradients;
    for (const Case& c : cases) {
      problems.push_back(make_problem(c));
      const Problem& p = *problems.back();
      alone.push_back(run_forward(p, WeightsMode::kNone));
      grads.push_back(make_tensor(c.dtype, alone.back().output.sizes));
      fill_random(grads.back(), random);
      core::BackwardInputs given;
      given.grad_output = grads.back().read();
      alone_backward.push_back(run_backward(p, alone.back(), given));
      together.push_back(run_forward(p, WeightsMode::kNone));
      together_backward.push_back(run_backward(p, alone.back(), given));
    }
    for (std::size_t i = 0; i < cases.size(); ++i) {
      ForwardResult& result = together[i];
      BackwardResult& gradient = together_backward[i];
      for (Tensor* tensor : {&result.output, &gradient.query, &gradient.key, &gradient.value}) {
        std::fill(tensor->storage.begin(), tensor->storage.end(), std::byte{0xEE});
      }
      views.push_back(problems[i]->problem);
      core::ForwardOutputs output{};
      output.output = result.output.view;
      output.row_max = result.row_max.data();
      output.row_sum = result.row_sum.data();
      outputs.push_back(output);
      core::BackwardInputs input;
      input.grad_output = grads[i].read();
      input.output = alone[i].output.read();
      input.row_max = alone[i].row_max.data();
      input.row_sum = alone[i].row_sum.data();
      inputs.push_back(input);
      core::BackwardOutputs wanted;
      wanted.grad_query = gradient.query.view;
      wanted.grad_key = gradient.key.view;
      wanted.grad_value = gradient.value.view;
      gradients.push_back(wanted);
    }
    cpu::attention_forward(views, outputs, threads(thread_count));
    cpu::attention_backward(views, inputs, gradients, threads(thread_count));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      INFO(describe(cases[i]));
      CHECK(equal_elements(together[i].output, alone[i].output));
      CHECK(equal_elements(together_backward[i].query, alone_backward[i].query));
      CHECK(equal_elements(together_backward[i].key, alone_backward[i].key));
      CHECK(equal_elements(together_backward[i].value, alone_backward[i].value));
    }
  }
}

TEST_CASE("a description counts what the masks leave") {
  std::mt19937 random(11);
  for (int i = 0; i < 200; ++i) {
    const Case c = random_case(random);
    INFO(describe(c));
    const std::unique_ptr<Problem> p = make_problem(c);
    const core::AttentionProblem& problem = p->problem;
    const cpu::ForwardDescription found = cpu::describe_forward(problem, WeightsMode::kNone, threads(2));
    CHECK(found.isa == cpu::active_isa());
    CHECK(found.few_rows == (c.L <= found.few_rows_limit));
    CHECK((found.key_splits == 1 || found.few_rows));
    CHECK((found.threads == 1 || found.multiply_adds >= found.serial_multiply_adds));
    CHECK(found.all_keys == c.N * c.S);

    std::int64_t kept = 0;
    std::int64_t tiles = 0;
    std::int64_t no_element_visible = 0;  // tiles of which no element is visible; some the plan may not know
    for (std::int64_t n = 0; n < c.N; ++n) {
      std::vector<std::int64_t> keys;
      for (std::int64_t s = 0; s < c.S; ++s) {
        const bool masked = problem.key_padding_mask && s < problem.masked_keys();
        const double value =
            masked ? core::mask_element(problem.key_padding_mask, problem.key_padding_mask.offset(n, 0, 0, s)) : 0.0;
        if (value != -std::numeric_limits<double>::infinity()) keys.push_back(s);
      }
      const auto count = static_cast<std::int64_t>(keys.size());
      kept += count;
      for (std::int64_t h = 0; h < c.H; ++h) {
        for (std::int64_t row = 0; row < c.L; row += found.tile_rows) {
          for (std::int64_t key = 0; key < count; key += found.tile_keys) {
            bool visible = false;
            for (std::int64_t l = row; l < std::min(c.L, row + found.tile_rows); ++l) {
              for (std::int64_t k = key; k < std::min(count, key + found.tile_keys); ++k) {
                visible = visible || core::is_visible(problem, n, h, l, keys[static_cast<std::size_t>(k)]);
              }
            }
            ++tiles;
            no_element_visible += visible ? 0 : 1;
          }
        }
      }
    }
    CHECK(found.kept_keys == kept);
    CHECK(found.hidden_tiles + found.free_tiles + found.mixed_tiles == tiles);
    CHECK(found.hidden_tiles <= no_element_visible);
    if (!problem.attn_mask && !c.is_causal) CHECK(found.free_tiles == (found.has_padding_bias ? 0 : tiles));
  }
}

TEST_CASE("the dropout mask is the same on every instruction set") {
  Case c{.N = 2, .H = 3, .Hkv = 1, .L = 5, .S = 300, .D = 1, .Dv = 1};
  c.dropout_p = 0.37;
  const std::unique_ptr<Problem> p = make_problem(c);
  const auto count = static_cast<std::size_t>(c.N * c.H * c.L * c.S);
  const auto key = core::dropout_key(p->problem.rng);
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const IsaGuard guard(isa);
    const std::unique_ptr<bool[]> keep(new bool[count]);
    cpu::dropout_mask(p->problem, keep.get(), threads(2));
    std::size_t i = 0;
    for (std::int64_t n = 0; n < c.N; ++n) {
      for (std::int64_t h = 0; h < c.H; ++h) {
        for (std::int64_t l = 0; l < c.L; ++l) {
          for (std::int64_t s = 0; s < c.S; ++s, ++i) {
            REQUIRE(keep[i] == core::dropout_keeps(key, core::dropout_threshold(0.37), n, h, l, s));
          }
        }
      }
    }
  }
}

}  // namespace fused_mha::test
