"""Sites that are timed and checked on CUDA, in a worker of their own: what is picked, and what a failure leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.picker import evidence, site_run
from attn_fuse.report import SiteReport, collecting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of what is measured here; nothing was measured before."""
    monkeypatch.setenv("ATTN_FUSE_CACHE", str(tmp_path))
    monkeypatch.setattr(site_run, "_known", {})
    return tmp_path / "measured"


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / 8 + bias).softmax(-1) @ v


def site_of(**options: object) -> tuple[SiteReport, Tensor, Tensor]:
    """The report on the attention, what it gives, and what it gives in float64."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    given = [torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    given.append(torch.randn(8, 1024, 1024, device="cuda", dtype=torch.bfloat16))
    leaves = [x.requires_grad_() for x in given]
    with collecting() as graphs:
        out = torch.compile(biased, backend=backend, options=options)(*leaves)
        out.float().square().sum().backward()
    ((site,),) = [graph.sites for graph in graphs]
    return site, out.detach(), biased(*(x.detach().double() for x in leaves))


def test_times_are_measured_in_a_worker_and_kept(folder: Path) -> None:
    site, out, exact = site_of(pick="measured")
    said = f"{site.attention} {site.blocker} {site.why_not}"
    print(said)
    assert "measured here" in said and len([*folder.glob("*.json")]) == 1
    assert (out - exact).abs().max() < 0.05
    (kept,) = folder.glob("*.json")
    before = kept.read_text()
    site_run._known.clear()
    assert site_of(pick="measured")[0].kernel == site.kernel and kept.read_text() == before


def test_a_kernel_that_was_never_measured_is_checked_in_a_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "tables", lambda: ())
    monkeypatch.setattr("attn_fuse.picker.pick._LARGE", 1)
    site, out, exact = site_of(try_unmeasured=True)
    print(site.kernel, site.attention, site.why_not)
    failed = [why for reasons in site.why_not.values() for why in reasons if "failed" in why or "could not" in why]
    assert not failed and (out - exact).abs().max() < 0.05
    assert [*folder.glob("*.json")], "a verdict is kept"
