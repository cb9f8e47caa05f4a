// SPDX-License-Identifier: BSD-3-Clause
#include "torch/to_problem.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace fused_mha::detail {
namespace {

core::DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return core::DType::kFloat32;
    case at::kDouble:
      return core::DType::kFloat64;
    case at::kBFloat16:
      return core::DType::kBFloat16;
    case at::kHalf:
      return core::DType::kFloat16;
    case at::kBool:
      return core::DType::kBool;
    default:
      TORCH_INTERNAL_ASSERT(false, "checked before: ", type);
  }
}

const void* pointer_of(const at::Tensor& tensor, const void* /*kind*/) { return tensor.const_data_ptr(); }
void* pointer_of(const at::Tensor& tensor, void* /*kind*/) { return tensor.mutable_data_ptr(); }

/// A storage can be freed or shrunk under its tensors; reading them must not crash.
void check_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  std::int64_t elements = tensor.storage_offset() + 1;
  bool overflows = false;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    std::int64_t reach = 0;
    overflows = overflows || __builtin_mul_overflow(tensor.size(dim) - 1, tensor.stride(dim), &reach) ||
                __builtin_add_overflow(elements, reach, &elements);
  }
  const auto held = static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.element_size());
  TORCH_CHECK(!overflows && elements <= held, "fused_mha: a tensor of shape ", tensor.sizes(),
              " reaches beyond its storage, which holds ", held, " elements; was the storage freed or resized?");
}

/// `dims` says which dimension of the tensor each of the view's four is; -1 for one that the tensor lacks. Strides of
/// size-1 dimensions become 0: they broadcast.
template <typename ViewType>
ViewType to_view(const at::Tensor& tensor, std::array<int, 4> dims) {
  check_storage(tensor);
  ViewType view;
  view.data = pointer_of(tensor, view.data);
  view.dtype = to_dtype(tensor.scalar_type());
  for (std::size_t i = 0; i < dims.size(); ++i) {
    view.strides[i] = dims[i] < 0 || tensor.size(dims[i]) == 1 ? 0 : tensor.stride(dims[i]);
  }
  return view;
}

constexpr std::array<int, 4> kAllDims{0, 1, 2, 3};
constexpr std::array<int, 4> kPaddingDims{0, -1, -1, 1};
constexpr std::array<int, 4> kRowDims{0, 1, 2, -1};
constexpr std::array<int, 4> kAveragedDims{0, -1, 1, 2};

template <typename ViewType>
ViewType to_weights_view(const at::Tensor& weights, core::WeightsMode mode) {
  if (mode == core::WeightsMode::kNone) return {};
  return to_view<ViewType>(weights, mode == core::WeightsMode::kPerHead ? kAllDims : kAveragedDims);
}

}  // namespace

core::RngState rng_state_of(const at::Tensor& rng_state) {
  const auto* numbers = rng_state.const_data_ptr<std::int64_t>();
  return {static_cast<std::uint64_t>(numbers[0]), static_cast<std::uint64_t>(numbers[rng_state.stride(0)])};
}

core::AttentionProblem to_problem(const AttentionArguments& a) {
  core::AttentionProblem problem;
  problem.batch = a.query.size(0);
  problem.heads = a.query.size(1);
  problem.kv_heads = a.key.size(1);
  problem.query_length = a.query.size(2);
  problem.key_length = a.key.size(2);
  problem.head_dim = a.query.size(3);
  problem.value_dim = a.value.size(3);
  problem.query = to_view<core::View>(a.query, kAllDims);
  problem.key = to_view<core::View>(a.key, kAllDims);
  problem.value = to_view<core::View>(a.value, kAllDims);
  if (has_tensor(a.key_padding_mask)) {
    problem.key_padding_mask = to_view<core::View>(*a.key_padding_mask, kPaddingDims);
  }
  if (has_tensor(a.attn_mask)) problem.attn_mask = to_view<core::View>(*a.attn_mask, kAllDims);
  problem.always_visible_keys = a.always_visible_keys.expect_int();
  problem.is_causal = a.is_causal;
  if (a.bottom_right) problem.causal_offset = problem.masked_keys() - problem.query_length;
  if (has_tensor(a.sink)) problem.sink = to_view<core::View>(*a.sink, kAllDims);
  problem.scale = a.scale;
  problem.dropout_p = a.dropout_p;
  if (has_tensor(a.rng_state) && a.rng_state->is_cpu()) problem.rng = rng_state_of(*a.rng_state);
  return problem;
}

core::AttentionProblem to_dropout_problem(at::IntArrayRef sizes, double dropout_p) {
  core::AttentionProblem problem;
  problem.batch = sizes[0];
  problem.heads = sizes[1];
  problem.query_length = sizes[2];
  problem.key_length = sizes[3];
  problem.dropout_p = dropout_p;
  return problem;
}

core::ForwardOutputs to_outputs(const AttentionArguments& a, const ForwardResult& result) {
  const auto& [output, weights, row_max, row_sum] = result;
  const auto mode = kernel_weights_mode(a);
  return {.output = to_view<core::MutableView>(output, kAllDims),
          .row_max = row_max.mutable_data_ptr(),
          .row_sum = row_sum.mutable_data_ptr(),
          .weights = to_weights_view<core::MutableView>(weights, mode),
          .weights_mode = mode,
          .weights_before_dropout = a.weights_before_dropout,
          .log_sum_exp =
              a.weights_mode == kLogSumExp ? to_view<core::MutableView>(weights, kRowDims) : core::MutableView{}};
}

core::BackwardInputs to_backward_inputs(const AttentionArguments& a, const BackwardArguments& b) {
  core::BackwardInputs inputs;
  if (has_tensor(b.grad_output)) inputs.grad_output = to_view<core::View>(*b.grad_output, kAllDims);
  if (has_tensor(b.grad_weights) && a.weights_mode == kLogSumExp) {
    inputs.grad_log_sum_exp = to_view<core::View>(*b.grad_weights, kRowDims);
  } else if (has_tensor(b.grad_weights)) {
    inputs.weights_mode = kernel_weights_mode(a);
    inputs.weights_before_dropout = a.weights_before_dropout;
    inputs.grad_weights = to_weights_view<core::View>(*b.grad_weights, inputs.weights_mode);
  }
  inputs.output = to_view<core::View>(b.output, kAllDims);
  inputs.row_max = b.row_max.const_data_ptr();
  inputs.row_sum = b.row_sum.const_data_ptr();
  return inputs;
}

core::BackwardOutputs to_backward_outputs(const BackwardResult& result, const GradientMask& wanted) {
  core::BackwardOutputs outputs;
  const auto& [query, key, value, padding, mask, sink] = result;
  if (wanted[0]) outputs.grad_query = to_view<core::MutableView>(query, kAllDims);
  if (wanted[1]) outputs.grad_key = to_view<core::MutableView>(key, kAllDims);
  if (wanted[2]) outputs.grad_value = to_view<core::MutableView>(value, kAllDims);
  if (wanted[3]) outputs.grad_key_padding_mask = to_view<core::MutableView>(padding, kPaddingDims);
  if (wanted[4]) {
    outputs.grad_attn_mask = to_view<core::MutableView>(mask, kAllDims);
    for (std::size_t i = 0; i < 4; ++i) outputs.attn_mask_sizes[i] = mask.size(static_cast<std::int64_t>(i));
  }
  if (wanted[5]) {
    outputs.grad_sink = to_view<core::MutableView>(sink, kAllDims);
    outputs.sink_sizes = {sink.size(0), sink.size(1)};
  }
  return outputs;
}

namespace {

template <typename ViewType>
ViewType view_score_weight(const at::Tensor& tensor) {
  const bool per_head = tensor.dim() == 2;
  return to_view<ViewType>(tensor, {-1, per_head ? 0 : -1, -1, per_head ? 1 : 0});
}

}  // namespace

core::View to_score_weight(const at::Tensor& score_weight) { return view_score_weight<core::View>(score_weight); }

core::MutableView to_grad_score_weight(const at::Tensor& gradient, bool is_wanted) {
  return is_wanted ? view_score_weight<core::MutableView>(gradient) : core::MutableView{};
}

namespace {

constexpr std::array<int, 4> kPackedDims{-1, 1, 0, 2};  // of (total, H, D)
constexpr std::array<int, 4> kSinkDims{-1, 0, -1, -1};

/// N + 1 numbers on the host.
std::vector<std::int64_t> read_starts(const char* op, const char* name, const at::Tensor& starts,
                                      const char* total_name, std::int64_t total) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(starts.size(0)));
  const auto read = [&](const auto* data) {
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = data[static_cast<std::int64_t>(i) * starts.stride(0)];
  };
  if (starts.scalar_type() == at::kInt) {
    read(starts.const_data_ptr<std::int32_t>());
  } else {
    read(starts.const_data_ptr<std::int64_t>());
  }
  TORCH_CHECK_VALUE(numbers.front() == 0 && numbers.back() == total && std::is_sorted(numbers.begin(), numbers.end()),
                    "fused_mha::", op, ": ", name, " must ascend from 0 to ", total_name, " = ", total, ", got ",
                    at::ArrayRef(numbers),
                    ". Hint: it holds the sums of the lengths so far, lengths.cumsum(0) behind a 0");
  return numbers;
}

/// A packed tensor of which only the rows from `start` on are meant.
template <typename ViewType>
ViewType from_row(ViewType packed, std::int64_t start) {
  using Byte = std::conditional_t<std::is_same_v<ViewType, core::View>, const std::byte, std::byte>;
  if (!packed) return packed;
  packed.data = static_cast<Byte*>(packed.data) +
                start * packed.strides[2] * static_cast<std::int64_t>(core::size_of(packed.dtype));
  return packed;
}

/// Row `start` of statistics of which each row of a sequence has one for each head.
template <typename Pointer>
Pointer from_statistic(Pointer data, const VarlenArguments& a, std::int64_t start) {
  using Byte = std::conditional_t<std::is_same_v<Pointer, const void*>, const std::byte, std::byte>;
  const auto size = static_cast<std::int64_t>(a.query.scalar_type() == at::kDouble ? sizeof(double) : sizeof(float));
  return static_cast<Byte*>(data) + start * a.query.size(1) * size;
}

struct Sequences {
  std::vector<std::int64_t> query_starts;
  std::vector<std::int64_t> key_starts;
  std::vector<core::AttentionProblem> problems;
};

Sequences to_sequences(const char* op, const VarlenArguments& a) {
  Sequences result{read_starts(op, "cu_seqlens_q", a.cu_seqlens_q, "total_q", a.query.size(0)),
                   read_starts(op, "cu_seqlens_k", a.cu_seqlens_k, "total_k", a.key.size(0)),
                   {}};
  core::AttentionProblem whole;
  whole.batch = 1;
  whole.heads = a.query.size(1);
  whole.kv_heads = a.key.size(1);
  whole.head_dim = a.query.size(2);
  whole.value_dim = a.value.size(2);
  whole.query = to_view<core::View>(a.query, kPackedDims);
  whole.key = to_view<core::View>(a.key, kPackedDims);
  whole.value = to_view<core::View>(a.value, kPackedDims);
  if (has_tensor(a.sink)) whole.sink = to_view<core::View>(*a.sink, kSinkDims);
  whole.is_causal = a.is_causal;
  whole.scale = a.scale;
  whole.dropout_p = a.dropout_p;
  if (has_tensor(a.rng_state)) whole.rng = rng_state_of(*a.rng_state);
  for (std::size_t n = 0; n + 1 < result.query_starts.size(); ++n) {
    core::AttentionProblem problem = whole;
    problem.first_sample = static_cast<std::int64_t>(n);
    problem.query_length = result.query_starts[n + 1] - result.query_starts[n];
    problem.key_length = result.key_starts[n + 1] - result.key_starts[n];
    if (a.bottom_right) problem.causal_offset = problem.key_length - problem.query_length;
    problem.query = from_row(whole.query, result.query_starts[n]);
    problem.key = from_row(whole.key, result.key_starts[n]);
    problem.value = from_row(whole.value, result.key_starts[n]);
    result.problems.push_back(problem);
  }
  return result;
}

}  // namespace

VarlenForwardProblems to_varlen_forward(const char* op, const VarlenArguments& a, const VarlenForwardResult& result) {
  Sequences sequences = to_sequences(op, a);
  const auto& [output, row_max, row_sum] = result;
  const auto whole = to_view<core::MutableView>(output, kPackedDims);
  VarlenForwardProblems forward{std::move(sequences.problems), {}};
  for (std::size_t n = 0; n < forward.problems.size(); ++n) {
    const std::int64_t start = sequences.query_starts[n];
    core::ForwardOutputs outputs{};
    outputs.output = from_row(whole, start);
    outputs.row_max = from_statistic(row_max.mutable_data_ptr(), a, start);
    outputs.row_sum = from_statistic(row_sum.mutable_data_ptr(), a, start);
    forward.outputs.push_back(outputs);
  }
  return forward;
}

VarlenBackwardProblems to_varlen_backward(const char* op, const VarlenArguments& a, const VarlenBackwardArguments& b,
                                          const VarlenBackwardResult& result, const VarlenGradientMask& wanted) {
  Sequences sequences = to_sequences(op, a);
  const auto& [query, key, value, sink] = result;
  const auto view_of = [](const at::Tensor& gradient, bool is_wanted) {
    return is_wanted ? to_view<core::MutableView>(gradient, kPackedDims) : core::MutableView{};
  };
  const auto grad_query = view_of(query, wanted[0]);
  const auto grad_key = view_of(key, wanted[1]);
  const auto grad_value = view_of(value, wanted[2]);
  const auto grad_output = to_view<core::View>(b.grad_output, kPackedDims);
  const auto output = to_view<core::View>(b.output, kPackedDims);
  VarlenBackwardProblems backward{std::move(sequences.problems), {}, {}};
  for (std::size_t n = 0; n < backward.problems.size(); ++n) {
    const std::int64_t query_start = sequences.query_starts[n];
    const std::int64_t key_start = sequences.key_starts[n];
    core::BackwardInputs inputs;
    inputs.grad_output = from_row(grad_output, query_start);
    inputs.output = from_row(output, query_start);
    inputs.row_max = from_statistic(b.row_max.const_data_ptr(), a, query_start);
    inputs.row_sum = from_statistic(b.row_sum.const_data_ptr(), a, query_start);
    backward.inputs.push_back(inputs);
    core::BackwardOutputs outputs;
    outputs.grad_query = from_row(grad_query, query_start);
    outputs.grad_key = from_row(grad_key, key_start);
    outputs.grad_value = from_row(grad_value, key_start);
    if (wanted[3]) {
      const auto of_sequence = sink.select(0, static_cast<std::int64_t>(n));
      outputs.grad_sink = to_view<core::MutableView>(of_sequence, kSinkDims);
      outputs.sink_sizes = {1, of_sequence.size(0)};
    }
    backward.outputs.push_back(outputs);
  }
  return backward;
}

}  // namespace fused_mha::detail
