# SPDX-License-Identifier: BSD-3-Clause
"""What users of attention layers have reported, each as one test named after what they tried.

The rig makes answers readable: identity projections, queries of 0, so that weights are uniform over the visible keys,
and the value of key j is j + 1 in every channel. Without a mask the result is the mean, 2.5.
"""

from __future__ import annotations

import math
import warnings

import fused_mha
import module_reference
import pytest
import torch
from cases import later
from torch import nn

ops = torch.ops.fused_mha
E, H, S = 4, 2, 4
BIAS = torch.tensor([0.1, 0.2, 0.3, 0.4])
LOG = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
LAST_KEY = torch.tensor([[False, False, False, True]])
MODES = ("train", "eval", "no_grad")


class Rig:
    """fused_mha.MultiheadAttention with projections that can be computed in the head."""

    def __init__(self, **options) -> None:
        self.module = fused_mha.MultiheadAttention(E, H, batch_first=True, **options)
        with torch.no_grad():
            self.module.in_proj_weight.copy_(torch.eye(E).repeat(3, 1))
            self.module.in_proj_bias.zero_()
            self.module.out_proj.weight.copy_(torch.eye(E))
            self.module.out_proj.bias.copy_(BIAS)

    def __call__(self, batch: int = 1, length: int = 1, source: int = S, mode: str = "train", **options):
        """Output minus out_proj.bias, and weights; keys are 0, so only masks tell them apart."""
        self.module.train(mode == "train")
        query = torch.zeros(batch, length, E)
        key = torch.zeros(batch, source, E)
        value = torch.arange(1.0, source + 1)[None, :, None].expand(batch, source, E)
        with torch.set_grad_enabled(mode != "no_grad"):
            output, weights = self.module(query, key, value, **options)
        return output - BIAS, weights


@pytest.fixture
def rig() -> Rig:
    return Rig()


def everywhere(value: float, batch: int = 1, length: int = 1) -> torch.Tensor:
    return torch.full((batch, length, E), value)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# The rig itself.


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({}, 2.5),
        ({"key_padding_mask": LAST_KEY}, 2.0),
        ({"attn_mask": LOG[None]}, 3.0),
        ({"attn_mask": LOG[None], "key_padding_mask": LAST_KEY}, 14 / 6),
        ({"attn_mask": LAST_KEY, "key_padding_mask": LOG[None]}, 14 / 6),
        ({"attn_mask": torch.tensor([[1.0, 1.0, 0.0, 0.0]])}, (3 * math.e + 7) / (2 * math.e + 2)),
    ],
    ids=["none", "padding", "float", "float_and_padding", "dtypes_swapped", "keep_mask_as_float"],
)
def test_masks_give_the_numbers_one_computes_by_hand(
    rig, masks, expected: float, mode: str, need_weights: bool
) -> None:
    """pytorch#21518: a float 0/1 mask is a bias, in every mode."""
    output, weights = rig(mode=mode, need_weights=need_weights, **masks)
    close(output, everywhere(expected))
    if need_weights:
        close(weights @ torch.arange(1.0, S + 1), torch.tensor([[expected]]))


def test_appended_keys_count_and_stay_visible() -> None:
    close(Rig(add_zero_attn=True)()[0], everywhere(2.0))
    rig = Rig(add_bias_kv=True)
    with torch.no_grad():
        rig.module.bias_k.zero_()
        rig.module.bias_v.fill_(10.0)
    close(rig()[0], everywhere(4.0))
    output, weights = rig(key_padding_mask=torch.ones(1, S, dtype=torch.bool))
    close(output, everywhere(10.0))
    assert weights.tolist() == [[[0.0, 0.0, 0.0, 0.0, 1.0]]]


def test_learned_mask_over_frozen_projections() -> None:
    """pytorch#148476: the mask alone requires a gradient."""
    rig = Rig()
    rig.module.requires_grad_(False)
    mask = torch.zeros(1, S, requires_grad=True)
    output, _ = rig(attn_mask=mask, need_weights=False)
    output[..., 0].sum().backward()
    close(mask.grad, torch.tensor([[-1.5, -0.5, 0.5, 1.5]]) / 4)
    shared = torch.zeros(1, S, requires_grad=True)
    rig(attn_mask=shared, need_weights=False)[0].sum().backward()
    close(shared.grad, torch.tensor([[-1.5, -0.5, 0.5, 1.5]]))


# Rows without visible keys, NaN.


@pytest.mark.parametrize("need_weights", [True, False])
def test_loss_on_valid_rows_has_finite_gradients(need_weights: bool) -> None:
    """pytorch#41508: a band mask and padding leave a row without keys; the loss is on rows that are valid."""
    module = fused_mha.MultiheadAttention(E, H, batch_first=True)
    nn.init.normal_(module.out_proj.bias)
    x = torch.randn(2, 3, E, requires_grad=True)
    band = torch.tensor([[0, -math.inf, -math.inf], [0, 0, -math.inf], [-math.inf, 0, 0]])
    padding = torch.tensor([[False, False, False], [False, True, True]])
    output, _ = module(x, x, x, attn_mask=band, key_padding_mask=padding, need_weights=need_weights)
    assert torch.equal(output[1, 2], module.out_proj.bias)
    for grad in torch.autograd.grad(output[:, 0].square().sum(), [x, *module.parameters()]):
        assert torch.isfinite(grad).all()
        assert torch.count_nonzero(grad) > 0 or grad.shape == module.in_proj_bias.shape


def test_switching_off_one_head(rig) -> None:
    """pytorch#160064: a (N*H, L, S) mask hides every key from head 1."""
    mask = torch.tensor([False, True])[:, None, None].expand(2, 1, S)
    for need_weights in (True, False):
        output, weights = rig(attn_mask=mask, need_weights=need_weights, average_attn_weights=False)
        close(output, torch.tensor([[[2.5, 2.5, 0.0, 0.0]]]))
        if need_weights:
            close(weights, torch.tensor([[[[0.25] * 4], [[0.0] * 4]]]))


def test_padding_mask_from_lengths_with_a_zero(rig) -> None:
    """pytorch#27968, d2l-en#2423: a sample of length 0 gets weights 0, not NaN and not uniform."""
    lengths = torch.tensor([3, 0, 2])
    padding = torch.arange(S)[None, :] >= lengths[:, None]
    output, weights = rig(batch=3, key_padding_mask=padding)
    close(weights.sum(-1), torch.tensor([[1.0], [0.0], [1.0]]))
    close(weights[2, 0], torch.tensor([0.5, 0.5, 0.0, 0.0]))
    close(output, torch.tensor([2.0, 0.0, 1.5])[:, None, None].expand(3, 1, E))


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("need_weights", [True, False])
def test_random_masks_and_dropout_in_training(need_weights: bool, p: float) -> None:
    """pytorch#152028, pytorch#151667."""
    module = fused_mha.MultiheadAttention(8, 2, dropout=p, batch_first=True)
    nn.init.normal_(module.out_proj.bias)
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(3, 3, generator=generator) < 0.7
        x = torch.randn(2, 3, 8, generator=generator, requires_grad=True)
        output, weights = module(x, x, x, attn_mask=mask, need_weights=need_weights)
        if p == 1.0:
            assert torch.equal(output, module.out_proj.bias.expand_as(output))
        assert torch.isfinite(output).all()
        assert weights is None or torch.isfinite(weights).all()
        empty = mask.all(-1)
        assert torch.equal(output[:, empty], module.out_proj.bias.expand_as(output[:, empty]))
        for grad in torch.autograd.grad(output.square().sum(), [x, *module.parameters()]):
            assert torch.isfinite(grad).all()


def test_rows_filled_with_the_lowest_number(rig) -> None:
    """pytorch#109517: finfo.min is a bias; a row full of it is uniform."""
    lowest = torch.finfo(torch.float32).min
    for masks in (
        {"attn_mask": torch.full((1, S), lowest)},
        {"key_padding_mask": torch.full((1, S), lowest)},
        {"attn_mask": torch.full((1, S), lowest), "key_padding_mask": torch.full((1, S), lowest)},
    ):
        close(rig(**masks)[0], everywhere(2.5))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_garbage_in_padded_positions(kind: str) -> None:
    """pytorch#101967: NaN in keys and values that are padded stays where it is, forward and backward."""
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True)
    query, memory = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, True]]).expand(2, 3)
    memory = memory.masked_fill(padding[..., None], math.nan).requires_grad_()
    mask = padding if kind == "bool" else torch.zeros(2, 3).masked_fill(padding, -math.inf)
    for need_weights in (True, False):
        output, _ = module(query, memory, memory, key_padding_mask=mask, need_weights=need_weights)
        expected, _ = module(query, memory[:, :2], memory[:, :2])
        close(output, expected)
    projected = torch.randn(1, 2, 3, 4).masked_fill(torch.arange(3)[:, None] == 2, math.nan).requires_grad_()
    output = ops.attention(
        query[:1, None], projected[:, :1].repeat(1, 1, 1, 2), projected[:, 1:], key_padding_mask=mask[:1]
    )
    grad = torch.autograd.grad(output.sum(), projected)[0]
    assert torch.isfinite(output).all()
    assert torch.isfinite(grad).all()
    assert torch.count_nonzero(grad[:, :, 2]) == 0


def test_one_padded_token_hides_one_column() -> None:
    """pytorch#64525: a sample with one padded token is the sample cut short."""
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, True]]).expand(2, 3)
    output, weights = module(x, x, x, key_padding_mask=padding)
    expected, expected_weights = module(x, x[:, :2], x[:, :2])
    close(output, expected)
    close(weights[..., :2], expected_weights)
    assert torch.count_nonzero(weights[..., 2]) == 0


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_padding_at_the_front_of_a_causal_decoder(rig, mode: str, need_weights: bool) -> None:
    """pytorch#119371: rows 0 and 1 see nothing; train, eval and no_grad agree."""
    padding = torch.tensor([[True, True, False, False]])
    masks = {"attn_mask": later(4, 4), "key_padding_mask": padding}
    output, _ = rig(length=4, mode=mode, need_weights=need_weights, **masks)
    close(output[0, :, 0], torch.tensor([0.0, 0.0, 3.0, 3.5]))
    flag, _ = rig(length=4, mode=mode, need_weights=need_weights, is_causal=True, key_padding_mask=padding)
    close(flag, output)


def test_landmarks_with_padded_keys() -> None:
    """xformers#360: attention in two steps over landmarks, where the padded ones are empty rows of the first step."""
    tokens = torch.randn(1, 1, 7, 8, requires_grad=True)
    landmarks = torch.randn(1, 1, 4, 8)
    token_padding = torch.arange(7)[None, :] >= 4
    owner = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    belongs = owner[None, :] != torch.arange(4)[:, None]
    summary = ops.attention(landmarks, tokens, tokens, key_padding_mask=token_padding, attn_mask=belongs)
    assert torch.count_nonzero(summary[0, 0, 2:]) == 0
    assert torch.count_nonzero(summary[0, 0, :2]) > 0
    output = ops.attention(tokens, landmarks, summary, key_padding_mask=torch.arange(4)[None, :] >= 2)
    grad = torch.autograd.grad(output.square().sum(), tokens)[0]
    assert torch.isfinite(output).all()
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_large_activations_in_half_precision(need_weights: bool) -> None:
    """pytorch#60939: products beyond 65504 must not become infinite scores."""
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float16)
    nn.init.constant_(module.in_proj_weight, 0.2)
    nn.init.constant_(module.out_proj.weight, 0.2)
    x = torch.full((1, 3, 8), 300.0, dtype=torch.float16)
    output, weights = module(x, x, x, need_weights=need_weights)
    exact = module_reference.forward(module_reference.double(module), *[x.double()] * 3)[0]
    torch.testing.assert_close(output.double(), exact, rtol=5e-3, atol=0.0)
    assert weights is None or torch.isfinite(weights).all()


# What a mask means.


def test_float_padding_together_with_a_bool_mask() -> None:
    """pytorch#92554: each mask keeps the rule of its own dtype."""
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    padding = torch.tensor([[0.0, 0.0, -math.inf]]).expand(2, 3)
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    found = module(x, x, x, key_padding_mask=padding, attn_mask=nothing)
    expected = module(x, x, x, key_padding_mask=padding == -math.inf)
    close(found[0], expected[0])
    close(found[1], expected[1])


def test_one_mask_for_module_and_operator() -> None:
    """LLMs-from-scratch#1061: True hides at both doors."""
    value = torch.randn(1, 1, 3, 4)
    mask = later(3, 3)
    output = ops.attention(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), value, attn_mask=mask)
    assert torch.equal(output[0, 0, 0], value[0, 0, 0])
    _, weights = Rig()(length=3, source=3, attn_mask=mask)
    close(weights[0], torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


def test_three_dimensional_mask_is_ordered_by_sample_then_head(rig) -> None:
    """pytorch#64706: entry n * H + h belongs to sample n, head h."""
    hidden = torch.zeros(2, H, 1, S, dtype=torch.bool)
    hidden[1, :, :, 2:] = True
    by_padding = rig(batch=2, key_padding_mask=hidden[:, 0, 0])[0]
    close(rig(batch=2, attn_mask=hidden.reshape(2 * H, 1, S))[0], by_padding)
    close(rig(batch=2, attn_mask=hidden[:, :1])[0], by_padding)
    close(by_padding, torch.tensor([2.5, 1.5])[:, None, None].expand(2, 1, E))


def test_scattered_padding_together_with_causality() -> None:
    """onnxruntime#14363: padding AND causality, exactly."""
    padding = torch.tensor([[True, False, False, True, True, False, True]])
    for masks in ({"attn_mask": later(7, 7)}, {"is_causal": True}):
        _, weights = Rig()(length=7, source=7, key_padding_mask=padding, **masks)
        visible = (~later(7, 7) & ~padding).float()
        close(weights[0], visible / visible.sum(-1, keepdim=True).clamp(min=1))
        assert weights[0, 0].tolist() == [0.0] * 7


# is_causal.


def test_causal_flag_and_weights() -> None:
    """pytorch#99282: the flag alone is enough, and the weights show it."""
    _, weights = Rig()(length=2, source=2, is_causal=True)
    close(weights, torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]))


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_wrong_hint_does_not_beat_the_mask(rig, need_weights: bool) -> None:
    """pytorch#118972: a mask of zeros with the hint is full attention, whatever need_weights says."""
    close(rig(attn_mask=torch.zeros(1, S), is_causal=True, need_weights=need_weights)[0], everywhere(2.5))


def test_flag_and_mask_at_the_operator_are_both_applied() -> None:
    """pytorch#118972: at the operators the flag hides beside what the mask hides."""
    query, value = torch.zeros(1, 1, 4, 1), torch.arange(1.0, 5.0)[None, None, :, None]
    first_hidden = torch.tensor([True, False, False, False])
    output = ops.attention(query, torch.zeros(1, 1, 4, 1), value, attn_mask=first_hidden, is_causal=True)
    close(output.flatten(), torch.tensor([0.0, 2.0, 2.5, 3.0]))


def test_decoding_one_token_with_the_causal_flag() -> None:
    """pytorch#108108: causality is top-left, so one query sees one key."""
    close(Rig()(length=1, source=4, is_causal=True)[0], everywhere(1.0))


# Train, eval, no_grad.


@pytest.mark.parametrize("mode", MODES)
def test_trailing_column_padded_in_all_samples(rig, mode: str) -> None:
    """pytorch#97111: the shape of the result is that of the input."""
    output, _ = rig(batch=2, length=4, mode=mode, key_padding_mask=LAST_KEY.expand(2, S))
    close(output, everywhere(2.0, 2, 4))


def test_attention_bias_in_eval() -> None:
    """pytorch#107084, pytorch#118628: a finite float mask is a bias in every mode."""
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True).eval()
    x, bias = torch.randn(2, 4, 8), torch.randn(4, 4)
    expected = module(x, x, x, attn_mask=bias)[0]
    with torch.no_grad():
        assert torch.equal(module(x, x, x, attn_mask=bias)[0], expected)
    exact = module_reference.forward(module_reference.double(module), *[x.double()] * 3, attn_mask=bias)[0]
    torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_no_bias_and_an_odd_number_of_heads(bias: bool) -> None:
    """pytorch#88669, pytorch#97128, pytorch#83355, pytorch#52257."""
    module = fused_mha.MultiheadAttention(9, 3, bias=bias, batch_first=True)
    assert any("bias" in name for name in module.state_dict()) == bias
    x, padding = torch.randn(2, 4, 9), LAST_KEY.expand(2, 4)
    expected = module(x, x, x, key_padding_mask=padding)
    module.eval()
    with torch.no_grad():
        found = module(x, x, x, key_padding_mask=padding)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_decoder_masks_with_and_without_a_graph() -> None:
    """pytorch#106630."""
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    causal = torch.zeros(4, 4).masked_fill(later(4, 4), -math.inf)
    padding = torch.zeros(2, 4).masked_fill(LAST_KEY, -math.inf)
    expected = module(x, x, x, attn_mask=causal, key_padding_mask=padding)[0]
    with torch.no_grad():
        assert torch.equal(module(x, x, x, attn_mask=causal, key_padding_mask=padding)[0], expected)


# Weights.


def test_weights_in_training_are_those_after_dropout() -> None:
    """pytorch#42929, pytorch#90842: a kept weight is 0.25 / (1 - p), a dropped one is 0."""
    _, weights = Rig(dropout=0.5)(batch=64, average_attn_weights=False)
    values = weights.unique()
    close(values, torch.tensor([0.0, 0.5]))
    assert weights.sum(-1).unique().numel() > 2


def test_weights_are_returned_in_every_mode() -> None:
    """pytorch#109528, fairseq#3365: whether depends on need_weights alone, and per head means per head."""
    rig = Rig()
    for mode in MODES:
        assert rig(mode=mode, need_weights=False)[1] is None
        assert rig(mode=mode)[1].shape == (1, 1, S)
        assert rig(mode=mode, average_attn_weights=False)[1].shape == (1, H, 1, S)


# Sizes, strides, dtypes.


@pytest.mark.parametrize("s", [10, 43, 77])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_bias_of_any_length(dtype: torch.dtype, s: int) -> None:
    """xformers#683, xformers#855, pytorch#121943: no stride need be a multiple of 8, and an odd offset will do."""
    query, key, value = (torch.randn(2, 2, length, 16).to(dtype) for length in (5, s, s))
    memory = torch.randn(5 * s + 1).to(dtype)
    bias = memory[1:].view(5, s)
    exact = ops.attention(query.double(), key.double(), value.double(), attn_mask=bias.double())
    found = ops.attention(query, key, value, attn_mask=bias)
    torch.testing.assert_close(found.double(), exact, rtol=0.0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("head_dim", [1, 3, 5, 8, 20, 33, 64, 80, 96, 128, 160, 256])
def test_any_head_dim(head_dim: int) -> None:
    """flash-attention#28, flash-attention#1347."""
    query, key, value = (torch.randn(1, 2, 9, head_dim, requires_grad=True) for _ in range(3))
    output = ops.attention(query, key, value)
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    expected = (exact[0] @ exact[1].mT / math.sqrt(head_dim)).softmax(-1) @ exact[2]
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(
        torch.autograd.grad(output.square().sum(), (query, key, value)),
        torch.autograd.grad(expected.square().sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_half_precision_on_the_cpu(need_weights: bool, dtype: torch.dtype) -> None:
    """pytorch#106719, pytorch#99974, pytorch#144117: the model's dtype comes back, a float32 mask or not."""
    module = fused_mha.MultiheadAttention(16, 4, batch_first=True, dtype=dtype)
    x = torch.randn(2, 5, 16).to(dtype)
    for mask in (None, torch.randn(5, 5)):
        output, weights = module(x, x, x, attn_mask=mask, need_weights=need_weights)
        exact = module_reference.forward(module_reference.double(module), *[x.double()] * 3, attn_mask=mask)[0]
        assert output.dtype == dtype
        assert weights is None or weights.dtype == dtype
        torch.testing.assert_close(output.double(), exact, rtol=0.0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 0, 3), (2, 2, 0)], ids=["batch", "queries", "keys"])
def test_empty_batch_queries_or_keys(sizes: tuple[int, int, int], masked: bool, need_weights: bool) -> None:
    """pytorch#141218, flash-attention#1159, pytorch#188765: forward and backward; without keys the result is 0."""
    n, length, s = sizes
    module = fused_mha.MultiheadAttention(E, H, batch_first=True)
    query, memory = torch.randn(n, length, E, requires_grad=True), torch.randn(n, s, E, requires_grad=True)
    masks = {"key_padding_mask": torch.zeros(n, s, dtype=torch.bool), "attn_mask": torch.zeros(length, s)}
    output, weights = module(query, memory, memory, need_weights=need_weights, **(masks if masked else {}))
    assert output.shape == (n, length, E)
    assert not need_weights or weights.shape == (n, length, s)
    assert s > 0 or torch.equal(output, module.out_proj.bias.expand_as(output))
    grads = torch.autograd.grad(output.sum(), [query, memory, *module.parameters()])
    assert all(torch.count_nonzero(grad) == 0 for grad in grads[:2])
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_padded_batches_equal_truncation() -> None:
    """flash-attention#571: left, right and scattered padding, no unpadding by the caller."""
    query, key, value = (torch.randn(3, 2, length, 16, dtype=torch.float64) for length in (9, 70, 70))
    scattered = torch.rand(70, generator=torch.Generator().manual_seed(2)) < 0.9
    kept_sets = (torch.arange(70) < 7, torch.arange(70) >= 63, ~scattered)
    padding = ~torch.stack(kept_sets)
    output = ops.attention(query, key, value, key_padding_mask=padding)
    for i, kept in enumerate(kept_sets):
        expected = ops.attention(query[i : i + 1], key[i : i + 1, :, kept], value[i : i + 1, :, kept])
        torch.testing.assert_close(output[i : i + 1], expected, rtol=1e-12, atol=1e-13)


def test_legal_input_gives_no_warning(rig) -> None:
    """pytorch#95702, pytorch#96103."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(rig(key_padding_mask=LAST_KEY, attn_mask=torch.zeros(1, S))[0], everywhere(2.0))
        close(rig(key_padding_mask=LAST_KEY, attn_mask=torch.zeros(1, S, dtype=torch.bool))[0], everywhere(2.0))


# Autograd.


@pytest.mark.parametrize("case", ["bool", "float", "padding_float", "causal"])
def test_gradients_exist_for_every_mask_form_that_has_a_forward(case: str) -> None:
    """xformers#737, NATTEN#191: float64 kernels make gradcheck usable."""
    masks = {
        "bool": {"attn_mask": later(3, 4)},
        "float": {"attn_mask": torch.randn(3, 4, dtype=torch.float64, requires_grad=True)},
        "padding_float": {"key_padding_mask": torch.randn(1, 4, dtype=torch.float64, requires_grad=True)},
        "causal": {"is_causal": True},
    }[case]
    tensors = [torch.randn(1, 2, length, 2, dtype=torch.float64, requires_grad=True) for length in (3, 4, 4)]
    learned = [m for m in masks.values() if isinstance(m, torch.Tensor) and m.requires_grad]
    names = [name for name, m in masks.items() if isinstance(m, torch.Tensor) and m.requires_grad]

    def function(*leaves):
        return ops.attention(*leaves[:3], **{**masks, **dict(zip(names, leaves[3:], strict=True))})

    assert torch.autograd.gradcheck(function, [*tensors, *learned])


@pytest.mark.parametrize("need_weights", [True, False])
def test_deterministic_training_step(need_weights: bool) -> None:
    """xformers#1128, flash-attention#746: two runs give the same bits."""
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        module = fused_mha.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        x = torch.randn(4, 50, 16)
        padding = torch.arange(50)[None, :] >= torch.tensor([[50], [30], [7], [1]])
        module(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0].square().sum().backward()
        results.append([p.grad for p in module.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert all(torch.isfinite(grad).all() for grad in results[0])
