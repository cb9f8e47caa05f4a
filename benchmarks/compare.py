# SPDX-License-Identifier: BSD-3-Clause
"""Compares two reports of bench.py and fails where the newer one is worse.

    python benchmarks/compare.py old.json new.json --tolerance 0.05

A case's cost is its time multiplied by the peak measured beside it, so that a machine that ran slower on the day does
not count; where there is no peak, its time over the quickest rival's, and failing that its time alone. Extra memory is
compared too. Exit status: 0 no regression, 1 regressions or missing cases, 2 the reports cannot be compared.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Memory is counted in pages, and the allocator rounds up: a difference below this says nothing.
SLACK_BYTES = 4 * 2**20
Row = dict[str, Any]


@dataclass(frozen=True)
class Change:
    name: str
    what: str
    old: float
    new: float
    allowed: float

    @property
    def regressed(self) -> bool:
        return self.new > self.allowed

    def __str__(self) -> str:
        verdict = "REGRESSION" if self.regressed else "ok"
        factor = f"{self.new / self.old:6.3f} x" if self.old > 0 else "     -  "
        return f"{self.name:<56} {self.what:<28} {self.old:>11.4g} {self.new:>11.4g} {factor}  {verdict}"


def _cost(row: Row) -> dict[str, float]:
    """Every way in which this row's cost can be told, the best first."""
    sides = row["seconds_or_rates"]
    seconds = sides["ours"]["lower"]
    costs = {}
    if "peak" in sides:
        costs["GFLOP of peak"] = seconds * sides["peak"]["upper"] / 1e9
    if row["rival"]:
        costs[f"time / {row['rival']}"] = seconds / sides[row["rival"]]["lower"]
    costs["milliseconds"] = seconds * 1e3
    return costs


def _changes(old: Row, new: Row, tolerance: float) -> list[Change]:
    old_costs, new_costs = _cost(old), _cost(new)
    what = next(what for what in old_costs if what in new_costs)
    before = old_costs[what]
    changes = [Change(old["name"], what, before, new_costs[what], before * (1 + tolerance))]
    if None not in (old["extra_bytes"], new["extra_bytes"]):
        before = old["extra_bytes"]
        allowed = before * (1 + tolerance) + SLACK_BYTES
        changes.append(Change(old["name"], "extra bytes", before, new["extra_bytes"], allowed))
    return changes


def compare(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> tuple[list[Change], list[str]]:
    """All changes, and the names of the cases that the new report lacks."""
    new_rows = {row["name"]: row for row in new["rows"]}
    changes, missing = [], []
    for row in old["rows"]:
        if row["name"] in new_rows:
            changes += _changes(row, new_rows[row["name"]], tolerance)
        else:
            missing.append(row["name"])
    return changes, missing


def _incomparable(old: dict[str, Any], new: dict[str, Any]) -> str:
    for key in ("threads", "instruction_set"):
        if old["machine"][key] != new["machine"][key]:
            return f"{key} differ: {old['machine'][key]} and {new['machine'][key]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.05, help="growth that is let pass; default 0.05")
    parser.add_argument("--allow-missing", action="store_true", help="the new report may hold fewer cases")
    options = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (options.old, options.new))
    if reason := _incomparable(old, new):
        print(reason, file=sys.stderr)
        return 2
    if old["machine"]["processor"] != new["machine"]["processor"]:
        print(f"processors differ: {old['machine']['processor']} and {new['machine']['processor']}", file=sys.stderr)
    changes, missing = compare(old, new, options.tolerance)
    print(f"{'case':<56} {'what':<28} {'old':>11} {'new':>11}")
    for change in changes:
        print(change)
    for name in missing:
        print(f"{name:<56} missing from {options.new}")
    regressions = sum(change.regressed for change in changes)
    print(f"{regressions} regressions beyond {options.tolerance:.0%}, {len(missing)} cases missing")
    return int(regressions > 0 or (bool(missing) and not options.allow_missing))


if __name__ == "__main__":
    sys.exit(main())
