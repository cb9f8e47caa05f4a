# SPDX-License-Identifier: BSD-3-Clause
#
# Defines FusedMHA::torch: the headers and libraries of LibTorch, taken from its folder.
#
# find_package(Torch) is not used: the ordinary torch wheel is a CUDA build, and its package configuration stops on a
# machine without the CUDA toolkit, which nothing here needs. The folder, the one with include/ and lib/, is the first of
#   1. FUSED_MHA_TORCH_DIR
#   2. what find_package(Torch) found earlier in the project
#   3. Torch_DIR, or a TorchConfig.cmake under CMAKE_PREFIX_PATH
#   4. torch beside an installed fused_mha Python package
#   5. the torch that the Python interpreter would import (Python_EXECUTABLE, else python3)
# Also sets FUSED_MHA_TORCH_VERSION, and FUSED_MHA_TORCH_HAS_CUDA to whether that torch runs on GPUs. Used by the build and by the installed package.
set(FUSED_MHA_TORCH_DIR "" CACHE PATH "Folder of LibTorch or of the torch Python package; empty: search")

function(_fused_mha_torch_root result)
  set(roots "${FUSED_MHA_TORCH_DIR}" "${TORCH_INSTALL_PREFIX}")
  find_path(config_folder TorchConfig.cmake PATHS "${Torch_DIR}" PATH_SUFFIXES Torch share/cmake/Torch
            NO_CACHE NO_CMAKE_SYSTEM_PATH NO_SYSTEM_ENVIRONMENT_PATH)
  if(config_folder)
    get_filename_component(root "${config_folder}/../../.." ABSOLUTE)
    list(APPEND roots "${root}")
  endif()
  get_filename_component(root "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../../../torch" ABSOLUTE)
  list(APPEND roots "${root}")
  foreach(root IN LISTS roots)
    if(root AND EXISTS "${root}/include/ATen/ATen.h")
      set(${result} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()

  if(NOT Python_EXECUTABLE)
    find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  endif()
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0], end='')"
      OUTPUT_VARIABLE root ERROR_QUIET RESULT_VARIABLE status)
    if(status EQUAL 0 AND EXISTS "${root}/include/ATen/ATen.h")
      set(${result} "${root}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

function(_fused_mha_define_torch)
  _fused_mha_torch_root(root)
  if(NOT root)
    message(FATAL_ERROR "fused_mha: found no LibTorch. Set FUSED_MHA_TORCH_DIR to the folder of the torch Python package "
                        "or of an unpacked LibTorch, or Python_EXECUTABLE to a Python that has torch, or put LibTorch "
                        "in CMAKE_PREFIX_PATH.")
  endif()

  file(STRINGS "${root}/share/cmake/Torch/TorchConfigVersion.cmake" version_line REGEX "set\\(PACKAGE_VERSION ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" version "${version_line}")
  set(FUSED_MHA_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(FUSED_MHA_TORCH_HAS_CUDA OFF PARENT_SCOPE)
  if(EXISTS "${root}/lib/libtorch_cuda.so")
    set(FUSED_MHA_TORCH_HAS_CUDA ON PARENT_SCOPE)
  endif()
  # Builds of torch whose string ABI is not the compiler's default say so in this one line.
  file(STRINGS "${root}/share/cmake/Torch/TorchConfig.cmake" abi_line REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
  string(REGEX MATCH "_GLIBCXX_USE_CXX11_ABI=[01]" abi "${abi_line}")

  foreach(name torch_cpu c10 torch)
    find_library(library ${name} PATHS "${root}/lib" NO_DEFAULT_PATH NO_CACHE REQUIRED)
    list(APPEND libraries "${library}")
    unset(library)
  endforeach()
  find_package(Threads REQUIRED)
  add_library(FusedMHA::torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(
    FusedMHA::torch
    PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
               INTERFACE_COMPILE_DEFINITIONS "${abi}"
               INTERFACE_LINK_LIBRARIES "${libraries};Threads::Threads")
  message(STATUS "fused_mha: torch ${version} in ${root}")
endfunction()

if(NOT TARGET FusedMHA::torch)
  _fused_mha_define_torch()
endif()
