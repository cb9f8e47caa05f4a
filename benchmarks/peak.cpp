// SPDX-License-Identifier: BSD-3-Clause
//
// What the processor can do at most: multiply-adds a second from registers alone, and bytes a second read from memory.
// The loops are inline assembly, so that no compiler shortens them or spills an accumulator. Each keeps enough
// independent sums in flight to cover latency times pipes (4 to 6 cycles, 2 pipes): 24 where there are 32 registers, 12
// where there are 16. Compiled and called by peak.py; every function may be called from any thread.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

enum Kind : int { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2 };

struct Loop {
  const char* name = "";  // empty: this processor has no such instruction
  void (*run)(std::int64_t iterations) = nullptr;
  std::int64_t multiply_adds = 0;  // in one iteration
};

#if defined(__x86_64__)

#define REPEAT_12(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#define REPEAT_24(OP) REPEAT_12(OP) OP(12) OP(13) OP(14) OP(15) OP(16) OP(17) OP(18) OP(19) OP(20) OP(21) OP(22) OP(23)
#define CLOBBER_LOW \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm14", "xmm15"
#define CLOBBER_HIGH \
  "xmm12", "xmm13", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25"

#define CLEAR_ZMM(I) "vpxord %%zmm" #I ", %%zmm" #I ", %%zmm" #I "\n\t"
#define CLEAR_YMM(I) "vxorps %%ymm" #I ", %%ymm" #I ", %%ymm" #I "\n\t"
#define FMA_F32_ZMM(I) "vfmadd231ps %%zmm24, %%zmm25, %%zmm" #I "\n\t"
#define FMA_F64_ZMM(I) "vfmadd231pd %%zmm24, %%zmm25, %%zmm" #I "\n\t"
#define DOT_BF16_ZMM(I) "vdpbf16ps %%zmm24, %%zmm25, %%zmm" #I "\n\t"
#define FMA_F32_YMM(I) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #I "\n\t"
#define FMA_F64_YMM(I) "vfmadd231pd %%ymm14, %%ymm15, %%ymm" #I "\n\t"

// Factors are normal numbers of about 1e-3, whichever dtype reads the bits: zeros would draw less power, and so run at
// a higher clock, than real work does.
constexpr std::uint64_t kFactorBits = 0x3a833a833a833a83;

#define DEFINE_ZMM_LOOP(NAME, TARGET, OP)                                                                            \
  __attribute__((target(TARGET))) void NAME(std::int64_t iterations) {                                               \
    asm volatile("vpbroadcastq %1, %%zmm24\n\tvpbroadcastq %1, %%zmm25\n\t" REPEAT_24(CLEAR_ZMM) "1:\n\t" REPEAT_24( \
                     OP) "decq %0\n\tjnz 1b\n\tvzeroupper"                                                           \
                 : "+r"(iterations)                                                                                  \
                 : "m"(kFactorBits)                                                                                  \
                 : "cc", CLOBBER_LOW, CLOBBER_HIGH);                                                                 \
  }
#define DEFINE_YMM_LOOP(NAME, OP)                                                                                    \
  __attribute__((target("avx2,fma"))) void NAME(std::int64_t iterations) {                                           \
    asm volatile("vpbroadcastq %1, %%ymm14\n\tvpbroadcastq %1, %%ymm15\n\t" REPEAT_12(CLEAR_YMM) "1:\n\t" REPEAT_12( \
                     OP) "decq %0\n\tjnz 1b\n\tvzeroupper"                                                           \
                 : "+r"(iterations)                                                                                  \
                 : "m"(kFactorBits)                                                                                  \
                 : "cc", CLOBBER_LOW);                                                                               \
  }

DEFINE_ZMM_LOOP(f32_avx512, "avx512f", FMA_F32_ZMM)
DEFINE_ZMM_LOOP(f64_avx512, "avx512f", FMA_F64_ZMM)
DEFINE_ZMM_LOOP(bf16_avx512, "avx512f", DOT_BF16_ZMM)
DEFINE_YMM_LOOP(f32_avx2, FMA_F32_YMM)
DEFINE_YMM_LOOP(f64_avx2, FMA_F64_YMM)

Loop find_loop(int kind) {
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (kind == kBFloat16) {
    if (__builtin_cpu_supports("avx512bf16")) return {"avx512bf16 vdpbf16ps", bf16_avx512, 24 * 32};
  } else if (kind == kFloat32) {
    if (avx512) return {"avx512 vfmadd", f32_avx512, 24 * 16};
    if (avx2) return {"avx2 vfmadd", f32_avx2, 12 * 8};
  } else if (kind == kFloat64) {
    if (avx512) return {"avx512 vfmadd", f64_avx512, 24 * 8};
    if (avx2) return {"avx2 vfmadd", f64_avx2, 12 * 4};
  }
  return {};
}

// Reads 4 cache lines a turn. `bytes` is a multiple of 256.
void read_bytes(const char* data, std::int64_t bytes) {
  const char* end = data + bytes;
  std::uint64_t sum = 0;
  for (; data < end; data += 256) {
    asm volatile(
        "prefetcht0 2048(%1)\n\tprefetcht0 2112(%1)\n\tprefetcht0 2176(%1)\n\tprefetcht0 2240(%1)\n\t"
        "addq (%1), %0\n\taddq 64(%1), %0\n\taddq 128(%1), %0\n\taddq 192(%1), %0"
        : "+r"(sum)
        : "r"(data)
        : "cc", "memory");
  }
}

#else

Loop find_loop(int) { return {}; }

void read_bytes(const char* data, std::int64_t bytes) {
  volatile std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < bytes; i += 64) {
    std::uint64_t word;
    std::memcpy(&word, data + i, sizeof(word));
    sum = sum + word;
  }
}

#endif

// Sum over threads of `work` / seconds of body(thread), all running at once, the caller being thread 0. Each thread is
// timed by itself, so that starting and joining threads does not count. A pool that spins after its last task, as
// OpenMP's does, would share the cores: it is given time to go to sleep first.
template <typename Body>
double rate_of(int threads, double work, const Body& body) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::atomic<int> ready{0};
  std::vector<double> rates(threads);
  const auto run = [&](int t) {
    ready.fetch_add(1);
    while (ready.load() < threads) {
    }
    const Clock::time_point begin = Clock::now();
    body(t);
    rates[t] = work / std::chrono::duration<double>(Clock::now() - begin).count();
  };
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t) workers.emplace_back(run, t);
  run(0);
  for (std::thread& worker : workers) worker.join();
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum;
}

}  // namespace

extern "C" {

// Name of the instructions that multiply_adds_per_second would use; "" where there are none for this kind.
const char* instructions(int kind) { return find_loop(kind).name; }

// `iterations` rounds of the loop on each of `threads` threads; 0 where there is no loop for this kind.
double multiply_adds_per_second(int kind, int threads, std::int64_t iterations) {
  const Loop loop = find_loop(kind);
  if (loop.run == nullptr || threads < 1 || iterations < 1) return 0;
  const double work = static_cast<double>(loop.multiply_adds) * static_cast<double>(iterations);
  return rate_of(threads, work, [&](int) { loop.run(iterations); });
}

// Reads data[0, bytes) once, each thread its own part.
double bytes_per_second(const char* data, std::int64_t bytes, int threads) {
  if (threads < 1) return 0;
  const std::int64_t part = bytes / threads / 256 * 256;
  if (part == 0) return 0;
  return rate_of(threads, static_cast<double>(part), [&](int t) { read_bytes(data + t * part, part); });
}

}  // extern "C"
