# SPDX-License-Identifier: BSD-3-Clause
"""What a build says to CUDA tensors, and what its CUDA kernels ask of a GPU; all of it known without one.

What the kernels compute is tested on ``cuda`` by the tests that take the fixture ``device``, where there is a GPU, and
everywhere by tests/cuda_emulation.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fused_mha
import pytest
import torch
from fused_mha import _C, __main__, _library
from torch._subclasses.fake_tensor import FakeTensorMode

HAS_CUDA = _C.build_info()["cuda"]
cpu_build = pytest.mark.skipif(HAS_CUDA, reason="this build has CUDA kernels")
cuda_build = pytest.mark.skipif(not HAS_CUDA, reason="this build has no CUDA kernels (FORCE_CUDA=1 builds them)")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
HINT = "Hint: build fused_mha where nvcc is, with FORCE_CUDA=1 in the environment"


class Hollow(torch.Tensor):
    """A tensor of a CUDA device that has no memory, and needs no GPU to exist."""

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None:
        raise AssertionError("to_the_kernels is not in force")


def hollow(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(Hollow, sizes, dtype=dtype, device="cuda:0")


@pytest.fixture
def to_the_kernels() -> Iterator[None]:
    """Hollow tensors go where those of a GPU go: through the dispatch keys of CUDA, to its kernels."""
    with torch._C._DisableTorchDispatch():
        yield


N, H, L, S, D = 2, 4, 5, 7, 8
QUERY, KEY = (N, H, L, D), (N, H, S, D)
MODULE = (N, L, H * D)
ops = torch.ops.fused_mha


def multi_head(x: torch.Tensor) -> object:
    weights = (hollow(3 * H * D, H * D), None, None, None, False, 0.0, hollow(H * D, H * D), None)
    return ops.multi_head_attention_forward(x, x, x, H * D, H, *weights)


PUBLIC = {
    "attention": lambda: ops.attention(hollow(*QUERY), hollow(*KEY), hollow(*KEY)),
    "attention_with_weights": lambda: ops.attention_with_weights(hollow(*QUERY), hollow(*KEY), hollow(*KEY)),
    "attention_with_lse": lambda: ops.attention_with_lse(hollow(*QUERY), hollow(*KEY), hollow(*KEY)),
    "multi_head_attention_forward": lambda: multi_head(hollow(*MODULE)),
}


def forward(**options: object) -> object:
    tensors = (hollow(*QUERY), hollow(*KEY), hollow(*KEY))
    return ops._attention_forward(*tensors, None, None, False, 0.0, 1.0, None, 0, 0, **options)


def backward() -> object:
    row = hollow(N, H, L)
    tensors = (hollow(*QUERY), None, hollow(*QUERY), hollow(*KEY), hollow(*KEY), None, None, hollow(*QUERY), row, row)
    return ops._attention_backward(*tensors, False, 0.0, 1.0, None, 0, 0, [True] * 3 + [False] * 3)


def packed() -> tuple[torch.Tensor, ...]:
    ends = hollow(N + 1, dtype=torch.int32)
    return hollow(N * L, H, D), hollow(N * S, H, D), hollow(N * S, H, D), ends, ends


PRIVATE = {
    "_attention_forward": forward,
    "_attention_backward": backward,
    "dropout_mask": lambda: ops.dropout_mask(hollow(2, dtype=torch.int64), N, H, L, S, 0.5),
}
#: Those that have no CUDA kernel in any build, public and private.
CPU_ONLY = {
    "additive_attention": lambda: ops.additive_attention(hollow(*QUERY), hollow(*KEY), hollow(*KEY), hollow(D)),
    "attention_varlen": lambda: ops.attention_varlen(*packed()),
}
CPU_ONLY_PRIVATE = {
    "_additive_attention_forward": lambda: ops._additive_attention_forward(
        hollow(*QUERY), hollow(*KEY), hollow(*KEY), hollow(D), None, None, False, 0.0, None, 0
    ),
    "_varlen_forward": lambda: ops._varlen_forward(*packed(), False, 0.0, 1.0, None, False, None),
    "_mask_tiles": lambda: ops._mask_tiles(hollow(*QUERY), hollow(*KEY), None, None, False),
}


# ------------------------------------------------------------------------------------------------ what callers are told


@cpu_build
@pytest.mark.usefixtures("to_the_kernels")
@pytest.mark.parametrize("name", PUBLIC)
def test_a_build_without_cuda_says_how_to_build_with_it(name: str) -> None:
    with pytest.raises(NotImplementedError) as raised:
        PUBLIC[name]()
    expected = f"fused_mha::{name}: query must be on the CPU, got cuda:0. This build has no kernels for cuda. {HINT}"
    assert str(raised.value).startswith(expected)


@cpu_build
@pytest.mark.usefixtures("to_the_kernels")
@pytest.mark.parametrize("name", PRIVATE)
def test_a_build_without_cuda_refuses_at_the_kernels_too(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^fused_mha::{name}: has no CUDA kernel in this build. {HINT}"):
        PRIVATE[name]()


@cpu_build
def test_a_build_without_cuda_refuses_to_trace_for_it() -> None:
    with FakeTensorMode():
        query = torch.empty(QUERY, device="cuda")
        with pytest.raises(NotImplementedError, match=HINT):
            ops.attention(query, query, query)


@pytest.mark.usefixtures("to_the_kernels")
@pytest.mark.parametrize("name", CPU_ONLY)
def test_operators_without_a_cuda_kernel_say_so(name: str) -> None:
    expected = f"^fused_mha::{name}: query must be on the CPU, got cuda:0. This operator has no CUDA kernel"
    with pytest.raises(NotImplementedError, match=expected):
        CPU_ONLY[name]()


@pytest.mark.usefixtures("to_the_kernels")
@pytest.mark.parametrize("name", CPU_ONLY_PRIVATE)
def test_operators_without_a_cuda_kernel_refuse_at_the_kernels_too(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^fused_mha::{name}: has no CUDA kernel. Hint: move its tensors"):
        CPU_ONLY_PRIVATE[name]()


@cuda_build
@no_gpu
@pytest.mark.usefixtures("to_the_kernels")
@pytest.mark.parametrize("name", [*PUBLIC, *PRIVATE])
def test_without_a_gpu_calls_fail_and_do_no_harm(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)nvidia driver|CUDA driver|fused_mha: cuda:0: "):
        (PUBLIC | PRIVATE)[name]()


@cuda_build
def test_tracing_for_cuda_needs_no_gpu() -> None:
    with FakeTensorMode():
        query, key = torch.empty(QUERY, device="cuda"), torch.empty(KEY, device="cuda")
        output, weights = ops.attention_with_weights(query, key, key)
    assert (output.device.type, output.shape) == ("cuda", QUERY)
    assert (weights.device.type, weights.shape) == ("cuda", (N, L, S))


@cuda_build
@pytest.mark.usefixtures("to_the_kernels")
def test_tensors_of_several_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"key must be on the device of query, cuda:0, got cpu"):
        ops.attention(hollow(*QUERY), torch.zeros(KEY), hollow(*KEY))
    with pytest.raises(RuntimeError, match=r"attn_mask must be on the device of query, cuda:0, got cpu"):
        ops.attention(hollow(*QUERY), hollow(*KEY), hollow(*KEY), attn_mask=torch.zeros(L, S))


def test_the_command_says_what_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    __main__.main(["--no-check"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("CUDA kernels")]
    info = _C.build_info()
    if HAS_CUDA:
        assert ", ".join(info["cuda_architectures"]) in line
        assert info["cuda_version"] in line
    else:
        assert line.endswith("none built (FORCE_CUDA=1 builds them)")
        assert info["cuda_architectures"] == []


def test_explain_says_what_is_built() -> None:
    query = torch.randn(2, 2, 5, 8)
    device = fused_mha.explain(query, query, query).calls[0]["device"]
    assert device.choice == "cpu"
    assert device.reason.startswith("CUDA kernels for") == HAS_CUDA


# ------------------------------------------------------------------------------------------ what the kernels ask for


def _cuobjdump() -> str | None:
    """Of the toolkit, or of Triton, which comes with torch."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    try:
        import triton
    except ImportError:
        pass
    else:
        folders.append(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *map(str, folders)]))


@dataclass(frozen=True)
class Kernel:
    architecture: int
    name: str
    registers: int
    stack: int  # bytes a thread: spilled registers, arrays that are indexed
    shared: int  # bytes a block that are known at compile time
    threads: int  # the most of a block


def _sections(cubin: bytes) -> dict[str, tuple[bytes, int]]:
    """Contents and sh_info of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)]
    names = cubin[headers[names_at][4] :]
    nobits = 8
    return {
        names[name : names.index(b"\0", name)].decode(): (b"" if kind == nobits else cubin[at : at + size], info)
        for name, kind, _, _, at, size, _, info, _, _ in headers
    }


def _most_threads(attributes: bytes) -> int:
    """The launch bound of a kernel, from its section .nv.info: attributes of a format, a code, and a size or value."""
    max_threads, with_size = 5, 4
    at = 0
    while at < len(attributes):
        form, code, size = struct.unpack_from("<BBH", attributes, at)
        if (form, code) == (with_size, max_threads):
            x, y, z = struct.unpack_from("<III", attributes, at + 4)
            return x * y * z
        at += 4 + (size if form == with_size else 0)
    return 0


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Every CUDA kernel in the library, once for each architecture."""
    cuobjdump = _cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump, neither in a CUDA toolkit nor in Triton")
    folder = tmp_path_factory.mktemp("cubins")
    subprocess.run([cuobjdump, "--extract-elf", "all", _library.LIBRARY], cwd=folder, check=True, capture_output=True)
    found = []
    for path in sorted(folder.glob("*.cubin")):
        architecture = int(path.name.split(".")[-2].removeprefix("sm_").rstrip("af"))
        sections = _sections(path.read_bytes())
        command = [cuobjdump, "--dump-resource-usage", path]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        lines = report.splitlines()
        for line, usage in itertools.pairwise(lines):
            if not line.strip().startswith("Function "):
                continue
            name = line.strip().removeprefix("Function ").rstrip(":")
            numbers = dict(word.split(":") for word in usage.split())
            threads = _most_threads(sections[f".nv.info.{name}"][0])
            registers, stack, shared = (int(numbers[key]) for key in ("REG", "STACK", "SHARED"))
            found.append(Kernel(architecture, name, registers, stack, shared, threads))
    return found


@cuda_build
def test_all_kernels_are_there_for_all_architectures(kernels: list[Kernel]) -> None:
    architectures = _C.build_info()["cuda_architectures"]
    built = {int(name.removesuffix("+PTX").replace(".", "").rstrip("af")) for name in architectures}
    assert {kernel.architecture for kernel in kernels} == built
    names = [{kernel.name for kernel in kernels if kernel.architecture == architecture} for architecture in built]
    assert all(len(some) == len(names[0]) > 20 for some in names)
    for part in ("attention_forward", "attention_weights", "backward_keys", "backward_queries", "mask_gradient"):
        assert any(part in name for name in names[0])


@cuda_build
def test_nothing_is_spilled(kernels: list[Kernel]) -> None:
    spilled = [f"{kernel.stack} bytes by sm_{kernel.architecture} {kernel.name}" for kernel in kernels if kernel.stack]
    assert not spilled, "\n".join(spilled)


@cuda_build
def test_a_block_fits_into_a_multiprocessor(kernels: list[Kernel]) -> None:
    """Registers are given to warps in units of 256; every kernel states how many threads a block has."""
    for kernel in kernels:
        assert 32 <= kernel.threads <= 1024, kernel
        assert kernel.threads % 32 == 0, kernel
        assert kernel.registers <= 255, kernel
        assert -(-kernel.registers * 32 // 256) * 256 * (kernel.threads // 32) <= 65536, kernel
        assert kernel.shared <= 1024, kernel  # what runtime and compiler keep; the kernels' own is asked for at launch
