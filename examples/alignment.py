# SPDX-License-Identifier: BSD-3-Clause
"""Additive attention at its first job: a GRU encoder-decoder that learns to read dates, and shows where it looked.

    python examples/alignment.py            # half a minute; writes alignment.png
    python examples/alignment.py --quick    # a few steps: the tests' form

The data are made on the spot by the standard library: a date between 1900 and 2099 as people write it ("3 May 1985",
"Sunday, May 03, 1985", "05/03/85" and so on) to what machines want, "1985-05-03", character by character. The decoder
is that of Bahdanau, Cho and Bengio (2015): each step asks the encoder's states, through fused_mha.AdditiveAttention,
with the decoder's last state as the query, and is fed the average. Keys are projected once a sequence, padding is a
mask, and the alignment is what the attention returns.

Beside the fused module stands the same formula in plain PyTorch: the run prints their difference on the trained model.
"""

import argparse
import calendar
import datetime
import math
import random
import time

import fused_mha
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, START = 0, 1
SOURCE_CHARACTERS = sorted(set("0123456789 ,/.-'") | set("".join([*calendar.month_name, *calendar.day_name])))
TARGET_CHARACTERS = sorted("0123456789-")
TARGET_LENGTH = len("2000-01-01")
FORMATS = (
    "{day} {month_name} {year}",
    "{day:02d} {abbreviated} {year}",
    "{month_name} {day}, {year}",
    "{weekday}, {month_name} {day:02d}, {year}",
    "{weekday}, {day} {abbreviated} {year}",
    "{month}/{day}/{year}",
    "{day:02d}.{month:02d}.{year}",
    "{abbreviated} {day:02d} '{short_year:02d}",
)


def random_pair(numbers: random.Random) -> tuple[str, str]:
    """A date in one of the formats, and the same in ISO 8601. Two digits of a year mean 19xx."""
    pattern = numbers.choice(FORMATS)
    last_year = 1999 if "short_year" in pattern else 2099
    first = datetime.date(1900, 1, 1)
    date = first + datetime.timedelta(numbers.randrange((datetime.date(last_year, 12, 31) - first).days + 1))
    words = {
        "day": date.day,
        "month": date.month,
        "year": date.year,
        "short_year": date.year % 100,
        "month_name": calendar.month_name[date.month],
        "abbreviated": calendar.month_abbr[date.month],
        "weekday": calendar.day_name[date.weekday()],
    }
    return pattern.format(**words), date.isoformat()


def encode(texts: list[str], characters: list[str]) -> Tensor:
    """(N, longest) numbers of characters, PAD behind the shorter texts."""
    number = {character: i + 2 for i, character in enumerate(characters)}
    rows = [torch.tensor([number[character] for character in text]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def decode(row: Tensor) -> str:
    return "".join(TARGET_CHARACTERS[i - 2] for i in row.tolist() if i >= 2)


class Translator(nn.Module):
    """Bidirectional GRU, GRU cell with additive attention, a readout of state and average."""

    def __init__(self, embed_dim: int, hidden: int) -> None:
        super().__init__()
        self.source = nn.Embedding(len(SOURCE_CHARACTERS) + 2, embed_dim, padding_idx=PAD)
        self.target = nn.Embedding(len(TARGET_CHARACTERS) + 2, embed_dim)
        self.encoder = nn.GRU(embed_dim, hidden, batch_first=True, bidirectional=True)
        self.first_state = nn.Linear(2 * hidden, hidden)
        self.attention = fused_mha.AdditiveAttention(hidden, 2 * hidden, hidden)
        self.cell = nn.GRUCell(embed_dim + 2 * hidden, hidden)
        self.readout = nn.Linear(3 * hidden, len(TARGET_CHARACTERS) + 2)

    def forward(self, source: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (N, 10, characters) and alignment (N, 10, S). The true target is fed back, or what is likeliest."""
        padding = source == PAD
        lengths = (~padding).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=source.size(1))
        features = self.attention.project_keys(states)
        state = torch.tanh(self.first_state(torch.cat([last[0], last[1]], -1)))
        token = source.new_full((source.size(0),), START)
        logits, alignment = [], []
        for step in range(TARGET_LENGTH):
            context, weights = self.attention(
                state.unsqueeze(1), states, states, padding, need_weights=True, key_features=features
            )
            context = context.squeeze(1)
            state = self.cell(torch.cat([self.target(token), context], -1), state)
            logits.append(self.readout(torch.cat([state, context], -1)))
            alignment.append(weights)
            token = logits[-1].argmax(-1) if target is None else target[:, step]
        return torch.stack(logits, 1), torch.cat(alignment, 1)


def batch_of(numbers: random.Random, size: int) -> tuple[Tensor, Tensor]:
    pairs = [random_pair(numbers) for _ in range(size)]
    return encode([s for s, _ in pairs], SOURCE_CHARACTERS), encode([t for _, t in pairs], TARGET_CHARACTERS)


def train(model: Translator, steps: int, batch_size: int, numbers: random.Random) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        source, target = batch_of(numbers, batch_size)
        logits, _ = model(source, target)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f}", flush=True)
    return losses


@torch.no_grad()
def share_right(model: Translator, numbers: random.Random, count: int) -> float:
    """Share of dates of which every character is right, each fed what the model itself said before."""
    source, target = batch_of(numbers, count)
    return float((model(source)[0].argmax(-1) == target).all(1).double().mean())


def plain_attention(module: fused_mha.AdditiveAttention, queries: Tensor, keys: Tensor, padding: Tensor) -> Tensor:
    """The same average by the formula: a tensor of (N, L, S, num_hiddens)."""
    features = torch.tanh(module.W_q(queries).unsqueeze(2) + module.W_k(keys).unsqueeze(1))
    scores = module.w_v(features).squeeze(-1).masked_fill(padding.unsqueeze(1), -math.inf)
    return scores.softmax(-1) @ keys


@torch.no_grad()
def difference(model: Translator, numbers: random.Random) -> float:
    source, _ = batch_of(numbers, 16)
    padding = source == PAD
    keys, _ = model.encoder(model.source(source))
    queries = torch.tanh(model.first_state(keys))
    fused, _ = model.attention(queries, keys, keys, padding)
    return float((fused - plain_attention(model.attention, queries, keys, padding)).abs().max())


@torch.no_grad()
def draw(model: Translator, texts: list[str], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from fused_mha import plot
    from matplotlib import pyplot

    logits, alignment = model(encode(texts, SOURCE_CHARACTERS))
    figure, axes = pyplot.subplots(len(texts), 1, figsize=(9, 4.2 * len(texts)), layout="constrained", squeeze=False)
    for i, text in enumerate(texts):
        plot.alignment(alignment, list(text), list(decode(logits[i].argmax(-1))), sample=i, ax=axes[i, 0])
    figure.savefig(path, dpi=110)
    print(f"alignment of {', '.join(repr(text) for text in texts)}: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and a few steps")
    parser.add_argument("--output", default="alignment.png", help="the picture to write")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    numbers = random.Random(0)
    model = Translator(16, 32) if arguments.quick else Translator(32, 128)
    began = time.perf_counter()
    losses = train(model, 60 if arguments.quick else 400, 64, numbers)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {time.perf_counter() - began:.0f} s")
    model.eval()
    held_out = random.Random(1)
    right = share_right(model, held_out, 100 if arguments.quick else 1000)
    print(f"dates read right: {100 * right:.1f} %")
    error = difference(model, held_out)
    print(f"largest difference to the formula in plain PyTorch: {error:.1e}")
    draw(model, ["Sunday, May 03, 1985", "Sep 09 '42"], arguments.output)

    assert error < 1e-5
    assert losses[-1] < 0.75 * losses[0]
    assert arguments.quick or right > 0.95


if __name__ == "__main__":
    main()
