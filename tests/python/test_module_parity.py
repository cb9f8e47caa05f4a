# SPDX-License-Identifier: BSD-3-Clause
"""The module against nn.MultiheadAttention over random configurations: outputs, weights and all gradients.

The judge is the formula in float64; where stock in float64 is finite it must agree with the formula, so that the
formula is judged too. Stock in the module's own dtype gives the yardstick of the tolerance. FUSED_MHA_EXAMPLES sets
the number of configurations.
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import fused_mha
import module_reference
import pytest
import torch
from cases import ATTN_MASKS, KEY_PADDING_MASKS, later
from hypothesis import given, note
from hypothesis import strategies as st
from tolerances import assert_close_as_torch
from torch import nn

MASKS_2D = (
    "causal",
    "causal_float",
    "band",
    "bool",
    "float",
    "float_inf",
    "float_inf_empty_row",
    "float16",
    "bool_columns",
)
MASKS_4D = ("hidden_head", "bool_full", "float_full", "bool_per_sample", "bool_keys_4d", "float_rows", "float64")


@dataclasses.dataclass(frozen=True)
class Configuration:
    heads: int
    head_dim: int
    batch: int
    length: int
    source: int
    kind: str  # "self", "memory" (key is value) or "cross"
    kdim: int | None
    vdim: int | None
    bias: bool
    add_bias_kv: bool
    add_zero_attn: bool
    batch_first: bool
    unbatched: bool
    padding: str
    mask: str
    mask_rank: int
    is_causal: bool
    need_weights: bool
    average: bool
    mode: str  # "train", "eval" or "no_grad"
    dtype: torch.dtype
    seed: int


@st.composite
def configurations(draw) -> Configuration:
    kind = draw(st.sampled_from(["self", "memory", "cross"]))
    length = draw(st.sampled_from([1, 2, 3, 5, 15, 16, 17, 33, 65]))
    source = length if kind == "self" else draw(st.sampled_from([1, 2, 4, 7, 16, 31, 33, 130]))
    heads, head_dim = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 2, 3, 8, 16, 20]))
    odd = heads * head_dim + 3
    separate = kind != "self" and draw(st.booleans())
    kdim = draw(st.sampled_from([None, odd])) if separate else None
    # key is value: one tensor has one width.
    vdim = kdim if kind == "memory" else draw(st.sampled_from([None, odd + 2])) if separate else None
    unbatched = draw(st.integers(0, 3)) == 0
    mask_rank = draw(st.sampled_from([2, 2, 3, 4]))
    return Configuration(
        heads=heads,
        head_dim=head_dim,
        batch=1 if unbatched else draw(st.integers(1, 3)),
        length=length,
        source=source,
        kind=kind,
        kdim=kdim,
        vdim=vdim,
        bias=draw(st.booleans()),
        add_bias_kv=draw(st.booleans()),
        add_zero_attn=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        unbatched=unbatched,
        padding=draw(st.sampled_from(["", *KEY_PADDING_MASKS])),
        mask=draw(st.sampled_from(["", *(MASKS_2D if mask_rank == 2 else MASKS_4D)])),
        mask_rank=3 if unbatched and mask_rank == 4 else mask_rank,
        is_causal=draw(st.booleans()),
        need_weights=draw(st.booleans()),
        average=draw(st.booleans()),
        mode=draw(st.sampled_from(["train", "train", "eval", "no_grad"])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])),
        seed=draw(st.integers(0, 2**31)),
    )


@dataclasses.dataclass
class Call:
    """Arguments of one module call; `inputs` holds each distinct floating tensor once."""

    tensors: list[torch.Tensor]
    masks: dict[str, torch.Tensor]

    def inputs(self) -> list[torch.Tensor]:
        every = [*self.tensors, *self.masks.values()]
        return list({id(t): t for t in every if t.is_floating_point()}.values())

    def converted(self, device: str, dtype: torch.dtype | None = None, mask_dtype: torch.dtype | None = None) -> Call:
        """Fresh leaves; which tensors are the same object is kept. Bool masks stay bool."""
        fresh: dict[int, torch.Tensor] = {}

        def convert(t: torch.Tensor, target: torch.dtype) -> torch.Tensor:
            if id(t) not in fresh:
                t_new = t.detach().to(device, target if t.is_floating_point() else t.dtype)
                fresh[id(t)] = t_new.detach().clone(memory_format=torch.preserve_format) if t_new is t else t_new
                fresh[id(t)].requires_grad_(t.is_floating_point())
            return fresh[id(t)]

        return Call(
            [convert(t, dtype or t.dtype) for t in self.tensors],
            {name: convert(m, mask_dtype or m.dtype) for name, m in self.masks.items()},
        )


def make_module(c: Configuration, kind: type[nn.MultiheadAttention]) -> nn.MultiheadAttention:
    module = kind(
        c.heads * c.head_dim,
        c.heads,
        bias=c.bias,
        add_bias_kv=c.add_bias_kv,
        add_zero_attn=c.add_zero_attn,
        kdim=c.kdim,
        vdim=c.vdim,
        batch_first=c.batch_first,
        dtype=c.dtype,
    )
    generator = torch.Generator().manual_seed(c.seed)
    with torch.no_grad():
        for parameter in module.parameters():
            bound = 1.5 / math.sqrt(parameter.shape[-1])
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)
    return module.train(c.mode == "train")


def make_call(c: Configuration) -> Call:
    generator = torch.Generator().manual_seed(c.seed + 1)
    embed = c.heads * c.head_dim

    def sequence(length: int, width: int) -> torch.Tensor:
        shape = (c.batch, length, width) if c.batch_first else (length, c.batch, width)
        made = torch.randn((length, width) if c.unbatched else shape, generator=generator).to(c.dtype)
        return made.requires_grad_()

    query = sequence(c.length, embed)
    key = query if c.kind == "self" else sequence(c.source, c.kdim or embed)
    value = key if c.kind != "cross" else sequence(c.source, c.vdim or embed)
    masks = {}
    if c.padding:
        padding = KEY_PADDING_MASKS[c.padding](c.batch, c.source, generator)
        masks["key_padding_mask"] = padding[0] if c.unbatched else padding
    if c.mask:
        mask = ATTN_MASKS[c.mask](c.batch, c.heads, c.length, c.source, generator)
        if c.mask_rank == 3:
            mask = mask.expand(c.batch, c.heads, c.length, c.source).reshape(-1, c.length, c.source)
        masks["attn_mask"] = mask
    for mask in masks.values():
        mask.requires_grad_(mask.is_floating_point())
    return Call([query, key, value], masks)


def stock_masks(c: Configuration, call: Call) -> dict[str, torch.Tensor]:
    """The same masks in the shapes and dtypes that stock takes."""
    masks = dict(call.masks)
    device = call.tensors[0].device
    mask = masks.get("attn_mask")
    if mask is not None and mask.dim() == 4:
        masks["attn_mask"] = mask.expand(c.batch, c.heads, c.length, c.source).reshape(-1, c.length, c.source)
    if mask is None and c.is_causal:
        masks["attn_mask"] = later(c.length, c.source).to(device)
    return masks


def collect(output, weights, leaves: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Gradients of a fixed random combination of the results."""
    generator = torch.Generator().manual_seed(seed)
    results = [t for t in (output, weights) if t is not None]
    grads = [torch.randn(t.shape, generator=generator).bfloat16().to(t.device, t.dtype) for t in results]
    found = torch.autograd.grad(results, leaves, grads, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def run_stock(c: Configuration, module: nn.MultiheadAttention, call: Call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module(
            *call.tensors, **stock_masks(c, call), need_weights=c.need_weights, average_attn_weights=c.average
        )


@given(configurations())
def test_outputs_weights_and_gradients(device: str, c: Configuration) -> None:
    note(str(c))
    ours, stock = (make_module(c, kind).to(device) for kind in (fused_mha.MultiheadAttention, nn.MultiheadAttention))
    call = make_call(c).converted(device)
    exact, exact_call = module_reference.double(stock), call.converted("cpu", torch.float64, torch.float64)
    yardstick_call = call.converted(device, c.dtype, c.dtype)

    expected, per_head = module_reference.forward(exact, *exact_call.tensors, **exact_call.masks, is_causal=c.is_causal)
    expected_weights = None
    if c.need_weights:
        expected_weights = per_head.mean(-3) if c.average else per_head
    judge, judge_weights = run_stock(c, exact, exact_call)
    own, own_weights = run_stock(c, stock, yardstick_call)
    finite = torch.isfinite(judge)
    torch.testing.assert_close(expected[finite], judge[finite], rtol=1e-9, atol=1e-10)

    with torch.set_grad_enabled(c.mode != "no_grad"):
        output, weights = ours(
            *call.tensors,
            **call.masks,
            need_weights=c.need_weights,
            average_attn_weights=c.average,
            is_causal=c.is_causal,
        )
    assert output.dtype == c.dtype
    assert output.requires_grad == (c.mode != "no_grad")
    assert_close_as_torch(output, expected, own, what="output", scale=1.0)
    assert (weights is None) == (not c.need_weights)
    if weights is not None:
        assert weights.dtype == c.dtype
        assert weights.shape == judge_weights.shape
        assert_close_as_torch(weights, expected_weights, own_weights, what="weights", scale=0.25)
    if c.mode == "no_grad":
        return

    wanted = collect(expected, expected_weights, [*exact.parameters(), *exact_call.inputs()], c.seed)
    found = collect(output, weights, [*ours.parameters(), *call.inputs()], c.seed)
    yardstick = collect(own, own_weights, [*stock.parameters(), *yardstick_call.inputs()], c.seed)
    names = [name for name, _ in ours.named_parameters()] + [f"input {i}" for i in range(len(call.inputs()))]
    if finite.all():
        judged = collect(judge, judge_weights, [*exact.parameters(), *exact_call.inputs()], c.seed)
        for name, formula, theirs in zip(names, wanted, judged, strict=True):
            torch.testing.assert_close(formula, theirs, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    # As in test_gradients: a gradient may be a sum that cancels.
    scale = max(float(g.abs().max()) for g in wanted if g.numel())
    for name, ours_grad, exact_grad, own_grad in zip(names, found, wanted, yardstick, strict=True):
        assert_close_as_torch(
            ours_grad, exact_grad, own_grad, what=f"gradient of {name}", gradient=True, scale=scale, dtype=c.dtype
        )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["plain", "extra_keys"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_in_training(extra: dict[str, bool], batch_first: bool, need_weights: bool, device: str) -> None:
    """The module drops what dropout_mask says for the state drawn next, over the appended keys too."""
    n, h, length, s, embed, p = 2, 4, 9, 33, 16, 0.4
    ours = fused_mha.MultiheadAttention(embed, h, dropout=p, batch_first=batch_first, device=device, **extra)
    exact = module_reference.double(ours)
    total = s + module_reference.extra_keys(ours)
    tensors = [torch.randn(n, size, embed, device=device) for size in (length, s, s)]
    tensors = tensors if batch_first else [t.transpose(0, 1) for t in tensors]
    padding = KEY_PADDING_MASKS["right"](n, s, None).to(device)
    torch.manual_seed(21)
    keep = torch.ops.fused_mha.dropout_mask(fused_mha.functional.draw_rng_state(device), n, h, length, total, p)
    torch.manual_seed(21)
    output, weights = ours(*tensors, key_padding_mask=padding, need_weights=need_weights, average_attn_weights=False)
    expected, expected_weights = module_reference.forward(
        exact, *(t.cpu().double() for t in tensors), key_padding_mask=padding, keep=keep, dropout_p=p
    )
    torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    if need_weights:
        torch.testing.assert_close(weights.cpu().double(), expected_weights, rtol=1e-5, atol=1e-6)
    for grad, wanted in zip(
        torch.autograd.grad(output.square().sum(), list(ours.parameters())),
        torch.autograd.grad(expected.square().sum(), list(exact.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(grad.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
    ours.eval()
    still, _ = ours(*tensors, key_padding_mask=padding)
    without, _ = module_reference.forward(exact, *(t.cpu().double() for t in tensors), key_padding_mask=padding)
    torch.testing.assert_close(still.cpu().double(), without, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("padding", ["", "left", "whole_sample"])
def test_is_causal_without_a_mask(padding: str, extra: dict[str, bool], device: str) -> None:
    """Stock demands a mask; here the flag alone is enough, with weights, padding and appended keys."""
    ours = fused_mha.MultiheadAttention(8, 2, batch_first=True, device=device, **extra)
    x = torch.randn(2, 5, 8, device=device)
    masks = {"key_padding_mask": KEY_PADDING_MASKS[padding](2, 5, None).to(device)} if padding else {}
    for need_weights in (True, False):
        by_flag, weights = ours(x, x, x, is_causal=True, need_weights=need_weights, **masks)
        by_mask, mask_weights = ours(x, x, x, attn_mask=later(5, 5).to(device), need_weights=need_weights, **masks)
        torch.testing.assert_close(by_flag, by_mask, rtol=1e-5, atol=1e-6)
        exact = module_reference.double(ours)
        expected = module_reference.forward(exact, *[x.cpu().double()] * 3, is_causal=True, **masks)
        torch.testing.assert_close(by_flag.cpu().double(), expected[0], rtol=1e-5, atol=1e-6)
        if need_weights:
            torch.testing.assert_close(weights, mask_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("need_weights", [True, False])
def test_where_a_mask_is_given_the_causal_hint_changes_nothing(need_weights: bool, device: str) -> None:
    ours = fused_mha.MultiheadAttention(8, 2, batch_first=True, device=device)
    x = torch.randn(2, 5, 8, device=device)
    for mask in (torch.zeros(5, 5), torch.zeros(5, 5, dtype=torch.bool), torch.randn(5, 5), later(5, 5)):
        mask = mask.to(device)
        hinted = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
        plain = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
        assert torch.equal(hinted[0], plain[0])
        assert not need_weights or torch.equal(hinted[1], plain[1])


def test_all_modes_agree(device: str) -> None:
    """One contract in train and eval, with and without a graph."""
    ours = fused_mha.MultiheadAttention(16, 4, batch_first=True, device=device)
    x = torch.randn(3, 7, 16, device=device)
    padding = KEY_PADDING_MASKS["whole_sample"](3, 7, None).to(device)
    results = []
    for training in (True, False):
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                results.append(ours.train(training)(x, x, x, key_padding_mask=padding)[0].detach().clone())
    assert torch.isfinite(results[0]).all()
    assert all(torch.equal(result, results[0]) for result in results[1:])
