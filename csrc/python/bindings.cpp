// SPDX-License-Identifier: BSD-3-Clause
//
// The Python module fused_mha._C: what this build is, and which instruction set the CPU kernels use. Loading it loads
// libfused_mha.so, which registers the operators; no tensor passes through here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <sstream>
#include <string>
#include <vector>

#include "cpu/isa.h"

namespace py = pybind11;

namespace {

std::string compiler_name() {
#if defined(__clang__)
  return std::string("Clang ") + __clang_version__;
#elif defined(__GNUC__)
  return std::string("GCC ") + __VERSION__;
#else
  return "unknown";
#endif
}

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  std::istringstream list(FUSED_MHA_COMPILED_ISAS);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

py::dict build_info() {
  py::dict info;
  info["version"] = FUSED_MHA_VERSION;
  info["torch_version"] = TORCH_VERSION;
  info["compiler"] = compiler_name();
  info["cuda"] = false;
  info["instruction_sets"] = compiled_isas();
  return info;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const auto isa : fused_mha::cpu::supported_isas()) names.emplace_back(fused_mha::cpu::isa_name(isa));
  return names;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Build information and instruction-set choice of fused_mha.";
  module.def("build_info", &build_info,
             "What this build is: version, torch_version compiled against, compiler, cuda, instruction_sets.");
  module.def(
      "get_cpu_isa", [] { return std::string(fused_mha::cpu::isa_name(fused_mha::cpu::active_isa())); },
      "Name of the instruction set that the CPU kernels use.");
  module.def(
      "set_cpu_isa",
      [](const std::string& name) { fused_mha::cpu::set_active_isa(fused_mha::cpu::isa_from_name(name)); },
      py::arg("name"), "Make the CPU kernels use this instruction set; ValueError where unknown or unsupported.");
  module.def("supported_cpu_isas", &supported_isas,
             "Names of the instruction sets that this build holds and this processor runs, weakest first.");
}
