# SPDX-License-Identifier: BSD-3-Clause
"""Random configurations of the module, tiny ones too: this library against the best of stock nn.MultiheadAttention.

    python benchmarks/random_modules.py --count 300

Stock may choose: with its fast path or without it, whichever is quicker. Both sides get the same call on the same
tensors and hold the same parameters. A configuration that falls short is timed once more, longer, before it is listed.
Exit status: 1 where any falls short.
"""

import argparse
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fused_mha
import timing
import torch
from cases import padding_mask
from torch import Tensor, nn

MOST_SCORES = 2**24  # N * H * L * S, so that 300 configurations take minutes
HEAD_DIMS = (4, 8, 16, 24, 32, 40, 64, 80, 96, 128)


@dataclass(frozen=True)
class Configuration:
    index: int
    N: int
    L: int
    S: int
    H: int
    D: int
    dtype: str
    training: bool
    grad: bool
    need_weights: bool
    average_attn_weights: bool
    batch_first: bool
    self_attention: bool
    padding: str
    kept: float
    attn_mask: str
    dropout: float
    bias: bool
    add_bias_kv: bool
    add_zero_attn: bool

    def __str__(self) -> str:
        flags = [name for name, value in asdict(self).items() if value is True and name != "average_attn_weights"]
        if self.need_weights and not self.average_attn_weights:
            flags.append("per head")
        if self.padding:
            flags.append(f"{self.padding} padding kept={self.kept}")
        if self.attn_mask:
            flags.append(f"{self.attn_mask} mask")
        if self.dropout:
            flags.append(f"dropout={self.dropout}")
        sizes = f"N={self.N} L={self.L} S={self.S} H={self.H} D={self.D} {self.dtype}"
        return f"#{self.index}: {sizes} {' '.join(flags)}"


def _log_uniform(generator: random.Random, least: int, most: int) -> int:
    return round(math.exp(generator.uniform(math.log(least), math.log(most))))


def draw(seed: int, index: int) -> Configuration:
    """Configuration `index` of a seed, whatever the others are, so that one of them can be run again alone."""
    generator = random.Random(f"{seed}/{index}")
    self_attention = generator.random() < 0.7
    while True:
        N, L, H = (
            _log_uniform(generator, 1, 64),
            _log_uniform(generator, 1, 2048),
            generator.choice((1, 2, 4, 8, 12, 16)),
        )
        S = L if self_attention else _log_uniform(generator, 1, 2048)
        if N * H * L * S <= MOST_SCORES:
            break
    training = generator.random() < 0.5
    return Configuration(
        index=index,
        N=N,
        L=L,
        S=S,
        H=H,
        D=generator.choice(HEAD_DIMS),
        dtype=generator.choice(("float32", "float32", "float32", "bfloat16")),
        training=training,
        grad=training or generator.random() < 0.2,
        need_weights=generator.random() < 0.5,
        average_attn_weights=generator.random() < 0.8,
        batch_first=generator.random() < 0.6,
        self_attention=self_attention,
        padding=generator.choice(("", "", "right", "left", "scattered")),
        kept=generator.choice((0.3, 0.5, 0.8, 1.0)),
        attn_mask=generator.choice(("", "", "bool", "causal", "float")),
        dropout=generator.choice((0.0, 0.1)) if training else 0.0,
        bias=generator.random() < 0.9,
        add_bias_kv=generator.random() < 0.1,
        add_zero_attn=generator.random() < 0.1,
    )


def _masks(configuration: Configuration, generator: torch.Generator) -> dict[str, Tensor]:
    L, S = configuration.L, configuration.S
    masks = {}
    if configuration.padding:
        kept = max(configuration.kept, 1 / S)  # stock gives NaN where a sample has no key at all
        masks["key_padding_mask"] = padding_mask(configuration.padding, kept, configuration.N, S, generator)
    if configuration.attn_mask == "causal":
        masks["attn_mask"] = torch.ones(L, S, dtype=torch.bool).triu(1)
    elif configuration.attn_mask == "bool":
        masks["attn_mask"] = torch.rand(L, S, generator=generator) < 0.3
    elif configuration.attn_mask == "float":
        masks["attn_mask"] = torch.randn(L, S, generator=generator).to(getattr(torch, configuration.dtype))
    # Stock warns, and converts on every call, where the two differ in type: give it what it likes best.
    if configuration.attn_mask == "float" and "key_padding_mask" in masks:
        hidden = masks["key_padding_mask"]
        masks["key_padding_mask"] = torch.zeros(hidden.shape, dtype=masks["attn_mask"].dtype).masked_fill(
            hidden, -torch.inf
        )
    return masks


def _module(kind: type[nn.MultiheadAttention], configuration: Configuration) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = kind(
        configuration.H * configuration.D,
        configuration.H,
        dropout=configuration.dropout,
        bias=configuration.bias,
        add_bias_kv=configuration.add_bias_kv,
        add_zero_attn=configuration.add_zero_attn,
        batch_first=configuration.batch_first,
        dtype=getattr(torch, configuration.dtype),
    )
    return module.train(configuration.training)


def _tensors(configuration: Configuration, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """The query, and what key and value both are: the query itself in self-attention."""

    def tensor(length: int) -> Tensor:
        shape = (configuration.N, length) if configuration.batch_first else (length, configuration.N)
        data = torch.randn(*shape, configuration.H * configuration.D, generator=generator)
        return data.to(device, getattr(torch, configuration.dtype)).requires_grad_(configuration.grad)

    query = tensor(configuration.L)
    return query, query if configuration.self_attention else tensor(configuration.S)


def _call(module: nn.MultiheadAttention, configuration: Configuration, device: str) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(configuration.index)
    module = module.to(device)
    query, key = _tensors(configuration, generator, device)
    arguments: dict[str, Any] = {
        "need_weights": configuration.need_weights,
        "average_attn_weights": configuration.average_attn_weights,
        **{name: mask.to(device) for name, mask in _masks(configuration, generator).items()},
    }
    leaves = [query] if query is key else [query, key]
    grad_output = torch.randn(query.shape, generator=generator).to(device, query.dtype)

    def infer() -> object:
        with torch.inference_mode():
            return module(query, key, key, **arguments)

    def train() -> object:
        output = module(query, key, key, **arguments)[0]
        return torch.autograd.grad(output, [*leaves, *module.parameters()], grad_output)

    return train if configuration.grad else infer


@contextmanager
def _fast_path(enabled: bool) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _without_fast_path(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with _fast_path(False):
            return call()

    return run


def ratio(configuration: Configuration, device: str, seconds: float) -> float:
    """Time of the best of stock over ours."""
    ours, stock = (
        _call(_module(kind, configuration), configuration, device)
        for kind in (fused_mha.MultiheadAttention, nn.MultiheadAttention)
    )
    calls = {"ours": ours, "stock": stock}
    if not configuration.grad:
        calls["stock, no fast path"] = _without_fast_path(stock)
    times = timing.interleave(calls, device=device, seconds=seconds, least_rounds=5)
    best = min((times[name] for name in calls if name != "ours"), key=lambda summary: summary.lower)
    return timing.ratio(best, times["ours"])


def _measure(configuration: Configuration, options: argparse.Namespace) -> float:
    value = ratio(configuration, options.device, options.seconds)
    if value < 1:
        value = ratio(configuration, options.device, 5 * options.seconds)
    return value


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="index of the first configuration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of one configuration, both sides")
    parser.add_argument("--tolerance", type=float, default=0.02, help="shortfall taken for noise; default 0.02")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    options = _parse()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    results: list[tuple[float, Configuration]] = []
    for index in range(options.first, options.first + options.count):
        configuration = draw(options.seed, index)
        results.append((_measure(configuration, options), configuration))
        print(f"{results[-1][0]:7.2f} x  {configuration}", flush=True)
    short = sorted((pair for pair in results if pair[0] < 1 - options.tolerance), key=lambda pair: pair[0])
    values = sorted(value for value, _ in results)
    print(
        f"\n{len(results)} configurations in {time.perf_counter() - begin:.0f} s: least {values[0]:.2f}, "
        f"median {values[len(values) // 2]:.2f}, most {values[-1]:.2f} times as fast as stock; {len(short)} fall short"
    )
    for value, configuration in short:
        print(f"{value:7.2f} x  {configuration}")
    if options.json:
        records = [{"ratio": value, **asdict(configuration)} for value, configuration in results]
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
