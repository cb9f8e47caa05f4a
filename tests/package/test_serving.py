# SPDX-License-Identifier: BSD-3-Clause
"""examples/cpp_serving: what the program answers is what Python computes, and one bad request harms no other."""

import subprocess
import sys
from pathlib import Path

import pytest
from consumers import environment_without_cuda

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpp_serving"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The program and an exported encoder; run.py, which makes them, fails where their answers are not Python's."""
    folder = tmp_path_factory.mktemp("serving")
    encoder = folder / "encoder.pt"
    for command in (["run.py", "--quick", "--build", folder / "build"], ["encoder.py", "--quick", encoder]):
        done = subprocess.run(
            [sys.executable, EXAMPLE / command[0], *command[1:]], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "serve", encoder


def answers(served: tuple[Path, Path], lines: list[str], batch: int) -> list[str]:
    done = subprocess.run(
        [*served, str(batch)],
        input="\n".join(lines),
        env=environment_without_cuda(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def numbers(line: str) -> list[float]:
    return [float(word) for word in line.split()]


def test_an_answer_does_not_depend_on_its_neighbours(served: tuple[Path, Path]) -> None:
    requests = ["5 6 7", "1 " * 40, "", "8", "98 0 98"]
    together, alone = answers(served, requests, batch=5), answers(served, requests, batch=1)
    assert len(together) == len(alone) == len(requests)
    for a, b in zip(together, alone, strict=True):
        assert numbers(a) == pytest.approx(numbers(b), abs=1e-5)
    assert numbers(together[2]) == [0.0] * 32, "a request without tokens"
    assert sum(x * x for x in numbers(together[1])) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 2 x", "error: a request must be a line of token numbers"),
        ("1 99", "error: a token must be from 0 to 98, got 99"),
        ("-1", "error: a token must be from 0 to 98, got -1"),
        ("1 " * 41, "error: a request must have at most 40 tokens, got 41"),
    ],
)
def test_a_bad_request_is_answered_alone(served: tuple[Path, Path], line: str, message: str) -> None:
    good, bad, also_good = answers(served, ["4 5", line, "4 5"], batch=3)
    assert bad == message
    expected = pytest.approx(numbers(answers(served, ["4 5"], batch=3)[0]), abs=1e-5)
    assert numbers(good) == expected
    assert numbers(also_good) == expected


def test_a_file_that_is_no_encoder_is_named(served: tuple[Path, Path], tmp_path: Path) -> None:
    program, _ = served
    done = subprocess.run([program, tmp_path / "missing.pt"], input="", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "missing.pt" in done.stderr
