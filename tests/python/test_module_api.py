# SPDX-License-Identifier: BSD-3-Clause
"""The module is nn.MultiheadAttention to everyone who looks at it: constructor, attributes, state, out_proj."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
import warnings

import fused_mha
import pytest
import torch
from cases import KEY_PADDING_MASKS, later
from profiling import operators_in
from torch import nn

OPTIONS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"kdim": 5},
    {"kdim": 5, "vdim": 7, "bias": False},
    {"batch_first": True, "dropout": 0.25},
    {"dtype": torch.float64},
    {"device": "meta"},
]


def pair(*arguments, **options) -> tuple[fused_mha.MultiheadAttention, nn.MultiheadAttention]:
    torch.manual_seed(0)
    ours = fused_mha.MultiheadAttention(*arguments, **options)
    torch.manual_seed(0)
    return ours, nn.MultiheadAttention(*arguments, **options)


# Constructor, attributes, state.


def test_signatures_are_those_of_stock() -> None:
    """opacus#596. Options that stock lacks come behind its own, by keyword alone."""
    for name in ("__init__", "forward"):
        ours = list(inspect.signature(getattr(fused_mha.MultiheadAttention, name)).parameters.values())
        stock = list(inspect.signature(getattr(nn.MultiheadAttention, name)).parameters.values())
        assert [(p.name, p.default, p.kind) for p in ours[: len(stock)]] == [(p.name, p.default, p.kind) for p in stock]
        assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(stock) :])
        assert (len(ours) == len(stock)) == (name == "forward")
    assert issubclass(fused_mha.MultiheadAttention, nn.MultiheadAttention)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attributes_parameters_and_initial_numbers(options: dict[str, object]) -> None:
    """pytorch#166378: the same numbers for the same seed, bit for bit."""
    ours, stock = pair(12, 3, **options)
    assert list(ours.state_dict()) == list(stock.state_dict())
    for (name, found), (expected_name, expected) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        assert name == expected_name
        assert found.dtype == expected.dtype
        assert found.device == expected.device
        assert expected.is_meta or torch.equal(found, expected)
    missing = {name for name in vars(stock) if not hasattr(ours, name)}
    assert not missing
    names = ("embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn")
    for name in (*names, "_qkv_same_embed_dim"):
        assert getattr(ours, name) == getattr(stock, name)
    for name in (
        "in_proj_weight",
        "in_proj_bias",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "bias_k",
        "bias_v",
    ):
        assert (getattr(ours, name) is None) == (getattr(stock, name) is None)
    assert isinstance(ours.out_proj, type(stock.out_proj))


@pytest.mark.parametrize("options", OPTIONS[:7], ids=str)
def test_state_goes_both_ways(options: dict[str, object]) -> None:
    ours, stock = pair(12, 3, **options)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_()
    ours.load_state_dict(stock.state_dict(), strict=True)
    again = nn.MultiheadAttention(12, 3, **options)
    again.load_state_dict(ours.state_dict(), strict=True)
    for found, expected in zip(again.parameters(), stock.parameters(), strict=True):
        assert torch.equal(found, expected)


def copies(module: nn.Module) -> dict[str, nn.Module]:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return {
        "pickle": pickle.loads(pickle.dumps(module)),
        "deepcopy": copy.deepcopy(module),
        "torch.save": torch.load(file, weights_only=False),
    }


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "kdim": 5, "vdim": 5}], ids=str)
def test_copies_work_alone(options: dict[str, object]) -> None:
    module = fused_mha.MultiheadAttention(12, 3, **options)
    query, key = torch.randn(4, 2, 12), torch.randn(6, 2, options.get("kdim", 12))
    expected = module(query, key, key)
    for how, other in copies(module).items():
        assert type(other) is fused_mha.MultiheadAttention, how
        found = other(query, key, key)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), how
        assert all(a is not b for a, b in zip(other.parameters(), module.parameters(), strict=True)), how


def test_moving_to_another_dtype() -> None:
    module = fused_mha.MultiheadAttention(12, 3).double()
    assert module(*[torch.randn(4, 2, 12, dtype=torch.float64)] * 3)[0].dtype == torch.float64
    module.bfloat16()
    output, weights = module(*[torch.randn(4, 2, 12, dtype=torch.bfloat16)] * 3)
    assert output.dtype == weights.dtype == torch.bfloat16


def test_the_fused_operator_runs() -> None:
    module = fused_mha.MultiheadAttention(12, 3)
    x = torch.randn(4, 2, 12)
    for training, need_weights in itertools.product((True, False), (True, False)):
        module.train(training)
        assert "fused_mha::_attention_forward" in operators_in(lambda: module(x, x, x, need_weights=need_weights))  # noqa: B023


@pytest.mark.parametrize(
    ("unbatched", "batch_first"), [(False, False), (False, True), (True, False), (True, True)], ids=str
)
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_shapes_and_nones_of_results(unbatched: bool, batch_first: bool, extra: dict[str, bool]) -> None:
    ours, stock = pair(12, 3, batch_first=batch_first, **extra)
    query, key = (torch.randn((size, 12) if unbatched else (size, 3, 12)) for size in (3, 3))
    for need_weights, average in itertools.product((True, False), (True, False)):
        options = {"need_weights": need_weights, "average_attn_weights": average}
        found, expected = ours(query, key, key, **options), stock(query, key, key, **options)
        assert isinstance(found, tuple)
        assert len(found) == 2
        assert found[0].shape == expected[0].shape
        assert (found[1] is None) == (expected[1] is None)
        assert found[1] is None or found[1].shape == expected[1].shape


@pytest.mark.parametrize("add_zero_attn", [False, True])
@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_empty_batches_and_sequences(sizes: tuple[int, int, int], add_zero_attn: bool) -> None:
    """pytorch#141218."""
    n, length, s = sizes
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=add_zero_attn)
    nn.init.constant_(module.out_proj.bias, 0.5)
    query, memory = torch.randn(n, length, 8, requires_grad=True), torch.randn(n, s, 8)
    padding = torch.zeros(n, s, dtype=torch.bool)
    for need_weights in (True, False):
        output, weights = module(query, memory, memory, key_padding_mask=padding, need_weights=need_weights)
        assert output.shape == (n, length, 8)
        assert not need_weights or weights.shape == (n, length, s + add_zero_attn)
        if s == 0:
            assert torch.equal(output, torch.full_like(output, 0.5))
        for grad in torch.autograd.grad(output.sum(), [query, *module.parameters()]):
            assert torch.isfinite(grad).all()


def test_two_bool_masks_and_mixed_masks_raise_no_warning() -> None:
    """pytorch#95702, pytorch#96103."""
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    padding = KEY_PADDING_MASKS["right"](2, 5, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mask in (later(5, 5), torch.zeros(5, 5).masked_fill(later(5, 5), float("-inf")), torch.randn(5, 5)):
            assert torch.isfinite(module(x, x, x, key_padding_mask=padding, attn_mask=mask)[0]).all()


@pytest.mark.parametrize("shape", [(2, 2, 5, 5), (2, 1, 5, 5), (1, 1, 5, 5), (2, 1, 1, 5), (1, 2, 1, 1)], ids=str)
def test_four_dimensional_masks(shape: tuple[int, ...]) -> None:
    """pytorch#64706, pytorch#116472: a mask for each sample needs no tiling over heads."""
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
    found = module(x, x, x, attn_mask=mask, average_attn_weights=False)
    expected = module(x, x, x, attn_mask=mask.expand(2, 2, 5, 5).reshape(4, 5, 5), average_attn_weights=False)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[1] == 0, mask.expand(2, 2, 5, 5))


# out_proj is called as the module it is.


class PlusOne(nn.Linear):
    """Stands for a LoRA layer: a Linear whose forward does more."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Opaque(nn.Module):
    """Stands for a quantized layer: `weight` is a method, the numbers are hidden."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = [linear]

    def weight(self) -> torch.Tensor:
        return self._linear[0].weight

    def bias(self) -> torch.Tensor:
        return self._linear[0].bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._linear[0](input) * 2


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("training", [True, False])
def test_hooks_on_out_proj_are_called_once(training: bool) -> None:
    """pytorch#78109."""
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True).train(training)
    x = torch.randn(2, 5, 8)
    expected = module(x, x, x)[0]
    calls = []
    module.out_proj.register_forward_pre_hook(lambda m, inputs: calls.append(inputs[0].shape))
    module.out_proj.register_forward_hook(lambda m, inputs, output: output + 1)
    with torch.no_grad():
        found = module(x, x, x)[0]
    assert calls == [torch.Size([2, 5, 8])]
    torch.testing.assert_close(found, expected + 1)


@pytest.mark.parametrize("training", [True, False])
def test_layers_in_place_of_out_proj_take_effect(training: bool) -> None:
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True).train(training)
    x = torch.randn(2, 5, 8)
    expected = module(x, x, x)[0].detach()
    plain = module.out_proj
    module.out_proj = PlusOne(8, 8)
    module.out_proj.load_state_dict(plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(module(x, x, x)[0], expected + 1)
        module.out_proj = Opaque(plain)
        torch.testing.assert_close(module(x, x, x)[0], expected * 2)


def test_parametrizations_take_effect() -> None:
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    bias = module.out_proj.bias.detach()
    with torch.no_grad():
        expected = module(x, x, x)[0]
        nn.utils.parametrize.register_parametrization(module.out_proj, "weight", Double())
        torch.testing.assert_close(module(x, x, x)[0], (expected - bias) * 2 + bias)
        nn.utils.parametrize.register_parametrization(module, "in_proj_weight", Double())
        stock = nn.MultiheadAttention(8, 2, batch_first=True)
        state = {"in_proj_weight": module.in_proj_weight, "in_proj_bias": module.in_proj_bias}
        stock.load_state_dict({**state, "out_proj.weight": module.out_proj.weight, "out_proj.bias": bias})
        torch.testing.assert_close(module(x, x, x)[0], stock(x, x, x)[0], rtol=1e-5, atol=1e-6)


def test_hooks_on_the_module_itself() -> None:
    module = fused_mha.MultiheadAttention(8, 2)
    seen = []
    module.register_forward_hook(lambda m, inputs, output: seen.append(len(output)))
    module(*[torch.randn(5, 2, 8)] * 3)
    assert seen == [2]


def test_symbolic_trace_of_a_replaced_model() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = fused_mha.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, key_padding_mask=padding)[0]

    model = Model()
    traced = torch.fx.symbolic_trace(model)
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [True, True, True]])
    torch.testing.assert_close(traced(x, padding), model(x, padding))
