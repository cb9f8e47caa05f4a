# SPDX-License-Identifier: BSD-3-Clause
"""Dropout: the keep mask is a pure function of the rng state and (n, h, l, s), and attention uses just that mask."""

from __future__ import annotations

import math

import fused_mha
import pytest
import reference
import torch
from cases import BY_NAME, DTYPES, Case
from tolerances import assert_close_as_torch

ops = torch.ops.fused_mha
P = 0.3


def draw(seed: int, device: str = "cpu") -> torch.Tensor:
    """The state that the next call with dropout draws after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return fused_mha.functional.draw_rng_state(device)


def keep_mask(state: torch.Tensor, *sizes: int, p: float = P) -> torch.Tensor:
    return ops.dropout_mask(state, *sizes, p)


def test_rng_state_is_two_integers_from_the_default_generator(device: str) -> None:
    state = draw(1, device)
    assert state.dtype == torch.int64
    assert state.shape == (2,)
    assert state.device.type == device
    assert torch.equal(state, draw(1, device))
    assert not torch.equal(state, draw(2, device))
    torch.manual_seed(1)
    fused_mha.functional.draw_rng_state(device)
    assert not torch.equal(fused_mha.functional.draw_rng_state(device), state), "each draw advances the generator"


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.95])
def test_mask_is_philox_of_the_position(p: float, device: str) -> None:
    state = torch.tensor([0x0123456789ABCDEF, 42], device=device)
    mask = keep_mask(state, 2, 3, 33, 300, p=p)
    assert mask.dtype == torch.bool
    assert mask.device.type == device
    assert torch.equal(mask.cpu(), reference.dropout_keep(state, 2, 3, 33, 300, p))


def test_mask_does_not_depend_on_the_sizes(device: str) -> None:
    state = draw(3, device)
    large = keep_mask(state, 3, 4, 65, 290)
    for n, h, length, s in ((1, 1, 1, 1), (2, 3, 31, 130), (3, 1, 65, 16), (1, 4, 2, 289)):
        assert torch.equal(keep_mask(state, n, h, length, s), large[:n, :h, :length, :s])


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_rate_is_within_binomial_bounds(p: float, device: str) -> None:
    mask = keep_mask(draw(4, device), 4, 8, 128, 257, p=p).double()

    def check(kept: torch.Tensor, count: int) -> None:
        # p acts in steps of 2^-16; 6 standard deviations over at most 257 numbers is one failure in 10^6 seeds.
        bound = 6 * math.sqrt(p * (1 - p) / count) + 2.0**-16
        assert float((kept - (1 - p)).abs().max()) < bound

    check(mask.mean(), mask.numel())
    for dim in range(4):
        others = [d for d in range(4) if d != dim]
        check(mask.mean(others), mask.numel() // mask.shape[dim])


def test_positions_are_independent(device: str) -> None:
    """Neighbours along each dimension, and other distances that a counter or a lane could repeat at, agree as often as
    independent coins do."""
    mask = keep_mask(draw(5, device), 4, 8, 128, 512, p=0.5)
    for dim in range(4):
        for step in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            if step >= mask.shape[dim]:
                continue
            length = mask.shape[dim] - step
            agree = (mask.narrow(dim, 0, length) == mask.narrow(dim, step, length)).double()
            bound = 6 * math.sqrt(0.25 / agree.numel())
            assert abs(float(agree.mean()) - 0.5) < bound, f"dimension {dim}, step {step}"


def test_seed_and_offset_both_matter(device: str) -> None:
    masks = [
        keep_mask(torch.tensor(state, device=device), 2, 2, 64, 128, p=0.5)
        for state in ((1, 1), (1, 2), (2, 1), (2, 2), (0, 0), (1 << 32, 1), (1, 1 << 32), (1 << 62, 1))
    ]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            agree = float((first == second).double().mean())
            assert abs(agree - 0.5) < 6 * math.sqrt(0.25 / first.numel())


def test_no_dropout_keeps_all_and_full_dropout_keeps_none(device: str) -> None:
    state = draw(6, device)
    assert keep_mask(state, 2, 2, 33, 65, p=0.0).all()
    assert not keep_mask(state, 2, 2, 33, 65, p=1.0).any()
    assert keep_mask(state, 2, 0, 3, 4).shape == (2, 0, 3, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["head_dim_33", "grouped_heads", "layout_lnhd", "causal_long", "one_query"])
def test_attention_drops_what_the_mask_says(name: str, dtype: torch.dtype, device: str) -> None:
    case = BY_NAME[name]
    inputs = case.make(dtype, device)
    keep = keep_mask(draw(7, device), case.N, case.H, case.L, case.S)
    expected, expected_weights = reference.attention(inputs.double(), keep=keep, dropout_p=P)
    own, own_weights = reference.torch_output_and_weights(inputs, keep=keep, dropout_p=P)
    calls = {
        "none": lambda: (ops.attention(*inputs.tensors(), **inputs.options(), dropout_p=P), None),
        "averaged": lambda: ops.attention_with_weights(*inputs.tensors(), **inputs.options(), dropout_p=P),
        "per_head": lambda: ops.attention_with_weights(
            *inputs.tensors(), **inputs.options(), dropout_p=P, average_attn_weights=False
        ),
    }
    for mode, call in calls.items():
        torch.manual_seed(7)
        output, weights = call()
        assert_close_as_torch(output, expected, own, what=f"output, weights {mode}")
        if mode == "averaged":
            assert_close_as_torch(weights, expected_weights.mean(1), own_weights.mean(1), what="averaged weights")
        if mode == "per_head":
            assert_close_as_torch(weights, expected_weights, own_weights, what="weights after dropout")
            assert torch.count_nonzero(weights[~keep]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["grouped_heads", "float_keys_4d", "layout_lnhd"])
def test_gradients_are_those_of_the_same_mask(name: str, dtype: torch.dtype, device: str) -> None:
    case = BY_NAME[name]
    inputs = case.make(dtype, device).with_grad()
    exact, own = inputs.double(), inputs.with_grad()
    keep = keep_mask(draw(8, device), case.N, case.H, case.L, case.S)
    expected, expected_weights = reference.attention(exact, keep=keep, dropout_p=P)
    own_output, own_weights = reference.torch_output_and_weights(own, keep=keep, dropout_p=P)
    torch.manual_seed(8)
    output, weights = ops.attention_with_weights(*inputs.tensors(), **inputs.options(), dropout_p=P)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator).to(dtype) for t in (output, weights)]
    found = reference.gradients(output, weights, *grads, inputs.leaves())
    wanted = reference.gradients(expected, expected_weights.mean(1), *grads, exact.leaves())
    yardstick = reference.gradients(own_output, own_weights.mean(1), *grads, own.leaves())
    for leaf_name, ours, theirs, torchs in zip(inputs.leaf_names(), found, wanted, yardstick, strict=True):
        assert_close_as_torch(
            ours, theirs, torchs, what=f"gradient of {leaf_name}", gradient=True, scale=0.5, dtype=dtype
        )


def test_same_mask_for_every_instruction_set(isa: str) -> None:
    state = torch.tensor([99, 3])
    assert torch.equal(keep_mask(state, 2, 2, 33, 200), reference.dropout_keep(state, 2, 2, 33, 200, P))
    case = Case("isa_dropout", L=33, S=200, D=20)
    inputs = case.make(torch.float32)
    keep = keep_mask(draw(9), case.N, case.H, case.L, case.S)
    torch.manual_seed(9)
    weights = ops.attention_with_weights(*inputs.tensors(), dropout_p=P, average_attn_weights=False)[1]
    assert torch.equal(weights != 0, keep)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_same_mask_for_every_number_of_threads(count: int, threads) -> None:
    threads(count)
    state = torch.tensor([5, 6])
    assert torch.equal(keep_mask(state, 2, 2, 65, 200), reference.dropout_keep(state, 2, 2, 65, 200, P))


def test_full_dropout_gives_zero_and_no_gradient(device: str) -> None:
    """pytorch#152028: dropout removes every weight, also beside empty rows."""
    inputs = BY_NAME["float_inf_empty_row"].make(torch.float32, device).with_grad()
    output, weights = ops.attention_with_weights(*inputs.tensors(), **inputs.options(), dropout_p=1.0)
    assert torch.count_nonzero(output) == 0
    assert torch.count_nonzero(weights) == 0
    ones = [torch.ones_like(t) for t in (output, weights)]
    for grad in reference.gradients(output, weights, *ones, inputs.leaves()):
        assert torch.count_nonzero(grad) == 0


def test_zero_dropout_leaves_the_generator_alone(device: str) -> None:
    inputs = BY_NAME["head_dim_5"].make(torch.float32, device)
    before = torch.get_rng_state()
    without = ops.attention(*inputs.tensors())
    assert torch.equal(ops.attention(*inputs.tensors(), dropout_p=0.0), without)
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_differ_until_the_seed_is_set_again(device: str) -> None:
    inputs = BY_NAME["head_dim_33"].make(torch.float32, device)
    torch.manual_seed(10)
    first = ops.attention(*inputs.tensors(), dropout_p=0.5)
    second = ops.attention(*inputs.tensors(), dropout_p=0.5)
    torch.manual_seed(10)
    again = ops.attention(*inputs.tensors(), dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_mean_over_many_draws_is_the_result_without_dropout(device: str) -> None:
    inputs = Case("mean", L=3, S=31, D=4).make(torch.float64, device)
    expected = ops.attention(*inputs.tensors())
    many = [t[:1].expand(4000, -1, -1, -1) for t in inputs.tensors()]
    draws = ops.attention(*many, dropout_p=P)
    deviation = draws.std(0) / math.sqrt(4000)
    assert ((draws.mean(0) - expected[0]).abs() < 6 * deviation).all()
    assert float(deviation.min()) > 0


def test_empty_rows_stay_zero_under_dropout(device: str) -> None:
    """pytorch#152028."""
    inputs = BY_NAME["whole_sample"].make(torch.float32, device).with_grad()
    output = ops.attention(*inputs.tensors(), **inputs.options(), dropout_p=0.5)
    assert torch.count_nonzero(output[-1]) == 0
    assert torch.isfinite(output).all()
    for grad in torch.autograd.grad(output.square().sum(), inputs.leaves()):
        assert torch.isfinite(grad).all()
        assert torch.count_nonzero(grad[-1]) == 0
