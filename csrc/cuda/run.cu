// SPDX-License-Identifier: BSD-3-Clause
//
// Chooses the kernels of a call, carves the workspace and starts them in order. The sizes of the workspace and the
// launches come from one plan, so that they agree.
#include "cuda/run.h"

#include <algorithm>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <string>

#include "cuda/classify_masks.h"
#include "cuda/kernels.h"

namespace fused_mha::cuda {

dim3 grid_of(const char* name, std::int64_t blocks) {
  constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();
  if (blocks > kMostBlocks) {
    throw std::runtime_error(std::string("fused_mha: ") + name + ": " + std::to_string(blocks) +
                             " tiles are more than a grid has blocks, " + std::to_string(kMostBlocks));
  }
  return dim3(static_cast<unsigned>(blocks));
}

namespace {

using core::AttentionProblem;
using core::DType;

std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) { return (value + divisor - 1) / divisor; }

/// Tiles of one dimension of a problem that sizes_of() took.
int tiles_of(std::int64_t size, int tile) { return static_cast<int>(ceil_div(size, tile)); }

bool is_float_mask(const core::View& mask) { return mask && mask.dtype != DType::kBool; }

std::size_t accumulator_size(const AttentionProblem& problem) {
  return problem.query.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
}

std::int64_t all_rows(const AttentionProblem& problem) { return problem.batch * problem.heads * problem.query_length; }

/// Hands out aligned parts of the workspace, or only adds them up where there is none yet.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<unsigned char*>(base)) {}
  void* take(std::int64_t bytes) {
    constexpr std::size_t kAlignment = 256;
    const std::size_t begin = used_;
    used_ += (static_cast<std::size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : base_ + begin;
  }
  std::size_t used() const { return used_; }

 private:
  unsigned char* base_;
  std::size_t used_ = 0;
};

// ---- Choice of kernels ----

/// Why the tensor kernels cannot have the problem; null where they can. `largest_shared_bytes`: of the kernels it would
/// run.
const char* refusal(const AttentionProblem& problem, const DeviceLimits& limits, int largest_shared_bytes) {
  if (problem.query.dtype != DType::kFloat16 && problem.query.dtype != DType::kBFloat16) {
    return "tensor kernels take float16 and bfloat16";
  }
  if (!limits.has_tensor_kernels()) return "tensor kernels need compute capability 8.0";
  if (padded_dim(problem.head_dim, problem.value_dim) == 0) return "tensor kernels take at most 256 columns a head";
  if (static_cast<std::size_t>(largest_shared_bytes) > limits.shared_bytes_block) {
    return "the device has too little shared memory for the tensor kernels at these columns";
  }
  return nullptr;
}

bool has_masks(const AttentionProblem& problem) { return problem.attn_mask || problem.key_padding_mask; }

bool has_float_mask(const AttentionProblem& problem) {
  return is_float_mask(problem.key_padding_mask) || is_float_mask(problem.attn_mask);
}

/// Where nothing is added, scores are scaled as exp2 is taken. The scale must be positive then, for maxima of bare
/// products to be maxima of scores, and a number that float has, for hidden scores of -inf to stay that.
bool scores_are_scaled_first(const AttentionProblem& problem) {
  const double factor = problem.scale * std::numbers::log2e;
  return has_float_mask(problem) || !(factor >= std::numeric_limits<float>::min()) ||
         factor > std::numeric_limits<float>::max();
}

ForwardKernels tensor_forward(const AttentionProblem& problem) {
  const int dim = padded_dim(problem.head_dim, problem.value_dim);
  return problem.query.dtype == DType::kFloat16 ? tensor_forward_kernels<half>(dim)
                                                : tensor_forward_kernels<bfloat16>(dim);
}

BackwardKernels tensor_backward(const AttentionProblem& problem) {
  const int dim = padded_dim(problem.head_dim, problem.value_dim);
  return problem.query.dtype == DType::kFloat16 ? tensor_backward_kernels<half>(dim)
                                                : tensor_backward_kernels<bfloat16>(dim);
}

template <typename CallType>
int shared_bytes(const Kernel<CallType>& kernel, bool with_stages) {
  return with_stages ? kernel.bytes_with_stages : kernel.bytes;
}

/// Masks or not, gradients of weights or not: a problem runs on one kind of kernels forward, and on one backward.
int largest_bytes(const ForwardKernels& kernels) {
  return std::max(kernels.forward.bytes_with_stages, kernels.weights.bytes_with_stages);
}

int largest_bytes(const BackwardKernels& kernels) {
  return std::max({kernels.keys.bytes_with_stages, kernels.queries.bytes_with_stages,
                   kernels.weight_deltas.bytes_with_stages, kernels.mask_gradient.bytes_with_stages});
}

const char* forward_refusal(const AttentionProblem& problem, const DeviceLimits& limits) {
  return refusal(problem, limits, largest_bytes(tensor_forward(problem)));
}

const char* backward_refusal(const AttentionProblem& problem, const DeviceLimits& limits) {
  return refusal(problem, limits, largest_bytes(tensor_backward(problem)));
}

ForwardKernels choose_forward(const AttentionProblem& problem, const DeviceLimits& limits) {
  if (forward_refusal(problem, limits) == nullptr) return tensor_forward(problem);
  return problem.query.dtype == DType::kFloat64 ? generic_forward_kernels<double>() : generic_forward_kernels<float>();
}

BackwardKernels choose_backward(const AttentionProblem& problem, const DeviceLimits& limits) {
  if (backward_refusal(problem, limits) == nullptr) return tensor_backward(problem);
  return problem.query.dtype == DType::kFloat64 ? generic_backward_kernels<double>()
                                                : generic_backward_kernels<float>();
}

// ---- Masks ----

/// A pass over a mask that makes its classes; tiles is 0 where none is wanted.
ClassifyCall plan_classes(const AttentionProblem& problem, const core::View& mask, bool is_padding,
                          Workspace& workspace, MaskClasses& classes) {
  ClassifyCall call;
  if (!mask || problem.masked_keys() == 0) return call;
  const auto stored = [&](std::size_t dim, std::int64_t size) {
    return mask.strides[dim] == 0 ? std::min<std::int64_t>(size, 1) : size;
  };
  const std::int64_t batch = stored(0, problem.batch);
  call.mask = mask;
  call.heads = is_padding ? 1 : stored(1, problem.heads);
  call.rows = is_padding ? 1 : stored(2, problem.query_length);
  call.keys = problem.masked_keys();
  call.row_tiles = ceil_div(call.rows, kClassRows);
  call.key_tiles = ceil_div(call.keys, kClassKeys);
  // A float mask that every head has to itself is read as often by the pass as by the kernels: not worth it.
  if (!is_padding && is_float_mask(mask) && batch * call.heads == problem.batch * problem.heads &&
      batch * call.heads > 1) {
    return call;
  }
  call.tiles = batch * call.heads * call.row_tiles * call.key_tiles;
  call.classes = static_cast<std::uint8_t*>(workspace.take(call.tiles));
  classes.data = call.classes;
  classes.row_stride = call.rows == 1 ? 0 : call.key_tiles;
  classes.head_stride = call.heads == 1 ? 0 : call.row_tiles * call.key_tiles;
  classes.batch_stride = batch == 1 ? 0 : call.heads * call.row_tiles * call.key_tiles;
  return call;
}

struct CallPlan {
  Call call;
  ClassifyCall attn;
  ClassifyCall padding;
};

int size_of(const char* name, std::int64_t size) {
  constexpr std::int64_t kLargest = (std::int64_t{1} << 30) - (1 << 16);  // two of them, and a tile, add up in 32 bits
  if (size > kLargest) {
    throw std::runtime_error(std::string("fused_mha: the CUDA kernels take ") + name + " up to " +
                             std::to_string(kLargest) + ", got " + std::to_string(size));
  }
  return static_cast<int>(size);
}

Sizes sizes_of(const AttentionProblem& problem) {
  Sizes sizes;
  sizes.batch = size_of("a batch", problem.batch);
  sizes.heads = size_of("heads", problem.heads);
  sizes.kv_heads = size_of("heads", problem.kv_heads);
  sizes.group = sizes.kv_heads == 0 ? 1 : sizes.heads / sizes.kv_heads;
  sizes.queries = size_of("a query length", problem.query_length);
  sizes.keys = size_of("a key length", problem.key_length);
  sizes.masked_keys = static_cast<int>(problem.masked_keys());
  // Below -L nothing is seen, from S on everything is.
  sizes.causal_offset =
      static_cast<int>(std::clamp<std::int64_t>(problem.causal_offset, -problem.query_length, problem.key_length));
  sizes.head_dim = size_of("a head dimension", problem.head_dim);
  sizes.value_dim = size_of("a value dimension", problem.value_dim);
  return sizes;
}

Factors<float> rounded(const Factors<double>& factors) {
  return {static_cast<float>(factors.query_factor), static_cast<float>(factors.bias_factor),
          static_cast<float>(factors.unit), static_cast<float>(factors.dropout_scale),
          static_cast<float>(factors.scale)};
}

CallPlan plan_call(const AttentionProblem& problem, DeviceRngState rng, Workspace& workspace) {
  CallPlan plan;
  Call& call = plan.call;
  call.problem = problem;
  call.sizes = sizes_of(problem);
  call.double_factors.unit = has_float_mask(problem) ? 4.0 : 1.0;
  call.double_factors.bias_factor = std::numbers::log2e / call.double_factors.unit;
  call.double_factors.query_factor = problem.scale * call.double_factors.bias_factor;
  call.double_factors.dropout_scale = core::dropout_scale(problem.dropout_p);
  call.double_factors.scale = problem.scale;
  call.float_factors = rounded(call.double_factors);
  call.has_bias = scores_are_scaled_first(problem);
  call.has_dropout = problem.dropout_p > 0.0;
  call.dropout_threshold = core::dropout_threshold(problem.dropout_p);
  call.first_sample = static_cast<std::uint32_t>(problem.first_sample);
  call.rng_numbers = rng.numbers;
  call.rng_stride = rng.stride;
  plan.attn = plan_classes(problem, problem.attn_mask, false, workspace, call.attn_classes);
  plan.padding = plan_classes(problem, problem.key_padding_mask, true, workspace, call.padding_classes);
  return plan;
}

void classify_masks(const CallPlan& plan, Stream stream) {
  for (const ClassifyCall* call : {&plan.attn, &plan.padding}) {
    if (call->tiles == 0) continue;
    launch("classify_masks_kernel", &classify_masks_kernel,
           grid_of("classify_masks_kernel", ceil_div(call->tiles, kClassifyWarps)), dim3(kClassifyWarps * kWarpSize), 0,
           stream, *call);
  }
}

template <typename CallType>
void start(const Kernel<CallType>& kernel, const CallType& call, bool with_stages, std::int64_t blocks, Stream stream) {
  if (blocks > 0) kernel.start(call, blocks, shared_bytes(kernel, with_stages), stream);
}

// ---- Forward ----

struct ForwardPlan {
  CallPlan masks;
  ForwardKernels kernels;
  ForwardCall forward;
  std::int64_t blocks = 0;
};

/// Parts that the keys are split into: so many that the card is full, none shorter than four tiles.
int choose_splits(std::int64_t blocks, int key_tiles, const DeviceLimits& limits) {
  constexpr int kFewestTiles = 4;
  if (blocks == 0 || blocks >= limits.multiprocessors) return 1;
  return std::clamp(static_cast<int>(2 * limits.multiprocessors / blocks), 1, std::max(key_tiles / kFewestTiles, 1));
}

ForwardPlan plan_forward(const AttentionProblem& problem, const core::ForwardOutputs& outputs, DeviceRngState rng,
                         Workspace& workspace) {
  const DeviceLimits limits = device_limits();
  ForwardPlan plan{plan_call(problem, rng, workspace), choose_forward(problem, limits), {}};
  const TileShape shape = plan.kernels.forward.shape;
  ForwardCall& forward = plan.forward;
  forward.call = plan.masks.call;
  forward.outputs = outputs;
  forward.row_tiles = tiles_of(problem.query_length, shape.rows);
  forward.parts = tiles_of(problem.value_dim, shape.output);
  const int key_tiles = tiles_of(problem.key_length, shape.columns);
  plan.blocks = problem.batch * problem.heads * forward.row_tiles * forward.parts;
  const int splits = choose_splits(plan.blocks, key_tiles, limits);
  const int keys_of_split = std::max(tiles_of(key_tiles, splits) * shape.columns, 1);
  forward.keys_of_split = tiles_of(keys_of_split, kClassKeys) * kClassKeys;
  forward.splits = std::max(tiles_of(problem.key_length, forward.keys_of_split), 1);
  plan.blocks *= forward.splits;
  if (forward.splits > 1) {
    const auto bytes = static_cast<std::int64_t>(accumulator_size(problem)) * forward.splits * all_rows(problem);
    forward.split_max = workspace.take(bytes);
    forward.split_sum = workspace.take(bytes);
    forward.split_outputs = workspace.take(bytes * problem.value_dim);
  }
  return plan;
}

template <typename Sum>
void merge_splits(const ForwardPlan& plan, Stream stream) {
  launch("merge_splits_kernel", &merge_splits_kernel<Sum>,
         grid_of("merge_splits_kernel", ceil_div(all_rows(plan.forward.call.problem), kMergeWarps)),
         dim3(kMergeWarps * kWarpSize), 0, stream, plan.forward);
}

// ---- Backward ----

struct MaskGradientPlan {
  MaskGradientCall call;
  std::int64_t blocks = 0;
};

MaskGradientPlan plan_mask_gradient(const BackwardCall& backward, const core::MutableView& to,
                                    const std::array<std::int64_t, 4>& sizes, const TileShape& shape) {
  MaskGradientPlan plan;
  if (!to) return plan;
  plan.call.backward = backward;
  plan.call.to = to;
  plan.call.batch = static_cast<int>(sizes[0]);
  plan.call.heads = static_cast<int>(sizes[1]);
  plan.call.rows = static_cast<int>(sizes[2]);
  plan.call.keys = static_cast<int>(sizes[3]);
  plan.call.row_tiles = tiles_of(sizes[2], shape.rows);
  plan.call.key_tiles = tiles_of(sizes[3], shape.columns);
  plan.blocks = sizes[0] * sizes[1] * plan.call.row_tiles * plan.call.key_tiles;
  return plan;
}

template <typename Sum>
void start_output_deltas(const BackwardCall& backward, Stream stream) {
  launch("output_deltas_kernel", &output_deltas_kernel<Sum>,
         grid_of("output_deltas_kernel", ceil_div(all_rows(backward.call.problem), kDeltaWarps)),
         dim3(kDeltaWarps * kWarpSize), 0, stream, backward);
}

template <typename Sum>
void start_sink_gradient(const BackwardCall& backward, Stream stream) {
  const std::int64_t blocks = backward.outputs.sink_sizes[0] * backward.outputs.sink_sizes[1];
  if (blocks == 0) return;
  launch("sink_gradient_kernel", &sink_gradient_kernel<Sum>, grid_of("sink_gradient_kernel", blocks),
         dim3(kSinkThreads), kSinkThreads / kWarpSize * sizeof(Sum), stream, backward);
}

// ---- Dropout ----

struct DropoutCall {
  Call call;
  bool* keep = nullptr;
  std::int64_t count = 0;
};

constexpr int kDropoutThreads = 256;
constexpr std::int64_t kDropoutBlocks = 1 << 16;

__global__ void __launch_bounds__(kDropoutThreads) dropout_mask_kernel(const __grid_constant__ DropoutCall dropout) {
  const core::AttentionProblem& problem = dropout.call.problem;
  const core::PhiloxKey key = dropout_key(dropout.call);
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kDropoutThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kDropoutThreads + threadIdx.x; i < dropout.count;
       i += stride) {
    const std::int64_t row = i / problem.key_length;
    dropout.keep[i] = core::dropout_keeps(
        key, dropout.call.dropout_threshold, problem.first_sample + row / problem.query_length / problem.heads,
        row / problem.query_length % problem.heads, row % problem.query_length, i % problem.key_length);
  }
}

}  // namespace

const char* tensor_cores_refuse(const AttentionProblem& problem, bool is_backward) {
  return is_backward ? backward_refusal(problem, device_limits()) : forward_refusal(problem, device_limits());
}

std::size_t forward_workspace_bytes(const AttentionProblem& problem, const core::ForwardOutputs& outputs) {
  Workspace workspace(nullptr);
  plan_forward(problem, outputs, {}, workspace);
  return workspace.used();
}

void attention_forward(const AttentionProblem& problem, const core::ForwardOutputs& outputs, DeviceRngState rng,
                       void* workspace, Stream stream) {
  if (all_rows(problem) == 0) return;
  Workspace parts(workspace);
  const ForwardPlan plan = plan_forward(problem, outputs, rng, parts);
  classify_masks(plan.masks, stream);
  start(plan.kernels.forward, plan.forward, has_masks(problem), plan.blocks, stream);
  if (plan.forward.splits > 1) {
    problem.query.dtype == DType::kFloat64 ? merge_splits<double>(plan, stream) : merge_splits<float>(plan, stream);
  }
  if (outputs.weights_mode == core::WeightsMode::kNone) return;
  const TileShape shape = plan.kernels.weights.shape;
  WeightsCall weights;
  weights.call = plan.forward.call;
  weights.outputs = outputs;
  weights.row_tiles = tiles_of(problem.query_length, shape.rows);
  weights.key_tiles = tiles_of(problem.key_length, shape.columns);
  weights.heads = outputs.weights_mode == core::WeightsMode::kAveraged ? 1 : weights.call.sizes.heads;
  start(plan.kernels.weights, weights, has_masks(problem),
        problem.batch * weights.heads * weights.row_tiles * weights.key_tiles, stream);
}

namespace {

BackwardCall plan_backward(const AttentionProblem& problem, const core::BackwardInputs& inputs,
                           const core::BackwardOutputs& outputs, const CallPlan& masks, Workspace& workspace) {
  BackwardCall backward;
  backward.call = masks.call;
  backward.inputs = inputs;
  backward.outputs = outputs;
  backward.deltas = workspace.take(all_rows(problem) * static_cast<std::int64_t>(accumulator_size(problem)));
  return backward;
}

}  // namespace

std::size_t backward_workspace_bytes(const AttentionProblem& problem, const core::BackwardInputs& inputs,
                                     const core::BackwardOutputs& outputs) {
  Workspace workspace(nullptr);
  const CallPlan masks = plan_call(problem, {}, workspace);
  plan_backward(problem, inputs, outputs, masks, workspace);
  return workspace.used();
}

void attention_backward(const AttentionProblem& problem, const core::BackwardInputs& inputs,
                        const core::BackwardOutputs& outputs, DeviceRngState rng, void* workspace, Stream stream) {
  Workspace parts(workspace);
  const CallPlan masks = plan_call(problem, rng, parts);
  BackwardCall backward = plan_backward(problem, inputs, outputs, masks, parts);
  const BackwardKernels kernels = choose_backward(problem, device_limits());
  classify_masks(masks, stream);

  const std::int64_t heads = problem.batch * problem.heads;
  const bool with_stages = has_masks(problem) || inputs.grad_weights;
  if (all_rows(problem) > 0) {
    problem.query.dtype == DType::kFloat64 ? start_output_deltas<double>(backward, stream)
                                           : start_output_deltas<float>(backward, stream);
    if (inputs.grad_weights) {
      backward.tiles = tiles_of(problem.query_length, kernels.weight_deltas.shape.rows);
      start(kernels.weight_deltas, backward, with_stages, heads * backward.tiles, stream);
    }
  }
  if (outputs.grad_query) {
    backward.tiles = tiles_of(problem.query_length, kernels.queries.shape.rows);
    backward.parts = tiles_of(problem.head_dim, kernels.queries.shape.output);
    start(kernels.queries, backward, with_stages, heads * backward.tiles * backward.parts, stream);
  }
  if (outputs.grad_key || outputs.grad_value) {
    backward.tiles = tiles_of(problem.key_length, kernels.keys.shape.rows);
    backward.parts = tiles_of(std::max(problem.head_dim, problem.value_dim), kernels.keys.shape.output);
    start(kernels.keys, backward, with_stages, problem.batch * problem.kv_heads * backward.tiles * backward.parts,
          stream);
  }
  if (outputs.grad_sink) {
    problem.query.dtype == DType::kFloat64 ? start_sink_gradient<double>(backward, stream)
                                           : start_sink_gradient<float>(backward, stream);
  }
  const TileShape shape = kernels.mask_gradient.shape;
  const std::array<std::int64_t, 4> padding_sizes{problem.batch, 1, 1, problem.masked_keys()};
  for (const MaskGradientPlan& plan :
       {plan_mask_gradient(backward, outputs.grad_attn_mask, outputs.attn_mask_sizes, shape),
        plan_mask_gradient(backward, outputs.grad_key_padding_mask, padding_sizes, shape)}) {
    start(kernels.mask_gradient, plan.call, true, plan.blocks, stream);
  }
}

void dropout_mask(const AttentionProblem& problem, bool* keep, DeviceRngState rng, Stream stream) {
  DropoutCall dropout;
  dropout.call.problem = problem;
  dropout.call.has_dropout = true;
  dropout.call.dropout_threshold = core::dropout_threshold(problem.dropout_p);
  dropout.call.rng_numbers = rng.numbers;
  dropout.call.rng_stride = rng.stride;
  dropout.keep = keep;
  dropout.count = all_rows(problem) * problem.key_length;
  if (dropout.count == 0) return;
  launch("dropout_mask_kernel", &dropout_mask_kernel,
         dim3(static_cast<unsigned>(std::min(ceil_div(dropout.count, kDropoutThreads), kDropoutBlocks))),
         dim3(kDropoutThreads), 0, stream, dropout);
}

}  // namespace fused_mha::cuda
