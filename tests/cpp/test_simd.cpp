// SPDX-License-Identifier: BSD-3-Clause
//
// Every vector operation on every instruction set that this processor runs.
#include <functional>

#include "catch.h"
#include "cpu/isa.h"
#include "simd_checks.h"

namespace fused_mha::test {

TEST_CASE("vector operations do what their comments say") {
  for (const cpu::Isa isa : cpu::supported_isas()) {
    INFO("instruction set " << cpu::isa_name(isa));
    SimdReport report;
    switch (isa) {
#if defined(FUSED_MHA_HAS_AVX512)
      case cpu::Isa::kAvx512:
        report = simd_report_avx512();
        break;
#endif
#if defined(FUSED_MHA_HAS_AVX2)
      case cpu::Isa::kAvx2:
        report = simd_report_avx2();
        break;
#endif
      default:
        report = simd_report_generic();
        break;
    }
    CHECK(report.exp2_float_ulp > 0.0);
    CHECK(report.exp2_float_ulp <= 2.0);
    CHECK(report.exp2_double_ulp <= 2.0);
    CHECK(report.exp2_limits);
    CHECK(report.tanh_float_epsilons > 0.0);
    CHECK(report.tanh_float_epsilons <= 2.0);
    CHECK(report.tanh_double_epsilons <= 2.0);
    CHECK(report.tanh_limits);
    CHECK(report.reciprocal_float_ulp <= 1.0);
    CHECK(report.reciprocal_double_ulp <= 1.0);
    CHECK(report.transpose);
    CHECK(report.select);
    CHECK(report.nonzero_bits);
    CHECK(report.multiply_wide);
    CHECK(report.reductions);
    CHECK(report.half_mismatches == 0);
    CHECK(report.rounding_mismatches == 0);
  }
}

TEST_CASE("instruction sets have names, and unknown ones are refused with the known ones listed") {
  for (const cpu::Isa isa : cpu::supported_isas()) CHECK(cpu::isa_from_name(cpu::isa_name(isa)) == isa);
  CHECK_THROWS_WITH(cpu::isa_from_name("sse9"), Catch::Contains("sse9") && Catch::Contains("generic, avx2, avx512"));
}

}  // namespace fused_mha::test
