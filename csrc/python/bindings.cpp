// SPDX-License-Identifier: BSD-3-Clause
//
// The Python module fused_mha._C: what this build is, which instruction set the CPU kernels use, and what calls chose.
// Loading it loads libfused_mha.so, which registers the operators; no tensor passes through here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <sstream>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "torch/call_record.h"

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

std::vector<std::string> split(const char* list) {
  std::vector<std::string> names;
  std::istringstream stream(list);
  for (std::string name; std::getline(stream, name, ',');) names.push_back(name);
  return names;
}

py::dict build_info() {
  py::dict info;
  info["version"] = FUSED_MHA_VERSION;
  info["torch_version"] = TORCH_VERSION;
  info["compiler"] = compiler_name();
  const auto cuda_architectures = split(FUSED_MHA_CUDA_ARCHITECTURES);
  info["cuda"] = !cuda_architectures.empty();
  info["cuda_version"] = FUSED_MHA_CUDA_VERSION;
  info["cuda_architectures"] = cuda_architectures;
  info["build_type"] = FUSED_MHA_BUILD_TYPE;
  info["sanitizers"] = FUSED_MHA_SANITIZERS;
  info["instruction_sets"] = split(FUSED_MHA_COMPILED_ISAS);
  return info;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const auto isa : fused_mha::cpu::supported_isas()) names.emplace_back(fused_mha::cpu::isa_name(isa));
  return names;
}

py::dict to_dict(const fused_mha::detail::CallRecord& record) {
  const auto& cpu = record.cpu;
  py::dict call;
  call["device"] = record.device;
  call["dtype"] = record.dtype;
  call["is_packed"] = record.is_packed;
  call["N"] = record.N;
  call["H"] = record.H;
  call["Hkv"] = record.Hkv;
  call["L"] = record.L;
  call["S"] = record.S;
  call["D"] = record.D;
  call["Dv"] = record.Dv;
  call["always_visible_keys"] = record.always_visible_keys;
  call["key_padding_mask"] = record.key_padding_mask;
  call["attn_mask"] = record.attn_mask;
  call["is_causal"] = record.is_causal;
  call["bottom_right"] = record.bottom_right;
  call["sink"] = record.sink;
  call["score_weight"] = record.score_weight;
  call["dropout_p"] = record.dropout_p;
  call["weights_mode"] = record.weights_mode;
  call["weights_before_dropout"] = record.weights_before_dropout;
  call["gradients"] = record.gradients;
  call["has_tangent"] = record.has_tangent;
  if (record.device.rfind("cuda", 0) == 0) {
    call["cuda_forward_refusal"] = record.cuda_forward_refusal;
    call["cuda_backward_refusal"] = record.cuda_backward_refusal;
    return call;
  }
  call["instruction_set"] = std::string(fused_mha::cpu::isa_name(cpu.isa));
  call["few_rows"] = cpu.few_rows;
  call["few_rows_limit"] = cpu.few_rows_limit;
  call["key_splits"] = cpu.key_splits;
  call["work_items"] = cpu.work_items;
  call["threads"] = cpu.threads;
  call["multiply_adds"] = cpu.multiply_adds;
  call["serial_multiply_adds"] = cpu.serial_multiply_adds;
  call["kept_keys"] = cpu.kept_keys;
  call["all_keys"] = cpu.all_keys;
  call["has_padding_bias"] = cpu.has_padding_bias;
  call["tile_rows"] = cpu.tile_rows;
  call["tile_keys"] = cpu.tile_keys;
  call["hidden_tiles"] = cpu.hidden_tiles;
  call["free_tiles"] = cpu.free_tiles;
  call["mixed_tiles"] = cpu.mixed_tiles;
  call["backward_key_splits"] = cpu.backward_key_splits;
  return call;
}

py::list take_call_records() {
  py::list calls;
  for (const auto& record : fused_mha::detail::take_call_records()) calls.append(to_dict(record));
  return calls;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Build information and instruction-set choice of fused_mha.";
  module.def("build_info", &build_info,
             "What this build is: version, torch_version compiled against, compiler, build_type, sanitizers, "
             "instruction_sets; whether it has CUDA kernels (cuda), compiled by which nvcc (cuda_version) for which "
             "compute capabilities (cuda_architectures), as TORCH_CUDA_ARCH_LIST writes them.");
  module.def(
      "get_cpu_isa", [] { return std::string(fused_mha::cpu::isa_name(fused_mha::cpu::active_isa())); },
      "Name of the instruction set that the CPU kernels use.");
  module.def(
      "set_cpu_isa",
      [](const std::string& name) { fused_mha::cpu::set_active_isa(fused_mha::cpu::isa_from_name(name)); },
      py::arg("name"), "Make the CPU kernels use this instruction set; ValueError where unknown or unsupported.");
  module.def("start_call_records", &fused_mha::detail::start_call_records,
             "Make this thread note what its attention calls choose, until take_call_records.");
  module.def("take_call_records", &take_call_records, "End it; a dict for each call since then.");
  module.def("supported_cpu_isas", &supported_isas,
             "Names of the instruction sets that this build holds and this processor runs, weakest first.");
  module.def(
      "quickest_cpu_isa", [] { return std::string(fused_mha::cpu::isa_name(fused_mha::cpu::quickest_isa())); },
      "Name of the one that is used where nobody chooses.");
}
