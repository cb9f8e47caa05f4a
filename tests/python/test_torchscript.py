# SPDX-License-Identifier: BSD-3-Clause
"""TorchScript: script in every combination of options, trace, save and load; the numbers of eager mode."""

from __future__ import annotations

import io
import itertools

import fused_mha
import pytest
import torch
from cases import later

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),
]

OPTIONS = [
    dict(zip(("bias", "add_bias_kv", "add_zero_attn", "batch_first"), flags, strict=True))
    for flags in itertools.product([True, False], repeat=4)
]
CALLS = (
    {},
    {"need_weights": False, "key_padding_mask": torch.arange(3) >= torch.tensor([[3], [2], [0]])},
    {"average_attn_weights": False, "attn_mask": torch.linspace(-1, 1, 9).reshape(3, 3)},
    {"is_causal": True},
    {"attn_mask": later(3, 3), "key_padding_mask": torch.zeros(3, 3)},
)


def make(widths: bool, **options: bool) -> tuple[fused_mha.MultiheadAttention, list[torch.Tensor]]:
    kdim, vdim = (6, 5) if widths else (None, None)
    module = fused_mha.MultiheadAttention(8, 2, kdim=kdim, vdim=vdim, **options)
    return module, [torch.randn(3, 3, width) for width in (8, kdim or 8, vdim or 8)]


def assert_same(found, expected) -> None:
    for ours, eager in zip(found, expected, strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("widths", [False, True], ids=["", "kdim_vdim"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(name for name, on in o.items() if on) or "none")
def test_script(options: dict[str, bool], widths: bool) -> None:
    """pytorch#149391: also with bias=False and with kdim and vdim."""
    module, arguments = make(widths, **options)
    scripted = torch.jit.script(module)
    for call in CALLS:
        assert_same(scripted(*arguments, **call), module(*arguments, **call))


def test_script_keeps_gradients_dropout_and_modes() -> None:
    module, arguments = make(False, batch_first=True)
    module.dropout = 0.5
    scripted = torch.jit.script(module)
    results = []
    for one in (module, scripted):
        torch.manual_seed(3)
        output, weights = one(*arguments)
        loss = output.square().sum() + weights.square().sum()
        results.append((output, weights, *torch.autograd.grad(loss, list(one.parameters()))))
    assert_same(*results)
    assert not results[0][1].all(), "nothing was dropped"
    scripted.eval()
    assert_same(scripted(*arguments), module.eval()(*arguments))


def test_script_of_a_model_that_holds_one() -> None:
    model = torch.nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    fused_mha.replace_multihead_attention(model)
    scripted = torch.jit.script(model)
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    torch.testing.assert_close(scripted(x, memory, later(3, 3)), model(x, memory, later(3, 3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_saved_and_loaded(kind: str) -> None:
    module, arguments = make(False, batch_first=True)
    module.eval()
    recorded = torch.jit.script(module) if kind == "script" else torch.jit.trace(module, tuple(arguments))
    buffer = io.BytesIO()
    torch.jit.save(recorded, buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    assert_same(loaded(*arguments), module(*arguments))


@pytest.mark.parametrize("widths", [False, True], ids=["", "kdim_vdim"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(name for name, on in o.items() if on) or "none")
def test_trace(options: dict[str, bool], widths: bool) -> None:
    """A trace serves other sizes than those it was made with, masks of three dimensions included."""
    module, arguments = make(widths, **options)
    module.eval()

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, query, key, value, padding, mask):
            return self.attention(query, key, value, key_padding_mask=padding, attn_mask=mask)

    model = Masked()
    traced = torch.jit.trace(model, (*arguments, torch.zeros(3, 3, dtype=torch.bool), torch.zeros(6, 3, 3)))
    n, length = (4, 5) if options["batch_first"] else (5, 4)
    larger = [torch.randn(4, 5, t.shape[-1]) for t in arguments]
    masks = torch.rand(n, length) < 0.3, torch.randn(2 * n, length, length)
    assert_same(traced(*larger, *masks), model(*larger, *masks))


def test_functions_are_scripted() -> None:
    def function(query: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return torch.ops.fused_mha.attention(query, query, query, key_padding_mask=padding, is_causal=True)

    query, padding = torch.randn(2, 2, 5, 4), torch.arange(5) >= torch.tensor([[5], [3]])
    torch.testing.assert_close(torch.jit.script(function)(query, padding), function(query, padding), rtol=0, atol=0)
