// SPDX-License-Identifier: BSD-3-Clause
//
// load_state IN OUT: a module's state, saved by Python as a dict of tensors beside inputs "x" and "padding", is loaded
// into the C++ module by name; the module's output on those inputs is written to OUT.
#include <fused_mha/fused_mha.h>
#include <torch/serialize.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const auto saved = torch::pickle_load(bytes).toGenericDict();
  const auto tensor = [&](const std::string& name) { return saved.at(name).toTensor(); };

  fused_mha::MultiheadAttention attention(
      fused_mha::MultiheadAttentionOptions(12, 3).batch_first(true).add_bias_kv(true).kdim(7).vdim(5));
  attention->eval();
  const torch::NoGradGuard no_grad;
  for (auto& parameter : attention->named_parameters()) parameter.value().copy_(tensor(parameter.key()));

  const auto [output, weights] =
      attention->forward(tensor("x"), tensor("key"), tensor("value"),
                         fused_mha::MultiheadAttentionForwardOptions().key_padding_mask(tensor("padding")));
  const std::vector<char> result = torch::pickle_save(output);
  std::ofstream(argv[2], std::ios::binary).write(result.data(), static_cast<std::streamsize>(result.size()));
  std::cout << attention->named_parameters().size() << " parameters\n";
  return 0;
}
