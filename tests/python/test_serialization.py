# SPDX-License-Identifier: BSD-3-Clause
"""Saving, copying, sharing and deferred initialization of the module."""

from __future__ import annotations

import copy
import io
import pickle

import fused_mha
import pytest
import torch
from profiling import FUSED, operators_in, stock_attention_in

MULTIPROCESSING = torch.multiprocessing.get_context("spawn")


def make(**options) -> fused_mha.MultiheadAttention:
    return fused_mha.MultiheadAttention(8, 2, **{"dropout": 0.1, "batch_first": True, **options}).eval()


def through_file(thing: object, **load: object):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, **load)


def assert_same_answers(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    x = torch.randn(2, 5, 8)
    for ours, theirs in zip(found(x, x, x), expected(x, x, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True, "kdim": 8, "vdim": 8}], ids=str)
def test_state_dict_weights_only_both_ways(options: dict[str, object]) -> None:
    fused = make(**options)
    stock = torch.nn.MultiheadAttention(8, 2, batch_first=True, **options).eval()
    state = through_file(fused.state_dict(), weights_only=True)
    assert not any(stock.load_state_dict(state))
    assert_same_answers(fused, stock)
    torch.nn.init.normal_(stock.in_proj_bias if stock.in_proj_bias is not None else stock.in_proj_weight)
    assert not any(fused.load_state_dict(through_file(stock.state_dict(), weights_only=True)))
    assert_same_answers(fused, stock)


OTHER_OPTIONS = {"head_dim": 6, "num_kv_heads": 1, "out_dim": 3, "sink": "learned", "causal_alignment": "bottom_right"}


@pytest.mark.parametrize("options", [{}, OTHER_OPTIONS], ids=["", "options"])
def test_whole_module_weights_only(options: dict[str, object]) -> None:
    """weights_only refuses classes that it does not know, and takes this one where it is told that it is safe."""
    module = make(**options)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        through_file(module, weights_only=True)
    # As for the stock module: its own class and that of out_proj, and nothing private beside them.
    with torch.serialization.safe_globals([fused_mha.MultiheadAttention, type(module.out_proj)]):
        safe = through_file(module, weights_only=True)
    for loaded in (safe, through_file(module, weights_only=False)):
        assert type(loaded) is fused_mha.MultiheadAttention
        assert_same_answers(loaded, module)


def test_a_model_loaded_by_weights_only_keeps_the_fused_path() -> None:
    """pytorch#97111: what keeps the encoder layer off its own kernel is made again where it is not in the file."""
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, activation=torch.nn.ReLU(), batch_first=True).eval()
    fused_mha.replace_multihead_attention(model)
    kinds = [type(module) for module in model.modules()]
    with torch.serialization.safe_globals(kinds):
        loaded = through_file(model, weights_only=True)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        results = []
        operators = operators_in(lambda: results.append(loaded(x)))
        assert operators[FUSED] == 1
        assert not stock_attention_in(operators)
        assert torch.equal(results[0], model(x))


@pytest.mark.parametrize("times", [1, 2])
def test_deepcopy_of_a_parametrized_module_keeps_the_fused_path(times: int) -> None:
    """A parametrized module copies its dictionary and calls no __setstate__."""
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    fused_mha.replace_multihead_attention(model)
    torch.nn.utils.parametrizations.orthogonal(model.self_attn, "in_proj_weight")
    calls = []
    other = model
    for _ in range(times):
        other = copy.deepcopy(other)
    handle = other.self_attn.register_forward_pre_hook(lambda module, args: calls.append(module))
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        other(x)
        assert calls == [other.self_attn]
        handle.remove()
        assert operators_in(lambda: other(x))[FUSED] == 1
        assert calls == [other.self_attn]


def test_pickle_and_deepcopy_of_a_model_keep_hooks_and_the_fused_path() -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    fused_mha.replace_multihead_attention(model)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), through_file(model, weights_only=False)):
            with torch.profiler.profile() as profile:
                assert torch.equal(other(x), model(x))
            names = [event.name for event in profile.events()]
            assert names.count("fused_mha::_attention_forward") == 2


class WithHandle(torch.nn.Module):
    """Keeps the handle of a hook, which knows the dictionary of hooks by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = make()
        self.handle = self.attention.register_forward_pre_hook(double_query)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def double_query(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (2 * args[0], *args[1:])


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_handle_copied_beside_its_hook_removes_the_copy(way) -> None:
    model, x = WithHandle(), torch.randn(2, 5, 8)
    other = way(model)
    hooked = model(x)
    assert torch.equal(other(x), hooked)
    other.handle.remove()
    assert not torch.equal(other(x), hooked)
    assert torch.equal(model(x), hooked)


def test_deepcopy_is_independent_and_pickle_keeps_the_mode() -> None:
    module = make()
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.in_proj_weight.zero_()
    assert module.in_proj_weight.any()
    assert not pickle.loads(pickle.dumps(module)).training
    assert pickle.loads(pickle.dumps(module.train())).training


def _train(module: torch.nn.Module) -> None:
    with torch.no_grad():
        module.in_proj_weight.zero_()


def test_share_memory() -> None:
    """Parameters in shared memory are those of another process too."""
    module = make()
    assert module.share_memory() is module
    assert all(p.is_shared() for p in module.parameters())
    process = MULTIPROCESSING.Process(target=_train, args=(module,))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    assert not module.in_proj_weight.any()
    x = torch.randn(2, 5, 8)
    assert torch.isfinite(module(x, x, x)[0]).all()


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 3, "add_bias_kv": True}], ids=str)
def test_meta_device_then_real(options: dict[str, object]) -> None:
    """Deferred initialization: made without memory, given memory, then reset to the numbers of a direct start."""
    with torch.device("meta"):
        deferred = make(**options)
    assert all(p.is_meta for p in deferred.parameters())
    x, key, value = (
        torch.randn(2, 5, deferred_dim, device="meta") for deferred_dim in (8, deferred.kdim, deferred.vdim)
    )
    output, weights = deferred(x, key, value)
    assert output.is_meta
    assert output.shape == (2, 5, 8)
    assert weights.shape == (2, 5, 5 + (deferred.bias_k is not None))
    deferred.to_empty(device="cpu")
    expected = make(**options)
    for module in (deferred, expected):
        torch.manual_seed(4)
        module._reset_parameters()
    for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k"):
        ours, theirs = getattr(deferred, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_meta_module_takes_a_state_by_assignment() -> None:
    module = make()
    with torch.device("meta"):
        deferred = make()
    assert not any(deferred.load_state_dict(module.state_dict(), assign=True))
    assert deferred.in_proj_weight.data_ptr() == module.in_proj_weight.data_ptr()
    assert_same_answers(deferred, module)


def test_skip_init() -> None:
    module = torch.nn.utils.skip_init(fused_mha.MultiheadAttention, 8, 2, batch_first=True)
    assert not any(p.is_meta for p in module.parameters())
    module.load_state_dict(make().state_dict())
    x = torch.randn(2, 5, 8)
    assert torch.isfinite(module(x, x, x)[0]).all()
