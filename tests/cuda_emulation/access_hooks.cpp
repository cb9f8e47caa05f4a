// SPDX-License-Identifier: BSD-3-Clause
//
// What -fsanitize=thread makes the compiler call before each load and store of a kernel, answered by the emulation
// instead of the sanitizer's own library; and return addresses as file and line.
#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>

#include "worker.h"

namespace fused_mha::cuda_emulation {
namespace {

std::uintptr_t program_base() {
  static const std::uintptr_t base = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(&code_address), &info);
    return reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  }();
  return base;
}

bool is_wrapper(const std::string& line) {
  return line.find("cuda_emulation/runtime.h:") != std::string::npos ||
         line.find("cuda/device.h:") != std::string::npos;
}

}  // namespace

CodeAddress code_address(const void* return_address) {
  // The call lies before the address it returns to.
  return static_cast<CodeAddress>(reinterpret_cast<std::uintptr_t>(return_address) - program_base() - 1);
}

std::string describe_code(CodeAddress address) {
  std::array<char, 4096> program{};
  if (readlink("/proc/self/exe", program.data(), program.size() - 1) > 0) {
    std::ostringstream command;
    command << "addr2line -i -e '" << program.data() << "' 0x" << std::hex << address << " 2>/dev/null";
    if (FILE* pipe = popen(command.str().c_str(), "r")) {
      std::string result;
      std::array<char, 4096> line{};
      // Innermost first: the first frame that is not one of the wrappers is the kernel's own line.
      while (fgets(line.data(), line.size(), pipe) != nullptr) {
        if (result.empty() && line[0] != '?' && !is_wrapper(line.data())) result = line.data();
      }
      pclose(pipe);
      if (!result.empty()) return result.substr(0, result.find_first_of(" \n"));
    }
  }
  std::ostringstream text;
  text << "code at 0x" << std::hex << address;
  return text.str();
}

}  // namespace fused_mha::cuda_emulation

namespace {

using fused_mha::cuda_emulation::Worker;

void access(const void* address, std::size_t bytes, bool write, bool aligned, const void* from) {
  Worker& worker = Worker::mine();
  if (worker.runs_fiber()) worker.access(address, bytes, write, aligned, fused_mha::cuda_emulation::code_address(from));
}

void atomic_access(const volatile void* address, std::size_t bytes, const void* from) {
  Worker& worker = Worker::mine();
  if (worker.runs_fiber()) {
    worker.atomic_access(const_cast<const void*>(address), bytes, fused_mha::cuda_emulation::code_address(from));
  }
}

}  // namespace

#define FUSED_MHA_ACCESS_HOOKS(bytes)                                                                          \
  void __tsan_read##bytes(void* address) { access(address, bytes, false, true, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void* address) { access(address, bytes, true, true, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##bytes(void* address) {                                                           \
    access(address, bytes, false, false, __builtin_return_address(0));                                         \
  }                                                                                                            \
  void __tsan_unaligned_write##bytes(void* address) {                                                          \
    access(address, bytes, true, false, __builtin_return_address(0));                                          \
  }

#define FUSED_MHA_ATOMIC_HOOK(bits, type, operation)                                      \
  type __tsan_atomic##bits##_fetch_##operation(volatile type* address, type value, int) { \
    atomic_access(address, sizeof(type), __builtin_return_address(0));                    \
    return __atomic_fetch_##operation(address, value, __ATOMIC_RELAXED);                  \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
FUSED_MHA_ACCESS_HOOKS(1)
FUSED_MHA_ACCESS_HOOKS(2)
FUSED_MHA_ACCESS_HOOKS(4)
FUSED_MHA_ACCESS_HOOKS(8)
FUSED_MHA_ACCESS_HOOKS(16)
FUSED_MHA_ATOMIC_HOOK(32, std::uint32_t, add)
FUSED_MHA_ATOMIC_HOOK(32, std::uint32_t, or)
FUSED_MHA_ATOMIC_HOOK(32, std::uint32_t, and)
FUSED_MHA_ATOMIC_HOOK(64, std::uint64_t, add)
FUSED_MHA_ATOMIC_HOOK(64, std::uint64_t, or)
FUSED_MHA_ATOMIC_HOOK(64, std::uint64_t, and)
// The guards of a function's static variables.
std::uint8_t __tsan_atomic8_load(const volatile std::uint8_t* address, int) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

void __tsan_read_range(void* address, std::size_t bytes) {
  access(address, bytes, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, std::size_t bytes) {
  access(address, bytes, true, false, __builtin_return_address(0));
}

// -fsanitize=alignment: the compiler may have split the access into aligned ones by the time of the hooks above.
void __ubsan_handle_type_mismatch_v1(void*, void* address) {
  Worker& worker = Worker::mine();
  if (worker.runs_fiber()) {
    worker.fail_misaligned(address, fused_mha::cuda_emulation::code_address(__builtin_return_address(0)));
  }
}

void __tsan_vptr_update(void**, void*) {}
void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
  access(from, bytes, false, false, __builtin_return_address(0));
  access(to, bytes, true, false, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::size_t bytes) {
  access(to, bytes, true, false, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}
}
