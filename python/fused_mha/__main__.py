# SPDX-License-Identifier: BSD-3-Clause
"""``python -m fused_mha``: what this build is, where it runs, and whether it computes what it should.

The exit status is 0 where every check passed. ``--no-check`` prints and checks nothing.
"""

import argparse
import itertools
import os
import platform
import sys
from typing import Any

import torch
from torch import Tensor

import fused_mha
from fused_mha import _C, _library, functional

# Sizes: tiles of rows and keys with rests, and few rows with keys that are split.
_SIZES = {"tiles": (2, 3, 65, 130, 20), "few rows": (1, 2, 2, 1100, 33)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# Largest error in epsilons, relative to the largest number of the reference.
_EPSILONS = 64


def main(arguments: list[str] | None = None) -> int:
    """Print the report; 0 if all checks passed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m fused_mha", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--no-check", action="store_true", help="print what the build is, check nothing")
    options = parser.parse_args(arguments)
    for name, text in _facts():
        print(f"{name:18} {text}")
    if options.no_check:
        return 0
    failures = 0
    for name, failed in _check_all():
        print(f"{'self-check ' + name:18} {'; '.join(failed) if failed else 'passed'}")
        failures += len(failed)
    return 1 if failures else 0


def _facts() -> list[tuple[str, str]]:
    info = _C.build_info()
    cap = os.environ.get("FUSED_MHA_MAX_ISA")
    supported = _C.supported_cpu_isas()
    return [
        ("fused_mha", f"{fused_mha.__version__} ({info['version']} in the library)"),
        ("library", str(_library.LIBRARY)),
        ("torch", f"{torch.__version__}, built for {info['torch_version']}"),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("compiler", info["compiler"]),
        ("build", f"{info['build_type'] or 'no build type'}, sanitizers: {info['sanitizers'] or 'none'}"),
        ("CUDA kernels", _cuda_text(info)),
        ("instruction sets", f"{', '.join(info['instruction_sets'])} built; {', '.join(supported)} run here"),
        ("in use", f"{_C.get_cpu_isa()}" + (f" (FUSED_MHA_MAX_ISA={cap})" if cap else "")),
        ("threads", str(torch.get_num_threads())),
    ]


def _cuda_text(info: dict[str, Any]) -> str:
    """Which CUDA kernels are built, and what they would run on here."""
    if not info["cuda"]:
        return "none built (FORCE_CUDA=1 builds them)"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    built = f"for {', '.join(info['cuda_architectures'])} by nvcc {info['cuda_version']}"
    return f"{built}; {', '.join(gpus) or 'no GPU here'}"


def _check_all() -> list[tuple[str, list[str]]]:
    """The failures of each instruction set, and of the CUDA kernels where they can run."""
    before = _C.get_cpu_isa()
    results = []
    try:
        for isa in _C.supported_cpu_isas():
            _C.set_cpu_isa(isa)
            results.append((isa, _check_on("cpu")))
    finally:
        _C.set_cpu_isa(before)
    if _C.build_info()["cuda"] and torch.cuda.is_available():
        results.append(("cuda", _check_on("cuda")))
    return results


def _check_on(device: str) -> list[str]:
    cases = itertools.product(_SIZES, _DTYPES)
    return [failure for sizes, dtype in cases for failure in _check(sizes, dtype, device)]


def _check(sizes: str, dtype: torch.dtype, device: str) -> list[str]:
    """Forward and backward against the formula in float64, with padding, a bias, causality, and an empty sample."""
    N, H, L, S, D = _SIZES[sizes]
    random = torch.Generator().manual_seed(0)
    shapes = ((N, H, L, D), (N, H, S, D), (N, H, S, D), (1, H, L, S))
    given = [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]
    cotangent = torch.randn(N, H, L, D, generator=random, dtype=torch.float64).to(dtype)
    padding = torch.rand(N, S, generator=random) < 0.4
    padding[-1] = padding[-1] | (N > 1)  # the last of several samples has no key at all
    failures = []
    for is_causal in (False, True):
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in given]
        exact = [tensor.double().requires_grad_() for tensor in given]
        *inputs, bias = leaves
        found = functional.attention(*inputs, key_padding_mask=padding.to(device), attn_mask=bias, is_causal=is_causal)
        wanted = _by_formula(exact, padding, is_causal)
        found_gradients = torch.autograd.grad(found, leaves, cotangent.to(device))
        wanted_gradients = torch.autograd.grad(wanted, exact, cotangent.double())
        names = ("output", "grad_query", "grad_key", "grad_value", "grad_attn_mask")
        for name, a, b in zip(names, (found, *found_gradients), (wanted, *wanted_gradients), strict=True):
            error = _error_in_epsilons(a.cpu(), b, dtype)
            if not error <= _EPSILONS:
                causal = ", causal" if is_causal else ""
                failures.append(f"{sizes}, {dtype}{causal}: {name} is off by {error:.3g} epsilons")
    return failures


def _by_formula(tensors: list[Tensor], padding: Tensor, is_causal: bool) -> Tensor:
    query, key, value, bias = tensors
    hidden = padding[:, None, None, :]
    if is_causal:
        hidden = hidden | torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1)
    scores = (query @ key.mT / query.size(-1) ** 0.5 + bias).masked_fill(hidden, float("-inf"))
    # A row that sees no key: softmax of anything finite, then nothing of it.
    weights = scores.masked_fill(hidden.all(-1, keepdim=True), 0.0).softmax(-1).masked_fill(hidden, 0.0)
    output: Tensor = weights @ value
    return output


def _error_in_epsilons(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    difference = (found.detach().double() - wanted.detach()).abs().max()
    return float(difference / (torch.finfo(dtype).eps * wanted.detach().abs().max()))


if __name__ == "__main__":
    sys.exit(main())
