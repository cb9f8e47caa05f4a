# SPDX-License-Identifier: BSD-3-Clause
"""Timing of several callables side by side: A B A B, so that what the machine does meanwhile meets all of them."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch

# Seconds; a faster callable is called several times a sample. Long enough that the wake-up of a thread pool that slept
# while other sides ran does not count as its work.
SHORTEST_SAMPLE = 10e-3


@dataclass(frozen=True)
class Summary:
    """Minimum and quartiles of the samples of one callable or probe."""

    minimum: float
    lower: float
    median: float
    upper: float
    maximum: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> "Summary":
        return cls(*(float(x) for x in np.quantile(samples, [0, 0.25, 0.5, 0.75, 1])), len(samples))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch, and so this library too, with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_threads(call: Callable[[], object], count: int) -> Callable[[], object]:
    def run() -> object:
        with threads(count):
            return call()

    return run


def finish(device: str) -> None:
    """Wait for what the calls have started; a CPU's are done when they return."""
    if device != "cpu":
        torch.cuda.synchronize()


def _seconds(call: Callable[[], object], calls: int, device: str) -> float:
    finish(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    finish(device)
    return (time.perf_counter() - begin) / calls


def _warm_up(call: Callable[[], object], device: str) -> int:
    """Call until the time settles; return the calls that one sample takes."""
    call()
    seconds = _seconds(call, 1, device)
    return max(1, math.ceil(SHORTEST_SAMPLE / max(seconds, 1e-7)))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def interleave(
    calls: Mapping[str, Callable[[], object]],
    probes: Mapping[str, Callable[[], float]] | None = None,
    *,
    device: str = "cpu",
    seconds: float = 1.0,
    least_rounds: int = 3,
    most_rounds: int = 200,
) -> dict[str, Summary]:
    """Time the calls in turn, round after round, for about `seconds` in all.

    A probe measures itself: what it returns is recorded instead of its time. A round of slow calls may take longer than
    the whole budget; `least_rounds` are run all the same.
    """
    probes = probes or {}
    calls_a_sample = {name: _warm_up(call, device) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in (*calls, *probes)}
    begin = time.perf_counter()
    with _no_garbage_collection():
        for done in range(most_rounds):
            if done >= least_rounds and time.perf_counter() - begin > seconds:
                break
            for name, call in calls.items():
                samples[name].append(_seconds(call, calls_a_sample[name], device))
            for name, probe in probes.items():
                samples[name].append(probe())
    return {name: Summary.of(values) for name, values in samples.items()}


def ratio(numerator: Summary, denominator: Summary) -> float:
    """How many times longer the one takes: of lower quartiles, which a disturbed sample does not move."""
    return numerator.lower / denominator.lower
