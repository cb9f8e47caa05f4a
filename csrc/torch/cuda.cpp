// SPDX-License-Identifier: BSD-3-Clause
//
// The CUDA kernels of the operators: check, allocate, run on the current stream of the query's device. Nothing here
// waits for the device or reads its memory, so calls can be captured in a graph: the rng state is drawn by at::randint,
// which PyTorch's generator makes fit for graphs, and read by the kernels where it lies. Workspace comes from PyTorch's
// allocator, which orders its reuse by the stream.
//
// No library of PyTorch's CUDA half is linked: streams and device guards come through c10's interface to all devices.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include "cuda/run.h"
#include "torch/call_record.h"
#include "torch/checks.h"
#include "torch/operators.h"
#include "torch/outputs.h"
#include "torch/to_problem.h"

namespace fused_mha::detail {
namespace {

/// Makes the device current in the CUDA runtime that is linked here, which is not PyTorch's own and has its own idea of
/// it; returns the stream that is current there for PyTorch.
cudaStream_t enter_device(c10::Device device) {
  const auto error = cudaSetDevice(device.index());
  TORCH_CHECK(error == cudaSuccess, "fused_mha: ", device, ": ", cudaGetErrorString(error));
  return static_cast<cudaStream_t>(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device).native_handle());
}

/// The device of `like` made current, and the stream that is current there.
class CudaCall {
 public:
  explicit CudaCall(const at::Tensor& like)
      : guard_(like.device()), stream_(enter_device(like.device())), bytes_(like.options().dtype(at::kByte)) {}

  cudaStream_t stream() const { return stream_; }

  /// Uninitialised memory that the caller keeps until the launches are made; the allocator keeps it until they ran.
  at::Tensor workspace(std::size_t bytes) const { return at::empty({static_cast<std::int64_t>(bytes)}, bytes_); }

 private:
  c10::DeviceGuard guard_;
  cudaStream_t stream_;
  at::TensorOptions bytes_;
};

cuda::DeviceRngState device_rng_state(const OptionalTensor& rng_state) {
  if (!has_tensor(rng_state)) return {};
  return {rng_state->const_data_ptr<std::int64_t>(), rng_state->stride(0)};
}

std::string text_of(const char* refusal) { return refusal == nullptr ? "" : refusal; }

ForwardResult attention_forward_cuda(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                     const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                     bool is_causal, double dropout_p, double scale, const OptionalTensor& rng_state,
                                     c10::SymInt always_visible_keys, std::int64_t weights_mode, bool bottom_right,
                                     const OptionalTensor& sink, bool weights_before_dropout) {
  const AttentionArguments arguments{query,        key,
                                     value,        key_padding_mask,
                                     attn_mask,    is_causal,
                                     dropout_p,    scale,
                                     rng_state,    always_visible_keys,
                                     weights_mode, bottom_right,
                                     sink,         weights_before_dropout};
  check_forward("_attention_forward", arguments);
  const CudaCall call(query);
  auto result = allocate_forward(arguments);
  const auto problem = to_problem(arguments);
  const auto outputs = to_outputs(arguments, result);
  if (is_recording_calls()) {
    auto record = record_of(arguments, problem);
    record.cuda_forward_refusal = text_of(cuda::tensor_cores_refuse(problem, /*is_backward=*/false));
    record.cuda_backward_refusal = text_of(cuda::tensor_cores_refuse(problem, /*is_backward=*/true));
    note_call(std::move(record));
  }
  const auto workspace = call.workspace(cuda::forward_workspace_bytes(problem, outputs));
  cuda::attention_forward(problem, outputs, device_rng_state(rng_state), workspace.mutable_data_ptr(), call.stream());
  return result;
}

BackwardResult attention_backward_cuda(const OptionalTensor& grad_output, const OptionalTensor& grad_weights,
                                       const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask,
                                       const at::Tensor& output, const at::Tensor& row_max, const at::Tensor& row_sum,
                                       bool is_causal, double dropout_p, double scale, const OptionalTensor& rng_state,
                                       c10::SymInt always_visible_keys, std::int64_t weights_mode,
                                       GradientMask output_mask, bool bottom_right, const OptionalTensor& sink,
                                       bool weights_before_dropout) {
  const AttentionArguments arguments{query,        key,
                                     value,        key_padding_mask,
                                     attn_mask,    is_causal,
                                     dropout_p,    scale,
                                     rng_state,    always_visible_keys,
                                     weights_mode, bottom_right,
                                     sink,         weights_before_dropout};
  const BackwardArguments backward{grad_output, grad_weights, output, row_max, row_sum};
  check_backward("_attention_backward", arguments, backward, output_mask);
  const CudaCall call(query);
  auto result = allocate_backward(arguments, output_mask);
  const auto problem = to_problem(arguments);
  const auto inputs = to_backward_inputs(arguments, backward);
  const auto outputs = to_backward_outputs(result, output_mask);
  const auto workspace = call.workspace(cuda::backward_workspace_bytes(problem, inputs, outputs));
  cuda::attention_backward(problem, inputs, outputs, device_rng_state(rng_state), workspace.mutable_data_ptr(),
                           call.stream());
  return result;
}

at::Tensor dropout_mask_cuda(const at::Tensor& rng_state, std::int64_t batch, std::int64_t heads,
                             std::int64_t query_length, std::int64_t key_length, double dropout_p) {
  check_dropout_mask("dropout_mask", rng_state, {batch, heads, query_length, key_length}, dropout_p);
  const CudaCall call(rng_state);
  auto keep = at::empty({batch, heads, query_length, key_length}, rng_state.options().dtype(at::kBool));
  cuda::dropout_mask(to_dropout_problem(keep.sizes(), dropout_p), keep.mutable_data_ptr<bool>(),
                     device_rng_state(rng_state), call.stream());
  return keep;
}

}  // namespace
}  // namespace fused_mha::detail

TORCH_LIBRARY_IMPL(fused_mha, CUDA, library) {
  library.impl("_attention_forward", &fused_mha::detail::attention_forward_cuda);
  library.impl("_attention_backward", &fused_mha::detail::attention_backward_cuda);
  library.impl("dropout_mask", &fused_mha::detail::dropout_mask_cuda);
}
