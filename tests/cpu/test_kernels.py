"""Every reason why a kernel says no, and what the picker goes by. What the kernels compute is held by test_grid.py."""

from __future__ import annotations

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


class TestEveryReasonOfCpuFlash:
    q, k, v = torch.arange(3.0 * 2 * 4 * 6 * 8).sin().view(3, 2, 4, 6, 8)
    bias = torch.arange(4.0 * 6 * 6).cos().view(1, 4, 6, 6)

    def declined(self, function, *inputs: torch.Tensor, reason: str) -> None:
        site = site_of(function, *(inputs or (self.q, self.k, self.v)), kernels=["cpu_flash"])
        assert site.status == "as written" and site.why_not["cpu_flash"] == (reason,)
        assert site.blocker.reason == f"no kernel can run it: cpu_flash: {reason}"
        torch._dynamo.reset()
        site = site_of(function, *(inputs or (self.q, self.k, self.v)))
        assert site.kernel == "chunked" and site.why_not["cpu_flash"] == (reason,)

    def test_dropout(self) -> None:
        def dropped(q, k, v):
            return torch.dropout((q @ k.mT).softmax(-1), 0.5, True) @ v

        self.declined(dropped, reason="torch has no fused attention with dropout on CPU")

    def test_a_bias_with_a_gradient(self) -> None:
        bias = torch.nn.Parameter(self.bias.clone())

        def biased(q, k, v):
            return (q @ k.mT + bias).softmax(-1) @ v

        self.declined(biased, reason="a bias needs a gradient, which this kernel does not give")

    def test_a_bias_that_may_hide(self) -> None:
        def hidden(q, k, v):
            return (q @ k.mT + self.bias).softmax(-1) @ v

        reason = "a bias that may hide every key of a query, as padding does, would get a wrong gradient"
        self.declined(hidden, self.q.clone().requires_grad_(), self.k, self.v, reason=reason)

    def test_a_finite_fill_of_whole_rows(self) -> None:
        def filled(q, k, v):
            return (q @ k.mT).masked_fill(self.bias > 0, -1e9).softmax(-1) @ v

        reason = "a query that sees no key would get a gradient, which the program's fill value stops"
        self.declined(filled, self.q.clone().requires_grad_(), self.k, self.v, reason=reason)

    def test_a_finite_fill_in_float16(self) -> None:
        def filled(q, k, v):
            return (q @ k.mT).masked_fill(self.bias > 0, -65504.0).softmax(-1) @ v

        reason = "a query that sees no key would not get the mean of the values in float16"
        self.declined(filled, self.q.half(), self.k.half(), self.v.half(), reason=reason)

    def test_a_softcap(self) -> None:
        def capped(q, k, v):
            return (20 * torch.tanh(q @ k.mT / 20)).softmax(-1) @ v

        self.declined(capped, reason="takes no softcap")

    def test_a_sink(self) -> None:
        def with_sink(q, k, v):
            scores = q @ k.mT
            return torch.cat([scores, self.bias[..., :1].expand(2, 4, 6, 1)], -1).softmax(-1)[..., :-1] @ v

        self.declined(with_sink, reason="takes no sink")

    def test_a_factor(self) -> None:
        def multiplied(q, k, v):
            return ((q @ k.mT).softmax(-1) * self.bias) @ v

        self.declined(multiplied, reason="takes no factor on the weights that differs from key to key")

    def test_a_function(self) -> None:
        def rectified(q, k, v):
            return (q @ k.mT).relu().softmax(-1) @ v

        self.declined(rectified, reason="takes no function of the scores: the scores pass through relu")

    def test_switched_off(self) -> None:
        def plain(q, k, v):
            return (q @ k.mT).softmax(-1) @ v

        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            site = site_of(plain, self.q, self.k, self.v, kernels=["cpu_flash"])
        assert site.status == "as written" and site.why_not["cpu_flash"] == (
            "flash attention is switched off (torch.nn.attention.sdpa_kernel or torch.backends.cuda.enable_flash_sdp)",
            "torch would not run flash attention here (is it switched off?)",
        )

    def test_no_keys(self) -> None:
        def plain(q, k, v):
            return (q @ k.mT).softmax(-1) @ v

        site = site_of(plain, self.q, self.k[:, :, :0], self.v[:, :, :0], kernels=["cpu_flash"])
        assert "there is no key" in str(site.blocker)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 5), (5, 8), (16, 40), (64, 1)])
@pytest.mark.parametrize("masked", ["no mask", "causal", "padded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cpu_flash_pads_the_narrower_rows(head_dim: int, value_dim: int, masked: str, dtype: torch.dtype) -> None:
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


def test_reasons_are_all_given() -> None:
    def both(q: torch.Tensor) -> torch.Tensor:
        return torch.dropout((20 * torch.tanh(q @ q.mT / 20)).softmax(-1), 0.5, True) @ q

    site = site_of(both, torch.randn(2, 4, 6, 8))
    assert len(site.why_not["cpu_flash"]) == 2 and site.kernel == "chunked"


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


def test_chunked_comes_last() -> None:
    assert [k.name for k in KERNELS if "cpu" in k.devices] == ["cpu_flash", "flex", "chunked"]


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
