# SPDX-License-Identifier: BSD-3-Clause
#
# The instruction sets that the kernels are compiled for, weakest first. Each has one source file,
# csrc/cpu/kernels_<name>.cpp, compiled with the flags given here, and defines FUSED_MHA_HAS_<NAME> for csrc/cpu where it
# is part of the build. Only those files may be compiled with such flags: everything else must run on every processor.
# Sets FUSED_MHA_KERNEL_SOURCES, FUSED_MHA_ISA_DEFINITIONS and FUSED_MHA_COMPILED_ISAS.
set(FUSED_MHA_INSTRUCTION_SETS "all" CACHE STRING "Instruction sets to compile beside generic: all, or a list of names")

set(FUSED_MHA_KERNEL_SOURCES csrc/cpu/kernels_generic.cpp)
set(FUSED_MHA_ISA_DEFINITIONS "")
set(FUSED_MHA_COMPILED_ISAS generic)

function(_fused_mha_add_instruction_set name)
  if(NOT FUSED_MHA_INSTRUCTION_SETS STREQUAL "all" AND NOT name IN_LIST FUSED_MHA_INSTRUCTION_SETS)
    return()
  endif()
  string(TOUPPER "${name}" upper)
  set(CMAKE_REQUIRED_FLAGS "${ARGN}")
  list(JOIN CMAKE_REQUIRED_FLAGS " " CMAKE_REQUIRED_FLAGS)
  check_cxx_source_compiles("int main() { return 0; }" FUSED_MHA_COMPILER_HAS_${upper})
  if(NOT FUSED_MHA_COMPILER_HAS_${upper})
    message(WARNING "fused_mha: this compiler cannot build the ${name} kernels; they are left out")
    return()
  endif()
  set_source_files_properties(csrc/cpu/kernels_${name}.cpp PROPERTIES COMPILE_OPTIONS "${ARGN}")
  set(FUSED_MHA_KERNEL_SOURCES ${FUSED_MHA_KERNEL_SOURCES} csrc/cpu/kernels_${name}.cpp PARENT_SCOPE)
  set(FUSED_MHA_ISA_DEFINITIONS ${FUSED_MHA_ISA_DEFINITIONS} FUSED_MHA_HAS_${upper} PARENT_SCOPE)
  set(FUSED_MHA_COMPILED_ISAS ${FUSED_MHA_COMPILED_ISAS} ${name} PARENT_SCOPE)
endfunction()

include(CheckCXXSourceCompiles)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(_avx2_flags -mavx2 -mfma -mf16c)
  set(_avx512_flags ${_avx2_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC 12 warns of its own AVX-512 intrinsics (bug 105593).
    list(APPEND _avx512_flags -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  _fused_mha_add_instruction_set(avx2 ${_avx2_flags})
  _fused_mha_add_instruction_set(avx512 ${_avx512_flags})
  _fused_mha_add_instruction_set(avx512bf16 ${_avx512_flags} -mavx512bf16)
endif()
