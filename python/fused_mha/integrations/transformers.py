# SPDX-License-Identifier: BSD-3-Clause
"""Fused attention for the models of Hugging Face ``transformers`` (5.5 or newer), by its attention interface.

    >>> import fused_mha.integrations.transformers
    >>> fused_mha.integrations.transformers.register()
    >>> model = transformers.AutoModel.from_pretrained(folder, attn_implementation="fused_mha")

or ``model.set_attn_implementation("fused_mha")`` for a model that exists. What then differs from ``"sdpa"``:

* the padding mask is handed over as it is, (N, S), beside causality as a flag: no (N, 1, L, S) mask is made, and padded
  keys are not read. Windows, packed sequences and caches that are not aligned with the query still need such a mask;
  it is bool and has no heads;
* a position bias (T5, MPNet, ...) is read beside the padding mask, not merged with it;
* grouped queries are read as they are, without repeating keys and values; sinks (GPT-OSS) are one number a head, not
  another column of scores;
* ``model(..., output_attentions=True)`` returns the weights, after dropout, with the same kernels.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["attention", "attention_mask", "register"]

_attention_op = torch.ops.fused_mha.attention.default
_attention_with_weights_op = torch.ops.fused_mha.attention_with_weights.default

# What some models hand to their attention, and what would be silently lost.
_UNSUPPORTED = ("softcap", "sinks", "indices", "block_indices")


def register(name: str = "fused_mha") -> None:
    """Make ``attn_implementation=name`` mean fused attention, in every model that uses the attention interface.

    Raises:
        ImportError: transformers is missing or older than 5.5, whose masks are asked for in another way.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, __version__
    from transformers.masking_utils import sdpa_mask

    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"fused_mha.integrations.transformers needs transformers 5.5 or newer, got {__version__}")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a model calls for its attention.

    Args:
        module: the attention module; its ``is_causal`` counts where the argument is None.
        query, key, value: (N, H, L, D), (N, Hkv, S, D), (N, Hkv, S, Dv).
        attention_mask: with this library's meaning, where True or 1 keeps: (N, S), padding beside ``is_causal``;
            (N, 1, 1, S), padding alone; anything else that broadcasts to (N, H, L, S), bool or added, alone. None
            leaves ``is_causal`` to decide.
        dropout, scaling: as the operator's ``dropout_p`` and ``scale``.
        position_bias: added to the scores; broadcasts to (N, H, L, S).
        s_aux: the operator's ``sink``, (H), learned in GPT-OSS and its like.
        kwargs: ``output_attentions`` asks for the weights. What attention of other kinds needs raises ValueError;
            the rest is for other implementations.

    Returns:
        (N, L, H, Dv), and the weights (N, H, L, S) or None.
    """
    refused = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if refused:
        raise ValueError(
            f"fused_mha: {type(module).__name__} asks for {', '.join(refused)}, which fused attention does not have. "
            "Hint: use attn_implementation='eager' for this model"
        )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    padding: Tensor | None = None
    bias = position_bias
    if attention_mask is not None:
        if attention_mask.dim() == 2:
            padding = _hidden(attention_mask)
        else:
            causal = False
            if attention_mask.dim() == 4 and attention_mask.shape[1:3] == (1, 1) and attention_mask.dtype == torch.bool:
                padding = ~attention_mask[:, 0, 0, :]
            else:
                bias = _combined(attention_mask, position_bias)
    arguments = (query, key, value)
    options = {
        "key_padding_mask": None if padding is None else padding.expand(query.size(0), -1),
        "attn_mask": bias,
        # One query is the last of a sequence, not its first.
        "is_causal": causal and query.size(2) > 1,
        "dropout_p": dropout,
        "scale": scaling,
        "sink": s_aux,
    }
    if kwargs.get("output_attentions"):
        output, weights = _attention_with_weights_op(*arguments, average_attn_weights=False, **options)
        return output.transpose(1, 2), weights
    # The result keeps the query's memory order, so that for a query made by view and transpose this is contiguous.
    return _attention_op(*arguments, **options).transpose(1, 2), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What a model calls, once a forward pass, for the mask that it then hands to :func:`attention`.

    The arguments are those of ``transformers.masking_utils.sdpa_mask``. The two ``allow_`` flags say that the mask is
    causal or bidirectional and nothing but that, apart from the padding and a window of ``local_size``.
    """
    is_plain = local_size is None or kv_length < local_size
    if is_plain and allow_is_bidirectional_skip:
        return _as_padding_alone(_padding(attention_mask, kv_length, kv_offset))
    if is_plain and allow_is_causal_skip and isinstance(q_offset, int):
        if q_length == 1 and kv_offset + kv_length - 1 <= q_offset:
            return _as_padding_alone(_padding(attention_mask, kv_length, kv_offset))
        if q_offset == kv_offset:
            return _padding(attention_mask, kv_length, kv_offset)
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        local_size=local_size,
        **kwargs,
    )
    return mask


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """(N, S), True keeps; keys beyond the mask's end are hidden, as the library has it."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.size(-1)
    if missing > 0:
        attention_mask = F.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def _as_padding_alone(padding: Tensor | None) -> Tensor | None:
    """(N, 1, 1, S): four dimensions say that causality has no part in it."""
    return None if padding is None else padding.to(torch.bool)[:, None, None, :]


def _hidden(mask: Tensor) -> Tensor:
    """This library's 1 or True keeps; ours hides."""
    return ~mask if mask.dtype == torch.bool else mask == 0


def _combined(mask: Tensor, position_bias: Tensor | None) -> Tensor:
    """One mask with our meaning from a mask that stands alone and a position bias."""
    if mask.dtype != torch.bool:
        return mask if position_bias is None else mask + position_bias
    return ~mask if position_bias is None else position_bias.masked_fill(~mask, -torch.inf)
