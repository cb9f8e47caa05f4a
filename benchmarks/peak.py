# SPDX-License-Identifier: BSD-3-Clause
"""Compiles peak.cpp with the system's C++ compiler and calls it: what the processor can do at most."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).resolve().with_name("peak.cpp")
FLAGS = ["-O2", "-std=c++17", "-shared", "-fPIC", "-pthread"]
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
PROBE_ITERATIONS = 200_000  # one or two milliseconds


class UnavailableError(Exception):
    """There is no peak to compare with; the text says why."""


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise UnavailableError("no C++ compiler found (c++, g++, clang++ or $CXX): the fraction of peak is left out")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "fused_mha"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="fused_mha"))
    return folder


def _compile() -> Path:
    compiler = _compiler()
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join([compiler, *FLAGS]).encode()).hexdigest()[:16]
    library = _cache_folder() / f"peak-{key}.so"
    if library.exists():
        return library
    # Renamed into place, so that two runs at once never load half a file.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        unfinished = Path(folder) / library.name
        done = subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise UnavailableError(f"{compiler} cannot compile {SOURCE.name}, so there is no peak:\n{done.stderr}")
        unfinished.replace(library)
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_compile()))
    library.instructions.restype = ctypes.c_char_p
    library.instructions.argtypes = [ctypes.c_int]
    library.multiply_adds_per_second.restype = ctypes.c_double
    library.multiply_adds_per_second.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    library.bytes_per_second.restype = ctypes.c_double
    library.bytes_per_second.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    return library


def instructions(dtype: torch.dtype) -> str:
    """The instructions that :func:`flops` runs for this dtype; "" where the processor has none."""
    kind = KINDS.get(dtype)
    return "" if kind is None else _library().instructions(kind).decode()


def flops(dtype: torch.dtype, threads: int, iterations: int = PROBE_ITERATIONS) -> float:
    """Flops a second (a multiply-add is two) from registers alone."""
    rate = _library().multiply_adds_per_second(KINDS[dtype], threads, iterations)
    if rate == 0:
        raise UnavailableError(f"no peak loop for {dtype} on this processor: the fraction of peak is left out")
    return 2 * rate


def read_bandwidth(buffer: torch.Tensor, threads: int) -> float:
    """Bytes a second when a contiguous tensor is read once."""
    return _library().bytes_per_second(buffer.data_ptr(), buffer.numel() * buffer.element_size(), threads)


def why_unavailable() -> str:
    """The reason why no peak can be measured here; "" where it can."""
    try:
        flops(torch.float32, 1, iterations=1)
    except UnavailableError as reason:
        return str(reason)
    return ""
