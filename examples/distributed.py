"""Train a small GPT with hand-written attention on several processes: DDP, FSDP2 or tensor parallel, compiled.

    torchrun --nproc-per-node 2 examples/distributed.py --parallel ddp        (or fsdp, or tensor)

It uses NCCL if every process has a GPU, else gloo on CPUs. Process 0 prints the loss and the outcome of each attention.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import attn_fuse


class Block(nn.Module):
    """Pre-norm attention and MLP. x: [batch, length, width]."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm(x)
        # Under tensor parallel a process holds some of the heads, so -1 reads their number off the projection.
        q, k, v = (
            p(h).view(batch, length, -1, self.head_dim).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(self.head_dim))
        att = att.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        att = torch.softmax(att, dim=-1)
        x = x + self.out((att @ v).transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """tokens: int64 [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(
        self, width: int = 64, heads: int = 4, layers: int = 3, length: int = 64, vocabulary: int = 97
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads, length) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


COLUMNS_AND_ROWS = {
    "query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(), "out": RowwiseParallel(),
    "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip


def parallel(model: GPT, how: str, device: torch.device, options: dict[str, object]) -> nn.Module:
    """`model` compiled by attn_fuse and spread over the processes. how: "ddp", "fsdp" or "tensor"."""
    if how == "ddp":
        wrapped = DistributedDataParallel(model)
        return torch.compile(wrapped, backend="attn_fuse", options=options)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        if how == "tensor":
            parallelize_module(block, mesh, COLUMNS_AND_ROWS)
        else:
            fully_shard(block, mesh=mesh)
        block.compile(backend="attn_fuse", options=options)
    if how == "fsdp":
        fully_shard(model, mesh=mesh)
    return model


def train(how: str, steps: int, inner_backend: str, device: torch.device) -> None:
    """Train a GPT for `steps` steps; process 0 prints the losses and the outcome of each attention."""
    torch.manual_seed(0)  # every process starts from the same model
    model = parallel(GPT().to(device), how, device, {"pick": "fused", "inner_backend": inner_backend})
    # Under tensor parallel all processes share one batch; else each has its own.
    generator = torch.Generator().manual_seed(0 if how == "tensor" else dist.get_rank())
    tokens = torch.randint(97, (4, 65), generator=generator).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(steps):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        for site in (site for graph in attn_fuse.reports() for site in graph.sites):
            print(f"{site.location}: {site.status} {site.kernel or ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=("ddp", "fsdp", "tensor"), default="ddp")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--inner-backend", default="inductor")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 examples/distributed.py")
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    # The model must not outlive the process group: deleting a DDP afterwards joins gloo's threads while holding the
    # interpreter's lock, which they may wait for.
    train(args.parallel, args.steps, args.inner_backend, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
