# SPDX-License-Identifier: BSD-3-Clause
"""What the examples share: one model twice, its own attention and fused attention, compared and timed in turn.

Parity is the largest difference over the largest value. Calls alternate in one process, five times at least, and a time
is the lower quartile. A training step keeps the memory of its gradients and writes zeros there: how long the system
takes to hand over as much anew as a large model has parameters differs by half from step to step. Memory is the peak
that one call adds to the process, as the operating system counts it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import memory
import timing


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    parity: float
    stock_ms: float
    fused_ms: float
    stock_mib: float
    fused_mib: float

    def __str__(self) -> str:
        return (
            f"{self.name:<44}{self.parity:>9.1e}{self.stock_ms:>10.1f}{self.fused_ms:>10.1f}"
            f"{self.stock_ms / self.fused_ms:>8.2f}{self.stock_mib:>10.1f}{self.fused_mib:>10.1f}"
        )


HEADER = f"{'':<44}{'parity':>9}{'stock ms':>10}{'fused ms':>10}{'ratio':>8}{'stock MiB':>10}{'fused MiB':>10}"


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value; infinite where one side has a NaN."""
    largest = float((found - expected).abs().max() / expected.abs().max())
    return largest if largest == largest else float("inf")


def compare(
    name: str, stock: Callable[[], Tensor], fused: Callable[[], Tensor], seconds: float, parity: float | None = None
) -> Row:
    """Run both; `parity` where their results do not say it."""
    if parity is None:
        parity = difference(fused(), stock())
    times = timing.interleave({"stock": stock, "fused": fused}, seconds=seconds, least_rounds=5 if seconds else 1)
    peaks = extra_mebibytes(stock), extra_mebibytes(fused)
    return Row(name, parity, 1e3 * times["stock"].lower, 1e3 * times["fused"].lower, *peaks)


def extra_mebibytes(call: Callable[[], object]) -> float:
    """The peak that a call adds; NaN where the system does not say."""
    peak = memory.extra_peak(call)
    return float("nan") if peak is None else peak / memory.MIB


def compare_models(
    name: str, stock: nn.Module, fused: nn.Module, run: Callable[[nn.Module], Tensor], seconds: float
) -> list[Row]:
    """Inference, and a training step's outputs and gradients, with dropout off."""

    def infer(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return run(model)

    def step(model: nn.Module) -> Tensor:
        model.zero_grad(set_to_none=False)
        output = run(model)
        # A sum with uneven signs: that of squares hardly moves behind a layer norm.
        output.backward(torch.linspace(-1.0, 1.0, output.numel()).sin().view_as(output))
        return output.detach()

    for model in (stock, fused):
        model.eval()
    rows = [compare(f"{name}, inference", lambda: infer(stock), lambda: infer(fused), seconds)]
    for model in (stock, fused):
        model.train()
    outputs = difference(step(fused), step(stock))
    gradients = difference(gradient(fused), gradient(stock))
    parity = max(outputs, gradients)
    rows.append(compare(f"{name}, training step", lambda: step(stock), lambda: step(fused), seconds, parity))
    return rows


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def print_table(rows: list[Row]) -> None:
    print(HEADER)
    for row in rows:
        print(row)


def all_agree(rows: list[Row], tolerance: float = 1e-4) -> bool:
    return all(row.parity < tolerance for row in rows)
