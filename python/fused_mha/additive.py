# SPDX-License-Identifier: BSD-3-Clause
"""Additive attention as a module."""

import torch
from torch import Tensor, nn

from fused_mha.module import _why_called

__all__ = ["AdditiveAttention"]


class AdditiveAttention(nn.Module):
    r"""Attention with additive (Bahdanau) scores, fused: :math:`\mathrm{score}_{ls} = v^\top \tanh(W_q q_l + W_k k_s)`.

    (Bahdanau, Cho and Bengio, 2015, appendix A.1.2.) Queries and keys may differ in width; values are averaged as they
    are, by the softmax of the scores. See :func:`fused_mha.functional.additive_attention` for the kernel and
    ``docs/additive_attention.md`` for a model built on it.

    Args:
        query_size: width of the queries.
        key_size: width of the keys.
        num_hiddens: width of the features that queries and keys are projected to.
        dropout: probability with which a weight becomes 0 in training.
        bias: add a bias inside the tanh (to the projected queries). The paper has none.
        device, dtype: of the parameters.

    The parameters are ``W_q.weight`` (num_hiddens, query_size), ``W_k.weight`` (num_hiddens, key_size) and
    ``w_v.weight`` (1, num_hiddens), initialised as ``nn.Linear`` does.

    Example::

        >>> attention = fused_mha.AdditiveAttention(query_size=20, key_size=2, num_hiddens=8)
        >>> queries, keys, values = torch.randn(2, 1, 20), torch.randn(2, 10, 2), torch.randn(2, 10, 4)
        >>> padding = torch.arange(10) >= torch.tensor([[2], [6]])  # True hides
        >>> output, weights = attention(queries, keys, values, key_padding_mask=padding, need_weights=True)
        >>> output.shape, weights.shape, bool(weights[0, 0, 2:].any())
        (torch.Size([2, 1, 4]), torch.Size([2, 1, 10]), False)
    """

    query_size: int
    key_size: int
    num_hiddens: int
    dropout: float

    def __init__(
        self,
        query_size: int,
        key_size: int,
        num_hiddens: int,
        dropout: float = 0.0,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"AdditiveAttention: dropout must be in [0, 1], got {dropout}")
        self.query_size = query_size
        self.key_size = key_size
        self.num_hiddens = num_hiddens
        self.dropout = dropout
        self.W_q = nn.Linear(query_size, num_hiddens, bias=bias, device=device, dtype=dtype)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=False, device=device, dtype=dtype)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False, device=device, dtype=dtype)

    def project_keys(self, keys: Tensor) -> Tensor:
        """The keys' features, (N, S, num_hiddens): for a decoder that asks the same keys step after step."""
        features: Tensor = self.W_k(keys)
        return features

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
        key_features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Averages of the values.

        Args:
            queries: (N, L, query_size).
            keys: (N, S, key_size).
            values: (N, S, Dv), of any width.
            key_padding_mask: (N, S), bool (True hides) or floating (added to the scores).
            attn_mask: anything that broadcasts to (N, L, S), bool or floating.
            need_weights: return the weights as well. Asking for them costs (N, L, S) numbers.
            key_features: what :meth:`project_keys` gave for ``keys``, which are then not looked at.

        Returns:
            (N, L, Dv), and the weights (N, L, S) after dropout, or None. Rows that see no key are 0.
        """
        query_features = self.W_q(queries)
        if key_features is None:
            key_features = self.project_keys(keys)
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            # TorchScript cannot ask what w_v is; this way is right for all of them.
            score_weight = self.w_v(_identity(query_features)).squeeze(-1)
        else:
            score_weight = _score_weight(self.w_v, query_features)
        dropout_p = self.dropout if self.training else 0.0
        # The operators themselves: torch.jit.script takes no Python function with keyword-only defaults.
        if need_weights:
            output, weights = torch.ops.fused_mha.additive_attention_with_weights(
                query_features,
                key_features,
                values,
                score_weight,
                key_padding_mask=key_padding_mask,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
            )
            return output, weights
        output = torch.ops.fused_mha.additive_attention(
            query_features,
            key_features,
            values,
            score_weight,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
        )
        return output, None

    def extra_repr(self) -> str:
        return f"{self.query_size}, {self.key_size}, {self.num_hiddens}, dropout={self.dropout}"


def _identity(features: Tensor) -> Tensor:
    return torch.eye(features.size(-1), dtype=features.dtype, device=features.device)


def _score_weight(w_v: nn.Module, features: Tensor) -> Tensor:
    """(D). Where something hangs on w_v it is called, with the rows of the identity, whose images are its weights."""
    if _why_called(w_v, "w_v"):
        called: Tensor = w_v(_identity(features)).squeeze(-1)
        return called
    parameter = w_v._parameters["weight"]
    assert parameter is not None
    return parameter.squeeze(0)
