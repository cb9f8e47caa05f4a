// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torch/arguments.h"

namespace fused_mha::detail {

/// The state that a call's dropout depends on: two int64 numbers from the default generator of `device`, so that
/// torch.manual_seed reproduces it; nothing is drawn for dropout_p = 0.
OptionalTensor draw_rng_state(double dropout_p, at::Device device);

}  // namespace fused_mha::detail
