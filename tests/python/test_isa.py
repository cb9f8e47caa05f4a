# SPDX-License-Identifier: BSD-3-Clause
"""Every instruction set that this processor has, forced, gives results of the same quality."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from cases import BY_NAME, DTYPES, Case
from fused_mha import _C
from test_attention import test_output_and_weights as check_forward
from test_gradients import check_against_reference

pytestmark = pytest.mark.usefixtures("isa")

# Sizes around vector widths and tiles, each mask kind once, each layout that changes how rows are read.
FORWARD = (
    Case("sixteen", L=16, S=16, D=16),
    Case("seventeen", L=17, S=17, D=17, Dv=15, padding="scattered"),
    Case("seven", L=7, S=9, D=7, Dv=31, mask="float"),
    Case("tails", L=49, S=129, D=63, padding="right", mask="bool_full"),
    Case("two_tiles", N=1, L=97, S=257, D=64, is_causal=True),
    BY_NAME["one_of_everything"],
    BY_NAME["layout_columns"],
    BY_NAME["layout_wide_steps"],
    BY_NAME["layout_sliced"],
    BY_NAME["grouped_heads"],
    BY_NAME["float_inf_empty_row"],
    BY_NAME["mixed_float16"],
    BY_NAME["mixed_bfloat16"],
    BY_NAME["mixed_float64"],
    BY_NAME["head_dim_256"],
)
BACKWARD = (
    Case("seventeen", L=17, S=17, D=17, Dv=15, padding="scattered", mask="float"),
    Case("tails", L=49, S=129, D=63, padding="right", mask="float_full"),
    BY_NAME["layout_columns"],
    BY_NAME["grouped_heads"],
    BY_NAME["float_keys_4d"],
    BY_NAME["head_dim_160"],
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    check_forward(case, dtype, "cpu")


@pytest.mark.parametrize("weights_mode", ["none", "averaged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_backward(case: Case, dtype: torch.dtype, weights_mode: str) -> None:
    check_against_reference(case.make(dtype), weights_mode)


def test_threads_do_not_change_a_bit(threads) -> None:
    inputs = Case("threads", N=1, H=3, L=100, S=300, D=33, padding="scattered", mask="float").make(torch.float32)
    inputs = inputs.with_grad()
    results = []
    for count in (1, 2):
        threads(count)
        output = torch.ops.fused_mha.attention(*inputs.tensors(), **inputs.options())
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), inputs.leaves())])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_the_forced_set_is_the_active_one(isa: str) -> None:
    assert _C.get_cpu_isa() == isa


def test_an_unknown_name_is_refused(isa: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match="generic"):
        _C.set_cpu_isa("sse9")
    assert _C.get_cpu_isa() == isa


def test_environment_caps_the_choice(isa: str) -> None:
    program = "from fused_mha import _C; print(_C.get_cpu_isa())"
    environment = {**os.environ, "FUSED_MHA_MAX_ISA": isa}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert result.stdout.strip() == isa
