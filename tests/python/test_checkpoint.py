# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing: recomputation drops what the first computation dropped, at the operator and the module."""

from __future__ import annotations

import functools

import fused_mha
import pytest
import torch
from cases import Case, later
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ops = torch.ops.fused_mha


def always(policy: CheckpointPolicy):
    return functools.partial(create_selective_checkpoint_contexts, lambda context, op, *args, **kwargs: policy)


WAYS = {
    "not_reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective_save": {"use_reentrant": False, "context_fn": always(CheckpointPolicy.MUST_SAVE)},
    "selective_recompute": {"use_reentrant": False, "context_fn": always(CheckpointPolicy.PREFER_RECOMPUTE)},
}


@pytest.mark.parametrize("way", WAYS)
def test_operator(way: str, device: str) -> None:
    """pytorch#190717"""
    inputs = Case("checkpoint", L=5, S=7, D=4, padding="right").make(torch.float32, device).with_grad()

    def call(*tensors):
        return ops.attention(*tensors, key_padding_mask=inputs.key_padding_mask, dropout_p=0.5)

    grads = []
    for recompute in (False, True):
        torch.manual_seed(11)
        output = checkpoint(call, *inputs.tensors(), **WAYS[way]) if recompute else call(*inputs.tensors())
        loss = output.square().sum()
        # Reentrant checkpoints know backward() alone.
        for tensor in inputs.tensors():
            tensor.grad = None
        loss.backward()
        grads.append((output.detach(), *(tensor.grad for tensor in inputs.tensors())))
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("need_weights", [True, False])
def test_module_in_a_model(need_weights: bool, device: str) -> None:
    """Another random draw between the two computations does not matter: the generator's state is restored."""
    module = fused_mha.MultiheadAttention(16, 4, dropout=0.5, batch_first=True, device=device)
    x, mask = torch.randn(2, 5, 16, device=device, requires_grad=True), later(5, 5).to(device)

    def call(value):
        output, weights = module(value, value, value, attn_mask=mask, need_weights=need_weights)
        return output if weights is None else output + weights.sum()

    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        output = checkpoint(call, x, use_reentrant=False) if recompute else call(x)
        torch.rand(100, device=device)
        results.append(torch.autograd.grad(output.square().sum(), [x, *module.parameters()]))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_the_kernel_runs_again_only_where_it_has_to(device: str) -> None:
    """A selective policy that saves the operator's results recomputes everything but the operator."""
    query = torch.randn(1, 2, 5, 4, device=device, requires_grad=True)
    count = {"forward": 0}

    def policy(context, op, *args, **kwargs):
        saved = op is ops._attention_forward.default
        count["forward"] += saved and not context.is_recompute
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def call(q):
        return ops.attention(q * 2, q, q, dropout_p=0.5).exp()

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    torch.manual_seed(1)
    output = checkpoint(call, query, use_reentrant=False, context_fn=contexts)
    with torch.profiler.profile() as profile:
        (found,) = torch.autograd.grad(output.sum(), query)
    names = [event.name for event in profile.events()]
    assert count["forward"] == 1
    assert "fused_mha::_attention_backward" in names
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(call(query).sum(), query)
    assert torch.equal(found, expected)
