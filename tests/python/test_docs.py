# SPDX-License-Identifier: BSD-3-Clause
"""Every Python block of README.md and docs/*.md runs, the blocks of one page in order and in one namespace.

A page that needs an optional package starts with ``<!-- requires: package, package -->`` and is skipped without it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
REQUIREMENTS = re.compile(r"\A<!-- requires: ([\w, ]+) -->")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    requirements = REQUIREMENTS.match(text)
    for package in requirements[1].split(",") if requirements else []:
        pytest.importorskip(package.strip())
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in PYTHON_BLOCK.finditer(text):
        # Line numbers in a traceback are then those of the page.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


def test_every_page_is_in_the_index() -> None:
    index = set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    assert index == {page.name for page in PAGES[1:]} - {"index.md"}
