# SPDX-License-Identifier: BSD-3-Clause
"""FlopCounterMode counts a model's operations alike with stock and with fused attention."""

from __future__ import annotations

import copy

import fused_mha
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def counted(function) -> FlopCounterMode:
    with FlopCounterMode(display=False, custom_mapping=fused_mha.flop_formulas) as counter:
        function()
    return counter


@pytest.mark.parametrize("backward", [False, True])
def test_a_model_counts_as_before(backward: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)
    fused = copy.deepcopy(stock)
    fused_mha.replace_multihead_attention(fused)
    source, target = torch.randn(2, 7, 16, requires_grad=True), torch.randn(2, 5, 16, requires_grad=True)

    def step(model: nn.Module) -> None:
        output = model(source, target)
        if backward:
            output.sum().backward()

    # The form of stock attention that has formulas in every version: plain products, which forget the second scores.
    with sdpa_kernel(SDPBackend.MATH):
        expected = counted(lambda: step(stock)).get_total_flops()
    counter = counted(lambda: step(fused))
    scores = 2 * 2 * 16 * (7 * 7 + 5 * 5 + 5 * 7)
    assert counter.get_total_flops() == expected + (scores if backward else 0)
    counts = counter.get_flop_counts()
    assert counts["Transformer.decoder.layers.0.multihead_attn.out_proj"]
    names = {str(operator) for operator in counts["Global"]}
    assert "fused_mha._attention_forward" in names
    assert ("fused_mha._attention_backward" in names) == backward


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_only_wanted_gradients_count(wanted: tuple[int, ...]) -> None:
    """Beside the gradients that are wanted: the scores again, and the gradient of the weights."""
    N, H, L, S, D, Dv = 2, 4, 5, 7, 3, 6
    tensors = [torch.randn(N, 4 if i == 0 else 2, n, d) for i, (n, d) in enumerate(((L, D), (S, D), (S, Dv)))]
    for i in wanted:
        tensors[i].requires_grad_()
    output = fused_mha.functional.attention(*tensors)
    counter = counted(lambda: output.sum().backward())
    widths = [D, Dv, *((D, D, Dv)[i] for i in wanted)]
    assert counter.get_total_flops() == 2 * N * H * L * S * sum(widths)


def test_forward_counts_as_scaled_dot_product_attention() -> None:
    query, key, value = (torch.randn(2, 4, length, 8) for length in (5, 7, 7))
    with sdpa_kernel(SDPBackend.MATH):
        expected = counted(lambda: F.scaled_dot_product_attention(query, key, value)).get_total_flops()
    mask = torch.zeros(2, 7, dtype=torch.bool)
    found = counted(lambda: fused_mha.functional.attention(query, key, value, key_padding_mask=mask))
    assert found.get_total_flops() == expected > 0
