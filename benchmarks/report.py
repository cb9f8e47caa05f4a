# SPDX-License-Identifier: BSD-3-Clause
"""Writes a result of bench.py as a Markdown table: what docs/performance.md shows.

python benchmarks/report.py build/bench.json
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bench

COLUMNS = (
    "case",
    "ms",
    "quickest rival",
    "ratio",
    "of peak",
    "extra MiB, ours / rival",
    "error, ours / SDPA",
    "goal",
    "reached",
)
MIB = 2**20


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _pair(first: float | None, second: float | None, form: str) -> str:
    return "" if first is None else f"{format(first, form)} / {_number(second, form) or '-'}"


def _goal_columns(goals: list[dict[str, Any]]) -> tuple[str, str]:
    wanted = "; ".join(goal["text"] for goal in goals)
    reached = [_number(goal["value"], ".2f") + ("" if goal["met"] else " **short**") for goal in goals]
    return wanted, "; ".join(reached)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def row_line(row: dict[str, Any]) -> str:
    errors = row["errors"]
    extra = _pair(
        row["extra_bytes"] / MIB, None if row["rival_extra_bytes"] is None else row["rival_extra_bytes"] / MIB, ".0f"
    )
    return _line(
        (
            row["name"],
            _number(row["seconds_or_rates"]["ours"]["lower"] * 1e3, ".2f"),
            row["rival"],
            _number(row["ratio"], ".2f"),
            _number(row["metrics"].get("peak"), ".2f"),
            extra,
            _pair(errors.get("ours"), errors.get(bench.sdpa_with_error(errors)), ".0e"),
            *_goal_columns(row["goals"]),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    report = json.loads(parser.parse_args().json.read_text())
    print(
        bench.machine_lines(report["machine"], report["date"]),
        "",
        _line(COLUMNS),
        _line(["---"] * len(COLUMNS)),
        sep="\n",
    )
    for row in report["rows"]:
        print(row_line(row))
    if "long" in report:
        print("", bench.long_line(report["long"]), sep="\n")


if __name__ == "__main__":
    main()
