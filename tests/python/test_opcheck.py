# SPDX-License-Identifier: BSD-3-Clause
"""torch.library.opcheck: schemas tell the truth, meta kernels agree with real ones, tracing works."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Inputs

ops = torch.ops.fused_mha

SAMPLES = {
    "plain": Case("plain", H=2, L=3, S=5, D=4, Dv=6),
    "nlhd": Case("nlhd", H=3, L=3, S=3, D=4, layout="nlhd", is_causal=True),
    "grouped_masks": Case("grouped_masks", H=4, Hkv=2, L=3, S=5, D=4, padding="float_inf", mask="float_per_head"),
    "bool_masks": Case("bool_masks", L=5, S=4, D=3, padding="right", mask="bool_full"),
    "empty": Case("empty", N=0, L=3, S=5, D=4, padding="float", mask="float"),
    "no_keys": Case("no_keys", L=3, S=0, D=4),
}


def make(name: str, requires_grad: bool, device: str) -> Inputs:
    inputs = SAMPLES[name].make(torch.float32, device)
    return inputs.with_grad() if requires_grad else inputs


def private_arguments(inputs: Inputs, dropout_p: float, weights_mode: int) -> tuple[object, ...]:
    mask = inputs.attn_mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    state = torch.tensor([7, 11], device=inputs.query.device) if dropout_p > 0 else None
    masks = (inputs.key_padding_mask, mask)
    return (*inputs.tensors(), *masks, inputs.is_causal, dropout_p, 0.5, state, 0, weights_mode)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_public_operators(name: str, requires_grad: bool, device: str) -> None:
    inputs = make(name, requires_grad, device)
    torch.library.opcheck(ops.attention.default, inputs.tensors(), inputs.options())
    torch.library.opcheck(ops.attention_with_weights.default, inputs.tensors(), inputs.options())
    options = {**inputs.options(), "average_attn_weights": False}
    torch.library.opcheck(ops.attention_with_weights.default, inputs.tensors(), options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("weights_mode", [0, 1, 2])
@pytest.mark.parametrize("name", SAMPLES)
def test_private_forward(name: str, weights_mode: int, dropout_p: float, device: str) -> None:
    for requires_grad in (False, True):
        inputs = make(name, requires_grad, device)
        torch.library.opcheck(ops._attention_forward.default, private_arguments(inputs, dropout_p, weights_mode))


@pytest.mark.parametrize("weights_mode", [0, 1, 2])
@pytest.mark.parametrize("name", SAMPLES)
def test_private_backward(name: str, weights_mode: int, device: str) -> None:
    inputs = make(name, requires_grad=False, device=device)
    query, key, value, padding, mask, *rest = private_arguments(inputs, 0.5, weights_mode)
    output, weights, row_max, row_sum = ops._attention_forward(query, key, value, padding, mask, *rest)
    assert row_max.shape == row_sum.shape == query.shape[:3]
    grad_weights = torch.randn_like(weights) if weights_mode else None
    wanted = [True, True, True, *(m is not None and m.is_floating_point() for m in (padding, mask)), False]
    saved = (query, key, value, padding, mask, output, row_max, row_sum)
    torch.library.opcheck(
        ops._attention_backward.default, (torch.randn_like(output), grad_weights, *saved, *rest, wanted)
    )


def test_dropout_mask(device: str) -> None:
    torch.library.opcheck(ops.dropout_mask.default, (torch.tensor([1, 2], device=device), 2, 3, 4, 5, 0.3))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("extra", [True, False])
def test_projected_attention_and_the_whole_forward(
    extra: bool, need_weights: bool, batch_first: bool, device: str
) -> None:
    embed, heads = 8, 2
    query, key = (torch.randn(3, 3, embed, device=device, requires_grad=True) for _ in range(2))
    bias = torch.randn(1, 1, embed, device=device, requires_grad=True) if extra else None
    padding, mask = torch.zeros(3, 3, dtype=torch.bool, device=device), torch.zeros(3, 3, device=device)
    torch.library.opcheck(
        ops._multi_head_attention_projected.default,
        (query, key, key, heads, bias, bias, extra, 0.0, padding, need_weights, mask, True, False, batch_first),
    )
    sizes = ((3 * embed, embed), (3 * embed,), (embed, embed), (embed,))
    weights = [torch.randn(size, device=device, requires_grad=True) for size in sizes]
    torch.library.opcheck(
        ops.multi_head_attention_forward.default,
        (query, key, key, embed, heads, weights[0], weights[1], bias, bias, extra, 0.0, weights[2], weights[3]),
        {"key_padding_mask": padding, "need_weights": need_weights, "batch_first": batch_first},
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_meta_tensors_get_the_right_shapes_and_strides(name: str, device: str) -> None:
    inputs = make(name, requires_grad=False, device=device)
    real = ops.attention_with_weights(*inputs.tensors(), **inputs.options())
    meta = inputs._map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))
    traced = ops.attention_with_weights(*meta.tensors(), **meta.options())
    for ours, expected in zip(traced, real, strict=True):
        assert ours.device.type == "meta"
        assert ours.dtype == expected.dtype
        assert ours.shape == expected.shape
        assert ours.stride() == expected.stride()
