# SPDX-License-Identifier: BSD-3-Clause
"""Every C++ block of README.md and docs/*.md compiles and runs: those of one page in order, as one program.

The blocks become the body of main(), their includes stand before it. Python blocks of the page run first, in the same
folder, and leave the files that the program reads. The project is the one that docs/cpp.md shows.
"""

import re
import sys
from pathlib import Path

import pytest
from consumers import PREFIXES, TORCH_FOLDER, build, run

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(cpp|python|cmake)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "\n```cpp\n" in page.read_text()
]


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Line number and text of each."""
    text = page.read_text()
    found = BLOCK.finditer(text)
    return [(text.count("\n", 0, block.start(2)) + 1, block[2]) for block in found if block[1] == language]


def program(page: Path) -> str:
    """What a compiler says of it names the lines of the page."""
    includes, body = [], []
    for number, text in blocks(page, "cpp"):
        for i, line in enumerate(text.splitlines()):
            if line.startswith("#include"):
                includes.append(line)
            elif line:
                body += [f'#line {number + i} "{page.name}"', line]
    return "\n".join([*includes, "int main() {", *body, "return 0;", "}", ""])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_cpp_blocks_run(page: Path, tmp_path: Path) -> None:
    ((_, project),) = blocks(ROOT / "docs" / "cpp.md", "cmake")
    (tmp_path / "CMakeLists.txt").write_text(project)
    (tmp_path / "app.cpp").write_text(program(page))
    build(tmp_path, tmp_path / "build", PREFIXES, "-DCMAKE_CXX_FLAGS_RELEASE=-O0")
    if page.stem == "cpp":
        run(sys.executable, "-c", "".join(text for _, text in blocks(page, "python")), cwd=tmp_path)
    run(tmp_path / "build" / "app", cwd=tmp_path, libraries=TORCH_FOLDER / "lib")
