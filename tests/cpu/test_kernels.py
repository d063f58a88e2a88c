"""Kernels in whole programs: switched off, padded, declined. test_grid.py holds what they compute."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.kernels import KERNELS

FUSED = {"inner_backend": "eager", "pick": "fused"}


def site_of(function, *inputs: object, **options: object) -> attn_fuse.SiteReport:
    torch.compile(function, backend=backend, options=FUSED | options)(*inputs)
    (site,) = attn_fuse.reports()[-1].sites
    return site


def test_switched_off() -> None:
    def plain(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        site = site_of(plain, *torch.randn(3, 2, 4, 6, 8), kernels=["cpu_flash"])
    assert site.status == "as written" and site.why_not["cpu_flash"] == (
        "flash attention is switched off (torch.nn.attention.sdpa_kernel or torch.backends.cuda.enable_flash_sdp)",
        "torch would not run flash attention here (is it switched off?)",
    )


@pytest.mark.parametrize(
    ("kernel", "inner"), [("cpu_flash", "eager"), pytest.param("flex", "inductor", marks=pytest.mark.thorough)]
)
def test_no_keys(kernel: str, inner: str) -> None:
    def plain(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    q, none = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 0, 8)
    site = site_of(plain, q, none, none, kernels=[kernel], inner_backend=inner)
    assert site.status == "refused" and "there is no key" in str(site.blocker)


PADDED = [*itertools.product(((8, 5), (5, 8), (16, 40), (64, 1)), ("no mask", "causal", "padded"))]
SOME_PADDED = [((8, 5), "padded"), ((5, 8), "causal"), ((64, 1), "no mask")]


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize(
    ("dims", "masked"),
    [pytest.param(*x, marks=() if x in SOME_PADDED else pytest.mark.thorough) for x in PADDED],
    ids=str,
)
def test_cpu_flash_pads_the_narrower_rows(dims: tuple[int, int], masked: str, dtype: torch.dtype) -> None:
    head_dim, value_dim = dims
    given = [torch.randn(2, heads, 7, n).to(dtype) for heads, n in ((4, head_dim), (2, head_dim), (2, value_dim))]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.mT) / math.sqrt(head_dim)
        if masked == "causal":
            scores = scores.masked_fill(torch.ones(7, 7).tril() == 0, -math.inf)
        if masked == "padded":
            scores = scores.masked_fill(torch.arange(7) >= torch.tensor([7, 4]).view(2, 1, 1, 1), -math.inf)
        # What a caller gets it may write into.
        return (scores.softmax(-1) @ v).mul_(2.0)

    def results(function) -> list[torch.Tensor]:
        tensors = [x.clone().requires_grad_() for x in given]
        out = function(*tensors)
        return [
            out,
            *torch.autograd.grad(out, tensors, torch.arange(float(out.numel())).sin().view(out.shape).to(dtype)),
        ]

    site = site_of(attention, *(x.clone().requires_grad_() for x in given), kernels=["cpu_flash"])
    assert (site.status, site.kernel) == ("fused", "cpu_flash")
    torch._dynamo.reset()
    fused = torch.compile(attention, backend=backend, options=FUSED | {"kernels": ["cpu_flash"], "strict": True})
    tolerance = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 0.08, "rtol": 0.05}
    for found, expected in zip(results(fused), results(attention), strict=True):
        torch.testing.assert_close(found, expected, **tolerance)


def test_a_kernel_of_another_device_says_so() -> None:
    site = site_of(lambda q: (q @ q.mT).softmax(-1) @ q, torch.randn(2, 4, 6, 8))
    elsewhere = {k.name: ("runs on cuda, not on cpu",) for k in KERNELS if k.devices == frozenset({"cuda"})}
    assert site.kernel == "cpu_flash" and site.why_not == elsewhere | {
        "flex": ("stores every score where the graph is not compiled by Inductor",),
        "chunked": ("cpu_flash is preferred",),
    }
    torch._dynamo.reset()
    site = site_of(lambda q: (q @ q.mT).softmax(-1) @ q, torch.randn(2, 4, 6, 8), kernels=["chunked", "cpu_flash"])
    assert site.kernel == "chunked" and site.why_not["cpu_flash"] == ("chunked is preferred",)
    assert site.why_not["cudnn"] == ("not among the kernels allowed",)


def test_the_default_pick_leaves_a_site_whose_weights_are_used() -> None:
    def with_weights(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (q @ q.mT).softmax(-1)
        return weights @ q, weights.mean(1)

    q = torch.randn(1, 4, 6, 8)
    reason = "the weights are also used outside the attention, so nothing is saved"
    site = site_of(with_weights, q, pick="fastest")
    assert site.status == "as written" and site.blocker.reason == reason
    assert site.why_not["cpu_flash"] == site.why_not["chunked"] == (reason,)
    for options in ({"pick": "fused"}, {"pick": "fastest", "kernels": ["cpu_flash"]}):
        torch._dynamo.reset()
        assert site_of(with_weights, q, **options).kernel == "cpu_flash"
