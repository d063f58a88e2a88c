"""Activation checkpoints around compiled blocks: what a checkpoint counts must not hold what the rewriting does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_fuse.report import collecting

INDUCTOR = pytest.param("inductor", marks=pytest.mark.thorough)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        seen = self.mask[: x.shape[1], : x.shape[1]] != 0
        weights = (q @ k.mT / 4).masked_fill(~seen, float("-inf")).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def keeps_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = any(name in str(operation) for name in ("mm", "attention"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {
    "use_reentrant": False,
    "context_fn": functools.partial(create_selective_checkpoint_contexts, keeps_products),
}


@pytest.mark.parametrize("inner", [pytest.param("eager", marks=pytest.mark.thorough), "aot_eager", INDUCTOR])
@pytest.mark.parametrize("kernel", ["cpu_flash", pytest.param("chunked", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "how", [{"use_reentrant": False}, {"use_reentrant": True}, SELECTIVE], ids=["plain", "reentrant", "selective"]
)
@pytest.mark.parametrize("edited", [False, True])
def test_a_checkpoint_around_compiled_blocks(how: dict[str, Any], kernel: str, inner: str, edited: bool) -> None:
    """edited: the mask is written between steps, so that its contents are read again within the checkpoint."""
    if how is SELECTIVE and inner == "inductor":
        pytest.skip("plain Inductor, too, writes into the tensors that the checkpoint holds, and the checkpoint raises")
    torch.compiler.reset()
    blocks = nn.ModuleList([Block(), Block()])
    options = {"pick": "fused", "inner_backend": inner, "kernels": [kernel]}
    runs = [torch.compile(block, backend="attn_fuse", options=options) for block in blocks]

    def gradients(x: Tensor, run: Any) -> list[Tensor]:
        for tensor in (x, *blocks.parameters()):
            tensor.grad = None
        run(x).square().sum().backward()
        return [tensor.grad for tensor in (x, *blocks.parameters())]

    with collecting() as graphs:
        for _ in range(3):
            x = torch.randn(2, 24, 32, requires_grad=True)
            got = gradients(x, lambda x: functools.reduce(lambda h, run: checkpoint(run, h, **how), runs, x))
            expected = gradients(x, lambda x: functools.reduce(lambda h, run: run(h), blocks, x))
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
            if edited:
                for block in blocks:
                    block.mask.mul_(2.0).clamp_(max=1.0)
    statuses = [site.status for graph in graphs for site in graph.sites]
    assert statuses and set(statuses) == {"fused"}
