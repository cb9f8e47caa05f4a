# SPDX-License-Identifier: BSD-3-Clause
"""First-order gradients of every input, float masks in their own broadcast shape, and through returned weights."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from cases import BY_NAME, DTYPES, Case, Inputs
from tolerances import assert_close_as_torch

ops = torch.ops.fused_mha

# Cases whose gradients differ in kind: the others repeat them with other head dims.
GRADIENT_CASES = [
    BY_NAME[name]
    for name in (
        "one_of_everything",
        "two_and_three",
        "head_dim_5",
        "head_dim_33",
        "head_dim_64",
        "head_dim_80",
        "head_dim_160",
        "one_query",
        "one_key",
        "value_dim_wider",
        "value_dim_1",
        "grouped_heads",
        "one_kv_head",
        "scale",
        "layout_nlhd",
        "layout_lnhd",
        "layout_sliced",
        "layout_columns",
        "layout_expanded_batch",
        "layout_expanded_heads",
        "layout_expanded_rows",
        "whole_sample",
        "hidden_head",
        "causal_long",
        "bool_full_left",
        "causal_float",
        "float_inf_empty_row",
        "float_rows",
        "float_keys_1d",
        "float_keys_4d",
        "mixed_float16",
        "mixed_bfloat16",
        "mixed_float64",
    )
]


def incoming(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A fixed incoming gradient, exact in `dtype`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_against_reference(inputs: Inputs, weights_mode: str) -> None:
    """Every gradient of `inputs`, with an incoming gradient for the output and, by mode, for the weights."""
    inputs, exact = inputs.with_grad(), inputs.double()
    own = inputs.with_grad()
    expected, expected_weights = reference.attention(exact)
    own_output, own_weights = reference.torch_output_and_weights(own)
    if weights_mode == "none":
        output, weights = ops.attention(*inputs.tensors(), **inputs.options()), None
        own_output = reference.torch_output(own)
    else:
        average = weights_mode == "averaged"
        output, weights = ops.attention_with_weights(
            *inputs.tensors(), **inputs.options(), average_attn_weights=average
        )
        if average:
            expected_weights, own_weights = expected_weights.mean(1), own_weights.mean(1)
    grad_output = incoming(expected.shape, output.dtype, 1)
    grad_weights = None if weights is None else incoming(expected_weights.shape, output.dtype, 2)
    found = reference.gradients(output, weights, grad_output, grad_weights, inputs.leaves())
    wanted = reference.gradients(expected, expected_weights, grad_output, grad_weights, exact.leaves())
    yardstick = reference.gradients(own_output, own_weights, grad_output, grad_weights, own.leaves())
    for name, leaf, ours, theirs, torchs in zip(
        inputs.leaf_names(), inputs.leaves(), found, wanted, yardstick, strict=True
    ):
        assert ours.dtype == leaf.dtype
        assert ours.device == leaf.device
        # A gradient can be a sum that cancels, as with one key: its rounding is as large as its terms are, and the
        # gradients of the other inputs tell how large.
        scale = max(float(g.abs().max()) if g.numel() else 0.0 for g in wanted)
        assert_close_as_torch(
            ours, theirs, torchs, what=f"gradient of {name}", gradient=True, scale=scale, dtype=output.dtype
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_gradients(case: Case, dtype: torch.dtype, device: str) -> None:
    check_against_reference(case.make(dtype, device), "none")


@pytest.mark.parametrize("weights_mode", ["averaged", "per_head"])
@pytest.mark.parametrize("case", GRADIENT_CASES[::2], ids=str)
def test_gradients_through_weights(case: Case, weights_mode: str, device: str) -> None:
    check_against_reference(case.make(torch.float32, device), weights_mode)


@pytest.mark.parametrize("weights_mode", ["averaged", "per_head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gradients_through_weights_in_other_dtypes(dtype: torch.dtype, weights_mode: str, device: str) -> None:
    check_against_reference(BY_NAME["grouped_heads"].make(dtype, device), weights_mode)


@pytest.mark.parametrize("average", [True, False])
def test_gradient_through_weights_alone(average: bool, device: str) -> None:
    inputs = BY_NAME["float_keys_4d"].make(torch.float32, device).with_grad()
    exact = inputs.double()
    _, weights = ops.attention_with_weights(*inputs.tensors(), **inputs.options(), average_attn_weights=average)
    expected = reference.attention(exact)[1]
    expected = expected.mean(1) if average else expected
    grad = incoming(expected.shape, torch.float32, 3)
    found = reference.gradients(weights, None, grad, None, inputs.leaves())
    wanted = reference.gradients(expected, None, grad, None, exact.leaves())
    for name, ours, theirs in zip(inputs.leaf_names(), found, wanted, strict=True):
        assert_close_as_torch(ours, theirs, what=f"gradient of {name}", gradient=True, scale=0.1)
    assert torch.count_nonzero(found[2]) == 0, "the value takes no part in the weights"


@pytest.mark.parametrize("wanted_name", ["query", "key", "value", "key_padding_mask", "attn_mask"])
def test_one_input_alone_may_require_a_gradient(wanted_name: str, device: str) -> None:
    """pytorch#148476: a learned bias over frozen projections."""
    inputs = BY_NAME["causal_float"].make(torch.float32, device)
    exact = inputs.double()
    wanted = reference.gradients(
        reference.attention(exact)[0], None, torch.ones(2, 2, 33, 8), None, [getattr(exact, wanted_name)]
    )[0]
    leaf = getattr(inputs, wanted_name).detach().requires_grad_()
    setattr(inputs, wanted_name, leaf)
    output = ops.attention(*inputs.tensors(), **inputs.options())
    assert output.requires_grad
    found = torch.autograd.grad(output.sum(), leaf)[0]
    assert_close_as_torch(found, wanted, what=f"gradient of {wanted_name}", gradient=True, scale=1.0)


@pytest.mark.parametrize(
    "shape", [(), (7,), (1, 7), (5, 1), (5, 7), (3, 5, 7), (3, 1, 1), (2, 1, 1, 7), (1, 3, 5, 1), (2, 3, 5, 7)], ids=str
)
def test_mask_gradient_has_the_shape_of_the_mask(shape: tuple[int, ...], device: str) -> None:
    inputs = Case("mask_shape", H=3, L=5, S=7, D=8).make(torch.float64, device)
    inputs.attn_mask = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).to(device)
    check_against_reference(inputs, "none")


def test_unused_results_have_no_part_in_the_gradient(device: str) -> None:
    inputs = BY_NAME["head_dim_5"].make(torch.float64, device).with_grad()
    output, _ = ops.attention_with_weights(*inputs.tensors(), **inputs.options())
    plain = ops.attention(*inputs.tensors(), **inputs.options())
    found = torch.autograd.grad(output.sum(), inputs.tensors())
    expected = torch.autograd.grad(plain.sum(), inputs.tensors())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_hidden_keys_get_a_gradient_of_exactly_zero(device: str) -> None:
    inputs = BY_NAME["head_dim_33"].make(torch.float32, device).with_grad()
    output, weights = ops.attention_with_weights(*inputs.tensors(), **inputs.options())
    found = torch.autograd.grad(output.square().sum() + weights.square().sum(), inputs.tensors())
    hidden = inputs.key_padding_mask[:, None, :, None]
    for grad in found[1:]:
        assert torch.count_nonzero(grad.masked_select(hidden)) == 0
        assert torch.count_nonzero(grad.masked_select(~hidden)) > 0


def test_minus_infinity_in_a_mask_gets_a_gradient_of_exactly_zero(device: str) -> None:
    inputs = BY_NAME["float_inf_empty_row"].make(torch.float32, device).with_grad()
    output = ops.attention(*inputs.tensors(), **inputs.options())
    grad = torch.autograd.grad(output.square().sum(), inputs.attn_mask)[0]
    hidden = inputs.attn_mask == -math.inf
    assert torch.count_nonzero(grad[hidden]) == 0
    assert torch.count_nonzero(grad[~hidden]) > 0


def test_no_gradient_is_recorded_where_nobody_asks(device: str) -> None:
    inputs = BY_NAME["head_dim_5"].make(torch.float32, device)
    assert not ops.attention(*inputs.tensors()).requires_grad
    with torch.no_grad():
        assert not ops.attention(*inputs.with_grad().tensors()).requires_grad
    with torch.inference_mode():
        assert torch.equal(ops.attention(*inputs.tensors()), ops.attention(*inputs.with_grad().tensors()))


def test_incoming_gradient_may_have_any_strides(device: str) -> None:
    inputs = BY_NAME["layout_nlhd"].make(torch.float64, device).with_grad()
    output = ops.attention(*inputs.tensors(), **inputs.options())
    grad = incoming(tuple(output.shape), torch.float64, 5).to(device)
    expected = torch.autograd.grad(output, inputs.tensors(), grad, retain_graph=True)
    strided = grad.transpose(0, 3).contiguous().transpose(0, 3)
    assert strided.stride() != grad.stride()
    found = torch.autograd.grad(output, inputs.tensors(), strided, retain_graph=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    spread = torch.autograd.grad(output.sum(), inputs.tensors(), retain_graph=True)
    ones = torch.autograd.grad(output, inputs.tensors(), torch.ones_like(output))
    for ours, theirs in zip(spread, ones, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


GRADCHECK_MASKS = ["", "causal", "float", "float_inf_empty_row", "float_full", "float_per_head", "bool_full"]


@pytest.mark.parametrize("padding", ["", "whole_sample", "float_inf"])
@pytest.mark.parametrize("mask", GRADCHECK_MASKS)
def test_gradcheck(mask: str, padding: str, device: str) -> None:
    case = Case("gradcheck", L=3, S=4, D=3, Dv=2, padding=padding, mask=mask, is_causal=mask == "float_full")
    inputs = case.make(torch.float64, device)
    if inputs.attn_mask is not None and inputs.attn_mask.is_floating_point():
        inputs.attn_mask = inputs.attn_mask.double()
    if inputs.key_padding_mask is not None and inputs.key_padding_mask.is_floating_point():
        inputs.key_padding_mask = inputs.key_padding_mask.double()
    inputs = inputs.with_grad()
    names = inputs.leaf_names()

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {**inputs.options(), **dict(zip(names, leaves, strict=True))}
        arguments = [given.pop(name) for name in ("query", "key", "value")]
        averaged = ops.attention_with_weights(*arguments, **given)
        per_head = ops.attention_with_weights(*arguments, **given, average_attn_weights=False)
        return ops.attention(*arguments, **given), averaged[0], averaged[1], per_head[1]

    assert torch.autograd.gradcheck(function, inputs.leaves())


def test_gradcheck_grouped_heads_and_scale(device: str) -> None:
    inputs = Case("gradcheck_grouped", H=4, Hkv=2, L=3, S=3, D=3).make(torch.float64, device).with_grad()
    assert torch.autograd.gradcheck(lambda *t: ops.attention(*t, scale=0.4), inputs.leaves())


def test_gradcheck_with_dropout(device: str) -> None:
    inputs = Case("gradcheck_dropout", L=3, S=5, D=3).make(torch.float64, device).with_grad()

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(5)
        return ops.attention_with_weights(*leaves, dropout_p=0.4, average_attn_weights=False)

    assert torch.autograd.gradcheck(function, inputs.leaves())
