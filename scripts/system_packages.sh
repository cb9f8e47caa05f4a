#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# system_packages.sh build|test|lint...: makes sure that the system has what these steps need beside the Python
# environment. Installs what is missing with apt-get as root or through sudo; elsewhere says what is missing and fails.
set -euo pipefail

missing=()

need() { # need PACKAGE COMMAND...: the Debian package is needed where the command fails
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}

has_python_headers() {
  python3 -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")'
}

has_catch2() {
  compgen -G '/usr/include/catch2/catch*.hpp' || compgen -G '/usr/local/include/catch2/catch*.hpp'
}

for step in "$@"; do
  case $step in
    build)
      need g++ command -v "${CXX:-g++}"
      need cmake command -v cmake
      need python3-venv python3 -c 'import venv, ensurepip'
      need python3-dev has_python_headers
      ;;
    test) need catch2 has_catch2 ;;
    lint) need clang-tidy command -v clang-tidy ;;
    *)
      echo "usage: $0 build|test|lint..." >&2
      exit 2
      ;;
  esac
done

if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
if [ "$(id -u)" -eq 0 ]; then
  as_root=(env)
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  as_root=(sudo env)
else
  as_root=()
fi
if [ ${#as_root[@]} -eq 0 ] || ! command -v apt-get >/dev/null; then
  echo "fused_mha: this machine lacks: ${missing[*]} (Debian's names). Install them, on Debian or Ubuntu with" >&2
  echo "    sudo apt-get install ${missing[*]}" >&2
  echo "and run the command again." >&2
  exit 1
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
