# SPDX-License-Identifier: BSD-3-Clause
"""ONNX: an exported model has standard operators only, and ONNX Runtime gives the numbers of eager mode."""

from __future__ import annotations

import math

import fused_mha
import pytest
import torch
from cases import BY_NAME, Case

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

ops = torch.ops.fused_mha
pytestmark = pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")


def export(model: torch.nn.Module, arguments: tuple[torch.Tensor | None, ...], dynamic_shapes=None):
    return torch.onnx.export(
        model.eval(),
        arguments,
        dynamo=True,
        dynamic_shapes=dynamic_shapes,
        custom_translation_table=fused_mha.onnx.custom_translation_table(),
        verbose=False,
    )


def run(program, arguments: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
    assert {node.domain for node in program.model.graph} <= {"", "ai.onnx"}
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    given = [tensor.numpy() for tensor in arguments if tensor is not None]
    names = [node.name for node in session.get_inputs()]
    return [torch.from_numpy(t) for t in session.run(None, dict(zip(names, given, strict=True)))]


def assert_same(found, expected) -> None:
    for ours, eager in zip(found, expected, strict=True):
        assert ours.dtype == eager.dtype
        tolerance = 2e-3 if eager.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


class Operator(torch.nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, query, key, value, key_padding_mask, attn_mask):
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        return ops.attention_with_weights(query, key, value, **masks, **self.options)


AVERAGED = {
    "grouped_heads": True,
    "float_inf_empty_row": False,
    "causal_wide": True,
    "mixed_float16": False,
    "whole_sample": False,
}


@pytest.mark.parametrize("name", AVERAGED)
def test_operator(name: str) -> None:
    inputs = BY_NAME[name].make(torch.float16 if name == "mixed_float16" else torch.float32)
    options = {"is_causal": inputs.is_causal, "scale": 0.3, "average_attn_weights": AVERAGED[name]}
    arguments = (*inputs.tensors(), inputs.key_padding_mask, inputs.attn_mask)
    model = Operator(**options)
    assert_same(run(export(model, arguments), arguments), model(*arguments))


def test_finite_masks_never_hide_together() -> None:
    """And float64 stays float64."""
    inputs = Case("lowest", L=3, S=4, D=4).make(torch.float64)
    lowest = torch.finfo(torch.float64).min
    arguments = (*inputs.tensors(), *(torch.full((n, 4), lowest, dtype=torch.float64) for n in (2, 3)))
    model = Operator()
    found = run(export(model, arguments), arguments)
    torch.testing.assert_close(found[1], torch.full((2, 3, 4), 0.25).double(), rtol=1e-12, atol=0)
    assert_same(found, model(*arguments))


class WithPadding(torch.nn.Module):
    def __init__(self, attention: torch.nn.Module, need_weights: bool) -> None:
        super().__init__()
        self.attention = attention
        self.need_weights = need_weights

    def forward(self, x, memory, padding, mask):
        result = self.attention(
            x, memory, memory, key_padding_mask=padding, attn_mask=mask, need_weights=self.need_weights
        )
        return result if self.need_weights else result[0]


@pytest.mark.parametrize("need_weights", [True, False])
def test_module_with_dynamic_sizes(need_weights: bool) -> None:
    """pytorch#78060, #143107: key differs from query; one sample has no key, one row sees none."""
    attention = fused_mha.MultiheadAttention(16, 4, dropout=0.1, batch_first=True, add_bias_kv=need_weights)
    model = WithPadding(attention, need_weights)
    n, length, s = (torch.export.Dim(name, min=2, max=64) for name in "nls")
    example = (torch.randn(3, 5, 16), torch.randn(3, 7, 16), torch.zeros(3, 7, dtype=torch.bool), torch.zeros(5, 7))
    program = export(model, example, ({0: n, 1: length}, {0: n, 1: s}, {0: n, 1: s}, {0: length, 1: s}))
    x, memory = torch.randn(2, 9, 16), torch.randn(2, 11, 16)
    padding = torch.arange(11) >= torch.tensor([[8], [0]])
    mask = torch.randn(9, 11).index_fill(0, torch.tensor([4]), -math.inf)
    expected = model(x, memory, padding, mask)
    # What padding holds does not matter, in the graph either.
    spoilt = memory.masked_fill(padding[..., None], math.nan)
    found = run(program, (x, spoilt, padding, mask))
    if not need_weights:
        expected = (expected,)
        bias = attention.out_proj.bias.detach()
        torch.testing.assert_close(found[0][1], bias.expand(9, -1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[0][0, 4], bias, rtol=1e-5, atol=1e-6)
    assert_same(found, expected)


def test_encoder_layer() -> None:
    model = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    fused_mha.replace_multihead_attention(model)
    x = torch.randn(2, 5, 16)
    found = run(export(model, (x,)), (x,))
    assert_same(found, [model(x)])


def test_dropout_is_refused_with_a_hint() -> None:
    class Training(torch.nn.Module):
        def forward(self, x):
            return ops.attention(x, x, x, dropout_p=0.5)

    with pytest.raises(Exception, match=r"eval\(\)"):
        export(Training(), (torch.randn(1, 2, 3, 4),))


class WithLogSumExp(torch.nn.Module):
    def forward(self, query, key, sink):
        return ops.attention_with_lse(query, key, key, is_causal=True, causal_alignment="bottom_right", sink=sink)


@pytest.mark.parametrize("with_sink", [False, True])
def test_sink_log_sum_exp_and_causality_from_the_bottom_right(with_sink: bool) -> None:
    """More queries than keys: rows that see nothing are among them."""
    arguments = (torch.randn(2, 4, 7, 8), torch.randn(2, 2, 5, 8), torch.randn(4) if with_sink else None)
    assert_same(run(export(WithLogSumExp(), arguments), arguments), ops.attention_with_lse(
        arguments[0], arguments[1], arguments[1], is_causal=True, causal_alignment="bottom_right", sink=arguments[2]
    ))  # fmt: skip
