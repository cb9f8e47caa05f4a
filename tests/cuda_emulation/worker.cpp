// SPDX-License-Identifier: BSD-3-Clause
#include "worker.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <sstream>

#if defined(__x86_64__)
// void fused_mha_switch_context(void** save_to, void* load_from): the registers that the ABI says a callee saves.
asm(R"(
    .text
    .globl fused_mha_switch_context
    .type fused_mha_switch_context, @function
fused_mha_switch_context:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size fused_mha_switch_context, .-fused_mha_switch_context
)");
#endif

namespace fused_mha::cuda_emulation {
namespace {

constexpr std::size_t kSharedArea = 256 * 1024;  // more than any card has
constexpr std::size_t kSharedGuard = 64 * 1024;
constexpr int kPoison = 0xFF;  // NaN as half, bfloat16, float and double

std::string describe(const Where* where) {
  std::ostringstream text;
  text << where->file_name() << ":" << where->line();
  return text.str();
}

bool same_place(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::kSyncWarp:
      return "__syncwarp";
    case Collective::kShuffle:
      return "a shuffle";
    case Collective::kBallot:
      return "a vote";
    case Collective::kLoadMatrix:
      return "ldmatrix";
    case Collective::kMultiply:
      return "mma";
    case Collective::kNone:
      break;
  }
  return "nothing";
}

}  // namespace

Worker& Worker::mine() {
  static thread_local Worker worker;
  return worker;
}

Worker::Worker() : shadow_(kSharedArea) {
  static thread_local std::unique_ptr<std::byte[]> memory;
  constexpr std::size_t kAlignment = 1024;
  memory = std::make_unique<std::byte[]>(kSharedArea + 2 * kSharedGuard + kAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
  shared_area_ = memory.get() + ((kAlignment - address % kAlignment) % kAlignment);
  shared_ = shared_area_ + kSharedGuard;
}

dim3 Worker::block_position() const {
  const dim3& grid = launch_->grid;
  return {block_ % grid.x, block_ / grid.x % grid.y, block_ / grid.x / grid.y};
}

std::string Worker::name_of(int thread) const {
  std::ostringstream text;
  text << "thread " << thread << " (warp " << thread / kLanes << ", lane " << thread % kLanes << ")";
  return text.str();
}

bool Worker::run_block(const LaunchState& launch, std::uint32_t block) {
  launch_ = &launch;
  block_ = block;
  failure_ = {};
  last_span_ = nullptr;
  record_.kernel = launch.name;
  random_.seed(launch.settings.seed * 0x9E3779B97F4A7C15ULL + block);
  if (clock_ > 0x80000000U) {  // far from where times would wrap around
    std::fill(shadow_.begin(), shadow_.end(), SharedByte{});
    clock_ = 1;
  }
  block_start_ = block_sync_ = ++clock_;
  std::memset(shared_ - kSharedGuard, kPoison, kSharedGuard);
  std::memset(shared_, kPoison, launch.shared_bytes + kSharedGuard);

  const auto threads = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  if (fibers_.size() < static_cast<std::size_t>(threads)) fibers_.resize(static_cast<std::size_t>(threads));
  warps_.assign(static_cast<std::size_t>(threads / kLanes), WarpState{});
  for (int i = 0; i < threads; ++i) {
    FiberState& fiber = fibers_[static_cast<std::size_t>(i)];
    const auto index = static_cast<unsigned>(i);
    fiber.thread = {index % launch.block.x, index / launch.block.x % launch.block.y,
                    index / launch.block.x / launch.block.y};
    fiber.index = i;
    fiber.at_barrier = fiber.done = false;
    fiber.where = nullptr;
    fiber.open_copies.clear();
    fiber.groups.clear();
    make_context(fiber.context, stacks_.stack(static_cast<std::size_t>(i)), Stacks::usable(),
                 [] { Worker::mine().run_fiber(); });
  }
  for (WarpState& warp : warps_) {
    warp.runnable = kFullWarp;
    warp.sync_time = clock_;
  }
  at_barrier_ = 0;
  running_ = threads;
  current_ = &fibers_[static_cast<std::size_t>(pick())];
  switch_context(main_, current_->context);
  current_ = nullptr;
  if (launch.settings.count_banks && failure_.fault == Fault::kNone) count_banks();
  return failure_.fault == Fault::kNone;
}

void Worker::run_fiber() {
  launch_->call(launch_->arguments);
  FiberState& me = *current_;
  WarpState& warp = warps_[static_cast<std::size_t>(me.index / kLanes)];
  if (at_barrier_ > 0) {
    fail(Fault::kDivergence, name_of(me.index) + " exits while " + name_of(barrier_thread_) +
                                 " waits for it in __syncthreads at " + describe(barrier_));
  }
  if (warp.arrived != 0) {
    const int other = me.index / kLanes * kLanes + std::countr_zero(warp.arrived);
    fail(Fault::kDivergence, name_of(me.index) + " exits while " + name_of(other) + " waits for it in " +
                                 cuda_emulation::name_of(warp.collective) + " at " +
                                 describe(fibers_[static_cast<std::size_t>(other)].where));
  }
  me.done = true;
  warp.done |= 1U << (me.index % kLanes);
  warp.runnable &= ~(1U << (me.index % kLanes));
  --running_;
  yield();
  __builtin_unreachable();
}

void Worker::fail(Fault fault, std::string text) {
  const dim3 position = block_position();
  std::ostringstream full;
  full << "kernel " << launch_->name << ", block (" << position.x << ", " << position.y << ", " << position.z
       << "): " << text;
  failure_.fault = fault;
  failure_.text = full.str();
  full = {};
  std::string().swap(text);
  switch_context(current_->context, main_);
  __builtin_unreachable();
}

// ---- Who runs next ----

int Worker::pick_lane(unsigned runnable, int after) {
  switch (launch_->settings.order) {
    case Order::kDescending:
      return kLanes - 1 - std::countl_zero(runnable);
    case Order::kRandom: {
      const int turn = static_cast<int>(random_() % kLanes);
      return (std::countr_zero(std::rotr(runnable, turn)) + turn) % kLanes;
    }
    case Order::kAscending:
    case Order::kOneWarpAhead:
      break;
  }
  const int turn = (after + 1) % kLanes;
  return (std::countr_zero(std::rotr(runnable, turn)) + turn) % kLanes;
}

/// The thread that goes on, or -1 where none can.
int Worker::pick() {
  const auto count = static_cast<int>(warps_.size());
  const int present = current_ == nullptr ? 0 : current_->index / kLanes;
  const int lane_now = current_ == nullptr ? kLanes - 1 : current_->index % kLanes;
  int first = present;
  int step = 1;
  switch (launch_->settings.order) {
    case Order::kAscending:
      break;
    case Order::kDescending:
      step = -1;
      if (current_ == nullptr) first = count - 1;
      break;
    case Order::kRandom:
      if (current_ == nullptr || random_() % 4 == 0) first = static_cast<int>(random_() % static_cast<unsigned>(count));
      break;
    case Order::kOneWarpAhead:
      first = static_cast<int>((launch_->settings.seed + block_) % static_cast<unsigned>(count));
      break;
  }
  for (int i = 0; i < count; ++i) {
    const int w = (first + step * i + count) % count;
    const WarpState& warp = warps_[static_cast<std::size_t>(w)];
    if (warp.runnable != 0) return w * kLanes + pick_lane(warp.runnable, w == present ? lane_now : kLanes - 1);
  }
  return -1;
}

void Worker::yield() {
  FiberState& from = *current_;
  const int next = pick();
  if (next < 0) {
    if (running_ > 0) tell_deadlock();
    switch_context(from.context, main_);
    return;
  }
  current_ = &fibers_[static_cast<std::size_t>(next)];
  if (current_ != &from) switch_context(from.context, current_->context);
}

void Worker::tell_deadlock() {
  std::map<std::string, std::pair<int, int>> places;  // how many threads, and the first of them
  for (std::size_t i = 0; i < warps_.size() * kLanes; ++i) {
    const FiberState& fiber = fibers_[i];
    const std::string place = fiber.done ? "has exited" : "waits at " + describe(fiber.where);
    ++places.try_emplace(place, 0, fiber.index).first->second.first;
  }
  std::string text = "no thread can go on:";
  for (const auto& [place, threads] : places) {
    text += " " + name_of(threads.second) + " " + place + " (" + std::to_string(threads.first) + " threads);";
  }
  fail(Fault::kDivergence, text);
}

// ---- Barriers and collectives ----

void Worker::sync_threads(const Where& where) {
  FiberState& me = *current_;
  const auto threads = static_cast<int>(warps_.size()) * kLanes;
  if (running_ != threads) {
    const auto gone = std::find_if(fibers_.begin(), fibers_.begin() + threads, [](const auto& f) { return f.done; });
    fail(Fault::kDivergence, name_of(me.index) + " waits in __syncthreads at " + describe(&where) + ", but " +
                                 name_of(gone->index) + " has exited");
  }
  if (at_barrier_ == 0) {
    barrier_ = &where;
    barrier_thread_ = me.index;
  } else if (!same_place(*barrier_, where)) {
    fail(Fault::kDivergence, name_of(me.index) + " waits in __syncthreads at " + describe(&where) + ", " +
                                 name_of(barrier_thread_) + " in that at " + describe(barrier_));
  }
  me.where = &where;
  WarpState& warp = warps_[static_cast<std::size_t>(me.index / kLanes)];
  warp.runnable &= ~(1U << (me.index % kLanes));
  if (++at_barrier_ == threads) {
    at_barrier_ = 0;
    block_sync_ = ++clock_;
    for (WarpState& released : warps_) {
      released.runnable = kFullWarp;
      released.sync_time = clock_;
    }
  }
  yield();
}

void Worker::collective(Collective kind, unsigned lanes, void* operands, Compute compute, const Where& where) {
  FiberState& me = *current_;
  WarpState& warp = warps_[static_cast<std::size_t>(me.index / kLanes)];
  const int lane = me.index % kLanes;
  const int first_lane = me.index - lane;
  if (lanes != kFullWarp) {
    fail(Fault::kDivergence,
         name_of(me.index) + " names not all lanes in " + cuda_emulation::name_of(kind) + " at " + describe(&where));
  }
  if (warp.done != 0) {
    fail(Fault::kDivergence, name_of(me.index) + " waits in " + cuda_emulation::name_of(kind) + " at " +
                                 describe(&where) + ", but " + name_of(first_lane + std::countr_zero(warp.done)) +
                                 " has exited");
  }
  if (warp.arrived == 0) {
    warp.collective = kind;
  } else {
    const FiberState& other = fibers_[static_cast<std::size_t>(first_lane + std::countr_zero(warp.arrived))];
    if (warp.collective != kind || !same_place(*other.where, where)) {
      fail(Fault::kDivergence, name_of(me.index) + " waits in " + cuda_emulation::name_of(kind) + " at " +
                                   describe(&where) + ", " + name_of(other.index) + " in " +
                                   cuda_emulation::name_of(warp.collective) + " at " + describe(other.where));
    }
  }
  me.where = &where;
  warp.operands[static_cast<std::size_t>(lane)] = operands;
  warp.arrived |= 1U << lane;
  warp.runnable &= ~(1U << lane);
  if (warp.arrived == kFullWarp) {
    if (compute != nullptr) compute(*this, warp.operands);
    warp.arrived = 0;
    warp.runnable = kFullWarp;
    if (kind == Collective::kSyncWarp) warp.sync_time = ++clock_;
  }
  yield();
}

// ---- Memory ----

bool Worker::ordered(std::uint32_t time, int thread) const {
  const int me = current_->index;
  if (thread == me) return true;
  return time <
         (thread / kLanes == me / kLanes ? warps_[static_cast<std::size_t>(me / kLanes)].sync_time : block_sync_);
}

bool Worker::in_shared_area(std::uintptr_t address) const {
  return address - reinterpret_cast<std::uintptr_t>(shared_area_) < kSharedArea + 2 * kSharedGuard;
}

std::string Worker::access_text(const void* address, std::size_t bytes, bool write, CodeAddress code) const {
  std::ostringstream text;
  text << name_of(current_->index) << (write ? " stores " : " loads ") << bytes << " bytes at ";
  if (in_shared_area(reinterpret_cast<std::uintptr_t>(address))) {
    text << "shared offset " << static_cast<const std::byte*>(address) - shared_;
  } else {
    text << address;
  }
  text << ", " << describe_code(code);
  return text.str();
}

std::size_t Worker::shared_offset(const void* address, std::size_t bytes, CodeAddress code) {
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(address) - shared_);
  if (offset >= launch_->shared_bytes || offset + bytes > launch_->shared_bytes) {
    fail(Fault::kSharedBounds, access_text(address, bytes, false, code) + ": the launch has " +
                                   std::to_string(launch_->shared_bytes) + " bytes of shared memory");
  }
  return offset;
}

void Worker::tell_race(std::size_t offset, int other, CodeAddress other_code, bool other_wrote, bool write,
                       CodeAddress code) {
  fail(Fault::kRace, access_text(shared_ + offset, 1, write, code) + ": " + name_of(other) +
                         (other_wrote ? " stored" : " loaded") + " there at " + describe_code(other_code) +
                         " with no barrier in between");
}

void Worker::read_shared(std::size_t offset, std::size_t bytes, CodeAddress code, bool by_whole_warp) {
  const auto me = static_cast<std::uint16_t>(current_->index);
  const std::uint32_t warp_sync = warps_[me / kLanes].sync_time;
  for (std::size_t i = offset; i < offset + bytes; ++i) {
    SharedByte& byte = shadow_[i];
    if (byte.write_time < block_start_) {
      fail(Fault::kUninitialised, access_text(shared_ + i, 1, false, code) + ", which nobody has written");
    }
    if (byte.copy_under_way) {
      fail(Fault::kCopyUnderWay, access_text(shared_ + i, 1, false, code) + ": the copy that " + name_of(byte.writer) +
                                     " started at " + describe_code(byte.write_code) + " is not waited for");
    }
    if (!ordered(byte.write_time, byte.writer)) tell_race(i, byte.writer, byte.write_code, true, false, code);
    if (byte.read_time < block_sync_) {
      byte.reader = me;
      byte.read_by_warps = byte.read_by_lanes = false;
    } else if (byte.reader / kLanes != me / kLanes) {
      byte.read_by_warps = true;
    } else if (byte.read_time < warp_sync) {
      byte.reader = me;
      byte.read_by_lanes = false;
    } else if (byte.reader != me) {
      byte.read_by_lanes = true;
    }
    byte.read_by_lanes = byte.read_by_lanes || by_whole_warp;
    byte.read_time = clock_;
    byte.read_code = code;
  }
}

void Worker::write_shared(std::size_t offset, std::size_t bytes, CodeAddress code, bool atomic) {
  const auto me = static_cast<std::uint16_t>(current_->index);
  const std::uint32_t warp_sync = warps_[me / kLanes].sync_time;
  for (std::size_t i = offset; i < offset + bytes; ++i) {
    SharedByte& byte = shadow_[i];
    if (byte.write_time >= block_start_) {
      if (byte.copy_under_way) {
        fail(Fault::kCopyUnderWay, access_text(shared_ + i, 1, true, code) + ": the copy that " + name_of(byte.writer) +
                                       " started at " + describe_code(byte.write_code) + " is not waited for");
      }
      if (!(atomic && byte.atomic) && !ordered(byte.write_time, byte.writer)) {
        tell_race(i, byte.writer, byte.write_code, true, true, code);
      }
    }
    if (byte.read_time >= block_sync_) {
      const bool same_warp = byte.reader / kLanes == me / kLanes;
      const bool lanes = byte.read_time >= warp_sync && (byte.reader != me || byte.read_by_lanes);
      if (byte.read_by_warps || !same_warp || lanes) tell_race(i, byte.reader, byte.read_code, false, true, code);
    }
    byte.write_time = clock_;
    byte.write_code = code;
    byte.writer = me;
    byte.atomic = atomic;
    byte.copy_under_way = false;  // one of an earlier block
  }
}

void Worker::fail_misaligned(const void* address, CodeAddress code) {
  std::ostringstream text;
  text << name_of(current_->index) << " uses " << address << ", which is not aligned, " << describe_code(code);
  fail(Fault::kMisaligned, text.str());
}

void Worker::access(const void* address, std::size_t bytes, bool write, bool aligned, CodeAddress code) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (at - reinterpret_cast<std::uintptr_t>(stacks_.stack(static_cast<std::size_t>(current_->index))) <
      Stacks::usable()) {
    return;
  }
  if (aligned && at % bytes != 0) {
    fail(Fault::kMisaligned, access_text(address, bytes, write, code) + ": not aligned");
  }
  if (!in_shared_area(at)) {
    check_global(address, bytes, write, code);
    return;
  }
  const std::size_t offset = shared_offset(address, bytes, code);
  if (write) {
    write_shared(offset, bytes, code, false);
  } else {
    read_shared(offset, bytes, code, false);
  }
  if (launch_->settings.count_banks) log_banks(write ? Kind::kStore : Kind::kLoad, offset, bytes, code);
}

void Worker::atomic_access(const void* address, std::size_t bytes, CodeAddress code) {
  if (in_shared_area(reinterpret_cast<std::uintptr_t>(address))) {
    const std::size_t offset = shared_offset(address, bytes, code);
    if (shadow_[offset].write_time < block_start_) {
      fail(Fault::kUninitialised, access_text(address, bytes, false, code) + ", which nobody has written");
    }
    write_shared(offset, bytes, code, true);
    return;
  }
  check_global(address, bytes, true, code);
  GlobalByte* shadow = last_span_->shadow + (reinterpret_cast<std::uintptr_t>(address) - last_span_->begin);
  for (std::size_t i = 0; i < bytes; ++i) shadow[i].atomic = true;
}

void Worker::check_global(const void* address, std::size_t bytes, bool write, CodeAddress code) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (last_span_ == nullptr || at < last_span_->begin || at >= last_span_->end) {
    const auto& spans = launch_->global;
    const auto after =
        std::upper_bound(spans.begin(), spans.end(), at,
                         [](std::uintptr_t value, const GlobalSpan& span) { return value < span.begin; });
    if (after == spans.begin() || at >= std::prev(after)->end) {
      const auto arguments = reinterpret_cast<std::uintptr_t>(launch_->arguments);
      if (!write && (at - arguments < launch_->argument_bytes || is_constant(at, bytes))) return;
      fail(Fault::kGlobalBounds, access_text(address, bytes, write, code) + ": not memory of the device");
    }
    last_span_ = &*std::prev(after);
  }
  if (at + bytes > last_span_->end) {
    fail(Fault::kGlobalBounds, access_text(address, bytes, write, code) + ": reaches beyond its memory");
  }
  if (last_span_->shadow == nullptr) {
    if (write) fail(Fault::kGlobalBounds, access_text(address, bytes, write, code) + ": read-only memory");
    return;
  }
  GlobalByte* shadow = last_span_->shadow + (at - last_span_->begin);
  for (std::size_t i = 0; i < bytes; ++i) {
    GlobalByte& byte = shadow[i];
    if (byte.launch == launch_->serial && !byte.atomic) {
      if (byte.block != block_) {
        fail(Fault::kRace, access_text(address, bytes, write, code) + ": block " + std::to_string(byte.block) +
                               " stored there in the same launch");
      }
      if (!ordered(byte.time, byte.thread)) {
        fail(Fault::kRace, access_text(address, bytes, write, code) + ": " + name_of(byte.thread) +
                               " stored there with no barrier in between");
      }
    }
    if (write) byte = {launch_->serial, block_, clock_, static_cast<std::uint16_t>(current_->index), false};
  }
}

// ---- Asynchronous copies ----

void Worker::copy(void* target, const void* source, bool valid, CodeAddress code) {
  constexpr std::size_t kBytes = 16;
  const auto to = reinterpret_cast<std::uintptr_t>(target);
  if (!in_shared_area(to)) {
    fail(Fault::kSharedBounds,
         access_text(target, kBytes, true, code) + ": the target of a copy must be shared memory");
  }
  if (to % kBytes != 0) fail(Fault::kMisaligned, access_text(target, kBytes, true, code) + ": not aligned");
  const std::size_t offset = shared_offset(target, kBytes, code);
  if (valid) {
    if (reinterpret_cast<std::uintptr_t>(source) % kBytes != 0) {
      fail(Fault::kMisaligned, access_text(source, kBytes, false, code) + ": not aligned");
    }
    check_global(source, kBytes, false, code);
  }
  write_shared(offset, kBytes, code, false);
  for (std::size_t i = 0; i < kBytes; ++i) shadow_[offset + i].copy_under_way = true;
  const Copy made{offset, valid ? source : nullptr, code};
  if (launch_->settings.copies == Copies::kAtIssue) perform(made);
  current_->open_copies.push_back(made);
  if (launch_->settings.count_banks) log_banks(Kind::kCopy, offset, kBytes, code);
}

void Worker::perform(const Copy& copy) {
  if (copy.source == nullptr) {
    std::memset(shared_ + copy.offset, 0, 16);
  } else {
    std::memcpy(shared_ + copy.offset, copy.source, 16);
  }
}

void Worker::commit_copies() {
  current_->groups.push_back(std::move(current_->open_copies));
  current_->open_copies.clear();
}

void Worker::wait_copies(int newest) {
  auto& groups = current_->groups;
  while (groups.size() > static_cast<std::size_t>(newest)) {
    finish_copies(groups.front());
    groups.erase(groups.begin());
  }
}

void Worker::finish_copies(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    if (launch_->settings.copies == Copies::kAtWait) perform(copy);
    for (std::size_t i = copy.offset; i < copy.offset + 16; ++i) {
      shadow_[i].copy_under_way = false;
      shadow_[i].write_time = clock_;  // others see it after a barrier from here
    }
  }
}

void Worker::load_matrix_row(const void* row, CodeAddress code) {
  constexpr std::size_t kBytes = 16;
  const auto at = reinterpret_cast<std::uintptr_t>(row);
  if (!in_shared_area(at)) {
    fail(Fault::kSharedBounds, access_text(row, kBytes, false, code) + ": ldmatrix reads shared memory only");
  }
  if (at % kBytes != 0) fail(Fault::kMisaligned, access_text(row, kBytes, false, code) + ": not aligned");
  read_shared(shared_offset(row, kBytes, code), kBytes, code, true);
}

// ---- Banks: 32 of 4 bytes ----

namespace {

constexpr std::uint32_t kBanks = 32;

/// Wavefronts for accesses that the hardware takes together: the most distinct words in one bank.
std::uint64_t wavefronts(const std::vector<std::uint32_t>& words) {
  std::array<std::vector<std::uint32_t>, kBanks> banks;
  std::size_t most = 0;
  for (const std::uint32_t word : words) {
    auto& bank = banks[word % kBanks];
    if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
    most = std::max(most, bank.size());
  }
  return most;
}

void add_words(std::vector<std::uint32_t>& words, std::uint32_t offset, std::uint32_t bytes) {
  for (std::uint32_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) words.push_back(word);
}

}  // namespace

void Worker::count_matrix_load(const std::array<const void*, kLanes>& rows) {
  if (!launch_->settings.count_banks) return;
  for (std::size_t first = 0; first < kLanes; first += 8) {
    std::vector<std::uint32_t> words;
    for (std::size_t lane = first; lane < first + 8; ++lane) {
      add_words(words, static_cast<std::uint32_t>(static_cast<const std::byte*>(rows[lane]) - shared_), 16);
    }
    record_.matrix_loads.wavefronts += wavefronts(words);
    ++record_.matrix_loads.without_conflicts;
  }
}

void Worker::log_banks(Kind kind, std::size_t offset, std::size_t bytes, CodeAddress code) {
  const auto thread = static_cast<std::uint16_t>(current_->index);
  const std::uint32_t occurrence = bank_occurrences_[static_cast<std::uint64_t>(code) << 16 | thread]++;
  bank_log_.push_back(
      {code, thread, kind, static_cast<std::uint8_t>(bytes), occurrence, static_cast<std::uint32_t>(offset)});
}

/// Lanes of a warp that pass an instruction for the same time pass it together.
void Worker::count_banks() {
  const auto together = [](const BankAccess& a) {
    const auto lanes_at_once = static_cast<std::uint16_t>(kLanes / std::max(1, a.bytes / 4));
    return std::make_tuple(a.code, a.occurrence, a.kind, a.bytes, a.thread / lanes_at_once);
  };
  std::sort(bank_log_.begin(), bank_log_.end(),
            [&](const BankAccess& a, const BankAccess& b) { return together(a) < together(b); });
  for (std::size_t i = 0; i < bank_log_.size();) {
    const auto key = together(bank_log_[i]);
    BankCount& count = bank_log_[i].kind == Kind::kCopy    ? record_.copies
                       : bank_log_[i].kind == Kind::kStore ? record_.stores
                                                           : record_.loads;
    std::vector<std::uint32_t> words;
    for (; i < bank_log_.size() && together(bank_log_[i]) == key; ++i) {
      add_words(words, bank_log_[i].offset, bank_log_[i].bytes);
    }
    count.wavefronts += wavefronts(words);
    ++count.without_conflicts;
  }
  bank_log_.clear();
  bank_occurrences_.clear();
}

}  // namespace fused_mha::cuda_emulation
