# SPDX-License-Identifier: BSD-3-Clause
"""The formulations of fused_mha.formulations beside plain implementations, written here, and nn.MultiheadAttention."""

from __future__ import annotations

import copy
import math
from collections import Counter

import fused_mha
import pytest
import torch
from fused_mha.functional import attention, multi_head_attention, packed_multi_head_attention
from tolerances import assert_close_as_torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# --------------------------------------------------------------------------------------------- the explicit functional


def plain_multi_head_attention(
    Q, K, V, Wq, Wk, Wv, Wo, Bq, Bk, Bv, Bo, num_heads, key_mask=None, attn_mask=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence first, head by head, by the formula; rows that see nothing are 0."""

    def project(x, w, b):
        y = x.transpose(0, 1) @ w.T
        return y if b is None else y + b

    queries, keys, values = project(Q, Wq, Bq), project(K, Wk, Bk), project(V, Wv, Bv)
    heads, weights = [], []
    for q, k, v in zip(*(t.chunk(num_heads, dim=-1) for t in (queries, keys, values)), strict=True):
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if attn_mask is not None:
            scores = scores + attn_mask
        if key_mask is not None:
            scores = scores.masked_fill(key_mask[:, None, :], -math.inf)
        weight = scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
        heads.append(weight @ v)
        weights.append(weight)
    output = torch.cat(heads, -1).transpose(0, 1) @ Wo.T
    return (output if Bo is None else output + Bo), torch.stack(weights).mean(0)


def explicit_arguments(
    L: int, S: int, N: int, H: int, E: int, Ek: int, Ev: int, D: int, Dv: int, Eo: int, *, bias: bool
) -> list[torch.Tensor | None]:
    sizes = [(L, N, E), (S, N, Ek), (S, N, Ev), (H * D, E), (H * D, Ek), (H * Dv, Ev), (Eo, H * Dv)]
    biases = [torch.randn(size) if bias else None for size in (H * D, H * D, H * Dv, Eo)]
    return [torch.randn(size) for size in sizes] + biases


def double(arguments: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if a is None else a.double() for a in arguments]


def masks(L: int, S: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A bool key mask whose last sample keeps nothing, and a float mask with finite numbers and a hidden corner."""
    key_mask = torch.rand(N, S) < 0.3
    key_mask[:, 0] = False
    key_mask[-1] = True
    attn_mask = torch.randint(-8, 9, (L, S)) / 8
    attn_mask[0, S // 2 :] = -math.inf
    return key_mask, attn_mask


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", ["neither", "key_mask", "attn_mask", "both"])
@pytest.mark.parametrize(
    "sizes",
    [(3, 4, 2, 4, 8, 8, 8, 2, 2, 8), (1, 1, 1, 1, 1, 1, 1, 1, 1, 1), (5, 33, 3, 2, 6, 7, 10, 3, 5, 4)],
    ids=["textbook", "ones", "free-widths"],
)
def test_explicit_functional_is_the_formula(sizes, masked: str, bias: bool) -> None:
    L, S, N, H = sizes[:4]
    arguments = explicit_arguments(*sizes, bias=bias)
    key_mask, attn_mask = masks(L, S, N)
    options = {
        "key_mask": key_mask if masked in ("key_mask", "both") else None,
        "attn_mask": attn_mask if masked in ("attn_mask", "both") else None,
    }
    output, weights = multi_head_attention(*arguments, H, **options)
    expected, expected_weights = plain_multi_head_attention(*double(arguments), H, **options)
    yardstick, yardstick_weights = plain_multi_head_attention(*arguments, H, **options)
    assert output.shape == (L, N, sizes[-1])
    assert weights.shape == (N, L, S)
    assert_close_as_torch(output, expected, yardstick, what="output")
    assert_close_as_torch(weights, expected_weights, yardstick_weights, what="weights")


@pytest.mark.parametrize("separate", [False, True], ids=["packed", "separate"])
@pytest.mark.parametrize("bias", [False, True])
def test_explicit_functional_is_the_stock_module_where_that_can_express_it(separate: bool, bias: bool) -> None:
    E, H, L, S, N = 8, 4, 3, 4, 2
    stock = nn.MultiheadAttention(E, H, bias=bias, kdim=6 if separate else None, vdim=10 if separate else None)
    if bias:
        nn.init.normal_(stock.in_proj_bias)
        nn.init.normal_(stock.out_proj.bias)
    Q, K, V = torch.randn(L, N, E), torch.randn(S, N, stock.kdim), torch.randn(S, N, stock.vdim)
    key_mask, attn_mask = masks(L, S, N)
    key_mask[-1, 0] = False  # the stock module has no answer for a sample without keys
    if separate:
        Wq, Wk, Wv = stock.q_proj_weight, stock.k_proj_weight, stock.v_proj_weight
    else:
        Wq, Wk, Wv = stock.in_proj_weight.chunk(3)
    Bq, Bk, Bv = stock.in_proj_bias.chunk(3) if bias else (None, None, None)
    weights_and_biases = (Wq, Wk, Wv, stock.out_proj.weight, Bq, Bk, Bv, stock.out_proj.bias)
    output, weights = multi_head_attention(Q, K, V, *weights_and_biases, H, key_mask, attn_mask)
    additive_key_mask = torch.zeros(key_mask.shape).masked_fill(key_mask, -math.inf)
    stock_masks = {"key_padding_mask": additive_key_mask, "attn_mask": attn_mask}
    expected, expected_weights = stock(Q, K, V, **stock_masks)
    exact, exact_weights = copy.deepcopy(stock).double()(
        *double([Q, K, V]), **{name: mask.double() for name, mask in stock_masks.items()}
    )
    assert_close_as_torch(output, exact, expected, what="output")
    assert_close_as_torch(weights, exact_weights, expected_weights, what="weights")


def test_explicit_functional_gradients_reach_every_argument() -> None:
    arguments = [a.double().requires_grad_() for a in explicit_arguments(3, 4, 2, 2, 3, 4, 5, 2, 3, 2, bias=True)]
    key_mask, attn_mask = masks(3, 4, 2)
    attn_mask = attn_mask.double().requires_grad_()

    def run(attn_mask, *tensors):
        return multi_head_attention(*tensors, 2, key_mask, attn_mask)

    assert torch.autograd.gradcheck(run, (attn_mask, *arguments))


def test_explicit_functional_layouts_agree() -> None:
    arguments = double(explicit_arguments(3, 5, 2, 2, 4, 6, 7, 3, 2, 5, bias=True))
    key_mask, attn_mask = masks(3, 5, 2)
    output, weights = multi_head_attention(*arguments, 2, key_mask, attn_mask)
    Q, K, V = (t.transpose(0, 1) for t in arguments[:3])
    first, first_weights = multi_head_attention(Q, K, V, *arguments[3:], 2, key_mask, attn_mask, batch_first=True)
    assert_close_as_torch(first.transpose(0, 1), output, what="output, batch first")
    assert_close_as_torch(first_weights, weights, what="weights, batch first")
    single, single_weights = multi_head_attention(Q[0], K[0], V[0], *arguments[3:], 2, key_mask[0], attn_mask)
    assert_close_as_torch(single, output[:, 0], what="unbatched output")
    assert_close_as_torch(single_weights, weights[0], what="unbatched weights")


def test_explicit_functional_hides_columns_and_corners() -> None:
    """The example of docs/explicit.md: which weights become exactly 0."""
    arguments = explicit_arguments(3, 4, 2, 4, 8, 8, 8, 2, 2, 8, bias=True)
    key_mask = torch.tensor([[False, False, False, True], [False, True, False, False]])
    corner = torch.zeros(3, 4)
    corner[0, 2:] = corner[1, 3:] = -math.inf
    _, weights = multi_head_attention(*arguments, 4, key_mask, corner)
    hidden = key_mask[:, None, :] | (corner == -math.inf)
    assert torch.equal(weights == 0, hidden)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({5: torch.randn(8, 7)}, r"Wv must have as many columns as V is wide, 8, got shape \(8, 7\)"),
        ({4: torch.randn(12, 8)}, r"Wq and Wk must have as many rows, H \* D, got 8 and 12"),
        ({6: torch.randn(8, 6)}, r"Wo must have as many columns as Wv has rows, H \* Dv = 8, got shape \(8, 6\)"),
        ({3: torch.randn(6, 8)}, "num_heads must divide the rows of Wq, 6, got num_heads = 4"),
        ({3: torch.randn(8)}, r"Wq must have 2 dimensions, got shape \(8,\)"),
        ({0: torch.randn(8)}, r"Q must have 3 dimensions, or 2 unbatched, got shape \(8,\)"),
        ({11: 0}, "num_heads must be positive, got 0"),
        ({12: torch.zeros(2, 3, dtype=torch.bool)}, r"must have shape \(N, S\) = \(2, 4\), got \(2, 3\)"),
    ],
)
def test_explicit_functional_names_what_does_not_fit(change, message: str) -> None:
    arguments = [*explicit_arguments(3, 4, 2, 4, 8, 8, 8, 2, 2, 8, bias=False), 4, None]
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises((ValueError, RuntimeError), match=message):
        multi_head_attention(*arguments)


def test_bare_attention_is_the_three_dimensional_operator() -> None:
    Q, K, V = torch.randn(2, 3, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 5)

    def plain(Q, K, V):
        return (Q @ K.transpose(1, 2) / math.sqrt(Q.shape[-1])).softmax(-1) @ V

    assert_close_as_torch(attention(Q, K, V), plain(*double([Q, K, V])), plain(Q, K, V), what="output")


# ------------------------------------------------------------------------------------------------------ the packed form


def plain_packed(query, key, value, in_proj_weight, out_proj_weight, num_heads):
    Wq, Wk, Wv = in_proj_weight.chunk(3)
    none = (None, None, None, None)
    return plain_multi_head_attention(query, key, value, Wq, Wk, Wv, out_proj_weight, *none, num_heads)


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("itself", [False, True], ids=["cross", "self"])
def test_packed_form_is_the_formula(num_heads: int, itself: bool) -> None:
    query, memory = torch.randn(5, 2, 8), torch.randn(7, 2, 8)
    inputs = (query,) * 3 if itself else (query, memory, memory)
    in_proj_weight, out_proj_weight = torch.randn(24, 8), torch.randn(8, 8)
    output, weights = packed_multi_head_attention(*inputs, in_proj_weight, out_proj_weight, num_heads)
    every = [*inputs, in_proj_weight, out_proj_weight]
    expected, expected_weights = plain_packed(*double(every), num_heads)
    yardstick, yardstick_weights = plain_packed(*every, num_heads)
    assert_close_as_torch(output, expected, yardstick, what="output")
    assert_close_as_torch(weights, expected_weights, yardstick_weights, what="weights")


@pytest.mark.parametrize("num_heads", [1, 4])
def test_packed_form_takes_masks_and_gives_the_weights_of_each_head(num_heads: int) -> None:
    x, in_proj_weight, out_proj_weight = torch.randn(5, 2, 8), torch.randn(24, 8), torch.randn(8, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    options = {"is_causal": True, "average_attn_weights": False}
    output, weights = packed_multi_head_attention(
        x, x, x, in_proj_weight, out_proj_weight, num_heads, padding, **options
    )
    assert weights.shape == (2, num_heads, 5, 5)
    hidden = (padding[:, None, None, :] | torch.ones(5, 5, dtype=torch.bool).triu(1)).expand_as(weights)
    assert torch.equal(weights == 0, hidden)
    first, _ = packed_multi_head_attention(
        *[x.transpose(0, 1)] * 3, in_proj_weight, out_proj_weight, num_heads, padding, batch_first=True, **options
    )
    assert_close_as_torch(first.transpose(0, 1), output.double(), what="output, batch first")
    dropped, _ = packed_multi_head_attention(x, x, x, in_proj_weight, out_proj_weight, num_heads, dropout_p=1.0)
    assert not dropped.any()


# ---------------------------------------------------------------------------------------------------- the valid lengths


class PlainValidLengthsAttention(nn.Module):
    """By the book, except that scores of hidden keys are -inf and rows without keys 0."""

    def __init__(self, key_size, query_size, value_size, num_hiddens, num_heads, bias):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Linear(query_size, num_hiddens, bias=bias)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=bias)
        self.W_v = nn.Linear(value_size, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        return x.reshape(n, length, self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, queries, keys, values, valid_lens):
        q, k, v = self.heads(self.W_q(queries)), self.heads(self.W_k(keys)), self.heads(self.W_v(values))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        if valid_lens is not None:
            lengths = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens
            hidden = (torch.arange(k.shape[2]) >= lengths[:, :, None])[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        output = (weights @ v).permute(0, 2, 1, 3)
        return self.W_o(output.reshape(*output.shape[:2], -1)), weights


@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "valid_lens",
    [
        None,
        torch.tensor([3, 2]),
        torch.tensor([6, 0], dtype=torch.int32),
        torch.tensor([[1, 6, 0, 3], [2, 2, 5, 9]]),
    ],
    ids=["all", "of-samples", "an-empty-sample", "of-queries"],
)
def test_valid_lengths_module_is_the_formula(valid_lens: torch.Tensor | None, bias: bool, keep_weights: bool) -> None:
    sizes = (7, 9, 11, 20, 5)
    fused = fused_mha.ValidLengthsAttention(*sizes, 0.5, bias, keep_weights=keep_weights).eval()
    plain = PlainValidLengthsAttention(*sizes, bias)
    plain.load_state_dict(fused.state_dict())  # the same names
    queries, keys, values = torch.randn(2, 4, 9), torch.randn(2, 6, 7), torch.randn(2, 6, 11)
    exact = copy.deepcopy(plain).double()
    inputs = [queries, keys, values]
    outputs, weights, gradients = [], [], []
    for module, arguments in ((fused, inputs), (exact, double(inputs)), (plain, inputs)):
        result = module(*arguments, valid_lens)
        output, weight = (result, fused.attention_weights) if module is fused else result
        outputs.append(output)
        weights.append(weight)
        grads = torch.autograd.grad(output.square().sum(), list(module.parameters()))
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    assert_close_as_torch(*outputs, what="output")
    assert_close_as_torch(*gradients, what="gradients", gradient=True)
    if keep_weights:
        assert_close_as_torch(*weights, what="weights")
    else:
        assert fused.attention_weights is None


class Sizes(TorchDispatchMode):
    """The largest number of elements that was made of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest[tensor.dtype] = max(self.largest[tensor.dtype], tensor.numel())
        return result


@pytest.mark.parametrize("of", ["samples", "queries"])
def test_no_mask_is_made_for_lengths_of_samples(of: str) -> None:
    """Forward and backward: nothing bool, nothing integer but two numbers a sample. (N, L) lengths do make a mask."""
    N, L, S, E = 2, 4, 60, 10
    fused = fused_mha.ValidLengthsAttention(E, E, E, E, 5, 0.1)
    queries, keys = torch.randn(N, L, E, requires_grad=True), torch.randn(N, S, E, requires_grad=True)
    lengths = torch.tensor([30, 20])
    with Sizes() as made:
        fused(queries, keys, keys, lengths if of == "samples" else lengths[:, None].expand(N, L)).sum().backward()
    assert keys.grad[1, :20].any()
    assert not keys.grad[1, 20:].any()
    if of == "queries":
        assert made.largest[torch.bool] == N * L * S
        return
    assert torch.bool not in made.largest
    assert made.largest[torch.int64] == 2 * N + 1
    assert made.largest[torch.float32] == N * S * E


def test_dropout_by_lengths_leaves_the_expectation() -> None:
    fused = fused_mha.ValidLengthsAttention(8, 8, 8, 8, 2, 0.5)
    queries, keys = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    lengths = torch.tensor([5, 3])
    torch.manual_seed(0)
    first = fused(queries, keys, keys, lengths)
    torch.manual_seed(0)
    assert torch.equal(fused(queries, keys, keys, lengths), first)
    runs = torch.stack([fused(queries, keys, keys, lengths) for _ in range(2000)])
    expected = fused.eval()(queries, keys, keys, lengths)
    # Twelve standard errors: 48 numbers, and a test that is run every day.
    assert ((runs.mean(0) - expected).abs() <= 12 * runs.std(0) / math.sqrt(len(runs))).all()
    assert (runs.std(0) > 0).all()


@pytest.mark.parametrize("strict", [False, True])
def test_exported_attention_by_lengths_takes_other_lengths(strict: bool) -> None:
    fused = fused_mha.ValidLengthsAttention(8, 8, 8, 8, 2, 0.0).eval()
    queries, keys = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    exported = torch.export.export(fused, (queries, keys, keys, torch.tensor([5, 3])), strict=strict)
    # The packed operator has no translation to ONNX, and none for devices that the program may be moved to.
    assert "varlen" not in exported.graph_module.code
    program = exported.module()
    for lengths in (torch.tensor([1, 4]), torch.tensor([0, 9])):
        torch.testing.assert_close(program(queries, keys, keys, lengths), fused(queries, keys, keys, lengths))


@pytest.mark.parametrize("wrong", ["samples of keys", "samples of values", "values"])
def test_valid_lengths_do_not_hide_shapes_that_do_not_fit(wrong: str) -> None:
    """As many rows in all, so that packed sequences would fit."""
    fused = fused_mha.ValidLengthsAttention(8, 8, 8, 8, 2, 0.0)
    queries, keys, values = torch.randn(2, 4, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    if wrong == "samples of keys":
        keys = values = keys.reshape(3, 4, 8)
    elif wrong == "samples of values":
        values = values.reshape(3, 4, 8)
    else:
        values = values.flatten(0, 1)
    with pytest.raises((RuntimeError, ValueError), match="fused_mha::"):
        fused(queries, keys, values, torch.tensor([3, 2]))


def test_valid_lengths_of_the_book() -> None:
    """2 x 4 queries, 6 keys, width 100, 5 heads."""
    fused = fused_mha.ValidLengthsAttention(100, 100, 100, 100, 5, 0.5).eval()
    queries, keys = torch.ones(2, 4, 100), torch.ones(2, 6, 100)
    assert fused(queries, keys, keys, torch.tensor([3, 2])).shape == (2, 4, 100)
    assert fused.attention_weights is None


def test_a_valid_length_of_zero_gives_zeros_and_no_gradient() -> None:
    fused = fused_mha.ValidLengthsAttention(8, 8, 8, 8, 2, 0.0, keep_weights=True)
    queries, keys = torch.randn(2, 3, 8), torch.randn(2, 4, 8).requires_grad_()
    output = fused(queries, keys, keys, torch.tensor([2, 0]))
    assert torch.equal(output[1], torch.zeros(3, 8))
    assert torch.equal(fused.attention_weights[1], torch.zeros(2, 3, 4))
    output.sum().backward()
    assert not keys.grad[1].any()
    assert not keys.grad[0, 2:].any()
    assert keys.grad[0, :2].all()


def test_valid_lengths_beyond_the_keys_hide_nothing() -> None:
    fused = fused_mha.ValidLengthsAttention(8, 8, 8, 8, 2, 0.0)
    x = torch.randn(2, 3, 8)
    assert torch.equal(fused(x, x, x, torch.tensor([3, 100])), fused(x, x, x, torch.tensor([3, 3])))


def test_padding_beyond_a_valid_length_is_not_read() -> None:
    fused = fused_mha.ValidLengthsAttention(8, 8, 8, 8, 2, 0.0)
    x, keys = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    dirty = keys.clone()
    dirty[0, 2:] = math.nan
    lengths = torch.tensor([2, 5])
    assert torch.equal(fused(x, dirty, dirty, lengths), fused(x, keys, keys, lengths))


def test_valid_lengths_weights_are_kept_only_when_asked_for() -> None:
    fused = fused_mha.ValidLengthsAttention(8, 8, 8, 8, 2, 1.0, keep_weights=True)
    x = torch.randn(2, 3, 8)
    assert not fused(x, x, x).any()  # dropout 1, in training
    assert not fused.attention_weights.any()
    fused.eval()
    fused(x, x, x)
    assert not fused.attention_weights.requires_grad
    torch.testing.assert_close(fused.attention_weights.sum(-1), torch.ones(2, 2, 3))
    fused.keep_weights = False
    fused(x, x, x)
    assert fused.attention_weights is None


@pytest.mark.parametrize(
    ("valid_lens", "error", "message"),
    [
        (torch.tensor([3.0, 2.0]), TypeError, "valid_lens must be integers, got torch.float32"),
        (torch.tensor([True, False]), TypeError, "valid_lens must be integers, got torch.bool"),
        (
            torch.tensor([3]),
            ValueError,
            r"valid_lens must have shape \(N\) = \(2,\) or \(N, L\) = \(2, 4\), got \(1,\)",
        ),
        (torch.ones(2, 6, dtype=torch.int64), ValueError, r"valid_lens must have shape .* got \(2, 6\)"),
    ],
)
def test_valid_lengths_that_do_not_fit_are_named(valid_lens, error, message: str) -> None:
    fused = fused_mha.ValidLengthsAttention(8, 8, 8, 8, 2, 0.0)
    queries, keys = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
    with pytest.raises(error, match=message):
        fused(queries, keys, keys, valid_lens)


def test_valid_lengths_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="num_heads must divide num_hiddens = 8, got 3"):
        fused_mha.ValidLengthsAttention(8, 8, 8, 8, 3, 0.0)


@pytest.mark.parametrize("keep_weights", [False, True])
def test_valid_lengths_module_compiles_whole(keep_weights: bool) -> None:
    fused = fused_mha.ValidLengthsAttention(8, 8, 8, 8, 2, 0.0, keep_weights=keep_weights)
    compiled = torch.compile(copy.deepcopy(fused), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 8)
    for lengths in (torch.tensor([3, 1]), torch.tensor([[1, 2, 3], [0, 1, 2]])):
        assert torch.equal(compiled(x, x, x, lengths), fused(x, x, x, lengths))
