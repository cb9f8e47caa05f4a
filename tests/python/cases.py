# SPDX-License-Identifier: BSD-3-Clause
"""The table of cases that the tests share: sizes, memory layouts, masks.

Numbers in float masks are small multiples of 1/8, exact in every dtype, so that a mask costs PyTorch's own paths
nothing in accuracy and the tolerance stays sharp.
"""

from __future__ import annotations

import dataclasses
import math

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Inputs:
    """What one attention call takes."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_padding_mask: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    is_causal: bool = False
    scale: float | None = None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    def options(self) -> dict[str, object]:
        return {
            "key_padding_mask": self.key_padding_mask,
            "attn_mask": self.attn_mask,
            "is_causal": self.is_causal,
            "scale": self.scale,
        }

    def leaves(self) -> list[torch.Tensor]:
        """The floating tensors, in the order query, key, value, key_padding_mask, attn_mask."""
        every = (self.query, self.key, self.value, self.key_padding_mask, self.attn_mask)
        return [t for t in every if t is not None and t.is_floating_point()]

    def leaf_names(self) -> list[str]:
        names = ("query", "key", "value", "key_padding_mask", "attn_mask")
        return [n for n in names if getattr(self, n) is not None and getattr(self, n).is_floating_point()]

    def with_grad(self) -> Inputs:
        """The same memory, each floating tensor a leaf that requires a gradient."""
        return self._map(lambda t: t.detach().requires_grad_(t.is_floating_point()))

    def double(self) -> Inputs:
        """float64 leaves on the CPU with the same numbers, for the reference."""
        return self._map(
            lambda t: t.detach().double().cpu().requires_grad_() if t.is_floating_point() else t.detach().cpu()
        )

    def _map(self, function) -> Inputs:
        names = ("query", "key", "value", "key_padding_mask", "attn_mask")
        changed = {n: function(getattr(self, n)) for n in names if getattr(self, n) is not None}
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes N, H, Hkv (0: as H), L, S, D, Dv (0: as D) and names of layout and masks below."""

    name: str
    N: int = 2
    H: int = 2
    L: int = 5
    S: int = 7
    D: int = 8
    Hkv: int = 0
    Dv: int = 0
    layout: str = "nhld"
    padding: str = ""
    mask: str = ""
    is_causal: bool = False
    scale: float | None = None

    def __str__(self) -> str:
        return self.name

    def make(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed + 7919 * len(self.name) + sum(map(ord, self.name)))
        sizes = (
            (self.H, self.L, self.D),
            (self.Hkv or self.H, self.S, self.D),
            (self.Hkv or self.H, self.S, self.Dv or self.D),
        )
        query, key, value = (LAYOUTS[self.layout](self.N, *size, dtype, generator, i) for i, size in enumerate(sizes))
        padding = KEY_PADDING_MASKS[self.padding](self.N, self.S, generator) if self.padding else None
        mask = ATTN_MASKS[self.mask](self.N, self.H, self.L, self.S, generator) if self.mask else None
        inputs = Inputs(query, key, value, padding, mask, self.is_causal, self.scale)
        return inputs if device == "cpu" else inputs._map(lambda t: move(t, device))


def move(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """To a device, with the strides it has."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return tensor.to(device)
    memory = tensor.as_strided((length,), (1,)).to(device)
    return memory.as_strided(tensor.shape, tensor.stride())


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _nhld(n, h, length, d, dtype, generator, _):
    return _normal((n, h, length, d), dtype, generator)


def _nlhd(n, h, length, d, dtype, generator, _):
    return _normal((n, length, h, d), dtype, generator).transpose(1, 2)


def _lnhd(n, h, length, d, dtype, generator, _):
    return _normal((length, n, h, d), dtype, generator).permute(1, 2, 0, 3)


def _sliced(n, h, length, d, dtype, generator, _):
    memory = _normal((n + 1, h, 2 * length + 1, d + 5), dtype, generator)
    return memory[1:, :, 1::2, 3 : 3 + d]


def _columns(n, h, length, d, dtype, generator, _):
    return _normal((n, h, d, length), dtype, generator).transpose(-1, -2)


def _wide_steps(n, h, length, d, dtype, generator, _):
    return _normal((n, h, length, 3 * d), dtype, generator)[..., ::3]


def _expanded_batch(n, h, length, d, dtype, generator, argument):
    if argument == 0:
        return _normal((n, h, length, d), dtype, generator)
    return _normal((1, h, length, d), dtype, generator).expand(n, h, length, d)


def _expanded_heads(n, h, length, d, dtype, generator, _):
    return _normal((n, 1, length, d), dtype, generator).expand(n, h, length, d)


def _expanded_rows(n, h, length, d, dtype, generator, argument):
    if argument == 1:
        return _normal((n, h, length, d), dtype, generator)
    return _normal((n, h, 1, d), dtype, generator).expand(n, h, length, d)


LAYOUTS = {
    "nhld": _nhld,
    "nlhd": _nlhd,
    "lnhd": _lnhd,
    "sliced": _sliced,
    "columns": _columns,
    "wide_steps": _wide_steps,
    "expanded_batch": _expanded_batch,
    "expanded_heads": _expanded_heads,
    "expanded_rows": _expanded_rows,
}


def eighths(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiples of 1/8 in [-2, 2]."""
    return (torch.randint(-16, 17, shape, generator=generator) / 8).to(dtype)


def _lengths(n: int, s: int) -> torch.Tensor:
    """s, then shorter and shorter, at least 1."""
    return torch.tensor([max(1, s - i * (s // 2 + 1) // max(1, n - 1)) for i in range(n)])


def padding_right(n, s, _):
    return torch.arange(s)[None, :] >= _lengths(n, s)[:, None]


def padding_left(n, s, generator):
    return padding_right(n, s, generator).flip(-1)


def padding_scattered(n, s, generator):
    return torch.rand(n, s, generator=generator) < 0.4


def padding_whole_sample(n, s, generator):
    mask = padding_right(n, s, generator)
    mask[-1] = True
    return mask


def padding_float(n, s, generator):
    return eighths((n, s), generator)


def padding_float_inf(n, s, generator):
    return eighths((n, s), generator).masked_fill(padding_scattered(n, s, generator), -math.inf)


def padding_bfloat16(n, s, generator):
    return padding_float_inf(n, s, generator).bfloat16()


def padding_transposed(n, s, generator):
    return (torch.rand(s, n, generator=generator) < 0.4).t()


KEY_PADDING_MASKS = {
    "right": padding_right,
    "left": padding_left,
    "scattered": padding_scattered,
    "whole_sample": padding_whole_sample,
    "float": padding_float,
    "float_inf": padding_float_inf,
    "bfloat16": padding_bfloat16,
    "transposed": padding_transposed,
}


def later(length: int, s: int) -> torch.Tensor:
    """(L, S) bool, True where a causal row must not look."""
    return torch.ones(length, s, dtype=torch.bool).triu(1)


def _random_bool(shape, generator):
    return torch.rand(shape, generator=generator) < 0.4


def _float_inf(shape, generator, dtype=torch.float32):
    return eighths(shape, generator).masked_fill(_random_bool(shape, generator), -math.inf).to(dtype)


def _float_inf_with_empty_row(n, h, length, s, generator):
    mask = _float_inf((length, s), generator)
    mask[length // 2] = -math.inf
    return mask


def _hidden_head(n, h, length, s, generator):
    mask = _random_bool((n, h, length, s), generator)
    mask[:, -1] = True
    return mask


ATTN_MASKS = {
    "causal": lambda n, h, length, s, g: later(length, s),
    "causal_float": lambda n, h, length, s, g: torch.zeros(length, s).masked_fill(later(length, s), -math.inf),
    "band": lambda n, h, length, s, g: later(length, s) | torch.ones(length, s, dtype=torch.bool).tril(-2),
    "bool": lambda n, h, length, s, g: _random_bool((length, s), g),
    "bool_per_head": lambda n, h, length, s, g: _random_bool((1, h, length, s), g),
    "bool_per_sample": lambda n, h, length, s, g: _random_bool((n, 1, length, s), g),
    "bool_full": lambda n, h, length, s, g: _random_bool((n, h, length, s), g),
    "bool_rows": lambda n, h, length, s, g: _random_bool((length, 1), g),
    "bool_keys_4d": lambda n, h, length, s, g: _random_bool((n, 1, 1, s), g),
    "bool_expanded": lambda n, h, length, s, g: _random_bool((n, 1, length, s), g).expand(n, h, length, s),
    "bool_columns": lambda n, h, length, s, g: _random_bool((s, length), g).t(),
    "hidden_head": _hidden_head,
    "float": lambda n, h, length, s, g: eighths((length, s), g),
    "float_inf": lambda n, h, length, s, g: _float_inf((length, s), g),
    "float_inf_empty_row": _float_inf_with_empty_row,
    "float_per_head": lambda n, h, length, s, g: eighths((h, length, s), g),
    "float_per_sample": lambda n, h, length, s, g: eighths((n, 1, length, s), g),
    "float_full": lambda n, h, length, s, g: _float_inf((n, h, length, s), g),
    "float_rows": lambda n, h, length, s, g: eighths((n, 1, length, 1), g),
    "float_keys_1d": lambda n, h, length, s, g: eighths((s,), g),
    "float_keys_4d": lambda n, h, length, s, g: eighths((1, h, 1, s), g),
    "float_expanded": lambda n, h, length, s, g: eighths((1, h, 1, s), g).expand(n, h, length, s),
    "float_offset_view": lambda n, h, length, s, g: eighths((length, s + 3), g)[:, 1 : s + 1],
    "float16": lambda n, h, length, s, g: _float_inf((length, s), g, torch.float16),
    "bfloat16": lambda n, h, length, s, g: _float_inf((h, length, s), g, torch.bfloat16),
    "float64": lambda n, h, length, s, g: _float_inf((n, 1, length, s), g, torch.float64),
}

# Ugly sizes: 1 2 3 15 31 33 65 130 rows and keys; every head dim that ever broke a kernel.
CASES = (
    Case("one_of_everything", N=1, H=1, L=1, S=1, D=1),
    Case("two_and_three", N=3, H=1, L=2, S=3, D=3),
    Case("head_dim_5", L=15, S=31, D=5, padding="right"),
    Case("head_dim_20", L=31, S=15, D=20, mask="bool"),
    Case("head_dim_33", L=33, S=65, D=33, padding="scattered"),
    Case("head_dim_64", L=65, S=130, D=64),
    Case("head_dim_80", L=3, S=130, D=80, mask="float"),
    Case("head_dim_96", L=33, S=31, D=96, is_causal=True),
    Case("head_dim_128", N=1, L=130, S=33, D=128, padding="left"),
    Case("head_dim_160", N=1, L=15, S=65, D=160, mask="float_inf"),
    Case("head_dim_256", N=1, L=31, S=33, D=256),
    Case("one_query", H=4, L=1, S=130, D=64, padding="right"),
    Case("one_key", L=130, S=1, D=20),
    Case("value_dim_wider", L=15, S=33, D=8, Dv=33, padding="scattered"),
    Case("value_dim_1", L=33, S=15, D=64, Dv=1, mask="causal"),
    Case("grouped_heads", H=6, Hkv=2, L=15, S=33, D=16, padding="right", mask="float_per_head"),
    Case("one_kv_head", H=4, Hkv=1, L=33, S=31, D=8, mask="bool_per_head", is_causal=True),
    Case("scale", L=15, S=31, D=8, scale=0.7, mask="float_full"),
    Case("negative_scale", L=15, S=31, D=8, scale=-0.3),
    Case("layout_nlhd", H=3, L=33, S=31, D=20, layout="nlhd", padding="right", mask="bool_expanded"),
    Case("layout_lnhd", N=3, L=31, S=33, D=16, layout="lnhd", is_causal=True, padding="left"),
    Case("layout_sliced", H=3, L=15, S=33, D=33, layout="sliced", mask="float_offset_view"),
    Case("layout_columns", L=33, S=65, D=16, layout="columns", padding="transposed"),
    Case("layout_wide_steps", L=15, S=31, D=20, layout="wide_steps", mask="bool_columns"),
    Case("layout_expanded_batch", N=3, L=33, S=31, D=64, layout="expanded_batch", mask="float_per_sample"),
    Case("layout_expanded_heads", H=3, L=15, S=33, D=8, layout="expanded_heads", mask="float_expanded"),
    Case("layout_expanded_rows", L=33, S=15, D=8, layout="expanded_rows", padding="float"),
    Case("whole_sample", N=3, L=33, S=31, D=16, padding="whole_sample"),
    Case("hidden_head", H=3, L=15, S=33, D=8, mask="hidden_head"),
    Case("causal_long", N=1, H=1, L=130, S=130, D=64, is_causal=True),
    Case("causal_wide", L=31, S=65, D=8, is_causal=True),
    Case("band_and_padding", N=3, L=65, S=65, D=8, mask="band", padding="right"),
    Case("bool_per_sample", L=33, S=31, D=8, mask="bool_per_sample"),
    Case("bool_full_left", L=31, S=33, D=8, mask="bool_full", padding="left"),
    Case("bool_rows", L=33, S=15, D=8, mask="bool_rows"),
    Case("bool_keys_4d", L=15, S=65, D=8, mask="bool_keys_4d"),
    Case("causal_float", L=33, S=33, D=8, mask="causal_float", padding="float_inf"),
    Case("float_inf_empty_row", L=15, S=33, D=8, mask="float_inf_empty_row", padding="scattered"),
    Case("float_rows", L=31, S=15, D=8, mask="float_rows", padding="right"),
    Case("float_keys_1d", L=15, S=31, D=8, mask="float_keys_1d"),
    Case("float_keys_4d", H=3, L=33, S=33, D=8, mask="float_keys_4d", padding="float_inf", is_causal=True),
    Case("mixed_float16", L=15, S=65, D=8, mask="float16", padding="scattered"),
    Case("mixed_bfloat16", H=3, L=33, S=33, D=8, mask="bfloat16", padding="float"),
    Case("mixed_float64", L=31, S=33, D=8, mask="float64", padding="bfloat16"),
)

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)
