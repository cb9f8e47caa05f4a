# SPDX-License-Identifier: BSD-3-Clause
"""Multi-head attention in the forms in which it is taught and passed around, each on the fused operators.

:mod:`fused_mha.functional` has the two functions too. Letters are those of the rest of the package: N batch, H heads,
L query length, S key length, E embedding, D query/key head dimension, Dv value head dimension; masks mean what they
mean there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ValidLengthsAttention", "multi_head_attention", "packed_multi_head_attention"]

_forward_op = torch.ops.fused_mha.multi_head_attention_forward.default
_projected_op = torch.ops.fused_mha._multi_head_attention_projected.default
_varlen_op = torch.ops.fused_mha.attention_varlen.default


def multi_head_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    Wq: Tensor,
    Wk: Tensor,
    Wv: Tensor,
    Wo: Tensor,
    Bq: Tensor | None,
    Bk: Tensor | None,
    Bv: Tensor | None,
    Bo: Tensor | None,
    num_heads: int,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Multi-head attention with every weight an argument of its own, and every width free.

    .. math:: \mathrm{head}_h = \mathrm{softmax}(Q_h K_h^T / \sqrt{D} + M)\,V_h, \quad
              \mathrm{output} = [\mathrm{head}_1 \dots \mathrm{head}_H]\,W_o^T + B_o

    where the rows of :math:`Q W_q^T + B_q` and its like are cut into H parts (Vaswani et al., "Attention Is All You
    Need", 2017, section 3.2.2).

    Args:
        Q: (L, N, E), sequence first; (N, L, E) with batch_first; (L, E) unbatched.
        K: (S, N, Ek), (N, S, Ek) or (S, Ek).
        V: (S, N, Ev), (N, S, Ev) or (S, Ev).
        Wq: (H * D, E), as ``nn.Linear`` has it; so D follows from its shape.
        Wk: (H * D, Ek).
        Wv: (H * Dv, Ev); Dv follows.
        Wo: (Eo, H * Dv); Eo follows.
        Bq, Bk, Bv, Bo: (H * D), (H * D), (H * Dv), (Eo), or None.
        num_heads: H.
        key_mask: (N, S), or (S) unbatched: bool, True excludes the key; or floating, added to the scores.
        attn_mask: (L, S), (N * H, L, S), or anything that broadcasts to (N, H, L, S): floating, added before the
            softmax, so that -inf excludes; or bool, True excludes.
        batch_first: N before L and S.

    Returns:
        The output, (L, N, Eo) in the layout of Q, and the weights' mean over heads, (N, L, S). A query that no key is
        left for has weights 0, and so the output Bo. Gradients flow through both.

    Raises:
        RuntimeError, ValueError, TypeError: shapes and dtypes that do not fit, naming what was expected.

    Example: heads of 3 numbers that carry values of 5, an output of 7::

        >>> Q, K, V = torch.randn(3, 2, 8), torch.randn(4, 2, 6), torch.randn(4, 2, 10)
        >>> Wq, Wk, Wv, Wo = torch.randn(12, 8), torch.randn(12, 6), torch.randn(20, 10), torch.randn(7, 20)
        >>> output, weights = fused_mha.functional.multi_head_attention(
        ...     Q, K, V, Wq, Wk, Wv, Wo, None, None, None, None, num_heads=4)
        >>> output.shape, weights.shape
        (torch.Size([3, 2, 7]), torch.Size([2, 3, 4]))
    """
    _check_weights(Q, K, V, Wq, Wk, Wv, Wo, num_heads)
    context, weights = _projected_op(
        F.linear(Q, Wq, Bq),
        F.linear(K, Wk, Bk),
        F.linear(V, Wv, Bv),
        num_heads,
        None,
        None,
        False,
        0.0,
        key_mask,
        True,
        attn_mask,
        True,
        False,
        batch_first,
    )
    return F.linear(context, Wo, Bo), weights


def _check_weights(
    Q: Tensor, K: Tensor, V: Tensor, Wq: Tensor, Wk: Tensor, Wv: Tensor, Wo: Tensor, num_heads: int
) -> None:
    """The four matrices fit one another and what they multiply. What lies beyond is the operator's to check."""
    name = "fused_mha::multi_head_attention"
    if num_heads < 1:
        raise ValueError(f"{name}: num_heads must be positive, got {num_heads}")
    for label, weight in (("Wq", Wq), ("Wk", Wk), ("Wv", Wv), ("Wo", Wo)):
        if weight.dim() != 2:
            raise ValueError(f"{name}: {label} must have 2 dimensions, got shape {tuple(weight.shape)}")
    for label, weight, source, tensor in (("Wq", Wq, "Q", Q), ("Wk", Wk, "K", K), ("Wv", Wv, "V", V)):
        if tensor.dim() not in (2, 3):
            raise ValueError(
                f"{name}: {source} must have 3 dimensions, or 2 unbatched, got shape {tuple(tensor.shape)}"
            )
        if weight.size(1) != tensor.size(-1):
            raise ValueError(
                f"{name}: {label} must have as many columns as {source} is wide, {tensor.size(-1)}, got shape "
                f"{tuple(weight.shape)}. Hint: weights are as nn.Linear has them, (to, from)"
            )
        if weight.size(0) % num_heads != 0:
            raise ValueError(
                f"{name}: num_heads must divide the rows of {label}, {weight.size(0)}, got num_heads = {num_heads}"
            )
    if Wq.size(0) != Wk.size(0):
        raise ValueError(f"{name}: Wq and Wk must have as many rows, H * D, got {Wq.size(0)} and {Wk.size(0)}")
    if Wo.size(1) != Wv.size(0):
        raise ValueError(
            f"{name}: Wo must have as many columns as Wv has rows, H * Dv = {Wv.size(0)}, got shape {tuple(Wo.shape)}"
        )


def packed_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_proj_weight: Tensor,
    out_proj_weight: Tensor,
    num_heads: int,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    average_attn_weights: bool = True,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Multi-head attention from two matrices: the in-projections packed into one, the out-projection, no bias.

    Args:
        query: (L, N, E), (N, L, E) with batch_first, or (L, E) unbatched.
        key, value: (S, N, E), (N, S, E) or (S, E). Where query, key and value are one tensor, one product projects
            all three.
        in_proj_weight: (3 * E, E): the rows for the query, then the key, then the value.
        out_proj_weight: (E, E).
        num_heads: H; divides E.
        key_padding_mask, attn_mask, is_causal: as :func:`fused_mha.functional.multi_head_attention_forward`.
        dropout_p: applied whenever it is positive: pass 0 in evaluation.
        average_attn_weights: the weights' mean over heads rather than each head's.

    Returns:
        The output in the layout of the query, and the weights, (N, L, S) or (N, H, L, S).

    Example::

        >>> x = torch.randn(5, 2, 8)  # sequence, batch, E
        >>> output, weights = fused_mha.functional.packed_multi_head_attention(
        ...     x, x, x, torch.randn(24, 8), torch.eye(8), num_heads=1)
        >>> output.shape, weights.shape
        (torch.Size([5, 2, 8]), torch.Size([2, 5, 5]))
    """
    output, weights = _forward_op(
        query,
        key,
        value,
        query.size(-1),
        num_heads,
        in_proj_weight,
        None,
        None,
        None,
        False,
        dropout_p,
        out_proj_weight,
        None,
        True,
        key_padding_mask,
        True,
        attn_mask,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
        batch_first=batch_first,
    )
    return output, weights


class ValidLengthsAttention(nn.Module):
    r"""Multi-head attention whose mask is a number for each sample: so many keys, from the first on, are valid.

    The form of "Dive into Deep Learning" (Zhang et al., 2021, section 11.5), with its constructor, parameter names and
    forward arguments. What differs: a length of 0 gives zeros, where filling the scores with -1e6 gives the mean of
    all that is padded; the weights are kept only when asked for.

    For lengths of samples, (N), no mask is made: a padded batch is read as the packed sequences that it is made of
    (:func:`fused_mha.functional.attention_varlen`). Where weights are kept, on GPUs and in exported programs it is the
    mask of a byte for each key.

    Args:
        key_size, query_size, value_size: widths of what comes in.
        num_hiddens: width of the three projections and of the output; the heads share it.
        num_heads: H; divides num_hiddens.
        dropout: probability with which an attention weight is dropped in training.
        bias: give the four projections a bias.
        keep_weights: keep the weights of the last call in ``attention_weights``.
        device, dtype: of the parameters.

    Attributes:
        W_q, W_k, W_v, W_o: the projections, ``nn.Linear``.
        attention_weights: with ``keep_weights``, (N, H, L, S) of the last call, after dropout, detached; else None.

    Example: 2 samples of 4 queries and 6 keys, of which 3 and 2 are valid::

        >>> attention = fused_mha.ValidLengthsAttention(100, 100, 100, 100, 5, 0.5).eval()
        >>> queries, keys = torch.ones(2, 4, 100), torch.ones(2, 6, 100)
        >>> attention(queries, keys, keys, torch.tensor([3, 2])).shape
        torch.Size([2, 4, 100])
    """

    attention_weights: Tensor | None

    def __init__(
        self,
        key_size: int,
        query_size: int,
        value_size: int,
        num_hiddens: int,
        num_heads: int,
        dropout: float,
        bias: bool = False,
        *,
        keep_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or num_hiddens % num_heads != 0:
            raise ValueError(
                f"fused_mha::ValidLengthsAttention: num_heads must divide num_hiddens = {num_hiddens}, got {num_heads}"
            )
        self.num_heads = num_heads
        self.dropout = dropout
        self.keep_weights = keep_weights
        self.attention_weights = None
        self.W_q = nn.Linear(query_size, num_hiddens, bias, device, dtype)
        self.W_k = nn.Linear(key_size, num_hiddens, bias, device, dtype)
        self.W_v = nn.Linear(value_size, num_hiddens, bias, device, dtype)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias, device, dtype)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        r"""Attend from the queries to the valid keys.

        Args:
            queries: (N, L, query_size).
            keys: (N, S, key_size).
            values: (N, S, value_size).
            valid_lens: (N) integers, how many keys of each sample are valid; or (N, L), how many for each query; None
                where all are.

        Returns:
            (N, L, num_hiddens).

        Raises:
            TypeError, ValueError: valid_lens of another dtype or shape.
            RuntimeError: shapes that do not fit.
        """
        _check_lengths(valid_lens, queries, keys)
        q, k, v = self.W_q(queries), self.W_k(keys), self.W_v(values)
        dropout_p = self.dropout if self.training else 0.0
        if valid_lens is not None and not self.keep_weights and _is_packed(valid_lens, q, k, v):
            context, weights = _attend_to_first_keys(q, k, v, self.num_heads, valid_lens, dropout_p), None
        else:
            key_padding_mask, attn_mask = _masks_of_lengths(valid_lens, keys)
            context, weights = _projected_op(
                q,
                k,
                v,
                self.num_heads,
                None,
                None,
                False,
                dropout_p,
                key_padding_mask,
                self.keep_weights,
                attn_mask,
                False,
                False,
                True,
            )
        self.attention_weights = weights.detach() if weights is not None and self.keep_weights else None
        output: Tensor = self.W_o(context)
        return output

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, dropout={self.dropout}, keep_weights={self.keep_weights}"


def _check_lengths(valid_lens: Tensor | None, queries: Tensor, keys: Tensor) -> None:
    if valid_lens is None:
        return
    name = "fused_mha::ValidLengthsAttention"
    if valid_lens.dtype == torch.bool or valid_lens.is_floating_point() or valid_lens.is_complex():
        raise TypeError(f"{name}: valid_lens must be integers, got {valid_lens.dtype}")
    if queries.dim() != 3 or keys.dim() != 3:
        raise ValueError(
            f"{name}: queries and keys must have 3 dimensions, (N, L, E) and (N, S, E), got shapes "
            f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    shape = tuple(queries.shape[:2])
    # The tracer warns of sizes that are looked at; those of the example are no rule for other calls anyway.
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    if not is_traced and tuple(valid_lens.shape) not in (shape[:1], shape):
        raise ValueError(
            f"{name}: valid_lens must have shape (N) = {shape[:1]} or (N, L) = {shape}, got {tuple(valid_lens.shape)}"
        )


def _masks_of_lengths(valid_lens: Tensor | None, keys: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Key padding mask (N, S) or attention mask (N, 1, L, S), bool, one of them None: a byte for each key."""
    if valid_lens is None:
        return None, None
    hidden = torch.arange(keys.size(1), device=valid_lens.device) >= valid_lens.unsqueeze(-1)
    return (hidden, None) if valid_lens.dim() == 1 else (None, hidden.unsqueeze(1))


def _is_exporting() -> bool:
    """Whether torch.export traces the call, strictly or not. Code that torch.compile of torch 2.11 traces has a
    constant in place of is_exporting(): true."""
    return torch.compiler._is_exporting_flag


def _is_packed(valid_lens: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call can go to the operator for packed sequences, which needs no mask.

    It has no CUDA kernels and no translation to ONNX. Shapes that do not fit are the other operator's to refuse.
    """
    return (
        valid_lens.dim() == 1
        and query.device.type == "cpu"
        and not _is_exporting()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        and value.dim() == 3
        and query.size(0) == key.size(0)
        and key.shape[:2] == value.shape[:2]
    )


def _attend_to_first_keys(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, valid_lens: Tensor, dropout_p: float
) -> Tensor:
    """Attention of the projected (N, L, H * D) to the first valid_lens[n] of (N, S, H * D): (N, L, H * Dv).

    A padded batch lies in memory as packed sequences do, two for each sample: one has its queries and its valid keys,
    the other what is left of its keys and no query.
    """
    N, L, S = query.size(0), query.size(1), key.size(1)
    samples = torch.arange(N, device=valid_lens.device)
    zero = samples.new_zeros(1)
    first_keys = samples * S
    last_keys = first_keys + valid_lens.to(torch.int64).clamp(0, S)
    cu_seqlens_q = torch.cat([zero, ((samples + 1) * L).repeat_interleave(2)])
    cu_seqlens_k = torch.cat([zero, torch.stack([last_keys, first_keys + S], 1).flatten()])
    packed = (x.reshape(N * x.size(1), num_heads, x.size(2) // num_heads) for x in (query, key, value))
    output: Tensor = _varlen_op(*packed, cu_seqlens_q, cu_seqlens_k, dropout_p=dropout_p)
    return output.reshape(N, L, value.size(-1))
