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
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  if (!fresh.defined() || fresh.nbytes() < kAlwaysMapped) return;
  auto* begin = static_cast<std::byte*>(fresh.mutable_data_ptr());
  const std::size_t skipped = (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
  // A refusal leaves the pages as they are.
  madvise(begin + skipped, (fresh.nbytes() - skipped) / kHugePage * kHugePage, MADV_HUGEPAGE);
#else
  (void)fresh;
#endif
}

}  // namespace fused_mha::detail
