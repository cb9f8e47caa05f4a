// SPDX-License-Identifier: BSD-3-Clause
//
// Large results on a CPU: fewer page faults at their first touch.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace fused_mha::detail {

/// Advises the system to back a fresh CPU tensor with huge pages if it is so large that malloc maps new memory for it
/// each time: its first touch otherwise takes a page fault every 4 KiB, which costs as much as writing it twice
/// (benchmark row "forward+backward bias (1,H,L,S)"). Only advice: without it, or where the system has no such pages,
/// nothing else changes.
void advise_huge_pages(const at::Tensor& fresh);

template <typename... Tensors>
void advise_huge_pages(const std::tuple<Tensors...>& fresh) {
  std::apply([](const auto&... tensors) { (advise_huge_pages(tensors), ...); }, fresh);
}

}  // namespace fused_mha::detail
