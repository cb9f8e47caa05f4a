# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of masks, attention weights and times. Needs matplotlib, which is imported when a picture is drawn.

Each function draws into the axes it is given, or into new ones, and returns them: titles, sizes and files are
matplotlib's affair. Letters are those of the rest of the package: N batch, H heads, L query length, S key length.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["TILE_CLASSES", "alignment", "attention_map", "benchmark", "mask", "mask_tiles"]

#: What the numbers of :func:`mask_tiles` mean, in order.
TILE_CLASSES = ("hidden", "free", "mixed", "dropped")
_TILE_COLORS = ("#3b3b3b", "#dfe8d8", "#e8a33d", "#9a9a9a")


def mask_tiles(
    L: int,
    S: int,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """How the CPU kernels classify the tiles of a call: (N, H, L, S) int8, indices of ``TILE_CLASSES``.

    * dropped: ``key_padding_mask`` hides the key; it is taken out before tiles are made;
    * hidden: no element of the tile is visible; the tile is skipped;
    * free: every element is visible and nothing is added; no mask is read;
    * mixed: the masks are read, element by element.

    Args:
        L, S: query and key length.
        key_padding_mask: (N, S) or (S).
        attn_mask: anything that broadcasts to (N, H, L, S).
        is_causal: hide every key s > l as well.

    Returns:
        N and H are those of the masks, 1 where no mask has them.

    Example: causality over 96 queries and keys leaves one tile in six to skip::

        >>> tiles = fused_mha.plot.mask_tiles(96, 96, is_causal=True)
        >>> [fused_mha.plot.TILE_CLASSES[tiles[0, 0, l, s]] for l, s in ((0, 0), (0, 95), (95, 0), (95, 95))]
        ['mixed', 'hidden', 'free', 'mixed']
    """
    padding, bias = key_padding_mask, attn_mask
    if padding is not None:
        padding = padding.detach().cpu().expand(1 if padding.dim() == 1 else padding.size(0), S)
    if bias is not None:
        bias = bias.detach().cpu()[(None,) * (4 - bias.dim())]
    N = max(1 if padding is None else padding.size(0), 1 if bias is None else bias.size(0))
    H = 1 if bias is None else bias.size(1)
    if padding is not None:
        padding = padding.expand(N, S)
    # Of query and key only the sizes count.
    query, key = torch.zeros(1).expand(N, H, L, 1), torch.zeros(1).expand(N, H, S, 1)
    tiles: Tensor = torch.ops.fused_mha._mask_tiles(query, key, padding, bias, is_causal)
    return tiles


def mask(
    L: int,
    S: int,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    sample: int = 0,
    head: int = 0,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw what the kernels see of the masks: which tiles they skip, which need no mask, and which are looked at.

    The title says how much of the work is skipped. Arguments are those of :func:`mask_tiles`, and

    Args:
        sample, head: which of the masks, where they differ.
        ax: axes to draw into; new ones where None.
    """
    tiles = mask_tiles(L, S, key_padding_mask=key_padding_mask, attn_mask=attn_mask, is_causal=is_causal)
    tiles = tiles[min(sample, tiles.size(0) - 1), min(head, tiles.size(1) - 1)]
    ax = _axes(ax)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    ax.imshow(
        tiles.numpy(),
        cmap=ListedColormap(list(_TILE_COLORS)),
        vmin=-0.5,
        vmax=len(TILE_CLASSES) - 0.5,
        interpolation="nearest",
        aspect="auto",
    )
    present = [index for index in range(len(TILE_CLASSES)) if bool((tiles == index).any())]
    ax.legend(
        handles=[Patch(color=_TILE_COLORS[index], label=TILE_CLASSES[index]) for index in present],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    skipped = float(((tiles == 0) | (tiles == 3)).float().mean()) if tiles.numel() else 0.0
    ax.set(xlabel="key", ylabel="query", title=f"{skipped:.0%} of the scores are never computed")
    return ax


def attention_map(
    weights: Tensor,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    sample: int = 0,
    head: int | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw attention weights, keys along x and queries down y; darker is more.

    Args:
        weights: (L, S), (N, L, S), or (N, H, L, S) as attention returns them.
        queries, keys: what stands beside the rows and under the columns, such as tokens. Longer ones are cut, so that
            those of a padded batch fit.
        sample: which sample of a batch.
        head: which head; their mean where None.
        ax: axes to draw into; new ones where None.
    """
    if weights.dim() not in (2, 3, 4):
        raise ValueError(
            f"fused_mha.plot: weights must have shape (L, S), (N, L, S) or (N, H, L, S), got {tuple(weights.shape)}"
        )
    if head is not None and weights.dim() != 4:
        raise ValueError(
            f"fused_mha.plot: head needs weights of each head, (N, H, L, S), got {tuple(weights.shape)}. Hint: "
            "average_attn_weights=False"
        )
    weights = weights.detach()
    if weights.dim() > 2:
        weights = weights[sample]
    if weights.dim() == 3:
        weights = weights.mean(0) if head is None else weights[head]
    ax = _axes(ax)
    largest = float(weights.max()) if weights.numel() else 1.0
    ax.imshow(
        weights.float().cpu().numpy(),
        cmap="Blues",
        vmin=0.0,
        vmax=largest or 1.0,
        interpolation="nearest",
        aspect="auto",
    )
    L, S = weights.shape
    if keys is not None:
        ax.set_xticks(range(min(S, len(keys))), list(keys[:S]), rotation=90)
    if queries is not None:
        ax.set_yticks(range(min(L, len(queries))), list(queries[:L]))
    ax.set(xlabel="key", ylabel="query")
    return ax


def alignment(
    weights: Tensor, source: Sequence[str], target: Sequence[str], *, sample: int = 0, ax: "Axes | None" = None
) -> "Axes":
    """Draw which source words each target word was made from, with the weight of each row's strongest.

    The picture of Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", 2015,
    figure 3: source along the top, target down the side.

    Args:
        weights: (L, S), (N, L, S), or (N, H, L, S), whose mean over heads is drawn; L target and S source positions.
            What lies beyond the words, padding, is cut off.
        source, target: the words.
        sample: which sample of a batch.
        ax: axes to draw into; new ones where None.
    """
    weights = weights.detach()
    if weights.dim() > 2:
        weights = weights[sample]
    if weights.dim() == 3:
        weights = weights.mean(0)
    weights = weights[: len(target), : len(source)]
    ax = attention_map(weights, queries=target, keys=source, ax=ax)
    ax.xaxis.tick_top()
    ax.set(xlabel="", ylabel="")
    for row, column in enumerate(weights.argmax(1).tolist() if weights.numel() else []):
        share = float(weights[row, column])
        ax.text(
            column, row, f"{share:.2f}", ha="center", va="center", fontsize=7, color="white" if share > 0.5 else "0.2"
        )
    return ax


def benchmark(
    times: Mapping[str, Mapping[str, float]], *, reference: str | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draw times side by side: a group of bars for each case, as shares of the reference's time, labelled with it.

    Args:
        times: seconds by case and side, such as ``{"training step": {"stock": 0.42, "fused": 0.09}}``. A side may lack
            a case; the reference must have them all.
        reference: the side whose bars are 1; by default the first side of the first case.
        ax: axes to draw into; new ones where None.
    """
    sides = list(dict.fromkeys(side for case in times.values() for side in case))
    if reference is None and sides:
        reference = sides[0]
    for name, case in times.items():
        if reference not in case:
            raise ValueError(
                f"fused_mha.plot: times must have the reference {reference!r} in every case, not in {name!r}"
            )
    ax = _axes(ax)
    height = 0.8 / max(len(sides), 1)
    for i, side in enumerate(sides):
        places = [(place, case) for place, case in enumerate(times.values()) if side in case]
        bars = ax.barh(
            [place - 0.4 + (i + 0.5) * height for place, _ in places],
            [case[side] / case[str(reference)] for _, case in places],
            height,
            label=side,
        )
        ax.bar_label(bars, [_duration(case[side]) for _, case in places], padding=3, fontsize=8)
    ax.axvline(1.0, color="grey", linewidth=1)
    ax.set_yticks(range(len(times)), list(times))
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set(xlabel=f"time / time of {reference}")
    if sides:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax


def _duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _axes(ax: "Axes | None") -> "Axes":
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("fused_mha.plot needs matplotlib: pip install matplotlib") from error
    _, ax = pyplot.subplots(layout="constrained")
    return ax
