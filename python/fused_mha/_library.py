# SPDX-License-Identifier: BSD-3-Clause
"""Finds and loads the shared library that registers the operators."""

import importlib.metadata
from pathlib import Path

import torch

PACKAGE_FOLDER = Path(__file__).resolve().parent
LIBRARY = PACKAGE_FOLDER / "lib" / "libfused_mha.so"


def version() -> str:
    """Version of the installed distribution; ``0+unknown`` where the package runs from a bare folder."""
    try:
        return importlib.metadata.version("fused_mha")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def built_for_torch() -> str:
    """The torch that the library was compiled with, as the distribution's requirements name it."""
    try:
        requirements = importlib.metadata.requires("fused_mha") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    for requirement in requirements:
        if requirement.startswith("torch="):
            return requirement.partition(";")[0].partition("==")[2].strip()
    return "(unknown)"


def load() -> None:
    """Load the library, or say which torch it was built for, which one runs, and what to do."""
    try:
        torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        reason = "is missing" if not LIBRARY.exists() else f"cannot be loaded ({error})"
        raise ImportError(
            f"fused_mha: {LIBRARY} {reason}. Built for torch {built_for_torch()}; torch {torch.__version__} is "
            "running. A build fits one minor version of torch: install fused_mha again beside the torch that is to run "
            "(pip install --no-build-isolation --force-reinstall --no-deps, from its source folder)."
        ) from error
