# SPDX-License-Identifier: BSD-3-Clause
"""Fused attention for code that calls ``torch.nn.functional.scaled_dot_product_attention``: timm, diffusers, your own.

    >>> with fused_mha.integrations.sdpa.fused_attention():
    ...     loss = model(images)

Inside, every call of the stock function, in whatever library, runs here; nothing is patched, and outside nothing has
changed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["fused_attention", "scaled_dot_product_attention"]

_attention_op = torch.ops.fused_mha.attention.default


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The stock function's arguments and meaning, with fused kernels.

    A bool ``attn_mask`` here is the stock one: True *keeps*. A mask and ``is_causal`` may be given together; they then
    both hide. Dimensions before (L, D) are those of :func:`fused_mha.functional.attention`: two at most.

    Example::

        >>> q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
        >>> keep = torch.rand(5, 5) < 0.5
        >>> scaled_dot_product_attention(q, k, v, attn_mask=keep).shape
        torch.Size([2, 4, 5, 8])
    """
    if key.dim() > 2 and key.size(-3) != query.size(-3) and not enable_gqa:
        raise RuntimeError(
            f"fused_mha: key must have as many heads as query, {query.size(-3)}, got shape {tuple(key.shape)}. Hint: "
            "enable_gqa=True"
        )
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        if query.dim() == 3 and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)  # (N, L, S): our third dimension from the right is that of heads
    output: Tensor = _attention_op(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale
    )
    return output


class fused_attention(TorchFunctionMode):  # noqa: N801  a context manager, as torch.no_grad is
    """Within ``with``, run the stock ``scaled_dot_product_attention`` on fused kernels.

    A call that these do not take, such as one with more than four dimensions or sizes that broadcast between query and
    key, goes to the stock function. ``nn.MultiheadAttention`` makes its call out of reach; replace the module instead
    (:func:`fused_mha.replace_multihead_attention`).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and _is_taken(*args, **kwargs):
            return scaled_dot_product_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _is_taken(query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> bool:
    return (
        query.device.type == "cpu"
        and query.dim() in (3, 4)
        and query.dim() == key.dim() == value.dim()
        and query.size(0) == key.size(0) == value.size(0)
        and (query.dim() == 3 or key.size(1) == query.size(1) or bool(kwargs.get("enable_gqa")))
    )
