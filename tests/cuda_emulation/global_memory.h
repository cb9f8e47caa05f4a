// SPDX-License-Identifier: BSD-3-Clause
//
// The memory of GlobalRange objects, with a shadow of who stored to it in the present launch: blocks run in any order,
// so none may touch what another one stores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fused_mha::cuda_emulation {

struct GlobalByte {
  std::uint32_t launch = 0;  // in which the last store was
  std::uint32_t block = 0;
  std::uint32_t time = 0;  // on the clock of the block's worker
  std::uint16_t thread = 0;
  bool atomic = false;
};

struct GlobalSpan {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  GlobalByte* shadow = nullptr;  // null where read-only
};

/// Sorted by address.
std::vector<GlobalSpan> global_spans();

/// Whether the address lies in the program's own constants.
bool is_constant(std::uintptr_t address, std::size_t bytes);

}  // namespace fused_mha::cuda_emulation
