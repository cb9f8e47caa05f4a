# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile without graph breaks, for changing sizes, with the numbers of eager mode; torch.export."""

from __future__ import annotations

import fused_mha
import pytest
import torch
from cases import BY_NAME, later
from torch._dynamo.testing import CompileCounterWithBackend

ops = torch.ops.fused_mha


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["head_dim_5", "grouped_heads", "layout_lnhd", "float_inf_empty_row"])
def test_operator(name: str, dynamic: bool) -> None:
    inputs = BY_NAME[name].make(torch.float32).with_grad()

    def function(query, key, value, key_padding_mask, attn_mask):
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        return ops.attention_with_weights(query, key, value, **masks, is_causal=inputs.is_causal)

    arguments = (*inputs.tensors(), inputs.key_padding_mask, inputs.attn_mask)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    expected, found = function(*arguments), compiled(*arguments)
    for ours, eager in zip(found, expected, strict=True):
        assert torch.equal(ours, eager)
        assert ours.stride() == eager.stride()
    for ours, eager in zip(
        torch.autograd.grad(found[0].sum() + found[1].square().sum(), inputs.leaves()),
        torch.autograd.grad(expected[0].sum() + expected[1].square().sum(), inputs.leaves()),
        strict=True,
    ):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_module(need_weights: bool, training: bool) -> None:
    module = fused_mha.MultiheadAttention(16, 4, batch_first=True, add_zero_attn=True).train(training)
    x, padding = torch.randn(2, 5, 16), torch.arange(5)[None, :] >= torch.tensor([[5], [3]])
    call = {"key_padding_mask": padding, "attn_mask": later(5, 5), "need_weights": need_weights}
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(training):
        expected, found = module(x, x, x, **call), compiled(x, x, x, **call)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert (found[1] is None) == (not need_weights)
    if need_weights:
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


def test_changing_sizes_compile_once() -> None:
    """pytorch#97158: no guard on N, L or S."""
    module = fused_mha.MultiheadAttention(16, 4, batch_first=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for n, length, s in ((2, 5, 7), (3, 9, 4), (5, 33, 65)):
        query, memory = torch.randn(n, length, 16), torch.randn(n, s, 16)
        padding = torch.rand(n, s) < 0.3
        found = compiled(query, memory, memory, key_padding_mask=padding)
        expected = module(query, memory, memory, key_padding_mask=padding)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        frames.append(counter.frame_count)
    assert frames[0] > 0
    assert frames == [frames[0]] * 3


def test_dropout_follows_the_seed_in_compiled_code() -> None:
    inputs = BY_NAME["head_dim_33"].make(torch.float32).with_grad()
    compiled = torch.compile(lambda *t: ops.attention(*t, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        output = compiled(*inputs.tensors())
        results.append((output.detach(), *torch.autograd.grad(output.square().sum(), inputs.tensors())))
    for first, again, other in zip(*results, strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    unmasked = ops.attention(*inputs.tensors())
    assert not torch.equal(results[0][0], unmasked), "dropout was compiled away"


def test_attribute_of_the_functional_forward() -> None:
    module = fused_mha.MultiheadAttention(8, 2)

    def function(x):
        return fused_mha.functional.multi_head_attention_forward(
            x, x, x, 8, 2, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0,
            module.out_proj.weight, module.out_proj.bias,
        )  # fmt: skip

    x = torch.randn(5, 3, 8)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x, x, x), rtol=1e-5, atol=1e-6)


def test_export_with_dynamic_sizes() -> None:
    """pytorch#156681: every operator has a fake kernel, so a program exports for any batch and length."""
    module = fused_mha.MultiheadAttention(16, 4, batch_first=True).eval()

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=64)
    example = (torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool))
    with torch.no_grad():
        program = torch.export.export(Wrapper(), example, dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}))
        x, padding = torch.randn(2, 9, 16), torch.arange(9)[None, :] >= torch.tensor([[9], [0]])
        expected = module(x, x, x, key_padding_mask=padding)[0]
        torch.testing.assert_close(program.module()(x, padding), expected, rtol=1e-5, atol=1e-6)
