// SPDX-License-Identifier: BSD-3-Clause
//
// The CUDA kernels, run on the CPU by the emulation, against core/reference.h: random problems of every kind and a
// table of sizes, in thread orders and copy modes that follow the seed. The emulation itself fails a test on a race, a
// missing wait, an access out of bounds or unwritten shared memory.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>

#include "catch.h"
#include "emulated_calls.h"

namespace fused_mha::test {
namespace {

using core::DType;
using cuda_emulation::Copies;
using cuda_emulation::Order;
using cuda_emulation::settings;

/// Another order of threads and mode of copies for each number.
void set_order(std::uint32_t number) {
  settings().order = static_cast<Order>(number % 4);
  settings().copies = static_cast<Copies>(number / 4 % 2);
  settings().seed = number;
}

Case random_case(std::mt19937& random, std::initializer_list<std::int64_t> dtypes) {
  const auto pick = [&](std::initializer_list<std::int64_t> choices) {
    return *(choices.begin() + std::uniform_int_distribution<std::size_t>(0, choices.size() - 1)(random));
  };
  Case c;
  c.N = pick({1, 1, 2});
  c.Hkv = pick({1, 2});
  c.H = c.Hkv * pick({1, 1, 3});
  c.L = pick({1, 2, 3, 15, 31, 33, 63, 64, 65, 97, 130});
  c.S = pick({1, 2, 3, 15, 31, 33, 64, 65, 96, 127, 129, 200});
  c.D = pick({1, 3, 8, 16, 20, 32, 40, 64, 80});
  c.Dv = pick({1, 4, 7, 16, 24, 32, 64, 72, 100, 130});
  c.dtype = static_cast<DType>(pick(dtypes));
  c.layout = static_cast<Layout>(pick({0, 1, 2, 3}));
  c.padding = static_cast<Padding>(pick({0, 1, 2, 3, 4, 5, 6}));
  c.attn_mask = static_cast<AttnMask>(pick({0, 1, 2, 3, 4, 5, 6, 7, 8}));
  c.mask_dtype = static_cast<DType>(pick({0, 0, 1, 2, 3}));
  // -65504 is finite, but a score beside it has no digits left in float: nothing to compare.
  if (c.attn_mask == AttnMask::kLowest && c.mask_dtype == DType::kFloat16) c.mask_dtype = DType::kFloat32;
  c.is_causal = pick({0, 0, 1}) == 1;
  c.always_visible_keys = std::min(pick({0, 0, 0, 1, 2}), c.S);
  c.dropout_p = std::uniform_int_distribution<int>(0, 3)(random) == 0 ? 0.3 : 0.0;
  c.causal_offset = pick({0, 0, c.S - c.always_visible_keys - c.L, 1, -5});
  c.sink = static_cast<Sink>(pick({0, 0, 1, 2, 3}));
  c.weights_before_dropout = pick({0, 1}) == 1;
  c.seed = random();
  return c;
}

/// Random problems of the dtypes, each under an order of threads and a mode of copies of its own.
void check_random_cases(int count, std::uint32_t seed, std::initializer_list<std::int64_t> dtypes) {
  const SettingsGuard guard;
  std::mt19937 random(seed);
  for (int i = 0; i < count; ++i) {
    set_order(static_cast<std::uint32_t>(random()));
    INFO("case " << i);
    check_case(random_case(random, dtypes));
  }
}

int case_count(int standard) {
  const char* wanted = std::getenv("FUSED_MHA_EMULATED_CASES");
  return wanted == nullptr ? standard : std::atoi(wanted);
}

}  // namespace

TEST_CASE("generic kernels agree with the reference in float32 and float64") {
  check_random_cases(case_count(14), 11, {0, 0, 1});
}

TEST_CASE("tensor kernels agree with the reference in bfloat16 and float16") {
  check_random_cases(case_count(24), 12, {2, 3});
}

TEST_CASE("heads of every width") {
  const SettingsGuard guard;
  struct Widths {
    std::int64_t D, Dv;
  };
  std::uint32_t seed = 100;
  for (const auto [D, Dv] : {Widths{1, 1}, Widths{3, 8}, Widths{8, 3}, Widths{33, 17}, Widths{40, 40}, Widths{64, 64},
                             Widths{65, 255}, Widths{72, 16}, Widths{80, 96}, Widths{96, 128}, Widths{128, 128},
                             Widths{130, 20}, Widths{256, 256}, Widths{300, 4}}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      ++seed;
      set_order(seed);
      Case c{.N = 1, .H = 2, .Hkv = 1, .L = 21, .S = 37, .D = D, .Dv = Dv, .dtype = dtype};
      c.is_causal = seed % 3 == 0;
      c.causal_offset = 16;
      c.attn_mask = seed % 3 == 1 ? AttnMask::kBiasAndInfinity : AttnMask::kNone;
      c.dropout_p = seed % 4 == 0 ? 0.25 : 0.0;
      c.seed = seed;
      check_case(c);
    }
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const std::int64_t D : {1, 65, 300}) {
      ++seed;
      set_order(seed);
      check_case({.N = 1, .H = 1, .Hkv = 1, .L = 5, .S = 70, .D = D, .Dv = 301 - D, .dtype = dtype, .seed = seed});
    }
  }
}

TEST_CASE("gradients of masks in each of their shapes") {
  const SettingsGuard guard;
  std::uint32_t seed = 200;
  for (const AttnMask attn_mask :
       {AttnMask::kBiasAndInfinity, AttnMask::kBias, AttnMask::kPerHead, AttnMask::kRowOnly, AttnMask::kKeyOnly}) {
    ++seed;  // so that the dtypes take turns in what follows from it
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
      ++seed;
      set_order(seed);
      Case c{.N = 2, .H = 2, .Hkv = 2, .L = 70, .S = 68, .D = 16, .Dv = 16, .dtype = dtype};
      c.attn_mask = attn_mask;
      c.padding = Padding::kBiasAndInfinity;
      c.mask_dtype = seed % 2 == 0 ? DType::kFloat32 : dtype;
      c.always_visible_keys = seed % 3;
      c.is_causal = seed % 4 == 0;
      c.seed = seed;
      check_case(c);
    }
  }
}

TEST_CASE("many tiles of rows and keys, more than one group of dropout") {
  const SettingsGuard guard;
  std::uint32_t seed = 300;
  for (const std::int64_t D : {32, 64, 128, 256}) {
    ++seed;
    set_order(seed);
    Case c{.N = 1, .H = 1, .Hkv = 1, .L = D > 128 ? 70 : 140, .S = 330, .D = D, .Dv = D, .dtype = DType::kBFloat16};
    c.is_causal = D != 64;
    c.causal_offset = c.S - c.L;
    c.dropout_p = 0.2;
    c.seed = seed;
    check_case(c);
  }
}

TEST_CASE("few queries over many keys are split and merged") {
  const SettingsGuard guard;
  std::uint32_t seed = 400;
  for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const std::int64_t L : {1, 3}) {
      ++seed;
      set_order(seed);
      Case c{.N = 1, .H = 2, .Hkv = 1, .L = L, .S = 1100, .D = 24, .Dv = 20, .dtype = dtype};
      c.padding = L == 1 ? Padding::kLeft : Padding::kNone;
      c.sink = L == 1 ? Sink::kPerHead : Sink::kNone;
      c.is_causal = L == 3;
      c.causal_offset = c.S - c.L - 300;  // the last split sees nothing
      c.seed = seed;
      cuda_emulation::launches().clear();
      check_case(c);
      const auto& records = cuda_emulation::launches();
      CHECK(std::any_of(records.begin(), records.end(),
                        [](const auto& record) { return record.kernel == "merge_splits_kernel"; }));
    }
  }
}

TEST_CASE("any size may be 0") {
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    check_case({.N = 0, .H = 2, .Hkv = 1, .L = 3, .S = 4, .D = 8, .Dv = 8, .dtype = dtype});
    check_case({.N = 1, .H = 0, .Hkv = 0, .L = 3, .S = 4, .D = 8, .Dv = 8, .dtype = dtype});
    check_case({.N = 2, .H = 2, .Hkv = 1, .L = 0, .S = 4, .D = 8, .Dv = 8, .dtype = dtype});
    check_case({.N = 2, .H = 2, .Hkv = 1, .L = 3, .S = 0, .D = 8, .Dv = 8, .dtype = dtype});
    check_case({.N = 1, .H = 1, .Hkv = 1, .L = 3, .S = 0, .D = 8, .Dv = 8, .dtype = dtype, .sink = Sink::kShared});
  }
}

TEST_CASE("operands that begin between chunks of 16 bytes") {
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    const Case c{.N = 1, .H = 2, .Hkv = 2, .L = 19, .S = 35, .D = 16, .Dv = 16, .dtype = dtype, .seed = 500};
    const std::unique_ptr<Problem> p = make_problem(c);
    for (auto [tensor, view] : {std::pair{&p->query, &p->problem.query}, std::pair{&p->key, &p->problem.key},
                                std::pair{&p->value, &p->problem.value}}) {
      // The last row of each moves by an element, into the byte or two that a tensor has more.
      const auto size = core::size_of(dtype);
      std::copy_backward(tensor->storage.begin(), tensor->storage.end() - static_cast<std::ptrdiff_t>(size),
                         tensor->storage.end());
      tensor->view.data = tensor->storage.data() + size;
      *view = tensor->read();
    }
    check_problem(c, *p);
  }
}

}  // namespace fused_mha::test
