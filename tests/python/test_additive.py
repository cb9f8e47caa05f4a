# SPDX-License-Identifier: BSD-3-Clause
"""Additive attention beside its formula in float64, written here, and beside the same expression in PyTorch."""

from __future__ import annotations

import math
import subprocess
import sys

import fused_mha
import pytest
import reference
import torch
from cases import BY_NAME, DTYPES, Case, Inputs
from tolerances import assert_close_as_torch, largest

ops = torch.ops.fused_mha
functional = fused_mha.functional

# One case for each kind of size, layout and mask; in float32 all of them.
NAMES = [name for name, case in BY_NAME.items() if case.scale is None]
SOME = [
    "two_and_three",
    "head_dim_33",
    "one_query",
    "one_key",
    "value_dim_1",
    "grouped_heads",
    "layout_lnhd",
    "causal_float",
    "mixed_float64",
]


def options(inputs: Inputs) -> dict[str, object]:
    return {k: v for k, v in inputs.options().items() if k != "scale"}


def weight_for(inputs: Inputs, per_head: bool) -> torch.Tensor:
    heads, width = inputs.query.shape[1], inputs.query.shape[3]
    shape = (heads, width) if per_head else (width,)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(inputs.query.dtype)


def plain(
    inputs: Inputs, score_weight: torch.Tensor, *, keep: torch.Tensor | None = None, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and weights by the formula, in the dtype of the query. What is hidden is left out; empty rows are 0."""
    query, heads = inputs.query, inputs.query.shape[1]
    key, value = (reference.repeat_heads(t, heads) for t in (inputs.key, inputs.value))
    visible, bias = reference.visible_and_bias(
        (*query.shape[:3], key.shape[2]), inputs.key_padding_mask, inputs.attn_mask, inputs.is_causal
    )
    weight = score_weight[:, None, None, :] if score_weight.dim() == 2 else score_weight
    sums = torch.where(visible[..., None], query[..., :, None, :] + key[..., None, :, :], 0.0)
    scores = (torch.tanh(sums) * weight).sum(-1) + bias.to(query.dtype)
    scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.masked_fill(~visible.any(-1, keepdim=True), 0.0).softmax(-1).masked_fill(~visible, 0.0)
    if dropout_p > 0.0:
        weights = weights * keep * (0.0 if dropout_p >= 1.0 else 1.0 / (1.0 - dropout_p))
    if torch.isfinite(value).all():
        return weights @ value, weights
    return (weights[..., None] * torch.where(visible[..., None], value[..., None, :, :], 0.0)).sum(-2), weights


def check_forward(inputs: Inputs, score_weight: torch.Tensor) -> None:
    expected, expected_weights = plain(inputs.double(), score_weight.double())
    yardstick, yardstick_weights = plain(inputs, score_weight)
    output = ops.additive_attention(*inputs.tensors(), score_weight, **options(inputs))
    same, weights = ops.additive_attention_with_weights(
        *inputs.tensors(), score_weight, **options(inputs), average_attn_weights=False
    )
    _, averaged = ops.additive_attention_with_weights(*inputs.tensors(), score_weight, **options(inputs))
    # A tanh is right to 2 epsilons of 1, however small it is; a score is D of them times v.
    of_scores = max(1.0, float(score_weight.double().norm(dim=-1).max()))
    assert_close_as_torch(output, expected, yardstick, what="output", scale=of_scores * largest(inputs.value))
    assert torch.equal(same, output)
    assert_close_as_torch(weights, expected_weights, yardstick_weights, what="weights", scale=of_scores)
    assert_close_as_torch(
        averaged, expected_weights.mean(1), yardstick_weights.mean(1), what="averaged", scale=of_scores
    )


def gradients_of(function, inputs: Inputs, score_weight: torch.Tensor, grads: tuple[torch.Tensor, ...]):
    results = function(inputs, score_weight)
    return torch.autograd.grad(
        results, [*inputs.leaves(), score_weight], [g.to(r.dtype) for g, r in zip(grads, results, strict=True)]
    )


def check_gradients(inputs: Inputs, score_weight: torch.Tensor, dropout_p: float = 0.0) -> None:
    keep = None
    if dropout_p > 0.0:
        torch.manual_seed(5)
        state = functional.draw_rng_state()
        keep = reference.dropout_keep(state, *inputs.query.shape[:3], inputs.key.shape[2], dropout_p)

    def fused(i: Inputs, w: torch.Tensor):
        torch.manual_seed(5)
        return ops.additive_attention_with_weights(*i.tensors(), w, **options(i), dropout_p=dropout_p)

    def unfused(i: Inputs, w: torch.Tensor):
        output, weights = plain(i, w, keep=keep, dropout_p=dropout_p)
        return output, weights.mean(1)

    grads = tuple(torch.randn(r.shape) for r in unfused(inputs, score_weight))
    found = gradients_of(fused, inputs.with_grad(), score_weight.clone().requires_grad_(), grads)
    expected = gradients_of(unfused, inputs.double(), score_weight.double().requires_grad_(), grads)
    yardstick = gradients_of(unfused, inputs.with_grad(), score_weight.clone().requires_grad_(), grads)
    # With one key gradients are 0, made of numbers that are not; that of score_weight is a sum over all rows.
    scale = max(float(g.abs().max()) for g in expected)
    of_rows = math.sqrt(inputs.query[..., 0].numel())
    names = [*inputs.leaf_names(), "score_weight"]
    for name, ours, want, torchs in zip(names, found, expected, yardstick, strict=True):
        magnitude = scale * of_rows if name == "score_weight" else scale
        assert_close_as_torch(
            ours, want, torchs, what=f"gradient of {name}", gradient=True, scale=magnitude, dtype=inputs.query.dtype
        )


@pytest.mark.parametrize("name", NAMES)
def test_float32_results(name: str) -> None:
    inputs = BY_NAME[name].make(torch.float32)
    check_forward(inputs, weight_for(inputs, per_head=len(name) % 2 == 0))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    inputs = BY_NAME[name].make(dtype)
    check_forward(inputs, weight_for(inputs, per_head=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    inputs = BY_NAME[name].make(dtype)
    check_gradients(inputs, weight_for(inputs, per_head=len(name) % 2 == 0))


@pytest.mark.parametrize("name", ["head_dim_33", "one_query", "grouped_heads", "mixed_float64"])
def test_every_instruction_set(name: str, isa: str) -> None:
    inputs = BY_NAME[name].make(torch.float32)
    check_forward(inputs, weight_for(inputs, per_head=False))
    check_gradients(inputs, weight_for(inputs, per_head=False))


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@pytest.mark.parametrize("name", ["head_dim_33", "one_query", "float_inf_empty_row"])
def test_dropout_drops_what_attention_drops(name: str, dropout_p: float) -> None:
    inputs = BY_NAME[name].make(torch.float64)
    check_gradients(inputs, weight_for(inputs, per_head=True), dropout_p)
    torch.manual_seed(3)
    weights = ops.additive_attention_with_weights(
        *inputs.tensors(),
        weight_for(inputs, per_head=True),
        **options(inputs),
        dropout_p=dropout_p,
        average_attn_weights=False,
    )[1]
    torch.manual_seed(3)
    of_attention = ops.attention_with_weights(
        *inputs.tensors(), **options(inputs), dropout_p=dropout_p, average_attn_weights=False
    )[1]
    assert torch.equal(weights == 0, of_attention == 0)


@pytest.mark.parametrize("length", [1, 2, 3, 49])
def test_features_far_from_zero(length: int) -> None:
    """Beyond 21, where exp(2q) exp(2k) would overflow, and where only the sum of query and key is small."""
    inputs = Case("far", L=length, S=33, D=20, Dv=8).make(torch.float32)
    weight = weight_for(inputs, per_head=False)
    for offset in (20.0, 40.0):
        shifted = Inputs(inputs.query + offset, inputs.key - offset, inputs.value)
        check_forward(shifted, weight)
        check_gradients(shifted, weight)
    check_forward(Inputs(100 * inputs.query, 100 * inputs.key, inputs.value), weight)


@pytest.mark.parametrize("length", [1, 40])
def test_infinite_features_saturate(length: int) -> None:
    inputs = Case("saturated", H=1, L=length, S=9, D=4).make(torch.float32)
    inputs.query[0, 0, :, 1] = math.inf
    inputs.key[0, 0, 3, 2] = -math.inf
    weight = weight_for(inputs, per_head=False)
    expected, _ = plain(inputs.double(), weight.double())
    output = ops.additive_attention(*inputs.tensors(), weight)
    assert torch.isfinite(output).all()
    assert_close_as_torch(output, expected, plain(inputs, weight)[0], what="output")


@pytest.mark.parametrize("length", [2, 60])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_hidden_is_not_read(bad: float, length: int) -> None:
    """Key 7 is padding; keys from 40 on are hidden from the first rows by a mask that other rows do not have."""
    case = Case("hidden", N=1, H=1, L=length, S=70, D=8)
    clean, dirty = case.make(torch.float32), case.make(torch.float32)
    padding = torch.zeros(1, 70, dtype=torch.bool)
    padding[0, 7] = True
    mask = torch.zeros(length, 70, dtype=torch.bool)
    first = length // 2
    mask[:first, 40:] = True
    for tensor in (dirty.key, dirty.value):
        tensor[0, 0, 7] = bad
        tensor[0, 0, 45, 1] = bad
    weight = weight_for(clean, per_head=False)
    results, grads = [], []
    for inputs in (clean.with_grad(), dirty.with_grad()):
        output = ops.additive_attention(*inputs.tensors(), weight, key_padding_mask=padding, attn_mask=mask)
        results.append(output[:, :, :first])
        grads.append(torch.autograd.grad(output[:, :, :first].square().sum(), inputs.tensors()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[1][0][:, :, :first], grads[0][0][:, :, :first], rtol=1e-4, atol=1e-5)
    assert not grads[1][1][0, 0, 7].any()
    assert not grads[1][2][0, 0, 7].any()
    whole = ops.additive_attention(*dirty.tensors(), weight, key_padding_mask=padding, attn_mask=mask)
    assert not torch.isfinite(whole[0, 0, -1]).all()


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_any_size_may_be_zero(sizes: tuple[int, int, int, int], per_head: bool) -> None:
    n, h, length, s = sizes
    inputs = Case("empty", N=n, H=h, L=length, S=s, D=8, Dv=5, padding="right", mask="float").make(torch.float32)
    inputs, weight = inputs.with_grad(), weight_for(inputs, per_head).requires_grad_()
    output, weights = ops.additive_attention_with_weights(
        *inputs.tensors(), weight, **options(inputs), average_attn_weights=False
    )
    assert output.shape == (n, h, length, 5)
    assert weights.shape == (n, h, length, s)
    assert torch.count_nonzero(output) == 0
    grads = torch.autograd.grad(output.sum() + weights.sum(), [*inputs.leaves(), weight])
    for leaf, grad in zip([*inputs.leaves(), weight], grads, strict=True):
        assert grad.shape == leaf.shape
        assert torch.count_nonzero(grad) == 0


def test_inputs_without_heads_and_without_samples() -> None:
    inputs = Case("ranks", N=3, H=1, L=5, S=7, D=8, Dv=9, padding="right", mask="float_per_sample").make(torch.float32)
    weight = weight_for(inputs, per_head=False)
    expected, expected_weights = ops.additive_attention_with_weights(*inputs.tensors(), weight, **options(inputs))
    three = [t.squeeze(1) for t in inputs.tensors()]
    mask = inputs.attn_mask.squeeze(1)
    output, weights = ops.additive_attention_with_weights(
        *three, weight, key_padding_mask=inputs.key_padding_mask, attn_mask=mask
    )
    assert torch.equal(output, expected.squeeze(1))
    assert torch.equal(weights, expected_weights)
    output, weights = ops.additive_attention_with_weights(
        *(t[1] for t in three), weight, key_padding_mask=inputs.key_padding_mask[1], attn_mask=mask[1]
    )
    assert torch.equal(output, expected[1, 0])
    assert torch.equal(weights, expected_weights[1])


def small(requires_grad: bool = True) -> tuple[torch.Tensor, ...]:
    """query, key, value, score_weight, key_padding_mask and attn_mask in float64, the masks with hidden keys."""
    shapes = [(2, 2, 3, 3), (2, 1, 4, 3), (2, 1, 4, 2), (2, 3), (2, 4), (2, 1, 4)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    tensors[4][1, 2] = -math.inf
    tensors[5][0, 0, 1] = -math.inf
    return tuple(t.requires_grad_(requires_grad) for t in tensors)


def with_weights(query, key, value, weight, padding, mask):
    torch.manual_seed(0)
    return ops.additive_attention_with_weights(
        query, key, value, weight, key_padding_mask=padding, attn_mask=mask, is_causal=True, dropout_p=0.2
    )


def hiding(function, padding_hides: torch.Tensor, mask_hides: torch.Tensor):
    """`function` of finite masks, to which what hides is added: finite differences stay finite."""

    def call(query, key, value, weight, padding, mask):
        padding, mask = padding.masked_fill(padding_hides, -math.inf), mask.masked_fill(mask_hides, -math.inf)
        return function(query, key, value, weight, padding, mask)

    return call


def test_derivatives_of_both_modes_and_both_orders() -> None:
    tensors = small(requires_grad=False)
    function = hiding(with_weights, *(t == -math.inf for t in tensors[4:]))
    tensors = tuple(t.masked_fill(t == -math.inf, 0.0).requires_grad_() for t in tensors)
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True, atol=1e-5)


def test_hidden_nan_stays_out_of_tangents_and_second_order() -> None:
    query, key, value, weight, padding, mask = small(requires_grad=False)
    key[1, 0, 2] = math.nan
    query.requires_grad_()

    def output(q: torch.Tensor) -> torch.Tensor:
        return ops.additive_attention(q, key, value[..., :1], weight, key_padding_mask=padding, attn_mask=mask)

    (first,) = torch.autograd.grad(output(query).square().sum(), query, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), query)
    assert torch.isfinite(second).all()
    assert second.any()
    tangent = torch.func.jvp(output, (query.detach(),), (torch.ones_like(query),))[1]
    assert torch.isfinite(tangent).all()


def test_torch_func_and_vmap() -> None:
    query, key, value, weight, *_ = small(requires_grad=False)

    def loss(w: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return ops.additive_attention(q, key[0], value[0], w).square().sum()

    def unfused(w: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        scores = (torch.tanh(q[:, :, None] + key[0][:, None]) * w[:, None, None]).sum(-1)
        return (scores.softmax(-1) @ value[0]).square().sum()

    flat = query[:, :1], weight[:1]  # one head, samples in front
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(flat[1][0], flat[0])
    expected = torch.stack([torch.func.grad(unfused)(flat[1], q)[0] for q in flat[0]])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("per_head", "dropout_p", "weights_mode"), [(False, 0.0, 0), (True, 0.3, 1), (False, 0.3, 2)])
def test_private_operators_are_what_they_declare(per_head: bool, dropout_p: float, weights_mode: int) -> None:
    inputs = Case("check", H=4, Hkv=2, L=3, S=5, D=4, Dv=6, padding="float_inf", mask="float_per_head")
    tensors = inputs.make(torch.float32).with_grad()
    weight = weight_for(tensors, per_head).requires_grad_()
    state = torch.tensor([7, 11]) if dropout_p > 0 else None
    saved = (*tensors.tensors(), weight, tensors.key_padding_mask, tensors.attn_mask[None])
    rest = (False, dropout_p, state, weights_mode)
    torch.library.opcheck(ops._additive_attention_forward.default, (*saved, *rest))
    output, weights, row_max, row_sum = (t.detach() for t in ops._additive_attention_forward(*saved, *rest))
    grad_weights = torch.randn_like(weights) if weights_mode else None
    torch.library.opcheck(
        ops._additive_attention_backward.default,
        (torch.randn_like(output), grad_weights, *saved, output, row_max, row_sum, *rest, [True] * 6),
    )


@pytest.mark.parametrize("name", ["grouped_heads", "one_query", "layout_lnhd", "bool_full_left"])
def test_public_operators_are_what_they_declare(name: str) -> None:
    inputs = BY_NAME[name].make(torch.float32).with_grad()
    arguments = (*inputs.tensors(), weight_for(inputs, per_head=True).requires_grad_())
    torch.library.opcheck(ops.additive_attention.default, arguments, options(inputs))
    torch.library.opcheck(ops.additive_attention_with_weights.default, arguments, options(inputs))
    real = ops.additive_attention(*arguments, **options(inputs))
    to_meta = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")  # noqa: E731
    meta = inputs._map(to_meta)
    traced = ops.additive_attention(*meta.tensors(), to_meta(arguments[3]), **options(meta))
    assert (traced.shape, traced.stride(), traced.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_graph_breaks(dynamic: bool) -> None:
    torch._dynamo.reset()
    module = fused_mha.AdditiveAttention(6, 5, 8)
    queries, keys, values = (torch.randn(3, *s, requires_grad=True) for s in ((4, 6), (7, 5), (7, 2)))
    padding = torch.arange(7) >= torch.tensor([[7], [3], [0]])

    def step(q, k, v, p):
        return module(q, k, v, p, need_weights=True)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    wanted = [queries, keys, values, *module.parameters()]
    results = [f(queries, keys, values, padding) for f in (step, compiled)]
    grads = [torch.autograd.grad(o.square().sum() + w.square().sum(), wanted) for o, w in results]
    for eager, found in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
        torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("many", N=2, H=3, L=120, S=130, D=20, padding="scattered", mask="float"),
        Case("one_head", N=1, H=1, L=110, S=800, D=8, is_causal=True),
        Case("one_query", N=3, H=2, L=1, S=300, D=16, padding="right", mask="float_keys_4d"),
    ],
    ids=str,
)
def test_threads_and_runs_do_not_change_a_bit(case: Case, dtype: torch.dtype, threads) -> None:
    def everything() -> list[torch.Tensor]:
        inputs = case.make(dtype).with_grad()
        weight = weight_for(inputs, per_head=True).requires_grad_()
        torch.manual_seed(3)
        results = ops.additive_attention_with_weights(*inputs.tensors(), weight, **options(inputs), dropout_p=0.2)
        grads = torch.autograd.grad([r.square().sum() for r in results], [*inputs.leaves(), weight])
        return [*results, *grads]

    threads(1)
    expected = everything()
    for count in (1, 2, 3):
        threads(count)
        for i, (ours, first) in enumerate(zip(everything(), expected, strict=True)):
            assert torch.equal(ours, first), f"tensor {i} with {count} threads"


def test_autocast_converts_features_and_not_masks() -> None:
    inputs = BY_NAME["causal_float"].make(torch.float32)
    weight = weight_for(inputs, per_head=False)
    low = [t.bfloat16() for t in (*inputs.tensors(), weight)]
    expected = ops.additive_attention(*low, **options(inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ops.additive_attention(*inputs.tensors(), weight, **options(inputs))
        mixed = ops.additive_attention(low[0], inputs.key, low[2], weight, **options(inputs))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert torch.equal(mixed, expected)


MEMORY = """
import resource, torch, fused_mha
torch.set_num_threads(2)
N, L, S, D = 4, 512, 512, 128

def run(length, s):
    leaves = [torch.randn(N, x, D, requires_grad=True) for x in (length, s, s)] + [torch.randn(D, requires_grad=True)]
    padding = torch.arange(s) >= torch.tensor([[s], [s], [s // 2], [1]])
    output = fused_mha.functional.additive_attention(*leaves, key_padding_mask=padding, dropout_p=0.1)
    output.square().sum().backward()

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(8, 8)
before = peak()
run(L, S)
print((peak() - before) / 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read through getrusage")
def test_no_tensor_of_all_pairs_is_made() -> None:
    """One of (N, L, S, D) float32 is 512 MiB, one of (N, L, S) 4; features, values, results and gradients are 10."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"score_weight": torch.zeros(9)}, RuntimeError, r"score_weight must have shape .* = \(3, 8\), got \(9\)"),
        ({"score_weight": torch.zeros(2, 8)}, RuntimeError, r"score_weight must have shape .* got \(2, 8\)\. Hint"),
        ({"score_weight": torch.zeros(())}, RuntimeError, r"score_weight must have shape .* got \(\)"),
        (
            {"score_weight": torch.zeros(8).double()},
            RuntimeError,
            "score_weight must have the dtype of query, float32, got float64",
        ),
        ({"score_weight": torch.zeros(8).int()}, TypeError, "score_weight must be float32, .* got int32"),
        ({"key": torch.zeros(2, 3, 5, 9)}, RuntimeError, r"key must have shape .* got \(2, 3, 5, 9\)"),
        (
            {"key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)},
            RuntimeError,
            r"key_padding_mask must have shape \(N, S\)",
        ),
        ({"key_padding_mask": torch.zeros(2, 5, dtype=torch.long)}, TypeError, "key_padding_mask must be bool .* Hint"),
        ({"attn_mask": torch.zeros(4, 6)}, RuntimeError, r"attn_mask must broadcast to \(N, H, L, S\)"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p must be in \[0, 1\], got 1.5"),
    ],
)
def test_errors_name_the_argument(change: dict[str, object], error: type[Exception], message: str) -> None:
    call = {
        "query": torch.zeros(2, 3, 4, 8),
        "key": torch.zeros(2, 3, 5, 8),
        "value": torch.zeros(2, 3, 5, 6),
        "score_weight": torch.zeros(8),
    }
    with pytest.raises(error, match="fused_mha::additive_attention: " + message):
        ops.additive_attention(**{**call, **change})


# ------------------------------------------------------------------------------------------------------------ module


def plain_module(module: fused_mha.AdditiveAttention, queries, keys, values, hidden):
    features = torch.tanh(module.W_q(queries).unsqueeze(2) + module.W_k(keys).unsqueeze(1))
    scores = module.w_v(features).squeeze(-1).masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    return weights @ values, weights


@pytest.mark.parametrize("bias", [False, True])
def test_module_is_the_formula(bias: bool) -> None:
    module = fused_mha.AdditiveAttention(20, 2, 8, dropout=0.5, bias=bias).double().eval()
    queries, keys, values = (torch.randn(2, *s).double() for s in ((3, 20), (10, 2), (10, 4)))
    padding = torch.arange(10) >= torch.tensor([[2], [6]])
    later = torch.arange(10) > torch.tensor([[8], [9], [1]])
    output, weights = module(queries, keys, values, key_padding_mask=padding, attn_mask=later, need_weights=True)
    expected = plain_module(module, queries, keys, values, padding[:, None] | later)
    torch.testing.assert_close((output, weights), expected)
    again, nothing = module(queries, None, values, padding, later, key_features=module.project_keys(keys))
    assert torch.equal(again, output)
    assert nothing is None
    grads = [torch.autograd.grad(o.square().sum(), module.parameters()) for o in (output, expected[0])]
    torch.testing.assert_close(*grads)


def test_module_drops_in_training_only_and_keeps_its_state() -> None:
    module = fused_mha.AdditiveAttention(6, 6, 8, dropout=0.5)
    x = torch.randn(2, 7, 6)
    torch.manual_seed(1)
    first = module(x, x, x)[0]
    torch.manual_seed(1)
    assert torch.equal(module(x, x, x)[0], first)
    assert not torch.equal(module(x, x, x)[0], first)
    assert torch.equal(module.eval()(x, x, x)[0], module(x, x, x)[0])
    assert set(module.state_dict()) == {"W_q.weight", "W_k.weight", "w_v.weight"}
    other = fused_mha.AdditiveAttention(6, 6, 8).eval()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x, x, x)[0], module(x, x, x)[0])
    assert "6, 6, 8, dropout=0.5" in repr(module)


def test_module_refuses_a_dropout_that_is_no_probability() -> None:
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\], got 1.5"):
        fused_mha.AdditiveAttention(2, 2, 2, dropout=1.5)


def test_functional_wrappers_are_the_operators() -> None:
    inputs = BY_NAME["grouped_heads"].make(torch.float32)
    weight = weight_for(inputs, per_head=True)
    arguments = (*inputs.tensors(), weight)
    assert torch.equal(
        functional.additive_attention(*arguments, **options(inputs)),
        ops.additive_attention(*arguments, **options(inputs)),
    )
    for average in (True, False):
        call = {**options(inputs), "average_attn_weights": average}
        for ours, direct in zip(
            functional.additive_attention_with_weights(*arguments, **call),
            ops.additive_attention_with_weights(*arguments, **call),
            strict=True,
        ):
            assert torch.equal(ours, direct)


def test_unscaled_dot_products_are_attention_with_scale_one() -> None:
    query, key, value = (torch.randn(2, n, 8) for n in (3, 5, 5))
    expected = (query @ key.transpose(1, 2)).softmax(-1) @ value
    torch.testing.assert_close(functional.attention(query, key, value, scale=1.0), expected)
