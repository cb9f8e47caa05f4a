// SPDX-License-Identifier: BSD-3-Clause
//
// Launches, and the instructions that a warp carries out together. Lane maps are those of the PTX manual (ISA 8.5),
// sections 9.7.13.4.8 (mma.m16n8k16) and 9.7.13.4.15 (ldmatrix).
#include "cuda_emulation/runtime.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "worker.h"

namespace fused_mha::cuda_emulation {
namespace {

constexpr unsigned kMostThreads = 1024;

CodeAddress caller(void* return_address) { return code_address(return_address); }

/// Numbers of all binary16 values; the conversion is the larger part of an emulated mma.
const std::vector<float>& half_values() {
  static const std::vector<float> values = [] {
    std::vector<float> made(65536);
    for (std::size_t i = 0; i < made.size(); ++i)
      made[i] = core::to_float(core::Float16{static_cast<std::uint16_t>(i)});
    return made;
  }();
  return values;
}

struct Half {
  static float value(std::uint32_t bits) {
    static const float* const values = half_values().data();
    return values[bits & 0xFFFFU];
  }
};

struct BFloat {
  static float value(std::uint32_t bits) { return core::to_float(core::BFloat16{static_cast<std::uint16_t>(bits)}); }
};

struct MultiplyOperands {
  float* d;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

template <typename Format>
void multiply(Worker& /*worker*/, std::array<void*, kLanes>& lanes) {
  constexpr std::size_t kRows = 16, kColumns = 8, kDepth = 16;
  std::array<std::array<float, kDepth>, kRows> a;
  std::array<std::array<float, kColumns>, kDepth> b;
  std::array<std::array<float, kColumns>, kRows> d;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const auto& operands = *static_cast<const MultiplyOperands*>(lanes[lane]);
    const std::size_t group = lane / 4;
    const std::size_t pair = lane % 4 * 2;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t row = group + i % 2 * 8;
      const std::size_t column = pair + i / 2 * 8;
      a[row][column] = Format::value(operands.a[i]);
      a[row][column + 1] = Format::value(operands.a[i] >> 16);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const std::size_t row = pair + i * 8;
      b[row][group] = Format::value(operands.b[i]);
      b[row + 1][group] = Format::value(operands.b[i] >> 16);
    }
    for (std::size_t i = 0; i < 4; ++i) d[group + i / 2 * 8][pair + i % 2] = operands.d[i];
  }
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t k = 0; k < kDepth; ++k) {
      for (std::size_t column = 0; column < kColumns; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const auto& operands = *static_cast<const MultiplyOperands*>(lanes[lane]);
    for (std::size_t i = 0; i < 4; ++i) operands.d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

struct MatrixOperands {
  std::uint32_t* r;
  const void* row;
  bool transposed;
};

void load_matrices(Worker& worker, std::array<void*, kLanes>& lanes) {
  std::array<const void*, kLanes> rows;
  for (std::size_t lane = 0; lane < kLanes; ++lane) rows[lane] = static_cast<const MatrixOperands*>(lanes[lane])->row;
  worker.count_matrix_load(rows);
  const auto element = [&](std::size_t matrix, std::size_t row, std::size_t column) {
    return static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(rows[matrix * 8 + row])[column]);
  };
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const auto& operands = *static_cast<const MatrixOperands*>(lanes[lane]);
    const std::size_t outer = lane / 4;
    const std::size_t inner = lane % 4 * 2;
    for (std::size_t matrix = 0; matrix < 4; ++matrix) {
      operands.r[matrix] = operands.transposed
                               ? element(matrix, inner, outer) | element(matrix, inner + 1, outer) << 16
                               : element(matrix, outer, inner) | element(matrix, outer, inner + 1) << 16;
    }
  }
}

struct ShuffleOperands {
  std::uint64_t bits;
  int source;
  std::uint64_t result;
};

void shuffle_lanes(Worker& /*worker*/, std::array<void*, kLanes>& lanes) {
  for (void* lane : lanes) {
    auto& operands = *static_cast<ShuffleOperands*>(lane);
    operands.result = static_cast<const ShuffleOperands*>(lanes[static_cast<std::size_t>(operands.source)])->bits;
  }
}

struct VoteOperands {
  bool predicate;
  unsigned result;
};

void vote(Worker& /*worker*/, std::array<void*, kLanes>& lanes) {
  unsigned result = 0;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    result |= static_cast<unsigned>(static_cast<const VoteOperands*>(lanes[lane])->predicate) << lane;
  }
  for (void* lane : lanes) static_cast<VoteOperands*>(lane)->result = result;
}

void add(BankCount& to, const BankCount& more) {
  to.wavefronts += more.wavefronts;
  to.without_conflicts += more.without_conflicts;
}

void check_launch(const LaunchState& launch) {
  const auto fail = [&](const std::string& text) {
    throw EmulationError(Fault::kLaunch, std::string("kernel ") + launch.name + ": " + text);
  };
  const std::uint64_t threads = std::uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  if (threads == 0 || threads > kMostThreads) fail("a block of " + std::to_string(threads) + " threads");
  if (threads % kLanes != 0) fail(std::to_string(threads) + " threads are no whole number of warps");
  if (launch.grid.x == 0 || launch.grid.x > 0x7FFFFFFFU || launch.grid.y == 0 || launch.grid.y > 65535 ||
      launch.grid.z == 0 || launch.grid.z > 65535) {
    fail("a grid of " + std::to_string(launch.grid.x) + " x " + std::to_string(launch.grid.y) + " x " +
         std::to_string(launch.grid.z) + " blocks");
  }
  if (launch.shared_bytes > launch.settings.shared_bytes_block) {
    fail(std::to_string(launch.shared_bytes) + " bytes of shared memory, where a block can have " +
         std::to_string(launch.settings.shared_bytes_block));
  }
}

std::size_t block_count(dim3 grid) { return std::size_t{grid.x} * grid.y * grid.z; }

std::vector<std::uint32_t> block_order(const LaunchState& launch) {
  const std::size_t all = block_count(launch.grid);
  const std::size_t ends = std::size_t{2} * launch.settings.blocks_at_each_end;
  std::vector<std::uint32_t> order(ends == 0 ? all : std::min(all, ends));
  std::iota(order.begin(), order.end(), 0U);
  if (order.size() < all) {
    std::iota(order.begin() + launch.settings.blocks_at_each_end, order.end(),
              static_cast<std::uint32_t>(all - launch.settings.blocks_at_each_end));
  }
  if (launch.settings.order == Order::kDescending) std::reverse(order.begin(), order.end());
  if (launch.settings.order == Order::kRandom) {
    std::mt19937_64 random(launch.settings.seed);
    std::shuffle(order.begin(), order.end(), random);
  }
  return order;
}

}  // namespace

Settings& settings() {
  static thread_local Settings mine;
  return mine;
}

std::vector<LaunchRecord>& launches() {
  static thread_local std::vector<LaunchRecord> mine;
  return mine;
}

DeviceLimits device_limits() {
  const Settings& card = settings();
  return {card.compute_capability, card.multiprocessors, card.shared_bytes_block};
}

void run_grid(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes, void (*call)(const void*),
              const void* arguments, std::size_t argument_bytes) {
  static std::atomic<std::uint32_t> serial{0};
  LaunchState launch{
      name,           grid,       block,    shared_bytes,  call, static_cast<const std::byte*>(arguments),
      argument_bytes, settings(), ++serial, global_spans()};
  check_launch(launch);
  const std::vector<std::uint32_t> order = block_order(launch);
  LaunchRecord record{
      name, static_cast<unsigned>(block_count(grid)), block.x * block.y * block.z, shared_bytes, {}, {}, {}, {}};
  std::mutex mutex;
  Failure failure;
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    Worker& worker = Worker::mine();
    worker.record() = {};
    for (std::size_t i = next++; i < order.size(); i = next++) {
      if (!worker.run_block(launch, order[i])) {
        next = order.size();
        const std::lock_guard<std::mutex> lock(mutex);
        failure = worker.failure();
        break;
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    add(record.matrix_loads, worker.record().matrix_loads);
    add(record.copies, worker.record().copies);
    add(record.loads, worker.record().loads);
    add(record.stores, worker.record().stores);
  };
  const auto threads = static_cast<int>(
      std::min<std::size_t>(static_cast<std::size_t>(std::max(launch.settings.host_threads, 1)), order.size()));
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  if (failure.fault != Fault::kNone) throw EmulationError(failure.fault, failure.text);
  launches().push_back(record);
}

dim3 thread_index() { return Worker::mine().fiber().thread; }
dim3 block_index() { return Worker::mine().block_position(); }
dim3 block_size() { return Worker::mine().launch().block; }
dim3 grid_size() { return Worker::mine().launch().grid; }
int lane_index() { return Worker::mine().lane(); }
void* dynamic_shared_memory() { return Worker::mine().shared(); }

void sync_threads(const Where& where) { Worker::mine().sync_threads(where); }

void sync_warp(unsigned lanes, const Where& where) {
  Worker::mine().collective(Collective::kSyncWarp, lanes, nullptr, nullptr, where);
}

std::uint64_t shuffle(unsigned lanes, std::uint64_t bits, int source, const Where& where) {
  ShuffleOperands operands{bits, source, 0};
  Worker::mine().collective(Collective::kShuffle, lanes, &operands, shuffle_lanes, where);
  return operands.result;
}

unsigned ballot(unsigned lanes, bool predicate, const Where& where) {
  VoteOperands operands{predicate, 0};
  Worker::mine().collective(Collective::kBallot, lanes, &operands, vote, where);
  return operands.result;
}

void copy_async(void* shared, const void* global, bool valid) {
  Worker::mine().copy(shared, global, valid, caller(__builtin_return_address(0)));
}
void copy_async_commit() { Worker::mine().commit_copies(); }
void copy_async_wait(int newest) { Worker::mine().wait_copies(newest); }

void load_matrix(std::uint32_t (&r)[4], const void* row, bool transposed, const Where& where) {
  Worker& worker = Worker::mine();
  worker.load_matrix_row(row, caller(__builtin_return_address(0)));
  MatrixOperands operands{r, row, transposed};
  worker.collective(Collective::kLoadMatrix, kFullWarp, &operands, load_matrices, where);
}

void multiply_half(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], const Where& where) {
  MultiplyOperands operands{d, a, b};
  Worker::mine().collective(Collective::kMultiply, kFullWarp, &operands, multiply<Half>, where);
}

void multiply_bfloat16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], const Where& where) {
  MultiplyOperands operands{d, a, b};
  Worker::mine().collective(Collective::kMultiply, kFullWarp, &operands, multiply<BFloat>, where);
}

}  // namespace fused_mha::cuda_emulation
