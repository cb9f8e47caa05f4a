# SPDX-License-Identifier: BSD-3-Clause
#
# Whether the CUDA kernels are compiled, and for which GPUs. Sets FUSED_MHA_WITH_CUDA and FUSED_MHA_CUDA_ARCHITECTURES
# (as TORCH_CUDA_ARCH_LIST writes them; empty without CUDA), and with CUDA enables the language.
#
#   FUSED_MHA_CUDA        ON, OFF, or AUTO: as FORCE_CUDA in the environment says (1 or 0), else where nvcc, a GPU and a
#                         torch that runs on GPUs are present
#   TORCH_CUDA_ARCH_LIST  CMake or environment variable, as PyTorch takes it: "8.0;9.0;10.0+PTX". Without it: the GPUs
#                         that are present, else 8.0, 9.0 and 10.0 so far as nvcc knows them; PTX of the newest
#   CUDA_HOME, CUDACXX    environment: where nvcc is, if not in PATH or /usr/local/cuda
set(FUSED_MHA_CUDA AUTO CACHE STRING "Compile the CUDA kernels: AUTO, ON or OFF")
set_property(CACHE FUSED_MHA_CUDA PROPERTY STRINGS AUTO ON OFF)

function(_fused_mha_find_nvcc result)
  find_program(nvcc NAMES "$ENV{CUDACXX}" nvcc HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin"
               PATHS /usr/local/cuda/bin NO_CACHE)
  if(NOT nvcc)
    set(nvcc "")
  endif()
  set(${result} "${nvcc}" PARENT_SCOPE)
endfunction()

# Compute capabilities of the GPUs in this machine, such as "8.0;9.0"; empty where there is none.
function(_fused_mha_find_gpus result)
  set(gpus "")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" gpus "${output}")
    list(REMOVE_DUPLICATES gpus)
    list(SORT gpus COMPARE NATURAL)
  endif()
  set(${result} "${gpus}" PARENT_SCOPE)
endfunction()

# What is asked for, as TORCH_CUDA_ARCH_LIST writes it.
function(_fused_mha_choose_architectures nvcc result)
  set(list "${TORCH_CUDA_ARCH_LIST}")
  if(NOT list)
    set(list "$ENV{TORCH_CUDA_ARCH_LIST}")
  endif()
  string(REGEX REPLACE "[ ,]+" ";" list "${list}")
  if(NOT list)
    _fused_mha_find_gpus(list)
    if(NOT list)
      execute_process(COMMAND "${nvcc}" --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
      foreach(version 8.0 9.0 10.0)
        string(REPLACE "." "" number "${version}")
        if(known MATCHES "sm_${number}[^0-9]")
          list(APPEND list ${version})
        endif()
      endforeach()
    endif()
    list(POP_BACK list newest)
    list(APPEND list "${newest}+PTX")
  endif()
  set(${result} "${list}" PARENT_SCOPE)
endfunction()

# The same in CMake's terms: 8.0;9.0+PTX is 80-real;90-real;90-virtual.
function(_fused_mha_cmake_architectures list result)
  set(architectures "")
  foreach(entry IN LISTS list)
    if(NOT entry MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
      message(FATAL_ERROR "fused_mha: TORCH_CUDA_ARCH_LIST must be a list such as 8.0;9.0;10.0+PTX, got ${entry}")
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3}")
    list(APPEND architectures "${number}-real")
    if(CMAKE_MATCH_4)
      list(APPEND architectures "${number}-virtual")
    endif()
  endforeach()
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

_fused_mha_find_nvcc(_nvcc)
set(FUSED_MHA_WITH_CUDA OFF)
if(NOT FUSED_MHA_CUDA STREQUAL "AUTO")
  if(FUSED_MHA_CUDA)
    set(FUSED_MHA_WITH_CUDA ON)
  endif()
elseif(NOT "$ENV{FORCE_CUDA}" STREQUAL "")
  if("$ENV{FORCE_CUDA}" STREQUAL "1")
    set(FUSED_MHA_WITH_CUDA ON)
  endif()
elseif(_nvcc AND FUSED_MHA_TORCH_HAS_CUDA)
  _fused_mha_find_gpus(_gpus)
  if(_gpus)
    set(FUSED_MHA_WITH_CUDA ON)
  endif()
endif()

set(FUSED_MHA_CUDA_ARCHITECTURES "")
if(FUSED_MHA_WITH_CUDA)
  if(NOT _nvcc)
    message(FATAL_ERROR "fused_mha: the CUDA kernels need nvcc, which is neither in PATH nor in CUDA_HOME/bin. Install the "
                        "CUDA toolkit, name it by CUDA_HOME, or build without CUDA: FORCE_CUDA=0, -DFUSED_MHA_CUDA=OFF.")
  endif()
  if(NOT FUSED_MHA_TORCH_HAS_CUDA)
    message(WARNING "fused_mha: CUDA kernels beside a torch without CUDA, which has no tensors for them")
  endif()
  _fused_mha_choose_architectures("${_nvcc}" FUSED_MHA_CUDA_ARCHITECTURES)
  _fused_mha_cmake_architectures("${FUSED_MHA_CUDA_ARCHITECTURES}" CMAKE_CUDA_ARCHITECTURES)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${_nvcc}")
  endif()
  # nvcc takes another g++ than CMake does, unless told.
  if(NOT CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  endif()
  enable_language(CUDA)
  message(STATUS "fused_mha: CUDA kernels for ${FUSED_MHA_CUDA_ARCHITECTURES}, by nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
else()
  message(STATUS "fused_mha: no CUDA kernels (FORCE_CUDA=1 in the environment compiles them)")
endif()
