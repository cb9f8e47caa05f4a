// SPDX-License-Identifier: BSD-3-Clause
#include "torch/huge_pages.h"

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fused_mha::detail {

void advise_huge_pages(const at::Tensor& fresh) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // The most that glibc's threshold for mapping grows to; whatever else may be freed and used again.
  constexpr std::size_t kAlwaysMapped = std::size_t{32} << 20;
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  if (!fresh.defined() || fresh.nbytes() < kAlwaysMapped) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(fresh.mutable_data_ptr());
  const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (begin + fresh.nbytes()) / kHugePage * kHugePage;
  // A refusal leaves the pages as they are.
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)fresh;
#endif
}

}  // namespace fused_mha::detail
