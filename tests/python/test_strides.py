# SPDX-License-Identifier: BSD-3-Clause
"""Inputs are read where they lie: any strides, no copies, 64-bit offsets; results keep the query's memory order."""

from __future__ import annotations

import itertools

import pytest
import reference
import torch
from cases import LAYOUTS, Case, Inputs
from tolerances import assert_close_as_torch

ops = torch.ops.fused_mha
COPIES = {"aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::cat", "aten::masked_fill_"}


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Dimensions from the slowest to the fastest."""
    return sorted(range(tensor.dim()), key=lambda i: -tensor.stride(i))


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.permute(memory_order(tensor)).is_contiguous()


def names_of_operators(function) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_result_and_gradients_keep_the_memory_order(order: tuple[int, ...], device: str) -> None:
    inverse = [order.index(i) for i in range(3)] + [3]

    def make(*sizes: int) -> torch.Tensor:
        return torch.randn([sizes[i] for i in order] + [sizes[3]], device=device).permute(inverse).requires_grad_()

    query, key, value = make(2, 3, 5, 8), make(2, 3, 7, 8), make(2, 3, 7, 9)
    output, _ = ops.attention_with_weights(query, key, value)
    plain = ops.attention(query, key, value)
    for result in (output, plain):
        assert is_dense(result)
        assert memory_order(result) == memory_order(query)
    for grad, leaf in zip(torch.autograd.grad(plain.sum(), (query, key, value)), (query, key, value), strict=True):
        assert is_dense(grad)
        assert memory_order(grad) == memory_order(leaf)


def test_result_of_a_sliced_query_is_dense(device: str) -> None:
    query = torch.randn(2, 9, 3, 20, device=device).transpose(1, 2)[:, :, 1::2, 4:12]
    output = ops.attention(query, query, query)
    assert is_dense(output)
    assert memory_order(output) == [0, 2, 1, 3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_copied(layout: str, device: str) -> None:
    """Neither inputs nor masks, forward or backward, whatever their strides and dtypes."""
    case = Case("copies", H=3, L=9, S=9, D=8, layout=layout, padding="transposed", mask="float64")
    inputs = case.make(torch.float32, device).with_grad()
    results = []
    forward = names_of_operators(lambda: results.append(ops.attention(*inputs.tensors(), **inputs.options())))
    assert "fused_mha::_attention_forward" in forward
    assert not forward & COPIES
    grad = torch.ones_like(results[0])
    backward = names_of_operators(lambda: torch.autograd.grad(results[0], inputs.leaves(), grad))
    assert "fused_mha::_attention_backward" in backward
    assert not backward & COPIES


def test_inputs_are_left_alone(device: str) -> None:
    inputs = Case("untouched", L=33, S=31, D=20, padding="float_inf", mask="float_full").make(torch.float32, device)
    inputs = inputs.with_grad()
    before = [t.detach().clone() for t in inputs.leaves()]
    versions = [t._version for t in inputs.leaves()]
    output, weights = ops.attention_with_weights(*inputs.tensors(), **inputs.options())
    torch.autograd.grad(output.sum() + weights.sum(), inputs.leaves())
    for leaf, old, version in zip(inputs.leaves(), before, versions, strict=True):
        assert torch.equal(leaf.detach(), old)
        assert leaf._version == version


def test_results_do_not_share_memory_with_inputs(device: str) -> None:
    query = torch.randn(1, 1, 1, 4, device=device)
    output = ops.attention(query, query, query)
    assert output.data_ptr() != query.data_ptr()
    assert torch.equal(output, query)


@pytest.mark.parametrize("which", ["query", "key", "value", "key_padding_mask", "attn_mask"])
def test_offsets_beyond_32_bits(which: str, device: str) -> None:
    """The second sample lies more than 2^31 elements behind the first. On the CPU untouched pages cost no memory."""
    case = Case("far", N=2, H=1, L=3, S=4, D=8, padding="scattered", mask="bool_per_sample")
    inputs = case.make(torch.bfloat16, device)
    near = getattr(inputs, which)
    stride = 2**31 + 64
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 2 * stride * near.element_size():
        pytest.skip("the GPU has too little memory")
    memory = torch.empty(stride + 4096, dtype=near.dtype, device=device)
    far = memory.as_strided(near.shape, (stride, *near.stride()[1:]))
    far.copy_(near)
    expected = ops.attention(*inputs.tensors(), **inputs.options())
    setattr(inputs, which, far)
    assert torch.equal(ops.attention(*inputs.tensors(), **inputs.options()), expected)


def test_same_tensor_three_times(device: str) -> None:
    """Gradients of self-attention without projections add up."""
    x = torch.randn(2, 2, 15, 8, dtype=torch.float64, device=device, requires_grad=True)
    exact = x.detach().cpu().requires_grad_()
    found = torch.autograd.grad(ops.attention(x, x, x, is_causal=True).square().sum(), x)[0]
    expected = reference.attention(Inputs(exact, exact, exact, is_causal=True))[0]
    wanted = torch.autograd.grad(expected.square().sum(), exact)[0]
    assert_close_as_torch(found, wanted, what="gradient", gradient=True)


def test_head_stride_zero_shares_keys(device: str) -> None:
    inputs = Case("shared", H=4, Hkv=1, L=15, S=31, D=8).make(torch.float32, device)
    grouped = ops.attention(*inputs.tensors())
    expanded = [inputs.query, *(t.expand(-1, 4, -1, -1) for t in (inputs.key, inputs.value))]
    assert expanded[1].stride(1) == 0
    assert torch.equal(ops.attention(*expanded), grouped)
