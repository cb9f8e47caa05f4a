// SPDX-License-Identifier: BSD-3-Clause
#include "global_memory.h"

#include <link.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda_emulation/control.h"

namespace fused_mha::cuda_emulation {
namespace {

struct Range {
  std::size_t bytes;
  std::unique_ptr<GlobalByte[]> shadow;
};

std::mutex ranges_mutex;

std::map<std::uintptr_t, Range>& ranges() {
  static std::map<std::uintptr_t, Range> all;
  return all;
}

}  // namespace

GlobalRange::GlobalRange(const void* data, std::size_t bytes, bool writable) : data_(data) {
  Range range{bytes, writable ? std::make_unique<GlobalByte[]>(bytes) : nullptr};
  const std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges().insert_or_assign(reinterpret_cast<std::uintptr_t>(data), std::move(range));
}

GlobalRange::~GlobalRange() {
  const std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges().erase(reinterpret_cast<std::uintptr_t>(data_));
}

std::vector<GlobalSpan> global_spans() {
  const std::lock_guard<std::mutex> lock(ranges_mutex);
  std::vector<GlobalSpan> spans;
  for (const auto& [begin, range] : ranges()) spans.push_back({begin, begin + range.bytes, range.shadow.get()});
  return spans;
}

bool is_constant(std::uintptr_t address, std::size_t bytes) {
  static const std::vector<std::pair<std::uintptr_t, std::uintptr_t>> segments = [] {
    std::vector<std::pair<std::uintptr_t, std::uintptr_t>> found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* data) {
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& header = info->dlpi_phdr[i];
            if (header.p_type != PT_LOAD || (header.p_flags & PF_W) != 0) continue;
            const std::uintptr_t begin = info->dlpi_addr + header.p_vaddr;
            static_cast<decltype(found)*>(data)->emplace_back(begin, begin + header.p_memsz);
          }
          return 1;  // the program itself comes first
        },
        &found);
    return found;
  }();
  for (const auto& [begin, end] : segments) {
    if (address >= begin && address + bytes <= end) return true;
  }
  return false;
}

}  // namespace fused_mha::cuda_emulation
