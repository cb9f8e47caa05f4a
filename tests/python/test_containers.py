# SPDX-License-Identifier: BSD-3-Clause
"""The module inside nn.Transformer and its parts: the fused kernel runs in every mode, with one answer.

The reference is the stock container in float64 in training mode (its dropout is 0), the one mode in which it does the
arithmetic that its documentation states. Rows that see no key are left to tests of their own: stock makes NaN of them.
"""

from __future__ import annotations

import copy
import io
import itertools
import warnings

import fused_mha
import pytest
import torch
from cases import later
from profiling import FUSED, operators_in, stock_attention_in
from tolerances import assert_close_as_torch
from torch import nn

N, L, S, E = 3, 6, 7, 16
MODES = {"train": (True, True), "eval": (False, True), "eval, no_grad": (False, False)}
LAYER = {"d_model": E, "nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}


def encoder(**options) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 2, **options)


CONTAINERS = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(**LAYER), 1),
    "encoder layer, norm first": (lambda: nn.TransformerEncoderLayer(**LAYER, norm_first=True, activation="gelu"), 1),
    "encoder": (lambda: encoder(enable_nested_tensor=False), 2),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(**LAYER), 2),
    "decoder": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER), 2), 4),
    "transformer": (
        lambda: nn.Transformer(E, 4, 1, 2, 32, dropout=0.0, batch_first=True),
        5,
    ),
}


def lengths_to_padding(lengths: list[int], longest: int) -> torch.Tensor:
    return torch.arange(longest) >= torch.tensor(lengths)[:, None]


def as_float(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


# Masks of the input that attends to itself (length L), and of the memory that a decoder attends to (length S).
PADDING = lengths_to_padding([6, 4, 2], L)
MEMORY_PADDING = lengths_to_padding([7, 3, 5], S)
BIAS = torch.arange(L * L).view(L, L).remainder(5) / 8 - 0.25
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L)
MASKS = {
    "none": {},
    "bool padding": {"padding": PADDING, "memory_padding": MEMORY_PADDING},
    "float padding": {"padding": as_float(PADDING), "memory_padding": as_float(MEMORY_PADDING)},
    "bool mask": {"mask": later(L, L)},
    "float mask": {"mask": BIAS},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "bool padding and bool mask": {"padding": PADDING, "mask": later(L, L)},
    "float padding and causal": {"padding": as_float(PADDING), "mask": CAUSAL, "is_causal": True},
    "float padding and float mask": {"padding": as_float(PADDING), "mask": BIAS, "memory_padding": MEMORY_PADDING},
}


def arguments(container: str, masks: dict) -> tuple[list[torch.Tensor], dict[str, object]]:
    """Inputs and keyword arguments of the container for masks by their place."""
    generator = torch.Generator().manual_seed(1)
    x, memory = torch.randn(N, L, E, generator=generator), torch.randn(N, S, E, generator=generator)
    prefix = "src" if container.startswith("encoder") else "tgt"
    names = {"padding": f"{prefix}_key_padding_mask", "mask": f"{prefix}_mask", "is_causal": f"{prefix}_is_causal"}
    names["memory_padding"] = "memory_key_padding_mask"
    if container.startswith("encoder"):
        names["is_causal"] = "is_causal"
        if container.startswith("encoder layer"):
            names["mask"] = "src_mask"
        else:
            names["mask"] = "mask"
        return [x], {names[place]: mask for place, mask in masks.items() if place != "memory_padding"}
    options = {names[place]: mask for place, mask in masks.items()}
    if container != "transformer":
        return [x, memory], options
    if "memory_padding" in masks:
        options["src_key_padding_mask"] = masks["memory_padding"]
    return [memory, x], options


def pair(container: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    stock = CONTAINERS[container][0]()
    fused = copy.deepcopy(stock)
    fused_mha.replace_multihead_attention(fused)
    return stock, fused


def double(tensors):
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in tensors.items()
    }


def run(model: nn.Module, inputs: list[torch.Tensor], options: dict, *, gradients: bool):
    """Output, and gradients of inputs and parameters."""
    inputs = [x.detach().clone().requires_grad_(gradients) for x in inputs]
    output = model(*inputs, **options)
    if not gradients:
        return output, []
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    return output.detach(), torch.autograd.grad(output, [*inputs, *model.parameters()], cotangent)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_mode_runs_the_fused_kernel_and_gives_one_answer(container: str, masking: str) -> None:
    """pytorch#107084, pytorch#97111, pytorch#135150, pytorch#106630, pytorch#118628."""
    stock, fused = pair(container)
    inputs, options = arguments(container, MASKS[masking])
    torch_output, torch_gradients = run(stock, inputs, options, gradients=True)
    exact = stock.double()
    reference, reference_gradients = run(exact, [x.double() for x in inputs], double(options), gradients=True)

    outputs = []
    for mode, (training, gradients) in MODES.items():
        fused.train(training)
        results = []
        with torch.set_grad_enabled(gradients):
            operators = operators_in(lambda: results.append(run(fused, inputs, options, gradients=gradients)))  # noqa: B023
        assert operators[FUSED] == CONTAINERS[container][1], mode
        assert not stock_attention_in(operators), mode
        output, found = results[0]
        outputs.append(output)
        assert_close_as_torch(output, reference, torch_output, what=f"output, {mode}")
        names = [*(f"input {i}" for i in range(len(inputs))), *(name for name, _ in fused.named_parameters())]
        for name, *tensors in zip(names, found, reference_gradients, torch_gradients, strict=True) if found else ():
            scale = float(max(g.abs().max() for g in reference_gradients))
            assert_close_as_torch(*tensors, what=f"gradient of {name}, {mode}", gradient=True, scale=scale)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_sample_without_keys_leaves_the_others_alone(container: str) -> None:
    """pytorch#41508, pytorch#119371: finite, the same in every mode, and no other sample's numbers change."""
    _, fused = pair(container)
    hidden = PADDING.clone()
    hidden[1] = True
    masks = {"padding": hidden, "memory_padding": lengths_to_padding([7, 0, 5], S)}
    inputs, options = arguments(container, masks)
    others = [0, 2]
    for training, gradients in MODES.values():
        fused.train(training)
        with torch.set_grad_enabled(gradients):
            output, found = run(fused, inputs, options, gradients=gradients)
            alone = fused(*[x[others] for x in inputs], **{name: mask[others] for name, mask in options.items()})
        assert torch.isfinite(output).all()
        assert all(torch.isfinite(gradient).all() for gradient in found)
        torch.testing.assert_close(output[others], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("container", ["encoder layer", "decoder layer"])
def test_nan_in_padding_stays_there(container: str) -> None:
    """pytorch#64525: each position of a layer sees valid keys only, so only what was NaN is NaN."""
    _, fused = pair(container)
    inputs, options = arguments(container, {"padding": PADDING})
    clean = fused(*inputs, **options)
    inputs[0][PADDING] = float("nan")
    for training, gradients in MODES.values():
        fused.train(training)
        with torch.set_grad_enabled(gradients):
            output = fused(*inputs, **options)
        assert torch.equal(output[~PADDING], clean[~PADDING])
        assert output[PADDING].isnan().all()


def test_encoder_that_makes_nested_tensors() -> None:
    """pytorch#97111: the last column is padding in every sample, and the shape stays that of the input."""
    torch.manual_seed(4)
    stock = encoder(enable_nested_tensor=True)
    fused = copy.deepcopy(stock).eval()
    fused_mha.replace_multihead_attention(fused)
    x, padding = torch.randn(N, L, E), lengths_to_padding([5, 4, 2], L)
    torch_output = stock.train()(x, src_key_padding_mask=padding).detach()
    expected = stock.double()(x.double(), src_key_padding_mask=padding).detach()
    results = []
    with torch.no_grad():
        operators = operators_in(lambda: results.append(fused(x, src_key_padding_mask=padding)))
    assert operators[FUSED] == 2
    assert not stock_attention_in(operators)
    assert results[0].shape == x.shape
    assert torch.isfinite(results[0]).all()
    assert_close_as_torch(results[0][~padding], expected[~padding], torch_output[~padding], what="output")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("nested", [False, True], ids=["padded", "nested"])
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_scripted_encoder_runs_the_fused_kernel(nested: bool, training: bool) -> None:
    """TorchScript sees no hooks: here a property keeps the stock layer off its own kernel."""
    torch.manual_seed(5)
    eager = encoder(enable_nested_tensor=nested).train(training)
    fused_mha.replace_multihead_attention(eager)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(eager), file)
    file.seek(0)
    scripted = torch.jit.load(file)
    x, padding = torch.randn(N, L, E), lengths_to_padding([6, 0, 2], L)
    results = []
    with torch.set_grad_enabled(training):
        expected = eager(x, src_key_padding_mask=padding)
        operators = operators_in(lambda: results.append(scripted(x, src_key_padding_mask=padding)))
    assert operators[FUSED] == 2
    assert not stock_attention_in(operators)
    assert torch.equal(results[0], expected)
    assert all(layer.self_attn._qkv_same_embed_dim for layer in eager.layers)


@pytest.mark.parametrize("mode", MODES)
def test_layouts_of_an_encoder_layer(mode: str) -> None:
    """Length first and unbatched: the numbers of the batched layout."""
    training, gradients = MODES[mode]
    _, fused = pair("encoder layer")
    length_first = nn.TransformerEncoderLayer(**{**LAYER, "batch_first": False})
    fused_mha.replace_multihead_attention(length_first)
    length_first.load_state_dict(fused.state_dict())
    x, mask = torch.randn(N, L, E), later(L, L)
    with torch.set_grad_enabled(gradients):
        expected = fused.train(training)(x, src_mask=mask, src_key_padding_mask=PADDING)
        found = length_first.train(training)(x.transpose(0, 1), src_mask=mask, src_key_padding_mask=PADDING)
        torch.testing.assert_close(found.transpose(0, 1), expected, rtol=1e-5, atol=1e-5)
        for i in range(N):
            alone = fused(x[i], src_mask=mask, src_key_padding_mask=PADDING[i])
            torch.testing.assert_close(alone, expected[i], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_traced_encoder_layer_runs_the_fused_kernel() -> None:
    _, fused = pair("encoder layer")
    fused.eval()
    x = torch.randn(N, L, E)
    results = []
    with torch.no_grad():
        traced = torch.jit.trace(fused, (x,))
        operators = operators_in(lambda: results.append(traced(x)))
        assert torch.equal(results[0], fused(x))
    assert operators[FUSED] == 1
    assert not stock_attention_in(operators)


def test_whole_transformer_trains_like_stock() -> None:
    torch.manual_seed(5)
    stock = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
    fused = copy.deepcopy(stock)
    fused_mha.replace_multihead_attention(fused)
    source, target = torch.randn(3, 6, 16), torch.randn(3, 5, 16)
    padding = lengths_to_padding([6, 4, 2], 6)
    losses = []
    for model in (stock, fused):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses.append([])
        for _ in range(4):
            output = model(
                source,
                target,
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )
            loss = output.square().mean() + (output - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


# Hooks, in every mode of a container.


@pytest.mark.parametrize("mode", MODES)
def test_forward_hooks_in_a_container(mode: str) -> None:
    """pytorch#78109: hooks of the attention and of its out_proj run once a call, and what they return counts."""
    training, gradients = MODES[mode]
    _, fused = pair("encoder layer")
    fused.train(training)
    calls = []
    attention = fused.self_attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: calls.append("before"), with_kwargs=True)
    attention.register_forward_hook(lambda module, args, output: calls.append("after"))
    handle = attention.out_proj.register_forward_hook(lambda module, args, output: calls.append("out_proj"))
    x = torch.randn(N, L, E)
    with torch.set_grad_enabled(gradients):
        plain = fused(x)
        assert calls == ["before", "out_proj", "after"]
        handle.remove()
        attention.out_proj.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
        without_attention = fused.norm2((y := fused.norm1(x)) + fused._ff_block(y))
        assert not torch.equal(plain, without_attention)
        assert torch.equal(fused(x), without_attention)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_backward_hooks_in_a_container(mode: str) -> None:
    _, fused = pair("encoder layer")
    fused.train(MODES[mode][0])
    x = torch.randn(N, L, E, requires_grad=True)
    fused(x).square().sum().backward()
    expected = fused.self_attn.in_proj_weight.grad.clone()
    fused.zero_grad()
    calls = []
    out_proj = fused.self_attn.out_proj
    out_proj.register_full_backward_pre_hook(lambda module, grads: calls.append("before"))
    out_proj.register_full_backward_hook(lambda module, grads_in, grads_out: (2 * grads_in[0],))
    out_proj.register_full_backward_hook(lambda module, grads_in, grads_out: calls.append(grads_in[0].shape))
    fused.self_attn.register_full_backward_hook(lambda module, grads_in, grads_out: calls.append("attention"))
    fused(x).square().sum().backward()
    assert calls == ["before", torch.Size([N, L, E]), "attention"]
    # The in-projections sit behind out_proj, so they receive what its hook returned.
    torch.testing.assert_close(fused.self_attn.in_proj_weight.grad, 2 * expected, rtol=1e-5, atol=1e-5)


def test_hooks_for_every_module_see_out_proj() -> None:
    module = fused_mha.MultiheadAttention(E, 4, batch_first=True)
    x = torch.randn(N, L, E)
    expected = module(x, x, x)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        found = module(x, x, x)
    finally:
        handle.remove()
    assert seen == [module.out_proj, module]
    assert torch.equal(found[0], expected[0])


def test_hooks_that_come_and_go_leave_the_fused_kernel_in_place() -> None:
    _, fused = pair("encoder layer")
    fused.eval()
    handles = [fused.self_attn.register_forward_pre_hook(lambda module, args: None) for _ in range(2)]
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        assert operators_in(lambda: fused(torch.randn(N, L, E)))[FUSED] == 1


# Nested tensors.


def nested(layout: torch.layout, tensors: list[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.as_nested_tensor(tensors, layout=layout)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_nested_tensors_equal_calls_for_each_sequence(layout: torch.layout, cross: bool, mode: str) -> None:
    """pytorch#153472, pytorch#125214: forward and backward, in both layouts; no sequence sees another."""
    training, gradients = MODES[mode]
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True).train(training)
    queries = [torch.randn(length, 8, requires_grad=gradients) for length in (3, 2, 5)]
    keys = [torch.randn(length, 8, requires_grad=gradients) for length in (4, 1, 2)] if cross else queries
    leaves = [*queries, *(keys if cross else []), *module.parameters()]
    with torch.set_grad_enabled(gradients):
        query = nested(layout, queries)
        key = nested(layout, keys) if cross else query
        output, weights = module(query, key, key)
        expected = [module(q, k, k) for q, k in zip(queries, keys, strict=True)]
        assert output.is_nested
        assert output.layout == layout
        parts = output.unbind()
    for i, (q, k) in enumerate(zip(queries, keys, strict=True)):
        torch.testing.assert_close(parts[i], expected[i][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights[i, : len(q), : len(k)], expected[i][1], rtol=1e-5, atol=1e-6)
        assert weights[i, len(q) :].count_nonzero() == weights[i, :, len(k) :].count_nonzero() == 0
    if gradients:
        found = torch.autograd.grad(sum(part.square().sum() for part in parts), leaves)
        wanted = torch.autograd.grad(sum(part.square().sum() for part, _ in expected), leaves)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_through_an_encoder_layer(layout: torch.layout, mode: str) -> None:
    training, gradients = MODES[mode]
    _, fused = pair("encoder layer")
    fused.train(training)
    sequences = [torch.randn(length, E) for length in (3, 5, 1)]
    results = []
    with torch.set_grad_enabled(gradients):
        batch = nested(layout, sequences)
        operators = operators_in(lambda: results.append(fused(batch)))
        assert operators[FUSED] == 1
        assert not stock_attention_in(operators)
        alone = [fused(sequence[None])[0] for sequence in sequences]
        for found, expected in zip(results[0].unbind(), alone, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if not gradients:
            return
        parameters = list(fused.parameters())
        found_grads = torch.autograd.grad(sum(one.square().sum() for one in results[0].unbind()), parameters)
        expected_grads = torch.autograd.grad(sum(one.square().sum() for one in alone), parameters)
        for found, expected in zip(found_grads, expected_grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_one_answer_for_all_modes_with_weights() -> None:
    """The module by itself, and weights: whether a graph is recorded and what mode it is in changes no bit."""
    module = fused_mha.MultiheadAttention(E, 4, batch_first=True)
    x = torch.randn(N, L, E)
    results = []
    for (training, gradients), average in itertools.product(MODES.values(), (True, False)):
        module.train(training)
        with torch.set_grad_enabled(gradients):
            results.append(module(x, x, x, key_padding_mask=PADDING, average_attn_weights=average))
    for one in results[2:]:
        assert torch.equal(one[0], results[0][0])
    for i, one in enumerate(results):
        assert torch.equal(one[1], results[i % 2][1])


# Options that stock lacks, in stock containers.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("container", CONTAINERS)
def test_options_inside_containers(container: str, mode: str) -> None:
    """Grouped queries, widths and a sink in every place: the fused kernel runs, with one answer in all modes."""
    training, gradients = MODES[mode]
    _, fused = pair(container)
    names = [name for name, one in fused.named_modules() if isinstance(one, nn.MultiheadAttention)]
    for name in names:
        parent, _, child = name.rpartition(".")
        attention = fused_mha.MultiheadAttention(
            E, 4, batch_first=True, num_kv_heads=2, head_dim=6, v_head_dim=5, sink="learned"
        )
        setattr(fused.get_submodule(parent), child, attention)
    inputs, options = arguments(container, MASKS["float padding and causal"])
    expected = fused.train()(*inputs, **options).detach()
    fused.train(training)
    results = []
    with torch.set_grad_enabled(gradients):
        operators = operators_in(lambda: results.append(run(fused, inputs, options, gradients=gradients)))
    assert operators[FUSED] == CONTAINERS[container][1]
    assert not stock_attention_in(operators)
    assert torch.equal(results[0][0], expected)
    for gradient in results[0][1]:
        assert torch.isfinite(gradient).all()
