#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# sanitize.sh asan|ubsan PYTHON: builds everything with the sanitizer, runs the C++ tests and one parity run in Python.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
python=$2

cmake --preset "$preset" -DPython_EXECUTABLE="$python"
cmake --build --preset "$preset" -j "${MAX_JOBS:-1}"
ctest --preset "$preset"

# The package with sanitized libraries, in front of the installed one.
stage=build/$preset/stage
rm -rf "$stage"
mkdir -p "$stage"
cp -r python/fused_mha "$stage/fused_mha"
cmake --install "build/$preset" --prefix "$stage/fused_mha" >/dev/null
if [ "$preset" = asan ]; then
  # Python itself is not sanitized, so the run-time library has to come first.
  LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so):$(${CXX:-g++} -print-file-name=libstdc++.so.6)"
  export LD_PRELOAD ASAN_OPTIONS=detect_leaks=0
else
  export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
fi
FUSED_MHA_EXAMPLES=20 PYTHONPATH=$stage "$python" -m pytest -q -p no:cacheprovider tests/python/test_module_parity.py
