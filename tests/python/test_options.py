# SPDX-License-Identifier: BSD-3-Clause
"""Options of the operators that the stock functions lack: causality from the bottom right, a sink, log-sum-exps beside
the output, weights from before dropout."""

from __future__ import annotations

import math
import re

import fused_mha
import pytest
import reference
import torch
from cases import BY_NAME, DTYPES, Case, Inputs
from tolerances import assert_close_as_torch

ops = torch.ops.fused_mha

CASES = [
    BY_NAME["grouped_heads"],
    BY_NAME["float_inf_empty_row"],
    Case("causal_wider", H=3, L=50, S=131, D=16, padding="right", is_causal=True),
    Case("causal_taller", L=70, S=33, D=8, padding="float_inf", mask="float_per_head", is_causal=True),
    Case("causal_few_rows", H=4, Hkv=2, L=3, S=1200, D=16, Dv=24, padding="scattered", is_causal=True),
    Case("causal_no_row_or_key_alike", L=1, S=1, D=3, is_causal=True),
]
ALIGNMENTS = ("top_left", "bottom_right")


def sink_of(inputs: Inputs, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One number a head, exact in every dtype, about as large as scores are."""
    heads = inputs.query.size(1)
    return (torch.arange(heads, device=inputs.query.device) - heads // 2).to(dtype) * 0.75


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case, alignment: str, with_sink: bool, dtype: torch.dtype, kernels: str) -> None:
    """Output, log-sum-exp and weights against float64."""
    inputs = case.make(dtype, kernels)
    sink = sink_of(inputs) if with_sink else None
    exact = inputs.double()
    expected = reference.every_result(exact, alignment, sink_of(exact) if with_sink else None)
    yardstick = reference.every_result(inputs, alignment, sink)
    options = {**inputs.options(), "causal_alignment": alignment, "sink": sink}
    output, lse = ops.attention_with_lse(*inputs.tensors(), **options)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close_as_torch(output, expected["output"], yardstick["output"], what="output")
    lse = lse.cpu()
    assert torch.equal(lse.isinf(), expected["lse"].isinf())
    finite = torch.isfinite(lse)
    assert_close_as_torch(lse[finite], expected["lse"].detach()[finite], what="lse", dtype=lse.dtype)
    assert torch.equal(ops.attention(*inputs.tensors(), **options), output)

    output, weights = ops.attention_with_weights(*inputs.tensors(), **options)
    assert_close_as_torch(output, expected["output"], yardstick["output"], what="output beside weights")
    assert_close_as_torch(weights, expected["weights"].mean(1), yardstick["weights"].mean(1), what="weights")


@pytest.mark.parametrize("returned", ["lse", "weights", "before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, dtype: torch.dtype, returned: str, device: str) -> None:
    """Of every input and the sink, through the output and what is returned beside it, under dropout."""
    inputs, p = case.make(dtype, device).with_grad(), 0.25
    sizes = (*inputs.query.shape[:3], inputs.key.size(2))
    torch.manual_seed(11)
    keep = ops.dropout_mask(fused_mha.functional.draw_rng_state(device), *sizes, p)
    exact, own = inputs.double(), case.make(dtype, device).with_grad()
    results = []
    for one in (exact, own):
        sink = sink_of(one).to(one.query.dtype).requires_grad_()
        kept = keep.to(one.query.device)
        results.append((reference.every_result(one, "bottom_right", sink, kept, p), [*one.leaves(), sink]))
    sink = sink_of(inputs, torch.float32).requires_grad_()
    options = {**inputs.options(), "causal_alignment": "bottom_right", "sink": sink, "dropout_p": p}
    torch.manual_seed(11)
    if returned == "lse":
        output, beside = ops.attention_with_lse(*inputs.tensors(), **options)
    else:
        options |= {"average_attn_weights": False, "weights_before_dropout": returned == "before"}
        output, beside = ops.attention_with_weights(*inputs.tensors(), **options)
    generator = torch.Generator().manual_seed(5)
    incoming = [torch.randn(t.shape, generator=generator).to(dtype) for t in (output, beside)]
    found = reference.gradients(output, beside, *incoming, [*inputs.leaves(), sink])
    (expected, leaves), (yardstick, own_leaves) = results
    wanted = reference.gradients(expected["output"], expected[returned], *incoming, leaves)
    torchs = reference.gradients(yardstick["output"], yardstick[returned], *incoming, own_leaves)
    largest = max(float(g.abs().max()) for g in wanted)
    for name, ours, theirs, own_gradient in zip([*inputs.leaf_names(), "sink"], found, wanted, torchs, strict=True):
        assert_close_as_torch(
            ours, theirs, own_gradient, what=f"gradient of {name}", gradient=True, scale=largest, dtype=dtype
        )


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("returned", ["lse", "averaged", "per_head"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_derivatives_of_every_order_and_mode(alignment: str, returned: str, dropout_p: float, device: str) -> None:
    case = Case("derivatives", N=2, H=2, Hkv=1, L=4, S=3, D=3, Dv=2, mask="float_per_head", is_causal=True)
    inputs = case.make(torch.float64, device).with_grad()
    inputs.attn_mask = inputs.attn_mask.double().detach().requires_grad_()
    sink = sink_of(inputs, torch.float64).requires_grad_()

    def function(query, key, value, mask, own_sink):
        torch.manual_seed(1)
        options = {"is_causal": True, "causal_alignment": alignment, "dropout_p": dropout_p}
        options |= {"attn_mask": mask, "sink": own_sink}
        if returned == "lse":
            return ops.attention_with_lse(query, key, value, **options)
        return ops.attention_with_weights(
            query, key, value, **options, average_attn_weights=returned == "averaged", weights_before_dropout=True
        )

    arguments = (*inputs.leaves(), sink)
    assert torch.autograd.gradcheck(function, arguments, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, arguments, check_fwd_over_rev=True)


def test_bottom_right_lets_the_last_query_see_every_key(device: str) -> None:
    inputs = Case("bottom_right", L=3, S=7).make(torch.float32, device)
    found = ops.attention(*inputs.tensors(), is_causal=True, causal_alignment="bottom_right")
    later = torch.ones(3, 7, dtype=torch.bool, device=device).triu(5)
    assert torch.equal(found, ops.attention(*inputs.tensors(), attn_mask=later))
    square = Case("bottom_right", L=7, S=7).make(torch.float32, device)
    both = [ops.attention(*square.tensors(), is_causal=True, causal_alignment=a) for a in ALIGNMENTS]
    assert torch.equal(*both)


def test_bottom_right_continues_a_sequence(device: str) -> None:
    """Rows computed chunk by chunk, with the keys so far, are those of the whole sequence."""
    inputs = Case("chunks", H=2, L=200, S=200, D=16).make(torch.float32, device)
    whole = ops.attention(*inputs.tensors(), is_causal=True)
    for begin, end in ((0, 60), (60, 61), (61, 200)):
        keys = (t[:, :, :end] for t in (inputs.key, inputs.value))
        chunk = ops.attention(
            inputs.query[:, :, begin:end], *keys, is_causal=True, causal_alignment="bottom_right"
        )  # fmt: skip
        torch.testing.assert_close(chunk, whole[:, :, begin:end], rtol=1e-5, atol=1e-5)


def test_more_queries_than_keys_leave_rows_empty(device: str) -> None:
    inputs = Case("more_queries", L=6, S=2).make(torch.float32, device).with_grad()
    output, lse = ops.attention_with_lse(*inputs.tensors(), is_causal=True, causal_alignment="bottom_right")
    assert not output[:, :, :4].any()
    assert (lse[:, :, :4] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 4:]).all()
    grads = torch.autograd.grad([output.sum(), lse.exp().sum()], inputs.tensors())
    assert not grads[0][:, :, :4].any()
    assert all(torch.isfinite(g).all() for g in grads)


def test_a_zero_sink_is_softmax_plus_one(device: str) -> None:
    inputs = Case("plus_one", L=4, S=5).make(torch.float64, device)
    sink = torch.zeros(2, device=device)
    output, weights = ops.attention_with_weights(*inputs.tensors(), sink=sink, average_attn_weights=False)
    terms = (inputs.query @ inputs.key.transpose(-1, -2) / math.sqrt(8)).exp()
    expected = terms / (1.0 + terms.sum(-1, keepdim=True))
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(output, expected @ inputs.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_extreme_sinks(case: Case, dtype: torch.dtype, kernels: str) -> None:
    """-inf: no sink, bit for bit; above all scores: everything goes there; NaN: NaN, also in rows that see nothing."""
    inputs = case.make(dtype, kernels).with_grad()
    options, heads = inputs.options(), inputs.query.size(1)
    none = ops.attention_with_lse(*inputs.tensors(), **options)
    lowest = ops.attention_with_lse(*inputs.tensors(), **options, sink=sink_of(inputs).fill_(-math.inf))
    assert all(torch.equal(a, b) for a, b in zip(none, lowest, strict=True))
    for value in (torch.finfo(dtype).max, math.inf):
        sink = torch.full((heads,), value, dtype=dtype, device=kernels, requires_grad=True)
        output, weights = ops.attention_with_weights(*inputs.tensors(), **options, sink=sink)
        assert not output.any()
        assert not weights.any()
        grads = torch.autograd.grad(output.sum() + weights.sum(), [*inputs.leaves(), sink])
        assert not any(g.any() for g in grads)
    output, lse = ops.attention_with_lse(*inputs.tensors(), **options, sink=sink_of(inputs).fill_(math.nan))
    assert output.isnan().all()
    assert lse.isnan().all()


def test_rows_that_see_the_sink_alone(device: str) -> None:
    inputs = Case("all_hidden", padding="whole_sample").make(torch.float64, device).with_grad()
    sink = torch.tensor([0.5, -2.0], dtype=torch.float64, device=device, requires_grad=True)
    output, lse = ops.attention_with_lse(*inputs.tensors(), key_padding_mask=inputs.key_padding_mask, sink=sink)
    assert not output[-1].any()
    torch.testing.assert_close(lse[-1], sink.detach()[:, None].expand(2, 5))
    (gradient,) = torch.autograd.grad(lse[-1].sum(), sink)
    torch.testing.assert_close(gradient, torch.full_like(sink, 5.0))


@pytest.mark.parametrize("average", [True, False])
def test_weights_before_dropout(average: bool, kernels: str) -> None:
    """Those of a call without dropout, while the output is that of the same call with them after."""
    inputs = CASES[2].make(torch.float32, kernels)
    calls = {}
    for before in (False, True):
        torch.manual_seed(4)
        calls[before] = ops.attention_with_weights(
            *inputs.tensors(), **inputs.options(), dropout_p=0.6, average_attn_weights=average,
            weights_before_dropout=before,
        )  # fmt: skip
    _, undropped = ops.attention_with_weights(*inputs.tensors(), **inputs.options(), average_attn_weights=average)
    assert torch.equal(calls[True][0], calls[False][0])
    torch.testing.assert_close(calls[True][1], undropped, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(calls[False][1], undropped, rtol=0.1)
    everything = ops.attention_with_weights(*inputs.tensors(), dropout_p=1.0, weights_before_dropout=True)
    torch.testing.assert_close(everything[1].sum(-1), torch.ones_like(everything[1][..., 0]))
    assert not everything[0].any()


def test_parts_of_the_keys_merge_by_their_log_sum_exps(device: str) -> None:
    """pytorch#98505. Also gradients: what a ring of devices, each with a part of the keys, computes."""
    inputs = Case("merge", H=2, L=5, S=40).make(torch.float64, device).with_grad()
    query, key, value = inputs.tensors()
    whole = ops.attention(query, key, value)
    parts = [ops.attention_with_lse(query, key[:, :, p], value[:, :, p]) for p in (slice(0, 13), slice(13, 40))]
    shares = torch.stack([lse for _, lse in parts]).softmax(0)
    merged = sum(share.unsqueeze(-1) * output for share, (output, _) in zip(shares, parts, strict=True))
    torch.testing.assert_close(merged, whole)
    grad = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, inputs.tensors(), grad)
    for ours, theirs in zip(torch.autograd.grad(merged, inputs.tensors(), grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sizes", [(4, 5, 8), (5, 8)], ids=["NLD", "LD"])
def test_shapes_without_heads_or_samples(sizes: tuple[int, ...], device: str) -> None:
    x, sink = torch.randn(sizes, device=device), torch.zeros(1, device=device)
    output, lse = ops.attention_with_lse(x, x, x, sink=sink)
    assert output.shape == x.shape
    assert lse.shape == sizes[:-1]
    four = ops.attention_with_lse(*[x.reshape(-1, 1, 5, 8)] * 3, sink=sink)
    assert torch.equal(lse.flatten(), four[1].flatten())


ILLEGAL = {
    "alignment": ({"causal_alignment": "bottom"}, ValueError, "causal_alignment must be 'top_left' or 'bottom_right'"),
    "heads": ({"sink": torch.zeros(3)}, RuntimeError, "sink must have shape (H) = (2), got (3)"),
    "rank": ({"sink": torch.zeros(1, 2)}, RuntimeError, "sink must have shape (H), one number a head, got (1, 2)"),
    "dtype": ({"sink": torch.zeros(2, dtype=torch.int64)}, TypeError, "sink must be float32, float64, bfloat16"),
    "device": ({"sink": torch.zeros(2, device="meta")}, RuntimeError, "sink must be on the device of query, cpu"),
}


@pytest.mark.parametrize("operator", ["attention", "attention_with_weights", "attention_with_lse"])
@pytest.mark.parametrize("name", ILLEGAL)
def test_errors(name: str, operator: str, device: str) -> None:
    change, kind, message = ILLEGAL[name]
    x, message = torch.randn(2, 2, 3, 4, device=device), message.replace("cpu", device)
    change = {k: v.to(device) if isinstance(v, torch.Tensor) and not v.is_meta else v for k, v in change.items()}
    with pytest.raises(kind, match=re.escape(f"fused_mha::{operator}: {message}")):
        getattr(ops, operator)(x, x, x, **change)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool, dropout_p: float, device: str) -> None:
    inputs = CASES[1].make(torch.float32, device)
    inputs = inputs.with_grad() if requires_grad else inputs
    options = {**inputs.options(), "is_causal": True, "causal_alignment": "bottom_right", "dropout_p": dropout_p}
    options["sink"] = sink_of(inputs).requires_grad_(requires_grad)
    if dropout_p == 0.0:
        torch.library.opcheck(ops.attention.default, inputs.tensors(), options)
        torch.library.opcheck(ops.attention_with_lse.default, inputs.tensors(), options)
    mask = inputs.attn_mask.reshape((1,) * (4 - inputs.attn_mask.dim()) + inputs.attn_mask.shape)
    given = [*inputs.tensors(), inputs.key_padding_mask, mask]
    numbers = (True, dropout_p, 0.5, torch.tensor([3, 4], device=device), 0)
    extra = (True, options["sink"].detach().reshape(1, -1, 1, 1).requires_grad_(requires_grad))
    for mode in (1, 3):
        torch.library.opcheck(ops._attention_forward.default, (*given, *numbers, mode, *extra, mode == 1))
    with torch.no_grad():
        output, lse, row_max, row_sum = ops._attention_forward(*given, *numbers, 3, *extra, False)
    wanted = [True, True, True, given[3] is not None and given[3].is_floating_point(), True, True]
    saved = (torch.randn_like(output), torch.randn_like(lse), *given, output, row_max, row_sum)
    torch.library.opcheck(ops._attention_backward.default, (*saved, *numbers, 3, wanted, *extra, False))


def test_meta_tensors() -> None:
    x = torch.empty(2, 4, 5, 8, device="meta", dtype=torch.bfloat16)
    output, lse = ops.attention_with_lse(x, x, x, sink=torch.empty(4, device="meta"), is_causal=True)
    assert output.shape == x.shape
    assert lse.shape == (2, 4, 5)
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def with_every_option(query, key, value, sink):
    options = {"is_causal": True, "causal_alignment": "bottom_right", "sink": sink}
    output, lse = ops.attention_with_lse(query, key, value, **options)
    _, weights = ops.attention_with_weights(query, key, value, **options, weights_before_dropout=True)
    return output, lse, weights


@pytest.mark.parametrize("in_dims", [(0, 0, 0, None), (0, 0, 0, 0), (None, 0, 0, 0), (0, None, None, 1)], ids=str)
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    """Values, and gradients of each, also of a sink that all share, equal a loop's."""
    sizes = ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 3), (4,))
    arguments = [
        torch.randn(sizes[i] if d is None else (*sizes[i][:d], 3, *sizes[i][d:]), dtype=torch.float64)
        for i, d in enumerate(in_dims)
    ]

    def loss(*tensors):
        output, lse, weights = with_every_option(*tensors)
        return output.square().sum() + lse.cos().sum() + weights.square().sum()

    def of_sample(i):
        return [t if d is None else t.select(d, i) for t, d in zip(arguments, in_dims, strict=True)]

    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    for function in (with_every_option, gradient):
        found = torch.vmap(function, in_dims)(*arguments)
        calls = [function(*of_sample(i)) for i in range(3)]
        for ours, theirs in zip(found, zip(*calls, strict=True), strict=True):
            torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    compiled = torch.compile(with_every_option, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length, keys in ((5, 7), (9, 4)) if dynamic else ((5, 7),):
        sizes = ((2, 4, length, 3), (2, 2, keys, 3), (2, 2, keys, 3), (4,))
        arguments = [torch.randn(s, requires_grad=True) for s in sizes]
        results = [function(*arguments) for function in (with_every_option, compiled)]
        losses = [output.sum() + lse[..., -1].sum() + weights.square().sum() for output, lse, weights in results]
        torch.testing.assert_close(results[1], results[0])
        expected, found = (torch.autograd.grad(loss, arguments) for loss in losses)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_script_and_trace_of_another_size() -> None:
    @torch.jit.script
    def scripted(query: torch.Tensor, key: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.fused_mha.attention_with_lse(
            query, key, key, is_causal=True, causal_alignment="bottom_right", sink=sink
        )

    def eager(query, key, sink):
        return ops.attention_with_lse(query, key, key, is_causal=True, causal_alignment="bottom_right", sink=sink)

    sink = torch.randn(2)
    traced = torch.jit.trace(eager, (torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), sink))
    query, key = torch.randn(2, 2, 6, 4), torch.randn(2, 2, 9, 4)
    for function in (scripted, traced):
        torch.testing.assert_close(function(query, key, sink), eager(query, key, sink))


def test_autocast_keeps_the_sink_and_the_log_sum_exp(device: str) -> None:
    x, sink = torch.randn(2, 2, 5, 8, device=device), torch.tensor([1.0 + 2.0**-12, -1.0], device=device)
    sink.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        output, lse = ops.attention_with_lse(x, x, x, sink=sink)
    expected = ops.attention_with_lse(*[x.bfloat16()] * 3, sink=sink)
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(lse, expected[1])
    (gradient,) = torch.autograd.grad(output.float().sum(), sink)
    assert gradient.dtype == torch.float32


def test_results_do_not_depend_on_threads(threads) -> None:
    inputs = Case("threads", N=3, H=4, L=150, S=170, D=16).make(torch.float32).with_grad()
    results = []
    for count in (1, 3):
        threads(count)
        sink = sink_of(inputs).requires_grad_()
        output, lse = ops.attention_with_lse(*inputs.tensors(), sink=sink, is_causal=True)
        results.append([output, lse, *torch.autograd.grad([output.sum() + lse.sum()], [*inputs.tensors(), sink])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_explain_says_so() -> None:
    x = torch.randn(1, 2, 5, 8)
    call = fused_mha.explain(x, x, x, is_causal=True, causal_alignment="bottom_right", sink=torch.zeros(2)).calls[0]
    assert call["sink"].choice == "float32 (1, 2, 1, 1)"
    assert "from the bottom right" in call["attn_mask"].reason
    call = fused_mha.explain(x, x, x, average_attn_weights=True, weights_before_dropout=True).calls[0]
    assert call["weights"].choice == "averaged"
    assert call["weights"].reason == "as they are before dropout"
