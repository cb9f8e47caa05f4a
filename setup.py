# SPDX-License-Identifier: BSD-3-Clause
"""Builds the package by calling CMake, which alone knows the sources and the version."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BYTES_PER_JOB = 3 * 2**30  # what one compiler process may need with torch's headers


def project_version() -> str:
    match = re.search(r"project\(FusedMHA VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert match is not None, "CMakeLists.txt names no version"
    return match.group(1)


def torch_requirement() -> str:
    """The library's ABI is that of the minor version of torch it is compiled with."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return "torch>=2.11,<2.16"
    return f"torch=={major}.{minor}.*"


def torch_folder() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("fused_mha: building needs torch; install it first or build with isolation")
    return spec.submodule_search_locations[0]


def parallel_jobs() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    default = max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_JOB))
    return os.environ.get("MAX_JOBS") or str(default)


def cuda_option() -> str:
    """FORCE_CUDA as PyTorch's own extensions have it: 1 compiles the CUDA kernels without a GPU too, 0 never does."""
    force = os.environ.get("FORCE_CUDA", "")
    if force not in ("", "0", "1"):
        sys.exit(f"fused_mha: FORCE_CUDA must be 0 or 1, got {force!r}")
    return {"": "AUTO", "0": "OFF", "1": "ON"}[force]


class CMakeBuild(build_ext):
    """Configures, builds and installs into the package folder; FUSED_MHA_BUILD_DIR names another build folder."""

    def build_extension(self, ext: Extension) -> None:
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        tag = f"torch-{importlib.metadata.version('torch').split('+')[0]}"
        build = Path(os.environ.get("FUSED_MHA_BUILD_DIR") or Path(self.build_temp) / tag).resolve()
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build)),
            "-DFUSED_MHA_PYTHON=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DFUSED_MHA_TORCH_DIR={torch_folder()}",
            f"-DFUSED_MHA_CUDA={cuda_option()}",
            f"-DTORCH_CUDA_ARCH_LIST={os.environ.get('TORCH_CUDA_ARCH_LIST', '')}",
        ]
        # An isolated build's ninja is gone the next time, so the cached path must not be trusted.
        ninja = shutil.which("ninja")
        if ninja is not None:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += os.environ.get("CMAKE_ARGS", "").split()
        targets = ["fused_mha", "fused_mha_python"]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "-j", parallel_jobs(), "--target", *targets], check=True)
        subprocess.run(["cmake", "--install", str(build), "--prefix", str(package)], check=True)


setup(
    version=project_version(),
    install_requires=[torch_requirement()],
    ext_modules=[Extension("fused_mha._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
