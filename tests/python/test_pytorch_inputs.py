# SPDX-License-Identifier: BSD-3-Clause
"""The inputs with which PyTorch tests its own attention (``torch.testing._internal``), given to ours.

Forward in every dtype against the stock function, gradients against its gradients, and PyTorch's own checks of
derivatives: both modes, both orders, batched. Where the stock function is marked as having no second order or no
forward mode, ours is checked all the same.

PyTorch's numbers lie between -9 and 9, and products of so many of them saturate the softmax: they are divided by 8,
exactly in every dtype, so that there is something to compare.
"""

from __future__ import annotations

import fused_mha
import pytest
import torch
import torch.nn.functional as F
from fused_mha.integrations.sdpa import scaled_dot_product_attention
from tolerances import assert_close_as_torch, largest
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SDPA = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
FORWARD = next(op for op in op_db if op.name == "nn.functional.multi_head_attention_forward")
MODULE = next(module for module in module_db if module.module_cls is torch.nn.MultiheadAttention)


def samples_of(op, dtype: torch.dtype = torch.float64, requires_grad: bool = False):
    torch.manual_seed(0)
    return list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))


def converted(arguments, dtype: torch.dtype, factor: float):
    """Positional and keyword arguments whose floating tensors are leaves of another dtype."""

    def convert(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return (value.detach() * factor).to(dtype).requires_grad_()
        return value

    args, kwargs = arguments
    return [convert(value) for value in args], {name: convert(value) for name, value in kwargs.items()}


def arguments_of(sample, dtype: torch.dtype):
    return converted(([sample.input, *sample.args], sample.kwargs), dtype, 1 / 8)


def leaves_of(args, kwargs) -> list[torch.Tensor]:
    every = [*args, *kwargs.values()]
    return [t for t in every if isinstance(t, torch.Tensor) and t.requires_grad]


def as_function(function, args, kwargs):
    """`function` of the tensors that require a gradient alone, with the same dropout at every call."""
    names = [key for key, value in [*enumerate(args), *kwargs.items()] if isinstance(value, torch.Tensor)]
    names = [key for key in names if (args[key] if isinstance(key, int) else kwargs[key]).requires_grad]

    def call(*leaves: torch.Tensor):
        args_now, kwargs_now = list(args), dict(kwargs)
        for key, leaf in zip(names, leaves, strict=True):
            (args_now if isinstance(key, int) else kwargs_now)[key] = leaf
        torch.manual_seed(0)
        return function(*args_now, **kwargs_now)

    return call


def gradients(outputs, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [t for t in outputs if t is not None]
    return torch.autograd.grad(
        sum(t.square().sum() for t in outputs), leaves, allow_unused=True, materialize_grads=True
    )


def assert_gradients_close(found, expected, torch_result, *, what: str) -> None:
    """Each has the largest of all as its scale: where terms as large as the others' cancel, their rounding stays."""
    scale = max(1.0, *(largest(t) for t in expected))
    for i, of_argument in enumerate(zip(found, expected, torch_result, strict=True)):
        assert_close_as_torch(*of_argument, what=f"{what}, gradient {i}", gradient=True, scale=scale)


def check_derivatives(function, leaves: list[torch.Tensor], *, random: bool) -> None:
    # A vmap of the forward pass would have to be told what randomness is.
    assert gradcheck(
        function,
        leaves,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=not random,
        fast_mode=True,
    )
    assert gradgradcheck(
        function,
        leaves,
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        gen_non_contig_grad_outputs=True,
        fast_mode=True,
    )


# -------------------------------------------------------------------------- nn.functional.scaled_dot_product_attention


def ours_of_sdpa(query, key, value, **options) -> torch.Tensor:
    """As a user brings sizes together that the stock function broadcasts: without a copy."""
    batch = key.shape[0]
    return scaled_dot_product_attention(query.expand(batch, *key.shape[1:-2], *query.shape[-2:]), key, value, **options)


def sdpa_with_our_dropout(query, key, value, *, dropout_p, is_causal, attn_mask=None, enable_gqa=False):
    """The stock function by its formula; the weights that our kernel drops are dropped."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    L, S = scores.shape[-2:]
    if attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        scores = scores.masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1), float("-inf"))
    N, H = scores.shape[0], scores[0].numel() // (L * S)
    keep = fused_mha.functional.dropout_mask(fused_mha.functional.draw_rng_state(), N, H, L, S, dropout_p)
    return (scores.softmax(-1) * keep.view(scores.shape) / (1 - dropout_p)) @ value


def describe(sample) -> str:
    shapes = "-".join("x".join(map(str, t.shape)) for t in (sample.input, sample.args[0]))
    options = [name for name, value in sample.kwargs.items() if isinstance(value, torch.Tensor) or value]
    return "-".join([shapes, *options])


SDPA_IDS = [f"{i}-{describe(sample)}" for i, sample in enumerate(samples_of(SDPA))]
# The samples that allow grouped queries have none, and so come twice.
DIFFERENT = [i for i, sample in enumerate(samples_of(SDPA)) if not sample.kwargs.get("enable_gqa")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", range(len(SDPA_IDS)), ids=SDPA_IDS)
def test_scaled_dot_product_attention(index: int, dtype: torch.dtype) -> None:
    args, kwargs = arguments_of(samples_of(SDPA, dtype)[index], dtype)
    exact_args, exact_kwargs = converted((args, kwargs), torch.float64, 1)
    dropped = kwargs["dropout_p"] > 0
    stock = sdpa_with_our_dropout if dropped else F.scaled_dot_product_attention

    found = as_function(ours_of_sdpa, args, kwargs)(*leaves_of(args, kwargs))
    expected = as_function(stock, exact_args, exact_kwargs)(*leaves_of(exact_args, exact_kwargs))
    torch_result = as_function(stock, args, kwargs)(*leaves_of(args, kwargs))
    assert found.dtype == dtype
    assert_close_as_torch(found, expected, torch_result, what="output", scale=1.0)
    assert_gradients_close(
        gradients(found, leaves_of(args, kwargs)),
        gradients(expected, leaves_of(exact_args, exact_kwargs)),
        gradients(torch_result, leaves_of(args, kwargs)),
        what="output",
    )


@pytest.mark.parametrize("index", DIFFERENT, ids=[SDPA_IDS[i] for i in DIFFERENT])
def test_derivatives_of_scaled_dot_product_attention(index: int) -> None:
    args, kwargs = arguments_of(samples_of(SDPA, requires_grad=True)[index], torch.float64)
    function = as_function(ours_of_sdpa, args, kwargs)
    check_derivatives(function, leaves_of(args, kwargs), random=kwargs["dropout_p"] > 0)


# -------------------------------------------------------------------------- nn.functional.multi_head_attention_forward


def stock_with_our_dropout(monkeypatch: pytest.MonkeyPatch):
    """The stock function, dropping the weights that our kernel drops."""

    def drop(weights, p, training=True):
        assert training
        (N, H), (L, S) = heads, weights.shape[-2:]
        keep = fused_mha.functional.dropout_mask(fused_mha.functional.draw_rng_state(), N, H, L, S, p)
        return weights * keep.view(weights.shape) / (1 - p)

    heads: list[int] = []

    def call(query, key, value, embed_dim, num_heads, *args, **kwargs):
        heads[:] = [query.shape[1] if query.dim() == 3 else 1, num_heads]
        with monkeypatch.context() as patch:
            patch.setattr(F, "dropout", drop)
            return F.multi_head_attention_forward(query, key, value, embed_dim, num_heads, *args, **kwargs)

    return call


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multi_head_attention_forward(dtype: torch.dtype, need_weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, stock = fused_mha.functional.multi_head_attention_forward, stock_with_our_dropout(monkeypatch)
    samples = samples_of(FORWARD, dtype)
    assert len(samples) > 100
    # 5 is coprime to the number of choices of each option, so that every fifth has all of them.
    for i, sample in enumerate(samples if need_weights else samples[::5]):
        args, kwargs = arguments_of(sample, dtype)
        exact_args, exact_kwargs = converted((args, kwargs), torch.float64, 1)
        found = as_function(ours, args, {**kwargs, "need_weights": need_weights})(*leaves_of(args, kwargs))
        expected = as_function(stock, exact_args, exact_kwargs)(*leaves_of(exact_args, exact_kwargs))
        torch_result = as_function(stock, args, kwargs)(*leaves_of(args, kwargs))
        assert (found[1] is None) == (not need_weights)
        count = 2 if need_weights else 1
        for which in range(count):
            assert found[which].dtype == dtype
            assert_close_as_torch(
                found[which], expected[which], torch_result[which], what=f"sample {i}, result {which}", scale=1.0
            )
        assert_gradients_close(
            gradients(found, leaves_of(args, kwargs)),
            gradients(expected[:count], leaves_of(exact_args, exact_kwargs)),
            gradients(torch_result[:count], leaves_of(args, kwargs)),
            what=f"sample {i}",
        )


@pytest.mark.parametrize("requires_grad", [True, False], ids=["for_gradients", "for_forward"])
def test_derivatives_of_multi_head_attention_forward(requires_grad: bool) -> None:
    """The one sample that PyTorch has for gradients, and a few of those that it has for the forward pass."""
    samples = samples_of(FORWARD, requires_grad=requires_grad)
    for sample in samples if requires_grad else samples[::47]:
        args, kwargs = arguments_of(sample, torch.float64)
        function = as_function(fused_mha.functional.multi_head_attention_forward, args, kwargs)
        check_derivatives(function, leaves_of(args, kwargs), random=kwargs["training"])


# ----------------------------------------------------------------------------------------------- nn.MultiheadAttention


def module_samples(training: bool = True):
    torch.manual_seed(0)
    return MODULE.module_inputs_func(MODULE, "cpu", torch.float64, True, training)


def describe_module(sample) -> str:
    options = [name for name, value in sample.constructor_input.kwargs.items() if value is True]
    masks = [name for name, value in sample.forward_input.kwargs.items() if value is not None]
    return "-".join([*options, *masks]) or "none"


MODULE_IDS = [f"{i}-{describe_module(sample)}" for i, sample in enumerate(module_samples())]
# An unbatched input means the same whatever batch_first says.
BATCH_FIRST = [i for i, sample in enumerate(module_samples()) if sample.constructor_input.kwargs["batch_first"]]


def make_pair(sample, training: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours and the stock module; the constructor's arguments and the numbers are the same."""
    constructor = sample.constructor_input
    pair = []
    for kind in (fused_mha.MultiheadAttention, torch.nn.MultiheadAttention):
        torch.manual_seed(1)
        pair.append(kind(*constructor.args, **constructor.kwargs, dtype=torch.float64).train(training))
    # The stock module's biases start as zeros, which hide faults.
    with torch.no_grad():
        for ours, stock in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            assert torch.equal(ours, stock)
            ours.copy_(torch.randn_like(ours))
            stock.copy_(ours)
    return pair[0], pair[1]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("index", range(len(MODULE_IDS)), ids=MODULE_IDS)
def test_module(index: int, training: bool) -> None:
    """Forward and gradients against stock; against PyTorch's reference, which is a batch of one; without gradients."""
    sample = module_samples(training)[index]
    ours, stock = make_pair(sample, training)
    args, kwargs = converted((sample.forward_input.args, sample.forward_input.kwargs), torch.float64, 1 / 8)
    found, expected = ours(*args, **kwargs), stock(*args, **kwargs)
    reference = sample.reference_fn(ours, *args, **kwargs)
    close = {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(found, reference, **close)
    of_ours = gradients(found, [*args, *ours.parameters()])
    torch.testing.assert_close(of_ours, gradients(expected, [*args, *stock.parameters()]), **close)
    with torch.no_grad():
        torch.testing.assert_close(ours(*args, **kwargs), expected, **close)


@pytest.mark.parametrize("index", BATCH_FIRST, ids=[MODULE_IDS[i] for i in BATCH_FIRST])
def test_derivatives_of_the_module(index: int) -> None:
    sample = module_samples()[index]
    module, _ = make_pair(sample, training=True)
    names = [name for name, _ in module.named_parameters()]
    args, kwargs = converted((sample.forward_input.args, sample.forward_input.kwargs), torch.float64, 1 / 8)

    def function(*leaves: torch.Tensor):
        parameters = dict(zip(names, leaves[len(args) :], strict=True))
        return torch.func.functional_call(module, parameters, leaves[: len(args)], kwargs)

    check_derivatives(function, [*args, *module.parameters()], random=False)
