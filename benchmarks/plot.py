# SPDX-License-Identifier: BSD-3-Clause
"""Draws a report of bench.py: fraction of peak, cost against the fraction kept, cost against L."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # a file, whatever display there is

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS, RIVAL = "tab:blue", "tab:orange"
SDPA = ("sdpa", "sdpa flash", "sdpa math")
Row = dict[str, Any]


def _rows(report: dict[str, Any], panel: str) -> list[Row]:
    return [row for row in report["rows"] if panel in row["plots"]]


def _sdpa_seconds(row: Row) -> float | None:
    times = [row["seconds_or_rates"][name]["lower"] for name in SDPA if name in row["seconds_or_rates"]]
    return min(times, default=None)


def _seconds(row: Row) -> float:
    return row["seconds_or_rates"]["ours"]["lower"]


def _draw_peak(axes: Axes, rows: list[Row]) -> None:
    """A bar per case up to the measured peak, SDPA's below it, and a stroke where the goal lies."""
    rows = [row for row in rows if "peak" in row["metrics"]][::-1]
    for place, row in enumerate(rows):
        fraction = row["metrics"]["peak"]
        axes.barh(place + 0.2, fraction, 0.4, color=OURS, label="fused_mha" if place == 0 else None)
        sdpa = _sdpa_seconds(row)
        if sdpa is not None:
            theirs = fraction * _seconds(row) / sdpa
            axes.barh(place - 0.2, theirs, 0.4, color=RIVAL, label="best SDPA" if place == 0 else None)
        for goal in row["goals"]:
            if goal["metric"] == "peak":
                axes.plot([goal["target"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xlabel("fraction of the measured peak (strokes: goals)")


def _draw_padding(axes: Axes, rows: list[Row]) -> None:
    for kind in ("right", "left", "scattered"):
        points = sorted((row["kept"], row["metrics"]["dense"]) for row in rows if row["padding"] == kind)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{kind} padding")
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, label="work kept")
    axes.plot([0, 0.95], [0.05, 1], color="grey", linewidth=1, linestyle=":", label="work kept + 0.05")
    axes.set_xlabel("fraction of the keys kept")
    axes.set_ylabel("time / time without padding")


def _draw_length(axes: Axes, report: dict[str, Any]) -> None:
    for panel, label, line in (("length", "forward", "-"), ("length both", "forward+backward", "--")):
        rows = sorted(_rows(report, panel), key=lambda row: row["shape"]["L"])
        for name, color, seconds in (("fused_mha", OURS, _seconds), ("best SDPA", RIVAL, _sdpa_seconds)):
            points = [
                (row["shape"]["L"], _per_score(row, value)) for row in rows if (value := seconds(row)) is not None
            ]
            if points:
                axes.plot(*zip(*points, strict=True), line, marker="o", color=color, label=f"{name}, {label}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("L = S (float32)")
    axes.set_ylabel("nanoseconds a score")


def _per_score(row: Row, seconds: float) -> float:
    shape = row["shape"]
    return seconds * 1e9 / (shape["N"] * shape["H"] * shape["L"] * shape["S"])


def write(report: dict[str, Any], path: Path) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(18, 6), width_ratios=(1.4, 1, 1))
    _draw_peak(left, _rows(report, "peak"))
    _draw_padding(middle, _rows(report, "padding"))
    _draw_length(right, report)
    for axes in (left, middle, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    machine = report["machine"]
    figure.suptitle(f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, {report['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
