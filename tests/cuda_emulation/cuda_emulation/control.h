// SPDX-License-Identifier: BSD-3-Clause
//
// What tests say to the emulation, and what it says to them. A fault stops the launch: it throws EmulationError with
// the threads, the source lines and the kernel's name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace fused_mha::cuda_emulation {

enum class Fault : std::uint8_t {
  kNone,
  kDivergence,     // a lane exits or waits elsewhere while others wait for it
  kSharedBounds,   // outside of the shared memory that the launch asked for
  kGlobalBounds,   // outside of every GlobalRange, or a store to one that is read-only
  kMisaligned,     // an address that is no multiple of the access's size
  kUninitialised,  // shared memory that nobody wrote
  kRace,           // two threads, one of them writing, with no barrier between
  kCopyUnderWay,   // the target of a cp.async that its thread has not waited for
  kLaunch          // a grid or block that no card takes
};

class EmulationError : public std::runtime_error {
 public:
  EmulationError(Fault fault, const std::string& text) : std::runtime_error(text), fault_(fault) {}
  Fault fault() const { return fault_; }

 private:
  Fault fault_;
};

/// Which runnable thread goes on when one has to wait, and which block comes next.
enum class Order : std::uint8_t { kAscending, kDescending, kRandom, kOneWarpAhead };

/// When a cp.async really reads and writes: hardware may do it at any time in between.
enum class Copies : std::uint8_t { kAtIssue, kAtWait };

struct Settings {
  Order order = Order::kAscending;
  Copies copies = Copies::kAtIssue;
  std::uint64_t seed = 0;
  int host_threads = 1;
  bool count_banks = false;
  unsigned blocks_at_each_end = 0;  // the first and the last so many blocks of a grid run and no others; 0: all run
  // The card that device_limits() describes: an A100.
  int compute_capability = 80;
  int multiprocessors = 108;
  std::size_t shared_bytes_block = 163 * 1024;
};

/// Those that launches by this host thread obey.
Settings& settings();

/// Memory that kernels may read, and write where `writable`, while the object lives. No two may overlap.
class GlobalRange {
 public:
  GlobalRange(const void* data, std::size_t bytes, bool writable);
  ~GlobalRange();
  GlobalRange(const GlobalRange&) = delete;
  GlobalRange& operator=(const GlobalRange&) = delete;

 private:
  const void* data_;
};

/// Wavefronts that shared memory needed, and how many a layout without bank conflicts needs.
struct BankCount {
  std::uint64_t wavefronts = 0;
  std::uint64_t without_conflicts = 0;
};

struct LaunchRecord {
  std::string kernel;
  unsigned blocks = 0;  // of the grid
  unsigned threads_a_block = 0;
  std::size_t shared_bytes = 0;
  BankCount matrix_loads, copies, loads, stores;  // with Settings::count_banks
};

/// What this host thread launched since it last cleared the list.
std::vector<LaunchRecord>& launches();

}  // namespace fused_mha::cuda_emulation
