// SPDX-License-Identifier: BSD-3-Clause
//
// run_package MODEL IN OUT: a package of AOTInductor, made in Python, is run without Python on the inputs in IN, a
// pickled list of tensors; the tuple of its outputs is written to OUT. Nothing here names fused_mha: the package calls
// its operators, which are there because the program is linked with the library.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

#include <fstream>
#include <iterator>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const c10::IValue loaded = torch::pickle_load(bytes);
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& input : loaded.toListRef()) inputs.push_back(input.toTensor());

  const torch::NoGradGuard no_grad;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const std::vector<at::Tensor> outputs = model.run(inputs);
  // As a tuple: for a list of tensors torch.load asks for a function of its own.
  const std::vector<c10::IValue> elements(outputs.begin(), outputs.end());
  const std::vector<char> result = torch::pickle_save(c10::ivalue::Tuple::create(elements));
  std::ofstream(argv[3], std::ios::binary).write(result.data(), static_cast<std::streamsize>(result.size()));
  return 0;
}
