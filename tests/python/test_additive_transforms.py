# SPDX-License-Identifier: BSD-3-Clause
"""Additive attention through transforms, graphs and exports: vmap, derivatives of derivatives, torch.compile,
torch.export, TorchScript, ONNX, FLOPs, explain."""

from __future__ import annotations

import io
import math

import fused_mha
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

ops = torch.ops.fused_mha

B, N, H, HKV, L, S, D, DV = 3, 2, 4, 2, 5, 6, 4, 3


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def by_formula(query, key, value, weight, padding, mask, average: bool = True):
    """Output and weights for floating masks, one of which may be -inf in places."""
    key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    weight = weight if weight.dim() == 1 else weight[:, None, None]
    scores = (torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) * weight).sum(-1)
    weights = (scores + padding[:, None, None] + mask).softmax(-1)
    return weights @ value, weights.mean(1) if average else weights


# vmap.


class Calls(TorchDispatchMode):
    """Counts runs of the kernels below vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kernels = (ops._additive_attention_forward.default, ops._additive_attention_backward.default)
        self.count += func in kernels
        return func(*args, **(kwargs or {}))


# Where query, key, value, score_weight and the two masks are mapped, and how many runs forward and backward take with
# weights of each head: one, except where samples have masks of their own and heads score weights of their own.
MAPPED = {
    "query": ((0, None, None, None, None, None), 1, 1),
    "keys": ((None, 0, 0, None, None, None), 1, 1),
    "inner_dims": ((4, 2, 1, None, None, 2), 1, 1),
    "score_weight": ((None, None, None, 0, None, None), 1, 1),
    "all_but_padding": ((0, 0, 0, 1, None, 0), 1, 1),
    "padding": ((None, None, None, None, 1, None), 1, B),
    "everything": ((0, 0, 0, 0, 0, 0), B, B),
}
PADDINGS_GRADIENT = 4


def arguments(in_dims: tuple[int | None, ...], per_head: bool, mask_sizes: tuple[int, ...]) -> list[torch.Tensor]:
    sizes = [(N, H, L, D), (N, HKV, S, D), (N, HKV, S, DV), (H, D) if per_head else (D,), (N, S), mask_sizes]
    tensors = []
    for size, dim in zip(sizes, in_dims, strict=True):
        tensor = normal(*(size if dim is None else (B, *size)))
        if len(tensors) >= PADDINGS_GRADIENT:
            tensor = tensor.masked_fill(torch.rand_like(tensor) < 0.2, -math.inf)
        tensors.append(tensor if dim is None else tensor.movedim(0, dim))
    return tensors


def loop(function, in_dims: tuple[int | None, ...], given: list[torch.Tensor]) -> list[torch.Tensor]:
    calls = [
        function(*(t if d is None else t.select(d, i) for t, d in zip(given, in_dims, strict=True))) for i in range(B)
    ]
    return [torch.stack(parts) for parts in zip(*calls, strict=True)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("average", [False, True], ids=["each_head", "averaged"])
@pytest.mark.parametrize("mask_sizes", [(N, H, L, S), (1, 1, 1, S), (L, S)], ids=str)
@pytest.mark.parametrize("per_head", [False, True], ids=["shared_weight", "weight_per_head"])
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap_equals_a_loop(mapped: str, per_head: bool, mask_sizes: tuple[int, ...], average: bool) -> None:
    """Results, and gradients of each of the B for tensors that are mapped and for those that are not."""
    in_dims, forward_runs, backward_runs = MAPPED[mapped]
    given = arguments(in_dims, per_head, mask_sizes)

    def function(query, key, value, weight, padding, mask):
        return ops.additive_attention_with_weights(
            query, key, value, weight, key_padding_mask=padding, attn_mask=mask, average_attn_weights=average
        )

    def loss(*tensors):
        output, weights = function(*tensors)
        return output.square().sum() + weights.sin().sum()

    with Calls() as forward:
        found = torch.vmap(function, in_dims)(*given)
    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3, 5))
    with Calls() as both:
        found = (*found, *torch.vmap(gradient, in_dims)(*given))
    expected = (*loop(function, in_dims, given), *loop(gradient, in_dims, given))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    if not average:
        assert (forward.count, both.count) == (forward_runs, forward_runs + backward_runs)


@pytest.mark.filterwarnings("error")
def test_vmap_of_a_gradient_with_respect_to_padding() -> None:
    in_dims = (0, None, None, None, None, None)
    given = arguments(in_dims, False, (L, S))

    def loss(*tensors):
        query, key, value, weight, padding, mask = tensors
        output = ops.additive_attention(query, key, value, weight, key_padding_mask=padding, attn_mask=mask)
        return output.square().sum()

    gradient = torch.func.grad(loss, argnums=(PADDINGS_GRADIENT, 0))
    for ours, theirs in zip(torch.vmap(gradient, in_dims)(*given), loop(gradient, in_dims, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap(randomness: str) -> None:
    x = normal(1, H, L, D).expand(B, 1, H, L, D)
    weight = normal(D)
    torch.manual_seed(2)
    _, weights = torch.vmap(
        lambda q: ops.additive_attention_with_weights(q, q, q, weight, dropout_p=0.5), randomness=randomness
    )(x)
    assert torch.equal(weights[0], weights[1]) == (randomness == "same")
    if randomness == "same":
        torch.manual_seed(2)
        alone = ops.additive_attention_with_weights(x[0], x[0], x[0], weight, dropout_p=0.5)[1]
        assert torch.equal(weights[2], alone)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_nested_and_of_none(in_dims: tuple[int | None, ...]) -> None:
    x, weight = normal(2, B, 1, H, L, D), normal(2, B, H, D)

    def call(query, own_weight):
        return ops.additive_attention(query, query, query, own_weight)

    given = [t if d == 0 else t[0, 0] for t, d in zip((x, weight), in_dims, strict=True)]
    found = torch.vmap(torch.vmap(call, in_dims), in_dims)(*given)
    for i in range(2):
        for j in range(B):
            alone = call(*(t[i, j] if d == 0 else t for t, d in zip(given, in_dims, strict=True)))
            torch.testing.assert_close(found[i, j], alone, rtol=1e-11, atol=1e-12)
    none = [t[0, :0] if d == 0 else t for t, d in zip(given, in_dims, strict=True)]
    assert torch.vmap(call, in_dims)(*none).shape == (0, 1, H, L, D)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_per_sample_gradients_of_the_module(dropout: float) -> None:
    module = fused_mha.AdditiveAttention(6, 5, 8, dropout=dropout, bias=True).double()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    queries, keys, padding = normal(B, L, 6), normal(B, S, 5), torch.arange(S) >= torch.tensor([[6], [3], [1]])

    def loss(given, query, key, hidden):
        one, memory = query[None], key[None]
        output, weights = torch.func.functional_call(
            module, given, (one, memory, memory, hidden[None]), {"need_weights": True}
        )
        return output.square().sum() + weights.square().sum()

    gradient = torch.func.grad(loss)
    torch.manual_seed(0)
    found = torch.vmap(gradient, (None, 0, 0, 0), randomness="same")(parameters, queries, keys, padding)
    for i in range(B):
        torch.manual_seed(0)  # one state is drawn for all
        for name, expected in gradient(parameters, queries[i], keys[i], padding[i]).items():
            torch.testing.assert_close(found[name][i], expected, rtol=1e-10, atol=1e-12)


# Derivatives of derivatives.

DERIVATIVES = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum()),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).square().sum()),
    "forward_over_forward": lambda f: torch.func.jacfwd(torch.func.jacfwd(lambda x: f(x).square().sum())),
    "reverse_over_reverse": lambda f: torch.func.jacrev(torch.func.jacrev(lambda x: f(x).square().sum())),
    "reverse_over_forward": lambda f: torch.func.jacrev(torch.func.jacfwd(lambda x: f(x).square().sum())),
}
LEAVES = ("query", "key", "value", "score_weight", "key_padding_mask", "attn_mask")


@pytest.mark.filterwarnings("error", "ignore:`torch.jit.*:DeprecationWarning", "ignore:`torch.jit.*:FutureWarning")
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("which", LEAVES)
def test_derivatives_of_derivatives(which: str, derivative: str) -> None:
    leaves = [normal(*s) for s in ((1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), (2, 2), (1, 3), (2, 1, 3))]
    place = LEAVES.index(which)

    def ours(query, key, value, weight, padding, mask):
        return ops.additive_attention(query, key, value, weight, key_padding_mask=padding, attn_mask=mask)

    def of_one(function):
        return lambda x: function(*leaves[:place], x, *leaves[place + 1 :])

    found = DERIVATIVES[derivative](of_one(ours))(leaves[place])
    expected = DERIVATIVES[derivative](of_one(lambda *t: by_formula(*t)[0]))(leaves[place])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert torch.count_nonzero(expected) > 0


# Graphs.


class Model(torch.nn.Module):
    def __init__(self, need_weights: bool = True) -> None:
        super().__init__()
        self.attention = fused_mha.AdditiveAttention(6, 5, 8, dropout=0.2)
        self.need_weights = need_weights

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, padding: torch.Tensor):
        output, weights = self.attention(queries, keys, keys, padding, need_weights=self.need_weights)
        return (output, weights) if weights is not None else (output, output)


def inputs(n: int, length: int, s: int) -> tuple[torch.Tensor, ...]:
    """The last sample has no key."""
    hidden = torch.arange(s) >= torch.tensor([s, 1, 0][-n:])[:, None]
    return torch.randn(n, length, 6), torch.randn(n, s, 5), hidden


def test_export_for_other_sizes() -> None:
    n, length, s = (torch.export.Dim(name, min=2, max=64) for name in ("n", "length", "s"))
    shapes = ({0: n, 1: length}, {0: n, 1: s}, {0: n, 1: s})
    model = Model().eval()
    program = torch.export.export(model, inputs(3, 4, 7), dynamic_shapes=shapes)
    others = inputs(2, 9, 5)
    torch.testing.assert_close(program.module()(*others), model(*others))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_torchscript_saved_and_loaded_serves_other_sizes(kind: str) -> None:
    model = Model().eval()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model) if kind == "script" else torch.jit.trace(model, inputs(3, 4, 7)), file)
    file.seek(0)
    others = inputs(2, 9, 5)
    torch.testing.assert_close(torch.jit.load(file)(*others), model(*others))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_scripted_module_takes_every_argument() -> None:
    module = fused_mha.AdditiveAttention(6, 5, 8, bias=True).eval()
    scripted = torch.jit.script(module)
    queries, keys, padding = inputs(2, 9, 5)
    later = torch.ones(9, 5, dtype=torch.bool).triu(1)
    for options in ({"need_weights": True}, {"attn_mask": later}, {"key_features": module.project_keys(keys)}):
        found, weights = scripted(queries, keys, keys, padding, **options)
        expected, own_weights = module(queries, keys, keys, padding, **options)
        torch.testing.assert_close(found, expected)
        assert (weights is None) == (own_weights is None) == ("need_weights" not in options)
        if weights is not None:
            torch.testing.assert_close(weights, own_weights)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_scripted_training_keeps_dropout_and_gradients() -> None:
    module = fused_mha.AdditiveAttention(6, 5, 8, dropout=0.5)
    queries, keys, padding = inputs(3, 4, 7)
    results = []
    for one in (module, torch.jit.script(module)):
        torch.manual_seed(3)
        output, _ = one(queries, keys, keys, padding)
        results.append((output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))))
    torch.testing.assert_close(*results)
    assert not torch.allclose(results[0][0], module.eval()(queries, keys, keys, padding)[0])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")
def test_onnx(per_head: bool) -> None:
    """Grouped heads, both masks, causality, a sample without keys, other sizes than those of the export."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")

    class Operator(torch.nn.Module):
        def forward(self, query, key, value, weight, padding, mask):
            masks = {"key_padding_mask": padding, "attn_mask": mask}
            options = {**masks, "is_causal": True, "average_attn_weights": not per_head}
            return ops.additive_attention_with_weights(query, key, value, weight, **options)

    def make(n: int, length: int, s: int) -> tuple[torch.Tensor, ...]:
        _, _, padding = inputs(n, length, s)
        sizes = ((n, 4, length, 8), (n, 2, s, 8), (n, 2, s, 3), (4, 8) if per_head else (8,), (length, s))
        query, key, value, weight, mask = (torch.randn(size) for size in sizes)
        return query, key, value, weight, padding, mask

    n, length, s = (torch.export.Dim(name, min=2, max=64) for name in ("n", "length", "s"))
    shapes = ({0: n, 2: length}, {0: n, 2: s}, {0: n, 2: s}, None, {0: n, 1: s}, {0: length, 1: s})
    program = torch.onnx.export(
        Operator().eval(),
        make(3, 4, 7),
        dynamo=True,
        dynamic_shapes=shapes,
        custom_translation_table=fused_mha.onnx.custom_translation_table(),
        verbose=False,
    )
    assert {node.domain for node in program.model.graph} <= {"", "ai.onnx"}
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    given = make(2, 9, 5)
    names = [node.name for node in session.get_inputs()]
    found = session.run(None, dict(zip(names, (t.numpy() for t in given), strict=True)))
    for ours, eager in zip(found, Operator()(*given), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), eager, rtol=1e-5, atol=1e-5)
    assert not found[0][1].any()


# What is known of a call.


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_flops(wanted: tuple[int, ...]) -> None:
    """Forward as PyTorch counts ``tanh(...) @ score_weight`` and ``weights @ value``."""
    query, key, value, weight = (torch.randn(s) for s in ((N, H, L, D), (N, HKV, S, D), (N, HKV, S, DV), (D,)))
    for i in wanted:
        (query, key, value, weight)[i].requires_grad_()

    def unfused():
        features = torch.tanh(query[:, :, :, None] + key.repeat_interleave(2, 1)[:, :, None])
        return (features @ weight[:, None]).squeeze(-1).softmax(-1) @ value.repeat_interleave(2, 1)

    with torch.no_grad(), FlopCounterMode(display=False) as plain:
        unfused()
    with FlopCounterMode(display=False, custom_mapping=fused_mha.flop_formulas) as counter:
        output = ops.additive_attention(query, key, value, weight)
    assert counter.get_total_flops() == plain.get_total_flops() == 2 * N * H * L * S * (D + DV)
    with FlopCounterMode(display=False, custom_mapping=fused_mha.flop_formulas) as counter:
        output.sum().backward()
    widths = [D, DV, *((D, D, DV, D)[i] for i in wanted)]
    assert counter.get_total_flops() == 2 * N * H * L * S * sum(widths)


def test_explain() -> None:
    module = fused_mha.AdditiveAttention(6, 5, 8, dropout=0.2)
    queries, keys, padding = inputs(3, 4, 7)
    causal = torch.ones(4, 7, dtype=torch.bool).triu(1)
    found = fused_mha.explain(module, queries, keys, keys, padding, causal, need_weights=True)
    assert found.fused
    (call,) = found.calls
    assert call["scores"].choice == "additive"
    assert call["scores"].reason.startswith("score_weight float32 (8)")
    assert call["sizes"].choice == "N = 3, H = 1, L = 4, S = 7, D = 8, Dv = 5"
    assert call["key_padding_mask"].choice == "8 of 21 keys kept"
    assert call["attn_mask"].choice.endswith("tiles skipped, 0 free of masks, 2 masked by element")
    assert call["weights"].choice == "averaged"
    assert call["dropout"].choice == "0.2"
    assert call["backward"].reason.startswith("for query, key, score_weight;")
    for told_of_products in ("rows", "threads"):
        with pytest.raises(KeyError):
            call[told_of_products]
    assert "additive: score_weight float32 (8)" in str(found)

    weight = module.w_v.weight[0].detach()
    with torch.no_grad():
        features = module.W_q(queries), module.W_k(keys)
    call = fused_mha.explain(fused_mha.functional.additive_attention, *features, keys, weight).calls[0]
    assert call["backward"].choice == "none"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, torch.ones_like(weight))
        call = fused_mha.explain(fused_mha.functional.additive_attention, *features, keys, dual).calls[0]
    assert call["forward mode"].choice == "unfused"
