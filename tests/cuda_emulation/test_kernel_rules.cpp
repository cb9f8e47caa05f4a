// SPDX-License-Identifier: BSD-3-Clause
//
// What the CUDA kernels promise beside sums that are right: hidden elements are never read into one, dropout keeps what
// core/dropout.h says, the order of threads changes no bit, shared memory has no bank conflicts, sizes are not limited
// by a grid's dimensions or by 32-bit offsets, and errors name their kernel.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "catch.h"
#include "core/dropout.h"
#include "core/reference.h"
#include "cpu/run.h"
#include "cuda/run.h"
#include "emulated_calls.h"

namespace fused_mha::test {
namespace {

using core::DType;
using core::WeightsMode;
using cuda_emulation::Copies;
using cuda_emulation::GlobalRange;
using cuda_emulation::launches;
using cuda_emulation::LaunchRecord;
using cuda_emulation::Order;
using cuda_emulation::settings;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Upstream upstream_of(const ForwardResult& forward, std::uint32_t seed) {
  std::mt19937 random(seed);
  Upstream upstream;
  upstream.output = make_tensor(forward.output.view.dtype, forward.output.sizes);
  fill_random(upstream.output, random);
  return upstream;
}

bool uses(const std::string& kernel, unsigned threads_a_block) {
  const auto& records = launches();
  return std::any_of(records.begin(), records.end(), [&](const LaunchRecord& record) {
    return record.kernel == kernel && record.threads_a_block == threads_a_block;
  });
}

bool uses_as_many_blocks(const std::string& kernel, std::int64_t blocks) {
  const auto& records = launches();
  return std::any_of(records.begin(), records.end(), [&](const LaunchRecord& record) {
    return record.kernel == kernel && record.blocks == static_cast<unsigned>(blocks);
  });
}

/// The rows of a tensor (1, 1, rows, columns), each 2^31 elements behind the one before and alone in what kernels may
/// touch. Pages between them that nobody touches take no memory.
class FarRows {
 public:
  FarRows(const Tensor& near, bool writable)
      : bytes_(static_cast<std::size_t>(near.sizes[2] * kStride) * core::size_of(near.view.dtype)),
        memory_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    REQUIRE(memory_ != MAP_FAILED);
    rows_.sizes = near.sizes;
    rows_.view = {memory_, near.view.dtype, {0, 0, kStride, 1}};
    const std::size_t size = core::size_of(near.view.dtype);
    for (std::int64_t l = 0; l < near.sizes[2]; ++l) {
      for (std::int64_t d = 0; d < near.sizes[3]; ++d) rows_.set(0, 0, l, d, near.get(0, 0, l, d));
      ranges_.push_back(
          std::make_unique<GlobalRange>(static_cast<std::byte*>(memory_) + static_cast<std::size_t>(l * kStride) * size,
                                        static_cast<std::size_t>(near.sizes[3]) * size, writable));
    }
  }
  ~FarRows() {
    ranges_.clear();
    munmap(memory_, bytes_);
  }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;

  core::MutableView view() const { return rows_.view; }
  core::View read() const { return rows_.read(); }
  void spoil() {
    for (std::int64_t l = 0; l < rows_.sizes[2]; ++l) {
      for (std::int64_t d = 0; d < rows_.sizes[3]; ++d) rows_.set(0, 0, l, d, kNaN);
    }
  }
  bool equals(const Tensor& near) const {
    bool is_equal = true;
    for (std::int64_t l = 0; l < rows_.sizes[2]; ++l) {
      for (std::int64_t d = 0; d < rows_.sizes[3]; ++d) {
        is_equal = is_equal && rows_.get(0, 0, l, d) == near.get(0, 0, l, d);
      }
    }
    return is_equal;
  }

 private:
  static constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 8;

  std::size_t bytes_;
  void* memory_;
  Tensor rows_;
  std::vector<std::unique_ptr<GlobalRange>> ranges_;
};

}  // namespace

TEST_CASE("NaN and infinity in keys that a mask hides change nothing") {
  const SettingsGuard guard;
  std::uint32_t seed = 600;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const AttnMask attn_mask : {AttnMask::kNone, AttnMask::kKeyOnly}) {
      settings().copies = static_cast<Copies>(++seed % 2);
      Case c{.N = 2, .H = 2, .Hkv = 1, .L = 70, .S = 70, .D = 24, .Dv = 24, .dtype = dtype};
      c.padding = attn_mask == AttnMask::kNone ? Padding::kScattered : Padding::kNone;
      c.attn_mask = attn_mask;
      c.mask_dtype = DType::kFloat32;
      c.seed = seed;
      const std::unique_ptr<Problem> clean = make_problem(c);
      const std::unique_ptr<Problem> dirty = make_problem(c);
      for (Problem* p : {clean.get(), dirty.get()}) {
        if (attn_mask == AttnMask::kKeyOnly) {
          for (std::int64_t h = 0; h < c.H; ++h) {
            for (std::int64_t s = 0; s < c.S; s += 3) p->attn_mask.set(0, h, 0, s, -kInfinity);
          }
        }
      }
      for (std::int64_t n = 0; n < c.N; ++n) {
        for (std::int64_t s = 0; s < c.S; ++s) {
          const bool is_hidden =
              attn_mask == AttnMask::kKeyOnly ? s % 3 == 0 : dirty->key_padding_mask.get(n, 0, 0, s) != 0.0;
          if (!is_hidden) continue;
          dirty->key.set(n, 0, s, s % c.D, s % 2 == 0 ? kNaN : kInfinity);
          dirty->value.set(n, 0, s, s % c.Dv, s % 2 == 0 ? -kInfinity : kNaN);
        }
      }
      const ForwardResult actual = run_forward(*dirty, WeightsMode::kPerHead);
      // The second way round, which infinities take, adds up in another order: equal but for rounding.
      const core::ReferenceForward reference = core::reference_forward(clean->problem);
      CHECK(relative_error(actual.output, reference.output) <= kForwardEpsilons * epsilon_of(dtype));
      CHECK(relative_error(actual.weights, reference.weights) <= kForwardEpsilons * epsilon_of(dtype));
      CHECK(relative_error(actual.log_sum_exp, reference.log_sum_exp) <= kForwardEpsilons * 0x1p-23);
      const Upstream upstream = upstream_of(actual, seed);
      const core::ReferenceBackward want = core::reference_backward(clean->problem, upstream.inputs());
      const BackwardResult got = run_backward(*dirty, actual, upstream);
      CHECK(relative_error(got.query, want.grad_query) <= kBackwardEpsilons * epsilon_of(dtype));
      CHECK(relative_error(got.key, want.grad_key) <= kBackwardEpsilons * epsilon_of(dtype));
      CHECK(relative_error(got.value, want.grad_value) <= kBackwardEpsilons * epsilon_of(dtype));
    }
  }
}

TEST_CASE("NaN reaches the rows that see it and no others") {
  const SettingsGuard guard;
  std::uint32_t seed = 700;
  // More than one tile of rows, heads of each width that tensor kernels have; the diagonal cuts through their tiles.
  for (const std::int64_t D : {16, 64, 128, 256}) {
    for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
      if (dtype == DType::kFloat32 && D > 16) continue;
      settings().copies = static_cast<Copies>(++seed % 2);
      settings().order = static_cast<Order>(seed % 4);
      Case c{.N = 1, .H = 2, .Hkv = 1, .L = 140, .S = 140, .D = D, .Dv = D, .dtype = dtype};
      c.is_causal = true;
      c.dropout_p = seed % 2 == 0 ? 0.2 : 0.0;
      c.seed = seed;
      const std::unique_ptr<Problem> p = make_problem(c);
      p->value.set(0, 0, 133, 3, kNaN);
      p->value.set(0, 0, 50, 5, kNaN);
      p->key.set(0, 0, 129, 2, kNaN);
      p->query.set(0, 1, 20, 1, kNaN);
      const core::ReferenceForward expected = core::reference_forward(p->problem);
      const ForwardResult actual = run_forward(*p, WeightsMode::kPerHead);
      CHECK(relative_error(actual.output, expected.output) <= kForwardEpsilons * epsilon_of(dtype));
      CHECK(relative_error(actual.weights, expected.weights) <= kForwardEpsilons * epsilon_of(dtype));
      CHECK(std::isnan(actual.output.get(0, 0, 50, 5)));
      CHECK(std::isfinite(actual.output.get(0, 0, 49, 5)));
      Upstream upstream = upstream_of(actual, seed);
      // Of the rows that are NaN only 20 of head 1 passes something down: it makes NaN of what it sees, and no more.
      for (std::int64_t h = 0; h < c.H; ++h) {
        for (std::int64_t l = 50; l < c.L; ++l) {
          for (std::int64_t d = 0; d < c.Dv; ++d) upstream.output.set(0, h, l, d, 0.0);
        }
      }
      const core::ReferenceBackward want = core::reference_backward(p->problem, upstream.inputs());
      const BackwardResult got = run_backward(*p, actual, upstream);
      CHECK(relative_error(got.query, want.grad_query) <= kBackwardEpsilons * epsilon_of(dtype));
      CHECK(relative_error(got.key, want.grad_key) <= kBackwardEpsilons * epsilon_of(dtype));
      CHECK(relative_error(got.value, want.grad_value) <= kBackwardEpsilons * epsilon_of(dtype));
    }
  }
}

TEST_CASE("dropout keeps what core/dropout.h says, bit for bit") {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const std::int64_t D : {16, 128, 256}) {
      if (dtype != DType::kFloat16 && D > 16) continue;
      Case c{.N = 2, .H = 2, .Hkv = 2, .L = 33, .S = 161, .D = D, .Dv = D, .dtype = dtype};
      c.dropout_p = 0.5;
      c.seed = 800;
      const std::unique_ptr<Problem> p = make_problem(c);
      p->problem.first_sample = 3;
      const std::vector<std::uint8_t> mask = run_dropout_mask(p->problem);
      std::vector<std::uint8_t> cpu_mask(mask.size(), 7);
      cpu::dropout_mask(p->problem, reinterpret_cast<bool*>(cpu_mask.data()), core::Parallel{});
      CHECK(mask == cpu_mask);
      const ForwardResult forward = run_forward(*p, WeightsMode::kPerHead);
      const core::PhiloxKey key = core::dropout_key(p->problem.rng);
      const std::uint32_t threshold = core::dropout_threshold(c.dropout_p);
      std::size_t i = 0;
      std::size_t wrong = 0;
      for (std::int64_t n = 0; n < c.N; ++n) {
        for (std::int64_t h = 0; h < c.H; ++h) {
          for (std::int64_t l = 0; l < c.L; ++l) {
            for (std::int64_t s = 0; s < c.S; ++s, ++i) {
              const bool keeps = core::dropout_keeps(key, threshold, n + 3, h, l, s);
              if (mask[i] != (keeps ? 1 : 0)) ++wrong;
              if ((forward.weights.get(n, h, l, s) != 0.0) != keeps) ++wrong;
            }
          }
        }
      }
      CHECK(wrong == 0);
      // The gradient of value, for one row that passes 1 down, is the row's weight: keys in rows draw the same bits.
      Upstream upstream;
      upstream.output = make_tensor(dtype, forward.output.sizes);
      std::fill(upstream.output.storage.begin(), upstream.output.storage.end(), std::byte{0});
      for (std::int64_t n = 0; n < c.N; ++n) {
        for (std::int64_t h = 0; h < c.H; ++h) upstream.output.set(n, h, 20, 0, 1.0);
      }
      const BackwardResult got = run_backward(*p, forward, upstream);
      for (std::int64_t n = 0; n < c.N; ++n) {
        for (std::int64_t h = 0; h < c.H; ++h) {
          for (std::int64_t s = 0; s < c.S; ++s) {
            if ((got.value.get(n, h, s, 0) != 0.0) != (forward.weights.get(n, h, 20, s) != 0.0)) ++wrong;
          }
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("the order of threads changes no bit") {
  const SettingsGuard guard;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    Case c{.N = 1, .H = 2, .Hkv = 1, .L = 70, .S = 90, .D = 32, .Dv = 32, .dtype = dtype};
    c.attn_mask = AttnMask::kBias;
    c.dropout_p = 0.1;
    c.sink = Sink::kShared;
    c.seed = 900;
    const std::unique_ptr<Problem> p = make_problem(c);
    settings() = {};
    const ForwardResult first = run_forward(*p, WeightsMode::kAveraged);
    const Upstream upstream = upstream_of(first, 1);
    const BackwardResult first_grads = run_backward(*p, first, upstream);
    for (const Order order : {Order::kDescending, Order::kRandom, Order::kOneWarpAhead}) {
      settings().order = order;
      settings().copies = Copies::kAtWait;
      settings().seed = 5;
      settings().host_threads = 2;
      const ForwardResult again = run_forward(*p, WeightsMode::kAveraged);
      CHECK(again.output.storage == first.output.storage);
      CHECK(again.weights.storage == first.weights.storage);
      const BackwardResult grads = run_backward(*p, first, upstream);
      CHECK(grads.query.storage == first_grads.query.storage);
      CHECK(grads.key.storage == first_grads.key.storage);
      CHECK(grads.value.storage == first_grads.value.storage);
      CHECK(grads.attn_mask.storage == first_grads.attn_mask.storage);
      CHECK(grads.sink.storage == first_grads.sink.storage);
    }
  }
}

TEST_CASE("matrices and copies meet each bank once") {
  const SettingsGuard guard;
  settings().count_banks = true;
  for (const std::int64_t D : {32, 64, 128, 256}) {
    const Case c{.N = 1, .H = 1, .Hkv = 1, .L = 128, .S = 128, .D = D, .Dv = D, .dtype = DType::kFloat16, .seed = 1000};
    const std::unique_ptr<Problem> p = make_problem(c);
    launches().clear();
    const ForwardResult forward = run_forward(*p, WeightsMode::kPerHead);
    run_backward(*p, forward, upstream_of(forward, 2));
    std::size_t with_matrices = 0;
    for (const LaunchRecord& record : launches()) {
      INFO(record.kernel << ", D = " << D);
      CHECK(record.matrix_loads.wavefronts == record.matrix_loads.without_conflicts);
      CHECK(record.copies.wavefronts == record.copies.without_conflicts);
      if (record.matrix_loads.wavefronts > 0) ++with_matrices;
    }
    CHECK(with_matrices == 4);  // forward, weights, keys, queries
  }
}

TEST_CASE("cards without the tensor kernels' instructions or memory get the generic kernels") {
  const SettingsGuard guard;
  const Case c{.N = 1, .H = 1, .Hkv = 1, .L = 20, .S = 30, .D = 128, .Dv = 128, .dtype = DType::kFloat16, .seed = 1100};
  const std::unique_ptr<Problem> p = make_problem(c);
  const std::vector<double> expected = core::reference_forward(p->problem).output;
  launches().clear();
  CHECK(cuda::tensor_cores_refuse(p->problem, false) == nullptr);
  run_forward(*p, WeightsMode::kNone);
  CHECK(uses("attention_forward_kernel", 128));
  settings().compute_capability = 75;
  launches().clear();
  CHECK(std::string(cuda::tensor_cores_refuse(p->problem, false)) == "tensor kernels need compute capability 8.0");
  CHECK(relative_error(run_forward(*p, WeightsMode::kNone).output, expected) <= kForwardEpsilons * 0x1p-11);
  CHECK(uses("attention_forward_kernel", 256));
  settings().compute_capability = 86;
  settings().shared_bytes_block = 48 * 1024;
  launches().clear();
  CHECK_THAT(cuda::tensor_cores_refuse(p->problem, false), contains("too little shared memory"));
  CHECK(relative_error(run_forward(*p, WeightsMode::kNone).output, expected) <= kForwardEpsilons * 0x1p-11);
  CHECK(uses("attention_forward_kernel", 256));
}

TEST_CASE("every kernel fits into the shared memory of the cards it is compiled for") {
  const SettingsGuard guard;
  // What a block may ask for, without the KiB that the system keeps (CUDA programming guide, compute capabilities).
  struct Card {
    int compute_capability;
    std::size_t kibibytes;
    std::int64_t widest;  // heads whose gradients run on tensor cores
  };
  for (const Card card : {Card{80, 163, 256}, Card{86, 99, 128}, Card{89, 99, 128}, Card{90, 227, 256},
                          Card{100, 227, 256}, Card{120, 99, 128}}) {
    settings().compute_capability = card.compute_capability;
    settings().shared_bytes_block = card.kibibytes * 1024;
    for (const std::int64_t D : {32, 64, 128, 256}) {
      INFO("compute capability " << card.compute_capability << ", D = " << D);
      Case c{.N = 1, .H = 1, .Hkv = 1, .L = 1, .S = 1, .D = D, .Dv = D, .dtype = DType::kFloat16, .seed = 1250};
      c.attn_mask = AttnMask::kBias;  // with the buffers for masks, the most that kernels ask for
      const std::unique_ptr<Problem> p = make_problem(c);
      CHECK(cuda::tensor_cores_refuse(p->problem, false) == nullptr);
      CHECK((cuda::tensor_cores_refuse(p->problem, true) == nullptr) == (D <= card.widest));
      launches().clear();
      const ForwardResult forward = run_forward(*p, WeightsMode::kPerHead);
      run_backward(*p, forward, upstream_of(forward, 5));
      CHECK(launches().size() >= 6);
      for (const LaunchRecord& record : launches()) {
        INFO(record.kernel << ": " << record.shared_bytes << " bytes");
        CHECK(record.shared_bytes <= settings().shared_bytes_block);
      }
    }
  }
}

TEST_CASE("offsets beyond 32 bits") {
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    Case c{.N = 1, .H = 1, .Hkv = 1, .L = 3, .S = 3, .D = 8, .Dv = 8, .dtype = dtype, .seed = 1300};
    c.attn_mask = AttnMask::kBias;
    c.mask_dtype = dtype;
    const std::unique_ptr<Problem> p = make_problem(c);
    const ForwardResult forward = run_forward(*p, WeightsMode::kPerHead);
    const Upstream upstream = upstream_of(forward, 3);
    const BackwardResult expected = run_backward(*p, forward, upstream);

    FarRows query(p->query, false);
    FarRows key(p->key, false);
    FarRows value(p->value, false);
    FarRows attn_mask(p->attn_mask, false);
    core::AttentionProblem problem = p->problem;
    problem.query = query.read();
    problem.key = key.read();
    problem.value = value.read();
    problem.attn_mask = attn_mask.read();
    std::array<double, 3> row_max{};
    std::array<double, 3> row_sum{};
    const GlobalRange max_range(row_max.data(), sizeof(row_max), true);
    const GlobalRange sum_range(row_sum.data(), sizeof(row_sum), true);
    alignas(256) std::array<std::byte, 4096> workspace{};
    const GlobalRange workspace_range(workspace.data(), workspace.size(), true);
    FarRows output(make_tensor(dtype, forward.output.sizes), true);
    FarRows weights(make_tensor(dtype, forward.weights.sizes), true);
    core::ForwardOutputs outputs;
    outputs.output = output.view();
    outputs.weights = weights.view();
    outputs.weights_mode = WeightsMode::kPerHead;
    outputs.row_max = row_max.data();
    outputs.row_sum = row_sum.data();
    REQUIRE(cuda::forward_workspace_bytes(problem, outputs) <= workspace.size());
    cuda::attention_forward(problem, outputs, {}, workspace.data(), nullptr);
    CHECK(output.equals(forward.output));
    CHECK(weights.equals(forward.weights));

    FarRows grad_output(upstream.output, false);
    FarRows grad_query(expected.query, true);
    FarRows grad_key(expected.key, true);
    FarRows grad_value(expected.value, true);
    FarRows grad_attn_mask(expected.attn_mask, true);
    core::BackwardInputs inputs;
    inputs.grad_output = grad_output.read();
    inputs.output = output.read();
    inputs.row_max = row_max.data();
    inputs.row_sum = row_sum.data();
    core::BackwardOutputs grads;
    grads.grad_query = grad_query.view();
    grads.grad_key = grad_key.view();
    grads.grad_value = grad_value.view();
    grads.grad_attn_mask = grad_attn_mask.view();
    grads.attn_mask_sizes = p->attn_mask_sizes;
    REQUIRE(cuda::backward_workspace_bytes(problem, inputs, grads) <= workspace.size());
    for (FarRows* gradient : {&grad_query, &grad_key, &grad_value, &grad_attn_mask}) gradient->spoil();
    cuda::attention_backward(problem, inputs, grads, {}, workspace.data(), nullptr);
    CHECK(grad_query.equals(expected.query));
    CHECK(grad_key.equals(expected.key));
    CHECK(grad_value.equals(expected.value));
    CHECK(grad_attn_mask.equals(expected.attn_mask));
  }
}

TEST_CASE("batch and heads beyond 65535, the most that the other dimensions of a grid have") {
  const SettingsGuard guard;
  settings().blocks_at_each_end = 2;  // a tile of scores for each of them would take minutes
  constexpr std::int64_t kMany = 65537;
  struct Sizes {
    std::int64_t N, H;
    DType dtype;
  };
  for (const auto [N, H, dtype] : {Sizes{kMany, 1, DType::kFloat16}, Sizes{1, kMany, DType::kFloat32}}) {
    const Case c{.N = N, .H = H, .Hkv = H, .L = 1, .S = 1, .D = 1, .Dv = 1, .dtype = dtype, .seed = 1350};
    const std::unique_ptr<Problem> p = make_problem(c);
    launches().clear();
    const ForwardResult forward = run_forward(*p, WeightsMode::kPerHead);
    const Upstream upstream = upstream_of(forward, 4);
    const BackwardResult got = run_backward(*p, forward, upstream);
    for (const char* kernel :
         {"attention_forward_kernel", "attention_weights_kernel", "backward_keys_kernel", "backward_queries_kernel"}) {
      INFO(kernel);
      CHECK(uses_as_many_blocks(kernel, kMany));
    }
    for (const std::int64_t i : {std::int64_t{0}, std::int64_t{1}, kMany - 2, kMany - 1}) {
      const std::int64_t n = N == 1 ? 0 : i;
      const std::int64_t h = H == 1 ? 0 : i;
      // One key has all the weight.
      CHECK(forward.output.get(n, h, 0, 0) == p->value.get(n, h, 0, 0));
      CHECK(forward.weights.get(n, h, 0, 0) == 1.0);
      CHECK(got.value.get(n, h, 0, 0) == upstream.output.get(n, h, 0, 0));
      CHECK(got.query.get(n, h, 0, 0) == 0.0);
    }
  }
}

TEST_CASE("errors say which kernel could not start, and why") {
  const Case c{.N = 1, .H = 1, .Hkv = 1, .L = 1, .S = 1, .D = 8, .Dv = 8, .dtype = DType::kFloat16};
  const std::unique_ptr<Problem> p = make_problem(c);
  core::ForwardOutputs outputs{};
  core::AttentionProblem problem = p->problem;
  problem.batch = std::int64_t{1} << 29;
  problem.heads = problem.kv_heads = 8;
  CHECK_THROWS_WITH(cuda::attention_forward(problem, outputs, {}, nullptr, nullptr),
                    contains("attention_forward_kernel") && contains("4294967296"));
  problem = p->problem;
  problem.key_length = std::int64_t{1} << 31;
  CHECK_THROWS_WITH(cuda::attention_forward(problem, outputs, {}, nullptr, nullptr),
                    contains("key length") && contains("2147483648"));
}

}  // namespace fused_mha::test
