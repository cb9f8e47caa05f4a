# SPDX-License-Identifier: BSD-3-Clause
from __future__ import annotations

import os

import fused_mha  # noqa: F401  registers the operators
import hypothesis
import pytest
import torch
from fused_mha import _C

hypothesis.settings.register_profile(
    "fused_mha",
    max_examples=int(os.environ.get("FUSED_MHA_EXAMPLES", "60")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("fused_mha")


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() and _C.build_info()["cuda"] else ["cpu"]


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> str:
    """Every device for which this build holds kernels."""
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=_C.supported_cpu_isas())
def isa(request: pytest.FixtureRequest):
    """Each instruction set that this processor has, in force for the test."""
    before = _C.get_cpu_isa()
    _C.set_cpu_isa(request.param)
    yield request.param
    _C.set_cpu_isa(before)


@pytest.fixture(params=[*_C.supported_cpu_isas(), *_devices()[1:]])
def kernels(request: pytest.FixtureRequest):
    """All kernels in turn: each instruction set of this processor, in force for the test, and a GPU's. The device."""
    if request.param in _devices():
        yield request.param
        return
    before = _C.get_cpu_isa()
    _C.set_cpu_isa(request.param)
    yield "cpu"
    _C.set_cpu_isa(before)


@pytest.fixture
def threads():
    """A function that sets the number of threads; the old number comes back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
