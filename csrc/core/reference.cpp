// SPDX-License-Identifier: BSD-3-Clause
#include "core/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dropout.h"
#include "core/mask.h"

namespace fused_mha::core {
namespace {

std::size_t index4(std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3, std::int64_t n1, std::int64_t n2,
                   std::int64_t n3) {
  return static_cast<std::size_t>(((i0 * n1 + i1) * n2 + i2) * n3 + i3);
}

double element(const View& view, std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
  return mask_element(view, view.offset(i0, i1, i2, i3));
}

template <typename Body>
void for_each_row(const AttentionProblem& problem, const Body& body) {
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      for (std::int64_t l = 0; l < problem.query_length; ++l) body(n, h, l, h / problem.heads_per_kv_head());
    }
  }
}

struct Row {
  std::vector<double> probabilities;
  double sink_weight = 0.0;
  double log_sum_exp = 0.0;
};

/// Softmax over the visible keys and the sink of one row.
Row softmax_of_row(const AttentionProblem& problem, std::int64_t n, std::int64_t h, std::int64_t l) {
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  const std::int64_t kv_head = h / problem.heads_per_kv_head();
  const double sink = problem.sink ? element(problem.sink, n, h, 0, 0) : kHidden;
  Row row;
  std::vector<double>& scores = row.probabilities;
  scores.assign(static_cast<std::size_t>(problem.key_length), 0.0);
  std::vector<bool> visible(scores.size());
  double largest = sink;
  for (std::int64_t s = 0; s < problem.key_length; ++s) {
    const auto i = static_cast<std::size_t>(s);
    const double added = mask_sum(problem, n, h, l, s);
    visible[i] = added != kHidden;
    if (!visible[i]) continue;
    double dot = 0.0;
    for (std::int64_t d = 0; d < problem.head_dim; ++d) {
      dot += element(problem.query, n, h, l, d) * element(problem.key, n, kv_head, s, d);
    }
    scores[i] = problem.scale * dot + added;
    largest = std::max(largest, scores[i]);
  }
  row.sink_weight = sink == kHidden ? 0.0 : std::exp(sink - largest);
  double sum = row.sink_weight;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i] = visible[i] ? std::exp(scores[i] - largest) : 0.0;
    sum += scores[i];
  }
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (visible[i]) scores[i] /= sum;
  }
  if (row.sink_weight != 0.0) row.sink_weight /= sum;
  row.log_sum_exp = largest + std::log(sum);
  return row;
}

/// keep / (1 - p) of one element.
double dropout_factor(const AttentionProblem& problem, std::int64_t n, std::int64_t h, std::int64_t l, std::int64_t s) {
  if (problem.dropout_p == 0.0) return 1.0;
  const bool keeps = dropout_keeps(dropout_key(problem.rng), dropout_threshold(problem.dropout_p), n, h, l, s);
  return keeps ? dropout_scale(problem.dropout_p) : 0.0;
}

}  // namespace

ReferenceForward reference_forward(const AttentionProblem& problem) {
  ReferenceForward result;
  const std::int64_t rows = problem.batch * problem.heads * problem.query_length;
  result.output.assign(static_cast<std::size_t>(rows * problem.value_dim), 0.0);
  result.weights.assign(static_cast<std::size_t>(rows * problem.key_length), 0.0);
  result.probabilities = result.weights;
  result.sink_weights.assign(static_cast<std::size_t>(rows), 0.0);
  result.log_sum_exp = result.sink_weights;
  for_each_row(problem, [&](std::int64_t n, std::int64_t h, std::int64_t l, std::int64_t kv_head) {
    const Row row = softmax_of_row(problem, n, h, l);
    const std::size_t row_index = index4(0, n, h, l, problem.batch, problem.heads, problem.query_length);
    result.sink_weights[row_index] = row.sink_weight;
    result.log_sum_exp[row_index] = row.log_sum_exp;
    for (std::int64_t s = 0; s < problem.key_length; ++s) {
      if (!is_visible(problem, n, h, l, s)) continue;
      const std::size_t at = index4(n, h, l, s, problem.heads, problem.query_length, problem.key_length);
      result.probabilities[at] = row.probabilities[static_cast<std::size_t>(s)];
      result.weights[at] = result.probabilities[at] * dropout_factor(problem, n, h, l, s);
      for (std::int64_t d = 0; d < problem.value_dim; ++d) {
        result.output[index4(n, h, l, d, problem.heads, problem.query_length, problem.value_dim)] +=
            result.weights[at] * element(problem.value, n, kv_head, s, d);
      }
    }
  });
  return result;
}

ReferenceBackward reference_backward(const AttentionProblem& problem, const BackwardInputs& inputs) {
  const ReferenceForward forward = reference_forward(problem);
  const bool averaged = inputs.weights_mode == WeightsMode::kAveraged;
  const double share = averaged ? 1.0 / static_cast<double>(problem.heads) : 1.0;
  const std::int64_t H = problem.heads;
  const std::int64_t Hkv = problem.kv_heads;
  const std::int64_t L = problem.query_length;
  const std::int64_t S = problem.key_length;
  const std::int64_t D = problem.head_dim;
  const std::int64_t Dv = problem.value_dim;
  ReferenceBackward result;
  result.grad_query.assign(static_cast<std::size_t>(problem.batch * H * L * D), 0.0);
  result.grad_key.assign(static_cast<std::size_t>(problem.batch * Hkv * S * D), 0.0);
  result.grad_value.assign(static_cast<std::size_t>(problem.batch * Hkv * S * Dv), 0.0);
  result.grad_scores.assign(static_cast<std::size_t>(problem.batch * H * L * S), 0.0);
  result.grad_key_padding_mask.assign(static_cast<std::size_t>(problem.batch * problem.masked_keys()), 0.0);
  result.grad_sink.assign(static_cast<std::size_t>(problem.batch * H), 0.0);
  for_each_row(problem, [&](std::int64_t n, std::int64_t h, std::int64_t l, std::int64_t kv_head) {
    std::vector<double> grads(static_cast<std::size_t>(S), 0.0);  // of the probabilities
    double delta = inputs.grad_log_sum_exp ? -element(inputs.grad_log_sum_exp, n, h, l, 0) : 0.0;
    for (std::int64_t s = 0; s < S; ++s) {
      if (!is_visible(problem, n, h, l, s)) continue;
      const std::size_t at = index4(n, h, l, s, H, L, S);
      const double of_weight =
          inputs.grad_weights ? element(inputs.grad_weights, n, averaged ? 0 : h, l, s) * share : 0.0;
      double grad = inputs.weights_before_dropout ? 0.0 : of_weight;
      for (std::int64_t d = 0; inputs.grad_output && d < Dv; ++d) {
        const double upstream = element(inputs.grad_output, n, h, l, d);
        grad += upstream * element(problem.value, n, kv_head, s, d);
        result.grad_value[index4(n, kv_head, s, d, Hkv, S, Dv)] += forward.weights[at] * upstream;
      }
      grad *= dropout_factor(problem, n, h, l, s);
      grads[static_cast<std::size_t>(s)] = inputs.weights_before_dropout ? grad + of_weight : grad;
      delta += forward.probabilities[at] * grads[static_cast<std::size_t>(s)];
    }
    const std::size_t row_index = index4(0, n, h, l, problem.batch, H, L);
    result.grad_sink[static_cast<std::size_t>(n * H + h)] -= forward.sink_weights[row_index] * delta;
    for (std::int64_t s = 0; s < S; ++s) {
      if (!is_visible(problem, n, h, l, s)) continue;
      const std::size_t at = index4(n, h, l, s, H, L, S);
      const double grad = forward.probabilities[at] * (grads[static_cast<std::size_t>(s)] - delta);
      result.grad_scores[at] = grad;
      if (s < problem.masked_keys()) {
        result.grad_key_padding_mask[static_cast<std::size_t>(n * problem.masked_keys() + s)] += grad;
      }
      for (std::int64_t d = 0; d < D; ++d) {
        result.grad_query[index4(n, h, l, d, H, L, D)] += problem.scale * grad * element(problem.key, n, kv_head, s, d);
        result.grad_key[index4(n, kv_head, s, d, Hkv, S, D)] +=
            problem.scale * grad * element(problem.query, n, h, l, d);
      }
    }
  });
  return result;
}

}  // namespace fused_mha::core
