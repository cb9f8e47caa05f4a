// SPDX-License-Identifier: BSD-3-Clause
#include "torch/rng.h"

#include <ATen/ops/randint.h>

#include <limits>

namespace fused_mha::detail {

OptionalTensor draw_rng_state(double dropout_p, at::Device device) {
  if (dropout_p == 0.0) return std::nullopt;
  return at::randint(std::numeric_limits<std::int64_t>::max(), {2},
                     at::TensorOptions().dtype(at::kLong).device(device));
}

}  // namespace fused_mha::detail
