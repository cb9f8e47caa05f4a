// SPDX-License-Identifier: BSD-3-Clause
//
// Splits a call into work items and runs them. Workers pull items, dearest first, from an atomic counter; scratch
// belongs to the worker only while it works on an item, so no result depends on who did what.
#include "cpu/run.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <limits>
#include <memory>
#include <new>
#include <numbers>
#include <utility>
#include <vector>

#include "cpu/plan.h"

namespace fused_mha::cpu {
namespace {

using core::AttentionProblem;
using core::DType;
using core::MaskPlan;
using core::Parallel;

/// Row blocks whose state an item keeps at once: 24 x 48 rows make the packing of keys cheap (about 1 % of the
/// products at D = 64) and still fit the L2 cache (benchmark row "forward float32 L=1024").
constexpr std::int64_t kMaxBlocksPerItem = 24;
/// Packing an item's keys, in units of one block's work on them.
constexpr double kPackingPerBlockOfRows = 0.12;
/// Bytes of weights that an item may hold back when weights are returned: a good part of the L2 cache.
constexpr std::int64_t kWeightsPanelBytes = 1 << 20;
/// Parts that work is split into at least, where the keys are long enough. A constant: the split decides the order of
/// sums, so it may depend on the shapes only.
constexpr std::int64_t kWorkParts = 16;
/// Fewest keys worth a split of their own for few rows.
constexpr std::int64_t kMinKeysPerSplit = 512;
/// Fewest key steps worth a split of their own.
constexpr std::int64_t kMinStepsPerSplit = 4;
/// Scratch that a thread keeps from one call to the next.
constexpr std::size_t kKeptScratchBytes = std::size_t{8} << 20;
/// Multiply-adds below which waking another thread costs more than it saves.
constexpr double kSerialWork = 3e5;

const IsaKernels& active_kernels() {
  switch (active_isa()) {
#if defined(FUSED_MHA_HAS_AVX512BF16)
    case Isa::kAvx512Bf16:
      return kernels_avx512bf16();
#endif
#if defined(FUSED_MHA_HAS_AVX512)
    case Isa::kAvx512:
      return kernels_avx512();
#endif
#if defined(FUSED_MHA_HAS_AVX2)
    case Isa::kAvx2:
      return kernels_avx2();
#endif
    default:
      return kernels_generic();
  }
}

const KernelTable& kernels_for(DType dtype) {
  const IsaKernels& kernels = active_kernels();
  if (dtype == DType::kFloat64) return kernels.double_single;
  return dtype == DType::kBFloat16 ? kernels.bfloat16 : kernels.single;
}

std::size_t accumulator_size(DType dtype) { return dtype == DType::kFloat64 ? sizeof(double) : sizeof(float); }

std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) { return (value + divisor - 1) / divisor; }

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }  // NOLINT(cppcoreguidelines-no-malloc)
};
using Buffer = std::unique_ptr<std::byte, FreeDeleter>;

Buffer allocate(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  if (bytes == 0) return nullptr;
  if (bytes > static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max()) - kAlignment) throw std::bad_alloc();
  auto* memory =
      static_cast<std::byte*>(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
  if (memory == nullptr) throw std::bad_alloc();
  return Buffer(memory);
}

Buffer allocate_zeroed(std::size_t bytes) {
  Buffer buffer = allocate(bytes);
  std::fill_n(buffer.get(), bytes, std::byte{0});
  return buffer;
}

/// An item's scratch. Up to kKeptScratchBytes stay with the thread for the next call: fresh memory costs a page fault
/// every 4 KiB, several percent of a call.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : bytes_(bytes) {
    if (bytes_ <= kKeptScratchBytes) {
      Kept& kept = kept_by_thread();
      if (kept.bytes >= bytes_) {
        memory_ = std::move(kept.memory);
        bytes_ = std::exchange(kept.bytes, 0);
      }
    }
    if (memory_ == nullptr) memory_ = allocate(bytes_);
  }
  ~Scratch() {
    Kept& kept = kept_by_thread();
    if (bytes_ <= kKeptScratchBytes && bytes_ > kept.bytes) kept = {std::move(memory_), bytes_};
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::byte* get() const { return memory_.get(); }

 private:
  struct Kept {
    Buffer memory;
    std::size_t bytes = 0;
  };
  static Kept& kept_by_thread() {
    thread_local Kept kept;
    return kept;
  }

  Buffer memory_;
  std::size_t bytes_;
};

/// Threads that take part in `count` items, of which there is at least one.
int worker_count(const Parallel& parallel, std::int64_t count) {
  return static_cast<int>(std::clamp<std::int64_t>(count, 1, std::max(parallel.threads, 1)));
}

/// Calls body(index, scratch) for all indices below `count`.
template <typename Body>
void for_each_item(const Parallel& parallel, std::int64_t count, std::size_t scratch_bytes, const Body& body) {
  if (count == 0) return;
  std::atomic<std::int64_t> next{0};
  const int workers = worker_count(parallel, count);
  const auto work = [&](int) {
    std::int64_t index = next++;
    if (index >= count) return;
    const Scratch scratch(scratch_bytes);
    for (; index < count; index = next++) body(index, scratch.get());
  };
  if (workers == 1) {
    work(0);
  } else {
    parallel.run(workers, work);
  }
}

/// Calls body(call, index, scratch) for all indices below count(call), for all calls.
template <typename Calls, typename Count, typename Body>
void for_each_part(const Parallel& parallel, const Calls& calls, std::size_t scratch_bytes, const Count& count,
                   const Body& body) {
  std::int64_t end = 0;
  for (const auto& call : calls) end += count(call);
  if (end == 0) return;
  std::vector<std::int64_t> ends;
  ends.reserve(calls.size());
  for (const auto& call : calls) ends.push_back((ends.empty() ? 0 : ends.back()) + count(call));
  for_each_item(parallel, end, scratch_bytes, [&](std::int64_t i, std::byte* memory) {
    const auto at = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), i) - ends.begin());
    body(calls[at], i - (at == 0 ? 0 : ends[at - 1]), memory);
  });
}

double multiply_adds(const AttentionProblem& problem) {
  return static_cast<double>(problem.batch) * static_cast<double>(problem.heads) *
         static_cast<double>(problem.query_length) * static_cast<double>(problem.key_length) *
         static_cast<double>(problem.head_dim + problem.value_dim);
}

/// The schedule for the problems of a call: itself, or one thread where there is too little to share.
Parallel schedule_for(std::span<const AttentionProblem> problems, const Parallel& parallel) {
  double work = 0.0;
  for (const AttentionProblem& problem : problems) work += multiply_adds(problem);
  Parallel schedule = parallel;
  if (work < kSerialWork) schedule.threads = 1;
  return schedule;
}

/// What is left of the schedule for one of `problems` problems that run at once.
Parallel share_of(const Parallel& schedule, std::size_t problems) {
  Parallel share = schedule;
  share.threads = static_cast<int>(ceil_div(schedule.threads, static_cast<std::int64_t>(problems)));
  return share;
}

bool is_float_mask(const core::View& mask) { return mask && mask.dtype != DType::kBool; }

DropoutRoundKeys round_keys(core::PhiloxKey key) {
  DropoutRoundKeys keys;
  for (int round = 0; round < core::kDropoutRounds; ++round) {
    keys.first[round] = key[0];
    keys.second[round] = key[1];
    key[0] += core::kPhiloxWeyl0;
    key[1] += core::kPhiloxWeyl1;
  }
  return keys;
}

CallConstants make_constants(const AttentionProblem& problem, const MaskPlan& masks) {
  CallConstants call;
  call.problem = &problem;
  call.masks = &masks;
  call.unit = is_float_mask(problem.key_padding_mask) || is_float_mask(problem.attn_mask) ? 4.0 : 1.0;
  call.bias_factor = std::numbers::log2e / call.unit;
  call.query_factor = problem.scale * call.bias_factor;
  call.has_dropout = problem.dropout_p > 0.0;
  call.dropout_keys = round_keys(core::dropout_key(problem.rng));
  call.dropout_threshold = core::dropout_threshold(problem.dropout_p);
  call.dropout_scale = core::dropout_scale(problem.dropout_p);
  call.blocks_per_head = ceil_div(problem.query_length, kBlockRows);
  return call;
}

/// Keys that a block of rows can see at most, as far as lengths and causality tell.
double block_cost(const CallConstants& call, std::int64_t n, std::int64_t block) {
  const std::int64_t kept = call.masks->kept_keys(n).count;
  if (!call.problem->is_causal) return static_cast<double>(kept);
  const std::int64_t seen = std::max<std::int64_t>((block + 1) * kBlockRows + call.problem->causal_offset, 0);
  return static_cast<double>(std::min(kept, seen + call.problem->always_visible_keys));
}

template <typename Item>
struct Costed {
  Item item;
  double cost = 0.0;
  std::size_t call = 0;  // whose item it is
};

template <typename Item>
std::vector<Costed<Item>> dearest_first(std::vector<Costed<Item>> items) {
  std::stable_sort(items.begin(), items.end(),
                   [](const Costed<Item>& a, const Costed<Item>& b) { return a.cost > b.cost; });
  return items;
}

/// The item of the same problem that a worker will most likely get after items[index]; that one itself if there is
/// none.
template <typename Item>
const Item& after(const std::vector<Costed<Item>>& items, std::int64_t index, const Parallel& parallel) {
  const auto next = static_cast<std::size_t>(index + std::max(parallel.threads, 1));
  const Costed<Item>& found = items[std::min(next, items.size() - 1)];
  const Costed<Item>& current = items[static_cast<std::size_t>(index)];
  return found.call == current.call ? found.item : current.item;
}

/// Parts that few rows' keys are split into: enough for many threads, none shorter than kMinKeysPerSplit.
std::int64_t choose_forward_splits(const ForwardPlan& plan) {
  const AttentionProblem& problem = *plan.call.problem;
  if (!plan.few_rows || plan.outputs.weights_mode != core::WeightsMode::kNone) return 1;
  const std::int64_t heads = problem.batch * problem.kv_heads;
  return std::max<std::int64_t>(1, std::min(kWorkParts / heads, problem.key_length / kMinKeysPerSplit));
}

std::int64_t choose_blocks_per_item(const ForwardPlan& plan, const Parallel& parallel) {
  const AttentionProblem& problem = *plan.call.problem;
  const bool with_weights = plan.outputs.weights_mode != core::WeightsMode::kNone;
  const bool averages = plan.outputs.weights_mode == core::WeightsMode::kAveraged;
  const std::int64_t groups = averages ? problem.batch : problem.batch * problem.kv_heads;
  const std::int64_t blocks = plan.call.blocks_per_head * (with_weights ? 1 : problem.heads_per_kv_head());
  std::int64_t most = std::min(blocks, kMaxBlocksPerItem);
  if (with_weights) {
    const std::int64_t row_bytes = static_cast<std::int64_t>(accumulator_size(problem.query.dtype)) * kBlockRows;
    const std::int64_t tiles = most_forward_steps(problem) * kForwardKeys * row_bytes;
    const std::int64_t sums = problem.key_length * row_bytes;
    const std::int64_t shared = (weights_fit_one_panel(problem) ? tiles : 0) + (averages ? 0 : sums);
    const std::int64_t of_each = (weights_fit_one_panel(problem) ? 0 : tiles) + (averages ? sums : 0);
    if (of_each > 0) most = std::clamp<std::int64_t>((kWeightsPanelBytes - shared) / of_each, 1, most);
  }
  // The size with which the thread that works longest has the least to do: rounds of whole items, and what is left of
  // each group in the gaps. Where causality makes items unequal, or another program takes a thread's time, more of them
  // even it out.
  const std::int64_t threads = std::max(parallel.threads, 1);
  const std::int64_t least_items = threads == 1 ? 1 : threads * (problem.is_causal ? 4 : 2);
  std::int64_t best = 1;
  double best_cost = std::numeric_limits<double>::infinity();
  for (std::int64_t size = 1; size <= most; ++size) {
    const std::int64_t items = groups * ceil_div(blocks, size);
    if (size > 1 && items < least_items) break;
    const std::int64_t rounds = ceil_div(groups * (blocks / size), threads);
    const double all = static_cast<double>(groups * blocks) + static_cast<double>(items) * kPackingPerBlockOfRows;
    const double cost = std::max(static_cast<double>(rounds) * (static_cast<double>(size) + kPackingPerBlockOfRows),
                                 all / static_cast<double>(threads));
    if (cost <= best_cost) {
      best = size;
      best_cost = cost;
    }
  }
  return best;
}

void add_items(const ForwardPlan& plan, std::size_t call, std::vector<Costed<ForwardItem>>& items) {
  const AttentionProblem& problem = *plan.call.problem;
  const bool with_weights = plan.outputs.weights_mode != core::WeightsMode::kNone;
  const std::int64_t kv_heads = plan.outputs.weights_mode == core::WeightsMode::kAveraged ? 1 : problem.kv_heads;
  const std::int64_t blocks = plan.call.blocks_per_head * (with_weights ? 1 : problem.heads_per_kv_head());
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    for (std::int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      for (std::int64_t begin = 0; begin < blocks; begin += plan.blocks_per_item) {
        Costed<ForwardItem> costed{{n, kv_head, begin, std::min(blocks, begin + plan.blocks_per_item)}, 0.0, call};
        for (std::int64_t block = begin; block < costed.item.block_end; ++block) {
          costed.cost += block_cost(plan.call, n, block % plan.call.blocks_per_head);
        }
        for (std::int64_t split = 0; split < plan.key_splits; ++split) {
          costed.item.split = split;
          items.push_back(costed);
        }
      }
    }
  }
}

/// Whether the main loop can sum up attn_mask's gradient on its way: where heads and elements have gradients of their
/// own, in the type that sums have. Otherwise owners of its tiles compute the scores once more.
bool can_add_mask_gradient(const AttentionProblem& problem, const core::BackwardOutputs& outputs) {
  const std::array<std::int64_t, 4> whole{outputs.attn_mask_sizes[0], problem.heads, problem.query_length,
                                          problem.masked_keys()};
  const DType sums = problem.query.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  return outputs.grad_attn_mask && outputs.attn_mask_sizes == whole && outputs.grad_attn_mask.dtype == sums;
}

/// Whether there are samples that attn_mask's gradient begins with, and key_padding_mask hides no key of theirs.
bool first_samples_keep_all_keys(const BackwardPlan& plan) {
  if (plan.call.problem->batch == 0) return false;
  for (std::int64_t n = 0; n < plan.outputs.attn_mask_sizes[0]; ++n) {
    if (plan.call.masks->kept_keys(n).count < plan.call.problem->key_length) return false;
  }
  return true;
}

/// Samples that share attn_mask go one after another, so that the order of its gradient's sums is fixed.
std::int64_t samples_per_item(const BackwardPlan& plan) {
  return plan.adds_mask_gradient && plan.outputs.attn_mask_sizes[0] == 1 ? plan.call.problem->batch : 1;
}

void add_items(const BackwardPlan& plan, std::size_t call, std::vector<Costed<BackwardItem>>& items) {
  const AttentionProblem& problem = *plan.call.problem;
  const std::int64_t samples = samples_per_item(plan);
  for (std::int64_t n = 0; n < problem.batch; n += samples) {
    double kept = 0.0;
    for (std::int64_t i = n; i < n + samples; ++i) kept += static_cast<double>(plan.call.masks->kept_keys(i).count);
    for (std::int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head) {
      for (std::int64_t split = 0; split < plan.key_splits; ++split) {
        // Under causality the first keys are seen by the most rows.
        const double share =
            problem.is_causal ? 2.0 - static_cast<double>(split) / static_cast<double>(plan.key_splits) : 1.0;
        items.push_back({{n, n + samples, kv_head, split}, kept * share, call});
      }
    }
  }
}

/// Each split holds sums of the size of grad_query. Grouped heads make few (n, kv_head) pairs of many rows: beyond four
/// splits their sums would outgrow everything else.
std::int64_t choose_key_splits(const AttentionProblem& problem, std::int64_t samples_an_item) {
  const std::int64_t samples = problem.batch / std::max<std::int64_t>(samples_an_item, 1);
  const std::int64_t heads = std::max<std::int64_t>(samples * problem.kv_heads, 1);
  const std::int64_t most = std::max<std::int64_t>(4, kWorkParts / std::max<std::int64_t>(samples * problem.heads, 1));
  const std::int64_t steps = ceil_div(problem.key_length, kBackwardKeys);
  return std::clamp(std::min({most, kWorkParts / heads, steps / kMinStepsPerSplit}), std::int64_t{1},
                    std::max<std::int64_t>(steps, 1));
}

ForwardPlan make_forward_plan(const AttentionProblem& problem, const MaskPlan& masks,
                              const core::ForwardOutputs& outputs, const Parallel& schedule) {
  ForwardPlan plan{make_constants(problem, masks), outputs};
  plan.blocks_per_item = choose_blocks_per_item(plan, schedule);
  plan.few_rows = problem.query_length <= kFewRows;
  plan.key_splits = choose_forward_splits(plan);
  return plan;
}

/// One problem of a forward call, and what its plan points to.
struct ForwardCall {
  ForwardCall(const AttentionProblem& problem, const core::ForwardOutputs& outputs, const Parallel& schedule)
      : masks(problem, schedule), plan(make_forward_plan(problem, masks, outputs, schedule)) {}
  ForwardCall(const ForwardCall&) = delete;
  ForwardCall& operator=(const ForwardCall&) = delete;

  std::int64_t heads() const { return plan.call.problem->batch * plan.call.problem->heads; }

  MaskPlan masks;
  ForwardPlan plan;
  Buffer split_states;
};

/// One problem of a backward call, and what its plan points to.
struct BackwardCall {
  BackwardCall(const AttentionProblem& problem, const core::BackwardInputs& inputs,
               const core::BackwardOutputs& outputs, const Parallel& schedule)
      : masks(problem, schedule), plan{make_constants(problem, masks), inputs, outputs} {
    plan.adds_mask_gradient = can_add_mask_gradient(problem, outputs);
    plan.begins_mask_gradient = plan.adds_mask_gradient && first_samples_keep_all_keys(plan);
    plan.key_splits = choose_key_splits(problem, samples_per_item(plan));
  }
  BackwardCall(const BackwardCall&) = delete;
  BackwardCall& operator=(const BackwardCall&) = delete;

  void allocate_buffers(const KernelTable& kernels, std::size_t element) {
    const AttentionProblem& problem = *plan.call.problem;
    deltas = allocate(static_cast<std::size_t>(heads() * problem.query_length) * element);
    plan.row_deltas = deltas.get();
    if (plan.outputs.grad_key_padding_mask) {
      const std::int64_t stored_keys = problem.batch * problem.kv_heads * problem.key_length;
      key_bias = allocate_zeroed(static_cast<std::size_t>(stored_keys) * element);
      plan.key_bias_partials = key_bias.get();
    }
    if (has_main_loop() && plan.key_splits > 1) {
      const auto padded_rows =
          static_cast<std::size_t>(heads() * plan.key_splits * plan.call.blocks_per_head * kBlockRows);
      partials = allocate(padded_rows * kernels.partial_row_elements(plan) * element);
      plan.query_partials = partials.get();
    }
  }

  bool has_main_loop() const {
    const core::BackwardOutputs& wanted = plan.outputs;
    return wanted.grad_query || wanted.grad_key || wanted.grad_value || wanted.grad_key_padding_mask ||
           plan.adds_mask_gradient;
  }

  std::int64_t heads() const { return plan.call.problem->batch * plan.call.problem->heads; }

  /// n, h and number of block `index` of all.
  std::array<std::int64_t, 3> place_of_block(std::int64_t index) const {
    const std::int64_t blocks = plan.call.blocks_per_head;
    const std::int64_t head_count = plan.call.problem->heads;
    return {index / blocks / head_count, index / blocks % head_count, index % blocks};
  }

  MaskPlan masks;
  BackwardPlan plan;
  Buffer deltas;
  Buffer key_bias;
  Buffer partials;
};

void count_tiles(const AttentionProblem& problem, const MaskPlan& masks, ForwardDescription& description) {
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    const core::KeySpan& kept = masks.kept_keys(n);
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      for (std::int64_t row = 0; row < problem.query_length; row += kBlockRows) {
        const std::int64_t row_end = std::min(problem.query_length, row + kBlockRows);
        for (std::int64_t key = 0; key < kept.count; key += kGroupKeys) {
          switch (masks.tile_class(n, h, row, row_end, kept.part(key, std::min(kGroupKeys, kept.count - key)))) {
            case core::TileClass::kHidden:
              ++description.hidden_tiles;
              break;
            case core::TileClass::kFree:
              ++description.free_tiles;
              break;
            case core::TileClass::kMixed:
              ++description.mixed_tiles;
              break;
          }
        }
      }
    }
  }
}

/// Natural logarithms of the sums that the rows of head `index` were divided by.
template <typename T>
void write_log_sum_exp(const ForwardPlan& plan, std::int64_t index) {
  const AttentionProblem& problem = *plan.call.problem;
  const core::MutableView& to = plan.outputs.log_sum_exp;
  const T* row_max = static_cast<const T*>(plan.outputs.row_max) + index * problem.query_length;
  const T* row_sum = static_cast<const T*>(plan.outputs.row_sum) + index * problem.query_length;
  for (std::int64_t l = 0; l < problem.query_length; ++l) {
    const double largest = static_cast<double>(row_max[l]) * plan.call.unit * std::numbers::ln2;
    core::store_element(to.data, to.dtype, to.offset(index / problem.heads, index % problem.heads, l, 0),
                        largest + std::log(static_cast<double>(row_sum[l])));
  }
}

/// A log-sum-exp's gradient is one more share of each weight: of all scores it raises each by its weight.
template <typename T>
void subtract_log_sum_exp_gradient(const BackwardPlan& plan, std::int64_t index) {
  const AttentionProblem& problem = *plan.call.problem;
  const core::View& from = plan.inputs.grad_log_sum_exp;
  T* deltas = static_cast<T*>(plan.row_deltas) + index * problem.query_length;
  for (std::int64_t l = 0; l < problem.query_length; ++l) {
    deltas[l] -=
        static_cast<T>(core::mask_element(from, from.offset(index / problem.heads, index % problem.heads, l, 0)));
  }
}

/// The sink's gradient, stored element `index`: minus its weight times delta, as of a key whose value is 0.
template <typename T>
void reduce_sink(const BackwardPlan& plan, std::int64_t index) {
  const AttentionProblem& problem = *plan.call.problem;
  const auto [stored_samples, stored_heads] = plan.outputs.sink_sizes;
  constexpr auto kLargest = static_cast<double>(std::numeric_limits<T>::max());
  double gradient = 0.0;
  for (std::int64_t n = index / stored_heads; n < problem.batch; n += stored_samples) {
    for (std::int64_t h = index % stored_heads; h < problem.heads; h += stored_heads) {
      // As the forward pass rounds it.
      const double given = core::mask_element(problem.sink, problem.sink.offset(n, h, 0, 0)) * plan.call.bias_factor;
      const double score = static_cast<double>(static_cast<T>(std::min(given, kLargest)));
      const std::int64_t row = (n * problem.heads + h) * problem.query_length;
      for (std::int64_t l = row; l < row + problem.query_length; ++l) {
        const double largest = static_cast<double>(static_cast<const T*>(plan.inputs.row_max)[l]);
        const double sum = static_cast<double>(static_cast<const T*>(plan.inputs.row_sum)[l]);
        if (sum == 0.0) continue;  // no key and a sink of -inf
        const double weight = std::exp2((score - largest) * plan.call.unit) / sum;
        gradient -= weight * static_cast<double>(static_cast<const T*>(plan.row_deltas)[l]);
      }
    }
  }
  const core::MutableView& to = plan.outputs.grad_sink;
  core::store_element(to.data, to.dtype, to.offset(index / stored_heads, index % stored_heads, 0, 0), gradient);
}

/// key_padding_mask's gradient: the column sums of all heads, head after head.
template <typename T>
void reduce_key_bias(const BackwardPlan& plan) {
  const AttentionProblem& problem = *plan.call.problem;
  const core::MutableView& to = plan.outputs.grad_key_padding_mask;
  const auto* partials = static_cast<const T*>(plan.key_bias_partials);
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    for (std::int64_t s = 0; s < problem.masked_keys(); ++s) {
      T sum{0};
      for (std::int64_t h = 0; h < problem.kv_heads; ++h) {
        sum += partials[(n * problem.kv_heads + h) * problem.key_length + s];
      }
      core::store_element(to.data, to.dtype, to.offset(n, 0, 0, s), static_cast<double>(sum));
    }
  }
}

template <typename T>
void zero_mask_gradient(const BackwardPlan& plan, const Parallel& parallel) {
  const core::MutableView& to = plan.outputs.grad_attn_mask;
  const std::array<std::int64_t, 4>& sizes = plan.outputs.attn_mask_sizes;
  for_each_item(parallel, sizes[0] * sizes[1], 0, [&](std::int64_t i, std::byte*) {
    for (std::int64_t row = 0; row < sizes[2]; ++row) {
      T* first = static_cast<T*>(to.data) + to.offset(i / sizes[1], i % sizes[1], row, 0);
      if (to.strides[3] == 1) {
        std::fill_n(first, sizes[3], T{0});
      } else {
        for (std::int64_t key = 0; key < sizes[3]; ++key) first[key * to.strides[3]] = T{0};
      }
    }
  });
}

std::vector<MaskGradientItem> mask_gradient_items(const BackwardPlan& plan) {
  const std::array<std::int64_t, 4>& stored = plan.outputs.attn_mask_sizes;
  const std::int64_t row_step = stored[2] > 1 ? kMaskGradientRows : 1;
  const std::int64_t key_step = stored[3] > 1 ? kMaskGradientKeys : 1;
  std::vector<MaskGradientItem> items;
  for (std::int64_t n = 0; n < stored[0]; ++n) {
    for (std::int64_t h = 0; h < stored[1]; ++h) {
      for (std::int64_t row = 0; row < stored[2]; row += row_step) {
        for (std::int64_t key = 0; key < stored[3]; key += key_step) {
          items.push_back({n, h, row, std::min(stored[2], row + row_step), key, std::min(stored[3], key + key_step)});
        }
      }
    }
  }
  return items;
}

void run_mask_gradient(const BackwardPlan& plan, const KernelTable& kernels, const Parallel& parallel) {
  const std::vector<MaskGradientItem> items = mask_gradient_items(plan);
  const std::size_t scratch = kernels.mask_gradient_scratch(plan);
  for_each_item(parallel, static_cast<std::int64_t>(items.size()), scratch, [&](std::int64_t i, std::byte* memory) {
    kernels.mask_gradient(plan, items[static_cast<std::size_t>(i)], memory);
  });
}

}  // namespace

void attention_forward(const AttentionProblem& problem, const core::ForwardOutputs& outputs, const Parallel& parallel) {
  attention_forward({&problem, 1}, {&outputs, 1}, parallel);
}

void attention_forward(std::span<const AttentionProblem> problems, std::span<const core::ForwardOutputs> outputs,
                       const Parallel& parallel) {
  if (problems.empty()) return;
  const Parallel schedule = schedule_for(problems, parallel);
  const DType dtype = problems[0].query.dtype;
  const KernelTable& kernels = kernels_for(dtype);
  std::deque<ForwardCall> calls;
  std::vector<Costed<ForwardItem>> items;
  std::size_t scratch = 0;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const AttentionProblem& problem = problems[i];
    if (problem.batch == 0 || problem.heads == 0 || problem.query_length == 0) continue;
    ForwardCall& call = calls.emplace_back(problem, outputs[i], share_of(schedule, problems.size()));
    if (call.plan.key_splits > 1) {
      const auto states = static_cast<std::size_t>(problem.batch * problem.heads * call.plan.key_splits);
      call.split_states = allocate(states * kernels.split_state_elements(call.plan) * accumulator_size(dtype));
      call.plan.split_states = call.split_states.get();
    }
    scratch = std::max(scratch, kernels.forward_scratch(call.plan));
    add_items(call.plan, calls.size() - 1, items);
  }
  items = dearest_first(std::move(items));
  for_each_item(schedule, static_cast<std::int64_t>(items.size()), scratch, [&](std::int64_t i, std::byte* memory) {
    const Costed<ForwardItem>& costed = items[static_cast<std::size_t>(i)];
    kernels.forward(calls[costed.call].plan, costed.item, after(items, i, schedule), memory);
  });
  for_each_part(
      schedule, calls, scratch, [](const ForwardCall& call) { return call.plan.key_splits > 1 ? call.heads() : 0; },
      [&](const ForwardCall& call, std::int64_t i, std::byte* memory) {
        const std::int64_t heads = call.plan.call.problem->heads;
        kernels.merge_splits(call.plan, i / heads, i % heads, memory);
      });
  for_each_part(
      schedule, calls, 0, [](const ForwardCall& call) { return call.plan.outputs.log_sum_exp ? call.heads() : 0; },
      [&](const ForwardCall& call, std::int64_t i, std::byte*) {
        dtype == DType::kFloat64 ? write_log_sum_exp<double>(call.plan, i) : write_log_sum_exp<float>(call.plan, i);
      });
}

ForwardDescription describe_forward(const AttentionProblem& problem, core::WeightsMode weights_mode,
                                    const Parallel& parallel) {
  return describe_forward({&problem, 1}, weights_mode, parallel);
}

ForwardDescription describe_forward(std::span<const AttentionProblem> problems, core::WeightsMode weights_mode,
                                    const Parallel& parallel) {
  ForwardDescription description;
  description.isa = active_isa();
  description.few_rows_limit = kFewRows;
  description.serial_multiply_adds = kSerialWork;
  description.tile_rows = kBlockRows;
  description.tile_keys = kGroupKeys;
  const Parallel schedule = schedule_for(problems, parallel);
  bool all_few = true;
  for (const AttentionProblem& problem : problems) {
    description.multiply_adds += multiply_adds(problem);
    description.all_keys += problem.batch * problem.key_length;
    if (problem.batch == 0 || problem.heads == 0 || problem.query_length == 0) continue;
    const Parallel share = share_of(schedule, problems.size());
    const MaskPlan masks(problem, share);
    core::ForwardOutputs outputs{};
    outputs.weights_mode = weights_mode;
    const ForwardPlan plan = make_forward_plan(problem, masks, outputs, share);
    all_few = all_few && plan.few_rows;
    description.few_rows = all_few;
    description.key_splits = std::max(description.key_splits, plan.key_splits);
    std::vector<Costed<ForwardItem>> items;
    add_items(plan, 0, items);
    description.work_items += static_cast<std::int64_t>(items.size());
    for (std::int64_t n = 0; n < problem.batch; ++n) description.kept_keys += masks.kept_keys(n).count;
    description.has_padding_bias = description.has_padding_bias || masks.has_padding_bias();
    count_tiles(problem, masks, description);
    description.backward_key_splits = std::max(description.backward_key_splits, choose_key_splits(problem, 1));
  }
  if (description.work_items > 0) description.threads = worker_count(schedule, description.work_items);
  return description;
}

void attention_backward(const AttentionProblem& problem, const core::BackwardInputs& inputs,
                        const core::BackwardOutputs& outputs, const Parallel& parallel) {
  attention_backward({&problem, 1}, {&inputs, 1}, {&outputs, 1}, parallel);
}

void attention_backward(std::span<const AttentionProblem> problems, std::span<const core::BackwardInputs> inputs,
                        std::span<const core::BackwardOutputs> outputs, const Parallel& parallel) {
  if (problems.empty()) return;
  const Parallel schedule = schedule_for(problems, parallel);
  const DType dtype = problems[0].query.dtype;
  const KernelTable& kernels = kernels_for(dtype);
  const std::size_t element = accumulator_size(dtype);
  const bool is_double = dtype == DType::kFloat64;
  std::deque<BackwardCall> calls;
  std::vector<Costed<BackwardItem>> items;
  std::size_t delta_scratch = 0;
  std::size_t scratch = 0;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    BackwardCall& call = calls.emplace_back(problems[i], inputs[i], outputs[i], share_of(schedule, problems.size()));
    call.allocate_buffers(kernels, element);
    delta_scratch = std::max(delta_scratch, kernels.delta_scratch(call.plan));
    if (!call.has_main_loop()) continue;
    scratch = std::max(scratch, kernels.backward_scratch(call.plan));
    add_items(call.plan, calls.size() - 1, items);
  }
  const auto blocks = [](const BackwardCall& call) { return call.heads() * call.plan.call.blocks_per_head; };
  for_each_part(schedule, calls, delta_scratch, blocks,
                [&](const BackwardCall& call, std::int64_t i, std::byte* memory) {
                  const auto [n, h, block] = call.place_of_block(i);
                  kernels.delta(call.plan, n, h, block, memory);
                });
  for_each_part(
      schedule, calls, 0, [](const BackwardCall& call) { return call.plan.inputs.grad_log_sum_exp ? call.heads() : 0; },
      [&](const BackwardCall& call, std::int64_t i, std::byte*) {
        is_double ? subtract_log_sum_exp_gradient<double>(call.plan, i)
                  : subtract_log_sum_exp_gradient<float>(call.plan, i);
      });
  for_each_part(
      schedule, calls, 0,
      [](const BackwardCall& call) {
        const core::BackwardOutputs& wanted = call.plan.outputs;
        return wanted.grad_sink ? wanted.sink_sizes[0] * wanted.sink_sizes[1] : 0;
      },
      [&](const BackwardCall& call, std::int64_t i, std::byte*) {
        is_double ? reduce_sink<double>(call.plan, i) : reduce_sink<float>(call.plan, i);
      });
  for (const BackwardCall& call : calls) {
    if (!call.plan.adds_mask_gradient || call.plan.begins_mask_gradient) continue;
    is_double ? zero_mask_gradient<double>(call.plan, schedule) : zero_mask_gradient<float>(call.plan, schedule);
  }
  items = dearest_first(std::move(items));
  for_each_item(schedule, static_cast<std::int64_t>(items.size()), scratch, [&](std::int64_t i, std::byte* memory) {
    const Costed<BackwardItem>& costed = items[static_cast<std::size_t>(i)];
    kernels.backward(calls[costed.call].plan, costed.item, after(items, i, schedule), memory);
  });
  for_each_part(
      schedule, calls, 0,
      [&](const BackwardCall& call) {
        return call.plan.key_splits > 1 && call.plan.outputs.grad_query ? blocks(call) : 0;
      },
      [&](const BackwardCall& call, std::int64_t i, std::byte*) {
        const auto [n, h, block] = call.place_of_block(i);
        kernels.reduce_query(call.plan, n, h, block);
      });
  for (const BackwardCall& call : calls) {
    if (call.plan.outputs.grad_key_padding_mask) {
      is_double ? reduce_key_bias<double>(call.plan) : reduce_key_bias<float>(call.plan);
    }
    if (call.plan.outputs.grad_attn_mask && !call.plan.adds_mask_gradient) {
      run_mask_gradient(call.plan, kernels, schedule);
    }
  }
}

void dropout_mask(const AttentionProblem& problem, bool* keep, const Parallel& parallel) {
  const MaskPlan masks(problem, parallel);
  const CallConstants call = make_constants(problem, masks);
  const KernelTable& kernels = kernels_for(problem.query.dtype);
  const std::int64_t length = problem.query_length;
  for_each_item(parallel, problem.batch * problem.heads * length, 0, [&](std::int64_t row, std::byte*) {
    kernels.dropout_row(call, row / length / problem.heads, row / length % problem.heads, row % length,
                        keep + row * problem.key_length);
  });
}

namespace {

/// Row blocks of an additive item: they share the factors of the keys, which cost a few percent of a block's own work.
constexpr std::int64_t kMaxAdditiveBlocks = 4;

std::vector<Costed<AdditiveItem>> additive_items(const AdditiveForwardPlan& plan) {
  const AttentionProblem& problem = *plan.call.problem;
  const std::int64_t blocks = plan.call.blocks_per_head;
  const std::int64_t head_step = plan.outputs.weights_mode == core::WeightsMode::kAveraged ? problem.heads : 1;
  std::vector<Costed<AdditiveItem>> items;
  for (std::int64_t n = 0; n < problem.batch; ++n) {
    for (std::int64_t h = 0; h < problem.heads; h += head_step) {
      for (std::int64_t begin = 0; begin < blocks; begin += plan.blocks_per_item) {
        Costed<AdditiveItem> costed{{n, h, h + head_step, begin, std::min(blocks, begin + plan.blocks_per_item)}};
        for (std::int64_t i = begin; i < costed.item.block_end; ++i) costed.cost += block_cost(plan.call, n, i);
        items.push_back(costed);
      }
    }
  }
  return dearest_first(std::move(items));
}

/// Calls body(n, h, block, scratch) for all blocks of rows.
template <typename Body>
void for_each_block(const CallConstants& call, const Parallel& parallel, std::size_t scratch_bytes, const Body& body) {
  const std::int64_t heads = call.problem->heads;
  const std::int64_t blocks = call.blocks_per_head;
  for_each_item(parallel, call.problem->batch * heads * blocks, scratch_bytes, [&](std::int64_t i, std::byte* memory) {
    body(i / blocks / heads, i / blocks % heads, i % blocks, memory);
  });
}

void run_additive_deltas(const AdditiveBackwardPlan& plan, const KernelTable& kernels, const Parallel& parallel) {
  const CallConstants& call = plan.attention.call;
  BackwardPlan of_output = plan.attention;  // of dO . O, which needs no scores
  of_output.inputs.grad_weights = {};
  for_each_block(call, parallel, kernels.delta_scratch(of_output),
                 [&](auto n, auto h, auto block, std::byte* memory) { kernels.delta(of_output, n, h, block, memory); });
  if (!plan.attention.inputs.grad_weights) return;
  for_each_block(
      call, parallel, kernels.additive_backward_scratch(plan),
      [&](auto n, auto h, auto block, std::byte* memory) { kernels.additive_weight_delta(plan, n, h, block, memory); });
}

/// score_weight's gradient: the parts of all samples and key splits in order, and of all heads where they share it.
template <typename T>
void reduce_score_weight(const AdditiveBackwardPlan& plan, std::int64_t padded, const core::MutableView& to) {
  const AttentionProblem& problem = *plan.attention.call.problem;
  const std::int64_t splits = plan.attention.key_splits;
  const auto* partials = static_cast<const T*>(plan.weight_partials);
  const std::int64_t stored_heads = to.strides[1] == 0 ? 1 : problem.heads;
  std::vector<T> sums(static_cast<std::size_t>(problem.head_dim));
  for (std::int64_t stored = 0; stored < stored_heads; ++stored) {
    std::fill(sums.begin(), sums.end(), T{0});
    for (std::int64_t n = 0; n < problem.batch; ++n) {
      for (std::int64_t h = stored; h < problem.heads; h += stored_heads == 1 ? 1 : problem.heads) {
        for (std::int64_t split = 0; split < splits; ++split) {
          const T* partial = partials + ((n * problem.heads + h) * splits + split) * padded;
          for (std::size_t d = 0; d < sums.size(); ++d) sums[d] += partial[d];
        }
      }
    }
    for (std::size_t d = 0; d < sums.size(); ++d) {
      core::store_element(to.data, to.dtype, to.offset(0, stored, 0, static_cast<std::int64_t>(d)),
                          static_cast<double>(sums[d]));
    }
  }
}

}  // namespace

void additive_attention_forward(const AttentionProblem& problem, const core::View& score_weight,
                                const core::ForwardOutputs& outputs, const Parallel& parallel) {
  if (problem.batch == 0 || problem.heads == 0 || problem.query_length == 0) return;
  const Parallel schedule = schedule_for({&problem, 1}, parallel);
  const MaskPlan masks(problem, schedule);
  AdditiveForwardPlan plan{make_constants(problem, masks), score_weight, outputs};
  if (outputs.weights_mode == core::WeightsMode::kNone) {
    // At least two items a thread where there is that much work.
    const std::int64_t heads = problem.batch * problem.heads;
    const std::int64_t most = plan.call.blocks_per_head * heads / (2 * std::max(schedule.threads, 1));
    plan.blocks_per_item = std::clamp(most, std::int64_t{1}, kMaxAdditiveBlocks);
  }
  const KernelTable& kernels = kernels_for(problem.query.dtype);
  const std::vector<Costed<AdditiveItem>> items = additive_items(plan);
  for_each_item(schedule, static_cast<std::int64_t>(items.size()), kernels.additive_forward_scratch(plan),
                [&](std::int64_t i, std::byte* memory) {
                  kernels.additive_forward(plan, items[static_cast<std::size_t>(i)].item, memory);
                });
}

void additive_attention_backward(const AttentionProblem& problem, const core::View& score_weight,
                                 const core::BackwardInputs& inputs, const core::BackwardOutputs& outputs,
                                 const core::MutableView& grad_score_weight, const Parallel& parallel) {
  const Parallel schedule = schedule_for({&problem, 1}, parallel);
  const MaskPlan masks(problem, schedule);
  const KernelTable& kernels = kernels_for(problem.query.dtype);
  const std::size_t element = accumulator_size(problem.query.dtype);
  AdditiveBackwardPlan plan{{make_constants(problem, masks), inputs, outputs}, score_weight};
  BackwardPlan& attention = plan.attention;
  attention.key_splits = choose_key_splits(problem, samples_per_item(attention));

  const std::int64_t heads = problem.batch * problem.heads;
  const Buffer deltas = allocate(static_cast<std::size_t>(heads * problem.query_length) * element);
  attention.row_deltas = deltas.get();
  run_additive_deltas(plan, kernels, schedule);

  const auto stored_keys = static_cast<std::size_t>(problem.batch * problem.kv_heads * problem.key_length);
  const Buffer key_bias = outputs.grad_key_padding_mask ? allocate_zeroed(stored_keys * element) : nullptr;
  attention.key_bias_partials = key_bias.get();
  const auto padded = static_cast<std::int64_t>(kernels.partial_row_elements(attention));
  Buffer weight_partials;
  if (grad_score_weight) {
    const auto parts = static_cast<std::size_t>(heads * attention.key_splits * padded);
    weight_partials = allocate_zeroed(parts * element);
    plan.weight_partials = weight_partials.get();
  }
  if (outputs.grad_query || outputs.grad_key || outputs.grad_value || outputs.grad_key_padding_mask ||
      grad_score_weight) {
    Buffer partials;
    if (attention.key_splits > 1 && outputs.grad_query) {
      const std::int64_t rows = heads * attention.key_splits * attention.call.blocks_per_head * kBlockRows;
      partials = allocate(static_cast<std::size_t>(rows * padded) * element);
      attention.query_partials = partials.get();
    }
    std::vector<Costed<BackwardItem>> items;
    add_items(attention, 0, items);
    items = dearest_first(std::move(items));
    for_each_item(schedule, static_cast<std::int64_t>(items.size()), kernels.additive_backward_scratch(plan),
                  [&](std::int64_t i, std::byte* memory) {
                    kernels.additive_backward(plan, items[static_cast<std::size_t>(i)].item, memory);
                  });
    if (attention.key_splits > 1 && outputs.grad_query) {
      for_each_block(attention.call, schedule, 0,
                     [&](auto n, auto h, auto block, std::byte*) { kernels.reduce_query(attention, n, h, block); });
    }
  }
  const bool is_double = problem.query.dtype == DType::kFloat64;
  if (outputs.grad_key_padding_mask) {
    is_double ? reduce_key_bias<double>(attention) : reduce_key_bias<float>(attention);
  }
  if (grad_score_weight) {
    is_double ? reduce_score_weight<double>(plan, padded, grad_score_weight)
              : reduce_score_weight<float>(plan, padded, grad_score_weight);
  }
  if (outputs.grad_attn_mask) {
    const std::vector<MaskGradientItem> items = mask_gradient_items(attention);
    for_each_item(schedule, static_cast<std::int64_t>(items.size()), kernels.additive_mask_gradient_scratch(plan),
                  [&](std::int64_t i, std::byte* memory) {
                    kernels.additive_mask_gradient(plan, items[static_cast<std::size_t>(i)], memory);
                  });
  }
}

}  // namespace fused_mha::cpu
