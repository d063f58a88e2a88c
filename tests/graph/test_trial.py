"""What the user's own device is measured for: sites while they are compiled, and calibrations that are kept."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.bench.calibrate import grid
from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.sdpa import CPU_FLASH
from attn_fuse.picker import evidence, site_run
from attn_fuse.picker import pick as picker
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, REACH, Row, Table
from attn_fuse.picker.pick import Times
from attn_fuse.picker.regression import distance
from attn_fuse.picker.site_run import timed
from attn_fuse.picker.timing import Timing, machine, this_device
from attn_fuse.picker.workers import note
from attn_fuse.report import collecting
from attn_fuse.torch_internals import apart_from_dynamo

CPU = torch.device("cpu")
HERE = this_device(CPU)
VERSION = torch.__version__
TINY = Case("float32", False, 1, 4, 6, 6, 8)
Q = torch.arange(1.0 * 4 * 6 * 8).sin().view(1, 4, 6, 8)


def rows(ratios: dict[str, float]) -> tuple[Row, ...]:
    return (Row(TINY, {AS_WRITTEN: 10.0} | {name: 10.0 * ratio for name, ratio in ratios.items()}),)


def site_of(function, *inputs: object, **options: object) -> attn_fuse.SiteReport:
    torch._dynamo.reset()
    torch.compile(function, backend=backend, options={"inner_backend": "eager"} | options)(*inputs)
    (site,) = attn_fuse.reports()[-1].sites
    return site


def plain(q: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).softmax(-1) @ q


BAD = "ATTN_FUSE_TEST_BAD"


def timed_unless_bad(names: list[str], given: site_run.Job) -> Times:
    """In a worker: dies of the kernel that the environment names."""
    for name in (AS_WRITTEN, *names):
        note(name if name != AS_WRITTEN else "")
        if name == os.environ[BAD]:
            os.abort()
    return timed(names, given)


@pytest.fixture
def here(monkeypatch) -> None:
    """Sites are run in this process, and patches hold there."""

    def run(names: list[str], given: site_run.Job) -> Times:
        with torch.random.fork_rng([]), apart_from_dynamo(), collecting():
            return timed(names, given)

    monkeypatch.setattr(site_run, "_run", run)


class TestMeasured:
    """Sites measured while they are compiled, here with no compiler behind."""

    @pytest.fixture(autouse=True)
    def _cache(self, monkeypatch, tmp_path: Path) -> None:
        monkeypatch.setenv("ATTN_FUSE_CACHE", str(tmp_path))
        monkeypatch.setattr(site_run, "_known", {})
        self.folder = tmp_path / "measured"

    def test_it_is_said_and_kept(self, monkeypatch) -> None:
        q = Q.clone().requires_grad_()
        site = site_of(plain, q, pick="measured")
        because = site.attention["picked"] if site.fused else site.blocker.reason
        assert "as written, measured here" in because
        (kept,) = self.folder.iterdir()
        seconds = json.loads(kept.read_text())["seconds"]
        assert {AS_WRITTEN, "cpu_flash", "chunked"} <= seconds.keys() and min(seconds.values()) > 0
        for name, fast in (("chunked", 1e-9), (AS_WRITTEN, 1e-12)):
            # What is on disk is believed, so that the choice is known.
            kept.write_text(json.dumps({"seconds": seconds | {name: fast}, "why_not": {}}))
            monkeypatch.setattr(site_run, "_known", {})
            assert site_of(plain, q, pick="measured").kernel == (None if name == AS_WRITTEN else name)

    def test_equal_sites_are_measured_once(self, here) -> None:
        def layers(q):
            return plain(plain(plain(q)))

        torch._dynamo.reset()
        torch.compile(layers, backend=backend, options={"inner_backend": "eager", "pick": "measured"})(Q)
        assert len(attn_fuse.reports()[-1].sites) == 3 and len([*self.folder.iterdir()]) == 1

    def test_behind_a_site_that_is_fused(self, here, monkeypatch) -> None:
        """What it reads is then a call of a kernel, which the program as written has no mode for."""
        fast = {"cpu_flash": Timing(0.5, 0.5, 0.5, 1)}
        monkeypatch.setattr(site_run, "interleaved", lambda runs, *_: dict.fromkeys(runs, Timing(1, 1, 1, 1)) | fast)
        torch._dynamo.reset()
        options = {"inner_backend": "eager", "pick": "measured"}
        torch.compile(lambda q: plain(plain(plain(q))), backend=backend, options=options)(Q)
        for site in attn_fuse.reports()[-1].sites:
            assert site.attention["picked"] == "2.0 times as fast as written, measured here on its own sizes"

    @pytest.mark.thorough
    def test_dropout_and_the_random_state(self) -> None:
        def dropped(q):
            return torch.dropout((q @ q.mT).softmax(-1), 0.5, True) @ q

        torch._dynamo.reset()
        run = torch.compile(dropped, backend=backend, options={"inner_backend": "eager", "pick": "measured"})
        torch.manual_seed(3)
        state = torch.get_rng_state()
        run(Q)
        first = torch.rand(1)
        torch.set_rng_state(state)
        run(Q)
        assert first == torch.rand(1), "measuring draws from no random state of the user's"

    def test_growing_lengths(self, here) -> None:
        torch._dynamo.reset()
        run = torch.compile(
            plain, backend=backend, dynamic=True, options={"inner_backend": "eager", "pick": "measured"}
        )
        for length in (5, 6):
            q = Q[:, :, :length]
            assert torch.allclose(run(q), plain(q), atol=1e-6)

    def test_behind_a_backend_of_the_users_own(self) -> None:
        """No other process has it, and in this one nothing would stop a kernel that hangs."""

        def own(graph, inputs):
            return graph.forward

        torch._dynamo.register_backend(own, "registered_by_a_test")
        q = Q.clone().requires_grad_()
        for inner in (own, "registered_by_a_test"):
            site = site_of(plain, q, pick="measured", inner_backend=inner)
            because = site.attention["picked"] if site.fused else site.blocker.reason
            assert because.endswith("; measuring here failed (no other process has the inner backend)")
            assert not self.folder.exists()

    def test_a_failure_falls_back_to_the_evidence(self, here, monkeypatch) -> None:
        def fails(*_: object) -> None:
            raise RuntimeError("no such\nluck")

        monkeypatch.setattr(site_run, "interleaved", fails)
        found = Table(HERE, VERSION, rows({"cpu_flash": 0.5, "chunked": 2.0, "flex": 2.0}))
        monkeypatch.setattr(evidence, "tables", lambda: (found,))
        site = site_of(plain, Q, pick="measured")
        assert site.kernel == "cpu_flash"
        assert site.attention["picked"].endswith("; measuring here failed (RuntimeError: no such)")
        assert not self.folder.exists()

    @pytest.mark.parametrize("error", [RuntimeError, torch.AcceleratorError])
    def test_a_kernel_that_fails_is_left_out(self, error: type[Exception], here) -> None:
        def fails(x):
            raise error("out of luck")

        real = CPU_FLASH.emit
        failing = lambda call: call.node(torch.ops.attn_fuse_trial.fails, real(call))  # noqa: E731
        with torch.library._scoped_library("attn_fuse_trial", "FRAGMENT") as library:
            library.define("fails(Tensor x) -> Tensor")
            library.impl("fails", torch.empty_like, "Meta")
            library.impl("fails", fails, "CPU")
            object.__setattr__(CPU_FLASH, "emit", failing)
            try:
                site = site_of(plain, Q, pick="measured")
            finally:
                object.__setattr__(CPU_FLASH, "emit", real)
        if error is torch.AcceleratorError:  # in another process it is spared; no other is run in this one
            because = site.attention["picked"] if site.fused else site.blocker.reason
            assert "measuring here failed (AcceleratorError: out of luck)" in because
        else:
            assert site.kernel != "cpu_flash"
            assert site.why_not["cpu_flash"] == ("running it here failed: RuntimeError: out of luck",)

    @pytest.mark.parametrize("bad", ["cpu_flash", pytest.param(AS_WRITTEN, marks=pytest.mark.thorough)])
    def test_a_kernel_that_ends_its_process_is_left_out(self, bad: str, monkeypatch) -> None:
        monkeypatch.setenv(BAD, bad)
        monkeypatch.setattr(site_run, "timed", timed_unless_bad)
        site = site_of(plain, Q, pick="measured")
        if bad == AS_WRITTEN:
            because = site.attention["picked"] if site.fused else site.blocker.reason
            assert "measuring here failed (its process died of signal SIGABRT)" in because
        else:
            assert site.why_not[bad] == ("running it here failed: its process died of signal SIGABRT",)
            assert "measured here" in (site.attention["picked"] if site.fused else site.blocker.reason)

    @pytest.mark.parametrize("factor", [1.0, 1.01])
    def test_a_kernel_without_evidence_is_checked(self, factor: float, here, monkeypatch) -> None:
        unknown = dataclasses.replace(
            CPU_FLASH, needs_evidence=True, emit=lambda call: call.node(torch.mul, CPU_FLASH.emit(call), factor)
        )
        monkeypatch.setattr(picker, "KERNELS", tuple(unknown if k is CPU_FLASH else k for k in KERNELS))
        monkeypatch.setattr(picker, "_LARGE", 1)
        monkeypatch.setattr(evidence, "tables", lambda: ())
        site = site_of(plain, Q.clone().requires_grad_())
        if factor == 1:
            said = site.attention["picked"] if site.fused else site.why_not["cpu_flash"][0]
            assert said.endswith(", checked and timed here")
            assert (site.ratios["cpu_flash"] < 1) is site.fused
        else:
            assert site.why_not["cpu_flash"][0].startswith("its self-check failed: the rewritten output 0 is ")

    def test_too_large_to_try(self, monkeypatch) -> None:
        monkeypatch.setattr(site_run, "free_memory", lambda device: 100)
        site = site_of(plain, Q, pick="measured")
        because = site.attention["picked"] if site.fused else site.blocker.reason
        assert "measuring here failed (it takes " in because


class TestCalibration:
    @pytest.fixture(autouse=True)
    def _cache(self, monkeypatch, tmp_path: Path):
        monkeypatch.setenv("ATTN_FUSE_CACHE", str(tmp_path))
        evidence.tables.cache_clear()
        yield
        evidence.tables.cache_clear()

    def test_is_kept_and_believed(self) -> None:
        evidence.write_table(evidence.own_path(HERE, VERSION), machine(CPU), rows({"cpu_flash": 0.01}))
        site = site_of(plain, Q)
        assert site.kernel == "cpu_flash"
        assert "100.0 times as fast as written, by measurements here, the nearest at" in site.attention["picked"]

    @pytest.mark.parametrize(
        "text",
        ["", "[]", "{}", '{"machine": {}, "rows": []}', '{"machine": {"cpu": 1}, "rows": [{}]}', "\0", "[1", "7"],
    )
    def test_malformed_is_ignored_with_one_warning(self, text: str, caplog) -> None:
        path = evidence.own_path(HERE, VERSION)
        path.write_text(text)
        with caplog.at_level(logging.WARNING, "attn_fuse"):
            assert not any(t.own for t in evidence.tables()) and evidence.tables()
            evidence.tables()
            site_of(plain, Q)
        (warning,) = [r.getMessage() for r in caplog.records if "is ignored" in r.getMessage()]
        assert str(path) in warning and "--forget" in warning and "\n" not in warning

    def test_where(self, monkeypatch, tmp_path: Path) -> None:
        assert evidence.cache_dir() == tmp_path
        monkeypatch.delenv("ATTN_FUSE_CACHE")
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert evidence.cache_dir() == Path("/somewhere/attn_fuse")
        monkeypatch.setattr(sys, "platform", "darwin")
        assert evidence.cache_dir() == Path.home() / "Library" / "Caches" / "attn_fuse"

    def test_the_grid_tells_most_first(self) -> None:
        cases = grid("cpu")
        assert len(cases) == len(set(cases)) > 100 and cases[0].mask == "causal" and cases[0].training
        gaps = [min(distance(case, before, "cpu") for before in cases[:n]) for n, case in enumerate(cases) if n]
        assert gaps == pytest.approx(sorted(gaps, reverse=True))
        assert max(min(distance(case, one, "cpu") for one in cases[:24]) for case in cases) < REACH
