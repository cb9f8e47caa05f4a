# SPDX-License-Identifier: BSD-3-Clause
"""nn.MultiheadAttention by the formula, in float64, with the rules for empty rows and hidden keys of `reference`."""

from __future__ import annotations

import copy

import reference
import torch
import torch.nn.functional as F
from cases import Inputs
from torch import nn


def extra_keys(module: nn.MultiheadAttention) -> int:
    """Keys that the module appends: they stay visible to every row."""
    return int(module.bias_k is not None) + int(module.add_zero_attn)


def double(module: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """A stock module on the CPU with the same numbers in float64."""
    exact = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        dropout=module.dropout,
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=module.batch_first,
        dtype=torch.float64,
    )
    exact.load_state_dict(copy.deepcopy(module.state_dict()))
    return exact.train(module.training)


def four_dimensional(mask: torch.Tensor | None, batch: int, heads: int) -> torch.Tensor | None:
    """The module's (L, S), (N*H, L, S) or 4-D mask as one that broadcasts to (N, H, L, S)."""
    if mask is None or mask.dim() == 4:
        return mask
    return mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (batch, heads))


def _project(module: nn.MultiheadAttention, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return [F.linear(t, w, b) for t, w, b in zip(tensors, weights, biases, strict=True)]


def forward(
    module: nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    keep: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the module's layout, and weights (N, H, L, S + extra), or (H, L, S + extra) for unbatched input."""
    unbatched = query.dim() == 2
    tensors = [query, key, value]
    if unbatched:
        tensors = [t[None] for t in tensors]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not module.batch_first:
        tensors = [t.transpose(0, 1) for t in tensors]
    batch, heads = tensors[0].shape[0], module.num_heads
    q, k, v = _project(module, tensors)
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.expand(batch, 1, -1)], 1)
        v = torch.cat([v, module.bias_v.expand(batch, 1, -1)], 1)
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    inputs = Inputs(
        q, k, v, key_padding_mask, four_dimensional(attn_mask, batch, heads), is_causal and attn_mask is None
    )
    context, weights = reference.attention(
        inputs, keep=keep, dropout_p=dropout_p, always_visible_keys=extra_keys(module)
    )
    output = F.linear(context.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    if unbatched:
        return output[0], weights[0]
    return output if module.batch_first else output.transpose(0, 1), weights
