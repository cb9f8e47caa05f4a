# SPDX-License-Identifier: BSD-3-Clause
"""Fused attention for the Swin transformers of torchvision, which do not use ``nn.MultiheadAttention``.

    >>> model = torchvision.models.swin_t()
    >>> print(fused_mha.integrations.torchvision.replace_window_attention(model))

For its vision transformers (``vit_b_16`` and the like) :func:`fused_mha.replace_multihead_attention` is enough.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_mha.replace import ReplacementReport

__all__ = ["replace_window_attention"]

_attention_op = torch.ops.fused_mha.attention.default


def replace_window_attention(model: nn.Module) -> ReplacementReport:
    """Make every window attention of a torchvision Swin transformer, version 1 or 2, a fused one, in place.

    The modules stay the objects they are: parameters, ``state_dict`` and optimizers go on as before. Subclasses with a
    behaviour of their own are left and named.
    """
    fused = _fused_classes()
    replaced: list[str] = []
    left: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if not isinstance(module, tuple(fused)):
            continue
        if isinstance(module, _FusedForward):
            left.append((name, "already fused"))
        elif type(module) not in fused:
            left.append((name, f"{type(module).__qualname__} is a subclass whose own behaviour would be lost"))
        else:
            module.__class__ = fused[type(module)]
            replaced.append(name)
    return ReplacementReport(model, tuple(replaced), tuple(left))


@functools.cache
def _fused_classes() -> dict[type, type]:
    """Ours for each of torchvision's; made when asked for, so that torchvision is imported no sooner."""
    from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

    return {
        kind: type(f"Fused{kind.__name__}", (_FusedForward, kind), {"__module__": __name__})
        for kind in (ShiftedWindowAttention, ShiftedWindowAttentionV2)
    }


def __getattr__(name: str) -> type:
    """The classes by name, where a pickled model looks for them."""
    if name.startswith("FusedShiftedWindowAttention"):
        for kind in _fused_classes().values():
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _FusedForward:
    """The forward of both versions."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """(N, height, width, C) to the same."""
        N, height, width, C = x.shape
        rows, columns = self.window_size
        x = F.pad(x, (0, 0, 0, -width % columns, 0, -height % rows))
        _, padded_height, padded_width, _ = x.shape
        # A window that is as large as the picture has nowhere to go.
        shift = (
            self.shift_size[0] if rows < padded_height else 0,
            self.shift_size[1] if columns < padded_width else 0,
        )
        if shift != (0, 0):
            x = torch.roll(x, (-shift[0], -shift[1]), (1, 2))
        down, across = padded_height // rows, padded_width // columns
        windows = x.view(N, down, rows, across, columns, C).transpose(2, 3).reshape(N, down * across, rows * columns, C)

        heads, D = self.num_heads, C // self.num_heads
        # (3, N, window, head, token, D)
        q, k, v = self._project(windows).unflatten(-1, (3, heads, D)).permute(3, 0, 1, 4, 2, 5).unbind(0)
        scale = None
        if hasattr(self, "logit_scale"):
            # Version 2: cosines, with a factor of each head's own.
            factor = self.logit_scale.clamp(max=math.log(100.0)).exp()
            q, k, scale = F.normalize(q, dim=-1) * factor, F.normalize(k, dim=-1), 1.0
        bias = self.get_relative_position_bias()
        if shift != (0, 0):
            # A mask of each window's own: windows stand where heads do, so that samples share it.
            other = _other_regions(padded_height, padded_width, (rows, columns), shift, x.device)
            bias = bias.masked_fill(other.unsqueeze(1), -torch.inf).flatten(0, 1).unsqueeze(0)
            q, k, v = (t.flatten(1, 2) for t in (q, k, v))
        else:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        dropout_p = self.attention_dropout if self.training else 0.0
        context = _attention_op(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)

        # (N, down, across, head, row, column, D)
        context = context.reshape(N, down, across, heads, rows, columns, D).permute(0, 1, 4, 2, 5, 3, 6)
        x = context.reshape(N, padded_height, padded_width, C)
        x = F.dropout(self.proj(x), self.dropout, self.training)
        if shift != (0, 0):
            x = torch.roll(x, shift, (1, 2))
        return x[:, :height, :width].contiguous()

    def _project(self: Any, x: Tensor) -> Tensor:
        bias = self.qkv.bias
        if hasattr(self, "logit_scale") and bias is not None:
            # Version 2 has no bias for keys, whatever the parameter says.
            query, _, value = bias.chunk(3)
            bias = torch.cat([query, torch.zeros_like(query), value])
        return F.linear(x, self.qkv.weight, bias)


def _other_regions(
    height: int, width: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device
) -> Tensor:
    """(windows, L, L) bool, True where two tokens of a shifted window are not neighbours in the picture."""
    regions = []
    for size, part, moved in zip((height, width), window, shift, strict=True):
        place = torch.arange(size, device=device)
        regions.append((place >= size - part).long() + (place >= size - moved).long())
    region = regions[0][:, None] * 3 + regions[1]
    rows, columns = window
    region = region.view(height // rows, rows, width // columns, columns).transpose(1, 2).reshape(-1, rows * columns)
    return region.unsqueeze(1) != region.unsqueeze(2)
