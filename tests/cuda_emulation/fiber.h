// SPDX-License-Identifier: BSD-3-Clause
//
// The smallest context switch: a thread of a block is a stack and a saved stack pointer. A warp-wide instruction costs
// 32 switches, so swapcontext with its two system calls each is left to processors that the assembly below does not
// know.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace fused_mha::cuda_emulation {

#if defined(__x86_64__)

struct Context {
  void* stack_pointer = nullptr;
};

extern "C" void fused_mha_switch_context(void** save_to, void* load_from);

inline void switch_context(Context& from, Context& to) {
  fused_mha_switch_context(&from.stack_pointer, to.stack_pointer);
}

/// A context that calls `entry`, which must never return, on the given stack.
inline void make_context(Context& context, void* stack, std::size_t bytes, void (*entry)()) {
  auto* top = reinterpret_cast<std::uint64_t*>((reinterpret_cast<std::uintptr_t>(stack) + bytes) & ~std::uintptr_t{15});
  *--top = 0;  // where entry would return to; also leaves the stack as a call would
  *--top = reinterpret_cast<std::uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;  // the registers that a callee saves
  context.stack_pointer = top;
}

#else

struct Context {
  ucontext_t context;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

inline void make_context(Context& context, void* stack, std::size_t bytes, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = bytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
}

#endif

/// Stacks for a block's threads, each with an unmapped page below it.
class Stacks {
 public:
  static constexpr std::size_t kBytes = 64 * 1024;
  static constexpr std::size_t kGuard = 4096;
  static constexpr std::size_t kCount = 1024;

  Stacks() {
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, kCount * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    for (std::size_t i = 0; i < kCount; ++i) mprotect(memory_ + i * kBytes, kGuard, PROT_NONE);
  }
  ~Stacks() { munmap(memory_, kCount * kBytes); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  std::byte* stack(std::size_t i) { return memory_ + i * kBytes + kGuard; }
  static constexpr std::size_t usable() { return kBytes - kGuard; }

 private:
  std::byte* memory_;
};

}  // namespace fused_mha::cuda_emulation
