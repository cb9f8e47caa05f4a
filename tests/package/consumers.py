# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of C++ projects share: configuring and building as a user without a CUDA toolkit does."""

import os
import shutil
import subprocess
from pathlib import Path

import fused_mha
import torch

TORCH_FOLDER = Path(torch.__file__).parent
JOBS = os.environ.get("MAX_JOBS", "1")
#: For a project that uses the installed Python package.
PREFIXES = f"-DCMAKE_PREFIX_PATH={fused_mha.cmake_prefix_path};{torch.utils.cmake_prefix_path}"


def environment_without_cuda() -> dict[str, str]:
    """No variable and no PATH entry that leads to a CUDA toolkit, nor to a Python that has torch."""
    environment = {name: value for name, value in os.environ.items() if "CUDA" not in name and "TORCH" not in name}
    folders = environment["PATH"].split(os.pathsep)
    environment["PATH"] = os.pathsep.join(folder for folder in folders if not (Path(folder) / "nvcc").exists())
    for name in ("LIBRARY_PATH", "LD_LIBRARY_PATH", "CPATH", "CMAKE_PREFIX_PATH"):
        environment.pop(name, None)
    return environment


def run(*command: str | Path, libraries: Path | None = None, **kwargs: object) -> str:
    """`libraries`: where the dynamic linker looks too, for libraries that are loaded later."""
    environment = environment_without_cuda()
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    result = subprocess.run([str(part) for part in command], env=environment, text=True, capture_output=True, **kwargs)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build(source: Path, folder: Path, *arguments: str) -> str:
    """Configures and builds; returns what configuring printed."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    log = run("cmake", "-S", source, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *generator, *arguments)
    run("cmake", "--build", folder, "-j", JOBS)
    return log
