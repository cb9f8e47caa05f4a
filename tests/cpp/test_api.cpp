// SPDX-License-Identifier: BSD-3-Clause
//
// The C++ functions: values against the formula in float64, options, gradients, errors.
#include <fused_mha/fused_mha.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "catch.h"

namespace {

using fused_mha::AttentionOptions;
using torch::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor random_tensor(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); }

/// Weights (N, H, L, S) from the formula; `hidden` is bool and broadcasts to that.
Tensor expected_weights(const Tensor& query, const Tensor& key, const Tensor& hidden, const Tensor& bias = {}) {
  const auto heads_per_key_head = query.size(1) / key.size(1);
  auto scores = query.matmul(key.repeat_interleave(heads_per_key_head, 1).transpose(-1, -2));
  scores = scores / std::sqrt(static_cast<double>(query.size(-1)));
  if (bias.defined()) scores = scores + bias;
  return scores.masked_fill(hidden, -kInfinity).softmax(-1).masked_fill(hidden, 0.0);
}

Tensor expected_output(const Tensor& weights, const Tensor& value) {
  return weights.matmul(value.repeat_interleave(weights.size(1) / value.size(1), 1));
}

bool all_close(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && torch::allclose(a, b, /*rtol=*/1e-9, /*atol=*/1e-11);
}

}  // namespace

TEST_CASE("attention without options is softmax(q k / sqrt(D)) v") {
  torch::manual_seed(0);
  const auto query = random_tensor({2, 4, 5, 8});
  const auto key = random_tensor({2, 2, 7, 8});
  const auto value = random_tensor({2, 2, 7, 3});
  const auto nothing = torch::zeros({1}, torch::kBool);
  CHECK(all_close(fused_mha::attention(query, key, value),
                  expected_output(expected_weights(query, key, nothing), value)));
}

TEST_CASE("masks and causality hide together, and a float mask is added") {
  torch::manual_seed(1);
  const auto query = random_tensor({2, 2, 5, 8});
  const auto key = random_tensor({2, 2, 5, 8});
  const auto value = random_tensor({2, 2, 5, 8});
  const auto padding = torch::tensor({{false, false, true, false, false}, {true, true, false, false, true}});
  const auto bias = random_tensor({1, 2, 5, 5});
  const auto causal = torch::ones({5, 5}, torch::kBool).triu(1);
  const auto weights = expected_weights(query, key, padding.unsqueeze(1).unsqueeze(1).logical_or(causal), bias);

  const auto options = AttentionOptions().key_padding_mask(padding).attn_mask(bias).is_causal(true);
  const auto [output, averaged] = fused_mha::attention_with_weights(query, key, value, options);
  CHECK(all_close(output, expected_output(weights, value)));
  CHECK(all_close(averaged, weights.mean(1)));
  auto per_head_options = options;
  per_head_options.average_attn_weights(false);
  CHECK(all_close(std::get<1>(fused_mha::attention_with_weights(query, key, value, per_head_options)), weights));
  CHECK(torch::equal(fused_mha::attention(query, key, value, options), output));
}

TEST_CASE("additive attention is the softmax of v tanh(q + k)") {
  torch::manual_seed(2);
  const auto query = random_tensor({2, 2, 5, 8}).requires_grad_();
  const auto key = random_tensor({2, 2, 6, 8}).requires_grad_();
  const auto value = random_tensor({2, 2, 6, 3}).requires_grad_();
  const auto score_weight = random_tensor({2, 8}).requires_grad_();
  const auto padding =
      torch::tensor({{false, false, true, false, false, false}, {true, true, false, false, true, true}});
  const auto bias = random_tensor({5, 6}).requires_grad_();
  const auto sums = query.unsqueeze(3) + key.unsqueeze(2);
  const auto scores = (torch::tanh(sums) * score_weight.unsqueeze(1).unsqueeze(1)).sum(-1) + bias;
  const auto weights = scores.masked_fill(padding.unsqueeze(1).unsqueeze(1), -kInfinity).softmax(-1);
  const auto expected = weights.matmul(value);

  auto options = fused_mha::AdditiveAttentionOptions().key_padding_mask(padding).attn_mask(bias);
  const auto output = fused_mha::additive_attention(query, key, value, score_weight, options);
  CHECK(all_close(output, expected));
  const auto [same, averaged] = fused_mha::additive_attention_with_weights(query, key, value, score_weight, options);
  CHECK(torch::equal(same, output));
  CHECK(all_close(averaged, weights.mean(1)));
  options.average_attn_weights(false);
  CHECK(all_close(std::get<1>(fused_mha::additive_attention_with_weights(query, key, value, score_weight, options)),
                  weights));

  const std::vector<Tensor> leaves{query, key, value, score_weight, bias};
  const auto found = torch::autograd::grad({output.square().sum()}, leaves);
  const auto wanted = torch::autograd::grad({expected.square().sum()}, leaves);
  for (std::size_t i = 0; i < leaves.size(); ++i) CHECK(all_close(found[i], wanted[i]));
  CHECK_THROWS_WITH(fused_mha::additive_attention(query, key, value, score_weight.select(0, 0).slice(0, 0, 7)),
                    contains("score_weight must have shape (D) or (H, D) = (2, 8), got (7)"));
}

TEST_CASE("a query that sees no key gives zero output, weights and gradient") {
  torch::manual_seed(2);
  auto query = random_tensor({1, 1, 3, 4}).requires_grad_();
  auto key = random_tensor({1, 1, 4, 4}).requires_grad_();
  const auto options = AttentionOptions().key_padding_mask(torch::ones({1, 4}, torch::kBool));
  const auto [output, weights] = fused_mha::attention_with_weights(query, key, key, options);
  CHECK(torch::equal(output, torch::zeros_like(output)));
  CHECK(torch::equal(weights, torch::zeros_like(weights)));
  (output.sum() + weights.sum()).backward();
  CHECK(torch::equal(query.grad(), torch::zeros_like(query)));
  CHECK(torch::equal(key.grad(), torch::zeros_like(key)));
}

TEST_CASE("inputs without head or sample dimension") {
  torch::manual_seed(3);
  const auto query = random_tensor({2, 3, 4});
  const auto key = random_tensor({2, 5, 4});
  const auto expected = fused_mha::attention(query.unsqueeze(1), key.unsqueeze(1), key.unsqueeze(1)).squeeze(1);
  CHECK(torch::equal(fused_mha::attention(query, key, key), expected));
  CHECK(torch::equal(fused_mha::attention(query[0], key[0], key[0]), expected[0]));
  const auto weights = std::get<1>(fused_mha::attention_with_weights(query[0], key[0], key[0]));
  CHECK(weights.sizes() == at::IntArrayRef({3, 5}));
}

TEST_CASE("scale replaces 1 / sqrt(D)") {
  torch::manual_seed(4);
  const auto query = random_tensor({1, 2, 3, 4});
  const auto value = random_tensor({1, 2, 3, 4});
  const auto scaled = fused_mha::attention(query, query, value, AttentionOptions().scale(0.0));
  CHECK(all_close(scaled, value.mean(2, true).expand_as(value)));
}

TEST_CASE("output keeps the query's memory order and strided views are read as they are") {
  torch::manual_seed(5);
  const auto packed = random_tensor({2, 6, 3 * 4 * 8});
  const auto parts = packed.chunk(3, -1);
  const auto heads = [](const Tensor& part) { return part.unflatten(-1, {4, 8}).transpose(1, 2); };
  const auto output = fused_mha::attention(heads(parts[0]), heads(parts[1]), heads(parts[2]));
  CHECK(output.transpose(1, 2).is_contiguous());
  CHECK(torch::equal(output, fused_mha::attention(heads(parts[0]).contiguous(), heads(parts[1]).contiguous(),
                                                  heads(parts[2]).contiguous())));
}

TEST_CASE("gradients of inputs and of a float mask in its own shape") {
  torch::manual_seed(6);
  auto query = random_tensor({2, 2, 3, 4}).requires_grad_();
  auto key = random_tensor({2, 1, 5, 4}).requires_grad_();
  auto value = random_tensor({2, 1, 5, 6}).requires_grad_();
  auto bias = random_tensor({1, 2, 1, 5}).requires_grad_();
  const auto output = fused_mha::attention(query, key, value, AttentionOptions().attn_mask(bias));
  const auto weights = expected_weights(query, key, torch::zeros({1}, torch::kBool), bias);
  const auto cotangent = torch::randn_like(output);
  const auto inputs = torch::autograd::variable_list{query, key, value, bias};
  const auto gradients = torch::autograd::grad({output}, inputs, {cotangent});
  const auto expected = torch::autograd::grad({expected_output(weights, value)}, inputs, {cotangent});
  for (std::size_t i = 0; i < inputs.size(); ++i) CHECK(all_close(gradients[i], expected[i]));
}

TEST_CASE("second derivatives from C++") {
  torch::manual_seed(7);
  auto query = random_tensor({1, 2, 3, 4}).requires_grad_();
  const auto second = [&](const Tensor& output) {
    const auto first = torch::autograd::grad({output.pow(2).sum()}, {query}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {query})[0];
  };
  const auto nothing = torch::zeros({1}, torch::kBool);
  const auto expected = expected_output(expected_weights(query, query, nothing), query);
  CHECK(all_close(second(fused_mha::attention(query, query, query)), second(expected)));
}

TEST_CASE("forward mode from C++, alone and over reverse mode") {
  torch::manual_seed(8);
  const auto options = AttentionOptions().key_padding_mask(torch::tensor({{false, false, false, true}}));
  const auto sizes = std::vector<std::int64_t>{1, 2, 4, 3};
  const auto input = random_tensor(sizes).requires_grad_();
  const auto direction = random_tensor(sizes);
  const auto values_and_gradient = [&](const Tensor& at) {
    const auto output = fused_mha::attention(at, at, at, options);
    return std::pair{output, torch::autograd::grad({output.square().sum()}, {at}, {}, true, true)[0]};
  };
  const auto level = torch::autograd::forward_ad::enter_dual_level();
  const auto dual = at::_make_dual(input, direction, static_cast<std::int64_t>(level));
  const auto [output, gradient] = values_and_gradient(dual);
  const auto output_change = std::get<1>(at::_unpack_dual(output, static_cast<std::int64_t>(level))).detach();
  const auto gradient_change = std::get<1>(at::_unpack_dual(gradient, static_cast<std::int64_t>(level))).detach();
  torch::autograd::forward_ad::exit_dual_level(level);

  constexpr double kStep = 1e-6;
  const auto [output_after, gradient_after] =
      values_and_gradient((input + kStep * direction).detach().requires_grad_());
  const auto [output_before, gradient_before] =
      values_and_gradient((input - kStep * direction).detach().requires_grad_());
  CHECK(torch::allclose(output_change, (output_after - output_before) / (2 * kStep), 1e-6, 1e-8));
  CHECK(torch::allclose(gradient_change, (gradient_after - gradient_before) / (2 * kStep), 1e-6, 1e-7));
}

TEST_CASE("second order, forward mode and forward over reverse of every function from C++") {
  torch::manual_seed(9);
  const auto value = random_tensor({1, 2, 4, 3});
  const auto sink = random_tensor({2});
  const auto score_weight = random_tensor({2, 3});
  const auto starts = torch::tensor({0, 3, 3, 8});
  const auto options = AttentionOptions().is_causal(true).sink(sink).dropout_p(0.25);
  const auto averaged = AttentionOptions(options).weights_before_dropout(true);
  const auto additive = fused_mha::AdditiveAttentionOptions().is_causal(true).dropout_p(0.25);
  // Of one tensor (1, 2, 4, 3), in several places.
  const std::vector<std::pair<const char*, std::function<Tensor(const Tensor&)>>> functions{
      {"attention", [&](const Tensor& x) { return fused_mha::attention(x, x, value, options).square().sum(); }},
      {"attention_with_weights",
       [&](const Tensor& x) {
         const auto [output, weights] = fused_mha::attention_with_weights(x, value, x, averaged);
         return output.square().sum() + weights.square().sum();
       }},
      {"attention_with_lse",
       [&](const Tensor& x) {
         const auto [output, lse] = fused_mha::attention_with_lse(x, x, x, options);
         return output.square().sum() + lse.sin().sum();
       }},
      {"attention_varlen",
       [&](const Tensor& x) {
         const auto rows = x.reshape({8, 1, 3});
         const auto packed = AttentionOptions(options).sink(sink.slice(0, 0, 1));
         return fused_mha::attention_varlen(rows, rows, rows, starts, starts, packed).square().sum();
       }},
      {"additive_attention",
       [&](const Tensor& x) {
         return fused_mha::additive_attention(x, x, value, score_weight, additive).square().sum();
       }},
      {"additive_attention_with_weights",
       [&](const Tensor& x) {
         const auto row = x.select(2, 0).squeeze(0);  // (H, D): the gradient of score_weight
         const auto [output, weights] = fused_mha::additive_attention_with_weights(x, value, x, row, additive);
         return output.square().sum() + weights.square().sum();
       }},
  };
  const auto input = random_tensor({1, 2, 4, 3});
  const auto direction = random_tensor({1, 2, 4, 3});
  for (const auto& [name, function] : functions) {
    INFO(name);
    const auto value_and_gradient = [&, &call = function](const Tensor& at) {
      torch::manual_seed(3);
      const auto result = call(at);
      return std::pair{result, torch::autograd::grad({result}, {at}, {}, true, /*create_graph=*/true)[0]};
    };
    constexpr double kStep = 1e-6;
    const auto after = value_and_gradient((input + kStep * direction).requires_grad_());
    const auto before = value_and_gradient((input - kStep * direction).requires_grad_());
    const auto expected_change = (after.first - before.first).detach() / (2 * kStep);
    const auto expected = (after.second - before.second).detach() / (2 * kStep);
    CHECK(expected.abs().max().item<double>() > 0.01);

    const auto leaf = input.clone().requires_grad_();
    const auto gradient = value_and_gradient(leaf).second;
    const auto product = torch::autograd::grad({(gradient * direction).sum()}, {leaf})[0];
    CHECK(torch::allclose(product, expected, 1e-5, 1e-6));

    const auto level = torch::autograd::forward_ad::enter_dual_level();
    const auto dual = at::_make_dual(leaf, direction, static_cast<std::int64_t>(level));
    const auto [output, dual_gradient] = value_and_gradient(dual);
    const auto change = std::get<1>(at::_unpack_dual(output, static_cast<std::int64_t>(level))).detach();
    const auto over_reverse = std::get<1>(at::_unpack_dual(dual_gradient, static_cast<std::int64_t>(level))).detach();
    torch::autograd::forward_ad::exit_dual_level(level);
    CHECK(torch::allclose(change, expected_change, 1e-5, 1e-6));
    CHECK(torch::allclose(over_reverse, expected, 1e-5, 1e-6));
  }
}

TEST_CASE("manual_seed makes dropout reproducible") {
  const auto query = random_tensor({1, 2, 16, 4});
  const auto options = AttentionOptions().dropout_p(0.5);
  torch::manual_seed(8);
  const auto first = fused_mha::attention(query, query, query, options);
  const auto other = fused_mha::attention(query, query, query, options);
  torch::manual_seed(8);
  CHECK(torch::equal(fused_mha::attention(query, query, query, options), first));
  CHECK_FALSE(torch::equal(other, first));
  const auto nothing = fused_mha::attention(query, query, query, AttentionOptions().dropout_p(1.0));
  CHECK(torch::equal(nothing, torch::zeros_like(query)));
}

TEST_CASE("causality from the bottom right, a sink, log-sum-exps") {
  torch::manual_seed(7);
  const auto query = random_tensor({2, 4, 3, 8});
  const auto key = random_tensor({2, 2, 5, 8});
  const auto value = random_tensor({2, 2, 5, 6});
  const auto sink = random_tensor({4}).requires_grad_();
  const auto hidden = torch::ones({3, 5}, torch::kBool).triu(3);
  auto scores = query.matmul(key.repeat_interleave(2, 1).transpose(-1, -2)) / std::sqrt(8.0);
  scores = torch::cat({scores.masked_fill(hidden, -kInfinity), sink.view({1, 4, 1, 1}).expand({2, 4, 3, 1})}, -1);
  const auto weights = scores.softmax(-1).narrow(-1, 0, 5);

  const auto options = AttentionOptions().is_causal(true).causal_alignment("bottom_right").sink(sink);
  const auto [output, lse] = fused_mha::attention_with_lse(query, key, value, options);
  CHECK(all_close(output, expected_output(weights, value)));
  CHECK(all_close(lse, scores.logsumexp(-1)));
  CHECK(torch::equal(fused_mha::attention(query, key, value, options), output));
  CHECK(all_close(std::get<1>(fused_mha::attention_with_weights(query, key, value, options)), weights.mean(1)));
  const auto found = torch::autograd::grad({output.sum() + lse.sin().sum()}, {sink})[0];
  const auto expected =
      torch::autograd::grad({expected_output(weights, value).sum() + scores.logsumexp(-1).sin().sum()}, {sink})[0];
  CHECK(all_close(found, expected));
}

TEST_CASE("weights before dropout are those of a call without it") {
  torch::manual_seed(8);
  const auto x = random_tensor({2, 2, 6, 8});
  const auto options = AttentionOptions().average_attn_weights(false);
  const auto undropped = std::get<1>(fused_mha::attention_with_weights(x, x, x, options));
  const auto dropping = AttentionOptions(options).dropout_p(0.5).weights_before_dropout(true);
  const auto [output, weights] = fused_mha::attention_with_weights(x, x, x, dropping);
  CHECK(all_close(weights, undropped));
  CHECK_FALSE(all_close(output, fused_mha::attention(x, x, x)));
}

TEST_CASE("packed sequences give what each gives alone") {
  torch::manual_seed(9);
  const auto query = random_tensor({7, 4, 8}).requires_grad_();
  const auto key = random_tensor({9, 2, 8}).requires_grad_();
  const auto value = random_tensor({9, 2, 6}).requires_grad_();
  const std::vector<std::int64_t> query_starts{0, 3, 3, 7};
  const std::vector<std::int64_t> key_starts{0, 2, 5, 9};
  const auto options = AttentionOptions().is_causal(true).causal_alignment("bottom_right").sink(random_tensor({4}));
  const auto output =
      fused_mha::attention_varlen(query, key, value, torch::tensor(query_starts), torch::tensor(key_starts), options);

  std::vector<Tensor> alone;
  for (std::size_t n = 0; n + 1 < query_starts.size(); ++n) {
    const auto rows = [&](const Tensor& packed, const std::vector<std::int64_t>& starts) {
      return packed.slice(0, starts[n], starts[n + 1]).transpose(0, 1).unsqueeze(0);
    };
    const auto keys = rows(key, key_starts);
    const auto one = fused_mha::attention(rows(query, query_starts), keys, rows(value, key_starts), options);
    alone.push_back(one.squeeze(0).transpose(0, 1));
  }
  const auto expected = torch::cat(alone);
  CHECK(torch::equal(output, expected));
  const std::vector<Tensor> inputs{query, key, value};
  const auto found_gradients = torch::autograd::grad({output.square().sum()}, inputs);
  const auto expected_gradients = torch::autograd::grad({expected.square().sum()}, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) CHECK(all_close(found_gradients[i], expected_gradients[i]));

  const auto starts = torch::tensor(query_starts);
  CHECK_THROWS_WITH(
      fused_mha::attention_varlen(query, query, query, starts, starts,
                                  AttentionOptions().key_padding_mask(torch::zeros({3, 4}, torch::kBool))),
      contains("attention_varlen: key_padding_mask and attn_mask cannot be given"));
  CHECK_THROWS_WITH(fused_mha::attention_varlen(query, query, query, starts + 1, starts),
                    contains("cu_seqlens_q must ascend from 0 to total_q = 7"));
}

TEST_CASE("empty sizes are legal") {
  for (const auto& [batch, rows, keys] : {std::tuple(0, 3, 4), std::tuple(2, 0, 4), std::tuple(2, 3, 0)}) {
    auto query = random_tensor({batch, 2, rows, 4}).requires_grad_();
    auto key = random_tensor({batch, 2, keys, 4}).requires_grad_();
    const auto options = AttentionOptions().attn_mask(torch::zeros({rows, keys})).is_causal(true);
    const auto [output, weights] = fused_mha::attention_with_weights(query, key, key, options);
    CHECK(torch::equal(output, torch::zeros_like(query)));
    CHECK(weights.sizes() == at::IntArrayRef({batch, rows, keys}));
    output.sum().backward();
    CHECK(torch::equal(key.grad(), torch::zeros_like(key)));
  }
}

TEST_CASE("wrong arguments are named") {
  const auto query = random_tensor({2, 4, 5, 8});
  const auto attend = [&](const AttentionOptions& options) {
    return fused_mha::attention(query, query, query, options);
  };
  CHECK_THROWS_WITH(attend(AttentionOptions().key_padding_mask(torch::zeros({2, 4}, torch::kBool))),
                    contains("fused_mha::attention: key_padding_mask must have shape (N, S) = (2, 5), got (2, 4)"));
  CHECK_THROWS_AS(attend(AttentionOptions().key_padding_mask(torch::zeros({2, 5}, torch::kLong))), c10::TypeError);
  CHECK_THROWS_AS(attend(AttentionOptions().dropout_p(1.5)), c10::ValueError);
  CHECK_THROWS_WITH(attend(AttentionOptions().attn_mask(torch::zeros({3, 5, 5}))), contains("must broadcast to"));
  CHECK_THROWS_WITH(fused_mha::attention(query, Tensor(), query), contains("key must be a tensor"));
}
