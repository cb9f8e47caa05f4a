# SPDX-License-Identifier: BSD-3-Clause
"""C++ projects that use the library in each way that a user may, built and run."""

import subprocess
from pathlib import Path

import fused_mha
import pytest
import torch
from consumers import PREFIXES, TORCH_FOLDER, build, environment_without_cuda, run

HERE = Path(__file__).resolve().parent


def check_consumer(program: Path) -> None:
    output = run(program)
    assert "agrees 1" in output
    runtimes = [line for line in output.splitlines() if line.startswith("openmp ")]
    assert len(runtimes) == 1, f"more than one OpenMP runtime, or none: {runtimes}"


def check_state(program: Path, folder: Path) -> None:
    """A state saved by the Python module loads in the C++ module and gives the same output."""
    torch.manual_seed(0)
    module = fused_mha.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True, kdim=7, vdim=5).eval()
    inputs = {
        "x": torch.randn(2, 4, 12),
        "key": torch.randn(2, 6, 7),
        "value": torch.randn(2, 6, 5),
        "padding": torch.tensor([[False] * 6, [True] * 4 + [False] * 2]),
    }
    torch.save({**module.state_dict(), **inputs}, folder / "state.pt")
    printed = run(program, folder / "state.pt", folder / "output.pt")
    assert f"{len(module.state_dict())} parameters" in printed
    expected, _ = module(inputs["x"], inputs["key"], inputs["value"], key_padding_mask=inputs["padding"])
    assert torch.equal(torch.load(folder / "output.pt"), expected)


def test_find_package_of_the_installed_python_package(tmp_path: Path) -> None:
    build(HERE / "find_package", tmp_path, PREFIXES, "-DLOAD_STATE=ON")
    check_consumer(tmp_path / "consumer")
    check_state(tmp_path / "load_state", tmp_path)


class Attentions(torch.nn.Module):
    """Both kinds, with options and masks, so that a package has operators with arguments of every type."""

    def __init__(self) -> None:
        super().__init__()
        self.multihead = fused_mha.MultiheadAttention(
            12, 4, batch_first=True, num_kv_heads=2, causal_alignment="bottom_right", sink="learned"
        )
        self.additive = fused_mha.AdditiveAttention(12, 7, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, padding: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, weights = self.multihead(x, x, x, is_causal=True)
        context, alignment = self.additive(y, memory, memory, padding, need_weights=True)
        return y, weights, context, alignment


def test_a_package_of_aotinductor_runs_in_python_and_in_cpp(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attentions().eval()
    torch.nn.init.normal_(model.multihead.sink)
    n, length, s = (torch.export.Dim(name, min=2, max=64) for name in "nls")
    example = (torch.randn(3, 5, 12), torch.randn(3, 6, 7), torch.zeros(3, 6, dtype=torch.bool))
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=({0: n, 1: length}, {0: n, 1: s}, {0: n, 1: s}))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    # Other sizes than the example's, and a sample whose keys are all hidden.
    inputs = [torch.randn(2, 9, 12), torch.randn(2, 11, 7), torch.arange(11) >= torch.tensor([[8], [0]])]
    expected = [tensor.detach() for tensor in model(*inputs)]
    assert not expected[2][1].any()
    torch.testing.assert_close(list(torch._inductor.aoti_load_package(package)(*inputs)), expected)

    prefix = f"{fused_mha.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    build(HERE / "find_package", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}", "-DRUN_PACKAGE=ON")
    torch.save(inputs, tmp_path / "inputs.pt")
    program_and_files = (tmp_path / "build" / "run_package", package, tmp_path / "inputs.pt", tmp_path / "outputs.pt")
    run(*program_and_files, libraries=TORCH_FOLDER / "lib")
    torch.testing.assert_close(list(torch.load(tmp_path / "outputs.pt")), expected)


def test_find_package_finds_the_torch_beside_the_package(tmp_path: Path) -> None:
    if Path(fused_mha.__file__).parents[1] != TORCH_FOLDER.parent:
        pytest.skip("fused_mha and torch are installed in different folders")
    arguments = [f"-DCMAKE_PREFIX_PATH={fused_mha.cmake_prefix_path}", "-DPython_EXECUTABLE=/nonexistent"]
    log = build(HERE / "find_package", tmp_path, *arguments)
    assert f"in {TORCH_FOLDER}" in log
    check_consumer(tmp_path / "consumer")


@pytest.fixture(scope="module")
def subproject(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole library built inside a consumer, and installed from there; generic kernels only, to save time."""
    folder = tmp_path_factory.mktemp("add_subdirectory")
    options = [
        f"-DFUSED_MHA_TORCH_DIR={TORCH_FOLDER}",
        "-DFUSED_MHA_INSTRUCTION_SETS=generic",
        "-DFUSED_MHA_INSTALL=ON",
        f"-DCMAKE_INSTALL_PREFIX={folder / 'prefix'}",
    ]
    log = build(HERE / "add_subdirectory", folder / "build", *options)
    assert "cuda toolkit" not in log.lower()
    return folder


def test_add_subdirectory(subproject: Path) -> None:
    check_consumer(subproject / "build" / "consumer")


def test_find_package_of_an_installed_tree(subproject: Path, tmp_path: Path) -> None:
    run("cmake", "--install", subproject / "build")
    prefix = f"{subproject / 'prefix'};{torch.utils.cmake_prefix_path}"
    build(HERE / "find_package", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    check_consumer(tmp_path / "consumer")


def test_another_minor_version_of_torch_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "torch"
    (other / "share" / "cmake" / "Torch").mkdir(parents=True)
    for name in ("include", "lib"):
        (other / name).symlink_to(TORCH_FOLDER / name)
    (other / "share" / "cmake" / "Torch" / "TorchConfig.cmake").touch()
    (other / "share" / "cmake" / "Torch" / "TorchConfigVersion.cmake").write_text('set(PACKAGE_VERSION "2.0.1")\n')
    configure = ["cmake", "-S", HERE / "find_package", "-B", tmp_path / "build", f"-DFUSED_MHA_TORCH_DIR={other}"]
    result = subprocess.run(
        [*configure, f"-DCMAKE_PREFIX_PATH={fused_mha.cmake_prefix_path}"],
        env=environment_without_cuda(),
        text=True,
        capture_output=True,
    )
    assert result.returncode != 0
    assert "cannot be used with torch 2.0" in " ".join(result.stderr.split())
