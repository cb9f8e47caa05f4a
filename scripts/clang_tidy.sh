#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# clang_tidy.sh BUILD_FOLDER JOBS: clang-tidy on the units of csrc, with the compile commands of a configured build.
# The kernels are one algorithm compiled per instruction set, so their generic unit stands for all of them. Units that
# are not part of the build, such as cuda.cpp in one without CUDA, are left out.
set -euo pipefail
cd "$(dirname "$0")/.."

find csrc -name '*.cpp' ! -name 'kernels_*.cpp' -o -name kernels_generic.cpp |
  while read -r unit; do
    if grep -q "/$unit\"" "$1/compile_commands.json"; then printf '%s\0' "$unit"; fi
  done |
  xargs -0 -n 1 -P "$2" clang-tidy --quiet -p "$1" --extra-arg=-fno-openmp 2> >(grep -v " warnings\? generated" >&2)
