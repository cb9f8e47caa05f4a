# SPDX-License-Identifier: BSD-3-Clause
"""Compiled autograd: backward passes of eager forward passes as graphs, in which the fused kernels are called."""

from __future__ import annotations

import copy
from collections.abc import Callable

import fused_mha
import pytest
import torch
from torch._dynamo import compiled_autograd

ops = torch.ops.fused_mha


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


N, H, L, S, D = 2, 4, 5, 7, 3


def leaves(n: int = N, length: int = L, s: int = S) -> dict[str, torch.Tensor]:
    sizes = {
        "query": (n, H, length, D),
        "key": (n, 2, s, D),
        "value": (n, 2, s, D + 1),
        "bias": (H, length, s),
        "sink": (H,),
        "score_weight": (H, D),
        "rows": (length + s, H, D),
    }
    return {name: torch.randn(size, dtype=torch.float64, requires_grad=True) for name, size in sizes.items()}


def padding(t: dict[str, torch.Tensor]) -> torch.Tensor:
    n, s = t["key"].size(0), t["key"].size(2)
    return torch.arange(s) >= torch.tensor([s, 0, 1])[:n, None]


def three(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return t["query"], t["key"], t["value"]


def packed(t: dict[str, torch.Tensor]) -> torch.Tensor:
    starts = torch.tensor([0, 3, 3, t["rows"].size(0)])
    return ops.attention_varlen(t["rows"], t["rows"], t["rows"], starts, starts, sink=t["sink"], dropout_p=0.25)


FUNCTIONS: dict[str, Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]] = {
    "attention": lambda t: (ops.attention(*three(t), key_padding_mask=padding(t)),),
    "weights": lambda t: ops.attention_with_weights(
        *three(t), attn_mask=t["bias"], is_causal=True, dropout_p=0.5, weights_before_dropout=True
    ),
    "weights_alone": lambda t: ops.attention_with_weights(*three(t), average_attn_weights=False)[1:],
    "log_sum_exp": lambda t: ops.attention_with_lse(
        *three(t), attn_mask=t["bias"], sink=t["sink"], is_causal=True, causal_alignment="bottom_right"
    ),
    "additive": lambda t: ops.additive_attention_with_weights(
        *three(t), t["score_weight"], key_padding_mask=padding(t), attn_mask=t["bias"], dropout_p=0.25
    ),
    "packed": lambda t: (packed(t),),
    "one_after_the_other": lambda t: (
        ops.attention(ops.attention(t["query"], t["key"], t["key"]), t["key"], t["value"]),
    ),
}


def backward(loss: torch.Tensor, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for leaf in given.values():
        leaf.grad = None
    loss.backward()
    return {name: leaf.grad.clone() for name, leaf in given.items() if leaf.grad is not None}


def loss_of(function: Callable, given: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(3)
    return sum(result.square().sum() for result in function(given))


class Recorder:
    """A backend that keeps the names of what graphs call."""

    def __init__(self) -> None:
        self.calls: set[str] = set()

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        self.calls |= {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str) -> None:
    """Those of eager mode, from a graph without breaks that calls the fused formula; then from it for other sizes."""
    recorder = Recorder()
    for sizes in ((2, 5, 7), (3, 9, 6)) if name == "log_sum_exp" else ((2, 5, 7),):
        given = leaves(*sizes)
        expected = backward(loss_of(FUNCTIONS[name], given), given)
        loss = loss_of(FUNCTIONS[name], given)
        with compiled_autograd._enable(torch.compile(backend=recorder, fullgraph=True, dynamic=True)):
            found = backward(loss, given)
        assert found.keys() == expected.keys()
        for leaf, gradient in expected.items():
            torch.testing.assert_close(found[leaf], gradient, rtol=1e-11, atol=1e-12)
            assert gradient.any() or (name, leaf) == ("weights_alone", "value")
    assert any("FusedMha" in call for call in recorder.calls), recorder.calls


@pytest.mark.parametrize("name", ["weights", "weights_alone", "log_sum_exp", "additive"])
def test_second_order(name: str) -> None:
    given = leaves()
    results = []
    for compiled in (False, True):
        loss = loss_of(FUNCTIONS[name], given)
        used = backward(loss_of(FUNCTIONS[name], given), given)
        first = torch.autograd.grad(loss, [given[leaf] for leaf in used], create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        if compiled:
            with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                results.append(backward(penalty, given))
        else:
            results.append(backward(penalty, given))
    for leaf, found in results[1].items():
        expected = results[0].get(leaf)
        # What eager mode leaves undefined may be zeros.
        expected = torch.zeros_like(found) if expected is None else expected
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert results[0].keys() <= results[1].keys()


def test_second_order_of_packed_sequences_leaves_the_graph() -> None:
    """The padded batch of the formula is as long as the longest sequence, which no graph knows."""
    given = leaves()
    results = []
    for compiled in (False, True):
        (first,) = torch.autograd.grad(loss_of(FUNCTIONS["packed"], given), given["rows"], create_graph=True)
        if compiled:
            with compiled_autograd._enable(torch.compile(backend="aot_eager")):
                results.append(backward(first.square().sum(), given))
        else:
            results.append(backward(first.square().sum(), given))
    for leaf, gradient in results[0].items():
        torch.testing.assert_close(results[1][leaf], gradient, rtol=1e-9, atol=1e-10)


def test_calls_that_differ_in_their_constants_have_graphs_of_their_own() -> None:
    given = leaves()
    for option in ({}, {"is_causal": True}, {"is_causal": True, "causal_alignment": "bottom_right"}, {"scale": 0.3}):
        expected = backward(ops.attention(*three(given), **option).square().sum(), given)
        loss = ops.attention(*three(given), **option).square().sum()
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            found = backward(loss, given)
        for leaf, gradient in expected.items():
            torch.testing.assert_close(found[leaf], gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("compiled_forward", [False, True])
def test_a_training_step_of_the_module(compiled_forward: bool) -> None:
    """With hooks on a parameter, and frozen parameters beside."""
    plain = fused_mha.MultiheadAttention(16, 4, dropout=0.1, batch_first=True, num_kv_heads=2, sink="learned")
    plain.out_proj.weight.requires_grad_(False)
    other = copy.deepcopy(plain)
    call = torch.compile(other, backend="aot_eager", fullgraph=True) if compiled_forward else other
    x, hidden = torch.randn(3, 6, 16), torch.arange(6) >= torch.tensor([[6], [2], [0]])
    for module in (plain, other):
        module.in_proj_weight.register_hook(lambda gradient: 2 * gradient)
    for step in range(2):
        torch.manual_seed(step)
        plain(x, x, x, key_padding_mask=hidden)[0].square().sum().backward()
        torch.manual_seed(step)
        loss = call(x, x, x, key_padding_mask=hidden)[0].square().sum()
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
    for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
