// SPDX-License-Identifier: BSD-3-Clause
//
// The pass before the kernels: attn_mask, as stored (broadcast dimensions once), and key_padding_mask in tiles of
// kClassRows x kClassKeys, each hidden, free or mixed. Kernels never visit tiles that are hidden and read masks only in
// mixed ones.
#pragma once

#include "cuda/masks.h"

namespace fused_mha::cuda {

struct ClassifyCall {
  core::View mask;
  std::int64_t heads = 1;  // as stored: 1 where the mask broadcasts
  std::int64_t rows = 1;
  std::int64_t keys = 0;
  std::int64_t row_tiles = 1;
  std::int64_t key_tiles = 1;
  std::int64_t tiles = 0;
  std::uint8_t* classes = nullptr;  // [batch][heads][row_tiles][key_tiles]
};

inline constexpr int kClassifyWarps = 4;

/// A warp a tile.
__global__ void __launch_bounds__(kClassifyWarps* kWarpSize)
    classify_masks_kernel(const __grid_constant__ ClassifyCall call) {
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * kClassifyWarps + threadIdx.x / kWarpSize;
  if (tile >= call.tiles) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::int64_t key_tile = tile % call.key_tiles;
  const std::int64_t row_tile = tile / call.key_tiles % call.row_tiles;
  const std::int64_t h = tile / call.key_tiles / call.row_tiles % call.heads;
  const std::int64_t n = tile / call.key_tiles / call.row_tiles / call.heads;
  const std::int64_t row_end = row_tile * kClassRows + kClassRows < call.rows ? (row_tile + 1) * kClassRows : call.rows;
  bool any_hidden = false;
  bool any_free = false;
  bool any_biased = false;
  with_elements(call.mask, [&](const auto* elements) {
    constexpr int kRowsOfLook = 8;
    for (std::int64_t row = row_tile * kClassRows; row < row_end; row += kRowsOfLook) {
#pragma unroll
      for (int i = 0; i < kRowsOfLook; ++i) {
#pragma unroll
        for (int part = 0; part < kClassKeys; part += kWarpSize) {
          const std::int64_t s = key_tile * kClassKeys + part + lane;
          if (row + i >= row_end || s >= call.keys) continue;
          const auto number = mask_number<float>(elements[call.mask.offset(n, h, row + i, s)]);
          const bool hidden = number == kMinusInfinity<float>;
          any_hidden = any_hidden || hidden;
          any_free = any_free || number == 0.0F;
          any_biased = any_biased || (!hidden && number != 0.0F);
        }
      }
      if (__any_sync(kAllLanes, any_biased)) break;
      if (__any_sync(kAllLanes, any_hidden) && __any_sync(kAllLanes, any_free)) break;
    }
  });
  const bool hidden = __any_sync(kAllLanes, any_hidden);
  const bool free = __any_sync(kAllLanes, any_free);
  const bool biased = __any_sync(kAllLanes, any_biased);
  if (lane == 0) {
    const MaskClass result = biased || (hidden && free) ? MaskClass::kMixed
                             : hidden                   ? MaskClass::kHidden
                                                        : MaskClass::kFree;
    call.classes[tile] = static_cast<std::uint8_t>(result);
  }
}

}  // namespace fused_mha::cuda
