// SPDX-License-Identifier: BSD-3-Clause
//
// Instruction sets: which one this processor has, which one is in use, and how to force a lower one.
#pragma once

#include <string_view>
#include <vector>

namespace fused_mha::cpu {

/// Ordered: each set includes those before it.
enum class Isa : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

/// "generic", "avx2", "avx512", "avx512bf16": the names that FUSED_MHA_MAX_ISA takes.
std::string_view isa_name(Isa isa);

/// Throws std::invalid_argument, naming the known ones, for any other name.
Isa isa_from_name(std::string_view name);

/// Best set that this processor runs and this build holds.
Isa best_isa();

/// All sets from generic up to best_isa().
std::vector<Isa> supported_isas();

/// best_isa(), or the one before it where bfloat16 products are slower than widening to float.
Isa quickest_isa();

/// The set in use: what set_active_isa last chose; before that quickest_isa(), or with the environment variable
/// FUSED_MHA_MAX_ISA, read once, the best set up to the one that it names. An unknown name raises std::invalid_argument
/// at the first call.
Isa active_isa();

/// Makes `isa` the set in use for all threads. Throws std::invalid_argument where the processor lacks it.
void set_active_isa(Isa isa);

}  // namespace fused_mha::cpu
