# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel and fully_shard, two gloo processes: they train as one process does on all data."""

from __future__ import annotations

import os
from pathlib import Path

import fused_mha
import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)

WORLD = 2
# The last sample of each process's half differs in length, one is empty.
LENGTHS = torch.tensor([[5], [3], [0], [2]])
WAYS = ("ddp", "fsdp of layers", "fsdp of each attention", "fsdp of out_proj", "fsdp, replaced afterwards")
STEPS = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(5) >= LENGTHS


def distribute(way: str) -> nn.Module:
    module = model()
    if way != "fsdp, replaced afterwards":
        fused_mha.replace_multihead_attention(module)
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(module)  # refuses parameters that get no gradient
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in module.layers:
        if way == "fsdp of out_proj":
            fully_shard(layer.self_attn.out_proj, mesh=mesh)
        if way in ("fsdp of each attention", "fsdp, replaced afterwards"):
            fully_shard(layer.self_attn, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    if way == "fsdp, replaced afterwards":
        report = fused_mha.replace_multihead_attention(module)
        assert len(report.replaced) == 2, str(report)
    return module


def work(rank: int, folder: str) -> None:
    """One process: trains on its half of the data each way, and leaves what it found in a file."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name need not resolve
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    x, padding = (tensor.chunk(WORLD)[rank] for tensor in data())
    found = {}
    for way in WAYS:
        module = distribute(way)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            module(x, src_key_padding_mask=padding).square().mean().backward()
            optimizer.step()
        parameters = {
            name.removeprefix("module."): tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
            for name, tensor in module.named_parameters()
        }
        module.eval()
        with torch.no_grad():
            output = module(x, src_key_padding_mask=padding)
        found[way] = {"parameters": parameters, "output": output}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each process found."""
    folder = tmp_path_factory.mktemp("distributed")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=WORLD)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(results: list[dict], way: str) -> None:
    alone = model()
    fused_mha.replace_multihead_attention(alone)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    x, padding = data()
    before = {name: parameter.detach().clone() for name, parameter in alone.named_parameters()}
    for _ in range(STEPS):
        optimizer.zero_grad()
        alone(x, src_key_padding_mask=padding).square().mean().backward()
        optimizer.step()
    for rank, result in enumerate(results):
        parameters = result[way]["parameters"]
        assert parameters.keys() == before.keys()
        for name, expected in alone.named_parameters():
            torch.testing.assert_close(parameters[name], expected.detach(), rtol=1e-4, atol=1e-6, msg=name)
        assert not torch.equal(
            parameters["layers.0.self_attn.in_proj_weight"], before["layers.0.self_attn.in_proj_weight"]
        )
        expected = alone.eval()(x, src_key_padding_mask=padding).chunk(WORLD)[rank]
        torch.testing.assert_close(result[way]["output"], expected.detach(), rtol=1e-4, atol=1e-5)
