"""Kernels never measured on a device, which are checked and timed there before use; interpreted on the CPU.

Interpreted kernels are slow. For a kernel to be picked, the tests edit the verdict on disk or replace the clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.kernels.triton.flash.kernel import TRITON_FLASH
from attn_fuse.picker import site_run
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.pick import Times
from attn_fuse.picker.site_run import Job, timed
from attn_fuse.picker.timing import Timing
from attn_fuse.picker.workers import note
from attn_fuse.report import collecting
from tests.graph.h200_cases import T5, NanoGPT, padded
from tests.graph.h200_cases import words as words_of
from tests.h200 import dynamic
from tests.triton.interpreted import interpreted

pytestmark = pytest.mark.thorough

KERNEL = "triton_flash"
# The result of a run in which the kernel is faster.
FASTER = Times({KERNEL: 0.5, AS_WRITTEN: 1.0}, {})
UNTRIED = "was not measured on such a device, and is not tried unless it is asked for"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the verdicts. Every attention counts as large enough for a trial."""
    monkeypatch.setenv("ATTN_FUSE_CACHE", str(tmp_path))
    monkeypatch.setattr(site_run, "_known", {})
    monkeypatch.setattr("attn_fuse.picker.pick._LARGE", 1)
    return tmp_path / "measured"


def tensors(*shape: int, count: int = 3, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape).requires_grad_(grad) for _ in range(count)]


def hugging_face() -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    return padded(True), (*tensors(2, 2, 21, 16), words_of(2, 21))


def t5() -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    return T5(2, torch.float32, buckets=8), (*tensors(2, 2, 21, 16),)


def site_of(program: Callable[..., Tensor], inputs: tuple[Any, ...], **options: Any):
    """The report on the program's one attention, and the program's result."""
    torch._dynamo.reset()
    with collecting() as graphs:
        how = {"inner_backend": "eager"} | options
        result = torch.compile(program, backend=backend, options=how)(*inputs)
    (site,) = graphs[0].sites
    return site, result


def job_of(program: Callable[..., Tensor], inputs: tuple[Any, ...], patch: pytest.MonkeyPatch, **how: Any) -> Job:
    """The job that the other process would get."""
    jobs: list[Job] = []

    def run(names: list[str], job: Job) -> Times:
        jobs.append(job)
        return Times({}, {}, "not run")

    patch.setattr(site_run, "_run", run)
    site, _ = site_of(program, inputs, **how)
    assert site.why_not[KERNEL] == ("could not be checked: not run",), site
    (job,) = jobs
    return job


def verdict(job: Job) -> tuple[float | None, str, bool]:
    """The ratio of times, or None and the reason; and whether the verdict is kept."""
    found = timed([KERNEL], job)
    if KERNEL in found.seconds:
        return found.seconds[KERNEL] / found.seconds[AS_WRITTEN], "", True
    return None, found.why_not.get(KERNEL, found.failed), not found.failed


# ---- from the program to the report, with a separate process


@interpreted
def test_a_slow_kernel_is_not_used_and_that_is_known_from_then_on(folder: Path, monkeypatch: Any) -> None:
    program, inputs = hugging_face()
    site, _ = site_of(program, inputs)
    (said,) = site.why_not[KERNEL]
    assert not site.fused and said.endswith("times as slow as the program as written, checked and timed here"), site
    assert float(said.split()[0]) > 1
    (path,) = folder.iterdir()
    kept = json.loads(path.read_text())
    assert kept["seconds"].keys() == {KERNEL, AS_WRITTEN} and kept["seconds"][KERNEL] > kept["seconds"][AS_WRITTEN]

    def started(names: list[str], job: Job) -> None:
        raise AssertionError("it was checked before")

    monkeypatch.setattr(site_run, "_run", started)
    for known in (site_run._known, {}):  # in memory, then only on disk
        monkeypatch.setattr(site_run, "_known", known)
        assert site_of(program, inputs)[0].why_not[KERNEL] == (said,)
    # With another machine's times the kernel is faster.
    path.write_text(json.dumps(kept | {"seconds": {KERNEL: 0.25, AS_WRITTEN: 1.0}}))
    monkeypatch.setattr(site_run, "_known", {})
    site, result = site_of(program, inputs)
    assert site.kernel == KERNEL
    assert site.attention["picked"] == "4.0 times as fast as the program as written, checked and timed here"
    torch.testing.assert_close(result, program(*inputs))
    # With another driver the verdict does not count.
    monkeypatch.setattr(site_run, "cuda_driver", lambda: "another driver")
    monkeypatch.setattr(site_run, "_known", {})
    (said,) = site_of(program, inputs)[0].why_not[KERNEL]
    assert said == "could not be checked: AssertionError: it was checked before"


def aborts(names: list[str], job: Job) -> None:
    note("".join(names))
    print("by a kernel", flush=True)
    os.abort()


def hangs(names: list[str], job: Job) -> None:
    note("".join(names))
    time.sleep(600)


def breaks_its_device(names: list[str], job: Job) -> None:
    note("".join(names))
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = out_of_bounds
    torch.cuda.synchronize()


def out_of_bounds(*args: Any) -> Tensor:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")


@interpreted
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            breaks_its_device,
            "its self-check failed: AcceleratorError: CUDA error: an illegal memory access was encountered",
        ),
        (aborts, "its self-check failed: its process died of signal SIGABRT: by a kernel"),
        (hangs, "its self-check failed: stopped after 3 s"),
    ],
)
def test_a_kernel_that_breaks_its_process(broken: Any, words: str, folder: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(site_run, "timed", broken)
    monkeypatch.setattr(site_run, "_DEADLINE", 3.0 if broken is hangs else 60.0)
    program, inputs = hugging_face()
    site, result = site_of(program, inputs)
    assert not site.fused and site.why_not[KERNEL] == (words,), site
    torch.testing.assert_close(result, program(*inputs))
    assert len([*folder.iterdir()]) == 1 and capfd.readouterr() == ("", "")


@interpreted
def test_a_process_that_does_not_start(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text("raise SystemExit('out of luck')")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), *sys.path])
    site, _ = site_of(*hugging_face())
    said = "could not be checked: its process could not start with exit code 1: "
    assert not site.fused and site.why_not[KERNEL][0].startswith(said), site
    assert not folder.exists(), "another time it might have come up"


@interpreted
def test_it_is_not_tried_where_that_is_turned_off_or_promises_nothing(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(site_run, "_run", lambda names, job: pytest.fail("tried"))
    program, inputs = hugging_face()
    assert site_of(program, inputs, try_unmeasured=False)[0].why_not[KERNEL] == (UNTRIED,)
    # A check runs without dropout, so it says nothing of the weights that a kernel drops.
    dropping = NanoGPT(16, 0.25).train()
    assert site_of(dropping, tuple(tensors(1, 2, 16, 16)))[0].why_not[KERNEL] == (UNTRIED,)
    monkeypatch.undo()
    monkeypatch.setattr(site_run, "_run", lambda names, job: pytest.fail("tried"))
    assert site_of(program, inputs)[0].why_not[KERNEL] == (UNTRIED,)


@interpreted
def test_what_keeps_it_from_being_checked(folder: Path, monkeypatch: Any) -> None:
    program, inputs = hugging_face()
    ran: list[Job] = []
    with monkeypatch.context() as patch:
        patch.setattr(site_run, "_run", lambda names, job: ran.append(job) or FASTER)
        folder.write_text("a file where a folder should be")
        assert site_of(program, inputs)[0].kernel == KERNEL and len(ran) == 1, "what cannot be kept holds all the same"
    for name, value, words in (
        ("free_memory", lambda device: 1 << 20, "could not be checked: it takes 1.0 GiB or more, of 0.0 free"),
        ("_key", lambda names, job: 1 / 0, "could not be checked: ZeroDivisionError: division by zero"),
        ("sys.executable", "", "could not be checked: its process could not start"),
    ):
        monkeypatch.setattr(site_run, "_known", {})
        with monkeypatch.context() as patch:
            patch.setattr(name if "." in name else f"attn_fuse.picker.site_run.{name}", value)
            assert site_of(program, inputs)[0].why_not[KERNEL] == (words,)


KEYS = """
from tests.triton.test_selfcheck import *
patch = pytest.MonkeyPatch()
patch.setattr("attn_fuse.picker.pick._LARGE", 1)
jobs = [job_of(*made(), patch) for made in (hugging_face, t5)]
print(*(site_run._key([], job) for job in jobs))
"""


@interpreted
def test_what_it_is_kept_by_is_the_same_in_every_process(tmp_path: Path) -> None:
    found = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "ATTN_FUSE_CACHE": str(tmp_path), "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", KEYS]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        found.append(done.stdout.split()[-2:])
    assert found[0] == found[1] and len({*found[0]}) == 2, found


@interpreted
def test_behind_a_backend_of_the_users_own(folder: Path) -> None:
    program, inputs = hugging_face()
    site, _ = site_of(program, inputs, inner_backend=lambda graph, values: graph)
    assert site.why_not[KERNEL] == ("could not be checked: no other process has the inner backend",)


@interpreted
def test_equal_layers_are_checked_once_and_another_length_again(folder: Path, monkeypatch: Any) -> None:
    ran: list[Job] = []
    monkeypatch.setattr(site_run, "_run", lambda names, job: ran.append(job) or FASTER)
    attention, (q, k, v, seen) = hugging_face()
    torch._dynamo.reset()

    def three(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return attention(attention(attention(q, k, v, seen), k, v, seen), k, v, seen)

    with collecting() as graphs:
        torch.compile(three, backend=backend, options={"inner_backend": "eager"})(q, k, v, seen)
    assert [site.kernel for site in graphs[0].sites] == [KERNEL] * 3
    assert len(ran) == 2, "the first layer's query has other strides than what an attention gives"
    site_of(attention, (*tensors(2, 2, 22, 16), words_of(2, 22)))
    assert len(ran) == 3


@interpreted
def test_lengths_that_may_change_are_checked_at_a_typical_one(folder: Path, monkeypatch: Any) -> None:
    attention, (q, k, v, seen) = hugging_face()
    job = job_of(attention, (*(dynamic(x, 2) for x in (q, k, v)), dynamic(seen, 1)), monkeypatch)
    assert {leaf.size[2] for leaf in job.leaves if len(leaf.size) == 4 and leaf.requires_grad} == {1024}


# ---- right and wrong kernels


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(runs: dict[str, Any], *_: Any) -> dict[str, Timing]:
        return {name: Timing(0.5 if name == KERNEL else 1.0, 0, 0, 1) for name in runs}

    monkeypatch.setattr(site_run, "interleaved", interleaved)


@interpreted
@pytest.mark.parametrize("program", [hugging_face, t5])
def test_ours_pass(program: Callable[..., Any], folder: Path, quick: None, monkeypatch: Any) -> None:
    """Our kernels pass, and the job's program is recognised like the original, buffers included."""
    with collecting() as here:
        job = job_of(*program(), monkeypatch)
    with collecting() as there:
        assert verdict(job) == (0.5, "", True)
    (expected,) = here[0].sites
    assert len(there) >= 2
    for graph in there:
        (site,) = graph.sites
        for name, said in expected.attention.items():
            assert site.attention[name].partition(" by the contents")[0] == said.partition(" by the contents")[0]


@interpreted
def test_under_autocast(folder: Path, quick: None, monkeypatch: Any) -> None:
    """The site runs under the autocast of the program."""
    attention, inputs = hugging_face()
    with torch.autocast("cpu", torch.float16):
        job = job_of(attention, inputs, monkeypatch)
    assert {leaf.dtype for leaf in job.leaves if leaf.requires_grad} == {torch.float32}
    assert verdict(job) == (0.5, "", True)


def off_in_a_row(call: Any, out: Any) -> Any:
    row = call.node("mul", call.node("narrow", out, 2, 20, 1), 1.01)
    return call.node(torch.cat, [call.node("narrow", out, 2, 0, 20), row], dim=2)


def off_in_its_gradient(call: Any, out: Any) -> Any:
    kept = call.node("detach", out)
    return call.node("add", kept, call.node("mul", call.node("sub", out, kept), 1.01))


def not_finite(call: Any, out: Any) -> Any:
    return call.node("mul", out, float("nan"))


WRONG: dict[Callable[..., Any], str] = {
    off_in_a_row: "the rewritten output 0 is ",
    off_in_its_gradient: "the rewritten gradient of input ",
    not_finite: "the rewritten output 0 is nan from float64",
}


@pytest.fixture
def broken() -> Iterator[Callable[..., None]]:
    """Break the kernel: the argument, a function of the call and of the original `emit`, emits in its place."""
    real = TRITON_FLASH.emit
    yield lambda change: object.__setattr__(TRITON_FLASH, "emit", lambda call: change(call, lambda: real(call)))
    object.__setattr__(TRITON_FLASH, "emit", real)


@interpreted
@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_kernel(change: Any, folder: Path, quick: None, broken: Any, monkeypatch: Any) -> None:
    job = job_of(*hugging_face(), monkeypatch)
    broken(lambda call, made: change(call, made()))
    ratio, reason, lasts = verdict(job)
    assert ratio is None and lasts and reason.startswith("its self-check failed: ") and WRONG[change] in reason, reason


@interpreted
def test_a_kernel_that_raises(folder: Path, quick: None, broken: Any, monkeypatch: Any) -> None:
    job = job_of(*hugging_face(), monkeypatch)

    def raises(call: Any, made: Callable[[], Any]) -> Any:
        raise RuntimeError("out of luck")

    broken(raises)
    assert verdict(job)[1:] == ("its call cannot be written into the graph: out of luck", True)

    broken(lambda call, made: call.node(torch.ops.attn_fuse_test.fails, made()))
    with torch.library._scoped_library("attn_fuse_test", "FRAGMENT") as library:
        library.define("fails(Tensor x) -> Tensor")
        library.impl("fails", lambda x: x.clone(), "Meta")
        library.impl("fails", out_of_bounds, "CPU")
        ratio, reason, _ = verdict(job)
        assert ratio is None
        assert reason.startswith("its self-check failed: could not be made: AcceleratorError: "), reason
