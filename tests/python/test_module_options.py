# SPDX-License-Identifier: BSD-3-Clause
"""Options of the module that stock lacks: widths free of embed_dim, grouped queries, causality from the bottom right,
weights from before dropout, a sink."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re

import fused_mha
import module_reference
import pytest
import reference
import torch
import torch.nn.functional as F
from cases import Inputs
from tolerances import assert_close_as_torch
from torch import nn

E, H = 12, 4
WIDTHS = {
    "head_dim": {"head_dim": 5},
    "v_head_dim": {"v_head_dim": 7},
    "num_kv_heads": {"num_kv_heads": 2},
    "out_dim": {"out_dim": 9},
    "all": {"head_dim": 8, "v_head_dim": 5, "num_kv_heads": 1, "out_dim": 20},
    "all_with_kdim": {"head_dim": 3, "v_head_dim": 4, "num_kv_heads": 2, "out_dim": 6, "kdim": 10, "vdim": 7},
}
CHOICES = {
    "bottom_right": {"causal_alignment": "bottom_right"},
    "zero_sink": {"sink": "zero"},
    "learned_sink": {"sink": "learned"},
    "before_dropout": {"weights_before_dropout": True},
}
EVERY = {**WIDTHS, **CHOICES}
ALL_AT_ONCE = {
    **WIDTHS["all"],
    "causal_alignment": "bottom_right",
    "sink": "learned",
    "weights_before_dropout": True,
    "dropout": 0.3,
}


def make(**options) -> fused_mha.MultiheadAttention:
    module = fused_mha.MultiheadAttention(E, H, **{"batch_first": True, **options})
    if module.sink is not None:
        with torch.no_grad():
            module.sink.normal_()
    return module


def inputs_of(module: fused_mha.MultiheadAttention, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((2, 5, E), (2, 7, module.kdim), (2, 7, module.vdim))
    tensors = (torch.randn(size, generator=generator) for size in sizes)
    return [t.to(module.out_proj.weight.device, dtype).requires_grad_() for t in tensors]


def by_formula(
    module: fused_mha.MultiheadAttention,
    tensors: list[torch.Tensor],
    *,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and per-head weights of a batch_first module, in the dtype of its parameters."""
    heads = (H, module.num_kv_heads, module.num_kv_heads)
    rows = [n * d for n, d in zip(heads, (module.head_dim, module.head_dim, module.v_head_dim), strict=True)]
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.split(rows)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.split(rows)
    q, k, v = (F.linear(t, w, b) for t, w, b in zip(tensors, weights, biases, strict=True))
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.expand(k.size(0), -1, -1)], 1)
        v = torch.cat([v, module.bias_v.expand(v.size(0), -1, -1)], 1)
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    q, k, v = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in zip((q, k, v), heads, strict=True))
    sink = torch.zeros(H, device=q.device) if module.zero_sink else module.sink
    results = reference.every_result(
        Inputs(q, k, v, key_padding_mask, attn_mask, is_causal),
        module.causal_alignment,
        sink,
        keep,
        module.dropout,
        module_reference.extra_keys(module),
    )
    output = F.linear(results["output"].transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    return output, results["before" if module.weights_before_dropout else "weights"]


CALLS = {
    "": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": torch.arange(7) >= torch.tensor([[7], [4]])},
    "masks": {"key_padding_mask": torch.arange(7) < torch.tensor([[0], [2]]), "attn_mask": torch.eye(5, 7)},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("extra", [False, True], ids=["", "extra_keys"])
@pytest.mark.parametrize("options", EVERY)
def test_values_and_gradients(options: str, extra: bool, call: str, device: str) -> None:
    module = make(**EVERY[options], add_bias_kv=extra, add_zero_attn=extra, bias=not extra).to(device)
    exact = copy.deepcopy(module).to("cpu", torch.float64)
    own = copy.deepcopy(module)
    tensors = inputs_of(module)
    masks = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in CALLS[call].items()}
    output, weights = module(*tensors, **masks, average_attn_weights=False)
    found = [output, weights]
    expected = list(by_formula(exact, inputs_of(exact, torch.float64), **CALLS[call]))
    yardstick = list(by_formula(own, inputs_of(module), **masks))
    for what, ours, theirs, torchs in zip(("output", "weights"), found, expected, yardstick, strict=True):
        assert_close_as_torch(ours, theirs, torchs, what=what)

    def gradients(one: nn.Module, results: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        incoming = [torch.randn(t.shape, generator=generator).to(t.device, dtype) for t in results]
        return torch.autograd.grad(results, list(one.parameters()), incoming)

    names = [name for name, _ in module.named_parameters()]
    wanted = gradients(exact, expected, torch.float64)
    largest = max(float(g.abs().max()) for g in wanted)
    for name, ours, theirs, torchs in zip(
        names, gradients(module, found, torch.float32), wanted, gradients(own, yardstick, torch.float32), strict=True
    ):
        assert_close_as_torch(ours, theirs, torchs, what=name, gradient=True, scale=largest)


def test_weights_before_dropout_beside_an_output_after(device: str) -> None:
    module = make(weights_before_dropout=True, dropout=0.5).to(device)
    tensors = inputs_of(module)
    output, weights = module(*tensors)
    expected, undropped = copy.deepcopy(module).eval()(*tensors)
    torch.testing.assert_close(weights, undropped)
    assert not torch.allclose(output, expected)


SHAPES = {
    "all": {
        "in_proj_weight": (H * 8 + 8 + 5, E),
        "in_proj_bias": (H * 8 + 8 + 5,),
        "out_proj.weight": (20, H * 5),
        "out_proj.bias": (20,),
        "bias_k": (1, 1, 8),
        "bias_v": (1, 1, 5),
        "sink": (H,),
    },
    "all_with_kdim": {
        "q_proj_weight": (H * 3, E),
        "k_proj_weight": (2 * 3, 10),
        "v_proj_weight": (2 * 4, 7),
        "in_proj_bias": (H * 3 + 2 * 3 + 2 * 4,),
        "out_proj.weight": (6, H * 4),
        "out_proj.bias": (6,),
        "bias_k": (1, 1, 6),
        "bias_v": (1, 1, 8),
        "sink": (H,),
    },
}


@pytest.mark.parametrize("options", SHAPES)
def test_parameters(options: str) -> None:
    torch.manual_seed(1)
    module = fused_mha.MultiheadAttention(E, H, **WIDTHS[options], add_bias_kv=True, sink="learned")
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == SHAPES[options]
    assert not module.sink.any()
    assert not module.in_proj_bias.any()
    matrices = [t for name, t in module.named_parameters() if "bias" not in name and name != "sink"]
    assert all(t.std() > 0.05 for t in matrices)
    torch.manual_seed(1)
    again = fused_mha.MultiheadAttention(E, H, **WIDTHS[options], add_bias_kv=True, sink="learned")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize(
    "options",
    [{"head_dim": 3}, {"v_head_dim": 3}, {"num_kv_heads": H}, {"out_dim": E}, {"head_dim": 3, "out_dim": E}],
    ids=str,
)
def test_options_with_the_values_of_stock_make_a_stock_module(options: dict[str, int]) -> None:
    torch.manual_seed(2)
    module = fused_mha.MultiheadAttention(E, H, **options)
    torch.manual_seed(2)
    stock = nn.MultiheadAttention(E, H)
    assert list(module.state_dict()) == list(stock.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), stock.parameters(), strict=True))
    assert repr(module) == repr(stock)


def test_a_width_that_heads_do_not_divide() -> None:
    """pytorch#103668"""
    with pytest.raises(AssertionError, match="divisible"):
        fused_mha.MultiheadAttention(10, 4)
    module = fused_mha.MultiheadAttention(10, 4, head_dim=16)
    x = torch.randn(3, 2, 10)
    assert module(x, x, x)[0].shape == (3, 2, 10)
    assert module.in_proj_weight.shape == (3 * 64, 10)


ILLEGAL = {
    "kv_heads": ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads = 4, got 3"),
    "negative": ({"head_dim": -1}, "head_dim must be positive, got -1"),
    "zero": ({"out_dim": 0}, "out_dim must be positive, got 0"),
    "alignment": ({"causal_alignment": "left"}, "causal_alignment must be 'top_left' or 'bottom_right', got 'left'"),
    "sink": ({"sink": "one"}, "sink must be None, 'zero' or 'learned', got 'one'"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_errors(name: str) -> None:
    options, message = ILLEGAL[name]
    with pytest.raises(ValueError, match=re.escape(f"fused_mha::MultiheadAttention: {message}")):
        fused_mha.MultiheadAttention(E, H, **options)


@pytest.mark.parametrize("batch_first", [False, True])
def test_layouts(batch_first: bool, device: str) -> None:
    """Unbatched and (L, N, E) inputs give what (N, L, E) gives."""
    module = make(**ALL_AT_ONCE, batch_first=batch_first).to(device).eval()
    tensors = inputs_of(module)
    output, weights = module(*(t if batch_first else t.transpose(0, 1) for t in tensors), is_causal=True)
    output = output if batch_first else output.transpose(0, 1)
    for i in range(2):
        one, one_weights = module(*(t[i] for t in tensors), is_causal=True)
        torch.testing.assert_close(one, output[i])
        torch.testing.assert_close(one_weights, weights[i])


def test_one_input_for_all_and_one_for_key_and_value() -> None:
    """Fewer products, the same numbers."""
    module = make(**WIDTHS["all"])
    x, memory = torch.randn(2, 5, E), torch.randn(2, 7, E)
    for query, key in ((x, x), (x, memory)):
        torch.testing.assert_close(module(query, key, key), module(query, key.clone(), key.clone()))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
def test_nested_tensors(layout: torch.layout) -> None:
    module = make(**ALL_AT_ONCE).eval()
    samples = [torch.randn(length, E, requires_grad=True) for length in (4, 6, 1)]
    nested = torch.nested.as_nested_tensor(samples, layout=layout)
    output, _ = module(nested, nested, nested, need_weights=False)
    found = list(output.unbind())
    expected = [module(sample, sample, sample)[0] for sample in samples]
    leaves = [*samples, *module.parameters()]
    for ours, theirs in zip(
        (*found, *torch.autograd.grad(sum(one.square().sum() for one in found), leaves)),
        (*expected, *torch.autograd.grad(sum(one.square().sum() for one in expected), leaves)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", ["", "query", "key"])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
def test_nested_samples_have_a_bottom_right_corner_each(layout: torch.layout, dense: str) -> None:
    """Not that of the padded form, also where there are more queries than keys."""
    module = make(**ALL_AT_ONCE, add_bias_kv=True).eval()
    lengths = {"query": (2, 5, 1), "key": (7, 3, 4)}
    lengths |= {dense: (4, 4, 4)} if dense else {}
    samples = {name: [torch.randn(length, E) for length in lengths[name]] for name in lengths}
    given = {
        name: torch.stack(parts) if name == dense else torch.nested.nested_tensor(parts, layout=layout)
        for name, parts in samples.items()
    }
    output, weights = module(given["query"], given["key"], given["key"], is_causal=True)
    for n, (query, key) in enumerate(zip(*samples.values(), strict=True)):
        expected, own_weights = module(query, key, key, is_causal=True)
        torch.testing.assert_close(output[n], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights[n, : len(query), : len(key)], own_weights[:, : len(key)])


def test_autocast(device: str) -> None:
    module = make(**ALL_AT_ONCE).to(device)
    x = torch.randn(2, 5, E, device=device)
    with torch.autocast(device, torch.bfloat16):
        output, _ = module(x, x, x)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert module.sink.grad.dtype == torch.float32
    assert module.sink.grad.any()


def test_copies_and_states() -> None:
    module = make(**ALL_AT_ONCE).eval()
    x = torch.randn(2, 5, E)
    expected = module(x, x, x, is_causal=True)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = make(**ALL_AT_ONCE).eval()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert all(torch.equal(a, b) for a, b in zip(other(x, x, x, is_causal=True), expected, strict=True))


def test_a_pickle_from_before_there_were_options() -> None:
    module = fused_mha.MultiheadAttention(E, H)
    state = module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__
    state = dict(state, _parameters=dict(state["_parameters"]))
    for name in ("_has_options", "num_kv_heads", "v_head_dim", "causal_alignment", "weights_before_dropout"):
        del state[name]
    del state["zero_sink"], state["_parameters"]["sink"]
    old = fused_mha.MultiheadAttention.__new__(fused_mha.MultiheadAttention)
    old.__setstate__(state)
    x = torch.randn(3, 2, E)
    assert torch.equal(old(x, x, x)[0], module(x, x, x)[0])


def test_meta_device_and_late_initialization() -> None:
    module = fused_mha.MultiheadAttention(E, H, **ALL_AT_ONCE, device="meta")
    module.to_empty(device="cpu")
    module.out_proj.reset_parameters()
    module._reset_parameters()
    assert not module.sink.any()
    x = torch.randn(3, 2, E)
    assert torch.isfinite(module(x, x, x)[0]).all()


class Causal(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, query, key, value):
        return self.attention(query, key, value, is_causal=True)


@pytest.mark.filterwarnings("error:.*:torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("options", ["all", "all_with_kdim", "zero_sink", "bottom_right"])
def test_script_and_trace(options: str) -> None:
    for extra in ({}, {"add_bias_kv": True, "bias": False, "sink": "learned"}):
        module = make(**{**EVERY[options], **extra}).eval()
        tensors = inputs_of(module)
        expected = module(*tensors, is_causal=True)
        torch.testing.assert_close(torch.jit.script(module)(*tensors, is_causal=True), expected)
        traced = torch.jit.trace(Causal(module), [t[:, :3].detach() for t in tensors])
        torch.testing.assert_close(traced(*tensors), expected)


def test_compile_and_export() -> None:
    module = make(**{**ALL_AT_ONCE, "dropout": 0.0})
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    tensors = inputs_of(module)
    expected, found = (one(*tensors, is_causal=True) for one in (module, compiled))
    torch.testing.assert_close(found, expected)
    wanted, gradients = (
        torch.autograd.grad(results[0].square().sum(), list(module.parameters())) for results in (expected, found)
    )
    torch.testing.assert_close(gradients, wanted)
    program = torch.export.export(module, tuple(tensors), {"is_causal": True})
    torch.testing.assert_close(program.module()(*tensors, is_causal=True), expected)


def test_symbolic_trace() -> None:
    """torch.fx records the module without numbers, whatever its widths."""

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, nn.Linear)

    model = Causal(make(**WIDTHS["all"], sink="zero"))
    traced = torch.fx.GraphModule(model, Leaves().trace(model))
    tensors = inputs_of(model.attention)
    torch.testing.assert_close(traced(*tensors), model(*tensors))


def test_hooks_on_out_proj_and_reset_and_repr() -> None:
    module = make(**ALL_AT_ONCE)
    seen = []
    module.out_proj.register_forward_hook(lambda m, args, output: seen.append(output.shape))
    x = torch.randn(2, 5, E)
    module(x, x, x)
    assert seen == [(2, 5, 20)]
    assert "num_kv_heads=1" in repr(module)
    assert "sink='learned'" in repr(module)
    assert "projections" in str(fused_mha.explain(module, x, x, x))


def test_per_sample_gradients_with_functional_call() -> None:
    module = make(**{**ALL_AT_ONCE, "dropout": 0.0})
    parameters = {name: t.detach() for name, t in module.named_parameters()}
    x = torch.randn(3, 5, E)

    def loss(given, sample):
        return torch.func.functional_call(module, given, (sample, sample, sample))[0].square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        for name, gradient in torch.func.grad(loss)(parameters, x[i]).items():
            torch.testing.assert_close(found[name][i], gradient, rtol=1e-4, atol=1e-5)


def test_every_combination_runs() -> None:
    x = torch.randn(2, 5, E)
    for head_dim, kv, sink, alignment in itertools.product(
        (None, 6), (None, 2), (None, "zero", "learned"), ("top_left", "bottom_right")
    ):
        options = {"head_dim": head_dim, "num_kv_heads": kv, "sink": sink, "causal_alignment": alignment}
        output, weights = make(**options)(x, x, x, is_causal=True)
        assert output.shape == x.shape
        assert not weights.triu(1).any()
        sums = weights.sum(-1)
        assert (sums < 1 - 1e-4).all() if sink else torch.allclose(sums, torch.ones(()))
