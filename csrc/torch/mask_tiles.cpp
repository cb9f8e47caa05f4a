// SPDX-License-Identifier: BSD-3-Clause
//
// The masks of a call as the CPU kernels see them, for pictures and for users who wonder what a mask costs.
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>

#include "core/mask.h"
#include "torch/checks.h"
#include "torch/to_problem.h"

namespace fused_mha::detail {
namespace {

/// Beside the numbers of core::TileClass: a key that key_padding_mask hides is in no tile at all.
constexpr std::int8_t kDropped = 3;

/// (N, H, L, S) int8: class of the tile that (l, s) is in.
at::Tensor mask_tiles_cpu(const at::Tensor& query, const at::Tensor& key, const OptionalTensor& key_padding_mask,
                          const OptionalTensor& attn_mask, bool is_causal) {
  AttentionArguments arguments;
  arguments.query = query;
  arguments.key = key;
  arguments.value = key;
  arguments.key_padding_mask = key_padding_mask;
  arguments.attn_mask = attn_mask;
  arguments.is_causal = is_causal;
  check_forward("_mask_tiles", arguments);
  const core::AttentionProblem problem = to_problem(arguments);
  const core::MaskPlan plan(problem, core::Parallel{});

  const std::int64_t rows = problem.query_length;
  const std::int64_t columns = problem.key_length;
  at::Tensor result = at::full({problem.batch, problem.heads, rows, columns}, kDropped, at::TensorOptions(at::kChar));
  auto* row = result.mutable_data_ptr<std::int8_t>();
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    const core::KeySpan& kept = plan.kept_keys(n);
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      for (std::int64_t l = 0; l < rows; ++l, row += columns) {
        const std::int64_t row_begin = l / core::kMaskTileRows * core::kMaskTileRows;
        if (l > row_begin) {
          std::copy_n(row - columns, columns, row);
          continue;
        }
        const std::int64_t row_end = std::min(row_begin + core::kMaskTileRows, rows);
        for (std::int64_t begin = 0; begin < kept.count; begin += core::kMaskTileKeys) {
          const core::KeySpan keys = kept.part(begin, std::min(core::kMaskTileKeys, kept.count - begin));
          const auto tile_class = static_cast<std::int8_t>(plan.tile_class(n, h, row_begin, row_end, keys));
          for (std::int64_t i = 0; i < keys.count; ++i) row[keys[i]] = tile_class;
        }
      }
    }
  }
  return result;
}

}  // namespace
}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, CPU, library) { library.impl("_mask_tiles", &fused_mha::detail::mask_tiles_cpu); }
