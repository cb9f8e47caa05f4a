# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile without graph breaks, for changing sizes, with the numbers of eager mode; torch.export."""

from __future__ import annotations

import fused_mha
import pytest
import torch
from cases import BY_NAME, later
from functorch.compile import aot_module_simplified, make_boxed_func
from torch._dynamo.testing import CompileCounterWithBackend

ops = torch.ops.fused_mha


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["head_dim_5", "grouped_heads", "layout_lnhd", "float_inf_empty_row"])
def test_operator(name: str, dynamic: bool, device: str) -> None:
    inputs = BY_NAME[name].make(torch.float32, device).with_grad()

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
def test_module(need_weights: bool, training: bool, device: str) -> None:
    module = fused_mha.MultiheadAttention(16, 4, batch_first=True, add_zero_attn=True, device=device).train(training)
    x, padding = torch.randn(2, 5, 16), torch.arange(5)[None, :] >= torch.tensor([[5], [3]])
    x, padding, mask = x.to(device), padding.to(device), later(5, 5).to(device)
    call = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": need_weights}
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(training):
        expected, found = module(x, x, x, **call), compiled(x, x, x, **call)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert (found[1] is None) == (not need_weights)
    if need_weights:
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


def test_changing_sizes_compile_once(device: str) -> None:
    """pytorch#97158: no guard on N, L or S."""
    module = fused_mha.MultiheadAttention(16, 4, batch_first=True, device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for n, length, s in ((2, 5, 7), (3, 9, 4), (5, 33, 65)):
        query, memory = torch.randn(n, length, 16, device=device), torch.randn(n, s, 16, device=device)
        padding = torch.rand(n, s, device=device) < 0.3
        found = compiled(query, memory, memory, key_padding_mask=padding)
        expected = module(query, memory, memory, key_padding_mask=padding)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        frames.append(counter.frame_count)
    assert frames[0] > 0
    assert frames == [frames[0]] * 3


class Counter:
    """A backend that runs graphs as they are and counts those of the forward and of the backward pass."""

    def __init__(self) -> None:
        self.graphs = {"forward": 0, "backward": 0}

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        return aot_module_simplified(
            graph, example_inputs, fw_compiler=self._compiler("forward"), bw_compiler=self._compiler("backward")
        )

    def _compiler(self, direction: str):
        def compiler(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
            self.graphs[direction] += 1
            return make_boxed_func(graph.forward)

        return compiler


def every_operator(query, key, value, sink, bias, score_weight, padding, rows, cu_seqlens):
    masks = {"key_padding_mask": padding, "attn_mask": bias}
    options = {**masks, "is_causal": True, "causal_alignment": "bottom_right", "sink": sink, "dropout_p": 0.25}
    output, lse = ops.attention_with_lse(query, key, value, **options)
    _, weights = ops.attention_with_weights(query, key, value, **options, weights_before_dropout=True)
    added, alignment = ops.additive_attention_with_weights(query, key, value, score_weight, **masks)
    packed = ops.attention_varlen(rows, rows, rows, cu_seqlens, cu_seqlens, sink=sink)
    return output, lse.exp(), weights, added, alignment, packed


def inputs_of_every_operator(n: int, length: int, s: int) -> list[torch.Tensor]:
    sizes = ((n, 4, length, 8), (n, 2, s, 8), (n, 2, s, 8), (4,), (length, s), (8,))
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    padding = torch.arange(s) >= torch.tensor([s, 1, 0, s - 1, 2])[:n, None]
    rows = torch.randn(length + s, 4, 8, requires_grad=True)
    return [*leaves, padding, rows, torch.tensor([0, length, length + s])]


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_training_step_of_every_operator_is_compiled_once(dynamic: bool | None) -> None:
    """Forward and backward graphs for all N, L, S; where PyTorch finds out by itself what changes, one more of each."""
    counter = Counter()
    compiled = torch.compile(every_operator, backend=counter, fullgraph=True, dynamic=dynamic)
    # The first sizes all differ: of equal ones PyTorch assumes that they stay equal.
    for n, length, s in ((5, 11, 7), (3, 9, 6), (4, 33, 65)):
        given = inputs_of_every_operator(n, length, s)
        results = []
        for function in (every_operator, compiled):
            torch.manual_seed(n)
            outputs = function(*given)
            leaves = [tensor for tensor in given if tensor.requires_grad]
            results.append((*outputs, *torch.autograd.grad(sum(one.square().sum() for one in outputs), leaves)))
        for ours, eager in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    times = 1 if dynamic else 2
    assert counter.graphs == {"forward": times, "backward": times}


def test_dropout_follows_the_seed_in_compiled_code(device: str) -> None:
    inputs = BY_NAME["head_dim_33"].make(torch.float32, device).with_grad()
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


def test_attribute_of_the_functional_forward(device: str) -> None:
    module = fused_mha.MultiheadAttention(8, 2, device=device)

    def function(x):
        return fused_mha.functional.multi_head_attention_forward(
            x, x, x, 8, 2, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0,
            module.out_proj.weight, module.out_proj.bias,
        )  # fmt: skip

    x = torch.randn(5, 3, 8, device=device)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x, x, x), rtol=1e-5, atol=1e-6)


def test_export_with_dynamic_sizes(device: str) -> None:
    """pytorch#156681: every operator has a fake kernel, so a program exports for any batch and length."""
    module = fused_mha.MultiheadAttention(16, 4, batch_first=True, device=device).eval()

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=64)
    example = (torch.randn(3, 5, 16, device=device), torch.zeros(3, 5, dtype=torch.bool, device=device))
    with torch.no_grad():
        program = torch.export.export(Wrapper(), example, dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}))
        x, padding = torch.randn(2, 9, 16), torch.arange(9)[None, :] >= torch.tensor([[9], [0]])
        x, padding = x.to(device), padding.to(device)
        expected = module(x, x, x, key_padding_mask=padding)[0]
        torch.testing.assert_close(program.module()(x, padding), expected, rtol=1e-5, atol=1e-6)


class EveryOperator(torch.nn.Module):
    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, sink, bias, score_weight, padding, rows, cu_seqlens = given
        masks = {"key_padding_mask": padding, "attn_mask": bias}
        output, lse = ops.attention_with_lse(query, key, value, **masks, sink=sink)
        added = ops.additive_attention(query, key, value, score_weight, **masks)
        return output, lse, added, ops.attention_varlen(rows, rows, rows, cu_seqlens, cu_seqlens, is_causal=True)


def test_a_package_of_aotinductor_holds_every_operator(tmp_path) -> None:
    """For sizes other than those of the example. tests/package runs such a package from C++."""
    n, length, s = (torch.export.Dim(name, min=2, max=99) for name in ("n", "length", "s"))
    total = torch.export.Dim("total", min=2, max=999)
    shapes = (
        {0: n, 2: length}, {0: n, 2: s}, {0: n, 2: s}, None, {0: length, 1: s}, None, {0: n, 1: s}, {0: total}, None,
    )  # fmt: skip
    example, others = (
        [tensor.detach() for tensor in inputs_of_every_operator(*sizes)] for sizes in ((3, 5, 7), (2, 9, 6))
    )
    program = torch.export.export(EveryOperator(), tuple(example), dynamic_shapes=(shapes,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "operators.pt2"))
    found = torch._inductor.aoti_load_package(package)(*others)
    for ours, eager in zip(found, EveryOperator()(*others), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
