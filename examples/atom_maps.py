# SPDX-License-Identifier: BSD-3-Clause
"""Which atom of a product comes from which of the reactants, read from attention weights: its own and fused attention.

    pip install --group examples && pip install --no-deps --group examples-alone
    python examples/atom_maps.py

RXNMapper (Schwaller et al., "Extraction of organic chemistry grammar from unsupervised learning of chemical reactions",
2021) is an ALBERT trained on reactions; one head of its tenth layer happens to follow atoms, and the map is read from
that head's weights. The package carries the trained weights; nothing is fetched from anywhere. What is replaced here
is the attention; the scoring of its weights is the package's.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import fused_mha.integrations.transformers
import rxnmapper
import side_by_side
import torch
from rxnmapper.tokenization_smiles import BasicSmilesTokenizer, load_vocab
from torch import Tensor, nn
from transformers import AlbertModel
from transformers.utils import logging

REACTIONS = [
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
    "CCO.CC(=O)O>>CC(=O)OCC",
    "O=C(Cl)c1ccccc1.NCc1ccccc1>>O=C(NCc1ccccc1)c1ccccc1",
    "CN.CC=O.[BH3-]C#N.[Na+]>>CCNC",
    "Brc1ccccc1.OB(O)c1ccncc1>>c1ccc(-c2ccncc2)cc1",
    "CC(=O)CC(C)=O.NNc1ccccc1>>Cc1cc(C)n(-c2ccccc2)n1",
    "C=CC=C.C=CC(=O)OC>>COC(=O)C1CC=CCC1",
]
# What the package's own description gives for the first two.
PUBLISHED_CONFIDENCES = [0.9565619900376546, 0.9704424331552834]


class SmilesTokens:
    """Tokens and their numbers as the model was trained with.

    The package's own tokenizer is a subclass of one that transformers 5 no longer has in that form.
    """

    cls_token, sep_token = "[CLS]", "[SEP]"

    def __init__(self, vocabulary: str) -> None:
        self.numbers = load_vocab(vocabulary)
        self.basic_tokenizer = BasicSmilesTokenizer()

    def batch_encode_plus(self, reactions: list[str], **_: object) -> dict[str, Tensor]:
        rows = [[self.cls_token, *self.basic_tokenizer.tokenize(r), self.sep_token] for r in reactions]
        ids = torch.full((len(rows), max(map(len, rows))), self.numbers["[PAD]"])
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor([self.numbers.get(t, self.numbers["[UNK]"]) for t in tokens])
        kept = torch.tensor([[i < len(tokens) for i in range(ids.shape[1])] for tokens in rows])
        return {"input_ids": ids, "attention_mask": kept.long()}


class WithWeights(nn.Module):
    """A model asked for its attention weights, as a tuple: what RXNMapper calls."""

    def __init__(self, model: AlbertModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, **inputs: Tensor) -> tuple[object, ...]:
        outputs = self.model(**inputs, output_attentions=True)
        return outputs.last_hidden_state, outputs.pooler_output, outputs.attentions


class Mapper(rxnmapper.RXNMapper):
    def __init__(self, attention: str) -> None:
        self.attention = attention
        super().__init__()

    def _load_model_and_tokenizer(self) -> tuple[nn.Module, SmilesTokens]:
        model = AlbertModel.from_pretrained(self.model_path, attn_implementation=self.attention)
        return WithWeights(model).eval(), SmilesTokens(os.path.join(self.model_path, "vocab.txt"))


def two_mappers() -> tuple[Mapper, Mapper]:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    fused_mha.integrations.transformers.register()
    return Mapper("eager"), Mapper("fused_mha")  # the one line


def run(reactions: list[str], seconds: float) -> bool:
    """Print everything; True where both sides give the same maps, and those that are known."""
    stock, fused = two_mappers()
    expected, found = (mapper.get_attention_guided_atom_maps(reactions) for mapper in (stock, fused))

    same = True
    for reaction, theirs, ours in zip(reactions, expected, found, strict=True):
        same &= theirs["mapped_rxn"] == ours["mapped_rxn"]
        same &= abs(theirs["confidence"] - ours["confidence"]) < 1e-4
        print(f"{reaction}\n  {ours['mapped_rxn']}\n  confidence {theirs['confidence']:.6f} {ours['confidence']:.6f}")
    print(f"\nmaps and confidences are {'the same' if same else 'DIFFERENT'}")
    for confidence, result in zip(PUBLISHED_CONFIDENCES, found, strict=False):
        same &= abs(confidence - result["confidence"]) < 1e-3
        print(f"published {confidence:.6f}, found {result['confidence']:.6f}")

    # The tilde between molecules is what the model was trained with; the package puts it there itself.
    batch = stock.tokenizer.batch_encode_plus([r.replace(".", "~") for r in reactions] * 8)

    @torch.no_grad()
    def weights(mapper: Mapper) -> Tensor:
        return mapper.model(**batch)[2][mapper.layers[0]][:, mapper.head]

    kept = batch["attention_mask"].bool()
    visible = kept[:, :, None] & kept[:, None, :]
    parity = side_by_side.difference(weights(fused)[visible], weights(stock)[visible])
    name = f"{len(kept)} reactions, {kept.shape[1]} long, weights"
    row = side_by_side.compare(name, lambda: weights(stock), lambda: weights(fused), seconds, parity)
    print()
    side_by_side.print_table([row])
    return same and side_by_side.all_agree([row])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two reactions")
    quick = parser.parse_args().quick
    return 0 if run(REACTIONS[:2] if quick else REACTIONS, 0.0 if quick else 5.0) else 1


if __name__ == "__main__":
    sys.exit(main())
