# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's modes: anomaly detection, inference_mode, saved-tensor hooks, default devices and dtypes, deterministic
algorithms."""

from __future__ import annotations

import fused_mha
import pytest
import torch
from cases import Case, later
from torch.utils._python_dispatch import TorchDispatchMode

ops = torch.ops.fused_mha


def module_and_input(device: str) -> tuple[fused_mha.MultiheadAttention, torch.Tensor]:
    return fused_mha.MultiheadAttention(16, 4, batch_first=True, device=device), torch.randn(2, 5, 16, device=device)


def test_anomaly_detection_names_the_node_and_the_call(device: str) -> None:
    query = torch.full((1, 1, 3, 4), float("nan"), device=device, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        output = ops.attention(query, query, query)
        with (
            pytest.raises(RuntimeError, match="FusedMhaAttentionBackward"),
            pytest.warns(UserWarning, match="Error detected in FusedMhaAttentionBackward"),
        ):
            output.sum().backward()


def test_anomaly_detection_is_silent_where_nothing_is_wrong(device: str) -> None:
    """A row without keys is 0, not NaN that is hidden afterwards."""
    module, x = module_and_input(device)
    padding = torch.tensor([[False] * 5, [True] * 5], device=device)
    with torch.autograd.set_detect_anomaly(True):
        output, weights = module(x, x, x, key_padding_mask=padding)
        (output.sum() + weights.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_inference_mode(training: bool, device: str) -> None:
    module, x = module_and_input(device)
    module.train(training)
    mask = later(5, 5).to(device)
    expected = module(x, x, x, attn_mask=mask)
    with torch.inference_mode():
        found = module(x, x, x, attn_mask=mask)
    assert found[0].is_inference()
    assert found[0].grad_fn is None
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        module(found[0], found[0], found[0])


def test_saved_tensor_hooks_see_what_the_node_keeps(device: str) -> None:
    """So that offloading works: what is packed is what the backward pass reads."""
    inputs = Case("saved", L=3, S=4, D=4, padding="right", mask="float").make(torch.float32, device).with_grad()
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        output = ops.attention(*inputs.tensors(), **inputs.options())
    found = torch.autograd.grad(output.sum(), inputs.leaves())
    expected = torch.autograd.grad(ops.attention(*inputs.tensors(), **inputs.options()).sum(), inputs.leaves())
    # query, key, value, both masks, output, row_max, row_sum; nothing of L * S elements for each head.
    assert len(packed) == 8
    assert max(t.numel() for t in packed) <= max(t.numel() for t in inputs.leaves())
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_changing_an_input_before_backward_is_noticed(device: str) -> None:
    query = torch.randn(1, 2, 3, 4, device=device)
    key = torch.randn(1, 2, 3, 4, device=device, requires_grad=True)
    output = ops.attention(query, key, key)
    query.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_graph_is_freed_after_backward_and_kept_on_request(device: str) -> None:
    query = torch.randn(1, 2, 3, 4, device=device, requires_grad=True)
    output = ops.attention(query, query, query)
    first = torch.autograd.grad(output.sum(), query, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(output.sum(), query)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.sum(), query)


def test_deterministic_algorithms_give_the_same_bits(device: str) -> None:
    module, x = module_and_input(device)
    x.requires_grad_()
    results = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            output, weights = module(x, x, x, is_causal=True)
            results.append((output, weights, *torch.autograd.grad(output.sum() + weights.square().sum(), x)))
        finally:
            torch.use_deterministic_algorithms(False)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


class Rows(TorchDispatchMode):
    """Counts rows of weight in the projections."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.rows += args[-1].shape[1]
        return func(*args, **(kwargs or {}))


def test_a_default_device_costs_no_projection(device: str) -> None:
    """A default device is a mode in which every tensor looks overridden; the call must stay the same."""
    module, x = module_and_input(device)
    memory = torch.randn(2, 7, 16, device=device)
    counts = []
    for context in (torch.device(device), torch.no_grad()):
        with context, Rows() as rows:
            module(x, memory, memory)
        counts.append(rows.rows)
    assert counts == [4 * 16, 4 * 16]


def test_default_dtype(device: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        module, x = module_and_input(device)
        output, weights = module(x, x, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert output.dtype == weights.dtype == torch.float64
