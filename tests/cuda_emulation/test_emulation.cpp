// SPDX-License-Identifier: BSD-3-Clause
//
// The emulation itself: kernels with a planted fault must be caught, in every order and copy mode, and their correct
// twins must pass. This file is compiled as kernels are.
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

// ---- Memory ----

__global__ void store_shared(float* out, unsigned at) {
  float* shared = dynamic_shared<float>();
  if (threadIdx.x == 0) shared[at] = 1.0F;
  out[threadIdx.x] = 1.0F;
}

__global__ void load_shared(float* out, unsigned at) { out[threadIdx.x] = dynamic_shared<float>()[at]; }

__global__ void copy_elements(const half* in, half* out, int count) {
  const auto i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) out[i] = in[i];
}

__global__ void load_pair(const float* in, float* out) {
  const float2 pair = *reinterpret_cast<const float2*>(in + 1);
  if (threadIdx.x == 0) out[0] = pair.x + pair.y;
}

/// Every block stores to one element.
__global__ void store_by_blocks(float* out) {
  if (threadIdx.x == 0) out[0] = static_cast<float>(blockIdx.x);
}

__global__ void count_blocks(int* out) {
  if (threadIdx.x == 0) atomicAdd(out, 1);
}

__global__ void add_in_shared(int* out) {
  int* shared = dynamic_shared<int>();
  if (threadIdx.x == 0) shared[0] = 0;
  __syncthreads();
  atomicAdd(shared, 1);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = shared[0];
}

// ---- Asynchronous copies ----

enum class Wait { kNone, kNewestToo, kAllButNewest, kWithoutBarrier };

/// Two copies of 512 bytes in two groups; adds both up.
template <Wait kWait>
__global__ void copy_and_add(const float* in, float* out) {
  float* shared = dynamic_shared<float>();
  const unsigned i = threadIdx.x;
  cp_async_16(shared_address(shared + 4 * i), in + 4 * i, true);
  cp_async_commit();
  cp_async_16(shared_address(shared + 128 + 4 * i), in + 128 + 4 * i, i < 16);
  cp_async_commit();
  if constexpr (kWait == Wait::kAllButNewest) cp_async_wait<1>();
  if constexpr (kWait == Wait::kNewestToo || kWait == Wait::kWithoutBarrier) cp_async_wait<0>();
  if constexpr (kWait != Wait::kWithoutBarrier) __syncthreads();
  for (unsigned j = i; j < 128; j += 32) out[j] = shared[j] + shared[128 + j];
}

/// Refills the buffer that other lanes still read.
__global__ void refill_too_early(const float* in, float* out) {
  float* shared = dynamic_shared<float>();
  const unsigned i = threadIdx.x;
  cp_async_16(shared_address(shared + 4 * i), in + 4 * i, true);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  out[i] = shared[i];
  cp_async_16(shared_address(shared + 4 * i), in + 4 * i, true);
  cp_async_commit();
  cp_async_wait<0>();
}

// ---- Matrices ----

constexpr int kRows = 16, kColumns = 8, kDepth = 16;

/// c = a b for a (16, 16) and b (16, 8), both row-major; rows of shared memory hold 16 or 8 elements.
template <typename T, bool kRightMap>
__global__ void multiply(const T* a, const T* b, float* c) {
  T* shared_a = dynamic_shared<T>();
  T* shared_b = shared_a + kRows * kDepth;
  const auto lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < kRows * kDepth; i += 32) shared_a[i] = a[i];
  for (int i = lane; i < kDepth * kColumns; i += 32) shared_b[i] = b[i];
  __syncwarp();
  std::uint32_t fragment_a[4];
  std::uint32_t pairs[4];
  // Matrices: rows 0-7 and 8-15 of the left half, then of the right half. The planted fault takes the right half first.
  const int row = lane % 16;
  const int half_of_columns = kRightMap ? lane / 16 : 1 - lane / 16;
  ldmatrix_x4(fragment_a, shared_address(shared_a + row * kDepth + half_of_columns * 8));
  ldmatrix_x4_trans(pairs, shared_address(shared_b + lane % 16 * kColumns));
  const std::uint32_t fragment_b[2] = {pairs[0], pairs[1]};
  float d[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  mma_m16n8k16<T>(d, fragment_a, fragment_b);
  const int group = lane / 4;
  const int pair = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) c[(group + i / 2 * 8) * kColumns + pair + i % 2] = d[i];
}

/// A 64 x 64 tile of 16-bit elements in shared memory, 128 bytes a row, filled by copies and read by ldmatrix.
template <bool kSwizzled>
__global__ void read_tile(const half* in, float* out) {
  half* shared = dynamic_shared<half>();
  const auto chunk = [](int row, int column) { return row * 64 + (kSwizzled ? column ^ (row % 8) : column) * 8; };
  const auto lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 64 * 8; i += 32) {
    cp_async_16(shared_address(shared + chunk(i / 8, i % 8)), in + i * 8, true);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  float sum = 0.0F;
  for (int row = 0; row < 64; row += 16) {
    for (int column = 0; column < 8; column += 2) {
      std::uint32_t r[4];
      ldmatrix_x4(r, shared_address(shared + chunk(row + lane % 16, column + lane / 16)));
      for (const std::uint32_t pair : r) sum += unpack2<half>(pair).x + unpack2<half>(pair).y;
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  if (lane == 0) out[0] = sum;
}

/// Each lane reads a column of 32 floats: in one bank, or with a row of 33 in 32 different ones.
template <int kRowLength>
__global__ void read_columns(float* out) {
  float* shared = dynamic_shared<float>();
  const auto lane = static_cast<int>(threadIdx.x);
  for (int row = 0; row < 32; ++row) shared[row * kRowLength + lane] = static_cast<float>(row);
  __syncwarp();
  float sum = 0.0F;
  for (int column = 0; column < 32; ++column) sum += shared[lane * kRowLength + column];
  out[lane] = sum;
}

__global__ void votes_and_shuffles(unsigned* out) {
  const unsigned lane = threadIdx.x % 32;
  out[threadIdx.x] = __ballot_sync(kAllLanes, lane % 3 == 0);
  out[64 + threadIdx.x] = __shfl_sync(kAllLanes, lane, 5, 8);
  out[128 + threadIdx.x] = __shfl_down_sync(kAllLanes, lane, 4U);
  out[192 + threadIdx.x] = __shfl_up_sync(kAllLanes, lane, 4U);
  out[256 + threadIdx.x] = static_cast<unsigned>(__any_sync(kAllLanes, lane == 31)) +
                           2 * static_cast<unsigned>(__all_sync(kAllLanes, lane < 31));
  out[320 + threadIdx.x] = static_cast<unsigned>(__shfl_xor_sync(kAllLanes, static_cast<double>(lane), 9));
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
    REQUIRE(run(reverse<true>, 2, 128, 512, in.data(), out.data()).text == "");
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
    REQUIRE(run(rotate_twice<true>, 1, 128, 512, out.data()).text == "");
    for (std::size_t i = 0; i < 128; ++i) REQUIRE(out[i] == static_cast<float>((i + 64) % 128));
  });
}

TEST_CASE("lanes of a warp need __syncwarp to see each other's stores") {
  std::vector<float> out(64);
  const GlobalRange range(out.data(), out.size() * 4, true);
  in_every_order([&] {
    const Fault fault = run(exchange_lanes<false>, 1, 64, 256, out.data()).fault;
    CHECK((fault == Fault::kRace || fault == Fault::kUninitialised));
    REQUIRE(run(exchange_lanes<true>, 1, 64, 256, out.data()).text == "");
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

TEST_CASE("shared memory ends where the launch said, on both sides") {
  std::vector<float> out(32);
  const GlobalRange range(out.data(), out.size() * 4, true);
  CHECK(run(store_shared, 1, 32, 256, out.data(), 63U).text == "");
  for (const unsigned at : {64U, 65U, 1000U, 16000U}) {
    const Outcome outcome = run(store_shared, 1, 32, 256, out.data(), at);
    CHECK(outcome.fault == Fault::kSharedBounds);
    CHECK_THAT(outcome.text, contains("256 bytes of shared memory"));
  }
  CHECK(run(load_shared, 1, 32, 256, out.data(), 64U).fault == Fault::kSharedBounds);
  CHECK(run(load_shared, 1, 32, 256, out.data(), 3U).fault == Fault::kUninitialised);
}

TEST_CASE("global memory is what was named, and read-only where it was named so") {
  std::vector<half> memory(3 * 100);
  const half* in = memory.data() + 100;  // with memory of nobody on both sides
  std::vector<half> out(128);
  const GlobalRange in_range(in, 200, false);
  const GlobalRange out_range(out.data(), 256, true);
  CHECK(run(copy_elements, 1, 128, 0, in, out.data(), 100).text == "");
  for (const auto& [first, count] : {std::pair{in, 101}, std::pair{in - 1, 100}, std::pair{in + 60, 41}}) {
    const Outcome outcome = run(copy_elements, 1, 128, 0, first, out.data(), count);
    CHECK(outcome.fault == Fault::kGlobalBounds);
    CHECK_THAT(outcome.text, contains("loads 2 bytes"));
  }
  const Outcome outcome = run(copy_elements, 1, 128, 0, in, const_cast<half*>(in), 100);
  CHECK(outcome.fault == Fault::kGlobalBounds);
  CHECK_THAT(outcome.text, contains("read-only"));
}

TEST_CASE("wide loads need aligned addresses") {
  alignas(16) std::array<float, 8> in{};
  std::vector<float> out(1);
  const GlobalRange in_range(in.data(), sizeof(in), false);
  const GlobalRange out_range(out.data(), 4, true);
  CHECK(run(load_pair, 1, 32, 0, in.data(), out.data()).fault == Fault::kMisaligned);
  CHECK(run(load_pair, 1, 32, 0, in.data() + 1, out.data()).text == "");
}

TEST_CASE("two blocks must not store to one place, unless by atomics") {
  std::vector<float> out(1);
  std::vector<int> count(1);
  const GlobalRange out_range(out.data(), 4, true);
  const GlobalRange count_range(count.data(), 4, true);
  in_every_order([&] {
    CHECK(run(store_by_blocks, 1, 32, 0, out.data()).text == "");
    CHECK(run(store_by_blocks, 2, 32, 0, out.data()).fault == Fault::kRace);
    count[0] = 0;
    CHECK(run(count_blocks, 37, 32, 0, count.data()).text == "");
    CHECK(count[0] == 37);
    CHECK(run(add_in_shared, 1, 96, 4, count.data()).text == "");
    CHECK(count[0] == 96);
  });
}

TEST_CASE("copies must be waited for by their thread and told to others by a barrier") {
  alignas(16) std::array<float, 256> in{};
  std::iota(in.begin(), in.end(), 0.0F);
  std::vector<float> out(128);
  const GlobalRange in_range(in.data(), sizeof(in), false);
  const GlobalRange out_range(out.data(), out.size() * 4, true);
  in_every_order([&] {
    CHECK(run(copy_and_add<Wait::kNone>, 1, 32, 1024, in.data(), out.data()).fault == Fault::kCopyUnderWay);
    CHECK(run(copy_and_add<Wait::kAllButNewest>, 1, 32, 1024, in.data(), out.data()).fault == Fault::kCopyUnderWay);
    const Fault fault = run(copy_and_add<Wait::kWithoutBarrier>, 1, 32, 1024, in.data(), out.data()).fault;
    CHECK((fault == Fault::kRace || fault == Fault::kUninitialised || fault == Fault::kCopyUnderWay));
    CHECK(run(refill_too_early, 1, 32, 512, in.data(), out.data()).fault == Fault::kRace);
    REQUIRE(run(copy_and_add<Wait::kNewestToo>, 1, 32, 1024, in.data(), out.data()).text == "");
    for (std::size_t i = 0; i < 128; ++i) REQUIRE(out[i] == in[i] + (i < 64 ? in[128 + i] : 0.0F));
  });
}

TEST_CASE("copies stay inside of both memories and are aligned") {
  alignas(16) std::array<float, 256> in{};
  std::vector<float> out(128);
  const GlobalRange out_range(out.data(), out.size() * 4, true);
  {
    const GlobalRange range(in.data(), 1000, false);
    CHECK(run(copy_and_add<Wait::kNewestToo>, 1, 32, 512, in.data(), out.data()).fault == Fault::kSharedBounds);
  }
  const GlobalRange range(in.data(), 496, false);
  CHECK(run(copy_and_add<Wait::kNewestToo>, 1, 32, 1024, in.data(), out.data()).fault == Fault::kGlobalBounds);
  CHECK(run(copy_and_add<Wait::kNewestToo>, 1, 32, 1024, in.data() + 1, out.data()).fault == Fault::kMisaligned);
}

TEMPLATE_TEST_CASE("mma and ldmatrix multiply matrices, and a wrong lane map does not", "", half, bfloat16) {
  std::vector<TestType> a(kRows * kDepth), b(kDepth * kColumns);
  std::vector<float> c(kRows * kColumns), expected(kRows * kColumns);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = narrow<TestType>(static_cast<float>(i * 7 % 23) - 11.0F);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = narrow<TestType>(static_cast<float>(i * 5 % 17) - 8.0F);
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t column = 0; column < kColumns; ++column) {
      for (std::size_t k = 0; k < kDepth; ++k) {
        expected[row * kColumns + column] += widen(a[row * kDepth + k]) * widen(b[k * kColumns + column]);
      }
    }
  }
  const GlobalRange a_range(a.data(), a.size() * 2, false);
  const GlobalRange b_range(b.data(), b.size() * 2, false);
  const GlobalRange c_range(c.data(), c.size() * 4, true);
  in_every_order([&] {
    REQUIRE(run(multiply<TestType, true>, 1, 32, 1024, a.data(), b.data(), c.data()).text == "");
    CHECK(c == expected);  // small whole numbers: exact in any order of sums
    REQUIRE(run(multiply<TestType, false>, 1, 32, 1024, a.data(), b.data(), c.data()).text == "");
    CHECK(c != expected);
  });
}

TEST_CASE("a swizzled tile has no bank conflicts, a plain one has") {
  const SettingsGuard guard;
  settings().count_banks = true;
  std::vector<half> memory(64 * 64 + 8, narrow<half>(0.5F));
  half* in = memory.data() + (8 - reinterpret_cast<std::uintptr_t>(memory.data()) / 2 % 8) % 8;
  std::vector<float> out(1);
  const GlobalRange in_range(in, 64 * 64 * 2, false);
  const GlobalRange out_range(out.data(), 4, true);
  const auto banks = [&](auto kernel) {
    cuda_emulation::launches().clear();
    REQUIRE(run(kernel, 1, 32, 8192, in, out.data()).text == "");
    CHECK(out[0] == 2048.0F);
    return cuda_emulation::launches().at(0);
  };
  const auto swizzled = banks(read_tile<true>);
  CHECK(swizzled.matrix_loads.without_conflicts == 64);
  CHECK(swizzled.matrix_loads.wavefronts == 64);
  CHECK(swizzled.copies.wavefronts == swizzled.copies.without_conflicts);
  const auto plain = banks(read_tile<false>);
  CHECK(plain.matrix_loads.wavefronts == 8 * 64);
}

TEST_CASE("bank conflicts of plain loads are counted") {
  const SettingsGuard guard;
  settings().count_banks = true;
  std::vector<float> out(32);
  const GlobalRange range(out.data(), 128, true);
  cuda_emulation::launches().clear();
  REQUIRE(run(read_columns<32>, 1, 32, 32 * 32 * 4, out.data()).text == "");
  REQUIRE(run(read_columns<33>, 1, 32, 32 * 33 * 4, out.data()).text == "");
  const auto& records = cuda_emulation::launches();
  CHECK(records[0].loads.without_conflicts == 32);
  CHECK(records[0].loads.wavefronts == 32 * 32);
  CHECK(records[0].stores.wavefronts == 32);
  CHECK(records[1].loads.wavefronts == 32);
}

TEST_CASE("votes and shuffles") {
  std::vector<unsigned> out(6 * 64);
  const GlobalRange range(out.data(), out.size() * 4, true);
  in_every_order([&] {
    REQUIRE(run(votes_and_shuffles, 1, 64, 0, out.data()).text == "");
    for (unsigned i = 0; i < 64; ++i) {
      const unsigned lane = i % 32;
      REQUIRE(out[i] == 0x49249249U);
      REQUIRE(out[64 + i] == lane / 8 * 8 + 5);
      REQUIRE(out[128 + i] == (lane + 4 < 32 ? lane + 4 : lane));
      REQUIRE(out[192 + i] == (lane >= 4 ? lane - 4 : lane));
      REQUIRE(out[256 + i] == 1);
      REQUIRE(out[320 + i] == (lane ^ 9U));
    }
  });
}

TEST_CASE("blocks on several host threads give the same") {
  const SettingsGuard guard;
  settings().host_threads = 3;
  std::vector<float> in(64 * 50);
  std::iota(in.begin(), in.end(), 0.0F);
  std::vector<float> out(in.size());
  const GlobalRange in_range(in.data(), in.size() * 4, false);
  const GlobalRange out_range(out.data(), out.size() * 4, true);
  REQUIRE(run(reverse<true>, 50, 64, 256, in.data(), out.data()).text == "");
  for (std::size_t i = 0; i < in.size(); ++i) REQUIRE(out[i] == in[i / 64 * 64 + 63 - i % 64]);
  CHECK(run(reverse<false>, 50, 64, 256, in.data(), out.data()).fault != Fault::kNone);
}

TEST_CASE("of a long grid the ends can run alone") {
  const SettingsGuard guard;
  settings().blocks_at_each_end = 2;
  std::vector<float> in(64 * 9);
  std::iota(in.begin(), in.end(), 1.0F);
  std::vector<float> out(in.size());
  const GlobalRange in_range(in.data(), in.size() * 4, false);
  const GlobalRange out_range(out.data(), out.size() * 4, true);
  in_every_order([&] {
    std::fill(out.begin(), out.end(), 0.0F);
    REQUIRE(run(reverse<true>, 9, 64, 256, in.data(), out.data()).text == "");
    for (std::size_t block = 0; block < 9; ++block) {
      const bool runs = block < 2 || block >= 7;
      CHECK(out[block * 64] == (runs ? in[block * 64 + 63] : 0.0F));
    }
  });
}

TEST_CASE("launches that no card takes are refused") {
  float* const nothing = nullptr;
  CHECK(run(store_by_blocks, 1, 2048, 0, nothing).fault == Fault::kLaunch);
  CHECK(run(store_by_blocks, 1, 40, 0, nothing).fault == Fault::kLaunch);
  CHECK(run(store_by_blocks, 0, 32, 0, nothing).fault == Fault::kLaunch);
  CHECK(run(store_by_blocks, 1, 32, 163 * 1024 + 1, nothing).fault == Fault::kLaunch);
  CHECK_THROWS_WITH(launch("tall", store_by_blocks, dim3(1, 65536), dim3(32), 0, nullptr, nothing),
                    contains("tall") && contains("65536"));
}

}  // namespace fused_mha::test
