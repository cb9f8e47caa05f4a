# SPDX-License-Identifier: BSD-3-Clause
"""Additive attention beside the same expression in PyTorch's operators: time, and memory beside what was there before.

python benchmarks/additive.py
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from fused_mha import _C
from fused_mha.functional import additive_attention
from memory import extra_peak
from timing import interleave, ratio
from torch import Tensor


class Case(NamedTuple):
    N: int
    L: int
    S: int
    D: int
    dtype: torch.dtype = torch.float32


CASES = (
    Case(16, 128, 128, 128),
    Case(8, 256, 256, 128),
    Case(8, 256, 256, 128, torch.bfloat16),
    Case(4, 128, 128, 128, torch.float64),
    Case(64, 1, 64, 256),
)


def unfused(query: Tensor, key: Tensor, value: Tensor, score_weight: Tensor) -> Tensor:
    scores = torch.tanh(query.unsqueeze(2) + key.unsqueeze(1)) @ score_weight
    return scores.softmax(-1) @ value


def sides(case: Case, backward: bool) -> dict[str, Callable[[], object]]:
    lengths = (case.L, case.S, case.S)
    leaves = [torch.randn(case.N, n, case.D, dtype=case.dtype, requires_grad=backward) for n in lengths]
    leaves.append(torch.randn(case.D, dtype=case.dtype, requires_grad=backward))
    grad = torch.randn(case.N, case.L, case.D, dtype=case.dtype)

    def side(function: Callable[..., Tensor]) -> Callable[[], object]:
        if backward:
            return lambda: torch.autograd.grad(function(*leaves), leaves, grad)
        return lambda: function(*leaves)

    return {"ours": side(additive_attention), "torch": side(unfused)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each row")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    isa = _C.get_cpu_isa()
    print(f"torch {torch.__version__}, {arguments.threads} threads, {isa}; MiB beside what was there before")
    print("| N, L, S, D | dtype | pass | ours | torch | ratio | ours, MiB | torch, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        for backward in (False, True):
            calls = sides(case, backward)
            times = interleave(calls, seconds=arguments.seconds)
            peaks = {name: extra_peak(call) or 0 for name, call in calls.items()}
            print(
                f"| {case.N}, {case.L}, {case.S}, {case.D} | {str(case.dtype).removeprefix('torch.')} "
                f"| {'both' if backward else 'forward'} "
                f"| {1e3 * times['ours'].median:.2f} ms | {1e3 * times['torch'].median:.2f} ms "
                f"| {ratio(times['torch'], times['ours']):.1f} "
                f"| {peaks['ours'] / 2**20:.1f} | {peaks['torch'] / 2**20:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
