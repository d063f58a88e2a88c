"""torch's CUDA kernels behind attn_fuse: each runs what it says it can, and computes what the program says."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.nn.functional as F

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.picker.timing import interleaved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KERNELS = ("cudnn", "cuda_flash", "cuda_efficient")


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], device=q.device, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.dropout(((q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])).softmax(-1), 0.25) @ v


def tensors(dtype: torch.dtype, head_dim: int = 64) -> list[torch.Tensor]:
    return [torch.randn(2, 4, 128, head_dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("function", [plain, causal], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernel(kernel: str, function, dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype)
    fused = torch.compile(function, backend=backend, options={"kernels": [kernel]})
    out = fused(q, k, v)
    (site,) = attn_fuse.reports()[-1].sites
    if dtype == torch.float32 and kernel != "cuda_efficient":
        assert site.status == "as written" and site.why_not[kernel]
        return
    assert site.kernel == kernel
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact, usual = function(*wide), function(q, k, v)
    pull = torch.randn_like(exact)
    results = [
        (o, *torch.autograd.grad(o, t, pull.to(o))) for o, t in ((out, (q, k, v)), (usual, (q, k, v)), (exact, wide))
    ]
    for name, found, as_written, reference in zip(("out", "query", "key", "value"), *results, strict=True):
        error = (found.double() - reference).abs().max().item()
        budget = 4 * (as_written.double() - reference).abs().max().item()
        assert error <= budget + 16 * torch.finfo(dtype).eps * reference.abs().max().item(), name


def test_dropout_in_training_fuses() -> None:
    q, k, v = tensors(torch.bfloat16)
    ones = torch.ones_like(v)
    torch.manual_seed(0)
    fused = torch.compile(dropped, backend=backend, options={"pick": "fused", "strict": True})
    out = fused(q, k, ones)
    assert attn_fuse.reports()[-1].sites[0].fused
    # Rows of dropped weights sum to 1 on average; the same seed gives the same.
    assert abs(out.float().mean().item() - 1) < 0.02
    torch.manual_seed(0)
    assert torch.equal(out, fused(q, k, ones))


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(1, 4, 128, 128))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-2, -1) / 8 + self.bias).softmax(-1) @ v


def test_a_bias_with_gradient_runs_on_the_efficient_kernel() -> None:
    q, k, v = tensors(torch.float32)
    model = Biased().cuda()
    model(q, k, v).square().sum().backward()
    wanted, model.bias.grad = model.bias.grad, None
    options = {"strict": True, "kernels": ["cuda_efficient"]}
    torch.compile(model, backend=backend, options=options)(q, k, v).square().sum().backward()
    assert attn_fuse.reports()[-1].sites[0].kernel == "cuda_efficient"
    torch.testing.assert_close(model.bias.grad, wanted, atol=1e-3, rtol=1e-3)


def test_the_clock_does_not_wait_for_the_host() -> None:
    x = torch.zeros(8, device="cuda")

    def call() -> None:
        time.sleep(1e-3)
        x.add_(1)

    found = interleaved({"slow to issue": call}, x.device, rounds=5, seconds=1.0, shortest=2e-3)["slow to issue"]
    assert found.median < 1e-4 and found.host is not None and found.host >= 1e-3
    whole = interleaved({"step": call}, x.device, rounds=5, seconds=1.0, whole_programs=True)["step"]
    assert whole.median >= 1e-3 and whole.host is None
