// SPDX-License-Identifier: BSD-3-Clause
//
// The one door through which kernels see the CUDA language and PTX. Each wrapper has two bodies: the instruction, and
// for FUSED_MHA_CUDA_EMULATION plain C++ that runs a block's threads on the CPU (tests/cuda_emulation, docs/cuda.md).
//
// What kernels must keep to, so that both bodies mean the same:
//   - shared memory is dynamic only, had from dynamic_shared<T>(); plain loads and stores are watched as they are;
//   - a block is a whole number of warps; collectives name all 32 lanes, and every thread of the block reaches every
//     __syncthreads() or none does;
//   - only __syncwarp() and __syncthreads() order memory between lanes: shuffles, ballots, ldmatrix and mma do not;
//   - shared memory is written before it is read, by zero-filled copies too: cp_async_16(..., false) writes 16 zeros;
//   - kernels are started by launch(), which reports a failure with the kernel's name.
// 16-bit elements are core::Float16 and core::BFloat16 on both sides (half and bfloat16 here); widen() and narrow()
// convert them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/dtype.h"

#ifdef FUSED_MHA_CUDA_EMULATION
#include "cuda_emulation/runtime.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

namespace fused_mha::cuda {

using half = core::Float16;
using bfloat16 = core::BFloat16;

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

#ifdef FUSED_MHA_CUDA_EMULATION

using cuda_emulation::cp_async_16;
using cuda_emulation::cp_async_commit;
using cuda_emulation::cp_async_wait;
using cuda_emulation::device_limits;
using cuda_emulation::DeviceLimits;
using cuda_emulation::dynamic_shared;
using cuda_emulation::exp2_fast;
using cuda_emulation::launch;
using cuda_emulation::ldmatrix_x4;
using cuda_emulation::ldmatrix_x4_trans;
using cuda_emulation::mma_m16n8k16;
using cuda_emulation::narrow;
using cuda_emulation::reciprocal_fast;
using cuda_emulation::shared_address;
using cuda_emulation::SharedAddress;
using cuda_emulation::widen;

#else

/// The block's dynamic shared memory, aligned to 128 bytes.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char fused_mha_dynamic_shared[];
  return reinterpret_cast<T*>(fused_mha_dynamic_shared);
}

/// A place in shared memory as a number of bytes, for arithmetic in one register. dynamic_shared() begins at a multiple
/// of 128, here too.
using SharedAddress = std::uint32_t;
__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

/// Starts a copy of 16 bytes, both ends aligned to 16; writes zeros, and does not read, where not `valid`.
__device__ __forceinline__ void cp_async_16(SharedAddress shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(__cvta_generic_to_global(global)),
               "r"(valid ? 16 : 0)
               : "memory");
}

/// Closes the group of this thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// Waits until at most kNewest of this thread's committed groups are under way. Other threads see the copies after
/// a barrier.
template <int kNewest>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kNewest) : "memory");
}

/// Four 8x8 matrices of 16-bit elements: lane i gives the row i % 8 of matrix i / 8, aligned to 16 bytes, and gets
/// elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4 of matrix j in r[j].
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

/// The same with each matrix transposed: lane i gets elements i / 4 of rows 2 (i % 4) and 2 (i % 4) + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

/// d += a b of 16x16 and 16x8 matrices. With g = lane / 4 and t = lane % 4, low halves first: a[0] is row g, columns
/// 2t and 2t+1; a[1] row g+8; a[2] row g, columns 2t+8 and 2t+9; a[3] row g+8 there. b[0] is rows 2t and 2t+1 of column
/// g; b[1] rows 2t+8 and 2t+9. d[0], d[1] are row g, columns 2t and 2t+1; d[2], d[3] row g+8.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<half>(float (&d)[4], const std::uint32_t (&a)[4],
                                                   const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<bfloat16>(float (&d)[4], const std::uint32_t (&a)[4],
                                                       const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#else  // No such instructions: the host never starts these kernels there (device_limits().has_tensor_kernels()).

__device__ __forceinline__ void cp_async_16(SharedAddress, const void*, bool) { __trap(); }
__device__ __forceinline__ void cp_async_commit() { __trap(); }
template <int kNewest>
__device__ __forceinline__ void cp_async_wait() {
  __trap();
}
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&)[4], SharedAddress) { __trap(); }
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&)[4], SharedAddress) { __trap(); }
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&)[4], const std::uint32_t (&)[4], const std::uint32_t (&)[2]) {
  __trap();
}

#endif

/// 2^x to 2 ulp; subnormal results are 0. exp2_fast(-inf) is 0, NaN stays NaN.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

/// 1 / x to 1 ulp; subnormal arguments and results are 0.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float widen(half value) { return __half2float(__ushort_as_half(value.bits)); }
__device__ __forceinline__ float widen(bfloat16 value) {
  return __uint_as_float(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Rounds to nearest, ties to even.
template <typename T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ half narrow<half>(float value) {
  return {__half_as_ushort(__float2half_rn(value))};
}
template <>
__device__ __forceinline__ bfloat16 narrow<bfloat16>(float value) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}

/// What the current device can do.
struct DeviceLimits {
  int compute_capability = 0;          // 80 for 8.0
  int multiprocessors = 0;             // how many blocks run side by side, at the least
  std::size_t shared_bytes_block = 0;  // dynamic shared memory that one block can have

  bool has_tensor_kernels() const { return compute_capability >= 80; }
};

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("fused_mha: ") + what + ": " + cudaGetErrorString(error));
  }
}

inline DeviceLimits device_limits() {
  const auto attribute = [](cudaDeviceAttr name) {
    int device = 0;
    int value = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
    return value;
  };
  DeviceLimits limits;
  limits.compute_capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  limits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  limits.shared_bytes_block = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  return limits;
}

/// Starts kernel(arguments...) on the stream, with so many bytes of dynamic shared memory. Throws with the kernel's
/// name where it cannot start, or where an earlier piece of work on the device has failed.
template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, const Arguments&... arguments) {
  constexpr std::size_t kWithoutOptIn = 48 * 1024;
  if (shared_bytes > kWithoutOptIn) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          name);
  }
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  check(cudaGetLastError(), name);
}

#endif  // FUSED_MHA_CUDA_EMULATION

/// Two 16-bit elements in a register, `low` in the lower half, as mma and ldmatrix have them.
template <typename T>
__device__ __forceinline__ std::uint32_t pack2(float low, float high) {
#ifdef FUSED_MHA_CUDA_EMULATION
  return narrow<T>(low).bits | static_cast<std::uint32_t>(narrow<T>(high).bits) << 16;
#else
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
#endif
}

/// The same number, in a way that the compiler cannot see through: what is made from it is made here, not carried
/// through a loop in a register.
template <typename T>
__device__ __forceinline__ T made_here(T value) {
  static_assert(sizeof(T) == 4);
#ifndef FUSED_MHA_CUDA_EMULATION
  asm volatile("" : "+r"(value));
#endif
  return value;
}

template <typename T>
__device__ __forceinline__ float2 unpack2(std::uint32_t pair) {
  return make_float2(widen(T{static_cast<std::uint16_t>(pair)}), widen(T{static_cast<std::uint16_t>(pair >> 16)}));
}

}  // namespace fused_mha::cuda
