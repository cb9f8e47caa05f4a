# SPDX-License-Identifier: BSD-3-Clause
"""Forward results of the operators against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator

import fused_mha
import pytest
import reference
import torch
from cases import BY_NAME, CASES, DTYPES, Case, Inputs
from tolerances import assert_close_as_torch

ops = torch.ops.fused_mha
NAMES = ("attention", "attention_with_weights", "multi_head_attention_forward", "dropout_mask")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_weights(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs = case.make(dtype, device)
    expected, expected_weights = reference.attention(inputs.double())
    own_output = reference.torch_output(inputs)
    own_weights = reference.torch_output_and_weights(inputs)[1]

    output = ops.attention(*inputs.tensors(), **inputs.options())
    assert output.dtype == dtype
    assert output.device.type == device
    assert_close_as_torch(output, expected, own_output, what="output")

    same, weights = ops.attention_with_weights(*inputs.tensors(), **inputs.options(), average_attn_weights=False)
    assert weights.dtype == dtype
    assert_close_as_torch(same, expected, own_output, what="output beside weights")
    assert_close_as_torch(weights, expected_weights, own_weights, what="weights")

    same, averaged = ops.attention_with_weights(*inputs.tensors(), **inputs.options())
    assert averaged.dtype == dtype
    assert_close_as_torch(same, expected, own_output, what="output beside averaged weights")
    assert_close_as_torch(averaged, expected_weights.mean(1), own_weights.mean(1), what="averaged weights")


@pytest.mark.parametrize("name", ["head_dim_5", "head_dim_96", "float_inf_empty_row", "grouped_heads"])
def test_returning_weights_changes_no_output_beyond_rounding(name: str, device: str) -> None:
    inputs = BY_NAME[name].make(torch.float64, device)
    output = ops.attention(*inputs.tensors(), **inputs.options())
    for average in (True, False):
        same, _ = ops.attention_with_weights(*inputs.tensors(), **inputs.options(), average_attn_weights=average)
        torch.testing.assert_close(same, output, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mask_kind", ["none", "2d", "padding"])
def test_three_dimensional_inputs_have_one_head(mask_kind: str, device: str) -> None:
    case = Case("three_dimensional", N=3, H=1, L=5, S=7, D=8, Dv=9, padding="right", mask="float_inf")
    inputs = case.make(torch.float32, device)
    if mask_kind != "padding":
        inputs.key_padding_mask = None
    if mask_kind != "2d":
        inputs.attn_mask = None
    expected, expected_weights = reference.attention(inputs.double())
    squeezed = [t.squeeze(1) for t in inputs.tensors()]
    output = ops.attention(*squeezed, **inputs.options())
    assert_close_as_torch(output, expected.squeeze(1), what="output")
    for average in (True, False):
        same, weights = ops.attention_with_weights(*squeezed, **inputs.options(), average_attn_weights=average)
        assert_close_as_torch(same, expected.squeeze(1), what="output")
        assert_close_as_torch(weights, expected_weights.squeeze(1), what="weights")


def test_two_dimensional_inputs_are_one_sample(device: str) -> None:
    inputs = Case("two_dimensional", N=1, H=1, L=5, S=7, D=8, Dv=9, mask="float_inf").make(torch.float32, device)
    expected, expected_weights = reference.attention(inputs.double())
    squeezed = [t[0, 0] for t in inputs.tensors()]
    assert_close_as_torch(ops.attention(*squeezed, **inputs.options()), expected[0, 0], what="output")
    _, weights = ops.attention_with_weights(*squeezed, **inputs.options())
    assert_close_as_torch(weights, expected_weights[0, 0], what="weights")


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """Deterministic mode fills what at::empty gives; by luck it holds zeros otherwise."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("mask", ["float", "float_per_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes", [(0, 2, 3, 4), (0, 1, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 0, 0, 0)], ids=str
)
def test_any_size_may_be_zero(sizes: tuple[int, int, int, int], dtype: torch.dtype, mask: str, device: str) -> None:
    n, h, length, s = sizes
    case = Case("empty", N=n, H=h, L=length, S=s, D=8, Dv=5, padding="right", mask=mask)
    inputs = case.make(dtype, device).with_grad()
    output, weights = ops.attention_with_weights(*inputs.tensors(), **inputs.options(), average_attn_weights=False)
    assert output.shape == (n, h, length, 5)
    assert weights.shape == (n, h, length, s)
    assert torch.count_nonzero(output) == 0
    averaged = ops.attention_with_weights(*inputs.tensors(), **inputs.options())[1]
    assert averaged.shape == (n, length, s)
    assert h == 0 or torch.count_nonzero(averaged) == 0  # the mean over no heads is left open
    plain = ops.attention(*inputs.tensors(), **inputs.options())
    assert plain.shape == output.shape
    assert torch.count_nonzero(plain) == 0
    for result in (output.sum() + weights.sum(), plain.sum()):
        found = torch.autograd.grad(result, inputs.leaves(), allow_unused=True)
        for name, leaf, grad in zip(inputs.leaf_names(), inputs.leaves(), found, strict=True):
            assert grad is None or (grad.shape == leaf.shape and torch.count_nonzero(grad) == 0), name


def test_more_samples_than_a_grid_dimension_holds(device: str) -> None:
    inputs = Case("many_samples", N=70_000, H=1, L=2, S=3, D=4, padding="right").make(torch.float32, device)
    expected = reference.attention(inputs.double())[0]
    assert_close_as_torch(
        ops.attention(*inputs.tensors(), **inputs.options()), expected, reference.torch_output(inputs), what="output"
    )


def test_large_scores_do_not_overflow(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query = (300 * torch.randn(1, 2, 15, 64, generator=generator)).half().to(device)
    inputs = Inputs(query, query, query)
    output, weights = ops.attention_with_weights(*inputs.tensors(), average_attn_weights=False)
    assert_close_as_torch(output, reference.attention(inputs.double())[0], what="output")
    assert_close_as_torch(weights, reference.attention(inputs.double())[1], what="weights")


def test_float32_mask_keeps_its_precision_beside_bfloat16_inputs(device: str) -> None:
    """The biases differ by less than one bfloat16 step, so a converted mask would give uniform weights."""
    inputs = Case("precise_mask", L=3, S=4, D=8).make(torch.bfloat16, device)
    inputs.query = torch.zeros_like(inputs.query)
    inputs.attn_mask = (256 + torch.tensor([1.0, 2.0, 3.0, 4.0]).log()).to(device)
    _, weights = ops.attention_with_weights(*inputs.tensors(), attn_mask=inputs.attn_mask)
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).expand(2, 3, 4)
    assert_close_as_torch(weights, expected, what="weights")


def test_sums_are_kept_in_float32(device: str) -> None:
    """Adding 4096 times 1/4096 in bfloat16 would stop growing at a fraction of 1."""
    query = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, device=device)
    key = torch.zeros(1, 1, 4096, 8, dtype=torch.bfloat16, device=device)
    value = torch.ones(1, 1, 4096, 8, dtype=torch.bfloat16, device=device)
    output = ops.attention(query, key, value)
    assert torch.equal(output, torch.ones_like(output))


def test_result_does_not_depend_on_the_order_of_keys(device: str) -> None:
    inputs = BY_NAME["head_dim_33"].make(torch.float64, device)
    order = torch.randperm(inputs.key.shape[2], generator=torch.Generator().manual_seed(1)).to(device)
    output = ops.attention(*inputs.tensors(), key_padding_mask=inputs.key_padding_mask)
    shuffled = ops.attention(
        inputs.query,
        inputs.key[:, :, order],
        inputs.value[:, :, order],
        key_padding_mask=inputs.key_padding_mask[:, order],
    )
    torch.testing.assert_close(shuffled, output, rtol=1e-12, atol=1e-13)


def test_functional_wrappers_are_the_operators(device: str) -> None:
    inputs = BY_NAME["grouped_heads"].make(torch.float32, device)
    functional = fused_mha.functional
    assert torch.equal(
        functional.attention(*inputs.tensors(), **inputs.options()),
        ops.attention(*inputs.tensors(), **inputs.options()),
    )
    ours = functional.attention_with_weights(*inputs.tensors(), **inputs.options())
    plain = ops.attention_with_weights(*inputs.tensors(), **inputs.options())
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


@pytest.mark.parametrize("name", NAMES)
def test_operator_is_registered_with_a_schema(name: str) -> None:
    schema = getattr(ops, name).default._schema
    assert str(schema.name) == f"fused_mha::{name}"
    assert not schema.is_mutable
    assert callable(getattr(fused_mha.functional, name))
