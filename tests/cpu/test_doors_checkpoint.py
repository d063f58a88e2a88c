"""Activation checkpoints around compiled blocks: what a checkpoint counts must not hold what the rewriting does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_fuse.report import collecting
from tests.block import Block

INDUCTOR = pytest.param("inductor", marks=pytest.mark.thorough)


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
@pytest.mark.parametrize("variant", ["as it is", "edited", pytest.param("frozen", marks=pytest.mark.thorough)])
def test_a_checkpoint_around_compiled_blocks(how: dict[str, Any], kernel: str, inner: str, variant: str) -> None:
    """edited: the mask is written between steps, so its contents are read again within the checkpoint."""
    if how is SELECTIVE and inner == "inductor":
        pytest.skip("plain Inductor, too, writes into the tensors that the checkpoint holds, and the checkpoint raises")
    torch.compiler.reset()
    blocks = nn.ModuleList([Block(), Block()]).requires_grad_(variant != "frozen")
    options = {"pick": "fused", "inner_backend": inner, "kernels": [kernel]}
    runs = [torch.compile(block, backend="attn_fuse", options=options) for block in blocks]

    def gradients(x: Tensor, run: Any) -> list[Tensor | None]:
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
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
            if variant == "edited":
                for block in blocks:
                    block.mask.mul_(2.0).clamp_(max=1.0)
    statuses = [site.status for graph in graphs for site in graph.sites]
    assert statuses and set(statuses) == {"fused"}
