// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/isa.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(FUSED_MHA_HAS_AVX2)
#include <cpuid.h>
#endif

namespace fused_mha::cpu {
namespace {

constexpr std::array<std::string_view, 4> kNames{"generic", "avx2", "avx512", "avx512bf16"};

std::string known_names() {
  std::string names;
  for (const std::string_view name : kNames) {
    if (!names.empty()) names += ", ";
    names += name;
  }
  return names;
}

#if defined(FUSED_MHA_HAS_AVX2)
bool has_f16c() {
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

/// The best set of an unbroken chain: each must be compiled in and supported by processor and system.
Isa detect() {
  Isa best = Isa::kGeneric;
#if defined(FUSED_MHA_HAS_AVX2)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return best;
  best = Isa::kAvx2;
#if defined(FUSED_MHA_HAS_AVX512)
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return best;
  }
  best = Isa::kAvx512;
#if defined(FUSED_MHA_HAS_AVX512BF16)
  if (__builtin_cpu_supports("avx512bf16")) best = Isa::kAvx512Bf16;
#endif
#endif
#endif
  return best;
}

Isa initial_isa() {
  const char* cap = std::getenv("FUSED_MHA_MAX_ISA");
  if (cap == nullptr || *cap == '\0') return quickest_isa();
  const Isa limit = isa_from_name(cap);
  return limit < best_isa() ? limit : best_isa();
}

std::atomic<int>& active() {
  static std::atomic<int> isa{static_cast<int>(initial_isa())};
  return isa;
}

}  // namespace

std::string_view isa_name(Isa isa) { return kNames.at(static_cast<std::size_t>(isa)); }

Isa isa_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<Isa>(i);
  }
  throw std::invalid_argument("fused_mha: unknown instruction set '" + std::string(name) + "', expected one of " +
                              known_names());
}

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

// Intel's processors take four times as long for vdpbf16ps as for vfmadd (benchmarks/peak.cpp measures both): float32's
// kernels, which do half the multiply-adds an instruction, are quicker there.
Isa quickest_isa() {
#if defined(FUSED_MHA_HAS_AVX512BF16)
  if (best_isa() == Isa::kAvx512Bf16 && __builtin_cpu_is("intel")) return Isa::kAvx512;
#endif
  return best_isa();
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas;
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i) isas.push_back(static_cast<Isa>(i));
  return isas;
}

Isa active_isa() { return static_cast<Isa>(active().load(std::memory_order_relaxed)); }

void set_active_isa(Isa isa) {
  if (isa > best_isa()) {
    throw std::invalid_argument("fused_mha: this processor does not run " + std::string(isa_name(isa)) +
                                ", its best instruction set is " + std::string(isa_name(best_isa())));
  }
  active().store(static_cast<int>(isa), std::memory_order_relaxed);
}

}  // namespace fused_mha::cpu
