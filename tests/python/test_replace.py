# SPDX-License-Identifier: BSD-3-Clause
"""replace_multihead_attention swaps attention modules in place, shares their parameters, and reports."""

from __future__ import annotations

import copy

import fused_mha
import torch
from torch import nn


class Classifier(nn.Module):
    """A model with attention at several depths, one module in two places, and one that is no attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(16, 2, batch_first=True, kdim=16, add_bias_kv=True)
        self.same_pool = self.pool
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(self.pool(x.mean(1, keepdim=True), x, x, key_padding_mask=padding)[0].squeeze(1))


class Custom(nn.MultiheadAttention):
    """A subclass whose own forward must stay."""

    def forward(self, query, key, value, **options):
        return super().forward(query * 2, key, value, **options)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 6, 16), torch.arange(6)[None, :] >= torch.tensor([[6], [4], [2]])


def attention_modules(model: nn.Module) -> list[nn.MultiheadAttention]:
    return [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]


def test_every_module_is_swapped_and_results_stay() -> None:
    model = Classifier()
    x, padding = data()
    expected = model(x, padding)
    expected.square().sum().backward()
    expected_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    report = fused_mha.replace_multihead_attention(model)
    assert len(attention_modules(model)) == 3
    assert all(type(m) is fused_mha.MultiheadAttention for m in attention_modules(model))
    assert model.pool is model.same_pool
    found = model(x, padding)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_grads[name], rtol=1e-4, atol=1e-4)
    assert {"encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "pool"} <= set(report.replaced)
    assert not report.left
    for name in report.replaced:
        assert name in str(report)


def test_parameters_are_shared_and_an_optimizer_stays_valid() -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    fused_mha.replace_multihead_attention(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    before = model.pool.q_proj_weight.detach().clone() if model.pool.q_proj_weight is not None else None
    weight = model.encoder.layers[0].self_attn.in_proj_weight
    old = weight.detach().clone()
    model(*data()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, old)
    assert before is None or not torch.equal(model.pool.q_proj_weight, before)


def test_state_dict_keys_stay() -> None:
    model = Classifier()
    state = copy.deepcopy(model.state_dict())
    fused_mha.replace_multihead_attention(model)
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state, strict=True)


def test_attributes_mode_and_hooks_stay() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).eval())
    model[0].marker = "mine"
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    model[0].in_proj_weight.requires_grad_(False)
    fused_mha.replace_multihead_attention(model)
    module = model[0]
    assert type(module) is fused_mha.MultiheadAttention
    assert module.marker == "mine"
    assert not module.training
    assert module.dropout == 0.3
    assert not module.in_proj_weight.requires_grad
    module(*[torch.randn(2, 3, 8)] * 3)
    assert calls == [1]


def test_subclasses_are_left_and_named() -> None:
    model = nn.ModuleDict({"plain": nn.MultiheadAttention(8, 2), "custom": Custom(8, 2)})
    report = fused_mha.replace_multihead_attention(model)
    assert type(model["plain"]) is fused_mha.MultiheadAttention
    assert type(model["custom"]) is Custom
    assert list(report.replaced) == ["plain"]
    ((name, reason),) = report.left
    assert name == "custom"
    assert "Custom" in reason
    assert "custom" in str(report)
    assert reason in str(report)


def test_a_second_time_changes_nothing() -> None:
    model = Classifier()
    fused_mha.replace_multihead_attention(model)
    modules = [id(m) for m in model.modules()]
    report = fused_mha.replace_multihead_attention(model)
    assert [id(m) for m in model.modules()] == modules
    assert not report.replaced


def test_a_model_without_attention() -> None:
    model = nn.Linear(3, 3)
    report = fused_mha.replace_multihead_attention(model)
    assert not report.replaced
    assert not report.left
    assert type(model) is nn.Linear


def test_replaced_models_survive_copying() -> None:
    model = Classifier()
    fused_mha.replace_multihead_attention(model)
    x, padding = data()
    other = copy.deepcopy(model)
    assert torch.equal(other(x, padding), model(x, padding))
    assert all(type(m) is fused_mha.MultiheadAttention for m in attention_modules(other))
