# SPDX-License-Identifier: BSD-3-Clause
"""The same inputs give the same bits, run after run and whatever the number of threads."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, Case

ops = torch.ops.fused_mha

# Shapes that tempt a scheduler: many tiles, one head (keys or rows split over threads), one query, shared masks.
CASES = (
    Case("many_tiles", H=3, L=200, S=210, D=64, padding="scattered", mask="float"),
    Case("one_head", N=1, H=1, L=300, S=500, D=32, is_causal=True),
    Case("one_query", N=1, H=2, L=1, S=3000, D=64, padding="right"),
    Case("few_queries", N=1, H=1, L=5, S=2000, D=40, mask="float_keys_4d"),
    Case("few_keys", N=1, H=1, L=2000, S=5, D=40, mask="float_rows"),
    Case("grouped", N=2, H=4, Hkv=1, L=100, S=130, D=33, padding="float_inf", mask="float_per_head"),
    Case("empty_rows", N=5, H=3, L=65, S=65, D=16, padding="whole_sample", mask="bool_full"),
)


def everything(case: Case, dtype: torch.dtype, device: str, dropout_p: float) -> list[torch.Tensor]:
    """Both results of the weights operator, the plain output, and all gradients."""
    inputs = case.make(dtype, device).with_grad()
    torch.manual_seed(3)
    output, weights = ops.attention_with_weights(*inputs.tensors(), **inputs.options(), dropout_p=dropout_p)
    torch.manual_seed(3)
    plain = ops.attention(*inputs.tensors(), **inputs.options(), dropout_p=dropout_p)
    grads = torch.autograd.grad(plain.square().sum(), inputs.leaves())
    with_weights = torch.autograd.grad(output.square().sum() + weights.square().sum(), inputs.leaves())
    return [output.detach(), weights.detach(), plain.detach(), *grads, *with_weights]


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_do_not_change_a_bit(case: Case, dtype: torch.dtype, dropout_p: float, threads) -> None:
    threads(1)
    expected = everything(case, dtype, "cpu", dropout_p)
    for count in (2, 3, 2):
        threads(count)
        for i, (ours, first) in enumerate(zip(everything(case, dtype, "cpu", dropout_p), expected, strict=True)):
            assert torch.equal(ours, first), f"tensor {i} with {count} threads"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_do_not_differ_in_a_bit(case: Case, device: str) -> None:
    expected = everything(case, torch.float32, device, 0.2)
    for _ in range(3):
        for ours, first in zip(everything(case, torch.float32, device, 0.2), expected, strict=True):
            assert torch.equal(ours, first)


def test_deterministic_algorithms_are_no_obstacle(device: str) -> None:
    expected = everything(CASES[0], torch.float32, device, 0.2)
    torch.use_deterministic_algorithms(True)
    try:
        found = everything(CASES[0], torch.float32, device, 0.2)
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, first in zip(found, expected, strict=True):
        assert torch.equal(ours, first)


@pytest.mark.parametrize("name", ["head_dim_33", "grouped_heads", "float_keys_4d"])
def test_a_sample_does_not_depend_on_its_neighbours(name: str, device: str) -> None:
    inputs = BY_NAME[name].make(torch.float32, device)
    together = ops.attention(*inputs.tensors(), **inputs.options())
    alone = {**inputs.options()}
    if alone["key_padding_mask"] is not None:
        alone["key_padding_mask"] = alone["key_padding_mask"][1:]
    assert torch.equal(ops.attention(*(t[1:] for t in inputs.tensors()), **alone), together[1:])
