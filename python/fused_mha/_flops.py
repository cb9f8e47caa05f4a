# SPDX-License-Identifier: BSD-3-Clause
"""Floating-point operations of the fused kernels, counted as ``torch.utils.flop_counter`` counts PyTorch's own.

Products only, two operations for a multiply-add, and everything that masks hide counts as if it were visible.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

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


#: What ``torch.utils.flop_counter.FlopCounterMode`` takes as ``custom_mapping``, so that it counts fused attention.
flop_formulas: Mapping[Any, Callable[..., int]] = {
    torch.ops.fused_mha._attention_forward: _forward,
    torch.ops.fused_mha._attention_backward: _backward,
}
