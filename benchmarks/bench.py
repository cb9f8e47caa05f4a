# SPDX-License-Identifier: BSD-3-Clause
"""The side-by-side benchmark: this library, and what else computes the same attention on a CPU or a GPU.

    python benchmarks/bench.py                     # some minutes: table, build/bench.json, build/bench.png
    python benchmarks/bench.py --quick             # under a minute: fewer cases and rivals
    python benchmarks/bench.py --full              # also FlexAttention, longer timing, and training at L = S = 32768
    python benchmarks/bench.py --only padding      # the cases whose name contains this, or matches it as a pattern
    python benchmarks/bench.py --device cuda       # other cases, on the GPU that is current

Sides are timed in turn, A B A B; a time is the lower quartile of its samples. The peak that a case is held to is
measured between the same samples, by a loop that works in registers alone; on a GPU there is none. "rival" is the
quickest of the others, "ratio" its time over ours. Only visible scores count as work. "extra" is the memory that one
call needs on top, results included. "error" is the largest deviation from float64 on the first head, ours / SDPA's.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases as case_table
import fused_mha
import memory
import peak
import rivals
import timing
import torch
from cases import Case, Goal, Inputs
from fused_mha import _C
from timing import Summary

BUILD = Path(__file__).resolve().parents[1] / "build"
COLUMNS = (
    f"{'case':<52} {'ours ms':>9} {'rival ms':>9} {'rival':<17} {'GFLOP/s':>7} {'of peak':>7} {'ratio':>6} "
    f"{'extra MiB':>15} {'error':>15}  goal"
)


@functools.cache
def cpu_field(name: str) -> str:
    """A line of /proc/cpuinfo; "" where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


@dataclass(frozen=True)
class Settings:
    threads: int
    quick: bool
    full: bool
    isa: str
    has_peak: bool
    device: str = "cpu"

    @property
    def native_bfloat16(self) -> bool:
        """Whether the processor has bfloat16 dot products and may use them: not whether this build does."""
        cap = os.environ.get("FUSED_MHA_MAX_ISA", "")
        return "avx512_bf16" in cpu_field("flags").split() and cap in ("", "avx512bf16")

    @property
    def seconds(self) -> float:
        return 0.4 if self.quick else 4.0 if self.full else 1.5

    def yardstick(self, case: Case) -> torch.dtype:
        """The dtype whose peak a case is held to: without multiply-adds of its own, a 16-bit dtype uses float32's."""
        if case.dtype == torch.bfloat16 and self.native_bfloat16 and peak.instructions(torch.bfloat16):
            return torch.bfloat16
        return torch.float64 if case.dtype == torch.float64 else torch.float32


def describe_gpu() -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties()
    return {
        "processor": gpu.name,
        "cores": gpu.multi_processor_count,
        "threads": 0,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "fused_mha": fused_mha.__version__,
        "instruction_set": f"sm_{gpu.major}{gpu.minor}",
        "peak_gflops": {},
    }


def describe_machine(settings: Settings) -> dict[str, Any]:
    if settings.device != "cpu":
        return describe_gpu()
    dtypes = [dtype for dtype in peak.KINDS if settings.has_peak and peak.instructions(dtype)]
    return {
        "processor": cpu_field("model name") or platform.machine(),
        "cores": os.cpu_count(),
        "threads": settings.threads,
        "torch": torch.__version__,
        "fused_mha": fused_mha.__version__,
        "instruction_set": settings.isa,
        "peak_gflops": {
            str(dtype).removeprefix("torch."): max(peak.flops(dtype, settings.threads) for _ in range(20)) / 1e9
            for dtype in dtypes
        },
    }


# -------------------------------------------------------------------------------------------------------- measuring


def _probes(case: Case, settings: Settings) -> dict[str, Callable[[], float]]:
    if not settings.has_peak:
        return {}
    dtype = settings.yardstick(case)
    probes = {"peak": lambda: peak.flops(dtype, settings.threads)}
    if any(goal.metric == "bandwidth" for goal in case.goal):
        buffer = torch.ones(case.key_bytes() // 4)
        probes["bandwidth"] = lambda: peak.read_bandwidth(buffer, settings.threads)
    return probes


def _own_calls(case: Case, ours: rivals.Call, settings: Settings) -> dict[str, rivals.Call]:
    """The calls of this library that the goals compare `ours` with, by metric."""
    calls = {}
    for metric in {goal.metric for goal in case.goal}:
        if metric in case_table.SIMPLER:
            simpler = case.simpler(metric)
            calls[metric] = rivals.ours(simpler, case_table.make_inputs(simpler, settings.device))
        elif metric == "one thread" and settings.threads > 1:
            calls[metric] = timing.with_threads(ours, 1)
    return calls


def _best(times: dict[str, Summary], names: Any) -> str:
    """The quickest of these names, "" where none was timed."""
    return min((name for name in names if name in times), key=lambda name: times[name].lower, default="")


def _metrics(case: Case, times: dict[str, Summary], flops: float) -> dict[str, float]:
    """Every metric that was measured. The peak's upper quartile counts, as the lower one of the times does."""
    ours = times["ours"]
    values = {metric: timing.ratio(ours, times[metric]) for metric in case_table.SIMPLER if metric in times}
    if "one thread" in times:
        values["one thread"] = timing.ratio(times["one thread"], ours)
    if "peak" in times:
        values["peak"] = flops / ours.lower / times["peak"].upper
    if "bandwidth" in times:
        values["bandwidth"] = case.key_bytes() / ours.lower / times["bandwidth"].upper
    if best := _best(times, rivals.SDPA_ON_GPU):
        values["sdpa"] = timing.ratio(times[best], ours)
    if "stock" in times:
        values["stock"] = timing.ratio(times["stock"], ours)
    return values


def _judge(goals: list[Goal], values: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "metric": goal.metric,
            "target": goal.value,
            "text": str(goal),
            "value": values.get(goal.metric),
            "met": goal.met(values[goal.metric]) if goal.metric in values else None,
        }
        for goal in goals
    ]


def _reference(case: Case, inputs: Inputs) -> torch.Tensor:
    """(L, Dv) float64: attention of the first head of the first sample."""
    query, key, value = (t[0, 0].detach().double() for t in (inputs.query, inputs.key, inputs.value))
    scores = query @ key.T / case.D**0.5
    added = inputs.attn_mask
    if added is not None and added.dtype != torch.bool:
        scores += added.detach().expand(1, case.H, case.L, case.S)[0, 0]
    hidden = case_table.hidden_mask(inputs, case.L, case.S)
    if hidden is not None:
        scores.masked_fill_(hidden.expand(case.N, 1, case.L, case.S)[0, 0], -torch.inf)
    return scores.softmax(-1) @ value


def _error(result: Any, reference: torch.Tensor) -> float:
    output = result[0] if isinstance(result, tuple) else result
    return (output[0, 0].detach().double() - reference).abs().max().item()


def _errors(case: Case, inputs: Inputs, calls: dict[str, rivals.Call]) -> dict[str, float]:
    """Largest deviation of each side's output from float64. Empty where outputs are random, or not returned."""
    if case.module or case.dropout or case.passes == "backward":
        return {}
    reference = _reference(case, inputs)
    return {name: _error(call(), reference) for name, call in calls.items()}


def measure(case: Case, settings: Settings) -> dict[str, Any]:
    inputs = case_table.make_inputs(case, settings.device)
    ours = rivals.ours(case, inputs)
    builders = rivals.chosen(case, quick=settings.quick, full=settings.full, device=settings.device)
    others, skipped = rivals.build(case, inputs, builders)
    calls = {"ours": ours, **others}
    errors = _errors(case, inputs, calls)
    sides = calls | _own_calls(case, ours, settings)
    times = timing.interleave(sides, _probes(case, settings), device=settings.device, seconds=settings.seconds)
    extra_peak = memory.extra_peak if settings.device == "cpu" else memory.extra_device_peak
    flops = case_table.flops(case)
    values = _metrics(case, times, flops)
    best = _best(times, others)
    return {
        "name": case.name,
        "shape": {letter: getattr(case, letter) for letter in ("N", "H", "L", "S", "D", "Dv")}
        | {"Hkv": case.key_heads},
        "dtype": str(case.dtype).removeprefix("torch."),
        "passes": case.passes,
        "padding": case.padding,
        "kept": case.kept,
        "plots": list(case.plots),
        "seconds_or_rates": {name: summary.as_dict() for name, summary in times.items()},
        "skipped": skipped,
        "gflops": flops / times["ours"].lower / 1e9,
        "rival": best,
        "ratio": timing.ratio(times[best], times["ours"]) if best else None,
        "metrics": values,
        "goals": _judge(case.goals(settings.native_bfloat16), values),
        "extra_bytes": extra_peak(ours),
        "rival_extra_bytes": extra_peak(others[best]) if best else None,
        "errors": errors,
    }


def measure_long(settings: Settings) -> dict[str, Any]:
    figure = memory.measure_training(**case_table.LONG, threads=settings.threads)
    goal = case_table.LONG_GOAL
    extra = figure["extra_bytes"] / 2**30
    return figure | case_table.LONG | {"goals": _judge([goal], {goal.metric: extra})}


# -------------------------------------------------------------------------------------------------------- reporting


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _pair(first: float | None, second: float | None, form: Callable[[float], str]) -> str:
    if first is None and second is None:
        return "-"
    return " / ".join("-" if value is None else form(value) for value in (first, second))


def _goal_text(judged: dict[str, Any]) -> str:
    verdict = {True: "met", False: "NOT MET", None: "not measured"}[judged["met"]]
    return f"{judged['text']}: {_number(judged['value'], 2)} {verdict}"


def table_row(row: dict[str, Any]) -> str:
    times = row["seconds_or_rates"]
    rival = row["rival"]
    errors = row["errors"]
    extra = _pair(row["extra_bytes"], row["rival_extra_bytes"], lambda value: f"{value / memory.MIB:.0f}")
    error = _pair(errors.get("ours"), errors.get(sdpa_with_error(errors)), lambda value: f"{value:.0e}")
    line = (
        f"{row['name']:<52} {times['ours']['lower'] * 1e3:>9.3f} "
        f"{_number(times[rival]['lower'] * 1e3 if rival else None, 3):>9} {rival:<17} {row['gflops']:>7.0f} "
        f"{_number(row['metrics'].get('peak'), 2):>7} {_number(row['ratio'], 2):>6} {extra:>15} {error:>15}  "
    )
    goals = [_goal_text(judged) for judged in row["goals"]]
    return line + ("\n" + " " * len(line)).join(goals or ["-"])


def sdpa_with_error(errors: dict[str, float]) -> str:
    return next((name for name in rivals.SDPA_ON_GPU if name in errors), "")


def machine_lines(machine: dict[str, Any], date: str) -> str:
    peaks = ", ".join(f"{name} {value:.0f}" for name, value in machine["peak_gflops"].items())
    units = f"{machine['cores']} cores, {machine['threads']} threads"
    if not machine["threads"]:
        units = f"{machine['cores']} multiprocessors"
    lines = [
        f"{machine['processor']}, {units}; torch {machine['torch']}, "
        f"fused_mha {machine['fused_mha']}, instruction set {machine['instruction_set']}; {date}",
        f"peak GFLOP/s: {peaks or 'not measured'}",
    ]
    by_name = machine["peak_gflops"]
    if by_name.get("bfloat16", 0) and by_name["bfloat16"] < by_name["float32"]:
        lines.append(
            "vdpbf16ps does fewer multiply-adds a second here than vfmadd does in float32: a bfloat16 case, held to "
            "vdpbf16ps, can exceed 1."
        )
    return "\n".join(lines)


def long_line(figure: dict[str, Any]) -> str:
    return (
        f"forward+backward at L = S = {figure['length']}, H = {figure['heads']}, D = {figure['head_dim']}, both masks: "
        f"{figure['extra_bytes'] / memory.MIB:.0f} MiB extra, {figure['seconds']:.1f} s;  "
        f"{_goal_text(figure['goals'][0])}"
    )


def summary_line(judged: list[dict[str, Any]], seconds: float) -> str:
    met = sum(goal["met"] is True for goal in judged)
    return f"{met} of {len(judged)} goals met, in {seconds:.0f} s"


def skipped_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Why rivals are missing, each reason once and with how many cases it concerns."""
    counts: dict[str, int] = {}
    for row in rows:
        for name, reason in row["skipped"].items():
            text = f"{name}: {reason}"
            counts[text] = counts.get(text, 0) + 1
    return [f"left out ({count} cases): {text}" for text, count in sorted(counts.items())]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="under a minute: fewer cases and rivals, short timing")
    extent.add_argument("--full", action="store_true", help="long timing, FlexAttention, training at L = S = 32768")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="part of a case's name, or a shell pattern")
    parser.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1), help="default 2, which the goals are for"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, default=BUILD / "bench.json", metavar="FILE")
    parser.add_argument("--plot", type=Path, default=BUILD / "bench.png", metavar="FILE")
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> Settings:
    common = (options.threads, options.quick, options.full, _C.get_cpu_isa())
    if options.device != "cpu":
        return Settings(*common, has_peak=False, device=options.device)
    reason = peak.why_unavailable()
    if reason:
        print(reason, file=sys.stderr)
    return Settings(*common, has_peak=not reason)


def _why_not_on(device: str) -> str:
    if device == "cpu":
        return ""
    if not _C.build_info()["cuda"]:
        return "this build of fused_mha has no CUDA kernels (FORCE_CUDA=1 builds them)"
    return "" if torch.cuda.is_available() else "torch finds no GPU"


def _write_plot(report: dict[str, Any], path: Path) -> None:
    try:
        import plot
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.write(report, path)
    print(f"wrote {path}")


def main() -> int:
    options = _parse()
    if reason := _why_not_on(options.device):
        print(reason, file=sys.stderr)
        return 2
    selected = case_table.select(options.only, options.quick, options.device)
    if not selected:
        print(f"no case matches {options.only!r}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", category=UserWarning)  # backends of torch say at length why they do not apply
    torch.set_num_threads(options.threads)
    settings = _settings(options)
    begin = time.perf_counter()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report: dict[str, Any] = {"date": date, "command": sys.argv, "machine": describe_machine(settings), "rows": []}
    print(machine_lines(report["machine"], date), COLUMNS, sep="\n", flush=True)
    for case in selected:
        report["rows"].append(measure(case, settings))
        print(table_row(report["rows"][-1]), flush=True)
    for line in skipped_lines(report["rows"]):
        print(line)
    judged = [goal for row in report["rows"] for goal in row["goals"]]
    if options.full and options.device == "cpu":
        report["long"] = measure_long(settings)
        judged += report["long"]["goals"]
        print(long_line(report["long"]))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.json}")
    if options.device == "cpu":
        _write_plot(report, options.plot)
    print(summary_line(judged, time.perf_counter() - begin))
    return 0


if __name__ == "__main__":
    sys.exit(main())
