"""An activation checkpoint in a graph that gives no gradient: torch compiles nothing there that it takes for random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_fuse.report import collecting
from tests.harness import every_day


def attend(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    return ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "inner", [*every_day(["eager", "aot_eager"], "aot_eager"), pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("learned", ["nothing", "weight", "weight, detached"])
def test_kernels(learned: str, use_reentrant: bool, inner: str) -> None:
    x, w = torch.randn(2, 64, 64) / 8, torch.randn(64, 192, requires_grad=learned != "nothing")

    def program(x: Tensor, w: Tensor) -> Tensor:
        out = checkpoint(attend, x, w, use_reentrant=use_reentrant) * 2
        return out.detach() if "detached" in learned else out

    options = {"pick": "fused", "inner_backend": inner}
    with collecting() as graphs:
        out = torch.compile(program, backend="attn_fuse", options=options)(x, w)
    expected = attend(x, w) * 2
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    (site,) = graphs[0].sites
    assert site.fused and (site.kernel == "cpu_flash") == (learned == "weight")
    if learned == "weight":
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), w)[0] for y in (out, expected)), atol=1e-4, rtol=1e-3)
