# SPDX-License-Identifier: BSD-3-Clause
"""fused_mha.integrations.sdpa and .torchvision beside what they stand in for."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from fused_mha.integrations import sdpa
from fused_mha.integrations import torchvision as vision
from tolerances import assert_close_as_torch
from torch import nn

# ----------------------------------------------------------------------------------------- scaled_dot_product_attention


@pytest.mark.parametrize("mask", ["none", "keep", "bias", "causal"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (2, 5, 8)], ids=["four", "three"])
def test_the_function_means_what_the_stock_one_means(shape: tuple[int, ...], mask: str) -> None:
    inputs = [torch.randn(shape) for _ in range(3)]
    keep = torch.rand(*shape[:-1], 5) < 0.6
    keep.diagonal(dim1=-2, dim2=-1).fill_(True)
    options: dict[str, object] = {"scale": 0.5, "is_causal": mask == "causal"}
    double_options = dict(options)
    if mask == "keep":
        options["attn_mask"] = double_options["attn_mask"] = keep
    elif mask == "bias":
        options["attn_mask"] = torch.randn(keep.shape)
        double_options["attn_mask"] = options["attn_mask"].double()
    found = sdpa.scaled_dot_product_attention(*inputs, **options)
    yardstick = F.scaled_dot_product_attention(*inputs, **options)
    expected = F.scaled_dot_product_attention(*(t.double() for t in inputs), **double_options)
    assert_close_as_torch(found, expected, yardstick, what="output")


def test_grouped_queries_must_be_asked_for() -> None:
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8)
    found = sdpa.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    assert_close_as_torch(
        found,
        F.scaled_dot_product_attention(query.double(), key.double(), key.double(), enable_gqa=True),
        what="output",
    )
    with pytest.raises(RuntimeError, match="enable_gqa=True"):
        sdpa.scaled_dot_product_attention(query, key, key)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of this library's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ours += func.namespace == "fused_mha"
        return func(*args, **(kwargs or {}))


def test_the_context_takes_every_call_and_only_inside() -> None:
    q = torch.randn(2, 3, 5, 8)
    with Calls() as calls:
        with sdpa.fused_attention():
            inside = F.scaled_dot_product_attention(q, q, q)
            assert calls.ours == 1
            # Not taken: five dimensions, and a batch that broadcasts.
            F.scaled_dot_product_attention(q[None], q[None], q[None])
            F.scaled_dot_product_attention(q, q[:1], q[:1])
        F.scaled_dot_product_attention(q, q, q)
    assert calls.ours == 1
    assert torch.equal(inside, sdpa.scaled_dot_product_attention(q, q, q))


def test_the_context_trains() -> None:
    q = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    with sdpa.fused_attention():
        (found,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum(), q)
    (expected,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum(), q)
    assert_close_as_torch(found, expected, what="gradient", gradient=True)


def test_a_timm_model_in_the_context() -> None:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = timm.models.vision_transformer.VisionTransformer(**sizes)
    images = torch.randn(2, 3, 32, 32)
    with Calls() as calls, sdpa.fused_attention():
        found = model(images)
    assert calls.ours == 2
    expected = copy.deepcopy(model).double()(images.double())
    assert_close_as_torch(found, expected, model(images), what="output")


# ----------------------------------------------------------------------------------------------------- torchvision Swin


def windows(version: int, **options) -> nn.Module:
    swin = pytest.importorskip("torchvision").models.swin_transformer
    kind = swin.ShiftedWindowAttention if version == 1 else swin.ShiftedWindowAttentionV2
    module = kind(12, [4, 4], options.pop("shift", [2, 2]), 3, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shift", [[0, 0], [2, 2], [0, 1]])
@pytest.mark.parametrize("size", [(8, 8), (9, 6), (4, 4), (3, 11)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_window_attention_is_that_of_torchvision(size: tuple[int, int], shift, bias: bool, version: int) -> None:
    """Padding, shifts, windows as large as the picture; gradients of all parameters, the bias table's too.

    Hidden scores are -inf here and -100 there, a difference far below rounding while scores are small.
    """
    stock = windows(version, shift=shift, qkv_bias=bias)
    fused, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    report = vision.replace_window_attention(fused)
    assert report.replaced == ("",)
    assert list(fused.state_dict()) == list(stock.state_dict())
    results, gradients = [], []
    x = torch.randn(2, *size, 12)
    for model, dtype in ((fused, torch.float32), (exact, torch.float64), (stock, torch.float32)):
        result = model(x.to(dtype))
        result.square().mean().backward()
        results.append(result)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert_close_as_torch(*results, what="output")
    assert_close_as_torch(*gradients, what="gradients", gradient=True)


def test_a_swin_transformer_is_replaced_throughout() -> None:
    models = pytest.importorskip("torchvision").models
    sizes = {"patch_size": [2, 2], "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    model = models.SwinTransformer(**sizes, stochastic_depth_prob=0.0, num_classes=5).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = model(images)
    report = vision.replace_window_attention(model)
    assert len(report.replaced) == 4
    assert not report.left
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(images), model(images))
    again = vision.replace_window_attention(copy.deepcopy(model))
    assert not again.replaced
    assert {reason for _, reason in again.left} == {"already fused"}


def test_dropout_of_windows_is_on_in_training_only() -> None:
    fused = windows(1, attention_dropout=1.0)
    vision.replace_window_attention(fused)
    x = torch.randn(1, 8, 8, 12)
    assert torch.equal(fused(x), fused.proj.bias.expand(1, 8, 8, 12))
    assert not math.isclose(fused.eval()(x).std().item(), fused.proj.bias.std().item(), rel_tol=1e-3)


def test_subclasses_of_window_attention_are_left_and_named() -> None:
    stock = windows(1)

    class Mine(type(stock)):
        pass

    stock.__class__ = Mine
    ((name, reason),) = vision.replace_window_attention(nn.Sequential(stock)).left
    assert name == "0"
    assert "Mine is a subclass" in reason
