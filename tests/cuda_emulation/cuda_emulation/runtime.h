// SPDX-License-Identifier: BSD-3-Clause
//
// The CUDA language and the wrappers of csrc/cuda/device.h in plain C++: the kernels' own sources, compiled by an
// ordinary compiler, run on the CPU one block at a time, every thread of the block a fiber on one host thread.
//
// Sources of kernels are compiled with -fsanitize=thread but not linked with its library: the calls which the compiler
// inserts before each load and store arrive in access_hooks.cpp, which checks bounds, initialisation and races. Control
// and reports: control.h. What can be found and what cannot: docs/cuda.md.
#pragma once

#include <cmath>
#include <cstdint>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/dtype.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

using cudaStream_t = struct CUstream_st*;

namespace fused_mha::cuda_emulation {

using Where = std::source_location;

// A fiber keeps its indices for life, so calls may be merged.
[[gnu::const]] dim3 thread_index();
[[gnu::const]] dim3 block_index();
[[gnu::const]] dim3 block_size();
[[gnu::const]] dim3 grid_size();

// Collectives: each lane leaves its operands and waits; the last one computes for all.
void sync_threads(const Where& where);
void sync_warp(unsigned lanes, const Where& where);
/// The 64 bits that lane `source` gives; source outside of the warp: one's own.
std::uint64_t shuffle(unsigned lanes, std::uint64_t bits, int source, const Where& where);
unsigned ballot(unsigned lanes, bool predicate, const Where& where);
int lane_index();

void* dynamic_shared_memory();

void copy_async(void* shared, const void* global, bool valid);
void copy_async_commit();
void copy_async_wait(int newest);
void load_matrix(std::uint32_t (&r)[4], const void* row, bool transposed, const Where& where);
void multiply_half(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], const Where& where);
void multiply_bfloat16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], const Where& where);

/// Runs every block; `call` runs the kernel's body in the calling fiber. Throws EmulationError (control.h).
void run_grid(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes, void (*call)(const void*),
              const void* arguments, std::size_t argument_bytes);

// ---- The wrappers of device.h ----

template <typename T>
T* dynamic_shared() {
  return static_cast<T*>(dynamic_shared_memory());
}

/// Arithmetic on it is that of addresses in bytes, as on the device.
using SharedAddress = std::uintptr_t;
inline SharedAddress shared_address(const void* pointer) { return reinterpret_cast<SharedAddress>(pointer); }

inline void cp_async_16(SharedAddress shared, const void* global, bool valid) {
  copy_async(reinterpret_cast<void*>(shared), global, valid);
}
inline void cp_async_commit() { copy_async_commit(); }
template <int kNewest>
void cp_async_wait() {
  copy_async_wait(kNewest);
}

inline void ldmatrix_x4(std::uint32_t (&r)[4], SharedAddress row, const Where& where = Where::current()) {
  load_matrix(r, reinterpret_cast<const void*>(row), false, where);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], SharedAddress row, const Where& where = Where::current()) {
  load_matrix(r, reinterpret_cast<const void*>(row), true, where);
}

template <typename T>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                  const Where& where = Where::current()) {
  if constexpr (std::is_same_v<T, core::Float16>) {
    multiply_half(d, a, b, where);
  } else {
    static_assert(std::is_same_v<T, core::BFloat16>);
    multiply_bfloat16(d, a, b, where);
  }
}

inline float exp2_fast(float x) { return x < -126.0F ? 0.0F : std::exp2(x); }

inline float reciprocal_fast(float x) { return 1.0F / x; }

inline float widen(core::Float16 value) { return core::to_float(value); }
inline float widen(core::BFloat16 value) { return core::to_float(value); }

template <typename T>
T narrow(float value) {
  if constexpr (std::is_same_v<T, core::Float16>) {
    return core::to_float16(value);
  } else {
    static_assert(std::is_same_v<T, core::BFloat16>);
    return core::to_bfloat16(value);
  }
}

struct DeviceLimits {
  int compute_capability = 0;
  int multiprocessors = 0;
  std::size_t shared_bytes_block = 0;

  bool has_tensor_kernels() const { return compute_capability >= 80; }
};

/// Those of the card that control.h's settings name.
DeviceLimits device_limits();

template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t /*stream*/, const Arguments&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<std::decay_t<Parameters>...> arguments;
  };
  const Call call{kernel, std::tuple<std::decay_t<Parameters>...>(arguments...)};
  // Each fiber copies the arguments to its own stack, where the kernel may read them.
  const auto run = [](const void* pointer) {
    const Call& made = *static_cast<const Call*>(pointer);
    std::apply(made.kernel, made.arguments);
  };
  run_grid(name, grid, block, shared_bytes, run, &call, sizeof(call));
}

template <typename T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T from_bits(std::uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

/// Lane that `offset` names inside the own group of `width` lanes.
inline int source_lane(int offset, int width, bool inside) {
  return inside ? lane_index() / width * width + offset : lane_index();
}

}  // namespace fused_mha::cuda_emulation

#define threadIdx (::fused_mha::cuda_emulation::thread_index())
#define blockIdx (::fused_mha::cuda_emulation::block_index())
#define blockDim (::fused_mha::cuda_emulation::block_size())
#define gridDim (::fused_mha::cuda_emulation::grid_size())

using EmulationWhere = fused_mha::cuda_emulation::Where;

inline void __syncthreads(const EmulationWhere& where = EmulationWhere::current()) {
  fused_mha::cuda_emulation::sync_threads(where);
}
inline void __syncwarp(unsigned lanes = 0xFFFFFFFFU, const EmulationWhere& where = EmulationWhere::current()) {
  fused_mha::cuda_emulation::sync_warp(lanes, where);
}
inline unsigned __ballot_sync(unsigned lanes, bool predicate, const EmulationWhere& where = EmulationWhere::current()) {
  return fused_mha::cuda_emulation::ballot(lanes, predicate, where);
}
inline bool __any_sync(unsigned lanes, bool predicate, const EmulationWhere& where = EmulationWhere::current()) {
  return fused_mha::cuda_emulation::ballot(lanes, predicate, where) != 0;
}
inline bool __all_sync(unsigned lanes, bool predicate, const EmulationWhere& where = EmulationWhere::current()) {
  return fused_mha::cuda_emulation::ballot(lanes, !predicate, where) == 0;
}

template <typename T>
T __shfl_sync(unsigned lanes, T value, int source, int width = 32,
              const EmulationWhere& where = EmulationWhere::current()) {
  using namespace fused_mha::cuda_emulation;
  return from_bits<T>(shuffle(lanes, to_bits(value), source_lane(source & (width - 1), width, true), where));
}
template <typename T>
T __shfl_xor_sync(unsigned lanes, T value, int mask, int width = 32,
                  const EmulationWhere& where = EmulationWhere::current()) {
  using namespace fused_mha::cuda_emulation;
  const int offset = (lane_index() % width) ^ mask;
  return from_bits<T>(shuffle(lanes, to_bits(value), source_lane(offset, width, offset < width), where));
}
template <typename T>
T __shfl_down_sync(unsigned lanes, T value, unsigned delta, int width = 32,
                   const EmulationWhere& where = EmulationWhere::current()) {
  using namespace fused_mha::cuda_emulation;
  const int offset = lane_index() % width + static_cast<int>(delta);
  return from_bits<T>(shuffle(lanes, to_bits(value), source_lane(offset, width, offset < width), where));
}
template <typename T>
T __shfl_up_sync(unsigned lanes, T value, unsigned delta, int width = 32,
                 const EmulationWhere& where = EmulationWhere::current()) {
  using namespace fused_mha::cuda_emulation;
  const int offset = lane_index() % width - static_cast<int>(delta);
  return from_bits<T>(shuffle(lanes, to_bits(value), source_lane(offset, width, offset >= 0), where));
}

// Atomic on the host too: other blocks may run on other host threads.
template <typename T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicOr(T* address, T value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicAnd(T* address, T value) {
  return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}

template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
inline void __threadfence() {}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(a) * b) >> 32);
}
inline float __int_as_float(int bits) {
  return fused_mha::cuda_emulation::from_bits<float>(static_cast<unsigned>(bits));
}
inline float __uint_as_float(unsigned bits) { return fused_mha::cuda_emulation::from_bits<float>(bits); }
inline int __float_as_int(float value) { return static_cast<int>(fused_mha::cuda_emulation::to_bits(value)); }
inline unsigned __float_as_uint(float value) {
  return static_cast<unsigned>(fused_mha::cuda_emulation::to_bits(value));
}
