// SPDX-License-Identifier: BSD-3-Clause
//
// Calls of csrc/cuda/run.h with host memory for the emulation, and their answers in double. A call's memory is named to
// the emulation: whatever else a kernel touches fails the test.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "core/problem.h"
#include "cuda_emulation/control.h"
#include "random_problem.h"

namespace fused_mha::test {

class SettingsGuard {
 public:
  SettingsGuard() : before_(cuda_emulation::settings()) {}
  ~SettingsGuard() { cuda_emulation::settings() = before_; }
  SettingsGuard(const SettingsGuard&) = delete;
  SettingsGuard& operator=(const SettingsGuard&) = delete;

 private:
  cuda_emulation::Settings before_;
};

struct ForwardResult {
  Tensor output;
  Tensor weights;
  Tensor log_sum_exp;
  std::vector<double> row_max;  // storage of either accumulation type
  std::vector<double> row_sum;
};

ForwardResult run_forward(const Problem& p, core::WeightsMode mode, bool before_dropout = false);

struct BackwardResult {
  Tensor query, key, value, key_padding_mask, attn_mask, sink;
};

/// The gradients that come in; those that were not made are not given.
struct Upstream {
  Tensor output, weights, log_sum_exp;
  core::WeightsMode mode = core::WeightsMode::kNone;
  bool before_dropout = false;

  core::BackwardInputs inputs() const;
};

BackwardResult run_backward(const Problem& p, const ForwardResult& forward, const Upstream& upstream);

/// The keep mask of the problem's sizes, dropout_p and first_sample.
std::vector<std::uint8_t> run_dropout_mask(const core::AttentionProblem& problem);

/// Largest difference to the expected values, relative to their largest magnitude, or to 1, the size of the random
/// inputs, where cancellation makes them smaller. NaN where either side alone is NaN, or infinite. An infinity must
/// meet its like.
double relative_error(const Tensor& actual, const std::vector<double>& expected);

/// Forward, weights and gradients of a random problem against the reference.
void check_case(const Case& c);
/// The same of a problem made from `c` and changed since.
void check_problem(const Case& c, const Problem& p);

// Units in which errors are allowed: the storage's epsilon.
double epsilon_of(core::DType dtype);
constexpr double kForwardEpsilons = 16.0;
constexpr double kBackwardEpsilons = 256.0;  // gradients that cancel: a row with one key, many rows a sum

}  // namespace fused_mha::test
