# SPDX-License-Identifier: BSD-3-Clause
"""Autocast converts query, key and value; masks are read in the dtype they have."""

from __future__ import annotations

import fused_mha
import pytest
import torch
from cases import BY_NAME, later

ops = torch.ops.fused_mha


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["head_dim_33", "grouped_heads", "causal_float"])
def test_operators(name: str, dtype: torch.dtype, device: str) -> None:
    inputs = BY_NAME[name].make(torch.float32, device)
    low = [t.to(dtype) for t in inputs.tensors()]
    expected = ops.attention_with_weights(*low, **inputs.options())
    with torch.autocast(device, dtype=dtype):
        found = ops.attention_with_weights(*inputs.tensors(), **inputs.options())
        plain = ops.attention(*inputs.tensors(), **inputs.options())
    assert plain.dtype == found[0].dtype == found[1].dtype == dtype
    assert torch.equal(plain, ops.attention(*low, **inputs.options()))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_mask_is_not_rounded(dtype: torch.dtype, device: str) -> None:
    """pytorch#99012: the biases differ by little more than one step of float16, and by less than one of bfloat16."""
    query, key = torch.zeros(1, 1, 2, 8, device=device), torch.zeros(1, 1, 4, 8, device=device)
    mask = (256 + torch.tensor([1.0, 2.0, 3.0, 4.0]).log()).to(device)
    with torch.autocast(device, dtype=dtype):
        weights = ops.attention_with_weights(query, key, key, attn_mask=mask)[1]
    torch.testing.assert_close(
        weights.float(), torch.tensor([0.1, 0.2, 0.3, 0.4], device=device).expand(1, 2, 4), rtol=0.005, atol=0.0
    )


def test_mixed_dtypes_are_brought_together(device: str) -> None:
    query, key = torch.randn(1, 1, 3, 8, device=device), torch.randn(1, 1, 5, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = ops.attention(query, key.bfloat16(), key)
    assert torch.equal(found, ops.attention(query.bfloat16(), key.bfloat16(), key.bfloat16()))


def test_gradients_have_the_dtype_of_their_inputs(device: str) -> None:
    inputs = BY_NAME["causal_float"].make(torch.float32, device).with_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        output = ops.attention(*inputs.tensors(), **inputs.options())
    low = inputs._map(lambda t: t.detach())
    low.query, low.key, low.value = (t.bfloat16() for t in low.tensors())
    low = low.with_grad()
    grad = torch.ones_like(output)
    found = torch.autograd.grad(output, inputs.leaves(), grad)
    expected = torch.autograd.grad(ops.attention(*low.tensors(), **low.options()), low.leaves(), grad)
    for ours, theirs, leaf in zip(found, expected, inputs.leaves(), strict=True):
        assert ours.dtype == leaf.dtype
        assert torch.equal(ours, theirs.to(leaf.dtype))


def test_disabled_autocast_changes_nothing(device: str) -> None:
    inputs = BY_NAME["head_dim_5"].make(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16), torch.autocast(device, enabled=False):
        assert torch.equal(ops.attention(*inputs.tensors()), ops.attention(*inputs.tensors()))
        assert ops.attention(*inputs.tensors()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_module(batch_first: bool, need_weights: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(1)
    ours = fused_mha.MultiheadAttention(16, 4, batch_first=batch_first).to(device)
    stock = torch.nn.MultiheadAttention(16, 4, batch_first=batch_first).to(device)
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(5, 5, 16, device=device)
    mask = torch.zeros(5, 5, device=device).masked_fill(later(5, 5).to(device), float("-inf"))
    with torch.autocast(device, dtype=dtype):
        found = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
        expected = stock(x, x, x, attn_mask=mask, need_weights=need_weights)
    assert found[0].dtype == expected[0].dtype == dtype
    torch.testing.assert_close(found[0], expected[0], rtol=0.03, atol=0.03)
    assert (found[1] is None) == (not need_weights)
    found[0].float().square().sum().backward()
    for parameter in ours.parameters():
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all()
