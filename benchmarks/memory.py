# SPDX-License-Identifier: BSD-3-Clause
"""Peak memory of a call: on a CPU as the operating system counts it, scratch memory of every library included.

Run as a program, it trains once on long sequences in a process of its own and prints the extra peak as JSON:

    python benchmarks/memory.py --length 32768 --heads 8 --head-dim 64 --threads 2
"""

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MIB = 2**20
LIBC = ctypes.CDLL(None)


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS is what is resident, VmHWM the most that was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _reset_peak() -> None:
    """Give freed memory back and set the peak to what is resident now; OSError where the system does not let us."""
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def extra_peak(call: Callable[[], object]) -> int | None:
    """Bytes that one call needs beside what was resident before it, results included; None where unknown.

    Call it once before: the first call of anything also loads code.
    """
    try:
        _reset_peak()
        before = _status("VmRSS")
        result = call()
        peak = _status("VmHWM")
    except OSError:
        return None
    del result
    return max(0, peak - before)


def extra_device_peak(call: Callable[[], object]) -> int:
    """The same on a GPU, as PyTorch's allocator counts it."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return peak - before


def measure_training(length: int, heads: int, head_dim: int, threads: int) -> dict[str, float]:
    """Run this file as a process of its own, so that nothing measured before it counts."""
    options = {"--length": length, "--heads": heads, "--head-dim": head_dim, "--threads": threads}
    command = [sys.executable, __file__, *(str(word) for pair in options.items() for word in pair)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _scattered_mask(length: int):
    """(length, length) bool, one position in eleven hidden, made row by row: a temporary would count as our memory."""
    import torch

    mask = torch.empty(length, length, dtype=torch.bool)
    keys = torch.arange(length) * 3
    for row in range(length):
        torch.eq((keys + row * 7) % 11, 0, out=mask[row])
    return mask


def _train_once(length: int, heads: int, head_dim: int, threads: int) -> dict[str, float]:
    import fused_mha  # noqa: F401  registers the operators
    import torch

    torch.set_num_threads(threads)
    attention = torch.ops.fused_mha.attention

    def step(q, k, v, grad, padding, mask):
        output = attention(q, k, v, key_padding_mask=padding, attn_mask=mask)
        return output, torch.autograd.grad(output, (q, k, v), grad)

    def inputs(size: int):
        q, k, v = (torch.randn(1, heads, size, head_dim, requires_grad=True) for _ in range(3))
        padding = (torch.arange(size) >= size - size // 16)[None]
        return q, k, v, torch.randn(1, heads, size, head_dim), padding, _scattered_mask(size)

    step(*inputs(256))
    arguments = inputs(length)
    begin = time.perf_counter()
    extra = extra_peak(lambda: step(*arguments))
    if extra is None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.perf_counter()
        step(*arguments)
        extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"extra_bytes": extra, "seconds": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768, help="L = S")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(_train_once(options.length, options.heads, options.head_dim, options.threads)))


if __name__ == "__main__":
    main()
