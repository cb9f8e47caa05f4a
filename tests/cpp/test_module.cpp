// SPDX-License-Identifier: BSD-3-Clause
//
// The C++ module: parameters and initial numbers, values against the formula, layouts, options, serialization.
#include <fused_mha/fused_mha.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <sstream>

#include "catch.h"

namespace {

using fused_mha::MultiheadAttention;
using fused_mha::MultiheadAttentionForwardOptions;
using fused_mha::MultiheadAttentionOptions;
using torch::Tensor;

Tensor random_tensor(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); }

bool all_close(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && torch::allclose(a, b, /*rtol=*/1e-9, /*atol=*/1e-11);
}

MultiheadAttention make(const MultiheadAttentionOptions& options) {
  MultiheadAttention module(options);
  module->to(torch::kDouble);
  return module;
}

/// Output and weights (N, H, L, S) of a batch_first module by the formula, without masks.
std::tuple<Tensor, Tensor> expected(MultiheadAttention module, const Tensor& query, const Tensor& key,
                                    const Tensor& value) {
  const auto& options = module->options;
  const auto heads = [&](const Tensor& x) { return x.unflatten(-1, {options.num_heads(), -1}).transpose(1, 2); };
  const auto packed = module->in_proj_weight.defined();
  const auto weights = packed
                           ? module->in_proj_weight.chunk(3)
                           : std::vector<Tensor>{module->q_proj_weight, module->k_proj_weight, module->v_proj_weight};
  const auto bias = options.bias() ? module->in_proj_bias.chunk(3) : std::vector<Tensor>(3);
  auto q = torch::linear(query, weights[0], bias[0]);
  auto k = torch::linear(key, weights[1], bias[1]);
  auto v = torch::linear(value, weights[2], bias[2]);
  const auto n = k.size(0);
  const auto e = options.embed_dim();
  if (options.add_bias_kv()) {
    k = torch::cat({k, module->bias_k.expand({n, 1, e})}, 1);
    v = torch::cat({v, module->bias_v.expand({n, 1, e})}, 1);
  }
  if (options.add_zero_attn()) {
    k = torch::cat({k, k.new_zeros({n, 1, e})}, 1);
    v = torch::cat({v, v.new_zeros({n, 1, e})}, 1);
  }
  const auto scale = 1.0 / std::sqrt(static_cast<double>(e / options.num_heads()));
  const auto attention = (heads(q).matmul(heads(k).transpose(-1, -2)) * scale).softmax(-1);
  return {module->out_proj->forward(attention.matmul(heads(v)).transpose(1, 2).flatten(2)), attention};
}

}  // namespace

TEST_CASE("parameters have the names and shapes of nn.MultiheadAttention") {
  const auto shapes = [](const MultiheadAttentionOptions& options) {
    std::map<std::string, std::vector<std::int64_t>> result;
    const MultiheadAttention module(options);
    for (const auto& item : module->named_parameters()) result[item.key()] = item.value().sizes().vec();
    return result;
  };
  using Shapes = std::map<std::string, std::vector<std::int64_t>>;
  CHECK(
      shapes({8, 2}) ==
      Shapes{{"in_proj_weight", {24, 8}}, {"in_proj_bias", {24}}, {"out_proj.weight", {8, 8}}, {"out_proj.bias", {8}}});
  CHECK(shapes(MultiheadAttentionOptions(8, 2).bias(false).kdim(5).vdim(6).add_bias_kv(true)) ==
        Shapes{{"q_proj_weight", {8, 8}},
               {"k_proj_weight", {8, 5}},
               {"v_proj_weight", {8, 6}},
               {"out_proj.weight", {8, 8}},
               {"bias_k", {1, 1, 8}},
               {"bias_v", {1, 1, 8}}});
}

TEST_CASE("initial numbers are those of torch::nn::MultiheadAttention for the same seed") {
  for (const std::int64_t kdim : {8, 5}) {
    torch::manual_seed(0);
    const MultiheadAttention ours(MultiheadAttentionOptions(8, 2).add_bias_kv(true).kdim(kdim));
    torch::manual_seed(0);
    const torch::nn::MultiheadAttention stock(
        torch::nn::MultiheadAttentionOptions(8, 2).add_bias_kv(true).kdim(kdim).vdim(8));
    const auto parameters = ours->named_parameters();
    CHECK(parameters.size() == stock->named_parameters().size());
    for (const auto& item : stock->named_parameters()) {
      INFO(item.key());
      CHECK(torch::equal(parameters[item.key()], item.value()));
    }
  }
}

TEST_CASE("values and gradients by the formula, in every combination of options") {
  torch::manual_seed(1);
  for (const bool bias : {true, false}) {
    for (const bool extra_keys : {true, false}) {
      for (const std::int64_t kdim : {8, 5}) {
        auto module = make(MultiheadAttentionOptions(8, 2)
                               .bias(bias)
                               .add_bias_kv(extra_keys)
                               .add_zero_attn(extra_keys)
                               .kdim(kdim)
                               .batch_first(true));
        auto query = random_tensor({3, 4, 8}).requires_grad_();
        auto key = random_tensor({3, 6, kdim}).requires_grad_();
        auto value = random_tensor({3, 6, 8}).requires_grad_();
        const auto [output, weights] = module->forward(query, key, value);
        const auto [wanted_output, wanted_weights] = expected(module, query, key, value);
        CHECK(all_close(output, wanted_output));
        CHECK(all_close(weights, wanted_weights.mean(1)));
        auto inputs = module->parameters();
        inputs.insert(inputs.end(), {query, key, value});
        const auto loss = [](const Tensor& y, const Tensor& w) { return y.pow(2).sum() + w.pow(2).sum(); };
        const auto gradients = torch::autograd::grad({loss(output, weights)}, inputs);
        const auto wanted = torch::autograd::grad({loss(wanted_output, wanted_weights.mean(1))}, inputs);
        for (std::size_t i = 0; i < inputs.size(); ++i) CHECK(all_close(gradients[i], wanted[i]));
      }
    }
  }
}

TEST_CASE("layouts: batch_first, (L, N, E) and unbatched agree") {
  torch::manual_seed(2);
  auto first = make(MultiheadAttentionOptions(8, 2).batch_first(true));
  auto second = make({8, 2});
  second->in_proj_weight.set_data(first->in_proj_weight);
  second->out_proj = first->out_proj;
  const auto x = random_tensor({3, 4, 8});
  const auto padding = torch::rand({3, 4}).lt(0.3);
  const auto options = MultiheadAttentionForwardOptions().key_padding_mask(padding);
  const auto [output, weights] = first->forward(x, x, x, options);
  const auto sequence = x.transpose(0, 1);
  const auto [other_output, other_weights] = second->forward(sequence, sequence, sequence, options);
  CHECK(all_close(other_output.transpose(0, 1), output));
  CHECK(all_close(other_weights, weights));
  const auto one = MultiheadAttentionForwardOptions().key_padding_mask(padding[0]);
  const auto [unbatched_output, unbatched_weights] = first->forward(x[0], x[0], x[0], one);
  CHECK(all_close(unbatched_output, output[0]));
  CHECK(all_close(unbatched_weights, weights[0]));
}

TEST_CASE("forward options: masks, causality, weights") {
  torch::manual_seed(3);
  auto module = make(MultiheadAttentionOptions(8, 2).batch_first(true));
  const auto x = random_tensor({2, 4, 8});
  const auto causal = torch::ones({4, 4}, torch::kBool).triu(1);
  const auto run = [&](const MultiheadAttentionForwardOptions& options) { return module->forward(x, x, x, options); };
  const auto [by_mask, mask_weights] = run(MultiheadAttentionForwardOptions().attn_mask(causal));
  const auto [by_flag, flag_weights] = run(MultiheadAttentionForwardOptions().is_causal(true));
  CHECK(torch::equal(by_mask, by_flag));
  CHECK(torch::equal(mask_weights, flag_weights));
  CHECK(torch::equal(flag_weights, flag_weights.tril()));

  const auto free = torch::zeros({4, 4}, torch::kBool);
  const auto [hinted, hinted_weights] = run(MultiheadAttentionForwardOptions().attn_mask(free).is_causal(true));
  CHECK(torch::equal(hinted, std::get<0>(run({}))));

  const auto [output, none] = run(MultiheadAttentionForwardOptions().need_weights(false));
  CHECK_FALSE(none.defined());
  CHECK(torch::equal(output, std::get<0>(run({}))));
  const auto per_head = std::get<1>(run(MultiheadAttentionForwardOptions().average_attn_weights(false)));
  CHECK(per_head.sizes() == at::IntArrayRef({2, 2, 4, 4}));
  CHECK(all_close(per_head.mean(1), std::get<1>(run({}))));

  const auto of_heads = torch::rand({2 * 2, 4, 4}).lt(0.3);
  CHECK(torch::equal(std::get<0>(run(MultiheadAttentionForwardOptions().attn_mask(of_heads))),
                     std::get<0>(run(MultiheadAttentionForwardOptions().attn_mask(of_heads.view({2, 2, 4, 4}))))));
}

TEST_CASE("a sample that is all padding gives the bias of the out-projection") {
  torch::manual_seed(4);
  auto module = make(MultiheadAttentionOptions(8, 2).batch_first(true));
  const torch::NoGradGuard no_grad;
  module->out_proj->bias.copy_(random_tensor({8}));
  const auto x = random_tensor({2, 3, 8});
  const auto padding = torch::tensor({{false, false, false}, {true, true, true}});
  const auto [output, weights] = module->forward(x, x, x, MultiheadAttentionForwardOptions().key_padding_mask(padding));
  CHECK(torch::equal(output[1], module->out_proj->bias.expand({3, 8})));
  CHECK(torch::equal(weights[1], torch::zeros({3, 3}, torch::kDouble)));
}

TEST_CASE("value may be wider than key with one head and an odd width") {
  auto module = make(MultiheadAttentionOptions(5, 1).vdim(4));
  const auto [output, weights] =
      module->forward(random_tensor({1, 1, 5}), random_tensor({3, 1, 5}), random_tensor({3, 1, 4}));
  CHECK(output.sizes() == at::IntArrayRef({1, 1, 5}));
  CHECK(weights.sizes() == at::IntArrayRef({1, 1, 3}));
}

TEST_CASE("dropout acts in training only") {
  torch::manual_seed(5);
  auto module = make(MultiheadAttentionOptions(8, 2).dropout(0.5).batch_first(true));
  const auto x = random_tensor({2, 16, 8});
  const auto run = [&] { return std::get<0>(module->forward(x, x, x)); };
  CHECK_FALSE(torch::equal(run(), run()));
  module->eval();
  CHECK(torch::equal(run(), run()));
}

TEST_CASE("clone, save and load keep the numbers") {
  torch::manual_seed(6);
  const auto options = MultiheadAttentionOptions(8, 2).add_bias_kv(true).batch_first(true);
  auto module = make(options);
  const auto x = random_tensor({2, 3, 8});
  const auto wanted = std::get<0>(module->forward(x, x, x));

  const auto copy = std::dynamic_pointer_cast<fused_mha::MultiheadAttentionImpl>(module->clone());
  REQUIRE(copy);
  CHECK(torch::equal(std::get<0>(copy->forward(x, x, x)), wanted));
  {
    const torch::NoGradGuard no_grad;
    copy->in_proj_weight.zero_();
  }
  CHECK(torch::equal(std::get<0>(module->forward(x, x, x)), wanted));

  std::stringstream stream;
  torch::save(module, stream);
  auto loaded = make(options);
  torch::load(loaded, stream);
  CHECK(torch::equal(std::get<0>(loaded->forward(x, x, x)), wanted));
}

TEST_CASE("options that stock lacks: parameters, values, gradients") {
  torch::manual_seed(9);
  for (const bool packed : {true, false}) {
    for (const char* kind : {"none", "zero", "learned"}) {
      INFO("packed " << packed << ", sink " << kind);
      auto options = MultiheadAttentionOptions(10, 4)
                         .head_dim(3)
                         .v_head_dim(5)
                         .num_kv_heads(2)
                         .out_dim(7)
                         .batch_first(true)
                         .causal_alignment("bottom_right");
      if (!packed) options.kdim(6).vdim(9);
      if (kind != std::string("none")) options.sink(kind);
      auto module = make(options);
      const auto parameters = module->named_parameters();
      if (packed) {
        CHECK(parameters["in_proj_weight"].sizes() == at::IntArrayRef({12 + 6 + 10, 10}));
      } else {
        CHECK(parameters["q_proj_weight"].sizes() == at::IntArrayRef({12, 10}));
        CHECK(parameters["k_proj_weight"].sizes() == at::IntArrayRef({6, 6}));
        CHECK(parameters["v_proj_weight"].sizes() == at::IntArrayRef({10, 9}));
      }
      CHECK(parameters["out_proj.weight"].sizes() == at::IntArrayRef({7, 20}));
      CHECK(parameters.contains("sink") == (kind == std::string("learned")));
      Tensor sink = torch::full({4}, -std::numeric_limits<double>::infinity(), torch::kDouble);
      if (kind == std::string("zero")) sink = torch::zeros({4}, torch::kDouble);
      if (module->sink.defined()) {
        const torch::NoGradGuard no_grad;
        CHECK_FALSE(module->sink.any().item<bool>());
        module->sink.normal_();
      }
      if (module->sink.defined()) sink = module->sink;

      const auto query = random_tensor({2, 3, 10});
      const auto key = random_tensor({2, 5, packed ? 10 : 6});
      const auto value = random_tensor({2, 5, packed ? 10 : 9});
      const auto weights =
          packed ? module->in_proj_weight.split_with_sizes({12, 6, 10})
                 : std::vector<Tensor>{module->q_proj_weight, module->k_proj_weight, module->v_proj_weight};
      const auto bias = module->in_proj_bias.split_with_sizes({12, 6, 10});
      const auto heads = [](const Tensor& x, std::int64_t count) {
        return x.unflatten(-1, {count, -1}).transpose(1, 2).repeat_interleave(4 / count, 1);
      };
      const auto q = heads(torch::linear(query, weights[0], bias[0]), 4);
      const auto k = heads(torch::linear(key, weights[1], bias[1]), 2);
      const auto v = heads(torch::linear(value, weights[2], bias[2]), 2);
      const auto hidden = torch::ones({3, 5}, torch::kBool).triu(3);
      const auto scores = (q.matmul(k.transpose(-1, -2)) / std::sqrt(3.0))
                              .masked_fill(hidden, -std::numeric_limits<double>::infinity());
      const auto attention =
          torch::cat({scores, sink.view({1, 4, 1, 1}).expand({2, 4, 3, 1})}, -1).softmax(-1).narrow(-1, 0, 5);
      const auto wanted = module->out_proj->forward(attention.matmul(v).transpose(1, 2).flatten(2));
      const auto [output, found] =
          module->forward(query, key, value, MultiheadAttentionForwardOptions().is_causal(true));
      CHECK(all_close(output, wanted));
      CHECK(all_close(found, attention.mean(1)));
      const auto gradients = torch::autograd::grad({output.pow(2).sum()}, module->parameters());
      const auto expected_gradients = torch::autograd::grad({wanted.pow(2).sum()}, module->parameters());
      for (std::size_t i = 0; i < gradients.size(); ++i) CHECK(all_close(gradients[i], expected_gradients[i]));
    }
  }
}

TEST_CASE("weights are returned from before dropout where options say so") {
  torch::manual_seed(10);
  auto module = make(MultiheadAttentionOptions(8, 2).dropout(0.5).weights_before_dropout(true));
  const auto x = random_tensor({4, 3, 8});
  const auto dropped = module->forward(x, x, x);
  module->eval();
  const auto undropped = module->forward(x, x, x);
  CHECK(all_close(std::get<1>(dropped), std::get<1>(undropped)));
  CHECK_FALSE(all_close(std::get<0>(dropped), std::get<0>(undropped)));
}

TEST_CASE("the module prints its options and lives in an AnyModule") {
  const MultiheadAttention module(MultiheadAttentionOptions(8, 2).dropout(0.25));
  std::ostringstream text;
  text << module;
  CHECK_THAT(text.str(), contains("fused_mha::MultiheadAttention(embed_dim=8, num_heads=2, dropout=0.25, bias=true, "
                                  "add_bias_kv=false, add_zero_attn=false, kdim=8, vdim=8, batch_first=false)"));
  torch::nn::AnyModule any(module);
  const auto x = torch::randn({3, 2, 8});
  CHECK(std::get<0>(any.forward<std::tuple<Tensor, Tensor>>(x, x, x)).sizes() == x.sizes());
}

TEST_CASE("wrong options and inputs are named") {
  CHECK_THROWS_WITH(MultiheadAttention(10, 3), contains("num_heads must divide embed_dim"));
  CHECK_THROWS_AS(MultiheadAttention(0, 3), c10::ValueError);
  MultiheadAttention module(MultiheadAttentionOptions(8, 2).batch_first(true));
  const auto query = torch::randn({1, 1, 8});
  const auto key = torch::randn({4, 3, 8});
  CHECK_THROWS_AS(module->forward(query, key, key), c10::ValueError);
  CHECK_THROWS_WITH(module->forward(query, key, key),
                    contains("N = 1") && contains("N = 4") && contains("batch_first"));
  CHECK_THROWS_AS(
      module->forward(key, key, key,
                      MultiheadAttentionForwardOptions().key_padding_mask(torch::zeros({4, 3}, torch::kInt))),
      c10::TypeError);
  CHECK_THROWS_WITH(MultiheadAttention(MultiheadAttentionOptions(8, 4).num_kv_heads(3)),
                    contains("fused_mha::MultiheadAttention: num_kv_heads must divide num_heads = 4, got 3"));
  CHECK_THROWS_WITH(MultiheadAttention(MultiheadAttentionOptions(8, 4).head_dim(0)),
                    contains("fused_mha::MultiheadAttention: head_dim must be positive, got 0"));
  CHECK_THROWS_WITH(MultiheadAttention(MultiheadAttentionOptions(8, 4).causal_alignment("left")),
                    contains("causal_alignment must be 'top_left' or 'bottom_right', got 'left'"));
  CHECK_THROWS_WITH(MultiheadAttention(MultiheadAttentionOptions(8, 4).sink("one")),
                    contains("sink must be 'zero' or 'learned', or absent, got 'one'"));
}
