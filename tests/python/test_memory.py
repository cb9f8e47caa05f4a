# SPDX-License-Identifier: BSD-3-Clause
"""No tensor of N*H*L*S elements is ever made: the peak memory of a fresh process bounds what a call adds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from fused_mha.functional import attention_with_weights

resource = pytest.importorskip("resource", reason="peak memory is read through getrusage")
if not sys.platform.startswith("linux"):
    pytest.skip("the resident set is read from /proc", allow_module_level=True)

# With these sizes a bool per score is 64 MiB and a float32 256 MiB; the averaged weights are 32 MiB.
N, H, L, S, E = 2, 8, 2048, 2048, 64
MIB = 2**20
# Room for results, gradients, packed operands and the allocator: O(N*H*(L+S)*D), a fifth of one bool per score.
ROOM = 12

MEASURE = f"""
import resource, torch, fused_mha
N, H, L, S, E = {N}, {H}, {L}, {S}, {E}
torch.set_num_threads(2)
ops = torch.ops.fused_mha

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def growth(function, make):
    function(*make(64, 64))
    arguments = make(L, S)
    ballast = torch.ones(max(0, peak() - resident()) // 4 + 1)
    before = peak()
    function(*arguments)
    print(peak() - before, ballast.numel())
"""

OPERATOR = """
def make(length, s):
    q, k, v = (torch.randn(N, x, H, E // H).transpose(1, 2).requires_grad_() for x in (length, s, s))
    padding = torch.arange(s) >= torch.tensor([[s], [s // 2]])
    return q, k, v, padding, MASK
"""


def measured_growth(program: str) -> float:
    """MiB that the call adds to the peak of a process that has run it on small inputs before."""
    source = textwrap.dedent(MEASURE) + textwrap.dedent(program)
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.split()[0]) / MIB


def operator_program(mask: str, call: str) -> str:
    body = "def run(q, k, v, padding, mask):\n" + textwrap.indent(textwrap.dedent(call), "    ")
    return OPERATOR.replace("MASK", mask) + body + "\ngrowth(run, make)\n"


BACKWARD = "torch.autograd.grad(output.sum(), (q, k, v))"


def test_measurement_sees_a_matrix_of_scores() -> None:
    """The stock way on the same sizes: without it the bounds below would say nothing."""
    call = f"""
    output = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
    {BACKWARD}
    """
    assert measured_growth(operator_program("None", call)) > N * H * L * S * 4 / MIB


@pytest.mark.parametrize(
    "mask",
    [
        "torch.ones(length, s, dtype=torch.bool).triu(1)",
        "torch.randn(N, 1, 1, s).expand(N, H, length, s)",
        "torch.zeros(length, s, dtype=torch.float64)",
    ],
    ids=["bool", "float_expanded", "float64"],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_forward_and_backward_with_both_masks(mask: str, dropout_p: float) -> None:
    """xformers#845, pytorch#150054: memory of masked attention grows with L, not with L * S."""
    call = f"""
    output = ops.attention(q, k, v, key_padding_mask=padding, attn_mask=mask, dropout_p={dropout_p})
    {BACKWARD}
    """
    assert measured_growth(operator_program(mask, call)) < ROOM


def test_gradient_of_a_broadcast_mask_is_reduced_in_the_kernel() -> None:
    call = """
    mask.requires_grad_()
    output = ops.attention(q, k, v, key_padding_mask=padding, attn_mask=mask)
    torch.autograd.grad(output.sum(), (q, k, v, mask))
    """
    assert measured_growth(operator_program("torch.randn(H, 1, s)", call)) < ROOM


def test_averaged_weights_cost_their_own_size_alone() -> None:
    call = f"""
    output, weights = ops.attention_with_weights(q, k, v, key_padding_mask=padding)
    {BACKWARD}
    """
    assert measured_growth(operator_program("None", call)) < N * L * S * 4 / MIB + ROOM


def test_gradient_through_averaged_weights() -> None:
    call = """
    output, weights = ops.attention_with_weights(q, k, v, key_padding_mask=padding)
    torch.autograd.grad((output.sum(), weights), (q, k, v), (None, weights.detach()))
    """
    assert measured_growth(operator_program("None", call)) < N * L * S * 4 / MIB + ROOM


@pytest.mark.parametrize("need_weights", [True, False])
def test_training_step_of_the_module(need_weights: bool) -> None:
    program = f"""
    module = fused_mha.MultiheadAttention(E, H, dropout=0.1, batch_first=True)

    def make(length, s):
        x = torch.randn(N, length, E, requires_grad=True)
        padding = torch.arange(s) >= torch.tensor([[s], [s // 2]])
        return x, padding, torch.ones(length, s, dtype=torch.bool).triu(1)

    def run(x, padding, mask):
        output, weights = module(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights={need_weights})
        torch.autograd.grad(output.sum(), [x, *module.parameters()])

    growth(run, make)
    """
    # Projections, context and their gradients are tensors of N*L*E each, a mebibyte.
    weights = N * L * S * 4 / MIB if need_weights else 0
    assert measured_growth(program) < weights + ROOM + 10 * N * L * E * 4 / MIB


def test_a_padding_mask_costs_next_to_nothing() -> None:
    """x-transformers#325: the peak with a padding mask and without differ by less than 2 MiB."""
    with_mask, without = (
        measured_growth(operator_program("None", f"output = ops.attention(q, k, v{padding})\n{BACKWARD}"))
        for padding in (", key_padding_mask=padding", "")
    )
    assert with_mask < without + 2


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="the system has no huge pages")
def test_large_results_ask_for_huge_pages() -> None:
    """malloc maps results of 32 MiB afresh for each call, and small pages cost a fault every 4 KiB."""
    query = torch.randn(1, 8, 1024, 8)
    _, weights = attention_with_weights(query, query, query, average_attn_weights=False)
    assert weights.nbytes == 32 * 2**20
    inside = weights.data_ptr() + weights.nbytes // 2
    flags = ""
    found = False
    with open("/proc/self/smaps") as file:
        for line in file:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                found = int(match[1], 16) <= inside < int(match[2], 16)
            elif found and line.startswith("VmFlags:"):
                flags = line
    assert " hg" in flags
