// SPDX-License-Identifier: BSD-3-Clause
//
// The torch-free core: number formats, Philox, dropout decisions, and the mask plan against one-by-one visibility.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "catch.h"
#include "core/dropout.h"
#include "core/dtype.h"
#include "core/mask.h"
#include "core/philox.h"
#include "random_problem.h"

namespace fused_mha::test {

TEST_CASE("bfloat16 rounds to nearest, ties to even") {
  CHECK(core::to_bfloat16(1.0F).bits == 0x3F80);
  CHECK(core::to_bfloat16(1.0F + 0x1p-8F).bits == 0x3F80);             // a tie goes to the even neighbour
  CHECK(core::to_bfloat16(1.0F + 0x1p-8F + 0x1p-20F).bits == 0x3F81);  // just above the tie
  CHECK(core::to_bfloat16(1.0F + 3.0F * 0x1p-8F).bits == 0x3F82);
  CHECK(core::to_bfloat16(std::numeric_limits<float>::infinity()).bits == 0x7F80);
  CHECK(std::isnan(core::to_float(core::to_bfloat16(std::bit_cast<float>(0x7F800001U)))));
}

TEST_CASE("every float16 survives the way to float and back") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits <= 0xFFFFU; ++bits) {
    const core::Float16 half{static_cast<std::uint16_t>(bits)};
    const float value = core::to_float(half);
    if (std::isnan(value)) {
      wrong += std::isnan(core::to_float(core::to_float16(value))) ? 0 : 1;
    } else {
      wrong += core::to_float16(value).bits == half.bits ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
  CHECK(core::to_float(core::Float16{0x3C01}) == 1.0F + 0x1p-10F);
  CHECK(core::to_float(core::Float16{0x0001}) == 0x1p-24F);
  CHECK(core::to_float16(65519.0F).bits == 0x7BFF);
  CHECK(core::to_float16(65520.0F).bits == 0x7C00);
  CHECK(core::to_float16(0x1p-25F).bits == 0x0000);
  CHECK(core::to_float16(0x1.8p-25F).bits == 0x0001);
}

TEST_CASE("Philox4x32 gives the published numbers") {
  // Random123's known answers (kat_vectors): zeros, ones, digits of pi.
  constexpr core::PhiloxCounter kOnes{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff};
  constexpr core::PhiloxCounter kPi{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
  CHECK(core::philox<10>({0, 0}, {0, 0, 0, 0}) == core::PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(core::philox<10>({0xffffffff, 0xffffffff}, kOnes) ==
        core::PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(core::philox<10>({0xa4093822, 0x299f31d0}, kPi) ==
        core::PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  CHECK(core::philox<7>({0, 0}, {0, 0, 0, 0}) == core::PhiloxCounter{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48});
  CHECK(core::philox<7>({0xffffffff, 0xffffffff}, kOnes) ==
        core::PhiloxCounter{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662});
  CHECK(core::philox<7>({0xa4093822, 0x299f31d0}, kPi) ==
        core::PhiloxCounter{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a});
}

TEST_CASE("dropout keeps the share it is asked to keep, independently of neighbours") {
  const auto key = core::dropout_key({42, 7});
  for (const double p : {0.1, 0.5, 0.9}) {
    constexpr int kCount = 1 << 16;
    int kept = 0;
    int both = 0;
    bool before = false;
    for (int i = 0; i < kCount; ++i) {
      const bool keeps = core::dropout_keeps(key, core::dropout_threshold(p), 1, 2, i / 512, i % 512);
      kept += keeps ? 1 : 0;
      both += keeps && before ? 1 : 0;
      before = keeps;
    }
    const double share = 1.0 - p;
    const double sigma = std::sqrt(share * p / kCount);
    CHECK(std::abs(static_cast<double>(kept) / kCount - share) < 5.0 * sigma);
    CHECK(std::abs(static_cast<double>(both) / kCount - share * share) < 10.0 * sigma);
  }
  CHECK_FALSE(core::dropout_keeps(key, core::dropout_threshold(1.0), 0, 0, 0, 0));
  CHECK(core::dropout_keeps(key, core::dropout_threshold(0.0), 0, 0, 0, 0));
}

TEST_CASE("rng states with neighbouring offsets give unrelated masks") {
  const auto threshold = core::dropout_threshold(0.5);
  int equal = 0;
  constexpr int kCount = 4096;
  for (int s = 0; s < kCount; ++s) {
    equal += core::dropout_keeps(core::dropout_key({1, 0}), threshold, 0, 0, 0, s) ==
                     core::dropout_keeps(core::dropout_key({1, 1}), threshold, 0, 0, 0, s)
                 ? 1
                 : 0;
  }
  CHECK(std::abs(equal - kCount / 2) < 200);
}

TEST_CASE("tile classes agree with visibility element by element") {
  std::mt19937 random(7);
  const auto pick = [&](int limit) { return std::uniform_int_distribution<int>(0, limit - 1)(random); };
  for (int round = 0; round < 150; ++round) {
    Case c{.N = 1 + pick(2), .H = 1 + pick(2), .L = 1 + pick(120), .S = 1 + pick(150)};
    c.Hkv = c.H;
    c.padding = static_cast<Padding>(pick(7));
    c.attn_mask = static_cast<AttnMask>(pick(9));
    c.is_causal = pick(3) == 0;
    c.always_visible_keys = std::min<std::int64_t>(pick(3), c.S);
    c.seed = random();
    INFO(describe(c));
    const std::unique_ptr<Problem> p = make_problem(c);
    const core::MaskPlan plan(p->problem, core::Parallel{});
    for (std::int64_t n = 0; n < c.N; ++n) {
      const core::KeySpan& kept = plan.kept_keys(n);
      for (std::int64_t h = 0; h < c.H; ++h) {
        for (std::int64_t row = 0; row < c.L; row += core::kMaskTileRows) {
          const std::int64_t row_end = std::min(c.L, row + core::kMaskTileRows);
          for (std::int64_t begin = 0; begin < kept.count; begin += core::kMaskTileKeys) {
            const core::KeySpan keys = kept.part(begin, std::min(core::kMaskTileKeys, kept.count - begin));
            bool any_visible = false;
            bool all_free = true;
            for (std::int64_t l = row; l < row_end; ++l) {
              for (std::int64_t i = 0; i < keys.count; ++i) {
                const double added = core::mask_sum(p->problem, n, h, l, keys[i]);
                any_visible = any_visible || added != -std::numeric_limits<double>::infinity();
                all_free = all_free && added == 0.0;
              }
            }
            const core::TileClass result = plan.tile_class(n, h, row, row_end, keys);
            // kMixed is always allowed; the other two are promises.
            if (result == core::TileClass::kHidden) REQUIRE_FALSE(any_visible);
            if (result == core::TileClass::kFree) REQUIRE(all_free);
            if (result == core::TileClass::kMixed && c.padding == Padding::kNone && !c.is_causal) {
              REQUIRE_FALSE(all_free);
            }
          }
        }
      }
      std::int64_t next = 0;
      for (std::int64_t s = 0; s < c.S; ++s) {
        const bool listed = next < kept.count && kept[next] == s;
        next += listed ? 1 : 0;
        const bool padded =
            p->problem.key_padding_mask && s < p->problem.masked_keys() &&
            core::mask_element(p->problem.key_padding_mask, p->problem.key_padding_mask.offset(n, 0, 0, s)) ==
                -std::numeric_limits<double>::infinity();
        REQUIRE(listed == !padded);
      }
      CHECK(next == kept.count);
    }
  }
}

TEST_CASE("two lowest finite masks add up to a number") {
  Case c{.L = 1, .S = 2};
  c.attn_mask = AttnMask::kLowest;
  c.padding = Padding::kBias;
  const std::unique_ptr<Problem> p = make_problem(c);
  p->key_padding_mask.set(0, 0, 0, 0, std::numeric_limits<float>::lowest());
  p->attn_mask.set(0, 0, 0, 0, std::numeric_limits<float>::lowest());
  CHECK(std::isfinite(core::mask_sum(p->problem, 0, 0, 0, 0)));
  CHECK(core::is_visible(p->problem, 0, 0, 0, 0));
}

}  // namespace fused_mha::test
