#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Dependencies point one way: core <- cpu, cuda <- torch <- python. The kernels know no torch, and core knows no kernels.
set -euo pipefail
cd "$(dirname "$0")/.."

status=0
forbid() { # forbid PATTERN FOLDER...: no include of PATTERN under the folders
  local pattern=$1 folder
  shift
  for folder in "$@"; do
    if [ -d "$folder" ] && grep -rnE "^[[:space:]]*#[[:space:]]*include[[:space:]]*[<\"]($pattern)/" "$folder"; then
      echo "check_layers: $folder must not include ($pattern)/" >&2
      status=1
    fi
  done
}

forbid 'torch|ATen|c10|caffe2|pybind11|fused_mha' csrc/core csrc/cpu csrc/cuda
forbid 'cpu|cuda' csrc/core
forbid 'cuda' csrc/cpu
forbid 'cpu' csrc/cuda
forbid 'core|cpu|cuda' csrc/include
forbid 'pybind11' csrc/torch csrc/include
exit $status
