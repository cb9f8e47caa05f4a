# SPDX-License-Identifier: BSD-3-Clause
"""attention_varlen: sequences one behind the other give what each gives alone, in one run of the kernels."""

from __future__ import annotations

import re

import fused_mha
import pytest
import reference
import torch
from cases import DTYPES, Inputs
from profiling import operators_in
from tolerances import assert_close_as_torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

ops = torch.ops.fused_mha

LENGTHS = {
    "mixed": ((5, 1, 130, 0, 33), (7, 3, 64, 4, 300)),
    "self": ((48, 49, 2, 200), (48, 49, 2, 200)),
    "decoding": ((1, 1, 1, 1), (1500, 3, 0, 70)),
    "one": ((65,), (31,)),
    "all_empty": ((0, 0), (0, 0)),
    "no_sequence": ((), ()),
}
HEADS = {"H": (3, 3), "grouped": (4, 2)}


def starts(lengths: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


class Packed:
    """Random query, key, value and cu_seqlens."""

    def __init__(
        self,
        lengths: str = "mixed",
        heads: str = "grouped",
        dtype: torch.dtype = torch.float32,
        D: int = 16,
        Dv: int = 24,
    ) -> None:
        self.query_lengths, self.key_lengths = LENGTHS[lengths]
        H, Hkv = HEADS[heads]
        generator = torch.Generator().manual_seed(1)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(dtype).requires_grad_()

        self.query = normal(sum(self.query_lengths), H, D)
        self.key = normal(sum(self.key_lengths), Hkv, D)
        self.value = normal(sum(self.key_lengths), Hkv, Dv)
        self.cu = (starts(self.query_lengths), starts(self.key_lengths))
        self.sink = normal(H)

    def tensors(self) -> list[torch.Tensor]:
        return [self.query, self.key, self.value]

    def sequences(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """query, key, value (1, H, length, X) of each."""
        lengths = (self.query_lengths, self.key_lengths, self.key_lengths)
        parts = [t.split(n) if n else () for t, n in zip(tensors, lengths, strict=True)]
        return [[t.transpose(0, 1)[None] for t in one] for one in zip(*parts, strict=True)]


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "sink": {"sink": True, "is_causal": True},
    "scale": {"scale": 0.1},
}


def options_for(name: str, sink: torch.Tensor) -> dict[str, object]:
    return {k: sink if k == "sink" else v for k, v in OPTIONS[name].items()}


def by_formula(
    packed: Packed, options: dict[str, object], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in (*packed.tensors(), packed.sink)]
    outputs = []
    for query, key, value in packed.sequences(leaves[:3]):
        result = reference.every_result(
            Inputs(query, key, value, None, None, bool(options.get("is_causal")), options.get("scale")),
            options.get("causal_alignment", "top_left"),
            leaves[3] if "sink" in options else None,
        )
        outputs.append(result["output"][0].transpose(0, 1))
    return torch.cat(outputs), leaves if "sink" in options else leaves[:3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", ["mixed", "self", "decoding", "one"])
def test_values_and_gradients(lengths: str, name: str, dtype: torch.dtype, isa: str) -> None:
    packed = Packed(lengths, dtype=dtype)
    options = options_for(name, packed.sink)
    output = ops.attention_varlen(*packed.tensors(), *packed.cu, **options)
    expected, exact_leaves = by_formula(packed, options, torch.float64)
    yardstick, own_leaves = by_formula(packed, options, dtype)
    assert_close_as_torch(output, expected, yardstick, what="output")
    leaves = [*packed.tensors(), packed.sink][: len(own_leaves)]
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = torch.autograd.grad(output, leaves, grad)
    wanted = torch.autograd.grad(expected, exact_leaves, grad.double())
    torchs = torch.autograd.grad(yardstick, own_leaves, grad)
    largest = max(float(g.abs().max()) for g in wanted)
    for what, ours, theirs, own in zip(("query", "key", "value", "sink"), found, wanted, torchs, strict=False):
        assert_close_as_torch(ours, theirs, own, what=what, gradient=True, scale=largest)


@pytest.mark.parametrize("threads_used", [1, 3])
def test_bits_are_those_of_each_sequence_alone(threads_used: int, threads) -> None:
    """Whatever the number of threads and the neighbours."""
    packed = Packed("mixed")
    alone = [ops.attention(*sequence, is_causal=True) for sequence in packed.sequences(packed.tensors())]
    threads(threads_used)
    output = ops.attention_varlen(*packed.tensors(), *packed.cu, is_causal=True)
    assert torch.equal(output, torch.cat([one[0].transpose(0, 1) for one in alone]))
    grads = torch.autograd.grad(output.square().sum(), packed.tensors())
    losses = sum(one.square().sum() for one in alone)
    for ours, theirs in zip(grads, torch.autograd.grad(losses, packed.tensors()), strict=True):
        assert torch.equal(ours, theirs)


def pad(packed: Packed) -> tuple[list[torch.Tensor], torch.Tensor]:
    """query, key, value (N, H, longest, X), and the key padding mask."""
    tensors = []
    for tensor, lengths in zip(
        packed.tensors(), (packed.query_lengths, packed.key_lengths, packed.key_lengths), strict=True
    ):
        rows = torch.nn.utils.rnn.pad_sequence(tensor.split(lengths), batch_first=True)
        tensors.append(rows.transpose(1, 2))
    hidden = torch.arange(max(packed.key_lengths)) >= torch.tensor(packed.key_lengths)[:, None]
    return tensors, hidden


def test_dropout_drops_what_it_drops_in_a_padded_batch() -> None:
    packed = Packed("mixed", dtype=torch.float64)
    tensors, hidden = pad(packed)
    results = []
    for padded in (False, True):
        torch.manual_seed(9)
        if padded:
            output = ops.attention(*tensors, key_padding_mask=hidden, dropout_p=0.4).transpose(1, 2)
            output = torch.cat([one[:n] for one, n in zip(output, packed.query_lengths, strict=True)])
        else:
            output = ops.attention_varlen(*packed.tensors(), *packed.cu, dropout_p=0.4)
        results.append([output, *torch.autograd.grad(output.square().sum(), packed.tensors())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert not torch.allclose(results[0][0], ops.attention_varlen(*packed.tensors(), *packed.cu))


@pytest.mark.parametrize("lengths", [(3, 7, 1), (33, 130)], ids=str)
def test_jagged_nested_tensors_hold_what_it_takes(lengths: tuple[int, ...]) -> None:
    sequences = [torch.randn(length, 2, 8, dtype=torch.float64, requires_grad=True) for length in lengths]
    nested = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    offsets, heads = nested.offsets(), nested.transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).values()
    found = ops.attention_varlen(nested.values(), nested.values(), nested.values(), offsets, offsets)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), sequences, retain_graph=True),
        torch.autograd.grad(expected.square().sum(), sequences),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("lengths", ["all_empty", "no_sequence"])
def test_nothing_to_attend(lengths: str) -> None:
    packed = Packed(lengths)
    output = ops.attention_varlen(*packed.tensors(), *packed.cu, sink=packed.sink)
    assert output.shape == (0, 4, 24)
    grads = torch.autograd.grad(output.sum(), [*packed.tensors(), packed.sink])
    assert [g.shape for g in grads] == [t.shape for t in (*packed.tensors(), packed.sink)]
    assert not grads[3].any()


def test_sequences_without_keys_or_without_queries() -> None:
    query, key = torch.randn(4, 2, 8, requires_grad=True), torch.randn(6, 2, 8, requires_grad=True)
    output = ops.attention_varlen(query, key, key, torch.tensor([0, 4, 4]), torch.tensor([0, 0, 6]))
    assert not output.any()
    for gradient in torch.autograd.grad(output.sum(), (query, key)):
        assert not gradient.any()


def test_what_other_sequences_hold_is_not_read() -> None:
    packed = Packed("self")
    clean = ops.attention_varlen(*packed.tensors(), *packed.cu)
    with torch.no_grad():
        for tensor in packed.tensors():
            tensor[48:97] = float("nan")  # sequence 1
    spoilt = ops.attention_varlen(*packed.tensors(), *packed.cu)
    assert torch.equal(spoilt[:48], clean[:48])
    assert torch.equal(spoilt[97:], clean[97:])
    assert spoilt[48:97].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_any_strides_and_index_dtypes(dtype: torch.dtype) -> None:
    packed = Packed("mixed", "H", D=24)
    expected = ops.attention_varlen(*packed.tensors(), *packed.cu)
    transposed = [t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in packed.tensors()]
    twice = [torch.stack([cu, cu], 1).to(dtype)[:, 0] for cu in packed.cu]
    found = ops.attention_varlen(*transposed, *twice)
    assert torch.equal(found, expected)
    assert found.stride() == transposed[0].stride()
    rows = torch.randn(sum(LENGTHS["self"][0]), 3, 3, 8)
    q, k, v = rows.unbind(1)  # views into one tensor of projections
    cu = starts(LENGTHS["self"][0], dtype)
    assert torch.equal(
        ops.attention_varlen(q, k, v, cu, cu), ops.attention_varlen(*(t.contiguous() for t in (q, k, v)), cu, cu)
    )


class Sizes(TorchDispatchMode):
    """Elements of everything that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_padding_is_made_forward_or_backward() -> None:
    packed = Packed("mixed")
    with Sizes() as sizes:
        output = ops.attention_varlen(*packed.tensors(), *packed.cu, sink=packed.sink)
        torch.autograd.grad(output.sum(), [*packed.tensors(), packed.sink])
    assert sizes.largest == max(t.numel() for t in (*packed.tensors(), output))
    names = operators_in(lambda: ops.attention_varlen(*packed.tensors(), *packed.cu))
    assert "fused_mha::_varlen_forward" in names


@pytest.mark.parametrize("name", ["plain", "causal", "bottom_right", "sink"])
def test_derivatives_of_every_order_and_mode(name: str) -> None:
    torch.manual_seed(0)
    cu = (torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 6]))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 2, 3), (6, 1, 3), (6, 1, 2))]
    if name == "sink":
        leaves.append(torch.randn(2, dtype=torch.float64, requires_grad=True))

    def function(query, key, value, sink=None):
        torch.manual_seed(3)
        options = {"dropout_p": 0.3 if name == "causal" else 0.0, **options_for(name, sink)}
        return ops.attention_varlen(query, key, value, *cu, **options)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True)


def test_opcheck() -> None:
    packed = Packed("mixed", D=4, Dv=3)
    options = {"is_causal": True, "causal_alignment": "bottom_right", "sink": packed.sink}
    torch.library.opcheck(ops.attention_varlen.default, (*packed.tensors(), *packed.cu), options)
    numbers = (True, 0.5, 0.5, torch.tensor([3, 4]), True, packed.sink)
    torch.library.opcheck(ops._varlen_forward.default, (*packed.tensors(), *packed.cu, *numbers))
    # Without gradients: those of the backward pass cannot be traced.
    given = [*(t.detach() for t in packed.tensors()), *packed.cu]
    numbers = (*numbers[:-1], packed.sink.detach())
    output, row_max, row_sum = ops._varlen_forward(*given, *numbers)
    saved = (torch.randn_like(output), *given, output, row_max, row_sum)
    torch.library.opcheck(ops._varlen_backward.default, (*saved, *numbers, [True] * 4))
    torch.library.opcheck(ops._varlen_backward.default, (*saved, *numbers, [False, True, False, False]))


def test_compile_serves_new_lengths_without_compiling_again() -> None:
    def function(query, key, value, cu_q, cu_k):
        return ops.attention_varlen(query, key, value, cu_q, cu_k, is_causal=True)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ("mixed", "self", "decoding"):
        packed = Packed(lengths)
        results = [f(*packed.tensors(), *packed.cu) for f in (function, compiled)]
        torch.testing.assert_close(results[1], results[0])
        expected, found = (torch.autograd.grad(r.square().sum(), packed.tensors()) for r in results)
        torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1


class SelfAttention(torch.nn.Module):
    def forward(self, rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return torch.ops.fused_mha.attention_varlen(rows, rows, rows, cu_seqlens, cu_seqlens, is_causal=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_exported_traced_and_scripted_programs_serve_other_sizes() -> None:
    given = (torch.randn(11, 2, 8), torch.tensor([0, 3, 10, 11]))
    sizes = ({0: torch.export.Dim("total", min=2, max=4096)}, {0: torch.export.Dim("starts", min=2, max=64)})
    programs = [
        torch.export.export(SelfAttention(), given, dynamic_shapes=sizes).module(),
        torch.jit.trace(SelfAttention(), given),
        torch.jit.script(SelfAttention()),
    ]
    others = (torch.randn(40, 2, 8), torch.tensor([0, 33, 33, 34, 40]))
    for program in programs:
        assert torch.equal(program(*others), SelfAttention()(*others))


def test_recomputation_drops_what_was_dropped() -> None:
    packed = Packed("mixed")

    def function(*tensors):
        return ops.attention_varlen(*tensors, *packed.cu, dropout_p=0.5)

    def recomputed(*tensors):
        return checkpoint(function, *tensors, use_reentrant=False)

    grads = []
    for call in (function, recomputed):
        torch.manual_seed(4)
        grads.append(torch.autograd.grad(call(*packed.tensors()).square().sum(), packed.tensors()))
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


def test_hessian() -> None:
    """vmap of forward mode over reverse mode."""
    cu, query, key = torch.tensor([0, 2, 2, 5]), *torch.randn(2, 5, 2, 3, dtype=torch.float64)

    def loss(query):
        return ops.attention_varlen(query, key, key, cu, cu, is_causal=True).square().sum()

    expected = torch.autograd.functional.hessian(loss, query)
    torch.testing.assert_close(torch.func.hessian(loss)(query), expected)


def test_meta_tensors() -> None:
    packed = Packed("mixed")
    meta = [t.detach().to("meta") for t in (*packed.tensors(), *packed.cu)]
    output = ops.attention_varlen(*meta)
    assert output.shape == (169, 4, 24)
    assert output.is_meta


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("in_dims", [(0, 0, 0, None, None), (1, None, None, None, 0)], ids=str)
def test_vmap_equals_a_loop(in_dims: tuple[int | None, ...]) -> None:
    sizes = ((6, 2, 4), (5, 2, 4), (5, 2, 4))
    cu = (torch.tensor([0, 2, 6]), torch.tensor([0, 2, 5]))
    arguments = [torch.randn(s if d is None else (*s[:d], 3, *s[d:])) for s, d in zip(sizes, in_dims, strict=False)]
    arguments += [
        c if d is None else torch.tensor([[0, 2, 5], [0, 0, 5], [0, 5, 5]])
        for c, d in zip(cu, in_dims[3:], strict=True)
    ]

    def loss(*tensors):
        return ops.attention_varlen(*tensors).square().sum()

    for function in (ops.attention_varlen, torch.func.grad(loss)):
        found = torch.vmap(function, in_dims)(*arguments)
        calls = [
            function(*(t if d is None else t.select(d, i) for t, d in zip(arguments, in_dims, strict=True)))
            for i in range(3)
        ]
        torch.testing.assert_close(found, torch.stack(calls))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_vmap_of_none(dropout_p: float) -> None:
    cu = torch.tensor([0, 2, 6])

    def loss(query, key):
        return ops.attention_varlen(query, key, key, cu, cu, dropout_p=dropout_p).square().sum()

    query, key = torch.randn(6, 0, 2, 4), torch.randn(6, 2, 4)
    found = torch.vmap(torch.func.grad(loss, (0, 1)), (1, None), randomness="same")(query, key)
    assert [gradient.shape for gradient in found] == [(0, 6, 2, 4), (0, 6, 2, 4)]


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap(randomness: str) -> None:
    """Values are powers of 2, so that equal outputs are equal choices."""
    cu = torch.tensor([0, 6])
    key, value = torch.zeros(6, 1, 4), (2.0 ** torch.arange(6)).reshape(6, 1, 1)

    def kept(query):
        return ops.attention_varlen(query, key, value, cu, cu, dropout_p=0.5)

    found = torch.vmap(kept, randomness=randomness)(torch.zeros(3, 6, 1, 4))
    assert torch.equal(found[0], found[1]) == (randomness == "same")


def test_autocast() -> None:
    packed = Packed("mixed")
    with torch.autocast("cpu", torch.bfloat16):
        output = ops.attention_varlen(*packed.tensors(), *packed.cu)
        mixed = ops.attention_varlen(packed.query, packed.key.bfloat16(), packed.value, *packed.cu)
    assert output.dtype == mixed.dtype == torch.bfloat16
    expected = ops.attention_varlen(*(t.bfloat16() for t in packed.tensors()), *packed.cu)
    assert torch.equal(output, expected)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(output.float().sum(), packed.tensors()))


def base() -> dict[str, object]:
    return {
        "query": torch.randn(5, 4, 8),
        "key": torch.randn(7, 2, 8),
        "value": torch.randn(7, 2, 6),
        "cu_seqlens_q": torch.tensor([0, 2, 5]),
        "cu_seqlens_k": torch.tensor([0, 4, 7]),
    }


ILLEGAL = {
    "query_rank": ({"query": torch.randn(1, 5, 4, 8)}, RuntimeError, "query must have shape (total_q, H, D), got"),
    "key_dim": (
        {"key": torch.randn(7, 2, 9)},
        RuntimeError,
        "key must have shape (total_k, Hkv, D) with D = 8, got (7",
    ),
    "value_total": (
        {"value": torch.randn(6, 2, 6)},
        RuntimeError,
        "value must have shape (total_k, Hkv, Dv) with total",
    ),
    "heads": ({"key": torch.randn(7, 3, 8), "value": torch.randn(7, 3, 6)}, RuntimeError, "key must have a number of"),
    "dtype": ({"key": torch.randn(7, 2, 8).double()}, RuntimeError, "query, key and value must have the same dtype"),
    "width": ({"value": torch.randn(7, 2, 0)}, RuntimeError, "value must have Dv >= 1"),
    "starts_dtype": (
        {"cu_seqlens_q": torch.tensor([0.0, 2, 5])},
        TypeError,
        "cu_seqlens_q must be int32 or int64, got",
    ),
    "starts_rank": ({"cu_seqlens_k": torch.tensor([[0, 7]])}, RuntimeError, "cu_seqlens_k must have shape (N + 1)"),
    "starts_empty": (
        {"cu_seqlens_k": torch.tensor([], dtype=torch.int64)},
        RuntimeError,
        "cu_seqlens_k must have shape",
    ),
    "counts": (
        {"cu_seqlens_q": torch.tensor([0, 5])},
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must be of the same N",
    ),
    "first": ({"cu_seqlens_q": torch.tensor([1, 2, 5])}, ValueError, "cu_seqlens_q must ascend from 0 to total_q = 5"),
    "last": (
        {"cu_seqlens_k": torch.tensor([0, 4, 8])},
        ValueError,
        "cu_seqlens_k must ascend from 0 to total_k = 7, got",
    ),
    "order": ({"cu_seqlens_q": torch.tensor([0, 6, 5])}, ValueError, "cu_seqlens_q must ascend from 0 to total_q = 5"),
    "negative": ({"cu_seqlens_q": torch.tensor([0, -3, 5])}, ValueError, "cu_seqlens_q must ascend from 0"),
    "dropout": ({"dropout_p": 1.5}, ValueError, "dropout_p must be in [0, 1], got 1.5"),
    "alignment": ({"causal_alignment": "left"}, ValueError, "causal_alignment must be 'top_left' or 'bottom_right'"),
    "sink": ({"sink": torch.zeros(2)}, RuntimeError, "sink must have shape (H) = (4), got (2)"),
    "device": (
        {"cu_seqlens_q": torch.tensor([0, 2, 5], device="meta")},
        RuntimeError,
        "cu_seqlens_q must be on the dev",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_errors(name: str) -> None:
    change, kind, message = ILLEGAL[name]
    assert torch.isfinite(ops.attention_varlen(**base())).all()
    with pytest.raises(kind, match=re.escape(f"fused_mha::attention_varlen: {message}")):
        ops.attention_varlen(**{**base(), **change})


def test_private_operators_refuse_what_would_be_read_out_of_bounds() -> None:
    given = [*base().values()]
    numbers = (False, 0.0, 1.0, None, False, None)
    output, row_max, row_sum = ops._varlen_forward(*given, *numbers)
    legal = [torch.ones_like(output), *given, output, row_max, row_sum, *numbers, [True, True, True, False]]
    assert torch.isfinite(ops._varlen_backward(*legal)[0]).all()
    for place, bad in (
        (0, output[1:]),
        (6, output[..., 1:]),
        (7, row_max[1:]),
        (8, row_sum.double()),
        (4, given[3] * 2),
    ):
        with pytest.raises((RuntimeError, ValueError), match="fused_mha::attention_varlen"):
            ops._varlen_backward(*legal[:place], bad, *legal[place + 1 :])
    with pytest.raises(RuntimeError, match="sink must be given"):
        ops._varlen_backward(*legal[:-1], [True] * 4)
    with pytest.raises(RuntimeError, match="rng_state must be given"):
        ops._varlen_forward(*given, False, 0.5, 1.0, None, False, None)


def test_explain_and_flops() -> None:
    packed = Packed("mixed")
    call = fused_mha.explain(ops.attention_varlen, *packed.tensors(), *packed.cu, is_causal=True).calls[0]
    assert call["sizes"].choice == "N = 5, H = 4, L = 130, S = 300, D = 16, Dv = 24"
    assert "packed without padding" in call["sizes"].reason
    assert call["backward"].choice == "fused"
    assert call.facts["kept_keys"] == call.facts["all_keys"] - 4  # the sequence without rows is not looked at
    products = 4 * sum(a * b for a, b in zip(*LENGTHS["mixed"], strict=True))
    with torch.utils.flop_counter.FlopCounterMode(display=False, custom_mapping=fused_mha.flop_formulas) as counter:
        output = ops.attention_varlen(*packed.tensors(), *packed.cu)
        assert counter.get_total_flops() == 2 * products * (16 + 24)
        output.sum().backward()
    assert counter.get_total_flops() == 2 * products * ((16 + 24) + (3 * 16 + 2 * 24))


def test_flops_where_the_lengths_are_not_known() -> None:
    cu = torch.tensor([0, 2, 6])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.randn(6, 4, 16))
        with torch.utils.flop_counter.FlopCounterMode(display=False, custom_mapping=fused_mha.flop_formulas) as counter:
            ops.attention_varlen(fake, fake, fake, mode.from_tensor(cu), mode.from_tensor(cu))
    assert counter.get_total_flops() == 2 * 4 * (6 * 6 // 2) * (16 + 16)
