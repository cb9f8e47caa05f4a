// SPDX-License-Identifier: BSD-3-Clause
//
// Every instruction set's kernels of additive attention, over random problems of every kind, against the formula in
// double: scores computed here, pair by pair, go through core/reference.h as a mask beside queries of 0.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "catch.h"
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

/// A random problem with a score weight, and the same problem as plain attention over a mask of scores.
struct Additive {
  std::unique_ptr<Problem> p;
  bool weight_per_head = false;
  Tensor score_weight;
  Tensor zero_query, zero_key, scores;
  core::AttentionProblem as_plain;

  const core::AttentionProblem& problem() const { return p->problem; }
  double query(std::int64_t n, std::int64_t h, std::int64_t l, std::int64_t d) const {
    return core::mask_element(problem().query, problem().query.offset(n, h, l, d));
  }
  double key(std::int64_t n, std::int64_t h, std::int64_t s, std::int64_t d) const {
    return core::mask_element(problem().key, problem().key.offset(n, h / problem().heads_per_kv_head(), s, d));
  }
  double weight(std::int64_t h, std::int64_t d) const { return score_weight.get(0, weight_per_head ? h : 0, 0, d); }
};

template <typename Body>
void for_each_pair(const core::AttentionProblem& problem, const Body& body) {
  std::size_t i = 0;
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      for (std::int64_t l = 0; l < problem.query_length; ++l) {
        for (std::int64_t s = 0; s < problem.key_length; ++s) body(n, h, l, s, i++);
      }
    }
  }
}

Additive make_additive(const Case& c, bool weight_per_head, double feature_spread) {
  Additive a;
  a.p = make_problem(c);
  a.weight_per_head = weight_per_head;
  std::mt19937 random(c.seed + 7);
  fill_random(a.p->query, random, feature_spread);
  fill_random(a.p->key, random, feature_spread);
  a.p->problem.scale = 1.0;
  a.score_weight = make_tensor(c.dtype, {1, weight_per_head ? c.H : 1, 1, c.D});
  fill_random(a.score_weight, random);
  if (!weight_per_head) a.score_weight.view.strides[1] = 0;

  a.zero_query = make_tensor(DType::kFloat64, {c.N, c.H, c.L, 1});
  a.zero_key = make_tensor(DType::kFloat64, {c.N, c.Hkv, c.S, 1});
  fill_zero(a.zero_query);
  fill_zero(a.zero_key);
  a.scores = make_tensor(DType::kFloat64, {c.N, c.H, c.L, c.S});
  for_each_pair(a.problem(), [&](std::int64_t n, std::int64_t h, std::int64_t l, std::int64_t s, std::size_t) {
    double score = core::mask_sum(a.problem(), n, h, l, s);
    if (score != -std::numeric_limits<double>::infinity()) {
      for (std::int64_t d = 0; d < c.D; ++d)
        score += a.weight(h, d) * std::tanh(a.query(n, h, l, d) + a.key(n, h, s, d));
    }
    a.scores.set(n, h, l, s, score);
  });
  a.as_plain = a.problem();
  a.as_plain.head_dim = 1;
  a.as_plain.query = a.zero_query.read();
  a.as_plain.key = a.zero_key.read();
  a.as_plain.key_padding_mask = {};
  a.as_plain.attn_mask = a.scores.read();
  a.as_plain.is_causal = false;
  return a;
}

struct ForwardResult {
  Tensor output, weights;
  std::vector<double> row_max, row_sum;  // storage of either accumulation type
};

ForwardResult run_forward(const Additive& a, WeightsMode mode, int thread_count = 1) {
  const core::AttentionProblem& problem = a.problem();
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
  if (mode != WeightsMode::kNone) outputs.weights = result.weights.view;
  cpu::additive_attention_forward(problem, a.score_weight.read(), outputs, threads(thread_count));
  return result;
}

struct BackwardResult {
  Tensor query, key, value, key_padding_mask, attn_mask, score_weight;
};

BackwardResult run_backward(const Additive& a, const ForwardResult& forward, const core::View& grad_output,
                            const core::View& grad_weights, WeightsMode mode, int thread_count = 1) {
  const core::AttentionProblem& problem = a.problem();
  const DType dtype = problem.query.dtype;
  BackwardResult result;
  result.query = make_tensor(dtype, {problem.batch, problem.heads, problem.query_length, problem.head_dim});
  result.key = make_tensor(dtype, {problem.batch, problem.kv_heads, problem.key_length, problem.head_dim});
  result.value = make_tensor(dtype, {problem.batch, problem.kv_heads, problem.key_length, problem.value_dim});
  result.score_weight = make_tensor(dtype, a.score_weight.sizes);
  result.score_weight.view.strides[1] = a.score_weight.view.strides[1];
  core::BackwardOutputs outputs;
  outputs.grad_query = result.query.view;
  outputs.grad_key = result.key.view;
  outputs.grad_value = result.value.view;
  if (problem.key_padding_mask && problem.key_padding_mask.dtype != DType::kBool) {
    result.key_padding_mask = make_tensor(problem.key_padding_mask.dtype, a.p->key_padding_mask.sizes);
    outputs.grad_key_padding_mask = result.key_padding_mask.view;
  }
  if (problem.attn_mask && problem.attn_mask.dtype != DType::kBool) {
    result.attn_mask = make_tensor(problem.attn_mask.dtype, a.p->attn_mask_sizes);
    outputs.grad_attn_mask = result.attn_mask.view;
    outputs.attn_mask_sizes = a.p->attn_mask_sizes;
  }
  core::BackwardInputs inputs;
  inputs.grad_output = grad_output;
  inputs.grad_weights = grad_weights;
  inputs.weights_mode = mode;
  inputs.output = forward.output.read();
  inputs.row_max = forward.row_max.data();
  inputs.row_sum = forward.row_sum.data();
  cpu::additive_attention_backward(problem, a.score_weight.read(), inputs, outputs, result.score_weight.view,
                                   threads(thread_count));
  return result;
}

/// Gradients by the formula, from those of the scores.
struct Expected {
  std::vector<double> query, key, key_padding_mask, attn_mask, score_weight;
};

Expected expected_gradients(const Additive& a, const std::vector<double>& score_grads) {
  const core::AttentionProblem& p = a.problem();
  const std::array<std::int64_t, 4>& sizes = a.p->attn_mask_sizes;
  Expected e;
  e.query.assign(static_cast<std::size_t>(p.batch * p.heads * p.query_length * p.head_dim), 0.0);
  e.key.assign(static_cast<std::size_t>(p.batch * p.kv_heads * p.key_length * p.head_dim), 0.0);
  e.key_padding_mask.assign(static_cast<std::size_t>(p.batch * p.masked_keys()), 0.0);
  e.attn_mask.assign(static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]), 0.0);
  e.score_weight.assign(static_cast<std::size_t>((a.weight_per_head ? p.heads : 1) * p.head_dim), 0.0);
  for_each_pair(p, [&](std::int64_t n, std::int64_t h, std::int64_t l, std::int64_t s, std::size_t i) {
    const double grad = score_grads[i];
    if (!core::is_visible(p, n, h, l, s)) return;
    if (s < p.masked_keys()) {
      e.key_padding_mask[static_cast<std::size_t>(n * p.masked_keys() + s)] += grad;
      e.attn_mask[static_cast<std::size_t>(
          ((n % sizes[0] * sizes[1] + h % sizes[1]) * sizes[2] + l % sizes[2]) * sizes[3] + s % sizes[3])] += grad;
    }
    const std::int64_t kv_head = h / p.heads_per_kv_head();
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      const double tanh = std::tanh(a.query(n, h, l, d) + a.key(n, h, s, d));
      const double of_sum = grad * a.weight(h, d) * (1.0 - tanh * tanh);
      e.query[static_cast<std::size_t>(((n * p.heads + h) * p.query_length + l) * p.head_dim + d)] += of_sum;
      e.key[static_cast<std::size_t>(((n * p.kv_heads + kv_head) * p.key_length + s) * p.head_dim + d)] += of_sum;
      e.score_weight[static_cast<std::size_t>((a.weight_per_head ? h : 0) * p.head_dim + d)] += grad * tanh;
    }
  });
  return e;
}

std::vector<double> averaged_over_heads(const core::AttentionProblem& problem, const std::vector<double>& weights) {
  const std::int64_t matrix = problem.query_length * problem.key_length;
  std::vector<double> average(static_cast<std::size_t>(problem.batch * matrix), 0.0);
  for_each_pair(problem, [&](std::int64_t n, std::int64_t, std::int64_t l, std::int64_t s, std::size_t i) {
    average[static_cast<std::size_t>(n * matrix + l * problem.key_length + s)] +=
        weights[i] / static_cast<double>(problem.heads);
  });
  return average;
}

/// Largest difference to the expected values relative to their largest magnitude, or to 1 where that is smaller; NaN
/// where either side alone is NaN.
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
          if (std::isnan(value) && std::isnan(expected[i])) continue;
          if (std::isnan(value) || std::isnan(expected[i])) return std::numeric_limits<double>::quiet_NaN();
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
constexpr double kForwardEpsilons = 32.0;        // a score is a sum of up to 80 products whose errors do not cancel
constexpr double kBackwardEpsilons = 256.0;      // gradients that cancel: a row with one key, many rows a sum
constexpr double kScoreWeightEpsilons = 1024.0;  // a sum over all samples and rows of what cancels in each row

void check_case(const Case& c, bool weight_per_head, double feature_spread) {
  INFO(describe(c) << " weight per head " << weight_per_head << " feature spread " << feature_spread);
  const Additive a = make_additive(c, weight_per_head, feature_spread);
  const core::AttentionProblem& problem = a.problem();
  const double epsilon = epsilon_of(c.dtype);
  const core::ReferenceForward expected = core::reference_forward(a.as_plain);
  const ForwardResult plain = run_forward(a, WeightsMode::kNone);
  const ForwardResult averaged = run_forward(a, WeightsMode::kAveraged);
  const ForwardResult per_head = run_forward(a, WeightsMode::kPerHead, 2);
  CHECK(relative_error(plain.output, expected.output) <= kForwardEpsilons * epsilon);
  CHECK(plain.output.storage == averaged.output.storage);
  CHECK(plain.output.storage == per_head.output.storage);
  CHECK(plain.output.storage == run_forward(a, WeightsMode::kNone, 3).output.storage);
  CHECK(relative_error(averaged.weights, averaged_over_heads(problem, expected.weights)) <= kForwardEpsilons * epsilon);
  CHECK(relative_error(per_head.weights, expected.weights) <= kForwardEpsilons * epsilon);

  std::mt19937 random(c.seed + 1);
  Tensor grad_output = make_tensor(c.dtype, plain.output.sizes, Layout::kHeadsInside);
  Tensor grad_weights = make_tensor(c.dtype, averaged.weights.sizes);
  fill_random(grad_output, random);
  fill_random(grad_weights, random);
  for (const WeightsMode mode : {WeightsMode::kNone, WeightsMode::kAveraged}) {
    INFO("weights mode " << static_cast<int>(mode));
    const core::View weights_grad = mode == WeightsMode::kNone ? core::View{} : grad_weights.read();
    core::BackwardInputs gradients;
    gradients.grad_output = grad_output.read();
    gradients.grad_weights = weights_grad;
    gradients.weights_mode = mode;
    const core::ReferenceBackward of_scores = core::reference_backward(a.as_plain, gradients);
    const Expected want = expected_gradients(a, of_scores.grad_scores);
    const BackwardResult got = run_backward(a, plain, grad_output.read(), weights_grad, mode);
    CHECK(relative_error(got.query, want.query) <= kBackwardEpsilons * epsilon);
    CHECK(relative_error(got.key, want.key) <= kBackwardEpsilons * epsilon);
    CHECK(relative_error(got.value, of_scores.grad_value) <= kBackwardEpsilons * epsilon);
    CHECK(relative_error(got.score_weight, want.score_weight) <= kScoreWeightEpsilons * epsilon);
    const double mask_epsilon = std::max(epsilon, epsilon_of(c.mask_dtype));
    if (got.key_padding_mask.view) {
      CHECK(relative_error(got.key_padding_mask, want.key_padding_mask) <= kBackwardEpsilons * mask_epsilon);
    }
    if (got.attn_mask.view) {
      CHECK(relative_error(got.attn_mask, want.attn_mask) <= kBackwardEpsilons * mask_epsilon);
    }
    const BackwardResult again = run_backward(a, plain, grad_output.read(), weights_grad, mode, 3);
    CHECK(got.query.storage == again.query.storage);
    CHECK(got.key.storage == again.key.storage);
    CHECK(got.value.storage == again.value.storage);
    CHECK(got.score_weight.storage == again.score_weight.storage);
    CHECK(got.attn_mask.storage == again.attn_mask.storage);
  }
}

Case random_case(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<std::int64_t> choices) {
    return *(choices.begin() + std::uniform_int_distribution<std::size_t>(0, choices.size() - 1)(random));
  };
  Case c;
  c.N = pick({1, 2, 3});
  c.Hkv = pick({1, 2});
  c.H = c.Hkv * pick({1, 1, 3});
  c.L = pick({1, 2, 3, 15, 31, 33, 48, 49, 65, 97});
  c.S = pick({1, 2, 3, 15, 31, 33, 65, 96, 97, 128, 130, 260});
  c.D = pick({1, 3, 8, 16, 20, 33, 80});
  c.Dv = pick({1, 4, 7, 16, 40, 72, 130});
  c.dtype = static_cast<DType>(pick({0, 0, 0, 1, 2, 3}));
  c.layout = static_cast<Layout>(pick({0, 1, 2}));  // not kShared: query, key and value get numbers of their own
  c.padding = static_cast<Padding>(pick({0, 1, 2, 3, 4, 5, 6}));
  c.attn_mask = static_cast<AttnMask>(pick({0, 1, 2, 3, 4, 5, 6, 7, 8}));
  c.mask_dtype = static_cast<DType>(pick({0, 0, 1, 2, 3}));
  // -65504 is finite, but a score beside it has no digits left in float: nothing to compare.
  if (c.attn_mask == AttnMask::kLowest && c.mask_dtype == DType::kFloat16) c.mask_dtype = DType::kFloat32;
  c.is_causal = pick({0, 0, 1}) == 1;
  c.dropout_p = pick({0, 0, 0, 1}) == 1 ? 0.3 : 0.0;
  c.seed = random();
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

TEST_CASE("random additive problems agree with the formula on every instruction set") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const IsaGuard guard(isa);
    INFO("instruction set " << cpu::isa_name(isa));
    std::mt19937 random(4711 + static_cast<unsigned>(isa));
    for (int i = 0; i < 40; ++i) {
      // Features around 30 are beyond the range of the factors.
      check_case(random_case(random), i % 2 == 0, i % 4 == 3 ? 30.0 : 1.0);
    }
  }
}

TEST_CASE("many additive keys over split work agree with the formula") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const IsaGuard guard(isa);
    INFO("instruction set " << cpu::isa_name(isa));
    check_case({.N = 1, .H = 1, .Hkv = 1, .L = 60, .S = 900, .D = 8, .Dv = 16}, false, 1.0);
    check_case({.N = 1, .H = 2, .Hkv = 1, .L = 2, .S = 500, .D = 20, .Dv = 16, .padding = Padding::kScattered}, true,
               1.0);
  }
}

TEST_CASE("what is hidden from an additive score is never read") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const IsaGuard guard(isa);
    INFO("instruction set " << cpu::isa_name(isa));
    const Case c{.N = 1, .H = 1, .Hkv = 1, .L = 60, .S = 70, .D = 8, .Dv = 8, .is_causal = true, .seed = 3};
    const Additive clean = make_additive(c, false, 1.0);
    const Additive dirty = make_additive(c, false, 1.0);
    // Keys from 50 on are hidden from rows below 50, in the same tile as rows that see them.
    dirty.p->value.set(0, 0, 50, 3, std::numeric_limits<double>::quiet_NaN());
    dirty.p->key.set(0, 0, 52, 2, std::numeric_limits<double>::quiet_NaN());
    dirty.p->key.set(0, 0, 55, 2, -std::numeric_limits<double>::infinity());
    const ForwardResult expected = run_forward(clean, WeightsMode::kPerHead);
    const ForwardResult actual = run_forward(dirty, WeightsMode::kPerHead);
    Tensor grad = make_tensor(DType::kFloat32, expected.output.sizes);
    for (std::int64_t l = 0; l < 50; ++l) {
      for (std::int64_t d = 0; d < 8; ++d) {
        grad.set(0, 0, l, d, 1.0 + static_cast<double>(d * d));
        REQUIRE(actual.output.get(0, 0, l, d) == Approx(expected.output.get(0, 0, l, d)).margin(1e-5));
      }
    }
    CHECK(std::isnan(actual.output.get(0, 0, 50, 3)));
    CHECK(std::isnan(actual.output.get(0, 0, 52, 0)));
    const BackwardResult want = run_backward(clean, expected, grad.read(), {}, WeightsMode::kNone);
    const BackwardResult got = run_backward(dirty, actual, grad.read(), {}, WeightsMode::kNone);
    for (std::int64_t l = 0; l < 50; ++l) {
      for (std::int64_t d = 0; d < 8; ++d) {
        REQUIRE(got.query.get(0, 0, l, d) == Approx(want.query.get(0, 0, l, d)).margin(1e-4));
      }
    }
  }
}

TEST_CASE("saturated and opposite features keep their scores") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    const IsaGuard guard(isa);
    INFO("instruction set " << cpu::isa_name(isa));
    // Beside each other's factors 60 and -60.5 are infinite and 0, and their sum is an ordinary -0.5.
    for (const double offset : {0.0, 20.0, 60.0, 1e4}) {
      const Case c{.N = 1, .H = 1, .Hkv = 1, .L = 5, .S = 40, .D = 3, .Dv = 2, .dtype = DType::kFloat64, .seed = 5};
      Additive a = make_additive(c, false, 1.0);
      const core::ReferenceForward expected = core::reference_forward(a.as_plain);
      for (std::int64_t d = 0; d < 3; ++d) {
        for (std::int64_t l = 0; l < 5; ++l) a.p->query.set(0, 0, l, d, a.query(0, 0, l, d) + offset);
        for (std::int64_t s = 0; s < 40; ++s) a.p->key.set(0, 0, s, d, a.key(0, 0, s, d) - offset);
      }
      CHECK(relative_error(run_forward(a, WeightsMode::kNone).output, expected.output) <=
            64.0 * (1.0 + offset) * 0x1p-52);
    }
  }
}

}  // namespace fused_mha::test
