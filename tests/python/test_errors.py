# SPDX-License-Identifier: BSD-3-Clause
"""What callers get wrong: exception types and the words of the messages. Nothing may crash the process."""

from __future__ import annotations

import math
import re

import fused_mha
import pytest
import torch

ops = torch.ops.fused_mha

N, H, L, S, D, E = 2, 4, 3, 5, 8, 8


def arguments(**changes) -> dict[str, object]:
    """Legal arguments of attention, with changes."""
    given = {"query": torch.randn(N, H, L, D), "key": torch.randn(N, H, S, D), "value": torch.randn(N, H, S, D)}
    return {**given, **changes}


def on(device: str, given: dict[str, object]) -> dict[str, object]:
    """The same arguments on a device; those that are meant to be elsewhere stay there."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) and not v.is_meta else v for k, v in given.items()}


# name: (changed arguments, exception types, pattern after "fused_mha::attention: ")
ILLEGAL = {
    "padding_length": (
        {"key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)},
        RuntimeError,
        r"key_padding_mask must have shape \(N, S\) = \(2, 5\), got \(2, 4\)",
    ),
    "padding_batch": (
        {"key_padding_mask": torch.zeros(3, 5)},
        RuntimeError,
        r"key_padding_mask must have shape \(N, S\) = \(2, 5\), got \(3, 5\)",
    ),
    "padding_transposed": (
        {"key_padding_mask": torch.zeros(5, 2, dtype=torch.bool)},
        RuntimeError,
        r"key_padding_mask must have shape \(N, S\) = \(2, 5\), got \(5, 2\)",
    ),
    "padding_rank": ({"key_padding_mask": torch.zeros(2, 1, 5)}, RuntimeError, r"key_padding_mask .*got \(2, 1, 5\)"),
    "padding_of_queries": ({"key_padding_mask": torch.zeros(2, 3)}, RuntimeError, r"key_padding_mask .*got \(2, 3\)"),
    "padding_scalar": ({"key_padding_mask": torch.zeros(())}, RuntimeError, r"key_padding_mask .*got \(\)"),
    "mask_keys": ({"attn_mask": torch.zeros(3, 4)}, RuntimeError, r"attn_mask .*\(2, 4, 3, 5\).*got \(3, 4\)"),
    "mask_rows": ({"attn_mask": torch.zeros(2, 5)}, RuntimeError, r"attn_mask .*\(2, 4, 3, 5\).*got \(2, 5\)"),
    "mask_heads": ({"attn_mask": torch.zeros(3, 3, 5)}, RuntimeError, r"attn_mask .*\(2, 4, 3, 5\).*got \(3, 3, 5\)"),
    "mask_samples": ({"attn_mask": torch.zeros(3, 1, 3, 5)}, RuntimeError, r"attn_mask .*got \(3, 1, 3, 5\)"),
    "mask_tiled": ({"attn_mask": torch.zeros(8, 3, 5)}, RuntimeError, r"attn_mask .*got \(8, 3, 5\)"),
    "mask_rank": ({"attn_mask": torch.zeros(1, 2, 4, 3, 5)}, RuntimeError, r"attn_mask .*got .*\(1, 2, 4, 3, 5\)"),
    "padding_int": ({"key_padding_mask": torch.zeros(2, 5, dtype=torch.int64)}, TypeError, r"key_padding_mask .*bool"),
    "mask_int": ({"attn_mask": torch.zeros(3, 5, dtype=torch.uint8)}, TypeError, r"attn_mask .*bool"),
    "query_rank_1": ({"query": torch.randn(D)}, RuntimeError, r"query .*got \(8,?\)"),
    "query_rank_5": ({"query": torch.randn(1, N, H, L, D)}, RuntimeError, r"query .*got \(1, 2, 4, 3, 8\)"),
    "key_rank": ({"key": torch.randn(N, S, D)}, RuntimeError, r"key .*got .*"),
    "value_rank": ({"value": torch.randn(N, S, D)}, RuntimeError, r"value .*got .*"),
    "key_batch": ({"key": torch.randn(4, H, S, D)}, RuntimeError, r"key .*2.*4"),
    "value_batch": ({"value": torch.randn(1, H, S, D)}, RuntimeError, r"value .*2.*1"),
    "value_length": ({"value": torch.randn(N, H, 6, D)}, RuntimeError, r"value .*5.*6"),
    "value_heads": ({"value": torch.randn(N, 2, S, D)}, RuntimeError, r"value .*4.*2"),
    "key_head_dim": ({"key": torch.randn(N, H, S, 7)}, RuntimeError, r"key .*8.*7"),
    "heads_do_not_divide": (
        {"key": torch.randn(N, 3, S, D), "value": torch.randn(N, 3, S, D)},
        RuntimeError,
        r"(?=.*Hkv)(?=.*3)(?=.*4)",
    ),
    "more_key_heads": (
        {"key": torch.randn(N, 8, S, D), "value": torch.randn(N, 8, S, D)},
        RuntimeError,
        r"(?=.*Hkv)(?=.*8)(?=.*4)",
    ),
    "no_key_heads": ({"key": torch.randn(N, 0, S, D), "value": torch.randn(N, 0, S, D)}, RuntimeError, r".*Hkv"),
    "query_integer": ({"query": torch.ones(N, H, L, D, dtype=torch.int64)}, (TypeError, RuntimeError), r"query .*"),
    "query_complex": (
        {"query": torch.ones(N, H, L, D, dtype=torch.complex64)},
        (TypeError, RuntimeError),
        r"query .*",
    ),
    "key_dtype": ({"key": torch.randn(N, H, S, D).double()}, (TypeError, RuntimeError), r".*key.*float32.*float64"),
    "value_dtype": (
        {"value": torch.randn(N, H, S, D).bfloat16()},
        (TypeError, RuntimeError),
        r".*value.*float32.*bfloat16",
    ),
    "dropout_negative": ({"dropout_p": -0.1}, (ValueError, RuntimeError), r"dropout_p .*-0\.1"),
    "dropout_above_one": ({"dropout_p": 1.5}, (ValueError, RuntimeError), r"dropout_p .*1\.5"),
    "dropout_nan": ({"dropout_p": math.nan}, (ValueError, RuntimeError), r"dropout_p .*nan"),
    "dropout_infinite": ({"dropout_p": math.inf}, (ValueError, RuntimeError), r"dropout_p .*inf"),
    "key_device": ({"key": torch.randn(N, H, S, D, device="meta")}, RuntimeError, r"key .*cpu.*meta"),
    "padding_device": (
        {"key_padding_mask": torch.zeros(2, 5, device="meta")},
        RuntimeError,
        r"key_padding_mask .*cpu.*meta",
    ),
    "mask_device": ({"attn_mask": torch.zeros(3, 5, device="meta")}, RuntimeError, r"attn_mask .*cpu.*meta"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_operators_refuse(name: str, device: str) -> None:
    changes, types, pattern = ILLEGAL[name]
    given = on(device, arguments(**changes))
    pattern = pattern.replace("cpu", device)
    for operator in ("attention", "attention_with_weights"):
        with pytest.raises(types, match=rf"(?s)^fused_mha::{operator}: {pattern}"):
            getattr(ops, operator)(**given)


@pytest.mark.parametrize("name", [name for name in ILLEGAL if "device" not in name])
def test_meta_refuses_the_same(name: str) -> None:
    """Shapes are checked before any kernel runs, so a traced program learns of the mistake too."""
    changes, types, pattern = ILLEGAL[name]
    given = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments(**changes).items()}
    with pytest.raises(types, match=rf"(?s)^fused_mha::(_attention_forward|attention): {pattern}"):
        ops.attention(**given)


def test_an_integer_mask_gets_a_hint(device: str) -> None:
    with pytest.raises(TypeError, match=r"got int64.*\.bool\(\)|\.bool\(\).*got int64|bool.*True"):
        ops.attention(**on(device, arguments(key_padding_mask=torch.zeros(2, 5, dtype=torch.int64))))


@pytest.mark.parametrize("wrap", [lambda t: t.to_sparse(), lambda t: torch.nested.nested_tensor(list(t.unbind()))])
def test_tensors_that_are_not_strided_are_refused(wrap, device: str) -> None:
    given = on(device, arguments())
    given["query"] = wrap(given["query"])
    with pytest.raises((RuntimeError, TypeError, NotImplementedError), match=r"\w"):
        ops.attention(**given)


@pytest.mark.parametrize(
    ("change", "types", "pattern"),
    [
        ({"dropout_p": 1.5}, (ValueError, RuntimeError), r"dropout_p .*1\.5"),
        ({"dropout_p": math.nan}, (ValueError, RuntimeError), r"dropout_p .*nan"),
        ({"rng_state": torch.zeros(2)}, (TypeError, RuntimeError), r"rng_state .*"),
        ({"rng_state": torch.zeros(3, dtype=torch.int64)}, RuntimeError, r"rng_state .*\(3,?\)"),
        ({"rng_state": torch.zeros((), dtype=torch.int64)}, RuntimeError, r"rng_state .*\(\)"),
        ({"N": -1}, (ValueError, RuntimeError), r".*-1"),
        ({"S": -1}, (ValueError, RuntimeError), r".*-1"),
    ],
    ids=str,
)
def test_dropout_mask_refuses(change: dict[str, object], types, pattern: str, device: str) -> None:
    given = {"rng_state": torch.zeros(2, dtype=torch.int64), "N": 1, "H": 1, "L": 2, "S": 3, "dropout_p": 0.5}
    with pytest.raises(types, match=rf"(?s)^fused_mha::dropout_mask: {pattern}"):
        ops.dropout_mask(**on(device, {**given, **change}))


def private_forward(**changes) -> dict[str, object]:
    given = {
        **arguments(),
        "key_padding_mask": None,
        "attn_mask": None,
        "is_causal": False,
        "dropout_p": 0.0,
        "scale": 1.0,
        "rng_state": None,
        "always_visible_keys": 0,
        "weights_mode": 0,
    }
    return {**given, **changes}


PRIVATE_ILLEGAL = {
    "three_dimensional": {"query": torch.randn(N, L, D)},
    "key_length": {"value": torch.randn(N, H, S - 1, D)},
    "head_dim": {"key": torch.randn(N, H, S, D - 1)},
    "padding": {"key_padding_mask": torch.zeros(N, S - 1)},
    "padding_with_extra_keys": {"key_padding_mask": torch.zeros(N, S), "always_visible_keys": 1},
    "mask": {"attn_mask": torch.zeros(1, 1, L, S + 1)},
    "mask_dtype": {"attn_mask": torch.zeros(1, 1, L, S, dtype=torch.int32)},
    "extra_keys_negative": {"always_visible_keys": -1},
    "extra_keys_too_many": {"always_visible_keys": S + 1},
    "weights_mode": {"weights_mode": 7},
    "no_rng_state": {"dropout_p": 0.5},
    "rng_state_too_short": {"dropout_p": 0.5, "rng_state": torch.zeros(1, dtype=torch.int64)},
    "rng_state_dtype": {"dropout_p": 0.5, "rng_state": torch.zeros(2)},
    "dropout": {"dropout_p": 2.0, "rng_state": torch.zeros(2, dtype=torch.int64)},
}


@pytest.mark.parametrize("name", PRIVATE_ILLEGAL)
def test_private_forward_refuses_instead_of_reading_out_of_bounds(name: str, device: str) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError), match="fused_mha::"):
        ops._attention_forward(**on(device, private_forward(**PRIVATE_ILLEGAL[name])))


@pytest.mark.parametrize(
    "change",
    [
        {"grad_output": torch.randn(N, H, L - 1, D)},
        {"output": torch.randn(N, H, L, D - 1)},
        {"row_max": torch.zeros(N, H, L - 1)},
        {"row_sum": torch.zeros(N, H)},
        {"row_sum": torch.zeros(N, H, L, dtype=torch.float64)},
        {"key_padding_mask": torch.zeros(N, S + 2)},
        {"grad_weights": torch.zeros(N, L, S), "weights_mode": 2},
    ],
    ids=["grad_output", "output", "row_max", "row_sum", "row_sum_dtype", "key_padding_mask", "grad_weights"],
)
def test_private_backward_refuses_instead_of_reading_out_of_bounds(change: dict[str, object], device: str) -> None:
    given = on(device, private_forward())
    output, _, row_max, row_sum = ops._attention_forward(**given)
    given |= {"grad_output": torch.ones_like(output), "grad_weights": None, "output": output}
    given |= {"row_max": row_max, "row_sum": row_sum, "output_mask": [True, True, True, False, False, False]}
    assert torch.isfinite(ops._attention_backward(**given)[0]).all()
    with pytest.raises((RuntimeError, TypeError, ValueError), match="fused_mha::"):
        ops._attention_backward(**on(device, {**given, **change}))


# The module: the exception types of nn.MultiheadAttention, except where it has no check of its own.


def module_arguments(**changes) -> dict[str, object]:
    given = {"query": torch.randn(N, L, E), "key": torch.randn(N, S, E), "value": torch.randn(N, S, E)}
    return {**given, **changes}


MODULE_ILLEGAL = {
    "query_rank": ({"query": torch.randn(1, N, L, E)}, "query"),
    "key_rank": ({"key": torch.randn(S, E)}, "key"),
    "value_rank": ({"value": torch.randn(S, E)}, "value"),
    "unbatched_key_rank": ({"query": torch.randn(L, E)}, "key"),
    "embed_dim": ({"query": torch.randn(N, L, E + 1)}, str(E + 1)),
    "value_length": ({"value": torch.randn(N, S + 1, E)}, "value"),
    "padding_rank": ({"key_padding_mask": torch.zeros(S, dtype=torch.bool)}, "key_padding_mask"),
    "padding_length": ({"key_padding_mask": torch.zeros(N, S - 1, dtype=torch.bool)}, "key_padding_mask"),
    "padding_transposed": ({"key_padding_mask": torch.zeros(S, N, dtype=torch.bool)}, "key_padding_mask"),
    "mask_2d": ({"attn_mask": torch.zeros(L, S + 1)}, "attn_mask"),
    "mask_3d": ({"attn_mask": torch.zeros(N * H + 1, L, S)}, "attn_mask"),
    "mask_rank": ({"attn_mask": torch.zeros(S)}, "attn_mask"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULE_ILLEGAL)
def test_module_raises_the_types_that_stock_raises(name: str, training: bool, device: str) -> None:
    changes, word = MODULE_ILLEGAL[name]
    stock = torch.nn.MultiheadAttention(E, H, batch_first=True, device=device).train(training)
    ours = fused_mha.MultiheadAttention(E, H, batch_first=True, device=device).train(training)
    given = on(device, module_arguments(**changes))
    with pytest.raises(Exception) as raised:  # noqa: PT011  the type is what we ask for
        stock(**given)
    with pytest.raises(raised.type, match=word):
        ours(**given)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_module_refuses_integer_masks_in_both_modes(name: str, training: bool, device: str) -> None:
    """pytorch#86120."""
    ours = fused_mha.MultiheadAttention(E, H, batch_first=True, device=device).train(training)
    mask = torch.zeros((N, S) if name == "key_padding_mask" else (L, S), dtype=torch.int64)
    with torch.set_grad_enabled(training), pytest.raises(TypeError, match=rf"{name} .*bool"):
        ours(**on(device, module_arguments(**{name: mask})))


def test_forgotten_batch_first_is_named() -> None:
    """pytorch#64888: query has batch 1, key has batch 4."""
    ours = fused_mha.MultiheadAttention(E, H, batch_first=True)
    memory = torch.randn(4, S, E)
    with pytest.raises((ValueError, RuntimeError, AssertionError), match="batch_first") as raised:
        ours(torch.randn(1, 1, E), memory, memory)
    message = str(raised.value)
    assert re.search(r"\b1\b", message)
    assert re.search(r"\b4\b", message)
    assert "key" in message


@pytest.mark.parametrize(
    "arguments",
    [(0, 1), (8, 0), (-8, 2), (8, 3), (10, 3)],
    ids=str,
)
def test_constructor_raises_what_stock_raises(arguments: tuple[int, int]) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011  the type is what we ask for
        torch.nn.MultiheadAttention(*arguments)
    with pytest.raises(raised.type, match="embed_dim"):
        fused_mha.MultiheadAttention(*arguments)


def test_functional_forward_checks_the_module_arguments() -> None:
    ours = fused_mha.MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    shared = (ours.in_proj_weight, ours.in_proj_bias, None, None, False)
    projection = (ours.out_proj.weight, ours.out_proj.bias)
    with pytest.raises((AssertionError, RuntimeError), match=r"fused_mha::multi_head_attention_forward: .*9"):
        ops.multi_head_attention_forward(x, x, x, 9, H, *shared, 0.0, *projection)
    with pytest.raises((AssertionError, RuntimeError), match=r"fused_mha::multi_head_attention_forward: .*3"):
        ops.multi_head_attention_forward(x, x, x, E, 3, *shared, 0.0, *projection)
    with pytest.raises((ValueError, RuntimeError), match=r"fused_mha::multi_head_attention_forward: dropout_p .*1\.5"):
        ops.multi_head_attention_forward(x, x, x, E, H, *shared, 1.5, *projection)


def test_a_freed_storage_is_an_error(device: str) -> None:
    base = torch.randn(4, device=device)
    query = base.as_strided((1, 1, 2, 2), (4, 4, 2, 1))
    base.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="reaches beyond its storage"):
        ops.attention(query, *torch.randn(2, 1, 1, 3, 2, device=device))


def test_absurd_widths_are_an_error(device: str) -> None:
    wide = torch.zeros(1, device=device).expand(1, 1, 1, 2**62)
    with pytest.raises(RuntimeError, match="at most"):
        ops.attention(wide, wide, torch.zeros(1, 1, 1, 1, device=device))


def test_dropout_mask_of_no_keys_returns_at_once(device: str) -> None:
    state = torch.tensor([1, 2], device=device)
    assert ops.dropout_mask(state, 2**20, 2**20, 2**20, 0, 0.5).numel() == 0


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_backward_of_nothing(shape: tuple[int, ...], device: str) -> None:
    query = torch.randn(shape, device=device, requires_grad=True)
    ops.attention(query, query, query).sum().backward()
    assert query.grad is not None
    assert query.grad.shape == shape
