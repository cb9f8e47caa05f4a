// SPDX-License-Identifier: BSD-3-Clause
//
// Forward-mode tangents at level 0, the only one that PyTorch has.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch/arguments.h"

namespace fused_mha::detail {

/// The tangent of a tensor that may be absent; undefined where it has none.
inline at::Tensor tangent_of(const OptionalTensor& tensor) {
  return has_tensor(tensor) ? at::Tensor(tensor->_fw_grad(/*level=*/0)) : at::Tensor();
}

/// The tensor without its tangent.
inline OptionalTensor primal_of(const OptionalTensor& tensor) {
  return has_tensor(tensor) ? OptionalTensor(tensor->_fw_primal(/*level=*/0)) : tensor;
}

inline void set_tangent(const at::Tensor& result, const at::Tensor& tangent) {
  if (tangent.defined()) result._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
}

}  // namespace fused_mha::detail
