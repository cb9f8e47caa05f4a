// SPDX-License-Identifier: BSD-3-Clause
//
// One host thread's block: its fibers, its shared memory with a shadow of who touched it, and the fault that stopped
// it.
//
// Ordering is told by a clock that every release of a barrier advances. An access of another warp is ordered before now
// if its time lies before the last __syncthreads(), one of another lane of the warp if before the last __syncwarp().
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "cuda_emulation/control.h"
#include "cuda_emulation/runtime.h"
#include "fiber.h"
#include "global_memory.h"

namespace fused_mha::cuda_emulation {

inline constexpr int kLanes = 32;
inline constexpr unsigned kFullWarp = 0xFFFFFFFFU;

enum class Collective : std::uint8_t { kNone, kSyncWarp, kShuffle, kBallot, kLoadMatrix, kMultiply };

/// A place in the kernel's code: a return address, resolved to file and line only when a fault is told.
using CodeAddress = std::uint32_t;  // relative to the program
CodeAddress code_address(const void* return_address);
std::string describe_code(CodeAddress address);

struct Failure {
  Fault fault = Fault::kNone;
  std::string text;
};

struct Copy {
  std::size_t offset;  // in shared memory
  const void* source;  // null: zeros
  CodeAddress where;
};

struct FiberState {
  Context context;
  dim3 thread;
  int index = 0;  // in the block
  bool at_barrier = false;
  bool done = false;
  const Where* where = nullptr;  // of the collective or barrier that it waits at
  std::vector<Copy> open_copies;
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
};

struct WarpState {
  unsigned runnable = 0;
  unsigned arrived = 0;
  unsigned done = 0;
  std::uint32_t sync_time = 0;
  Collective collective = Collective::kNone;
  std::array<void*, kLanes> operands{};
};

/// What is known of one byte of shared memory. Times before the block's start mean never.
struct SharedByte {
  std::uint32_t write_time = 0, read_time = 0;
  CodeAddress write_code = 0, read_code = 0;
  std::uint16_t writer = 0, reader = 0;
  bool read_by_lanes = false;  // at read_time's side of the last __syncwarp, by several lanes of the reader's warp
  bool read_by_warps = false;  // since the last __syncthreads, by several warps
  bool copy_under_way = false;
  bool atomic = false;
};

struct LaunchState {
  const char* name;
  dim3 grid, block;
  std::size_t shared_bytes;
  void (*call)(const void*);
  const std::byte* arguments;
  std::size_t argument_bytes;
  Settings settings;
  std::uint32_t serial;
  std::vector<GlobalSpan> global;
};

class Worker {
 public:
  static Worker& mine();

  /// Runs one block; false where it stopped with a failure.
  bool run_block(const LaunchState& launch, std::uint32_t block);
  const Failure& failure() const { return failure_; }
  LaunchRecord& record() { return record_; }

  // From fibers.
  FiberState& fiber() { return *current_; }
  int lane() const { return current_->index % kLanes; }
  const LaunchState& launch() const { return *launch_; }
  std::uint32_t block() const { return block_; }
  dim3 block_position() const;
  std::byte* shared() { return shared_; }
  bool runs_fiber() const { return current_ != nullptr; }

  void sync_threads(const Where& where);
  using Compute = void (*)(Worker& worker, std::array<void*, kLanes>& operands);
  void collective(Collective kind, unsigned lanes, void* operands, Compute compute, const Where& where);

  void access(const void* address, std::size_t bytes, bool write, bool aligned, CodeAddress code);
  void atomic_access(const void* address, std::size_t bytes, CodeAddress code);
  void load_matrix_row(const void* row, CodeAddress code);
  void copy(void* target, const void* source, bool valid, CodeAddress code);
  void commit_copies();
  void wait_copies(int newest);
  void count_matrix_load(const std::array<const void*, kLanes>& rows);

  [[noreturn]] void fail_misaligned(const void* address, CodeAddress code);
  [[noreturn]] void fail(Fault fault, std::string text);
  std::string name_of(int thread) const;

  [[noreturn]] void run_fiber();

 private:
  enum class Kind : std::uint8_t { kLoad, kStore, kCopy };
  struct BankAccess {
    CodeAddress code;
    std::uint16_t thread;
    Kind kind;
    std::uint8_t bytes;
    std::uint32_t occurrence;
    std::uint32_t offset;
  };

  Worker();
  bool in_shared_area(std::uintptr_t address) const;
  std::size_t shared_offset(const void* address, std::size_t bytes, CodeAddress code);
  void read_shared(std::size_t offset, std::size_t bytes, CodeAddress code, bool by_whole_warp);
  void write_shared(std::size_t offset, std::size_t bytes, CodeAddress code, bool atomic);
  bool ordered(std::uint32_t time, int thread) const;
  void check_global(const void* address, std::size_t bytes, bool write, CodeAddress code);
  void finish_copies(const std::vector<Copy>& copies);
  void perform(const Copy& copy);
  void log_banks(Kind kind, std::size_t offset, std::size_t bytes, CodeAddress code);
  void count_banks();
  [[noreturn]] void tell_race(std::size_t offset, int other, CodeAddress other_code, bool other_wrote, bool write,
                              CodeAddress code);
  [[noreturn]] void tell_deadlock();
  std::string access_text(const void* address, std::size_t bytes, bool write, CodeAddress code) const;
  void yield();
  int pick();
  int pick_lane(unsigned runnable, int after);

  const LaunchState* launch_ = nullptr;
  std::uint32_t block_ = 0;
  Stacks stacks_;
  std::byte* shared_area_;  // guards on both sides of the largest shared memory
  std::byte* shared_;
  std::vector<SharedByte> shadow_;
  std::vector<FiberState> fibers_;
  std::vector<WarpState> warps_;
  FiberState* current_ = nullptr;
  Context main_;
  int at_barrier_ = 0;
  int running_ = 0;
  const Where* barrier_ = nullptr;
  int barrier_thread_ = 0;
  std::uint32_t clock_ = 1, block_start_ = 1, block_sync_ = 1;
  std::mt19937_64 random_;
  Failure failure_;
  LaunchRecord record_;
  std::vector<BankAccess> bank_log_;
  std::unordered_map<std::uint64_t, std::uint32_t> bank_occurrences_;
  const GlobalSpan* last_span_ = nullptr;
};

}  // namespace fused_mha::cuda_emulation
