# SPDX-License-Identifier: BSD-3-Clause
"""ONNX: the operators in terms of standard ones, so that any runtime runs an exported model.

    program = torch.onnx.export(
        model.eval(), arguments, dynamo=True, custom_translation_table=fused_mha.onnx.custom_translation_table()
    )

Needs the packages onnx and onnxscript, as ``torch.onnx.export`` does.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["custom_translation_table"]

_LOG_SUM_EXP = 3  # fused_mha::detail::kLogSumExp


def custom_translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)`` needs for models with these operators.

    The exported graph has MatMul, Softmax, Where and the like; sizes may be dynamic. Results are those of the
    operators, rows that see no key included. Keys hidden by a key_padding_mask may hold NaN; other hidden keys must be
    finite. Not fused: a runtime that knows the pattern may fuse it, and additive attention makes a tensor of all
    N * H * L * S * D sums. Gradients and dropout are not exported: call ``eval()`` on the model first.

    Raises:
        ModuleNotFoundError: onnxscript is not installed.
    """
    return {
        torch.ops.fused_mha._attention_forward.default: _attention_forward,
        torch.ops.fused_mha._additive_attention_forward.default: _additive_attention_forward,
    }


def _attention_forward(
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any,
    attn_mask: Any,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    rng_state: Any,
    always_visible_keys: int,
    weights_mode: int,
    bottom_right: bool = False,
    sink: Any = None,
    weights_before_dropout: bool = False,  # there is none
) -> tuple[Any, Any, Any, Any]:
    graph = _Graph(query, key, dropout_p, always_visible_keys)
    op = graph.op
    scaled = op.Mul(graph.wide(query), graph.number(scale))
    scores = op.MatMul(scaled, op.Transpose(graph.wide(graph.for_each_head(key)), perm=[0, 1, 3, 2]))
    masks = (key_padding_mask, attn_mask, is_causal, bottom_right)
    return _attend(graph, scores, query, value, masks, sink, weights_mode)


def _additive_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    score_weight: Any,
    key_padding_mask: Any,
    attn_mask: Any,
    is_causal: bool,
    dropout_p: float,
    rng_state: Any,
    weights_mode: int,
) -> tuple[Any, Any, Any, Any]:
    graph = _Graph(query, key, dropout_p, 0)
    op = graph.op
    rows = op.Unsqueeze(graph.wide(query), graph.integers(3))
    keys = op.Unsqueeze(graph.wide(graph.for_each_head(key)), graph.integers(2))
    # (D, 1), or (H, 1, D, 1) with one for each head.
    places = graph.integers(1) if len(score_weight.shape) == 1 else graph.integers(1, 3)
    column = op.Unsqueeze(graph.wide(score_weight), places)
    scores = op.Squeeze(op.MatMul(op.Tanh(op.Add(rows, keys)), column), graph.integers(-1))
    return _attend(graph, scores, query, value, (key_padding_mask, attn_mask, is_causal, False), None, weights_mode)


def _attend(
    graph: "_Graph",
    scores: Any,
    query: Any,
    value: Any,
    masking: tuple[Any, Any, bool, bool],
    sink: Any,
    weights_mode: int,
) -> tuple[Any, Any, Any, Any]:
    """All results of a call from its scores (N, H, L, S) before masks."""
    key_padding_mask, attn_mask, is_causal, bottom_right = masking
    op = graph.op
    padding = None if key_padding_mask is None else op.Unsqueeze(key_padding_mask, graph.integers(1, 2))
    # What a node makes has no dtype yet: that of the mask as given counts.
    masks = [
        (mask, given.dtype.name == "BOOL")
        for mask, given in ((padding, key_padding_mask), (attn_mask, attn_mask))
        if mask is not None
    ]
    hidden = graph.hidden_by(masks, is_causal, bottom_right)
    bias = graph.sum_of([mask for mask, is_bool in masks if not is_bool])

    if bias is not None:
        scores = op.Add(scores, bias)
    if hidden is not None:
        scores = op.Where(hidden, graph.number(-math.inf), scores)
    if sink is not None:
        # One more key, of which nothing is kept but what it takes from the others.
        one_a_row = op.Concat(op.Shape(scores, start=0, end=3), graph.integers(1), axis=0)
        scores = op.Concat(scores, op.Expand(graph.wide(sink), one_a_row), axis=-1)
    weights = op.Softmax(scores, axis=-1)
    if sink is not None:
        weights = op.Slice(weights, graph.integers(0), graph.integers(-1), graph.integers(-1))
    if hidden is not None:
        # Also for rows that see nothing, whose softmax is NaN.
        weights = op.Where(hidden, graph.number(0.0), weights)
    values = graph.wide(graph.for_each_head(value))
    if padding is not None:
        # 0 times NaN is NaN: what padding holds must not reach the sum.
        absent = op.Transpose(graph.hidden_by(masks[:1]), perm=[0, 1, 3, 2])
        values = op.Where(absent, graph.number(0.0), values)
    output = op.CastLike(op.MatMul(weights, values), query)
    if weights_mode == _LOG_SUM_EXP:
        returned = op.ReduceLogSumExp(scores, graph.integers(-1), keepdims=0)
    elif weights_mode == 0:
        returned = op.CastLike(op.ConstantOfShape(graph.integers(0)), query)
    else:
        averaged = op.ReduceMean(weights, graph.integers(1), keepdims=0) if weights_mode == 1 else weights
        returned = op.CastLike(averaged, query)
    # For the backward pass, which is not exported: nothing reads them, and the exporter removes them.
    row_max = op.ReduceMax(scores, graph.integers(-1), keepdims=0)
    row_sum = op.ReduceSum(op.Exp(op.Sub(scores, op.Unsqueeze(row_max, graph.integers(-1)))), graph.integers(-1))
    return output, returned, row_max, row_sum


class _Graph:
    """Pieces of the graph of one call, with sums in float32 (float64 for float64), as the operators have them."""

    def __init__(self, query: Any, key: Any, dropout_p: float, always_visible_keys: int) -> None:
        if dropout_p > 0.0:
            raise ValueError("fused_mha: dropout is not exported to ONNX; call eval() on the model first")
        self.op: Any = importlib.import_module("onnxscript").opset18
        self._onnx: Any = importlib.import_module("onnx")
        types = self._onnx.TensorProto
        self._wide_type = types.DOUBLE if query.dtype.name == "DOUBLE" else types.FLOAT
        self._query = query
        self._always_visible_keys = always_visible_keys
        self._masked_keys = self.op.Sub(self._size(key, 2), self.integers(always_visible_keys))

    def integers(self, *values: int) -> Any:
        return self.op.Constant(value_ints=list(values))

    def number(self, value: float) -> Any:
        return self._constant(self._wide_type, value)

    def wide(self, tensor: Any) -> Any:
        return self.op.Cast(tensor, to=self._wide_type)

    def for_each_head(self, tensor: Any) -> Any:
        """Key or value (N, Hkv, S, X), repeated for each of the query's heads."""
        if tensor.shape[1] == self._query.shape[1]:
            return tensor
        op, heads = self.op, self._size(self._query, 1)
        batch, rest = self._size(tensor, 0), op.Shape(tensor, start=2)
        groups = op.Div(heads, self._size(tensor, 1))
        sizes = op.Concat(batch, self._size(tensor, 1), groups, rest, axis=0)
        repeated = op.Expand(op.Unsqueeze(tensor, self.integers(2)), sizes)
        return op.Reshape(repeated, op.Concat(batch, heads, rest, axis=0))

    def hidden_by(self, masks: list[tuple[Any, bool]], is_causal: bool = False, bottom_right: bool = False) -> Any:
        """bool, broadcastable to (N, H, L, S); None where nothing hides. A mask comes with whether it is bool."""
        op, parts = self.op, []
        for mask, is_bool in masks:
            parts.append(mask if is_bool else op.Equal(mask, op.CastLike(self.number(-math.inf), mask)))
        if is_causal:
            zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
            length, masked = op.Squeeze(self._size(self._query, 2)), op.Squeeze(self._masked_keys)
            rows, keys = op.Range(zero, length, one), op.Range(zero, masked, one)
            if bottom_right:
                rows = op.Add(rows, op.Sub(masked, length))
            parts.append(op.Unsqueeze(op.Greater(keys, op.Unsqueeze(rows, self.integers(1))), self.integers(0, 1)))
        if not parts:
            return None
        return self._over_all_keys(functools.reduce(op.Or, parts), self._constant(self._onnx.TensorProto.BOOL, False))

    def sum_of(self, masks: list[Any]) -> Any:
        """What floating masks add to the scores, 0 where they hide; None where there is none."""
        op = self.op
        if not masks:
            return None
        finite = []
        for mask in masks:
            hides, nothing = (op.CastLike(self.number(value), mask) for value in (-math.inf, 0.0))
            finite.append(self.wide(op.Where(op.Equal(mask, hides), nothing, mask)))
        # Two finite masks never hide together, whatever their sum overflows to.
        lowest = torch.finfo(torch.float64 if self._wide_type == self._onnx.TensorProto.DOUBLE else torch.float32).min
        return self._over_all_keys(op.Max(functools.reduce(op.Add, finite), self.number(lowest)), self.number(0.0))

    def _size(self, tensor: Any, dim: int) -> Any:
        """(1) int64"""
        return self.op.Shape(tensor, start=dim, end=dim + 1)

    def _constant(self, data_type: int, value: float) -> Any:
        return self.op.Constant(value=self._onnx.helper.make_tensor("value", data_type, [], [value]))

    def _over_all_keys(self, mask: Any, filling: Any) -> Any:
        """A mask over S' keys as one over S: those behind are always visible."""
        if self._always_visible_keys == 0:
            return mask
        op = self.op
        masked = op.Expand(mask, op.Concat(self.integers(1, 1, 1), self._masked_keys, axis=0))
        sizes = op.Concat(op.Shape(mask, start=0, end=3), self.integers(self._always_visible_keys), axis=0)
        return op.Concat(masked, op.Expand(filling, sizes), axis=-1)
