"""Several processes: DDP, FSDP2 and tensor parallel train fused and compute what one process computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.report import collecting, reports
from examples.distributed import COLUMNS_AND_ROWS, GPT

PROCESSES = 2
ROOT = Path(__file__).parents[2]
OPTIONS = {"pick": "fused", "inner_backend": "aot_eager"}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(model: GPT, how: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    if how == "compiled DDP":  # Dynamo splits the graph at the buckets
        return torch.compile(DistributedDataParallel(model, bucket_cap_mb=2), backend=backend, options=OPTIONS)
    if how == "DDP of compiled":
        return DistributedDataParallel(torch.compile(model, backend=backend, options=OPTIONS), bucket_cap_mb=2)
    for block in model.blocks:
        if how == "tensor parallel":
            parallelize_module(block, mesh, COLUMNS_AND_ROWS)
        else:
            fully_shard(block, mesh=mesh)
        block.compile(backend=backend, options=OPTIONS)
    return fully_shard(model, mesh=mesh) if how == "FSDP" else model


def process(rank: int, how: str, file: str) -> None:
    """One process of the test."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=PROCESSES)
    train(rank, how)  # whose models are gone before their process group, as in examples/distributed.py
    dist.destroy_process_group()


def train(rank: int, how: str) -> None:
    """Two steps, compared with the same model in one process on all the data."""
    torch.manual_seed(0)
    model, alone = (GPT(width=256, layers=2) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    names = [name for name, _ in alone.named_parameters()]
    run = spread(model, how)
    data = torch.randint(97, (PROCESSES, 2, 33))
    for _ in range(2):
        parts = data if how == "tensor parallel" else data[rank : rank + 1]
        run(parts.flatten(0, 1)).square().mean().backward()
        alone(data.flatten(0, 1)).square().mean().backward()
        wanted = dict(alone.named_parameters())
        for name, parameter in zip(names, model.parameters(), strict=True):
            got = whole(parameter.grad)
            torch.testing.assert_close(
                got, wanted[name].grad, atol=1e-5, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}"
            )
        for module in (model, alone):
            module.zero_grad()
    sites = [site for graph in reports() for site in graph.sites]
    assert sites and all(site.fused for site in sites), sites
    if how == "compiled DDP":
        assert len(reports()) > 1, "one bucket"


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["compiled DDP", "DDP of compiled", "FSDP", "tensor parallel"])
def test_training_is_that_of_one_process(how: str, tmp_path: Path) -> None:
    mp.spawn(process, (how, str(tmp_path / "rendezvous")), nprocs=PROCESSES)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["ddp", "fsdp", "tensor"])
def test_the_example_runs(how: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "examples/distributed.py", "--parallel", how, "--steps", "3", "--inner-backend", "aot_eager"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 3 and losses[-1] < losses[0] and "fused cpu_flash" in done.stdout


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_dtensor_inside_the_attention_is_named(one_process) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v

    mesh = init_device_mesh("cpu", (1,))
    local = torch.randn(3, 2, 4, 32, 16).unbind()
    spread = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in local]
    with collecting() as graphs:
        out = torch.compile(plain, backend=backend, options=OPTIONS)(*spread)
    torch.testing.assert_close(out.to_local(), plain(*local))
    (site,) = graphs[0].sites
    assert site.blocker.reason.startswith("it reads a DTensor, which defines its own operations: attend to local")
    assert site.location.code.startswith("return torch.softmax(q @ k")
    with collecting() as graphs:
        attend = torch.compile(lambda *t: plain(*(x.to_local() for x in t)), backend=backend, options=OPTIONS)
        torch.testing.assert_close(attend(*spread), plain(*local))
    assert graphs[0].sites[0].fused
