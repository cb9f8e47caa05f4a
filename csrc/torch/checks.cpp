// SPDX-License-Identifier: BSD-3-Clause
#include "torch/checks.h"

#include <ATen/autocast_mode.h>

#include <cmath>
#include <sstream>
#include <vector>

#include "torch/cuda_build.h"

namespace fused_mha::detail {
namespace {

constexpr const char* kIntegerMaskHint =
    ". Hint: an integer mask does not say whether 1 keeps or hides; pass `mask == 0` for a mask in which 1 keeps, "
    "`mask.bool()` for one in which 1 hides";

constexpr const char* kBatchFirstHint =
    ". Hint: batch_first says whether inputs are (N, L, E), batch_first=True, or (L, N, E), batch_first=False";

/// A prefix of every message.
std::string at_argument(const char* op, const char* name) {
  return std::string("fused_mha::") + op + ": " + name + " ";
}

std::string at_operator(const char* op) { return std::string("fused_mha::") + op + ": "; }

/// "float64", as Python calls it.
std::string dtype_text(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

bool is_kernel_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

void check_layout(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), at_argument(op, name), "must be a tensor, got none");
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested(), at_argument(op, name),
              "must be a dense strided tensor, got layout ", tensor.layout(),
              tensor.is_quantized() ? ", quantized" : "", tensor.is_nested() ? ", nested" : "");
}

void check_floating(const char* op, const char* name, const at::Tensor& tensor) {
  check_layout(op, name, tensor);
  TORCH_CHECK_TYPE(is_kernel_dtype(tensor.scalar_type()), at_argument(op, name),
                   "must be float32, float64, bfloat16 or float16, got ", dtype_text(tensor.scalar_type()));
}

void check_mask(const char* op, const char* name, const at::Tensor& mask) {
  check_layout(op, name, mask);
  const auto type = mask.scalar_type();
  TORCH_CHECK_TYPE(type == at::kBool || is_kernel_dtype(type), at_argument(op, name),
                   "must be bool (True hides) or floating (added to the scores), got ", dtype_text(type),
                   at::isIntegralType(type, /*includeBool=*/false) ? kIntegerMaskHint : "");
}

void check_optional_mask(const char* op, const char* name, const OptionalTensor& mask) {
  if (has_tensor(mask)) check_mask(op, name, *mask);
}

/// Meta stands for any device here: fake tensors say so inside of kernels.
void check_device(const char* op, const at::Tensor& query) {
  const auto device = query.device();
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu() || device.is_meta() || (kHasCudaKernels && device.is_cuda()),
                              at_argument(op, "query"), "must be on the CPU", kHasCudaKernels ? " or a GPU" : "",
                              ", got ", device, ". This build has no kernels for ", device.type(),
                              device.is_cuda() ? kNoCudaHint : "");
}

void check_same_device(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK(tensor.device() == query.device(), at_argument(op, name), "must be on the device of query, ",
              query.device(), ", got ", tensor.device());
}

void check_rank(const char* op, const char* name, const at::Tensor& tensor, std::int64_t rank) {
  TORCH_CHECK(tensor.dim() == rank, at_argument(op, name), "must have ", rank, " dimensions, got shape ",
              shape_text(tensor.sym_sizes()));
}

void check_dropout_p(const char* op, double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p <= 1.0, at_argument(op, "dropout_p"), "must be in [0, 1], got ",
                    dropout_p);
}

void check_rng_state(const char* op, const at::Tensor& rng_state) {
  check_layout(op, "rng_state", rng_state);
  TORCH_CHECK_TYPE(rng_state.scalar_type() == at::kLong, at_argument(op, "rng_state"), "must be int64, got ",
                   dtype_text(rng_state.scalar_type()));
  TORCH_CHECK(rng_state.dim() == 1 && sizes_equal(rng_state.sym_size(0), 2), at_argument(op, "rng_state"),
              "must have shape (2), got ", shape_text(rng_state.sym_sizes()));
}

void check_same_dtype(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  TORCH_CHECK(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(), at_operator(op),
              "query, key and value must have the same dtype, got ", dtype_text(query.scalar_type()), ", ",
              dtype_text(key.scalar_type()), " and ", dtype_text(value.scalar_type()));
}

/// Fake tensors may stand for those of a device that has autocast while they say "meta", which has not.
bool autocast_may_convert(at::DeviceType device) {
  return !at::autocast::is_autocast_available(device) || at::autocast::is_autocast_enabled(device);
}

bool same_sizes(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!sizes_equal(a[i], b[i])) return false;
  }
  return true;
}

bool sizes_below(const c10::SymInt& size, std::int64_t limit) {
  return size.sym_le(limit).expect_true(__FILE__, __LINE__);
}

bool broadcasts_to(c10::SymIntArrayRef sizes, c10::SymIntArrayRef target) {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (!sizes_known_equal(sizes[i], 1) && !sizes_equal(sizes[i], target[i])) return false;
  }
  return true;
}

/// The sizes that remain when the dimensions which a query of rank 3 or 2 lacks are left out: H, then N too.
std::vector<c10::SymInt> as_given(c10::SymIntArrayRef sizes, std::int64_t rank) {
  std::vector<c10::SymInt> given;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const bool may_be_inserted = (sizes.size() == 4 && i == 1 && rank < 4) || (i == 0 && rank < 3);
    if (!may_be_inserted || !sizes_known_equal(sizes[i], 1)) given.push_back(sizes[i]);
  }
  return given;
}

/// "key must have shape (N, Hkv, S, D) = (2, 4, 5, 8), got (2, 4, 5, 9)" in the letters and sizes of the given rank.
struct Expectation {
  const char* name;
  std::array<const char*, 3> letters;  // for ranks 4, 3 and 2
  std::vector<c10::SymInt> sizes;
};

void check_sizes(const char* op, const Expectation& expected, const at::Tensor& tensor, std::int64_t rank,
                 const char* hint = "") {
  TORCH_CHECK(same_sizes(tensor.sym_sizes(), expected.sizes), at_argument(op, expected.name), "must have shape ",
              expected.letters[static_cast<std::size_t>(4 - rank)], " = ", shape_text(as_given(expected.sizes, rank)),
              ", got ", shape_text(as_given(tensor.sym_sizes(), rank)), hint);
}

void check_key_padding_mask(const char* op, const AttentionArguments& a, std::int64_t rank) {
  if (!has_tensor(a.key_padding_mask)) return;
  const auto& mask = *a.key_padding_mask;
  const std::vector<c10::SymInt> sizes{a.batch(), a.masked_keys()};
  if (same_sizes(mask.sym_sizes(), sizes)) return;
  const bool is_transposed = same_sizes(mask.sym_sizes(), std::vector<c10::SymInt>{a.masked_keys(), a.batch()});
  check_sizes(
      op, {"key_padding_mask", {"(N, S)", "(N, S)", "(S)"}, sizes}, mask, rank,
      is_transposed ? ". Hint: the mask looks transposed; it is (N, S) whatever the order of the other inputs" : "");
}

void check_attn_mask(const char* op, const AttentionArguments& a, std::int64_t rank,
                     const OptionalTensor& as_given_by_caller) {
  if (!has_tensor(a.attn_mask)) return;
  const std::vector<c10::SymInt> sizes{a.batch(), a.heads(), a.query_length(), a.masked_keys()};
  constexpr std::array<const char*, 3> kLetters{"(N, H, L, S)", "(N, L, S)", "(L, S)"};
  TORCH_CHECK(broadcasts_to(a.attn_mask->sym_sizes(), sizes), at_argument(op, "attn_mask"), "must broadcast to ",
              kLetters[static_cast<std::size_t>(4 - rank)], " = ", shape_text(as_given(sizes, rank)), ", got ",
              shape_text(has_tensor(as_given_by_caller) ? as_given_by_caller->sym_sizes() : a.attn_mask->sym_sizes()));
}

/// One number a head, (H), as callers give it; four-dimensional here.
void check_sink(const char* op, const AttentionArguments& a) {
  if (!has_tensor(a.sink)) return;
  TORCH_CHECK(a.sink->dim() == 4 && broadcasts_to(a.sink->sym_sizes(), {a.batch(), a.heads(), 1, 1}),
              at_argument(op, "sink"), "must have shape (H) = ", shape_text({a.heads()}), ", got ",
              shape_text(a.sink->dim() == 4 ? a.sink->sym_sizes().slice(1, 1) : a.sink->sym_sizes()));
}

void check_head_counts(const char* op, const c10::SymInt& heads, const c10::SymInt& kv_heads) {
  if (sizes_known_equal(heads, kv_heads)) return;
  TORCH_CHECK(!sizes_known_equal(kv_heads, 0) && sizes_equal(heads % kv_heads, 0), at_argument(op, "key"),
              "must have a number of heads Hkv that divides query's H = ", heads, ", got Hkv = ", kv_heads);
}

/// D and Dv, the last dimensions.
void check_widths(const char* op, const at::Tensor& query, const at::Tensor& value, std::int64_t rank = 4) {
  TORCH_CHECK(!sizes_known_equal(query.sym_size(-1), 0), at_argument(op, "query"), "must have D >= 1, got shape ",
              shape_text(as_given(query.sym_sizes(), rank)));
  TORCH_CHECK(!sizes_known_equal(value.sym_size(-1), 0), at_argument(op, "value"), "must have Dv >= 1, got shape ",
              shape_text(as_given(value.sym_sizes(), rank)));
  // Scratch is sized by these widths: their products must stay far from what 64 bits count.
  constexpr std::int64_t kWidest = std::int64_t{1} << 31;
  TORCH_CHECK(sizes_below(query.sym_size(-1), kWidest) && sizes_below(value.sym_size(-1), kWidest),
              at_argument(op, "query"), "and value must have D and Dv of at most ", kWidest, ", got ",
              query.sym_size(-1), " and ", value.sym_size(-1));
}

/// Size (N, L, S) or (N, H, L, S) of weights and their gradient, (N, H, L) of log-sum-exps.
std::vector<c10::SymInt> weights_sizes(const AttentionArguments& a) {
  if (a.weights_mode == kLogSumExp) return {a.batch(), a.heads(), a.query_length()};
  if (a.weights_mode == 1) return {a.batch(), a.query_length(), a.key_length()};
  return {a.batch(), a.heads(), a.query_length(), a.key_length()};
}

/// float64 where query is, else float32: what sums are kept in.
at::ScalarType statistics_type(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_gradient(const char* op, const char* name, const OptionalTensor& gradient, const at::Tensor& query,
                    at::ScalarType type, c10::SymIntArrayRef sizes) {
  if (!has_tensor(gradient)) return;
  check_layout(op, name, *gradient);
  check_same_device(op, name, *gradient, query);
  TORCH_CHECK(gradient->scalar_type() == type, at_argument(op, name), "must be ", dtype_text(type), ", got ",
              dtype_text(gradient->scalar_type()));
  TORCH_CHECK(same_sizes(gradient->sym_sizes(), sizes), at_argument(op, name), "must have shape ", shape_text(sizes),
              ", got ", shape_text(gradient->sym_sizes()));
}

void check_statistics(const char* op, const char* name, const at::Tensor& statistics, const at::Tensor& query,
                      const char* letters, c10::SymIntArrayRef sizes) {
  check_layout(op, name, statistics);
  check_same_device(op, name, statistics, query);
  const auto type = statistics_type(query);
  TORCH_CHECK(statistics.scalar_type() == type, at_argument(op, name), "must be ", dtype_text(type), ", got ",
              dtype_text(statistics.scalar_type()));
  TORCH_CHECK(same_sizes(statistics.sym_sizes(), sizes) && statistics.is_contiguous(), at_argument(op, name),
              "must be contiguous of shape ", letters, " = ", shape_text(sizes), ", got ",
              shape_text(statistics.sym_sizes()));
}

/// Ranks, dtypes, layouts and devices of four-dimensional arguments.
void check_tensors(const char* op, const AttentionArguments& a) {
  check_given(op, a);
  check_rank(op, "query", a.query, 4);
  if (has_tensor(a.key_padding_mask)) check_rank(op, "key_padding_mask", *a.key_padding_mask, 2);
  if (has_tensor(a.attn_mask)) check_rank(op, "attn_mask", *a.attn_mask, 4);
  check_same_dtype(op, a.query, a.key, a.value);
  if (has_tensor(a.rng_state)) {
    check_rng_state(op, *a.rng_state);
    check_same_device(op, "rng_state", *a.rng_state, a.query);
  }
}

void check_multi_head_ranks(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask) {
  const auto rank = query.dim();
  TORCH_CHECK(rank == 2 || rank == 3, at_argument(op, "query"),
              "must be batched, with 3 dimensions, or unbatched, with 2, got shape ", shape_text(query.sym_sizes()));
  check_rank(op, "key", key, rank);
  check_rank(op, "value", value, rank);
  if (has_tensor(key_padding_mask)) check_rank(op, "key_padding_mask", *key_padding_mask, rank - 1);
  if (has_tensor(attn_mask)) {
    TORCH_CHECK(attn_mask->dim() >= 2 && attn_mask->dim() <= 4, at_argument(op, "attn_mask"),
                "must have shape (L, S), (N*H, L, S) or one that broadcasts to (N, H, L, S), got ",
                shape_text(attn_mask->sym_sizes()));
  }
}

/// Key and value agree with query and each other in N, and with each other in S.
void check_multi_head_sizes(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            bool batch_first) {
  const bool batched = query.dim() == 3;
  const std::int64_t batch_dim = batch_first ? 0 : 1;
  const std::int64_t length_dim = batched && batch_first ? 1 : 0;
  const auto* letters = !batched ? "(L, E)" : batch_first ? "(N, L, E)" : "(L, N, E)";
  for (const auto& [name, other] : {std::pair("key", &key), std::pair("value", &value)}) {
    if (!batched) break;
    TORCH_CHECK_VALUE(sizes_equal(query.sym_size(batch_dim), other->sym_size(batch_dim)), at_operator(op), "query and ",
                      name, " must have the same batch size N; as ", letters, ", query ", shape_text(query.sym_sizes()),
                      " has N = ", query.sym_size(batch_dim), " and ", name, " ", shape_text(other->sym_sizes()),
                      " has N = ", other->sym_size(batch_dim), kBatchFirstHint);
  }
  TORCH_CHECK(sizes_equal(key.sym_size(length_dim), value.sym_size(length_dim)), at_operator(op),
              "key and value must have the same length S; key ", shape_text(key.sym_sizes()),
              " has S = ", key.sym_size(length_dim), " and value ", shape_text(value.sym_sizes()),
              " has S = ", value.sym_size(length_dim), batched ? kBatchFirstHint : "");
}

}  // namespace

bool is_bottom_right(const char* op, std::string_view causal_alignment) {
  TORCH_CHECK_VALUE(causal_alignment == "top_left" || causal_alignment == "bottom_right",
                    at_argument(op, "causal_alignment"), "must be 'top_left' or 'bottom_right', got '",
                    causal_alignment, "'");
  return causal_alignment == "bottom_right";
}

OptionalTensor sink_of_heads(const char* op, const OptionalTensor& sink) {
  if (!has_tensor(sink)) return std::nullopt;
  check_floating(op, "sink", *sink);
  TORCH_CHECK(sink->dim() == 1, at_argument(op, "sink"), "must have shape (H), one number a head, got ",
              shape_text(sink->sym_sizes()));
  return sink->unsqueeze(0).unsqueeze(2).unsqueeze(3);
}

std::string shape_text(c10::SymIntArrayRef sizes) {
  std::ostringstream text;
  text << '(';
  for (std::size_t i = 0; i < sizes.size(); ++i) text << (i == 0 ? "" : ", ") << sizes[i];
  text << ')';
  return text.str();
}

void check_given(const char* op, const AttentionArguments& a) {
  check_device(op, a.query);
  check_floating(op, "query", a.query);
  check_floating(op, "key", a.key);
  check_floating(op, "value", a.value);
  check_optional_mask(op, "key_padding_mask", a.key_padding_mask);
  check_optional_mask(op, "attn_mask", a.attn_mask);
  if (has_tensor(a.sink)) check_floating(op, "sink", *a.sink);
  check_dropout_p(op, a.dropout_p);
  const auto rank = a.query.dim();
  TORCH_CHECK(rank >= 2 && rank <= 4, at_argument(op, "query"),
              "must have shape (N, H, L, D), (N, L, D) or (L, D), got ", shape_text(a.query.sym_sizes()));
  check_rank(op, "key", a.key, rank);
  check_rank(op, "value", a.value, rank);
  check_same_device(op, "key", a.key, a.query);
  check_same_device(op, "value", a.value, a.query);
  if (has_tensor(a.key_padding_mask)) check_same_device(op, "key_padding_mask", *a.key_padding_mask, a.query);
  if (has_tensor(a.attn_mask)) check_same_device(op, "attn_mask", *a.attn_mask, a.query);
  if (has_tensor(a.sink)) check_same_device(op, "sink", *a.sink, a.query);
  if (!autocast_may_convert(a.query.device().type())) check_same_dtype(op, a.query, a.key, a.value);
}

void check_shapes(const char* op, const AttentionArguments& a, std::int64_t rank,
                  const OptionalTensor& given_attn_mask) {
  check_sizes(op,
              {"key",
               {"(N, Hkv, S, D)", "(N, S, D)", "(S, D)"},
               {a.batch(), a.kv_heads(), a.key_length(), a.query.sym_size(3)}},
              a.key, rank);
  check_sizes(op,
              {"value",
               {"(N, Hkv, S, Dv)", "(N, S, Dv)", "(S, Dv)"},
               {a.batch(), a.kv_heads(), a.key_length(), a.value.sym_size(3)}},
              a.value, rank);
  check_head_counts(op, a.heads(), a.kv_heads());
  check_widths(op, a.query, a.value, rank);
  check_key_padding_mask(op, a, rank);
  check_attn_mask(op, a, rank, given_attn_mask);
  check_sink(op, a);
}

void check_forward(const char* op, const AttentionArguments& a) {
  check_tensors(op, a);
  TORCH_CHECK_VALUE(a.always_visible_keys.sym_ge(0).expect_true(__FILE__, __LINE__) &&
                        a.always_visible_keys.sym_le(a.key_length()).expect_true(__FILE__, __LINE__),
                    at_argument(op, "always_visible_keys"), "must be in [0, S] = [0, ", a.key_length(), "], got ",
                    a.always_visible_keys);
  TORCH_CHECK_VALUE(a.weights_mode >= 0 && a.weights_mode <= kLogSumExp, at_argument(op, "weights_mode"),
                    "must be 0 (none), 1 (averaged), 2 (per head) or 3 (log-sum-exps), got ", a.weights_mode);
  TORCH_CHECK(a.dropout_p == 0.0 || has_tensor(a.rng_state), at_argument(op, "rng_state"),
              "must be given where dropout_p is not 0");
  check_shapes(op, a, 4);
}

void check_backward(const char* op, const AttentionArguments& a, const BackwardArguments& b,
                    const GradientMask& wanted) {
  check_forward(op, a);
  const std::vector<c10::SymInt> output_sizes{a.batch(), a.heads(), a.query_length(), a.value.sym_size(3)};
  const auto type = a.query.scalar_type();
  check_gradient(op, "grad_output", b.grad_output, a.query, type, output_sizes);
  check_gradient(op, "output", b.output, a.query, type, output_sizes);
  if (has_tensor(b.grad_weights)) {
    TORCH_CHECK_VALUE(a.weights_mode != 0, at_argument(op, "grad_weights"), "needs weights_mode 1, 2 or 3, got 0");
    check_gradient(op, "grad_weights", b.grad_weights, a.query,
                   a.weights_mode == kLogSumExp ? statistics_type(a.query) : type, weights_sizes(a));
  }
  const std::vector<c10::SymInt> rows{a.batch(), a.heads(), a.query_length()};
  check_statistics(op, "row_max", b.row_max, a.query, "(N, H, L)", rows);
  check_statistics(op, "row_sum", b.row_sum, a.query, "(N, H, L)", rows);
  for (const auto& [name, is_wanted, mask] :
       {std::tuple("key_padding_mask", wanted[3], &a.key_padding_mask),
        std::tuple("attn_mask", wanted[4], &a.attn_mask), std::tuple("sink", wanted[5], &a.sink)}) {
    TORCH_CHECK(!is_wanted || (has_tensor(*mask) && (*mask)->is_floating_point()), at_argument(op, name),
                "must be a floating tensor where its gradient is wanted");
  }
}

void check_not_cuda(const char* op, const at::Tensor& query) {
  TORCH_CHECK_NOT_IMPLEMENTED(!query.is_cuda(), at_argument(op, "query"), "must be on the CPU, got ", query.device(),
                              ". This operator has no CUDA kernel");
}

void check_score_weight(const char* op, const AttentionArguments& a, const at::Tensor& score_weight) {
  check_floating(op, "score_weight", score_weight);
  check_same_device(op, "score_weight", score_weight, a.query);
  TORCH_CHECK(autocast_may_convert(a.query.device().type()) || score_weight.scalar_type() == a.query.scalar_type(),
              at_argument(op, "score_weight"), "must have the dtype of query, ", dtype_text(a.query.scalar_type()),
              ", got ", dtype_text(score_weight.scalar_type()));
  const std::vector<c10::SymInt> per_head{a.heads(), a.query.sym_size(3)};
  const auto sizes = c10::SymIntArrayRef(per_head).slice(score_weight.dim() == 1 ? 1 : 0);
  TORCH_CHECK(same_sizes(score_weight.sym_sizes(), sizes), at_argument(op, "score_weight"),
              "must have shape (D) or (H, D) = ", shape_text(per_head), ", got ", shape_text(score_weight.sym_sizes()),
              ". Hint: query and key hold features of width D, such as a Linear layer makes of them");
}

void check_additive_forward(const char* op, const AttentionArguments& a, const at::Tensor& score_weight) {
  check_forward(op, a);
  check_score_weight(op, a, score_weight);
  TORCH_CHECK(score_weight.scalar_type() == a.query.scalar_type(), at_argument(op, "score_weight"),
              "must have the dtype of query, ", dtype_text(a.query.scalar_type()), ", got ",
              dtype_text(score_weight.scalar_type()));
}

void check_additive_backward(const char* op, const AttentionArguments& a, const at::Tensor& score_weight,
                             const BackwardArguments& b, const AdditiveGradientMask& wanted) {
  check_additive_forward(op, a, score_weight);
  check_backward(op, a, b, without_score_weight(wanted));
}

void check_varlen(const char* op, const VarlenArguments& a) {
  check_device(op, a.query);
  for (const auto& [name, tensor] :
       {std::pair("query", &a.query), std::pair("key", &a.key), std::pair("value", &a.value)}) {
    check_floating(op, name, *tensor);
    check_same_device(op, name, *tensor, a.query);
  }
  const auto heads = a.query.dim() == 3 ? a.query.sym_size(1) : c10::SymInt(0);
  TORCH_CHECK(a.query.dim() == 3, at_argument(op, "query"), "must have shape (total_q, H, D), got ",
              shape_text(a.query.sym_sizes()));
  TORCH_CHECK(a.key.dim() == 3 && sizes_equal(a.key.sym_size(2), a.query.sym_size(2)), at_argument(op, "key"),
              "must have shape (total_k, Hkv, D) with D = ", a.query.sym_size(2), ", got ",
              shape_text(a.key.sym_sizes()));
  TORCH_CHECK(a.value.dim() == 3 && sizes_equal(a.value.sym_size(0), a.key.sym_size(0)) &&
                  sizes_equal(a.value.sym_size(1), a.key.sym_size(1)),
              at_argument(op, "value"), "must have shape (total_k, Hkv, Dv) with total_k = ", a.key.sym_size(0),
              " and Hkv = ", a.key.sym_size(1), ", got ", shape_text(a.value.sym_sizes()));
  check_head_counts(op, heads, a.key.sym_size(1));
  check_widths(op, a.query, a.value);
  if (!autocast_may_convert(a.query.device().type())) check_same_dtype(op, a.query, a.key, a.value);
  for (const auto& [name, starts] :
       {std::pair("cu_seqlens_q", &a.cu_seqlens_q), std::pair("cu_seqlens_k", &a.cu_seqlens_k)}) {
    check_layout(op, name, *starts);
    check_same_device(op, name, *starts, a.query);
    const auto type = starts->scalar_type();
    TORCH_CHECK_TYPE(type == at::kInt || type == at::kLong, at_argument(op, name), "must be int32 or int64, got ",
                     dtype_text(type));
    TORCH_CHECK(starts->dim() == 1 && !sizes_known_equal(starts->sym_size(0), 0), at_argument(op, name),
                "must have shape (N + 1), the starts of N sequences and the total, got ",
                shape_text(starts->sym_sizes()));
  }
  TORCH_CHECK_VALUE(sizes_equal(a.cu_seqlens_q.sym_size(0), a.cu_seqlens_k.sym_size(0)), at_operator(op),
                    "cu_seqlens_q and cu_seqlens_k must be of the same N sequences, got shapes ",
                    shape_text(a.cu_seqlens_q.sym_sizes()), " and ", shape_text(a.cu_seqlens_k.sym_sizes()));
  check_dropout_p(op, a.dropout_p);
  if (has_tensor(a.rng_state)) {
    check_rng_state(op, *a.rng_state);
    check_same_device(op, "rng_state", *a.rng_state, a.query);
  }
  if (has_tensor(a.sink)) {
    check_floating(op, "sink", *a.sink);
    check_same_device(op, "sink", *a.sink, a.query);
    TORCH_CHECK(a.sink->dim() == 1 && sizes_equal(a.sink->sym_size(0), heads), at_argument(op, "sink"),
                "must have shape (H) = ", shape_text({heads}), ", got ", shape_text(a.sink->sym_sizes()));
  }
}

void check_varlen_forward(const char* op, const VarlenArguments& a) {
  check_varlen(op, a);
  check_same_dtype(op, a.query, a.key, a.value);
  TORCH_CHECK(a.dropout_p == 0.0 || has_tensor(a.rng_state), at_argument(op, "rng_state"),
              "must be given where dropout_p is not 0");
}

void check_varlen_backward(const char* op, const VarlenArguments& a, const VarlenBackwardArguments& b,
                           const VarlenGradientMask& wanted) {
  check_varlen_forward(op, a);
  const std::vector<c10::SymInt> output_sizes{a.query.sym_size(0), a.query.sym_size(1), a.value.sym_size(2)};
  check_gradient(op, "grad_output", b.grad_output, a.query, a.query.scalar_type(), output_sizes);
  check_gradient(op, "output", b.output, a.query, a.query.scalar_type(), output_sizes);
  const std::vector<c10::SymInt> rows{a.query.sym_size(0) * a.query.sym_size(1)};
  check_statistics(op, "row_max", b.row_max, a.query, "(total_q*H)", rows);
  check_statistics(op, "row_sum", b.row_sum, a.query, "(total_q*H)", rows);
  TORCH_CHECK(!wanted[3] || has_tensor(a.sink), at_argument(op, "sink"), "must be given where its gradient is wanted");
}

void check_dropout_mask(const char* op, const at::Tensor& rng_state, c10::SymIntArrayRef sizes, double dropout_p) {
  check_rng_state(op, rng_state);
  check_dropout_p(op, dropout_p);
  for (const auto& size : sizes) {
    TORCH_CHECK_VALUE(size.sym_ge(0).expect_true(__FILE__, __LINE__), at_operator(op),
                      "N, H, L and S must not be negative, got ", shape_text(sizes));
  }
}

void check_multi_head(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const OptionalTensor& key_padding_mask, const OptionalTensor& attn_mask, std::int64_t num_heads,
                      double dropout_p, bool batch_first) {
  check_device(op, query);
  for (const auto& [name, tensor] : {std::pair("query", &query), std::pair("key", &key), std::pair("value", &value)}) {
    check_floating(op, name, *tensor);
    check_same_device(op, name, *tensor, query);
  }
  check_optional_mask(op, "key_padding_mask", key_padding_mask);
  check_optional_mask(op, "attn_mask", attn_mask);
  TORCH_CHECK_VALUE(num_heads > 0, at_argument(op, "num_heads"), "must be positive, got ", num_heads);
  check_dropout_p(op, dropout_p);
  check_multi_head_ranks(op, query, key, value, key_padding_mask, attn_mask);
  check_multi_head_sizes(op, query, key, value, batch_first);
}

}  // namespace fused_mha::detail
