# SPDX-License-Identifier: BSD-3-Clause
"""vmap: the same numbers as a loop, in one call of the kernels, without copies of masks and without warnings."""

from __future__ import annotations

import fused_mha
import pytest
import torch
from cases import Case, Inputs, later
from fused_mha import _batching
from torch.utils._python_dispatch import TorchDispatchMode

ops = torch.ops.fused_mha
pytestmark = pytest.mark.filterwarnings("error")

B, N, H, HKV, L, S, D = 3, 2, 4, 2, 5, 7, 4


def loop(function, in_dims: tuple[int | None, ...], *arguments: torch.Tensor) -> list[torch.Tensor]:
    """What vmap(function, in_dims) has to give."""
    calls = [
        function(*(t if d is None else t.select(d, i) for t, d in zip(arguments, in_dims, strict=True)))
        for i in range(B)
    ]
    return [torch.stack(parts) for parts in zip(*calls, strict=True)]


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def mask(kind: str, *sizes: int) -> torch.Tensor:
    hidden = torch.rand(sizes) < 0.4
    return hidden if kind == "bool" else normal(*sizes).masked_fill(hidden, float("-inf"))


def assert_equal(found, expected) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


class Copies(TorchDispatchMode):
    """Counts what runs below vmap: calls of the kernels and sizes of what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel_calls = 0
        self.copied: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (ops._attention_forward.default, ops._attention_backward.default):
            self.kernel_calls += 1
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.copied.append(args[0].numel())
        return func(*args, **(kwargs or {}))


# Sizes of attn_mask without the mapped dimension, and where each of query, key, value, the two masks is mapped.
MAPPED = {
    "query": (0, None, None, None, None),
    "keys": (None, 0, 0, None, None),
    "every_tensor": (0, 0, 0, 0, 0),
    "inner_dims": (4, 2, 1, 1, 4),
    "padding": (None, None, None, 0, None),
    "mask": (None, None, None, None, 0),
    "masks": (None, None, None, 1, 2),
}
MASK_SIZES = {"full": (N, H, L, S), "per_sample": (N, 1, L, S), "per_head": (1, H, L, S), "shared": (1, 1, L, S)}


def five(in_dims: tuple[int | None, ...], mask_sizes: tuple[int, ...], kind: str) -> list[torch.Tensor]:
    sizes = [(N, H, L, D), (N, HKV, S, D), (N, HKV, S, D)]
    tensors = [normal(*(s if d is None else (B, *s))) for s, d in zip(sizes, in_dims[:3], strict=True)]
    for s, d in zip([(N, S), mask_sizes], in_dims[3:], strict=True):
        tensors.append(mask(kind, *(s if d is None else (B, *s))))
    return [t if d is None else t.movedim(0, d) for t, d in zip(tensors, in_dims, strict=True)]


@pytest.mark.parametrize("weights_mode", [0, 1, 2])
@pytest.mark.parametrize("mask_sizes", MASK_SIZES)
@pytest.mark.parametrize("mapped", MAPPED)
def test_forward_and_backward_equal_a_loop(mapped: str, mask_sizes: str, weights_mode: int) -> None:
    """The private operators, with every gradient wanted, those of tensors that are not mapped among them."""
    in_dims = MAPPED[mapped]
    tensors = five(in_dims, MASK_SIZES[mask_sizes], "float")
    numbers = (False, 0.0, 0.5, None, 0, weights_mode)

    def forward(*arguments):
        return ops._attention_forward(*arguments, *numbers)

    found = torch.vmap(forward, in_dims)(*tensors) if weights_mode else torch.vmap(
        lambda *t: tuple(forward(*t)[i] for i in (0, 2, 3)), in_dims
    )(*tensors)  # fmt: skip
    expected = loop(forward, in_dims, *tensors)
    if not weights_mode:
        del expected[1]
    assert_equal(found, expected)

    grad_output = normal(B, N, H, L, D)
    grad_weights = normal(B, *((N, L, S), (N, H, L, S))[weights_mode - 1]) if weights_mode else None

    def backward(of_output, of_weights, *arguments):
        output, _, row_max, row_sum = forward(*arguments)
        return ops._attention_backward(
            of_output, of_weights, *arguments, output, row_max, row_sum, *numbers, [True] * 5 + [False]
        )

    dims = (0, 0 if weights_mode else None, *in_dims)
    found = torch.vmap(backward, dims)(grad_output, grad_weights, *tensors)
    calls = [
        backward(grad_output[i], grad_weights[i] if weights_mode else None,
                 *(t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True)))
        for i in range(B)
    ]  # fmt: skip
    assert_equal(found, [torch.stack(parts) for parts in zip(*calls, strict=True)])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (2, 1, 0)], ids=str)
def test_public_operator(in_dims: tuple[int | None, ...], causal: bool) -> None:
    every = [normal(B, N, H, L, D) for _ in range(3)]
    arguments = [t[0] if d is None else t.movedim(0, d) for t, d in zip(every, in_dims, strict=True)]

    def function(*tensors):
        return ops.attention_with_weights(*tensors, is_causal=causal)

    assert_equal(torch.vmap(function, in_dims)(*arguments), loop(function, in_dims, *arguments))


# What is mapped, the sizes of the masks, and what has to be copied for one call to do all.
IN_PLACE = {
    "samples_of_their_own": ((0, 0, 0, 0, 0), 1, (1, H, L, S), 0),
    "one_mask_for_all": ((0, 0, 0, None, None), 1, (1, H, L, S), 0),
    "padding_of_their_own": ((0, 0, 0, 0, None), N, (1, H, L, S), 0),
    "mask_per_sample": ((0, 0, 0, 0, 0), N, (N, 1, L, S), 0),
    "keys_shared": ((0, None, None, None, None), N, (N, 1, L, S), B * N * H * L * D),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_one_call_and_no_copy_of_a_mask(name: str) -> None:
    in_dims, batch, mask_sizes, copied = IN_PLACE[name]
    sizes = [(batch, H, L, D), (batch, HKV, S, D), (batch, HKV, S, D), (batch, S), mask_sizes]
    tensors = [
        (normal if i < 3 else lambda *s: mask("bool", *s))(*(s if d is None else (B, *s)))
        for i, (s, d) in enumerate(zip(sizes, in_dims, strict=True))
    ]

    def function(query, key, value, padding, attn_mask):
        return (ops.attention(query, key, value, key_padding_mask=padding, attn_mask=attn_mask),)

    with Copies() as copies:
        found = torch.vmap(function, in_dims)(*tensors)
    assert copies.kernel_calls == 1
    assert sum(copies.copied) == copied
    assert_equal(found, loop(function, in_dims, *tensors))


def test_every_place_is_taken_by_some_case() -> None:
    """Otherwise a rule that always folds into N would pass the tests above."""

    def place(in_dims, mask_sizes):
        tensors = five(in_dims, mask_sizes, "bool")
        operands = [_batching._operand(t, d) for t, d in zip(tensors, in_dims, strict=True)]
        return _batching._Folded(operands, B, False, [False] * 5).place

    assert place(MAPPED["every_tensor"], MASK_SIZES["full"]) is _batching._Place.BEFORE_BATCH
    assert place(MAPPED["query"], MASK_SIZES["shared"]) is _batching._Place.AFTER_HEADS
    by_head = (0, 0, 0, None, None)
    tensors = [normal(N, B, H, L, D), normal(N, B, HKV, S, D), normal(N, B, HKV, S, D)]
    operands = [_batching._operand(t, 1) for t in tensors]
    operands += [_batching._operand(t, None) for t in five(by_head, MASK_SIZES["per_sample"], "bool")[3:]]
    assert _batching._Folded(operands, B, False, [False] * 5).place is _batching._Place.BEFORE_HEADS
    assert _batching._Folded(operands, B, True, [False] * 5).place is _batching._Place.BEFORE_BATCH


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_follows_randomness(randomness: str) -> None:
    query, key = normal(B, N, H, L, D), normal(B, N, H, S, D)

    def function(q, k):
        return ops.attention_with_weights(q, k, k, dropout_p=0.5, average_attn_weights=False)

    _, weights = torch.vmap(function, randomness=randomness)(query, key)
    dropped = weights == 0
    assert 0.3 < dropped.double().mean() < 0.7
    assert all(torch.equal(dropped[0], dropped[i]) for i in range(1, B)) == (randomness == "same")


def test_dropout_without_randomness_is_refused() -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda q: ops.attention(q, q, q, dropout_p=0.5))(normal(B, N, H, L, D))


@pytest.mark.parametrize("mapped_state", [False, True])
def test_a_given_state_makes_the_mask_that_it_makes_in_a_loop(mapped_state: bool) -> None:
    """Forward, backward and dropout_mask, bit for bit."""
    query, grad = normal(B, N, H, L, D), normal(B, N, H, L, D)
    states = torch.tensor([[1, 2], [3, 4], [5, 6]])
    in_dims = (0, 0, 0 if mapped_state else None)

    def function(q, grad_output, state):
        numbers = (False, 0.5, 0.5, state, 0, 2)
        output, weights, row_max, row_sum = ops._attention_forward(q, q, q, None, None, *numbers)
        wanted = [True, True, True, False, False, False]
        grads = ops._attention_backward(
            grad_output, None, q, q, q, None, None, output, row_max, row_sum, *numbers, wanted
        )
        return output, weights, *grads[:3], ops.dropout_mask(state, N, H, L, L, 0.5)

    arguments = (query, grad, states if mapped_state else states[0])
    found = torch.vmap(function, in_dims)(*arguments)
    for ours, theirs in zip(found, loop(function, in_dims, *arguments), strict=True):
        assert torch.equal(ours, theirs)


def test_nested() -> None:
    query, padding = normal(B, 4, N, H, L, D), mask("bool", 4, N, L)

    def function(q, hidden):
        return ops.attention(q, q, q, key_padding_mask=hidden)

    found = torch.vmap(torch.vmap(function), in_dims=(0, None))(query, padding)
    expected = [[function(query[i, j], padding[j]) for j in range(4)] for i in range(B)]
    assert_equal(found, [torch.stack(row) for row in expected])


def test_nothing_mapped_and_an_empty_mapped_dimension() -> None:
    query = normal(N, H, L, D)
    found = torch.vmap(lambda x, q: x + ops.attention(q, q, q).sum(), in_dims=(0, None))(torch.zeros(B).double(), query)
    assert_equal(found, [ops.attention(query, query, query).sum()] * B)
    empty = normal(0, N, H, L, D)
    output, weights = torch.vmap(
        lambda q: ops.attention_with_weights(q, q, q, dropout_p=0.1), randomness="different"
    )(empty)  # fmt: skip
    assert output.shape == (0, N, H, L, D)
    assert weights.shape == (0, N, L, L)


def test_empty_rows_and_nan_in_hidden_keys() -> None:
    query, key = normal(B, 1, H, L, D), normal(B, 1, H, S, D)
    padding = torch.zeros(B, 1, S, dtype=torch.bool)
    padding[0] = True
    padding[1, :, 3:] = True
    spoilt = key.masked_fill(padding[:, :, None, :, None], float("nan"))

    def function(q, k, hidden):
        return ops.attention(q, k, k, key_padding_mask=hidden)

    found, clean = (torch.vmap(function)(query, k, padding) for k in (spoilt, key))
    assert torch.equal(found, clean)
    assert not found[0].any()


def per_sample_inputs() -> Inputs:
    return Case("per_sample", N=B, L=3, S=4, D=3, padding="right", mask="float_per_head").make(torch.float64)


def test_per_sample_gradients_of_the_operator() -> None:
    """vmap of grad, of a learned bias that all samples share too."""
    inputs = per_sample_inputs()
    bias = inputs.attn_mask.double()

    def loss(factor, learned, q, k, v, hidden):
        output = ops.attention(factor * q[None], k[None], v[None], key_padding_mask=hidden[None], attn_mask=learned)
        return output.square().sum()

    arguments = (torch.tensor(0.7).double(), bias, *inputs.tensors(), inputs.key_padding_mask)
    in_dims = (None, None, 0, 0, 0, 0)
    gradient = torch.func.grad(loss, argnums=(0, 1))
    with Copies() as copies:
        found = torch.vmap(gradient, in_dims)(*arguments)
    assert copies.kernel_calls == 2
    assert_equal(found, loop(gradient, in_dims, *arguments))
    assert torch.count_nonzero(found[1]) > 0


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("batch_first", [True, False])
def test_per_sample_gradients_of_the_module(batch_first: bool, dropout: float) -> None:
    """functional_call under vmap of grad, as for differentially private training: equal to sample after sample."""
    module = fused_mha.MultiheadAttention(8, 2, dropout=dropout, batch_first=batch_first, add_bias_kv=True).double()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x, padding = normal(B, L, 8), torch.arange(L) >= torch.tensor([[5], [3], [1]])

    def loss(given, sample, hidden):
        dim = 0 if batch_first else 1
        one = sample.unsqueeze(dim)
        output, weights = torch.func.functional_call(
            module, given, (one, one, one), {"key_padding_mask": hidden.unsqueeze(0), "is_causal": True}
        )
        return output.square().sum() + weights.square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="same")(parameters, x, padding)
    if dropout:
        other = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")(parameters, x, padding)
        assert not torch.equal(found["in_proj_weight"], other["in_proj_weight"])
        return
    for i in range(B):
        expected = torch.func.grad(loss)(parameters, x[i], padding[i])
        for name, gradient in found.items():
            torch.testing.assert_close(gradient[i], expected[name], rtol=1e-10, atol=1e-12)


def test_an_ensemble_of_modules() -> None:
    """stack_module_state and vmap over parameters."""
    modules = [fused_mha.MultiheadAttention(8, 2, batch_first=True).double().eval() for _ in range(B)]
    parameters, buffers = torch.func.stack_module_state(modules)
    x = normal(N, L, 8)

    def run(given, state, data):
        return torch.func.functional_call(modules[0], (given, state), (data, data, data), {"attn_mask": later(L, L)})

    found = torch.vmap(run, in_dims=(0, 0, None))(parameters, buffers, x)
    expected = [module(x, x, x, attn_mask=later(L, L)) for module in modules]
    assert_equal(found, [torch.stack(parts) for parts in zip(*expected, strict=True)])


def test_autocast_inside_vmap() -> None:
    query = torch.randn(B, N, H, L, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.vmap(lambda q: ops.attention(q, q, q, is_causal=True))(query)
        expected = [ops.attention(q, q, q, is_causal=True) for q in query]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.stack(expected))


def test_inside_compiled_code() -> None:
    inputs = per_sample_inputs()

    def loss(q, k, hidden):
        return ops.attention(q[None], k[None], k[None], key_padding_mask=hidden[None]).square().sum()

    def gradients(q, k, hidden):
        return torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(q, k, hidden)

    arguments = (inputs.query, inputs.key, inputs.key_padding_mask)
    compiled = torch.compile(gradients, backend="aot_eager", fullgraph=True)
    assert_equal(compiled(*arguments), gradients(*arguments))
