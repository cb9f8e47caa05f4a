# SPDX-License-Identifier: BSD-3-Clause
"""Floating-point operations of the fused kernels, counted as ``torch.utils.flop_counter`` counts PyTorch's own.

Products only, two operations for a multiply-add, and everything that masks hide counts as if it were visible.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["flop_formulas"]

_Shape = Sequence[int]


def _product(query: _Shape, key: _Shape, width: int) -> int:
    """One product over (N, H, L, S, width), whichever of its dimensions is summed."""
    N, H, L = query[:3]
    return 2 * N * H * L * key[2] * width


def _forward(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return _product(query, key, query[3]) + _product(query, key, value[3])


def _backward(
    grad_output: _Shape | None,
    grad_weights: _Shape | None,
    query: _Shape,
    key: _Shape,
    value: _Shape,
    *rest: Any,
    **_: Any,
) -> int:
    output_mask: Sequence[bool] = rest[11]
    wanted_query, wanted_key, wanted_value = output_mask[:3]
    by_query_dim = _product(query, key, query[3])
    by_value_dim = _product(query, key, value[3])
    count = by_query_dim * (1 + wanted_query + wanted_key)  # 1: the scores, computed again
    if grad_output is not None:
        count += by_value_dim * (1 + wanted_value)  # 1: the gradient of the weights
    return count


def _additive_backward(
    grad_output: _Shape | None,
    grad_weights: _Shape | None,
    query: _Shape,
    key: _Shape,
    value: _Shape,
    *rest: Any,
    **_: Any,
) -> int:
    wanted: Sequence[bool] = rest[10]
    count = _product(query, key, query[3]) * (1 + wanted[0] + wanted[1] + wanted[3])
    if grad_output is not None:
        count += _product(query, key, value[3]) * (1 + wanted[2])
    return count


def _varlen_products(query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> int:
    """Multiply-adds of one product, for each number of the width; lengths that cannot be read count as equal."""
    if cu_seqlens_q.is_meta or type(cu_seqlens_q) is not Tensor:  # meta and fake tensors hold no numbers
        return query.shape[1] * query.shape[0] * key.shape[0] // max(cu_seqlens_q.numel() - 1, 1)
    return query.shape[1] * int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())


def _varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *_: Any, **__: Any
) -> int:
    return 2 * _varlen_products(query, key, cu_seqlens_q, cu_seqlens_k) * (query.shape[2] + value.shape[2])


def _varlen_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *rest: Any,
    **_: Any,
) -> int:
    wanted: Sequence[bool] = rest[9]
    by_query_dim = query.shape[2] * (1 + wanted[0] + wanted[1])
    by_value_dim = value.shape[2] * (1 + wanted[2])
    return 2 * _varlen_products(query, key, cu_seqlens_q, cu_seqlens_k) * (by_query_dim + by_value_dim)


# The counter hands these the tensors themselves: lengths are not in their shapes.
_varlen_forward._get_raw = True  # type: ignore[attr-defined]
_varlen_backward._get_raw = True  # type: ignore[attr-defined]

#: What ``torch.utils.flop_counter.FlopCounterMode`` takes as ``custom_mapping``, so that it counts fused attention.
flop_formulas: Mapping[Any, Callable[..., int]] = {
    torch.ops.fused_mha._attention_forward: _forward,
    torch.ops.fused_mha._attention_backward: _backward,
    torch.ops.fused_mha._additive_attention_forward: _forward,  # scores are sums over D of score_weight times tanh
    torch.ops.fused_mha._additive_attention_backward: _additive_backward,
    torch.ops.fused_mha._varlen_forward: _varlen_forward,
    torch.ops.fused_mha._varlen_backward: _varlen_backward,
}
