# SPDX-License-Identifier: BSD-3-Clause
"""Second order, forward mode and the torch.func transforms; vmap is in test_vmap.py."""

from __future__ import annotations

import pytest
import reference
import torch
from cases import Case, Inputs

ops = torch.ops.fused_mha

CASES = (
    Case("plain", L=3, S=4, D=3, Dv=2),
    Case("causal_padding", L=4, S=4, D=3, padding="whole_sample", is_causal=True),
    Case("float_masks", L=3, S=3, D=2, padding="float_inf", mask="float_per_head"),
    Case("grouped_heads", N=1, H=4, Hkv=2, L=2, S=3, D=2, mask="float_keys_4d", padding="right"),
)


def make(case: Case, device: str) -> Inputs:
    inputs = case.make(torch.float64, device)
    for name in ("key_padding_mask", "attn_mask"):
        mask = getattr(inputs, name)
        if mask is not None and mask.is_floating_point():
            setattr(inputs, name, mask.double())
    return inputs.with_grad()


def as_function(inputs: Inputs, weights: bool = False):
    """The operator as a function of the floating tensors alone."""
    names = inputs.leaf_names()

    def function(*leaves: torch.Tensor):
        given = {**inputs.options(), **dict(zip(names, leaves, strict=True))}
        arguments = [given.pop(name) for name in ("query", "key", "value")]
        if weights:
            return ops.attention_with_weights(*arguments, **given, average_attn_weights=False)
        return ops.attention(*arguments, **given)

    return function


def with_dropout(inputs: Inputs, weights_mode: int, state: tuple[int, int] = (5, 8)):
    """The private operator with dropout of one given state, as a function of the floating tensors alone."""
    names = inputs.leaf_names()
    mask_sizes = None if inputs.attn_mask is None else (1,) * (4 - inputs.attn_mask.dim()) + inputs.attn_mask.shape

    def function(*leaves: torch.Tensor):
        given = {**inputs.options(), **dict(zip(names, leaves, strict=True))}
        mask = given["attn_mask"]
        results = ops._attention_forward(
            given["query"], given["key"], given["value"], given["key_padding_mask"],
            mask if mask is None else mask.reshape(mask_sizes),
            inputs.is_causal, 0.4, 0.5, torch.tensor(state, device=inputs.query.device), 0, weights_mode,
        )  # fmt: skip
        return results[:2] if weights_mode else results[0]

    return function


def as_reference(inputs: Inputs):
    names = inputs.leaf_names()

    def function(*leaves: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, leaves, strict=True))
        every = {"query": inputs.query, "key": inputs.key, "value": inputs.value, **inputs.options(), **given}
        return reference.attention(Inputs(**every))[0]

    return function


def directions(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tangents; 0 where a mask is -inf, for a change of -inf is no change."""
    generator = torch.Generator().manual_seed(9)
    return [
        torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)
        .to(leaf.device)
        .masked_fill(leaf.detach().isinf(), 0.0)
        for leaf in leaves
    ]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradgradcheck(case: Case, weights: bool, device: str) -> None:
    inputs = make(case, device)
    assert torch.autograd.gradgradcheck(as_function(inputs, weights), inputs.leaves())


@pytest.mark.parametrize("weights_mode", [0, 1, 2])
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_dropout_in_every_order(case: Case, weights_mode: int, device: str) -> None:
    """First and second order and forward mode, through averaged and per-head weights, for one dropout mask."""
    inputs = make(case, device)
    function = with_dropout(inputs, weights_mode)
    assert torch.autograd.gradcheck(function, inputs.leaves(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs.leaves(), check_fwd_over_rev=True)


def test_second_order_of_a_bias_alone(device: str) -> None:
    """pytorch#148476: frozen query, key and value beside a learned mask."""
    inputs = make(CASES[2], device)
    frozen = [t.detach() for t in inputs.tensors()]

    def function(padding, bias):
        return ops.attention(*frozen, key_padding_mask=padding, attn_mask=bias)

    masks = (inputs.key_padding_mask, inputs.attn_mask)
    assert torch.autograd.gradcheck(function, masks, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, masks, check_fwd_over_rev=True)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck_forward_mode(case: Case, weights: bool, device: str) -> None:
    inputs = make(case, device)
    assert torch.autograd.gradcheck(
        as_function(inputs, weights), inputs.leaves(), check_forward_ad=True, check_backward_ad=False
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jvp_agrees_with_the_formula(case: Case, device: str) -> None:
    """pytorch#98164"""
    inputs = make(case, device)
    leaves = [leaf.detach() for leaf in inputs.leaves()]
    tangents = directions(leaves)
    output, tangent = torch.func.jvp(as_function(inputs), tuple(leaves), tuple(tangents))
    expected, expected_tangent = torch.func.jvp(as_reference(inputs), tuple(leaves), tuple(tangents))
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tangent, expected_tangent, rtol=1e-10, atol=1e-12)
    assert torch.count_nonzero(tangent) > 0


def test_hessian_is_not_zero(device: str) -> None:
    """An operator that drops a tangent silently makes the Hessian of a sum of squares 0."""
    inputs = make(CASES[0], device)
    leaves = [leaf.detach() for leaf in inputs.leaves()]

    def loss(function):
        return lambda query: function(query, *leaves[1:]).square().sum()

    found = torch.func.hessian(loss(as_function(inputs)))(leaves[0])
    expected = torch.func.hessian(loss(as_reference(inputs)))(leaves[0])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert torch.count_nonzero(expected) > 0


DERIVATIVES = {
    "jacrev": lambda f: torch.func.jacrev(f),
    "jacfwd": lambda f: torch.func.jacfwd(f),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).square().sum()),
    "forward_over_forward": lambda f: torch.func.jacfwd(torch.func.jacfwd(lambda x: f(x).square().sum())),
    "reverse_over_reverse": lambda f: torch.func.jacrev(torch.func.jacrev(lambda x: f(x).square().sum())),
    "reverse_over_forward": lambda f: torch.func.jacrev(torch.func.jacfwd(lambda x: f(x).square().sum())),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("which", ["query", "key", "value", "key_padding_mask", "attn_mask"])
@pytest.mark.filterwarnings("error")
def test_derivatives_of_derivatives(which: str, derivative: str, device: str) -> None:
    """Each is a vmap of a transform of the operator; the reference is the same of the formula."""
    inputs = make(
        Case("derivatives", N=1, L=3, S=3, D=2, padding="float", mask="float_per_head", is_causal=True), device
    )
    leaves = [leaf.detach() for leaf in inputs.leaves()]
    place = inputs.leaf_names().index(which)

    def of_one(function):
        return lambda x: function(*leaves[:place], x, *leaves[place + 1 :])

    found = DERIVATIVES[derivative](of_one(as_function(inputs)))(leaves[place])
    expected = DERIVATIVES[derivative](of_one(as_reference(inputs)))(leaves[place])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert torch.count_nonzero(expected) > 0


@pytest.mark.parametrize("spoilt", ["key", "value", "query", "cotangent", "tangent"])
@pytest.mark.parametrize("dropout", [False, True])
def test_hidden_nan_stays_out_of_every_order(dropout: bool, spoilt: str, device: str) -> None:
    """The first two rows see the first two keys, the last two the others: NaN may spread in its own half only."""
    inputs = Case("nan", N=1, L=4, S=4, D=3).make(torch.float64, device)
    half = torch.arange(4, device=device) // 2
    inputs.attn_mask = half[:, None] != half
    function = with_dropout(inputs, 0) if dropout else as_function(inputs)
    generator = torch.Generator().manual_seed(1)
    clean = {name: getattr(inputs, name) for name in ("query", "key", "value")}
    for name in ("cotangent", "tangent"):
        clean[name] = torch.randn(1, 2, 4, 3, dtype=torch.float64, generator=generator).to(device)

    def everything(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """First and second order, forward mode and, where tangents are finite, forward over reverse."""
        leaves = [given[name].clone().requires_grad_() for name in ("query", "key", "value")]
        cotangent = given["cotangent"].clone().requires_grad_()
        first = torch.autograd.grad(function(*leaves), leaves, cotangent, create_graph=True)
        change = (given["tangent"],) * 3
        second = torch.autograd.grad(first, [*leaves, cotangent], change)
        primals = tuple(leaf.detach() for leaf in leaves)
        _, forward = torch.func.jvp(function, primals, change)
        results = [*first, *second, forward]
        if spoilt != "tangent":
            gradient = lambda *tensors: torch.func.vjp(function, *tensors)[1](cotangent.detach())  # noqa: E731
            results.extend(torch.func.jvp(gradient, primals, change)[1])
        return results

    dirty = {**clean, spoilt: clean[spoilt].index_fill(2, torch.tensor([3], device=device), float("nan"))}
    spread = False
    for before, after in zip(everything(clean), everything(dirty), strict=True):
        torch.testing.assert_close(after[:, :, :2], before[:, :, :2], rtol=1e-12, atol=1e-13)
        spread = spread or bool(after[:, :, 2:].isnan().any())
    assert spread, "visible NaN was turned into a number"


def test_gradient_penalty(device: str) -> None:
    """pytorch#116350: the norm of a gradient as part of the loss."""
    inputs = make(CASES[2], device)
    exact = inputs.double()
    results = []
    for function, leaves in ((as_function(inputs), inputs.leaves()), (as_reference(exact), exact.leaves())):
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves[0], create_graph=True)[0]
        results.append(torch.autograd.grad(first.square().sum(), leaves))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_func_grad_and_vjp(device: str) -> None:
    inputs = make(CASES[1], device)
    leaves = [leaf.detach() for leaf in inputs.leaves()]
    every = tuple(range(len(leaves)))
    found = torch.func.grad(lambda *t: as_function(inputs)(*t).square().sum(), argnums=every)(*leaves)
    expected = torch.func.grad(lambda *t: as_reference(inputs)(*t).square().sum(), argnums=every)(*leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    output, pullback = torch.func.vjp(as_function(inputs), *leaves)
    for ours, theirs in zip(pullback(2 * output), found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
