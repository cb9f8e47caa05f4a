// SPDX-License-Identifier: BSD-3-Clause
//
// What a C++ user writes: masked attention against a few lines of ATen, gradients included. Prints the OpenMP runtimes
// that the process has loaded, one a line, and returns 0 where the numbers agree.
#include <fused_mha/fused_mha.h>

#include <cmath>
#include <fstream>
#include <iostream>
#include <limits>
#include <set>
#include <string>

namespace {

// query, key, value (N, H, L or S, D); hidden broadcasts to (N, H, L, S), true = hidden.
at::Tensor reference(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const at::Tensor& hidden) {
  const at::Tensor scores = at::matmul(query, key.transpose(-2, -1)) / std::sqrt(static_cast<double>(query.size(-1)));
  return at::matmul(scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1), value);
}

void print_openmp_runtimes() {
  std::set<std::string> runtimes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto name = line.rfind('/');
    if (name != std::string::npos && line.find("omp", name) != std::string::npos) {
      runtimes.insert(line.substr(line.find('/')));
    }
  }
  for (const auto& runtime : runtimes) std::cout << "openmp " << runtime << "\n";
}

}  // namespace

int main() {
  at::manual_seed(0);
  const at::Tensor query = at::randn({2, 3, 33, 20}).requires_grad_();
  const at::Tensor key = at::randn({2, 3, 70, 20});
  const at::Tensor value = at::randn({2, 3, 70, 24});
  const at::Tensor padding = at::arange(70).ge(at::tensor({70, 41}).unsqueeze(1));  // (N, S)
  const at::Tensor causal = at::ones({33, 70}, at::kBool).triu(1);                  // (L, S)

  const auto options = fused_mha::AttentionOptions().key_padding_mask(padding).is_causal(true);
  const at::Tensor output = fused_mha::attention(query, key, value, options);
  output.square().sum().backward();
  const at::Tensor gradient = query.grad().clone();
  query.mutable_grad().reset();

  const at::Tensor expected = reference(query, key, value, padding.view({2, 1, 1, 70}).logical_or(causal));
  expected.square().sum().backward();
  const bool agrees = at::allclose(output, expected, 1e-4, 1e-5) && at::allclose(gradient, query.grad(), 1e-4, 1e-4);

  fused_mha::MultiheadAttention attention(fused_mha::MultiheadAttentionOptions(16, 4).batch_first(true));
  const at::Tensor x = at::randn({2, 5, 16});
  const auto [y, weights] = attention->forward(x, x, x);

  print_openmp_runtimes();
  std::cout << "agrees " << agrees << ", module gives " << y.sizes() << " and " << weights.sizes() << "\n";
  return agrees && y.sizes() == x.sizes() && weights.sizes() == at::IntArrayRef({2, 5, 5}) ? 0 : 1;
}
