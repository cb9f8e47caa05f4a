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
)


def make(case: Case) -> Inputs:
    inputs = case.make(torch.float64)
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
        torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator).masked_fill(leaf.detach().isinf(), 0.0)
        for leaf in leaves
    ]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradgradcheck(case: Case, weights: bool) -> None:
    inputs = make(case)
    assert torch.autograd.gradgradcheck(as_function(inputs, weights), inputs.leaves())


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck_forward_mode(case: Case, weights: bool) -> None:
    inputs = make(case)
    assert torch.autograd.gradcheck(
        as_function(inputs, weights), inputs.leaves(), check_forward_ad=True, check_backward_ad=False
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jvp_agrees_with_the_formula(case: Case) -> None:
    inputs = make(case)
    leaves = [leaf.detach() for leaf in inputs.leaves()]
    tangents = directions(leaves)
    output, tangent = torch.func.jvp(as_function(inputs), tuple(leaves), tuple(tangents))
    expected, expected_tangent = torch.func.jvp(as_reference(inputs), tuple(leaves), tuple(tangents))
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tangent, expected_tangent, rtol=1e-10, atol=1e-12)
    assert torch.count_nonzero(tangent) > 0


def test_hessian_is_not_zero() -> None:
    """An operator that drops a tangent silently makes the Hessian of a sum of squares 0."""
    inputs = make(CASES[0])
    leaves = [leaf.detach() for leaf in inputs.leaves()]

    def loss(function):
        return lambda query: function(query, *leaves[1:]).square().sum()

    found = torch.func.hessian(loss(as_function(inputs)))(leaves[0])
    expected = torch.func.hessian(loss(as_reference(inputs)))(leaves[0])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert torch.count_nonzero(expected) > 0


def test_gradient_penalty() -> None:
    """pytorch#116350: the norm of a gradient as part of the loss."""
    inputs = make(CASES[2])
    exact = inputs.double()
    results = []
    for function, leaves in ((as_function(inputs), inputs.leaves()), (as_reference(exact), exact.leaves())):
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves[0], create_graph=True)[0]
        results.append(torch.autograd.grad(first.square().sum(), leaves))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_func_grad_and_vjp() -> None:
    inputs = make(CASES[1])
    leaves = [leaf.detach() for leaf in inputs.leaves()]
    every = tuple(range(len(leaves)))
    found = torch.func.grad(lambda *t: as_function(inputs)(*t).square().sum(), argnums=every)(*leaves)
    expected = torch.func.grad(lambda *t: as_reference(inputs)(*t).square().sum(), argnums=every)(*leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    output, pullback = torch.func.vjp(as_function(inputs), *leaves)
    for ours, theirs in zip(pullback(2 * output), found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_checkpoint_draws_the_same_dropout_again() -> None:
    """pytorch#190717: recomputation must not draw another mask."""
    inputs = make(Case("checkpoint", L=5, S=7, D=4))
    grads = []
    for recompute in (False, True):
        torch.manual_seed(11)
        call = lambda *t: ops.attention(*t, dropout_p=0.5)  # noqa: E731
        if recompute:
            output = torch.utils.checkpoint.checkpoint(call, *inputs.leaves(), use_reentrant=False)
        else:
            output = call(*inputs.leaves())
        grads.append((output.detach(), *torch.autograd.grad(output.square().sum(), inputs.leaves())))
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)
