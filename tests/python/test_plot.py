# SPDX-License-Identifier: BSD-3-Clause
"""fused_mha.plot: tile classes against the masks themselves, and what the pictures show."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from fused_mha import plot

HIDDEN, FREE, MIXED, DROPPED = range(4)


def padding_of(kind: str, S: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    if kind == "right":
        return torch.arange(S) >= torch.tensor([[S], [S // 2]])
    return torch.rand(2, S) < 0.5


def attn_mask_of(kind: str, L: int, S: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    band = (torch.arange(S) - torch.arange(L)[:, None]).abs() > 20
    if kind == "band":
        return band
    return torch.zeros(1, 3, L, S).masked_fill(band, -math.inf) + (torch.arange(3) == 2)[:, None, None]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padding", ["none", "right", "scattered"])
@pytest.mark.parametrize("mask", ["none", "band", "bias"])
@pytest.mark.parametrize(("L", "S"), [(130, 100), (1, 33), (50, 1)])
def test_tile_classes_tell_the_truth(L: int, S: int, mask: str, padding: str, is_causal: bool) -> None:
    """Hidden and dropped: nothing there is visible. Free: everything is, and nothing is added."""
    key_padding_mask, attn_mask = padding_of(padding, S), attn_mask_of(mask, L, S)
    tiles = plot.mask_tiles(L, S, key_padding_mask=key_padding_mask, attn_mask=attn_mask, is_causal=is_causal)
    N, H = (1 if key_padding_mask is None else 2), (3 if mask == "bias" else 1)
    assert tiles.shape == (N, H, L, S)
    added = torch.zeros(N, H, L, S)
    if key_padding_mask is not None:
        added = added.masked_fill(key_padding_mask[:, None, None, :], -math.inf)
        assert torch.equal(tiles == DROPPED, key_padding_mask[:, None, None, :].expand_as(tiles))
    if attn_mask is not None:
        added = added + (torch.zeros(L, S).masked_fill(attn_mask, -math.inf) if mask == "band" else attn_mask)
    if is_causal:
        added = added.masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1), -math.inf)
    assert (added[(tiles == HIDDEN) | (tiles == DROPPED)] == -math.inf).all()
    assert (added[tiles == FREE] == 0).all()
    if mask == "none" and not is_causal:
        assert not ((tiles == HIDDEN) | (tiles == MIXED)).any()


def test_tiles_that_can_be_skipped_are() -> None:
    tiles = plot.mask_tiles(256, 256, is_causal=True)[0, 0]
    assert (tiles[:48, 48:] == HIDDEN).float().mean() > 0.9
    assert (tiles[192:, :160] == FREE).all()
    assert not (tiles == DROPPED).any()


def test_empty_sizes() -> None:
    assert plot.mask_tiles(0, 5).shape == (1, 1, 0, 5)
    assert plot.mask_tiles(5, 0, is_causal=True).shape == (1, 1, 5, 0)


def test_masks_that_do_not_fit_are_named() -> None:
    with pytest.raises(RuntimeError, match="_mask_tiles: attn_mask must"):
        plot.mask_tiles(4, 4, attn_mask=torch.zeros(4, 5))


# ------------------------------------------------------------------------------------------------------------ pictures


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_mask_picture(pyplot) -> None:
    padding = torch.arange(100) >= torch.tensor([[100], [50]])
    ax = plot.mask(100, 100, key_padding_mask=padding, is_causal=True, sample=1)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["free", "mixed", "dropped"]
    image = torch.from_numpy(ax.get_images()[0].get_array().data)
    tiles = plot.mask_tiles(100, 100, key_padding_mask=padding, is_causal=True)
    assert torch.equal(image, tiles[1, 0])
    assert (
        ax.get_title()
        == f"{((tiles[1] == HIDDEN) | (tiles[1] == DROPPED)).float().mean():.0%} of the scores are never computed"
    )
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")


def test_a_picture_goes_where_it_is_told(pyplot) -> None:
    figure, (left, right) = pyplot.subplots(1, 2)
    assert plot.mask(8, 8, is_causal=True, ax=left) is left
    assert plot.attention_map(torch.rand(2, 3), ax=right) is right
    assert pyplot.get_fignums() == [figure.number]


def test_attention_map_shows_the_weights_that_were_asked_for(pyplot) -> None:
    weights = torch.rand(2, 3, 4, 5).softmax(-1).requires_grad_()

    def shown(**options) -> torch.Tensor:
        return torch.from_numpy(plot.attention_map(weights, **options).get_images()[0].get_array().data)

    assert torch.equal(shown(), weights[0].mean(0))
    assert torch.equal(shown(sample=1, head=2), weights[1, 2])
    assert torch.equal(torch.from_numpy(plot.attention_map(weights[1]).get_images()[0].get_array().data), weights[1, 0])


def test_attention_map_labels(pyplot) -> None:
    ax = plot.attention_map(torch.rand(2, 3), queries=["a", "b", "padding"], keys=["x", "y", "z"])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["x", "y", "z"]


def test_alignment_cuts_the_padding_and_names_the_strongest(pyplot) -> None:
    weights = torch.tensor([[[0.1, 0.7, 0.2, 0.0], [0.6, 0.3, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    ax = plot.alignment(weights, ["la", "maison", "bleue"], ["the", "house"])
    assert ax.get_images()[0].get_array().shape == (2, 3)
    assert [(t.get_position(), t.get_text()) for t in ax.texts] == [((1, 0), "0.70"), ((0, 1), "0.60")]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["la", "maison", "bleue"]


def test_weights_of_another_shape_are_refused(pyplot) -> None:
    with pytest.raises(ValueError, match=r"weights must have shape .* got \(3,\)"):
        plot.attention_map(torch.rand(3))
    with pytest.raises(ValueError, match="average_attn_weights=False"):
        plot.attention_map(torch.rand(2, 3, 4), head=1)


TIMES = {"short": {"stock": 0.002, "fused": 0.001}, "long": {"stock": 4.0, "fused": 5e-4, "other": 2.0}}


@pytest.mark.parametrize("reference", [None, "fused"])
def test_benchmark_shows_shares_of_the_reference_and_names_times(pyplot, reference: str | None) -> None:
    ax = plot.benchmark(TIMES, reference=reference)
    shares = {bars.get_label(): [bar.get_width() for bar in bars] for bars in ax.containers}
    assert list(shares) == ["stock", "fused", "other"]
    expected = [[2.0, 8000.0], [1.0, 1.0], [4000.0]] if reference else [[1.0, 1.0], [0.5, 1.25e-4], [0.5]]
    assert list(shares.values()) == [pytest.approx(widths) for widths in expected]
    assert [t.get_text() for t in ax.texts] == ["2 ms", "4 s", "1 ms", "500 µs", "2 s"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["short", "long"]
    assert ax.get_xlabel() == f"time / time of {reference or 'stock'}"
    middles = [bar.get_y() + bar.get_height() / 2 for bars in ax.containers for bar in bars]
    assert [round(y) for y in middles] == [0, 1, 0, 1, 1]  # beside the name of their case


def test_benchmark_without_cases_and_without_a_reference(pyplot) -> None:
    assert not plot.benchmark({}).containers
    with pytest.raises(ValueError, match="times must have the reference 'other' in every case, not in 'short'"):
        plot.benchmark(TIMES, reference="other")


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot.attention_map(torch.rand(2, 3))
