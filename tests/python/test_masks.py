# SPDX-License-Identifier: BSD-3-Clause
"""What a mask means: polarity and dtypes, broadcasting, hidden is not read, empty rows, causality, finite biases."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from cases import DTYPES, Case, Inputs, later
from tolerances import assert_close_as_torch, assert_unchanged

ops = torch.ops.fused_mha

SPOILERS = (math.nan, math.inf, -math.inf, 1e30)
N, H, L, S, D = 2, 2, 33, 40, 16


def make(dtype: torch.dtype = torch.float32, device: str = "cpu", **changes) -> Inputs:
    return Case("masks", **{"N": N, "H": H, "L": L, "S": S, "D": D, **changes}).make(dtype, device)


def call(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.attention_with_weights(*inputs.tensors(), **inputs.options(), average_attn_weights=False)


def output_and_gradients(inputs: Inputs, rows: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Output and the gradients of every floating input; `rows` (bool, broadcastable) selects what enters the loss."""
    inputs = inputs.with_grad()
    output = ops.attention(*inputs.tensors(), **inputs.options())
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    if rows is not None:
        grad = grad * rows
    return [output.detach(), *torch.autograd.grad(output, inputs.leaves(), grad)]


# Dtypes and polarity.


@pytest.mark.parametrize("float_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bool_true_and_minus_infinity_are_the_same(dtype, float_dtype, device: str) -> None:
    inputs = make(dtype, device, padding="scattered", mask="bool")
    expected = call(inputs)
    for name in ("key_padding_mask", "attn_mask"):
        hidden = getattr(inputs, name)
        setattr(
            inputs, name, torch.zeros(hidden.shape, dtype=float_dtype, device=device).masked_fill(hidden, -math.inf)
        )
        found = call(inputs)
        for ours, theirs in zip(found, expected, strict=True):
            assert_unchanged(ours, theirs, name)


def test_true_hides(device: str) -> None:
    inputs = make(device=device)
    only_first = torch.ones(N, S, dtype=torch.bool, device=device)
    only_first[:, 0] = False
    for masks in ({"key_padding_mask": only_first}, {"attn_mask": only_first[:, None, None]}):
        output = ops.attention(*inputs.tensors(), **masks)
        assert torch.equal(output, inputs.value[:, :, :1].expand_as(output))


@pytest.mark.parametrize("shape", [(), (S,), (L, 1), (L, S), (H, L, S), (1, L, S), (N, 1, 1, S), (N, H, L, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attn_mask_broadcasts(kind: str, shape: tuple[int, ...], device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.rand(shape, generator=generator) < 0.4
    mask = hidden if kind == "bool" else torch.randn(shape, generator=generator).masked_fill(hidden, -math.inf)
    inputs = make(device=device)
    inputs.attn_mask = mask.to(device)
    output, weights = call(inputs)
    expected, expected_weights = reference.attention(inputs.double())
    own, own_weights = reference.torch_output_and_weights(inputs)
    assert_close_as_torch(output, expected, own, what="output")
    assert_close_as_torch(weights, expected_weights, own_weights, what="weights")


def test_expanded_mask_is_the_small_mask(device: str) -> None:
    """pytorch#116472: a mask shared by all heads needs no copy for each."""
    inputs = make(device=device, mask="bool_per_sample")
    expected = call(inputs)
    inputs.attn_mask = inputs.attn_mask.expand(N, H, L, S)
    assert inputs.attn_mask.stride(1) == 0
    found = call(inputs)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


# Hidden is not read.


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", ["right", "left", "scattered", "whole_sample", "float_inf"])
def test_padded_keys_are_never_read(padding: str, dtype: torch.dtype, spoiler: float, device: str) -> None:
    inputs = make(dtype, device, padding=padding)
    hidden = inputs.key_padding_mask
    hidden = (hidden if hidden.dtype == torch.bool else hidden == -math.inf)[:, None, :, None]
    assert hidden.any()
    expected = output_and_gradients(inputs)
    inputs.key = inputs.key.masked_fill(hidden, spoiler)
    inputs.value = inputs.value.masked_fill(hidden, spoiler)
    found = output_and_gradients(inputs)
    for what, ours, clean in zip(("output", "query", "key", "value"), found, expected, strict=False):
        assert_unchanged(ours, clean, what)
    for grad in found[2:4]:
        assert torch.count_nonzero(grad.masked_select(hidden)) == 0


@pytest.mark.parametrize("spoiler", SPOILERS[:3])
@pytest.mark.parametrize("kind", ["bool", "float", "per_head", "flag"])
def test_a_key_hidden_from_some_rows_spoils_only_the_others(kind: str, spoiler: float, device: str) -> None:
    """All in one tile: rows from 20 on see key 20, the rows before do not."""
    inputs = make(device=device)
    hidden = later(L, S)
    inputs.is_causal = kind == "flag"
    inputs.attn_mask = {
        "bool": hidden,
        "float": torch.zeros(L, S).masked_fill(hidden, -math.inf),
        "per_head": hidden.expand(1, H, L, S).contiguous(),
        "flag": None,
    }[kind]
    if inputs.attn_mask is not None:
        inputs.attn_mask = inputs.attn_mask.to(device)
    expected = output_and_gradients(inputs)
    inputs.key, inputs.value = inputs.key.clone(), inputs.value.clone()
    inputs.key[:, :, 20] = spoiler
    inputs.value[:, :, 20] = spoiler
    found = output_and_gradients(inputs)
    for what, ours, clean in zip(("output", "query"), found, expected, strict=False):
        assert_unchanged(ours[:, :, :20], clean[:, :, :20], what)
    if math.isnan(spoiler):
        assert found[0][:, :, 20:].isnan().all(), "a visible NaN must be seen"
    for what, grad in zip(("key", "value"), found[2:4], strict=True):
        assert torch.count_nonzero(grad[:, :, L:]) == 0, f"keys that no row sees have gradient 0: {what}"


@pytest.mark.parametrize("spoiler", SPOILERS[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_in_one_tile_do_not_leak_into_each_other(dtype: torch.dtype, spoiler: float, device: str) -> None:
    """Rows 0..9 see keys 0..9, the others the rest; a spoilt key of the second block leaves the first block alone."""
    inputs = make(dtype, device)
    first_rows = (torch.arange(L) < 10)[:, None]
    first_keys = (torch.arange(S) < 10)[None, :]
    inputs.attn_mask = (first_rows ^ first_keys).to(device)
    expected = output_and_gradients(inputs)
    inputs.key, inputs.value = inputs.key.clone(), inputs.value.clone()
    inputs.key[:, :, 15] = spoiler
    inputs.value[:, :, 15] = spoiler
    found = output_and_gradients(inputs)
    for what, ours, clean in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert_unchanged(ours[:, :, :10], clean[:, :, :10], what)


def test_a_query_that_sees_nothing_is_never_read(device: str) -> None:
    inputs = make(device=device, mask="float_inf_empty_row")
    row = L // 2
    expected = output_and_gradients(inputs)
    inputs.query = inputs.query.clone()
    inputs.query[:, :, row] = math.nan
    for what, ours, clean in zip(
        ("output", "query", "key", "value", "attn_mask"), output_and_gradients(inputs), expected, strict=True
    ):
        assert_unchanged(ours, clean, what)


def test_a_spoilt_mask_number_at_a_hidden_position_changes_nothing(device: str) -> None:
    inputs = make(device=device, padding="scattered", mask="float")
    expected = call(inputs)
    inputs.attn_mask = inputs.attn_mask.masked_fill(inputs.key_padding_mask.all(0)[None, :], math.nan)
    assert inputs.attn_mask.isnan().any()
    found = call(inputs)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["query", "key", "value", "attn_mask", "key_padding_mask"])
def test_a_visible_nan_gives_nan(where: str, dtype: torch.dtype, device: str) -> None:
    inputs = make(dtype, device, padding="float", mask="float")
    spoilt = getattr(inputs, where).clone()
    setattr(inputs, where, spoilt)
    affected = torch.zeros(N, H, L, D, dtype=torch.bool, device=device)
    if where == "query":
        spoilt[1, 1, 7, 3] = math.nan
        affected[1, 1, 7] = True
    elif where == "key":
        spoilt[1, 0, 11, 5] = math.nan
        affected[1, 0] = True
    elif where == "value":
        spoilt[1, 0, 11, 5] = math.nan
        affected[1, 0, :, 5] = True
    elif where == "attn_mask":
        spoilt[4, 9] = math.nan
        affected[:, :, 4] = True
    else:
        spoilt[1, 9] = math.nan
        affected[1] = True
    output = ops.attention(*inputs.tensors(), **inputs.options())
    assert torch.equal(output.isnan(), affected)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_a_row_that_is_nan_are_nan_where_dropped_too(dtype: torch.dtype, average: bool, device: str) -> None:
    inputs = make(dtype, device, padding="right")
    inputs.query[0, 0, 3, 2] = math.nan
    options = {**inputs.options(), "dropout_p": 0.5, "average_attn_weights": average}
    _, weights = ops.attention_with_weights(*inputs.tensors(), **options)
    rows = weights if average else weights[:, 0]
    visible = ~inputs.key_padding_mask[0]
    assert rows[0, 3, visible].isnan().all()
    assert torch.count_nonzero(rows[0, 3, ~visible]) == 0
    assert weights.isnan().sum() == visible.sum()


def test_nan_in_every_key_is_not_an_empty_row(device: str) -> None:
    inputs = make(device=device)
    inputs.key = torch.full_like(inputs.key, math.nan)
    assert ops.attention(*inputs.tensors()).isnan().all()


# Rows without visible keys.


ROW_4 = (torch.arange(L) == 4)[:, None]
EMPTY_ROWS = {
    "bool_row": lambda: {"attn_mask": ROW_4.expand(L, S)},
    "float_row": lambda: {"attn_mask": torch.zeros(L, S).masked_fill(ROW_4, -math.inf)},
    "two_halves": lambda: {
        "key_padding_mask": (torch.arange(S) < 20).expand(N, S),
        "attn_mask": torch.zeros(L, S).masked_fill(ROW_4 & (torch.arange(S) >= 20)[None, :], -math.inf),
    },
    "causal_behind_padding": lambda: {"key_padding_mask": (torch.arange(S) < 5).expand(N, S), "is_causal": True},
    "head": lambda: {"attn_mask": (torch.arange(H) == 1)[:, None, None].expand(H, L, S)},
    "sample": lambda: {"key_padding_mask": (torch.arange(N) == 1)[:, None].expand(N, S)},
    "everything": lambda: {"attn_mask": torch.ones((), dtype=torch.bool)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", EMPTY_ROWS)
def test_rows_without_visible_keys_are_zero(kind: str, dtype: torch.dtype, device: str) -> None:
    inputs = make(dtype, device)
    for name, value in EMPTY_ROWS[kind]().items():
        setattr(inputs, name, value.to(device) if isinstance(value, torch.Tensor) else value)
    visible, _ = reference.visible_and_bias((N, H, L, S), inputs.key_padding_mask, inputs.attn_mask, inputs.is_causal)
    empty = ~visible.any(-1).to(device)
    assert empty.any()
    leaves = inputs.with_grad()
    output, weights = call(leaves)
    assert torch.count_nonzero(output[empty]) == 0
    assert torch.count_nonzero(weights[empty]) == 0
    assert torch.isfinite(output).all()
    assert torch.isfinite(weights).all()
    averaged = ops.attention_with_weights(*inputs.tensors(), **inputs.options())[1]
    assert torch.isfinite(averaged).all()
    assert torch.count_nonzero(averaged[empty.all(1)]) == 0
    grads = torch.autograd.grad(output.square().sum() + weights.square().sum() + output.sum(), leaves.leaves())
    assert torch.count_nonzero(grads[0][empty]) == 0
    assert all(torch.isfinite(g).all() for g in grads)
    row_sums = weights.double().sum(-1)[~empty]
    torch.testing.assert_close(row_sums, torch.ones_like(row_sums), rtol=0.0, atol=8 * torch.finfo(dtype).eps)


def test_an_empty_row_does_not_change_the_others(device: str) -> None:
    inputs = make(device=device, mask="float")
    expected = output_and_gradients(inputs, rows=(torch.arange(L) != 4)[:, None].to(device))
    inputs.attn_mask = inputs.attn_mask.clone()
    inputs.attn_mask[4] = -math.inf
    found = output_and_gradients(inputs)
    keep = torch.arange(L, device=device) != 4
    assert torch.equal(found[0][:, :, keep], expected[0][:, :, keep])
    assert torch.equal(found[1][:, :, keep], expected[1][:, :, keep])
    assert torch.equal(found[4][keep], expected[4][keep])
    for ours, clean in zip(found[2:4], expected[2:4], strict=True):
        torch.testing.assert_close(ours, clean, rtol=1e-5, atol=1e-6)


# Finite values are biases.


@pytest.mark.parametrize("mask_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["attn_mask", "key_padding_mask", "both"])
def test_a_row_full_of_the_lowest_number_is_uniform(where, dtype, mask_dtype, device: str) -> None:
    """pytorch#109517: two of them added must not become -inf, nor must one times log2(e)."""
    inputs = make(dtype, device)
    lowest = torch.finfo(mask_dtype).min
    if where != "attn_mask":
        inputs.key_padding_mask = torch.full((N, S), lowest, dtype=mask_dtype, device=device)
    if where != "key_padding_mask":
        inputs.attn_mask = torch.full((L, S), lowest, dtype=mask_dtype, device=device)
    output, weights = call(inputs)
    assert torch.isfinite(output).all()
    assert torch.isfinite(weights).all()
    if abs(lowest) < 1e6 and dtype != torch.float16:
        expected, expected_weights = reference.attention(inputs.double())
        # The bias swallows the low bits of the scores, in PyTorch as here.
        atol = 0.02 if dtype != torch.float64 else 1e-9
        torch.testing.assert_close(output.double(), expected.to(device), rtol=0.0, atol=atol)
        torch.testing.assert_close(weights.double(), expected_weights.to(device), rtol=0.0, atol=atol)
    elif abs(lowest) > 1e6:
        mean = inputs.value.double().mean(-2, keepdim=True)
        assert_close_as_torch(output, mean.expand(output.shape).cpu(), what="output", scale=4.0)
        uniform = torch.full((N, H, L, S), 1.0 / S, dtype=torch.float64)
        assert_close_as_torch(weights, uniform, what="weights")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_lowest_number_loses_against_any_other(dtype: torch.dtype, device: str) -> None:
    inputs = make(dtype, device)
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(L, S, device=device, dtype=dtype)
    mask[:, 10:] = lowest
    inputs.attn_mask = mask
    inputs.key_padding_mask = torch.zeros(N, S, device=device, dtype=dtype)
    inputs.key_padding_mask[:, 20:] = lowest
    output, weights = call(inputs)
    assert torch.count_nonzero(weights[..., 10:]) == 0
    short = Inputs(inputs.query, inputs.key[:, :, :10], inputs.value[:, :, :10])
    expected = reference.attention(short.double())[0]
    assert_close_as_torch(output, expected, reference.torch_output(short), what="output")


def test_some_keys_with_two_lowest_numbers_and_some_with_one(device: str) -> None:
    inputs = make(device=device)
    lowest = torch.finfo(torch.float32).min
    inputs.attn_mask = torch.full((L, S), lowest, device=device)
    inputs.key_padding_mask = torch.zeros(N, S, device=device)
    inputs.key_padding_mask[:, 10:] = lowest
    output, weights = call(inputs)
    row_sums = weights.sum(-1)
    torch.testing.assert_close(row_sums, torch.ones_like(row_sums), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(output).all()


def test_a_low_real_score_does_not_let_a_hidden_key_win(device: str) -> None:
    """d2l-en PR 2423: with a fill value of -1e6 a real score below it loses against the padding."""
    query = torch.full((1, 1, 1, 4), 1e4, device=device)
    key = torch.tensor([[-1e4] * 4, [0.0] * 4], device=device)[None, None]
    value = torch.tensor([[1.0], [2.0]], device=device)[None, None]
    hidden = torch.tensor([[False, True]], device=device)
    output, weights = ops.attention_with_weights(query, key, value, key_padding_mask=hidden)
    assert weights.tolist() == [[[1.0, 0.0]]]
    assert output.item() == 1.0


# Causality.


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (33, 33), (31, 65), (65, 31), (130, 130), (2, 130)], ids=str)
def test_causal_is_top_left(sizes: tuple[int, int], device: str) -> None:
    """pytorch#108108: row l sees keys 0..l whatever L and S are."""
    length, s = sizes
    inputs = make(device=device, L=length, S=s)
    flag = ops.attention_with_weights(*inputs.tensors(), is_causal=True, average_attn_weights=False)
    mask = ops.attention_with_weights(
        *inputs.tensors(), attn_mask=later(length, s).to(device), average_attn_weights=False
    )
    assert torch.equal(flag[1] != 0, ~later(length, s).expand_as(flag[1]).to(device))
    for ours, theirs in zip(flag, mask, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", ["", "bool_full", "float_full", "float_rows"])
@pytest.mark.parametrize("padding", ["", "left", "scattered", "float_inf"])
def test_causal_hides_beside_what_the_masks_hide(padding: str, mask: str, device: str) -> None:
    inputs = make(device=device, padding=padding, mask=mask, is_causal=True)
    output, weights = call(inputs)
    expected, expected_weights = reference.attention(inputs.double())
    own, own_weights = reference.torch_output_and_weights(inputs)
    assert_close_as_torch(output, expected, own, what="output")
    assert_close_as_torch(weights, expected_weights, own_weights, what="weights")
    assert torch.equal(weights == 0, expected_weights.to(device) == 0)


def test_masked_equals_separate_calls(device: str) -> None:
    """pytorch#108503: four blocks of unequal length in one call, in bfloat16."""
    lengths = (5, 33, 1, 26)
    total = sum(lengths)
    inputs = make(torch.bfloat16, device, L=total, S=total, D=64)
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).to(device)
    together = ops.attention(*inputs.tensors(), attn_mask=owner[:, None] != owner[None, :])
    start = 0
    for length in lengths:
        part = [t[:, :, start : start + length] for t in inputs.tensors()]
        own = Inputs(*part)
        assert_close_as_torch(
            together[:, :, start : start + length],
            reference.attention(own.double())[0],
            reference.torch_output(own),
            what=f"block at {start}",
        )
        start += length


def test_right_padding_equals_truncation(device: str) -> None:
    inputs = make(torch.float64, device, padding="right")
    output = ops.attention(*inputs.tensors(), **inputs.options())
    for sample in range(N):
        kept = int((~inputs.key_padding_mask[sample]).sum())
        short = [inputs.query[sample : sample + 1], *(t[sample : sample + 1, :, :kept] for t in inputs.tensors()[1:])]
        torch.testing.assert_close(output[sample : sample + 1], ops.attention(*short), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.complex64], ids=str)
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_masks_of_other_dtypes_are_refused(name: str, dtype: torch.dtype, device: str) -> None:
    mask = torch.zeros((N, S) if name == "key_padding_mask" else (L, S), dtype=dtype, device=device)
    with pytest.raises(TypeError, match=rf"fused_mha::attention: {name} .*bool"):
        ops.attention(*make(device=device).tensors(), **{name: mask})


def _aligned_blocks(length: int = 96) -> torch.Tensor:
    """Hides keys 32 to 63 from the first 48 rows: whole tiles, with no ragged one beside them."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[:48, 32:64] = True
    return mask


def test_nan_in_a_key_hidden_by_whole_tiles_stays_out_of_gradients(device: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 96, 8, device=device) for _ in range(3))
    key[..., 40, :] = float("nan")
    query.requires_grad_()
    output = torch.ops.fused_mha.attention(query, key, value, attn_mask=_aligned_blocks().to(device))
    (grad,) = torch.autograd.grad(output[..., :48, :].sum(), query)
    assert grad[..., :48, :].isfinite().all()


def test_nan_in_one_rows_gradient_stays_out_of_keys_hidden_from_it(device: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 96, 8, device=device) for _ in range(3))
    value.requires_grad_()
    output = torch.ops.fused_mha.attention(query, key, value, attn_mask=_aligned_blocks().to(device))
    upstream = torch.ones_like(output)
    upstream[..., 3, :] = float("nan")
    (grad,) = torch.autograd.grad(output, value, upstream)
    assert grad[..., 32:64, :].isfinite().all()
    assert grad[..., :32, :].isnan().all()


def test_infinite_weight_gradient_at_a_hidden_key_changes_nothing(device: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 8, device=device, requires_grad=True) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)
    _, weights = torch.ops.fused_mha.attention_with_weights(query, key, value, attn_mask=mask)
    upstream = torch.randn_like(weights)
    expected = torch.autograd.grad(weights, query, upstream, retain_graph=True)[0]
    upstream[..., mask] = float("inf")
    (actual,) = torch.autograd.grad(weights, query, upstream)
    assert torch.equal(actual, expected)


def test_visible_scores_that_are_all_minus_infinity_give_nan_in_both_directions(device: str) -> None:
    query = torch.full((1, 1, 1, 2), -1e30, device=device, requires_grad=True)
    key = torch.full((1, 1, 3, 2), 1e30, device=device)
    value = torch.randn(1, 1, 3, 2, device=device, requires_grad=True)
    output = torch.ops.fused_mha.attention(query, key, value)
    assert output.isnan().all()
    assert torch.autograd.grad(output.sum(), value)[0].isnan().all()


def test_average_over_no_heads_is_zero(device: str) -> None:
    empty = torch.empty(2, 0, 3, 4, device=device)
    _, weights = torch.ops.fused_mha.attention_with_weights(empty, empty, empty)
    assert torch.equal(weights, torch.zeros(2, 3, 3, device=device))


def test_nan_row_gives_no_gradient_to_values_hidden_from_it(device: str) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 3, 4, device=device), torch.randn(1, 1, 200, 4, device=device)
    value = torch.randn(1, 1, 200, 4, device=device, requires_grad=True)
    mask = torch.zeros(1, 1, 3, 200, device=device)
    mask[..., 150] = mask[..., 5] = float("-inf")
    query[0, 0, 0], key[0, 0, 0] = 1e30, 1e30  # a score that overflows: the first row is NaN
    (grad,) = torch.autograd.grad(torch.ops.fused_mha.attention(query, key, value, attn_mask=mask).sum(), value)
    assert torch.equal(grad[0, 0, [5, 150]], torch.zeros(2, 4, device=device))
    assert grad[0, 0, 1].isnan().all()
