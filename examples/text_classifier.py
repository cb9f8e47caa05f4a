# SPDX-License-Identifier: BSD-3-Clause
"""Train a text classifier twice, with stock attention and with fused attention, and put the two side by side.

The text is Python's own language reference, as the interpreter carries it (``pydoc_data.topics``): the model reads a
passage of uneven length and says which chapter it is from. Both sides start from the same weights and the same seed and
see the same padded batches, with a key padding mask, a banded attention mask and dropout. The fused side is the stock
model after one call of ``fused_mha.replace_multihead_attention``.

    python examples/text_classifier.py            # one to two minutes on two cores; writes demo.png
    python examples/text_classifier.py --quick    # the same in a few seconds, on a smaller model
"""

import argparse
import contextlib
import copy
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import fused_mha
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, UNKNOWN = 0, 1
FAST_PATH = "  with stock's fast path"
TOKEN = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")


@dataclass(frozen=True)
class Setup:
    chapters: int = 8
    vocabulary: int = 2000
    longest: int = 256
    width: int = 128
    heads: int = 8
    layers: int = 2
    band: int = 64  # a token sees this many tokens to each side
    dropout: float = 0.1
    batch: int = 16
    steps: int = 120
    learning_rate: float = 3e-3
    seed: int = 0


QUICK = Setup(chapters=4, vocabulary=500, longest=64, width=32, heads=4, band=16, batch=8, steps=12)


# ---------------------------------------------------------------------------------------------------------------- data


@dataclass
class Passage:
    words: list[str]
    chapter: int


class Text:
    """Passages of the largest chapters; the last fifth of each chapter is held out."""

    def __init__(self, setup: Setup) -> None:
        self.chapters: list[str] = []
        self.train: list[Passage] = []
        self.held_out: list[Passage] = []
        seen: set[str] = set()
        for name, text in sorted(topics.items(), key=lambda item: -len(item[1])):
            paragraphs = [p for p in re.split(r"\n\s*\n", text) if len(p) > 40]
            if sum(p in seen for p in paragraphs) > len(paragraphs) // 4:
                continue  # a part of a larger chapter
            seen.update(paragraphs)
            split = len(paragraphs) * 4 // 5
            self.train += self._passages(paragraphs[:split], len(self.chapters), setup.longest)
            self.held_out += self._passages(paragraphs[split:], len(self.chapters), setup.longest)
            self.chapters.append(name)
            if len(self.chapters) == setup.chapters:
                break
        counts = Counter(word for passage in self.train for word in passage.words)
        self.index = {word: i + 2 for i, (word, _) in enumerate(counts.most_common(setup.vocabulary - 2))}

    @staticmethod
    def _passages(paragraphs: list[str], chapter: int, longest: int) -> list[Passage]:
        """From each paragraph on, one to four paragraphs: lengths as uneven as real ones are."""
        made = []
        for i in range(len(paragraphs)):
            words = TOKEN.findall(" ".join(paragraphs[i : i + 1 + i % 4]).lower())[:longest]
            made.append(Passage(words, chapter))
        return made

    def batch(self, passages: list[Passage]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (N, S), key padding mask (N, S), True beyond a passage's end, and chapters (N)."""
        rows = [torch.tensor([self.index.get(word, UNKNOWN) for word in p.words]) for p in passages]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        return tokens, tokens == PAD, torch.tensor([p.chapter for p in passages])

    def batches(self, setup: Setup) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(setup.seed)
        while True:
            order = torch.randperm(len(self.train), generator=generator).tolist()
            for i in range(0, len(order) - setup.batch + 1, setup.batch):
                yield self.batch([self.train[j] for j in order[i : i + setup.batch]])


# --------------------------------------------------------------------------------------------------------------- model


class Classifier(nn.Module):
    def __init__(self, setup: Setup, chapters: int) -> None:
        super().__init__()
        self.band = setup.band
        self.tokens = nn.Embedding(setup.vocabulary, setup.width, padding_idx=PAD)
        self.positions = nn.Embedding(setup.longest, setup.width)
        layer = nn.TransformerEncoderLayer(
            setup.width, setup.heads, 2 * setup.width, setup.dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, setup.layers, enable_nested_tensor=False)
        self.head = nn.Linear(setup.width, chapters)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        return embedded

    def band_mask(self, length: int) -> Tensor:
        """(L, S), True beyond the band: hidden."""
        place = torch.arange(length)
        return (place - place.unsqueeze(1)).abs() > self.band

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens), mask=self.band_mask(tokens.size(1)), src_key_padding_mask=padding)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        logits: Tensor = self.head(x.sum(1) / (~padding).sum(1, keepdim=True))
        return logits


@contextlib.contextmanager
def stock_fast_path(enabled: bool) -> Iterator[None]:
    """Stock encoder layers have a kernel of their own for evaluation, which gives NaN where a row sees no key.

    Padded rows beyond the band are such, so the stock side is evaluated without it.
    """
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def without_dropout(model: Classifier) -> Classifier:
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


# ---------------------------------------------------------------------------------------------------------- one side


@dataclass
class Side:
    """One of the two runs, with a random generator of its own: interleaved, it goes as it would go alone."""

    name: str
    model: Classifier
    setup: Setup
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), self.setup.learning_rate)
        self.random = torch.Generator().manual_seed(self.setup.seed).get_state()

    def step(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        tokens, padding, chapters = batch
        torch.set_rng_state(self.random)
        start = time.perf_counter()
        loss = F.cross_entropy(self.model(tokens, padding), chapters)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.times.append(time.perf_counter() - start)
        self.random = torch.get_rng_state()
        self.losses.append(loss.item())

    @torch.no_grad()
    def recognise(self, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[int, float]:
        """How many passages of the batch are recognised, and the seconds taken."""
        tokens, padding, chapters = batch
        self.model.eval()
        with stock_fast_path(False):
            start = time.perf_counter()
            right = self.model(tokens, padding).argmax(1) == chapters
            seconds = time.perf_counter() - start
        self.model.train()
        return int(right.sum()), seconds


def two_sides(setup: Setup, text: Text) -> tuple[Side, Side, fused_mha.ReplacementReport]:
    torch.manual_seed(setup.seed)
    stock = Classifier(setup, len(text.chapters))
    fused = copy.deepcopy(stock)
    report = fused_mha.replace_multihead_attention(fused)
    return Side("stock", stock, setup), Side("fused", fused, setup), report


def train(sides: tuple[Side, Side], text: Text, setup: Setup, show: Callable[[int], None]) -> None:
    """Both sides on the same batches, step by step in turn, the first place in turn as well: noise hits both alike."""
    batches = text.batches(setup)
    for step in range(setup.steps):
        batch = next(batches)
        for side in sides if step % 2 == 0 else sides[::-1]:
            side.step(batch)
        show(step + 1)


def evaluate(sides: tuple[Side, Side], text: Text, setup: Setup) -> tuple[list[float], list[float]]:
    """Share of the held-out passages recognised and seconds taken by each side, batch by batch in turn."""
    right, seconds = [0, 0], [0.0, 0.0]
    for i in range(0, len(text.held_out), setup.batch):
        batch = text.batch(text.held_out[i : i + setup.batch])
        for k, side in enumerate(sides):
            now_right, now_seconds = side.recognise(batch)
            right[k] += now_right
            seconds[k] += now_seconds
    return [count / len(text.held_out) for count in right], seconds


def parity(stock: Classifier, fused: Classifier, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Largest differences with dropout off, relative to the largest stock value."""
    tokens, padding, chapters = batch
    outputs, gradients = [], []
    for model in (without_dropout(stock), without_dropout(fused)):
        logits = model(tokens, padding)
        F.cross_entropy(logits, chapters).backward()
        outputs.append(logits.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    with torch.no_grad(), stock_fast_path(False):
        evaluated = [copy.deepcopy(model).eval()(tokens, padding) for model in (stock, fused)]
    with torch.no_grad():
        fast = [copy.deepcopy(stock).eval()(tokens, padding), evaluated[1]]

    def difference(pair: list[Tensor]) -> float:
        return float((pair[0] - pair[1]).abs().max() / pair[0].abs().max())

    return {
        "outputs, training": difference(outputs),
        "gradients": difference(gradients),
        "outputs, evaluation": difference(evaluated),
        FAST_PATH: difference(fast),
    }


# -------------------------------------------------------------------------------------------------------------- memory


def resident(what: str) -> float:
    """MB that this process holds (VmRSS) or held at most (VmHWM)."""
    match = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) / 1024 if match else float("nan")


def print_peak_memory(name: str, setup: Setup) -> None:
    """Run one training step on the longest passages and print what it needed at its peak. For a process of its own."""
    text = Text(setup)
    stock, fused, _ = two_sides(setup, text)
    side = stock if name == "stock" else fused
    passages = sorted(text.train, key=lambda p: -len(p.words))
    side.step(text.batch(passages[-setup.batch :]))  # what is made once is made now
    batch = text.batch(passages[: setup.batch])
    before = resident("VmRSS")
    side.step(batch)
    print(resident("VmHWM") - before)


def peak_memory(name: str, quick: bool) -> float:
    if not Path("/proc/self/status").exists():
        return float("nan")
    command = [sys.executable, __file__, "--memory-of", name, *(["--quick"] if quick else [])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


# -------------------------------------------------------------------------------------------------------------- output


class Terminal:
    """Plain lines, and colour and a moving bar where the output is a terminal."""

    WIDTH = 78

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.start = time.perf_counter()

    def style(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.live else text

    def heading(self, text: str) -> None:
        print(f"\n{self.style(text, '1;36')}\n{self.style('─' * self.WIDTH, '2')}")

    def row(self, label: str, *cells: str) -> None:
        print(f"  {label:<34}" + "".join(f"{cell:>14}" for cell in cells))

    def bar(self, done: int, total: int, note: str) -> None:
        if self.live:
            filled = 30 * done // total
            bar = self.style("█" * filled, "36") + self.style("░" * (30 - filled), "2")
            print(f"\r  {bar} {done:>4}/{total}  {note}\033[K", end="" if done < total else "\n", flush=True)
        elif done == total or done % max(1, total // 6) == 0:
            print(f"  {done:>4}/{total}  {note}", flush=True)


def sparkline(values: list[float], columns: int) -> str:
    blocks = "▁▂▃▄▅▆▇█"
    size = max(1, len(values) // columns)
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]
    low, high = min(means), max(means)
    return "".join(blocks[int((value - low) / (high - low + 1e-9) * 7.999)] for value in means)


def smooth(values: list[float], span: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, i - span + 1) : i + 1]) for i in range(len(values))]


def save_picture(path: Path, sides: tuple[Side, Side], text: Text, setup: Setup) -> bool:
    """Loss curves, the masks of a batch, and the attention map of a short passage."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    model = sides[1].model.eval()
    passage = min(text.held_out, key=lambda p: abs(len(p.words) - 22))
    tokens, padding, _ = text.batch([passage])
    layer = model.encoder.layers[0]
    with torch.no_grad():
        x = layer.norm1(model.embed(tokens))
        _, weights = layer.self_attn(
            x, x, x, key_padding_mask=padding, attn_mask=model.band_mask(x.size(1)), need_weights=True
        )
    model.train()

    figure, axes = pyplot.subplot_mosaic(
        [["curves", "map"], ["padding", "map"], ["band", "map"]],
        figsize=(14, 8),
        width_ratios=[1, 1.15],
        height_ratios=[1.5, 0.8, 1.4],
        layout="constrained",
    )
    figure.suptitle("One model, trained with stock and with fused attention", fontsize=15)
    for side, colour, dash in zip(sides, ("#d1793b", "#1f6f8b"), ("-", "--"), strict=True):
        axes["curves"].plot(side.losses, color=colour, alpha=0.2, linewidth=0.8)
        label = f"{side.name}, {1e3 * statistics.median(side.times):.0f} ms a step"
        axes["curves"].plot(smooth(side.losses), dash, color=colour, label=label)
    axes["curves"].set(xlabel="step", ylabel="loss", title="Training loss (dropout on), mean of 10 steps")
    axes["curves"].legend(frameon=False)
    _, padding, _ = next(text.batches(setup))
    axes["padding"].imshow(padding.numpy(), aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1.3)
    axes["padding"].set(title="key_padding_mask of a batch (dark: hidden)", xlabel="key", ylabel="passage")
    axes["band"].imshow(
        model.band_mask(padding.size(1)).numpy(), cmap="Greys", interpolation="nearest", vmin=0, vmax=1.3
    )
    axes["band"].set(title="attn_mask (dark: hidden)", xlabel="key", ylabel="query")
    words = passage.words
    axes["map"].imshow(weights[0].numpy(), aspect="auto", cmap="viridis", interpolation="nearest")
    axes["map"].set_xticks(range(len(words)), words, rotation=90, fontsize=9)
    axes["map"].set_yticks(range(len(words)), words, fontsize=9)
    axes["map"].set(title="Attention of the first layer, mean over heads", xlabel="key", ylabel="query")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


# ---------------------------------------------------------------------------------------------------------------- main


def run(setup: Setup, quick: bool, picture: Path) -> bool:
    """Print everything; True where both sides agree."""
    terminal = Terminal()
    text = Text(setup)
    stock, fused, report = two_sides(setup, text)
    sides = (stock, fused)
    parameters = sum(p.numel() for p in stock.model.parameters())
    lengths = [len(p.words) for p in text.train]

    print(terminal.style(f"fused_mha {fused_mha.__version__}: one model, stock and fused attention side by side", "1"))
    terminal.heading("Task")
    print(f"  Which of {len(text.chapters)} chapters of Python's language reference is this passage from?")
    print(
        f"  {len(text.train)} passages to learn from, {len(text.held_out)} held out; {min(lengths)} to {max(lengths)} "
        f"tokens, median {statistics.median(lengths):.0f}"
    )
    print(
        f"  nn.TransformerEncoder: {setup.layers} layers, width {setup.width}, {setup.heads} heads, dropout "
        f"{setup.dropout}, {parameters / 1e6:.2f} million parameters"
    )
    print(f"  masks: key_padding_mask for the uneven lengths, attn_mask for a band of {setup.band} tokens to each side")
    print("  " + str(report).replace("\n", "\n  "))

    terminal.heading("Parity before training (dropout off; largest difference / largest value)")
    differences = parity(stock.model, fused.model, next(text.batches(setup)))
    for label, value in differences.items():
        note = "  stock gives NaN: some padded rows see no key" if label == FAST_PATH and value != value else ""
        print(f"  {label:<34}{value:>14.1e}{note}")

    terminal.heading(f"Training, step by step in turn ({torch.get_num_threads()} threads)")

    def show(step: int) -> None:
        now = "  ".join(f"{side.name} loss {smooth(side.losses)[-1]:.3f}" for side in sides)
        terminal.bar(step, setup.steps, now)

    train(sides, text, setup, show)
    for side in sides:
        print(f"  {side.name}  {sparkline(side.losses, 60)}")

    shares, seconds = evaluate(sides, text, setup)
    memory = [peak_memory(side.name, quick) for side in sides]
    step_ms = [1e3 * statistics.median(side.times[2:]) for side in sides]
    tail = max(1, setup.steps // 5)
    last = [statistics.fmean(side.losses[-tail:]) for side in sides]

    terminal.heading("Result")
    terminal.row("", "stock", "fused", "stock / fused")
    terminal.row("first loss", *(f"{side.losses[0]:.3f}" for side in sides))
    terminal.row(f"loss, mean of the last {tail} steps", *(f"{loss:.3f}" for loss in last))
    terminal.row("held-out passages recognised", *(f"{share:.1%}" for share in shares))
    terminal.row("training step, median", *(f"{ms:.1f} ms" for ms in step_ms), f"{step_ms[0] / step_ms[1]:.2f} x")
    terminal.row(
        "held-out eval. (no fast path)", *(f"{1e3 * s:.0f} ms" for s in seconds), f"{seconds[0] / seconds[1]:.2f} x"
    )
    ratio = f"{memory[0] / memory[1]:.2f} x" if memory[1] > 0 else ""
    terminal.row("peak memory of a training step", *(f"{mb:.0f} MB" for mb in memory), ratio)

    exact = all(value < 1e-4 for label, value in differences.items() if label != FAST_PATH)
    alike = abs(last[0] - last[1]) < 0.1 * stock.losses[0]
    terminal.heading("Verdict")
    print(f"  {'agree   ' if exact else 'DISAGREE'}  outputs and gradients, dropout off")
    print(f"  {'agree   ' if alike else 'DISAGREE'}  loss curves, dropout on (each side draws its own dropout masks)")
    if save_picture(picture, sides, text, setup):
        print(f"  picture: {picture}")
    else:
        print("  no picture: matplotlib is not installed")
    print(f"  {time.perf_counter() - terminal.start:.0f} s in all")
    return exact and alike


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and a few steps")
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="the picture to write")
    parser.add_argument("--memory-of", choices=["stock", "fused"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    setup = QUICK if arguments.quick else Setup()
    if arguments.memory_of:
        print_peak_memory(arguments.memory_of, setup)
        return 0
    return 0 if run(setup, arguments.quick, arguments.output) else 1


if __name__ == "__main__":
    sys.exit(main())
