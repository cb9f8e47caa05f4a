# SPDX-License-Identifier: BSD-3-Clause
"""The operators as documented functions.

Each function is one call of the operator of the same name in ``torch.ops.fused_mha``; nothing is computed here. Two
more, :func:`multi_head_attention` and :func:`packed_multi_head_attention`, take the projections in other forms. Letters
are those of PyTorch's documentation: N batch, H heads, Hkv key/value heads, L query length, S key length, E embedding,
D query/key head dimension, Dv value head dimension.

Attention is that of Vaswani et al., "Attention Is All You Need" (2017), section 3.2, computed tile by tile with an
online softmax as in Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022),
algorithm 1, so that no tensor of N * H * L * S elements is made unless per-head weights are asked for.

Masks, at every door: a bool mask hides where it is True; a floating mask, of any floating dtype, is added to the scaled
score; -inf hides exactly as True does. What is hidden is not read: a NaN there changes nothing and gets gradient 0. A
row that sees no key gives output 0, weights 0 and gradient 0.
"""

import torch
from torch import Tensor

from fused_mha.formulations import multi_head_attention, packed_multi_head_attention

__all__ = [
    "additive_attention",
    "additive_attention_with_weights",
    "attention",
    "attention_varlen",
    "attention_with_lse",
    "attention_with_weights",
    "draw_rng_state",
    "dropout_mask",
    "multi_head_attention",
    "multi_head_attention_forward",
    "packed_multi_head_attention",
]

_ops = torch.ops.fused_mha


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    sink: Tensor | None = None,
) -> Tensor:
    r"""Masked scaled dot-product attention, :math:`\mathrm{softmax}(s\,QK^T + M)\,V`, fused.

    Args:
        query: (N, H, L, D). Also (N, L, D), read as one head, and (L, D), one head of one sample.
        key: (N, Hkv, S, D) where Hkv divides H (grouped queries); 3-D and 2-D as the query.
        value: (N, Hkv, S, Dv).
        key_padding_mask: (N, S), or (S) with 2-D inputs; bool (True hides the key) or floating (added).
        attn_mask: anything that broadcasts to (N, H, L, S); bool (True hides) or floating (added).
        is_causal: hide every key s > l as well, counted from where causal_alignment says.
        dropout_p: probability with which a weight becomes 0; those kept are divided by 1 - dropout_p. Applied whenever
            it is positive: pass 0 in evaluation.
        scale: factor of the scores; 1 / sqrt(D) by default.
        causal_alignment: "top_left", or "bottom_right", with which is_causal hides s > l + S - L, so that the last
            query sees every key, as queries do that continue a sequence whose keys are kept.
        sink: (H), floating: adds exp(sink[h]) to the softmax's denominator, as one more key would that has this score
            and the value 0. Zeros make the "softmax plus one" of Miller, "Attention is off by one" (2023).

    Any strides are read as they are, also 0 and those of a transposed (N, L, H, D). dtypes: float32, float64, bfloat16,
    float16, the same for the three inputs; sums are kept in float32 (float64 for float64). N, H, L and S may be 0.

    Returns:
        (N, H, L, Dv) in the query's dtype and memory order (with the query's number of dimensions).

    Differentiable in query, key, value, sink and in both masks where they are floating.

    Raises:
        RuntimeError, ValueError: shapes, devices or dropout_p that do not fit, with the shape expected and the one got.
        TypeError: a mask that is neither bool nor floating, or inputs of a dtype that is not supported.

    Example::

        >>> query, key, value = (torch.randn(2, 8, 5, 16) for _ in range(3))
        >>> padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> fused_mha.functional.attention(query, key, value, key_padding_mask=padding, is_causal=True).shape
        torch.Size([2, 8, 5, 16])
    """
    result: Tensor = _ops.attention(
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        causal_alignment=causal_alignment,
        sink=sink,
    )
    return result


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    sink: Tensor | None = None,
) -> Tensor:
    r"""Attention in each of N sequences that lie one behind the other, without padding.

    Args:
        query: (total_q, H, D): sequence n has the rows cu_seqlens_q[n] to cu_seqlens_q[n + 1].
        key: (total_k, Hkv, D) where Hkv divides H: sequence n has the keys cu_seqlens_k[n] to cu_seqlens_k[n + 1].
        value: (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (N + 1), int32 or int64: the sums of the lengths so far, from 0 to the totals, on
            the device of the query. Sequences may be empty.
        is_causal, dropout_p, scale, causal_alignment, sink: as :func:`attention` has them; causality is counted in
            each sequence, and so are the places on which dropout depends: it drops what it would drop in a padded
            batch.

    One run of the kernels computes all sequences; nothing is padded, copied or repeated, forward or backward, and any
    strides are read as they are. Second-order and forward-mode derivatives go through a padded batch.

    Returns:
        (total_q, H, Dv) in the query's dtype and memory order. A sequence without keys gives zeros.

    Raises:
        RuntimeError, ValueError, TypeError: arguments that do not fit, naming what was expected.

    Example: sequences of 3 and 5::

        >>> query, key, value = torch.randn(8, 2, 4), torch.randn(8, 2, 4), torch.randn(8, 2, 4)
        >>> cu_seqlens = torch.tensor([0, 3, 8])
        >>> output = fused_mha.functional.attention_varlen(query, key, value, cu_seqlens, cu_seqlens, is_causal=True)
        >>> output.shape
        torch.Size([8, 2, 4])
    """
    output: Tensor = _ops.attention_varlen(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        causal_alignment=causal_alignment,
        sink=sink,
    )
    return output


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""As :func:`attention`, and the log-sum-exp of each row's scores beside the output.

    Returns:
        The output, and (N, H, L), float32 (float64 for float64): the natural logarithm of what the row was divided by,
        :math:`\log(\sum_s e^{\mathrm{score}_s} + e^{\mathrm{sink}})` over visible keys, without H and N where the
        inputs have none. A row that sees nothing has -inf. Gradients flow through both results. Parts of the keys that
        were attended to apart can be merged by it:

    Example::

        >>> query, key, value = torch.randn(2, 8, 5, 16), torch.randn(2, 8, 9, 16), torch.randn(2, 8, 9, 16)
        >>> parts = [fused_mha.functional.attention_with_lse(query, key[:, :, part], value[:, :, part])
        ...          for part in (slice(0, 4), slice(4, 9))]
        >>> shares = torch.stack([lse for _, lse in parts]).softmax(0)
        >>> merged = sum(share.unsqueeze(-1) * output for share, (output, _) in zip(shares, parts))
        >>> torch.allclose(merged, fused_mha.functional.attention(query, key, value), atol=1e-5)
        True
    """
    output, lse = _ops.attention_with_lse(
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        causal_alignment=causal_alignment,
        sink=sink,
    )
    return output, lse


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    average_attn_weights: bool = True,
    causal_alignment: str = "top_left",
    sink: Tensor | None = None,
    weights_before_dropout: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""As :func:`attention`, and the attention weights beside the output.

    Args:
        average_attn_weights: return the mean over heads, (N, L, S), computed without a tensor of N * H * L * S
            elements; otherwise the weights of each head, (N, H, L, S).
        weights_before_dropout: return the weights that dropout is yet to act on; the output is the same.

    The other arguments, the dtypes and the errors are those of :func:`attention`.

    Returns:
        The output, and the weights in the query's dtype. Weights are those that multiplied the values: after dropout,
        as in ``torch.nn.MultiheadAttention``, so with dropout_p > 0 a row need not sum to 1, unless
        weights_before_dropout; nor with a sink, which takes its share. A row that sees no key has weights 0. Gradients
        flow through both results.

    Example::

        >>> x = torch.randn(2, 8, 5, 16)
        >>> output, weights = fused_mha.functional.attention_with_weights(x, x, x, is_causal=True)
        >>> weights.shape, bool(weights.triu(1).any())
        (torch.Size([2, 5, 5]), False)
    """
    output, weights = _ops.attention_with_weights(
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        average_attn_weights=average_attn_weights,
        causal_alignment=causal_alignment,
        sink=sink,
        weights_before_dropout=weights_before_dropout,
    )
    return output, weights


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""Masked attention with additive (Bahdanau) scores, fused.

    .. math:: \mathrm{score}_{ls} = \sum_d v_d \tanh(q_{ld} + k_{sd}) + M_{ls}, \qquad
              \mathrm{output} = \mathrm{softmax}(\mathrm{score})\,V

    (Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and Translate", 2015, appendix
    A.1.2.) The features q and k are what the projections of queries and keys gave, ``F.linear(queries, W_q)`` and
    ``F.linear(keys, W_k)``; a bias, if there is one, belongs in either. :class:`fused_mha.AdditiveAttention` has them.

    Args:
        query: features of the queries, (N, H, L, D). Also (N, L, D), read as one head, and (L, D), one head of one
            sample.
        key: features of the keys, (N, Hkv, S, D) where Hkv divides H; 3-D and 2-D as the query.
        value: (N, Hkv, S, Dv).
        score_weight: v, (D), shared by all heads, or (H, D); in the dtype of query.
        key_padding_mask, attn_mask, is_causal, dropout_p: as for :func:`attention`. Scores are not scaled.

    Strides, dtypes and sizes of 0 are those of :func:`attention`. The sums q + k are never stored, not forward and not
    backward: where there are more than two queries, no exponential is taken for a pair of query and key either, since
    tanh(q + k) = 1 - 2 / (1 + exp(2q) exp(2k)), to 2 epsilons.

    Returns:
        (N, H, L, Dv) in the query's dtype and memory order (with the query's number of dimensions).

    Differentiable in query, key, value, score_weight and in both masks where they are floating. Second-order and
    forward-mode derivatives are right, too, but made of tensors of N * H * L * S * D elements.

    Raises:
        RuntimeError, ValueError, TypeError: as :func:`attention`, naming the argument.

    Example::

        >>> query, key, value = torch.randn(2, 3, 16), torch.randn(2, 5, 16), torch.randn(2, 5, 8)
        >>> padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> fused_mha.functional.additive_attention(
        ...     query, key, value, torch.randn(16), key_padding_mask=padding).shape
        torch.Size([2, 3, 8])
    """
    result: Tensor = _ops.additive_attention(
        query,
        key,
        value,
        score_weight,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
    )
    return result


def additive_attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    average_attn_weights: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""As :func:`additive_attention`, and the attention weights (the alignment) beside the output.

    Args:
        average_attn_weights: return the mean over heads, (N, L, S); otherwise the weights of each head, (N, H, L, S).

    The other arguments, the dtypes and the errors are those of :func:`additive_attention`; what is returned, and when
    it has no N or H, is as for :func:`attention_with_weights`.

    Example::

        >>> query, key = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
        >>> output, weights = fused_mha.functional.additive_attention_with_weights(query, key, key, torch.randn(16))
        >>> output.shape, weights.shape
        (torch.Size([2, 3, 16]), torch.Size([2, 3, 5]))
    """
    output, weights = _ops.additive_attention_with_weights(
        query,
        key,
        value,
        score_weight,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        average_attn_weights=average_attn_weights,
    )
    return output, weights


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""In-projections, fused attention, out-projection: ``torch.nn.functional.multi_head_attention_forward``, fused.

    The arguments are those of the stock function, in its order and with its defaults, and one more, batch_first:

    Args:
        query: (L, N, E), (N, L, E) with batch_first, or (L, E) unbatched.
        key: (S, N, Ek), (N, S, Ek) or (S, Ek); Ek = E unless use_separate_proj_weight.
        value: (S, N, Ev), (N, S, Ev) or (S, Ev); Ev = E unless use_separate_proj_weight.
        key_padding_mask: (N, S), or (S) unbatched; bool or floating.
        attn_mask: (L, S), (N * H, L, S), or anything that broadcasts to (N, H, L, S); bool or floating.
        is_causal: causal attention where no attn_mask is given. Where one is given the mask alone decides.
        batch_first: batched inputs and the output have N before L.

    The keys that bias_k and add_zero_attn append are visible to every row, whatever the masks and causality say.

    Returns:
        The output in the layout of the query, and the weights (after dropout) if need_weights, else None: (N, L, S) or,
        with average_attn_weights=False, (N, H, L, S); without N where the input is unbatched.

    Raises:
        RuntimeError, ValueError, TypeError: as :func:`attention`, naming the argument.

    Example::

        >>> x = torch.randn(5, 2, 8)
        >>> w, b = torch.randn(24, 8), torch.zeros(24)
        >>> output, weights = fused_mha.functional.multi_head_attention_forward(
        ...     x, x, x, 8, 2, w, b, None, None, False, 0.0, torch.eye(8), None)
        >>> output.shape, weights.shape
        (torch.Size([5, 2, 8]), torch.Size([2, 5, 5]))
    """
    output, weights = _ops.multi_head_attention_forward(
        query,
        key,
        value,
        embed_dim_to_check,
        num_heads,
        in_proj_weight,
        in_proj_bias,
        bias_k,
        bias_v,
        add_zero_attn,
        dropout_p,
        out_proj_weight,
        out_proj_bias,
        training,
        key_padding_mask,
        need_weights,
        attn_mask,
        use_separate_proj_weight,
        q_proj_weight,
        k_proj_weight,
        v_proj_weight,
        static_k,
        static_v,
        average_attn_weights,
        is_causal,
        batch_first,
    )
    return output, weights


def dropout_mask(rng_state: Tensor, N: int, H: int, L: int, S: int, dropout_p: float) -> Tensor:
    r"""Which weights dropout keeps: for tests, and to look into a run with dropout.

    Args:
        rng_state: (2) int64, as :func:`draw_rng_state` returns it.
        N, H, L, S: sizes of the mask. An element depends on its own place only, so a larger mask holds a smaller one. S
            counts the keys that add_bias_kv and add_zero_attn append.
        dropout_p: probability with which a weight is dropped.

    Returns:
        (N, H, L, S) bool, True = kept (and divided by 1 - dropout_p). The bits come from Philox4x32 (Salmon et al.,
        "Parallel random numbers: as easy as 1, 2, 3", 2011) with the counter made of (n, h, l, s) and the key of the
        state: the same for every device, instruction set and number of threads.

    Example: the very mask that a call used::

        >>> x = torch.randn(1, 1, 4, 8)
        >>> _ = torch.manual_seed(0)
        >>> _, weights = fused_mha.functional.attention_with_weights(x, x, x, dropout_p=0.5)
        >>> _ = torch.manual_seed(0)
        >>> keep = fused_mha.functional.dropout_mask(fused_mha.functional.draw_rng_state(), 1, 1, 4, 4, 0.5)
        >>> torch.equal(keep[0], weights > 0)
        True
    """
    mask: Tensor = _ops.dropout_mask(rng_state, N, H, L, S, dropout_p)
    return mask


def draw_rng_state(
    device: torch.device | str | int | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    r"""Draw the state that makes one call's dropout mask, exactly as a call with dropout_p > 0 draws it.

    Args:
        device: where the state lies: that of the query. The CPU (or torch's default device) where omitted.
        generator: drawn from instead of the device's default generator.

    Returns:
        (2) int64: {seed, offset}. The generator has then advanced as a call would have advanced it, so
        ``torch.manual_seed`` before this function and before a call gives both the same state.
    """
    return torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64, device=device, generator=generator)
