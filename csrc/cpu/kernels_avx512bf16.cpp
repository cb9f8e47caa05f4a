// SPDX-License-Identifier: BSD-3-Clause
//
// Products of bfloat16 pairs, for forward and backward of bfloat16 tensors. Everything else is as in
// kernels_avx512.cpp.
#define FUSED_MHA_ISA avx512bf16
#include "cpu/simd/pairs_avx512bf16.h"

#include "cpu/tile_backward.h"

namespace fused_mha::cpu {
namespace {

IsaKernels with_pairs(IsaKernels kernels) noexcept {
  using avx512bf16::BFloat16Pair;
  kernels.bfloat16.forward_scratch = avx512bf16::forward_scratch<float, BFloat16Pair>;
  kernels.bfloat16.forward = avx512bf16::forward_item<float, BFloat16Pair>;
  kernels.bfloat16.backward_scratch = avx512bf16::backward_scratch<float, BFloat16Pair>;
  kernels.bfloat16.backward = avx512bf16::backward_item<float, BFloat16Pair>;
  return kernels;
}

}  // namespace

const IsaKernels& kernels_avx512bf16() noexcept {
  static const IsaKernels kKernels = with_pairs(kernels_avx512());
  return kKernels;
}

}  // namespace fused_mha::cpu
