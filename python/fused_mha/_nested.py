# SPDX-License-Identifier: BSD-3-Clause
"""Nested tensors in and out of the padded form: (N, length of each sample, E) <-> (N, longest, E) and lengths (N).

Both layouts, torch.strided and torch.jagged; both ways are differentiable. Those for the strided layout, which is all
that TorchScript knows, can be scripted.
"""

import torch
from torch import Tensor


def lengths_strided(nested: Tensor) -> Tensor:
    sizes: Tensor = nested._nested_tensor_size()
    return sizes[:, 0].to(nested.device)


def to_padded_strided(nested: Tensor) -> Tensor:
    padded: Tensor = nested.to_padded_tensor(0.0)
    return padded


def from_padded_strided(padded: Tensor, like: Tensor) -> Tensor:
    sizes: Tensor = like._nested_tensor_size().clone()
    sizes[:, 1] = padded.size(-1)
    return torch._nested_from_padded(padded.contiguous(), sizes)


def lengths(nested: Tensor) -> Tensor:
    """Length of each sample, (N) int64 on the tensor's device."""
    if nested.layout != torch.jagged:
        return lengths_strided(nested)
    given: Tensor | None = nested.lengths()  # type: ignore[attr-defined]
    if given is not None:
        return given
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]
    return offsets.diff()


def padding(sample_lengths: Tensor, longest: int) -> Tensor:
    """(N, longest) bool, True beyond each sample's end: a key padding mask."""
    hidden: Tensor = torch.arange(longest, device=sample_lengths.device) >= sample_lengths.unsqueeze(1)
    return hidden


def hidden_from_bottom_right(
    query_lengths: Tensor, key_lengths: Tensor, longest_query: int, longest_key: int
) -> Tensor:
    """(N, 1, L, S) bool, True where causality hides that counts from the ends of each sample's query and key."""
    keys = torch.arange(longest_key, device=key_lengths.device)
    rows = torch.arange(longest_query, device=key_lengths.device).unsqueeze(1)
    hidden: Tensor = keys > rows + (key_lengths - query_lengths).view(-1, 1, 1)
    return hidden.unsqueeze(1)


def hide_weights(weights: Tensor | None, sample_lengths: Tensor) -> Tensor | None:
    """Weights (N, L, S) or (N, H, L, S) with zeros in the rows beyond each sample's end."""
    if weights is None:
        return None
    no_query = padding(sample_lengths, weights.size(-2)).unsqueeze(-1)
    return weights.masked_fill(no_query if weights.dim() == 3 else no_query.unsqueeze(1), 0.0)


def to_padded(nested: Tensor) -> Tensor:
    """(N, longest, E), zeros beyond each sample's end."""
    padded: Tensor = torch.nested.to_padded_tensor(nested, 0.0)
    return padded


def from_padded(padded: Tensor, like: Tensor) -> Tensor:
    """A nested tensor of like's layout and sample lengths; what lies beyond a sample's end is dropped."""
    if like.layout != torch.jagged:
        return from_padded_strided(padded, like)
    if like.lengths() is not None:  # type: ignore[attr-defined]
        like = like.contiguous()
    # The very offsets of `like`: they are what makes two jagged tensors the same shape, so that sums of them work.
    offsets: Tensor = like.offsets()  # type: ignore[attr-defined]
    total = like.values().size(0)
    batch = torch.arange(padded.size(0), device=padded.device)
    sample = torch.repeat_interleave(batch, offsets.diff(), output_size=total)
    position = torch.arange(total, device=padded.device) - offsets[sample]
    return torch.nested.nested_tensor_from_jagged(padded[sample, position], offsets)
