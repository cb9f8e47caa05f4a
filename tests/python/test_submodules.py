# SPDX-License-Identifier: BSD-3-Clause
"""What other tools hang on the module's parts takes effect: adapters, parametrizations, pruning, quantized layers.

Most of it goes unnoticed by the stock module, or breaks it: it reads out_proj's weight and never calls out_proj.
"""

from __future__ import annotations

import copy
import warnings

import fused_mha
import module_reference
import pytest
import torch
from profiling import FUSED, operators_in
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

N, L, E, H = 2, 5, 16, 4
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


class Model(nn.Module):
    """Self-attention with a name that adapters can aim at, and a layer of another kind."""

    def __init__(self, kdim: int = E) -> None:
        super().__init__()
        self.kdim = kdim
        self.self_attn = fused_mha.MultiheadAttention(E, H, batch_first=True, kdim=kdim, vdim=kdim)
        self.head = nn.Linear(E, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = x if self.kdim == E else x[..., : self.kdim]
        return self.head(self.self_attn(x, key, key, key_padding_mask=PADDING, need_weights=False)[0])


def encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    fused_mha.replace_multihead_attention(layer)
    return layer


def all_modes(model: nn.Module, x: torch.Tensor, **options) -> torch.Tensor:
    """The output, after a look whether evaluation without a graph gives the same bits from the fused kernel."""
    model.train()
    expected = model(x, **options)
    model.eval()
    results = []
    with torch.no_grad():
        operators = operators_in(lambda: results.append(model(x, **options)))
    assert operators[FUSED] >= 1
    assert torch.equal(results[0], expected)
    return expected


def by_formula(attention: nn.MultiheadAttention, x: torch.Tensor, **replaced: torch.Tensor) -> torch.Tensor:
    """The attention's output in float64 with some of the parameters replaced."""
    state = {
        name.replace("parametrizations.", "").replace(".original", ""): tensor
        for name, tensor in attention.state_dict().items()
    }
    for name, tensor in replaced.items():
        state[name.replace("__", ".")] = tensor
    exact = nn.MultiheadAttention(E, H, batch_first=True, kdim=attention.kdim, vdim=attention.vdim, dtype=torch.float64)
    names = exact.state_dict().keys()
    exact.load_state_dict({name: state[name].detach().double() for name in names})
    key = x[..., : attention.kdim].double()
    return module_reference.forward(exact, x.double(), key, key, key_padding_mask=PADDING)[0].detach()


def attend(model: Model, x: torch.Tensor) -> torch.Tensor:
    key = x[..., : model.kdim]
    return model.self_attn(x, key, key, key_padding_mask=PADDING)[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


# LoRA.


class LowRank(nn.Module):
    """W + B A, as adapters have it, as a parametrization."""

    def __init__(self, rows: int, columns: int, rank: int = 2) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.b = nn.Parameter(torch.randn(rows, rank) / rank**0.5)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


@pytest.mark.parametrize("kdim", [E, 6], ids=["one weight", "separate weights"])
def test_low_rank_parametrizations_of_the_in_projections(kdim: int) -> None:
    model = Model(kdim)
    attention = model.self_attn
    x = torch.randn(N, L, E)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    names = ("in_proj_weight",) if kdim == E else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    plain = {name: getattr(attention, name).detach().clone() for name in names}
    adapters = {}
    for name in names:
        adapters[name] = LowRank(*plain[name].shape)
        parametrize.register_parametrization(attention, name, adapters[name])
    assert isinstance(attention, fused_mha.MultiheadAttention)
    merged = {name: plain[name] + adapter.b @ adapter.a for name, adapter in adapters.items()}
    close(attend(model, x), by_formula(attention, x, **merged))
    all_modes(model, x).square().sum().backward()
    # The adapters' gradients are those of the merged weights' product.
    exact = copy.deepcopy(model).double()
    for adapter, exact_adapter in zip(
        adapters.values(), (m for m in exact.modules() if isinstance(m, LowRank)), strict=True
    ):
        numeric = torch.zeros_like(exact_adapter.a)
        for i in range(2):
            step = torch.zeros_like(numeric)
            step.view(-1)[i] = 1e-4
            losses = []
            for sign in (1, -1):
                with torch.no_grad():
                    exact_adapter.a += sign * step
                    losses.append(exact(x.double()).square().sum())
                    exact_adapter.a -= sign * step
            numeric.view(-1)[i] = (losses[0] - losses[1]) / 2e-4
        torch.testing.assert_close(adapter.a.grad.view(-1)[:2].double(), numeric.view(-1)[:2], rtol=1e-3, atol=1e-4)
    for name in names:
        parametrize.remove_parametrizations(attention, name)
        torch.testing.assert_close(getattr(attention, name), merged[name])
    assert type(attention) is fused_mha.MultiheadAttention


def adapted(model: nn.Module, **options):
    peft = pytest.importorskip("peft", exc_type=ImportError)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **options)
    return peft.get_peft_model(copy.deepcopy(model), config)


def lora_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if "lora" in name}


def test_peft_on_out_proj() -> None:
    """peft warns that stock never calls out_proj; here its adapter is called, trained, merged and switched off."""
    model, x = Model(), torch.randn(N, L, E)
    tuned = adapted(model, target_modules=["out_proj"])
    layer = tuned.base_model.model.self_attn.out_proj
    delta = layer.get_delta_weight("default").detach()
    weight = model.self_attn.out_proj.weight.detach()
    close(
        tuned.base_model.model.self_attn(x, x, x, key_padding_mask=PADDING)[0],
        by_formula(model.self_attn, x, out_proj__weight=weight + delta),
    )
    all_modes(tuned, x).square().sum().backward()
    gradients = lora_gradients(tuned)
    assert len(gradients) == 2
    assert all(gradient.count_nonzero() > 0 for gradient in gradients.values())
    with tuned.disable_adapter():
        assert torch.equal(tuned(x), model(x))
    expected = tuned(x)
    merged = tuned.merge_and_unload()
    assert type(merged.self_attn) is fused_mha.MultiheadAttention
    close(merged(x), expected)


def test_peft_on_the_attention() -> None:
    """peft wraps nn.MultiheadAttention as a whole and merges its adapters for the time of a call: as with stock."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(N, L, E)
    stock = copy.deepcopy(model)
    stock.self_attn = nn.MultiheadAttention(E, H, batch_first=True)
    stock.self_attn.load_state_dict(model.self_attn.state_dict())
    results = []
    for each in (model, stock):
        tuned = adapted(each, target_modules=["self_attn"])
        output = tuned(x)
        output.square().sum().backward()
        results.append((output.detach(), lora_gradients(tuned)))
        merged = copy.deepcopy(tuned).merge_and_unload()
        assert type(merged.self_attn) is type(each.self_attn)
        close(merged(x), output)
    close(results[0][0], results[1][0])
    assert len(results[0][1]) == 4
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kdim", [E, 6], ids=["one weight", "separate weights"])
def test_peft_on_the_in_projections_alone(kdim: int) -> None:
    """As parameters, since no Linear holds them; the separate ones are beyond what peft does for the whole module."""
    names = ["in_proj_weight"] if kdim == E else ["q_proj_weight", "v_proj_weight"]
    model, x = Model(kdim), torch.randn(N, L, E)
    tuned = adapted(model, target_modules=[], target_parameters=[f"self_attn.{name}" for name in names])
    all_modes(tuned, x).square().sum().backward()
    gradients = lora_gradients(tuned)
    assert len(gradients) == 2 * len(names)
    assert all(gradient.count_nonzero() > 0 for gradient in gradients.values())
    assert not torch.allclose(tuned(x), model(x), atol=1e-3)
    with tuned.disable_adapter():
        close(tuned(x), model(x))
    expected = tuned(x)
    merged = tuned.merge_and_unload()
    assert isinstance(merged.self_attn, fused_mha.MultiheadAttention)
    close(merged(x), expected)


@pytest.mark.parametrize("target", ["self_attn", "out_proj"])
def test_peft_inside_an_encoder_layer(target: str) -> None:
    """In evaluation too, where the stock layer's own kernel takes the weights without their adapters."""
    layer, x = encoder_layer(), torch.randn(N, L, E)
    tuned = adapted(layer, target_modules=[target])
    output = all_modes(tuned, x, src_key_padding_mask=PADDING)
    assert not torch.allclose(output, layer(x, src_key_padding_mask=PADDING), atol=1e-3)


# Parametrizations and pruning.


WRAPPERS = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruning": lambda module, name="weight": prune.l1_unstructured(module, name, 0.5),
}


@pytest.mark.parametrize("where", ["out_proj", "in_proj_weight"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_computed_weights_take_effect(wrapper: str, where: str) -> None:
    """What the attribute gives is what is used, and gradients reach what it was computed from."""
    model, x = Model(), torch.randn(N, L, E)
    attention = model.self_attn
    with torch.no_grad():
        attention.in_proj_weight.mul_(3)
        attention.out_proj.weight.mul_(3)
    plain = attend(model, x).detach()
    if where == "out_proj":
        WRAPPERS[wrapper](attention.out_proj)
    else:
        WRAPPERS[wrapper](attention, where)
    if wrapper == "weight_norm":  # it starts as the identity
        with torch.no_grad():
            holder = attention.out_proj if where == "out_proj" else attention
            next(iter(holder.parametrizations.values())).original0.mul_(2)
    model.eval()  # spectral_norm goes on estimating in training
    found = attend(model, x)
    assert not torch.allclose(found, plain, atol=1e-3)
    replaced = {"in_proj_weight": attention.in_proj_weight, "out_proj.weight": attention.out_proj.weight}
    state = {"in_proj_bias": attention.in_proj_bias, "out_proj.bias": attention.out_proj.bias, **replaced}
    exact = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    exact.load_state_dict({name: tensor.detach().double() for name, tensor in state.items()})
    close(found, module_reference.forward(exact, *[x.double()] * 3, key_padding_mask=PADDING)[0].detach())
    found.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attention.parameters())
    with torch.no_grad():
        assert torch.equal(attend(model, x), found)


def test_spectral_norm_estimates_once_a_call() -> None:
    """Each training call moves its power iteration by one step, as with a Linear of one's own."""
    model, x = Model(), torch.randn(N, L, E)
    twin = nn.Linear(E, E)
    twin.load_state_dict(model.self_attn.out_proj.state_dict())
    for layer in (model.self_attn.out_proj, twin):
        torch.manual_seed(2)
        parametrizations.spectral_norm(layer, n_power_iterations=1)
    for _ in range(3):
        model(x)
        twin(x)
    assert torch.equal(model.self_attn.out_proj.weight, twin.weight)


# Quantized layers.


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("with_out_proj", [False, True])
def test_quantize_dynamic(with_out_proj: bool) -> None:
    """pytorch#118165: the stock layer cannot even be called in evaluation afterwards."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no engine for quantized layers")
    from torch.ao import quantization

    torch.manual_seed(0)
    layer, x = encoder_layer().eval(), torch.randn(N, L, E)
    expected = layer(x, src_key_padding_mask=PADDING)
    kinds = {nn.Linear}
    mapping = quantization.get_default_dynamic_quant_module_mappings()
    if with_out_proj:
        plain = type(layer.self_attn.out_proj)
        kinds, mapping = {nn.Linear, plain}, {**mapping, plain: mapping[nn.Linear]}
    quantized = quantization.quantize_dynamic(layer, kinds, dtype=torch.qint8, mapping=mapping)
    assert "quantized" in type(quantized.linear1).__module__
    assert ("quantized" in type(quantized.self_attn.out_proj).__module__) == with_out_proj
    results = []
    with torch.no_grad():
        operators = operators_in(lambda: results.append(quantized(x, src_key_padding_mask=PADDING)))
    assert operators[FUSED] == 1
    assert operators["quantized::linear_dynamic"] == 2 + with_out_proj
    assert 0 < relative_error(results[0], expected) < 0.05


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantization_aware_training() -> None:
    """pytorch#118165. PyTorch converts layers of exactly the class nn.Linear, which out_proj may be."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no engine for quantized layers")
    from torch.ao import quantization

    torch.manual_seed(0)
    layer, x = encoder_layer(), torch.randn(N, L, E)
    expected = layer(x, src_key_padding_mask=PADDING)
    layer.self_attn.out_proj.__class__ = nn.Linear
    layer.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    prepared = quantization.prepare_qat(layer.train())
    assert "qat" in type(prepared.self_attn.out_proj).__module__
    results = []
    operators = operators_in(lambda: results.append(prepared(x, src_key_padding_mask=PADDING)))
    assert operators[FUSED] == 1
    assert 0 < relative_error(results[0], expected) < 0.1
    results[0].square().sum().backward()
    assert prepared.self_attn.out_proj.weight.grad.any()
    assert prepared.self_attn.out_proj.weight_fake_quant.activation_post_process.min_val.numel() > 0


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.parametrize("in_projection", [False, True])
def test_torchao(config: str, in_projection: bool) -> None:
    """pytorch/ao#1103: a weight of a tensor subclass sees F.linear and nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    torch.manual_seed(0)
    layer, x = encoder_layer().eval().requires_grad_(False), torch.randn(N, L, E)
    plain = copy.deepcopy(layer)
    expected = layer(x, src_key_padding_mask=PADDING)
    configuration = getattr(torchao, config)()
    torchao.quantize_(layer, configuration, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    if in_projection:
        carrier = nn.Linear(E, 3 * E, bias=False)
        carrier.weight = layer.self_attn.in_proj_weight
        torchao.quantize_(carrier, configuration)
        layer.self_attn.in_proj_weight = nn.Parameter(carrier.weight.detach(), requires_grad=False)
        assert type(layer.self_attn.in_proj_weight) is not nn.Parameter
    assert type(layer.self_attn.out_proj.weight) is not nn.Parameter
    found = all_modes(layer, x, src_key_padding_mask=PADDING)
    assert 0 < relative_error(found, expected) < 0.05
    memory = torch.randn(N, L + 2, E)
    found = layer.self_attn(x, memory, memory)[0]
    assert 0 < relative_error(found, plain.self_attn(x, memory, memory)[0]) < 0.1


# Gradients for each sample.


def gradients_sample_by_sample(model: nn.Module, x: torch.Tensor) -> list[list[torch.Tensor]]:
    """For each parameter, one gradient a sample, computed one by one."""
    rows = []
    for i in range(len(x)):
        output, _ = model(x[i : i + 1], x[i : i + 1], x[i : i + 1], key_padding_mask=PADDING[i : i + 1])
        rows.append(torch.autograd.grad(output.square().sum(), list(model.parameters())))
    return [list(column) for column in zip(*rows, strict=True)]


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_per_sample_gradients_by_vmap() -> None:
    model, x = fused_mha.MultiheadAttention(E, H, batch_first=True), torch.randn(N, L, E)
    parameters = dict(model.named_parameters())

    def loss(parameters, sample, padding):
        masks = {"key_padding_mask": padding[None]}
        return torch.func.functional_call(model, parameters, (sample[None],) * 3, masks)[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, PADDING)
    for gradients, expected in zip(found.values(), gradients_sample_by_sample(model, x), strict=True):
        torch.testing.assert_close(gradients, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_per_sample_gradients_by_hooks() -> None:
    """As opacus does it: what out_proj was given and the gradient of what it returned make its gradients by sample."""
    model, x = fused_mha.MultiheadAttention(E, H, batch_first=True), torch.randn(N, L, E)
    names = [name for name, _ in model.named_parameters()]
    expected = dict(zip(names, gradients_sample_by_sample(model, x), strict=True))
    kept = {}
    model.out_proj.register_forward_hook(lambda module, args, output: kept.update(given=args[0].detach()))
    model.out_proj.register_full_backward_hook(lambda module, grads_in, grads_out: kept.update(grad=grads_out[0]))
    model(x, x, x, key_padding_mask=PADDING)[0].square().sum().backward()
    weight = torch.einsum("nlo,nli->noi", kept["grad"], kept["given"])
    torch.testing.assert_close(weight, torch.stack(expected["out_proj.weight"]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept["grad"].sum(1), torch.stack(expected["out_proj.bias"]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.sum(0), model.out_proj.weight.grad, rtol=1e-4, atol=1e-5)


# The other modules, and the options of this one.


class Other(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.attention(x, x, x)
        return result if isinstance(result, torch.Tensor) else result[0]


OTHERS = {
    "options": lambda: fused_mha.MultiheadAttention(
        E, H, batch_first=True, head_dim=6, num_kv_heads=2, out_dim=24, sink="learned"
    ),
    "additive": lambda: fused_mha.AdditiveAttention(E, E, 8),
    "by_length": lambda: fused_mha.ValidLengthsAttention(E, E, E, E, H, 0.0),
}
LAYERS = {"options": ["out_proj"], "additive": ["W_q", "W_k", "w_v"], "by_length": ["W_q", "W_k", "W_v", "W_o"]}


@pytest.mark.parametrize("kind", OTHERS)
def test_peft_on_the_layers_of_other_modules(kind: str) -> None:
    """Also on the vector of additive attention, which is a Linear that the kernel reads."""
    peft = pytest.importorskip("peft")
    model, x = Other(OTHERS[kind]()), torch.randn(N, L, E)
    plain = model(x).detach()
    for layer in LAYERS[kind]:
        config = peft.LoraConfig(r=2, target_modules=[layer], init_lora_weights=False)
        tuned = peft.get_peft_model(copy.deepcopy(model), config)
        found = tuned(x)
        assert not torch.allclose(found, plain, atol=1e-4)
        found.square().sum().backward()
        adapters = [p for name, p in tuned.named_parameters() if "lora" in name]
        assert len(adapters) == 2
        assert all(p.grad is not None and p.grad.any() for p in adapters)
        with torch.no_grad():
            merged = tuned.merge_and_unload()
        torch.testing.assert_close(merged(x), found, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", OTHERS)
def test_quantize_dynamic_of_other_modules(kind: str) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no engine for quantized layers")
    from torch.ao import quantization

    model, x = Other(OTHERS[kind]()).eval(), torch.randn(N, L, E)
    kinds = {type(model.get_submodule(f"attention.{layer}")) for layer in LAYERS[kind]}
    mapping = quantization.get_default_dynamic_quant_module_mappings()
    mapping |= dict.fromkeys(kinds, mapping[nn.Linear])
    quantized = quantization.quantize_dynamic(model, kinds, dtype=torch.qint8, mapping=mapping)
    with torch.no_grad():
        assert operators_in(lambda: quantized(x))["quantized::linear_dynamic"] == len(LAYERS[kind])
        assert 0 < relative_error(quantized(x), model(x)) < 0.05


@pytest.mark.parametrize("kind", OTHERS)
def test_torchao_on_other_modules(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model, x = Other(OTHERS[kind]()).eval().requires_grad_(False), torch.randn(N, L, E)
    expected = model(x)
    torchao.quantize_(
        model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda module, name: isinstance(module, nn.Linear)
    )
    assert all(type(model.get_submodule(f"attention.{layer}").weight) is not nn.Parameter for layer in LAYERS[kind])
    assert 0 < relative_error(model(x), expected) < 0.05
