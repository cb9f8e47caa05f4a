# SPDX-License-Identifier: BSD-3-Clause
"""Attention by the formula, in float64, with gradients by autograd.

    score[n, h, l, s]  = scale * sum_d query[n, h, l, d] * key[n, hkv(h), s, d] + key_padding_mask[n, s] + attn_mask
    weight[n, h, l, s] = softmax over the visible s, times keep / (1 - dropout_p)
    output[n, h, l, :] = sum_s weight[n, h, l, s] * value[n, hkv(h), s, :]

A hidden key is excluded, not multiplied by 0, so that NaN in it stays where it is; a row without visible keys is 0.
Beside it stand PyTorch's own ways in the inputs' dtype, whose error is the yardstick.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from cases import Inputs


def repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """(N, Hkv, S, X) -> (N, H, S, X)."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1) if tensor.shape[1] not in (0, heads) else tensor


def visible_and_bias(
    shape: tuple[int, int, int, int],
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    always_visible_keys: int = 0,
    bottom_right: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool (N, H, L, S), True = visible, and the float64 bias, differentiable in the float masks."""
    n, h, length, s = shape
    masked = s - always_visible_keys
    visible = torch.ones(n, h, length, masked, dtype=torch.bool)
    bias = torch.zeros(n, h, length, masked, dtype=torch.float64)
    padding = None if key_padding_mask is None else key_padding_mask.cpu()[:, None, None, :]
    for mask in (padding, None if attn_mask is None else attn_mask.cpu()):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            visible = visible & ~mask
        else:
            visible = visible & (mask != -math.inf)
            bias = bias + torch.where(mask == -math.inf, 0.0, mask.double())
    if is_causal:
        last_visible = torch.arange(length) + (masked - length if bottom_right else 0)
        visible = visible & (torch.arange(masked)[None, :] <= last_visible[:, None])
    visible = F.pad(visible, (0, always_visible_keys), value=True)
    return visible, F.pad(bias, (0, always_visible_keys))


def attention(
    inputs: Inputs, *, keep: torch.Tensor | None = None, dropout_p: float = 0.0, always_visible_keys: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (N, H, L, Dv) and weights (N, H, L, S), both float64 on the CPU."""
    query = inputs.query.double().cpu()
    n, h, length, d = query.shape
    key = repeat_heads(inputs.key.double().cpu(), h)
    value = repeat_heads(inputs.value.double().cpu(), h)
    s = key.shape[2]
    visible, bias = visible_and_bias(
        (n, h, length, s), inputs.key_padding_mask, inputs.attn_mask, inputs.is_causal, always_visible_keys
    )
    scale = 1.0 / math.sqrt(d) if inputs.scale is None else inputs.scale
    if torch.isfinite(key).all():
        products = query @ key.transpose(-1, -2)
    else:
        products = (query[..., :, None, :] * torch.where(visible[..., None], key[..., None, :, :], 0.0)).sum(-1)
    scores = torch.where(visible, products * scale + bias, -math.inf)
    some_visible = visible.any(-1, keepdim=True)
    largest = scores.detach().amax(-1, keepdim=True) if s else scores.new_zeros(n, h, length, 1)
    shifted = torch.where(visible, scores - torch.where(some_visible, largest, 0.0), 0.0)
    terms = torch.where(visible, shifted.exp(), 0.0)
    weights = terms / torch.where(some_visible, terms.sum(-1, keepdim=True), 1.0)
    if dropout_p > 0.0:
        factor = 0.0 if dropout_p >= 1.0 else 1.0 / (1.0 - dropout_p)
        weights = torch.where(keep.cpu(), weights * factor, 0.0)
    if torch.isfinite(value).all():
        return weights @ value, weights
    return (weights[..., None] * torch.where(visible[..., None], value[..., None, :, :], 0.0)).sum(-2), weights


def every_result(
    inputs: Inputs,
    alignment: str = "top_left",
    sink: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    always_visible_keys: int = 0,
) -> dict[str, torch.Tensor]:
    """output, weights, those before dropout, and lse, with a sink (H) and either alignment of causality.

    In the dtype of the inputs: made of float64 ones it is the reference, of others the yardstick for errors. What is
    hidden must be finite.
    """
    query, heads = inputs.query, inputs.query.size(1)
    key, value = (repeat_heads(t, heads) for t in (inputs.key, inputs.value))
    sizes = (*query.shape[:3], key.size(2))
    visible, bias = visible_and_bias(
        sizes, inputs.key_padding_mask, inputs.attn_mask, inputs.is_causal, always_visible_keys,
        alignment == "bottom_right",
    )  # fmt: skip
    visible, bias = visible.to(query.device), bias.to(query.device, query.dtype)
    scale = 1.0 / math.sqrt(query.size(-1)) if inputs.scale is None else inputs.scale
    scores = torch.where(visible, query @ key.transpose(-1, -2) * scale + bias, -math.inf)
    if sink is not None:
        of_sink = sink.to(query.dtype).reshape(1, -1, 1, 1).expand(*sizes[:3], 1)
        scores = torch.cat([scores, of_sink], -1)
    some = torch.isfinite(scores).any(-1, keepdim=True)
    weights = torch.where(some, scores, 0.0).softmax(-1)[..., : sizes[3]]
    before = torch.where(visible & some, weights, 0.0)
    after = before if keep is None else torch.where(keep, before / (1.0 - dropout_p), 0.0)
    return {"output": after @ value, "weights": after, "before": before, "lse": scores.logsumexp(-1)}


def _additive_mask(inputs: Inputs) -> torch.Tensor | None:
    """Both masks as one float mask in the query's dtype: what users of PyTorch have to build. Differentiable."""
    query, padding = inputs.query, inputs.key_padding_mask
    total = None
    for mask in (None if padding is None else padding[:, None, None, :], inputs.attn_mask):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(mask, -math.inf)
        total = mask.to(query.dtype) if total is None else total + mask.to(query.dtype)
    if inputs.is_causal:
        length, s = query.shape[2], inputs.key.shape[2]
        later = torch.ones(length, s, dtype=torch.bool, device=query.device).triu(1)
        causal = torch.zeros(length, s, dtype=query.dtype, device=query.device).masked_fill(later, -math.inf)
        total = causal if total is None else total + causal
    return total


def torch_output(inputs: Inputs) -> torch.Tensor:
    """F.scaled_dot_product_attention in the inputs' dtype; empty rows as it has them (zeros)."""
    heads = inputs.query.shape[1]
    key, value = repeat_heads(inputs.key, heads), repeat_heads(inputs.value, heads)
    mask = _additive_mask(inputs)
    if mask is not None:
        mask = mask.expand(*inputs.query.shape[:3], key.shape[2])
    return F.scaled_dot_product_attention(inputs.query, key, value, attn_mask=mask, scale=inputs.scale)


def torch_output_and_weights(
    inputs: Inputs, *, keep: torch.Tensor | None = None, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What nn.MultiheadAttention computes with need_weights=True, in the inputs' dtype, empty rows made 0."""
    query, heads = inputs.query, inputs.query.shape[1]
    key, value = repeat_heads(inputs.key, heads), repeat_heads(inputs.value, heads)
    scale = 1.0 / math.sqrt(query.shape[-1]) if inputs.scale is None else inputs.scale
    scores = (query * scale) @ key.transpose(-1, -2)
    mask = _additive_mask(inputs)
    if mask is not None:
        scores = scores + mask
    hidden = scores == -math.inf
    weights = scores.masked_fill(hidden.all(-1, keepdim=True), 0.0).softmax(-1).masked_fill(hidden, 0.0)
    if dropout_p > 0.0:
        weights = weights * keep * (0.0 if dropout_p >= 1.0 else 1.0 / (1.0 - dropout_p))
    return weights @ value, weights


def gradients(
    output: torch.Tensor,
    weights: torch.Tensor | None,
    grad_output: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    leaves: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Gradients of <output, grad_output> + <weights, grad_weights>; zeros for leaves that do not take part."""
    pairs = [(t, g) for t, g in ((output, grad_output), (weights, grad_weights)) if g is not None]
    found = torch.autograd.grad(
        [t for t, _ in pairs], leaves, [g.to(t.device, t.dtype) for t, g in pairs], allow_unused=True
    )
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def _philox4x32(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Seven rounds (Salmon et al., SC 2011), on uint64 arrays that hold 32-bit numbers."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    key0, key1 = np.uint64(key[0]), np.uint64(key[1])
    c0, c1, c2, c3 = counter
    for _ in range(7):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ key0,
            product1 & low,
            (product0 >> half) ^ c3 ^ key1,
            product0 & low,
        )
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & low, (key1 + np.uint64(0xBB67AE85)) & low
    return [c0, c1, c2, c3]


def dropout_keep(rng_state: torch.Tensor, n: int, h: int, length: int, s: int, dropout_p: float) -> torch.Tensor:
    """The keep mask (n, h, length, s), written from its description in csrc/core/dropout.h."""
    seed, offset = (int(x) for x in rng_state)
    wrap = (1 << 64) - 1
    mixed = (seed + 0x9E3779B97F4A7C15 * (offset + 1)) & wrap
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & wrap
    mixed ^= mixed >> 31
    index_n, index_h, index_l, index_s = np.meshgrid(
        *(np.arange(size, dtype=np.uint64) for size in (n, h, length, s)), indexing="ij"
    )
    sixteen, group = np.uint64(16), np.uint64(128)
    first = index_s // group * sixteen + index_s % sixteen
    words = np.stack(_philox4x32([first, index_l, index_h, index_n], (mixed & 0xFFFFFFFF, mixed >> 32)))
    number = (index_s % group // sixteen).astype(np.int64)
    word = np.take_along_axis(words, number[None] // 2, axis=0)[0].astype(np.int64)
    sixteen_bits = np.where(number % 2 == 0, word & 0xFFFF, word >> 16)
    return torch.from_numpy(sixteen_bits >= round(dropout_p * 65536))
