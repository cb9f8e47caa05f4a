// SPDX-License-Identifier: BSD-3-Clause
#include "core/mask.h"

#include <algorithm>
#include <atomic>

namespace fused_mha::core {
namespace {

constexpr double kHiddenValue = -std::numeric_limits<double>::infinity();

/// Length of a mask's dimension as stored: 1 where it broadcasts, so that shared tiles are classified once.
std::int64_t stored_size(const View& mask, std::size_t dim, std::int64_t size) {
  return mask.strides[dim] == 0 ? std::min<std::int64_t>(size, 1) : size;
}

/// Calls body(task) for every task in [0, tasks), spread over the workers.
template <typename Body>
void for_each_task(const Parallel& parallel, std::int64_t tasks, const Body& body) {
  std::atomic<std::int64_t> next{0};
  const auto workers = static_cast<int>(std::clamp<std::int64_t>(tasks, 1, std::max(parallel.threads, 1)));
  parallel.run(workers, [&](int) {
    for (std::int64_t task = next++; task < tasks; task = next++) body(task);
  });
}

struct Seen {
  bool hidden = false;  // some element is hidden
  bool free = false;    // some element is visible with nothing added
  bool biased = false;  // some element adds a number, or is NaN

  bool is_mixed() const { return biased || (hidden && free); }
  TileClass tile_class() const {
    if (is_mixed()) return TileClass::kMixed;
    return hidden ? TileClass::kHidden : TileClass::kFree;
  }
};

void look_at_bytes(const std::uint8_t* bytes, std::int64_t count, Seen& seen) {
  int hidden = 0;
  for (std::int64_t i = 0; i < count; ++i) hidden += bytes[i] != 0 ? 1 : 0;
  seen.hidden = seen.hidden || hidden > 0;
  seen.free = seen.free || hidden < count;
}

void look_at_row(const View& mask, std::int64_t offset, std::int64_t count, Seen& seen) {
  const std::int64_t stride = mask.strides[3];
  if (mask.dtype == DType::kBool && stride == 1) {
    look_at_bytes(static_cast<const std::uint8_t*>(mask.data) + offset, count, seen);
    return;
  }
  for (std::int64_t i = 0; i < count && !seen.is_mixed(); ++i) {
    const double value = mask_element(mask, offset + i * stride);
    seen.hidden = seen.hidden || value == kHiddenValue;
    seen.free = seen.free || value == 0.0;
    seen.biased = seen.biased || (value != kHiddenValue && value != 0.0);
  }
}

}  // namespace

double mask_sum(const AttentionProblem& problem, std::int64_t n, std::int64_t h, std::int64_t l, std::int64_t s) {
  if (s >= problem.masked_keys()) return 0.0;
  if (problem.is_causal && s > l + problem.causal_offset) return kHiddenValue;
  double sum = 0.0;
  for (const View* mask : {&problem.key_padding_mask, &problem.attn_mask}) {
    if (!*mask) continue;
    const double value = mask_element(*mask, mask->offset(n, h, l, s));
    if (value == kHiddenValue) return kHiddenValue;
    sum += value;
  }
  return sum == kHiddenValue ? std::numeric_limits<double>::lowest() : sum;
}

MaskPlan::MaskPlan(const AttentionProblem& problem, const Parallel& parallel)
    : masked_keys_(problem.masked_keys()), causal_offset_(problem.causal_offset), is_causal_(problem.is_causal) {
  find_kept_keys(problem, parallel);
  classify_attn_mask(problem, parallel);
}

void MaskPlan::find_kept_keys(const AttentionProblem& problem, const Parallel& parallel) {
  const View& mask = problem.key_padding_mask;
  padding_is_shared_ = !mask || mask.strides[0] == 0;
  const std::int64_t rows = padding_is_shared_ ? 1 : problem.batch;
  kept_.assign(static_cast<std::size_t>(std::max<std::int64_t>(rows, 1)), KeySpan{nullptr, 0, problem.key_length});
  kept_data_ = kept_.data();
  if (!mask || problem.batch == 0) return;

  positions_.resize(static_cast<std::size_t>(rows));
  std::atomic<bool> has_bias{false};
  for_each_task(parallel, rows, [&](std::int64_t n) {
    std::vector<std::int64_t>& positions = positions_[static_cast<std::size_t>(n)];
    positions.reserve(static_cast<std::size_t>(problem.key_length));
    bool bias = false;
    for (std::int64_t s = 0; s < problem.key_length; ++s) {
      const double value = s < masked_keys_ ? mask_element(mask, mask.offset(n, 0, 0, s)) : 0.0;
      bias = bias || (value != 0.0 && value != kHiddenValue);
      if (value != kHiddenValue) positions.push_back(s);
    }
    if (bias) has_bias = true;
    const auto count = static_cast<std::int64_t>(positions.size());
    const std::int64_t first = count == 0 ? 0 : positions.front();
    const bool contiguous = count == 0 || positions.back() - first + 1 == count;
    kept_[static_cast<std::size_t>(n)] = {contiguous ? nullptr : positions.data(), first, count};
  });
  has_padding_bias_ = has_bias;
}

void MaskPlan::classify_attn_mask(const AttentionProblem& problem, const Parallel& parallel) {
  const View& mask = problem.attn_mask;
  if (!mask || masked_keys_ == 0) return;
  mask_batch_ = stored_size(mask, 0, problem.batch);
  mask_heads_ = stored_size(mask, 1, problem.heads);
  mask_rows_ = stored_size(mask, 2, problem.query_length);
  row_tiles_ = (mask_rows_ + kMaskTileRows - 1) / kMaskTileRows;
  key_tiles_ = (masked_keys_ + kMaskTileKeys - 1) / kMaskTileKeys;
  const std::int64_t stripes = mask_batch_ * mask_heads_ * row_tiles_;
  classes_.resize(static_cast<std::size_t>(stripes * key_tiles_));
  for_each_task(parallel, stripes, [&](std::int64_t stripe) {
    const std::int64_t row_tile = stripe % row_tiles_;
    const std::int64_t h = stripe / row_tiles_ % mask_heads_;
    const std::int64_t n = stripe / row_tiles_ / mask_heads_;
    const std::int64_t row_end = std::min(mask_rows_, (row_tile + 1) * kMaskTileRows);
    for (std::int64_t tile = 0; tile < key_tiles_; ++tile) {
      const std::int64_t key = tile * kMaskTileKeys;
      const std::int64_t count = std::min(kMaskTileKeys, masked_keys_ - key);
      Seen seen;
      for (std::int64_t l = row_tile * kMaskTileRows; l < row_end && !seen.is_mixed(); ++l) {
        look_at_row(mask, mask.offset(n, h, l, key), count, seen);
      }
      classes_[static_cast<std::size_t>(stripe * key_tiles_ + tile)] = seen.tile_class();
    }
  });
  attn_classes_ = classes_.data();
}

}  // namespace fused_mha::core
