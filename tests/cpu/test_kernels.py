"""The CPU kernel on every feature that it declares, against float64; and every reason why a kernel says no."""

from __future__ import annotations

import itertools

import pytest
import torch

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.kernels import KERNELS, evidence
from attn_fuse.report import collecting

FUSED = {"inner_backend": "eager", "pick": "fused"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# (batch, heads, kv_heads, q_len, kv_len, head_dim)
SHAPES = ((1, 1, 1, 1, 5, 8), (2, 4, 4, 7, 7, 24), (2, 4, 2, 5, 11, 40), (1, 6, 1, 13, 3, 16), (3, 2, 2, 16, 16, 80))
MASKS = ("none", "causal", "keep", "rows", "bias", "causal+bias", "lowest")


def attention(mask: str):
    """Hand-written attention with the mask of this name; `extra` is the mask's own tensor."""

    def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-2, -1) * 0.3
        if "causal" in mask:
            below = torch.arange(q.shape[2])[:, None] >= torch.arange(k.shape[2])
            scores = torch.where(below, scores, float("-inf"))
        if mask in ("keep", "rows"):
            scores = scores.masked_fill(~extra, float("-inf"))
        if mask == "lowest":
            scores = scores.masked_fill(~extra, torch.finfo(scores.dtype).min)
        if "bias" in mask:
            scores = scores + extra
        return scores.softmax(-1) @ v

    return written


def extra_for(mask: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    batch, heads, _, q_len, kv_len, _ = shape
    if mask in ("keep", "lowest"):
        keep = torch.rand(batch, 1, q_len, kv_len) > 0.3
        keep[..., 0] = mask == "keep"
        return keep
    if mask == "rows":
        return torch.arange(kv_len) < torch.randint(1, kv_len + 1, (batch, 1, 1, 1))
    return torch.randn(1, heads, q_len, kv_len, dtype=dtype)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_grid(mask: str, dtype: torch.dtype, training: bool) -> None:
    written, accepted = attention(mask), 0
    fused = torch.compile(written, backend=backend, options=FUSED, dynamic=False)
    for shape in SHAPES:
        torch._dynamo.reset()
        batch, heads, kv_heads, q_len, kv_len, head_dim = shape
        q = torch.randn(batch, q_len, heads, head_dim, dtype=dtype).transpose(1, 2).requires_grad_(training)
        k, v = (torch.randn(batch, kv_heads, kv_len, head_dim, dtype=dtype).requires_grad_(training) for _ in "kv")
        extra = extra_for(mask, shape, dtype)
        with collecting() as graphs:
            got = fused(q, k, v, extra)
        accepted += graphs[0].sites[0].fused
        wide = [t.detach().double().requires_grad_(training) for t in (q, k, v)]
        exact = written(*wide, extra.double() if extra.is_floating_point() else extra)
        usual = written(q, k, v, extra)
        pull = torch.randn_like(exact)
        results = [
            (out, *(torch.autograd.grad(out, inputs, pull.to(out)) if training else ()))
            for out, inputs in ((got, (q, k, v)), (usual, (q, k, v)), (exact, wide))
        ]
        for name, found, as_written, reference in zip(("out", "query", "key", "value"), *results, strict=False):
            error = (found.double() - reference).abs().max().item()
            budget = 4 * (as_written.double() - reference).abs().max().item()
            # The inputs are of order 1: what cancels to 0 still carries their rounding.
            budget += 32 * torch.finfo(dtype).eps * max(1.0, reference.abs().max().item())
            assert error <= budget, f"{name} of {shape}: {error:.3g} > {budget:.3g}"
    # Empty rows under a finite fill are refused in float16 and in training, and so is, in training, a bias that might
    # make such rows; all else must be accepted.
    refused = (mask == "lowest" and (training or dtype == torch.float16)) or ("bias" in mask and training)
    assert accepted == (0 if refused else len(SHAPES))


def site_of(function, *inputs: torch.Tensor, **options: object) -> attn_fuse.SiteReport:
    torch.compile(function, backend=backend, options=FUSED | options)(*inputs)
    (site,) = attn_fuse.reports()[-1].sites
    return site


def test_every_reason_of_the_cpu_kernel() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)

    def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.dropout((q @ k.mT).softmax(-1), 0.5, True) @ v

    def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT + bias).softmax(-1) @ v

    def hidden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q * bias.mean() @ k.mT + bias.detach()).softmax(-1) @ v

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).softmax(-1) @ v

    said = [
        (dropped, v, "torch has no fused attention with dropout on CPU"),
        (biased, v, "a bias needs a gradient, which this kernel does not give"),
        (hidden, v, "a bias that may hide every key of a query, as padding does, would get a wrong gradient"),
        (plain, v[..., :5], "value_dim 5 differs from head_dim 8"),
    ]
    for function, value, reason in said:
        site = site_of(function, q, k, value)
        assert site.status == "as written" and site.why_not["cpu_flash"] == (reason,)
        assert reason in site.blocker.reason
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch._dynamo.reset()
        assert "switched off" in site_of(plain, q, k, v).why_not["cpu_flash"][0]


def test_reasons_are_all_given() -> None:
    def both(q: torch.Tensor) -> torch.Tensor:
        return torch.dropout((q @ q.mT).softmax(-1), 0.5, True) @ q[..., :5]

    assert len(site_of(both, torch.randn(2, 4, 6, 8)).why_not["cpu_flash"]) == 2


def test_a_kernel_of_another_device_says_so() -> None:
    site = site_of(lambda q: (q @ q.mT).softmax(-1) @ q, torch.randn(2, 4, 6, 8))
    assert site.why_not == {k.name: ("runs on cuda, not on cpu",) for k in KERNELS if k.devices == frozenset({"cuda"})}


def test_the_picker_goes_by_the_evidence(monkeypatch) -> None:
    def rows(ratio: float) -> tuple[dict, ...]:
        shape = {"batch": 1, "heads": 4, "q_len": 6, "kv_len": 6, "head_dim": 8}
        return tuple(
            {**shape, "mask": m, "dtype": "float32", "training": t, "as_written_us": 10.0, "cpu_flash_us": 10 * ratio}
            for m, t in itertools.product(("none", "causal"), (True, False))
        )

    def plain(q: torch.Tensor) -> torch.Tensor:
        return (q @ q.mT).softmax(-1) @ q

    q = torch.randn(1, 4, 6, 8)
    monkeypatch.setattr(evidence, "table", lambda device: rows(1.2))
    site = site_of(plain, q, pick="fastest")
    assert site.status == "as written" and "cpu_flash takes 1.20 of the time as written" in site.blocker.reason
    assert "none mask, inference, float32, 1 x 4 heads, q_len 6, kv_len 6" in site.blocker.reason
    torch._dynamo.reset()
    assert site_of(plain, q, pick="fused").fused
    torch._dynamo.reset()
    assert site_of(plain, q, pick="fastest", kernels=["cpu_flash"]).fused
    torch._dynamo.reset()
    monkeypatch.setattr(evidence, "table", lambda device: rows(0.5))
    site = site_of(plain, q, pick="fastest")
    assert site.fused and "0.50 of the time as written" in site.attention["picked"]


def test_the_shipped_evidence_covers_what_the_picker_asks() -> None:
    rows = evidence.table("cpu")
    assert {row["mask"] for row in rows} == {"none", "causal", "bool", "bias"}
    assert {row["training"] for row in rows} == {True, False}
    assert all(row["as_written_us"] > 0 and row["cpu_flash_us"] > 0 for row in rows)
