// SPDX-License-Identifier: BSD-3-Clause
//
// The emulation itself: kernels with a planted fault must be caught, in every order and copy mode, and their correct twins
// must pass. This file is compiled as kernels are.
#include <array>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "catch.h"
#include "cuda/device.h"
#include "cuda_emulation/control.h"

namespace fused_mha::test {
namespace {

using namespace cuda;
using cuda_emulation::Copies;
using cuda_emulation::EmulationError;
using cuda_emulation::Fault;
using cuda_emulation::GlobalRange;
using cuda_emulation::Order;
using cuda_emulation::settings;

class SettingsGuard {
 public:
  SettingsGuard() : before_(settings()) {}
  ~SettingsGuard() { settings() = before_; }
  SettingsGuard(const SettingsGuard&) = delete;
  SettingsGuard& operator=(const SettingsGuard&) = delete;

 private:
  cuda_emulation::Settings before_;
};

/// Runs `body` under every order and copy mode.
template <typename Body>
void in_every_order(const Body& body) {
  const SettingsGuard guard;
  for (const Order order : {Order::kAscending, Order::kDescending, Order::kRandom, Order::kOneWarpAhead}) {
    for (const Copies copies : {Copies::kAtIssue, Copies::kAtWait}) {
      settings().order = order;
      settings().copies = copies;
      settings().seed = 7;
      INFO("order " << static_cast<int>(order) << ", copies " << static_cast<int>(copies));
      body();
    }
  }
}

struct Outcome {
  Fault fault = Fault::kNone;
  std::string text;
};

/// Launches and says what fault stopped it.
template <typename... Parameters, typename... Arguments>
Outcome run(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::size_t shared_bytes,
            const Arguments&... arguments) {
  try {
    launch("kernel_under_test", kernel, dim3(blocks), dim3(threads), shared_bytes, nullptr, arguments...);
  } catch (const EmulationError& error) {
    return {error.fault(), error.what()};
  }
  return {};
}

// ---- Barriers ----

/// out[i] = in[threads - 1 - i] through shared memory.
template <bool kWithBarrier>
__global__ void reverse(const float* in, float* out) {
  float* shared = dynamic_shared<float>();
  const unsigned i = threadIdx.x;
  shared[i] = in[blockIdx.x * blockDim.x + i];
  if constexpr (kWithBarrier) __syncthreads();
  out[blockIdx.x * blockDim.x + i] = shared[blockDim.x - 1 - i];
}

/// Overwrites what other warps still read.
template <bool kWithBarrier>
__global__ void rotate_twice(float* out) {
  float* shared = dynamic_shared<float>();
  const unsigned i = threadIdx.x;
  shared[i] = static_cast<float>(i);
  __syncthreads();
  const float next = shared[(i + 32) % blockDim.x];
  if constexpr (kWithBarrier) __syncthreads();
  shared[i] = next;
  __syncthreads();
  out[i] = shared[(i + 32) % blockDim.x];
}

/// Neighbouring lanes exchange a number by shared memory.
template <bool kWithBarrier>
__global__ void exchange_lanes(float* out) {
  float* shared = dynamic_shared<float>();
  const unsigned i = threadIdx.x;
  shared[i] = static_cast<float>(i);
  if constexpr (kWithBarrier) __syncwarp();
  out[i] = shared[i ^ 1U];
}

__global__ void sync_in_a_branch(float* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 1.0F;
}

__global__ void sync_in_two_branches(float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1.0F;
}

__global__ void shuffle_in_a_branch(float* out) {
  float value = 0.0F;
  if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(kAllLanes, 1.0F, 1);
  out[threadIdx.x] = value;
}

__global__ void leave_early(float* out) {
  if (threadIdx.x == 40) return;
  __syncwarp();
  out[threadIdx.x] = 1.0F;
}

}  // namespace

TEST_CASE("a missing __syncthreads is a race in every order") {
  std::vector<float> in(256);
  std::iota(in.begin(), in.end(), 0.0F);
  std::vector<float> out(256);
  const GlobalRange in_range(in.data(), in.size() * 4, false);
  const GlobalRange out_range(out.data(), out.size() * 4, true);
  in_every_order([&] {
    const Outcome outcome = run(reverse<false>, 2, 128, 512, in.data(), out.data());
    // A thread that comes first reads what nobody has written yet; one that comes late meets the race.
    CHECK((outcome.fault == Fault::kRace || outcome.fault == Fault::kUninitialised));
    CHECK_THAT(outcome.text, contains("test_emulation.cpp:"));
    CHECK_THAT(outcome.text, contains("kernel_under_test"));
    out.assign(out.size(), -1.0F);
    REQUIRE(run(reverse<true>, 2, 128, 512, in.data(), out.data()).text.empty());
    for (std::size_t i = 0; i < 128; ++i) {
      REQUIRE(out[i] == static_cast<float>(127 - i));
      REQUIRE(out[128 + i] == static_cast<float>(255 - i));
    }
  });
}

TEST_CASE("shared memory that is written while another warp may still read it is a race") {
  std::vector<float> out(128);
  const GlobalRange range(out.data(), out.size() * 4, true);
  in_every_order([&] {
    CHECK(run(rotate_twice<false>, 1, 128, 512, out.data()).fault == Fault::kRace);
    REQUIRE(run(rotate_twice<true>, 1, 128, 512, out.data()).text.empty());
    for (std::size_t i = 0; i < 128; ++i) REQUIRE(out[i] == static_cast<float>((i + 64) % 128));
  });
}

TEST_CASE("lanes of a warp need __syncwarp to see each other's stores") {
  std::vector<float> out(64);
  const GlobalRange range(out.data(), out.size() * 4, true);
  in_every_order([&] {
    const Fault fault = run(exchange_lanes<false>, 1, 64, 256, out.data()).fault;
    CHECK((fault == Fault::kRace || fault == Fault::kUninitialised));
    REQUIRE(run(exchange_lanes<true>, 1, 64, 256, out.data()).text.empty());
    for (std::size_t i = 0; i < 64; ++i) REQUIRE(out[i] == static_cast<float>(i ^ 1U));
  });
}

TEST_CASE("barriers that not every thread reaches are told with both places") {
  std::vector<float> out(64);
  const GlobalRange range(out.data(), out.size() * 4, true);
  in_every_order([&] {
    for (const auto kernel : {sync_in_a_branch, sync_in_two_branches, shuffle_in_a_branch, leave_early}) {
      const Outcome outcome = run(kernel, 1, 64, 0, out.data());
      CHECK(outcome.fault == Fault::kDivergence);
      CHECK_THAT(outcome.text, contains("test_emulation.cpp:"));
    }
  });
}

}  // namespace fused_mha::test
