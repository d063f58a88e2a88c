"""python -m attn_fuse.bench, end to end on tiny sizes, and what its specimens compute."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.bench import calibrate as calibration
from attn_fuse.bench import measure
from attn_fuse.bench.calibrate import grid
from attn_fuse.bench.command import main
from attn_fuse.bench.measure import Observation
from attn_fuse.bench.workloads import program, runner, tensors
from attn_fuse.errors import BenchError
from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case, visible_share
from attn_fuse.picker.evidence import AS_WRITTEN, Row
from attn_fuse.picker.regression import distance
from attn_fuse.picker.timing import Timing
from attn_fuse.picker.workers import note

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("ATTN_FUSE_CACHE", str(tmp_path / "cache"))
    evidence.tables.cache_clear()
    yield tmp_path / "cache"
    evidence.tables.cache_clear()


def beside_the_tests(kernels, case, device, effort) -> Observation:
    """In the worker, where other tests may run beside it."""
    measure.other_load = lambda *_: ""
    return measure.observed(kernels, case, device, effort)


@pytest.mark.slow
def test_calibrate_show_and_forget(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "observed", beside_the_tests)
    arguments = "calibrate --quick --device cpu --lengths 16 --heads 2 --minutes 0.01".split()
    assert main(arguments) == 0
    (path,) = folder.glob("calibration_cpu_*.json")
    printed = capsys.readouterr().out
    assert str(path) in printed and "time over that as written" in printed
    (own,) = [t for t in evidence.tables() if t.own]
    (row,) = own.rows
    assert row.case == grid("cpu", [16], 2)[0] and {AS_WRITTEN, "cpu_flash", "chunked"} <= row.times.keys()

    values = tensors(row.case, CPU)
    runner(torch.compile(program(row.case), backend=backend), row.case, values)()
    (site,) = attn_fuse.reports()[-1].sites
    said = site.attention["picked"] if site.fused else site.blocker.reason
    assert f"by measurements here, the nearest at {row.case}" in said

    assert main(["calibrate", "--show", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "measured here with torch" in printed and str(row.case) in printed
    assert main(["calibrate", "--forget"]) == 0
    assert f"deleted {path}" in capsys.readouterr().out and not path.exists()
    assert main(["calibrate", "--forget"]) == 0
    assert "nothing is kept" in capsys.readouterr().out


# ---- what a worker may meet: these run there in place of `observed`


def five(kernels, case, device, effort) -> Observation:
    return Observation(Row(case, {AS_WRITTEN: 10.0} | dict.fromkeys(kernels, 5.0)))


def seven(kernels, case, device, effort) -> Observation:
    return Observation(Row(case, {AS_WRITTEN: 10.0} | dict.fromkeys(kernels, 7.0)))


def busy(kernels, case, device, effort) -> Observation:
    return replace(five(kernels, case, device, effort), busy="other programs took 50% of the cores")


def dies_on_chunked(kernels, case, device, effort) -> Observation:
    for name in kernels:
        note(name)
        if name == "chunked":
            os.abort()
    return five(kernels, case, device, effort)


def hangs_on_chunked(kernels, case, device, effort) -> Observation:
    for name in kernels:
        note(name)
        if name == "chunked":
            time.sleep(60)
    return five(kernels, case, device, effort)


def breaks_on_chunked(kernels, case, device, effort) -> Observation:
    """As an illegal access shows: with a call after the one at fault, and with every other from then on."""
    for name in kernels:
        note(name)
        if name == "chunked":
            torch.cuda.is_initialized = lambda: True
            torch.cuda.synchronize = broken_device
            torch.cuda.synchronize()
    return five(kernels, case, device, effort)


def broken_device() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def raises(kernels, case, device, effort) -> Observation:
    raise torch.OutOfMemoryError("CUDA out of memory")


def pid(kernels, case, device, effort) -> Observation:
    return Observation(Row(case, {AS_WRITTEN: float(os.getpid())}))


def own_rows() -> tuple[Row, ...]:
    return next((t.rows for t in evidence.tables() if t.own), ())


def test_a_second_calibration_adds_to_the_first() -> None:
    first, second, *_ = grid("cpu", [16], 2)
    for cases, observe in (([first], five), ([first, second], seven)):
        assert calibration.calibrate(CPU, cases, 1.0, measure.QUICK, observe) == len(cases)
    assert {row.case: row.times["chunked"] for row in own_rows()} == {first: 7.0, second: 7.0}


def test_it_stops_when_the_time_is_up_and_says_what_it_does(capsys) -> None:
    assert calibration.calibrate(CPU, grid("cpu"), 0.0, measure.QUICK, five) == len(own_rows()) == 1
    assert f"case 1 of {len(grid('cpu'))}, 0.0 min left: {grid('cpu')[0]}\n" in capsys.readouterr().out


def test_the_usual_time_is_below_ten_minutes() -> None:
    assert calibration._MINUTES + calibration.DEADLINE / 60 > 10 > calibration._MINUTES + 0.5


def test_one_process_measures_all_cases_until_one_breaks_it() -> None:
    cases = grid("cpu", [16], 2)[:3]
    with measure.Measuring(CPU, measure.QUICK, pid) as measuring:
        pids = {measuring.observation(case, time.perf_counter() + 60).row.times[AS_WRITTEN] for case in cases}
    assert len(pids) == 1 and os.getpid() not in pids


@pytest.mark.parametrize(
    ("observe", "words"),
    [
        (dies_on_chunked, "its process died of signal SIGABRT"),
        pytest.param(hangs_on_chunked, "stopped after 5 s", marks=pytest.mark.slow),
        (breaks_on_chunked, "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_kernel_that_breaks_the_process_is_left_out_alone(observe, words: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(calibration, "DEADLINE", 5.0)
    cases = grid("cpu", [16], 2)[:3]
    assert calibration.calibrate(CPU, cases, 1.0, measure.QUICK, observe) == 3
    assert [row.times for row in own_rows()] == [{AS_WRITTEN: 10.0, "cpu_flash": 5.0, "flex": 5.0}] * 3
    assert f"note: chunked: {words}, twice; not used any more\n" in capsys.readouterr().out


def test_a_case_that_fails_is_left_out(capsys) -> None:
    assert calibration.calibrate(CPU, grid("cpu", [16], 2)[:2], 1.0, measure.QUICK, raises) == 0
    printed = capsys.readouterr().out
    assert printed.count("left out: OutOfMemoryError: CUDA out of memory\n") == 2 and not own_rows()
    assert "2 cases were left out" in printed


def test_what_was_measured_beside_another_load_is_not_kept(capsys) -> None:
    assert calibration.calibrate(CPU, grid("cpu", [16], 2)[:1], 1.0, measure.QUICK, busy) == 0
    assert "left out: other programs took 50% of the cores\n" in capsys.readouterr().out and not own_rows()


def test_a_busy_machine_is_measured_again_and_not_for_ever(monkeypatch) -> None:
    case, shares = grid("cpu", [16], 2)[0], [0.5, 0.3, 0.0]
    monkeypatch.setattr(measure, "_WAIT", 0.0)
    monkeypatch.setattr(measure, "prepared", lambda *_: ({AS_WRITTEN: lambda: None}, {}))
    monkeypatch.setattr(measure.OtherLoad, "share", lambda self: shares.pop(0))
    assert measure.observed([], case, CPU, measure.QUICK).busy == "" and not shares
    shares += [0.5, 0.3, 0.2]
    assert measure.observed([], case, CPU, measure.QUICK).busy == "other programs took 20% of the cores" and not shares


def test_a_gpu_is_busy_where_times_vary() -> None:
    times = {"cudnn": Timing(1.0, 0.9, 1.5, 9), "chunked": Timing(2.0, 2.0, 2.0, 9)}
    assert measure.other_load(0.0, times, torch.device("cuda")) == "the same call took 1.7 times as long at times"
    assert not measure.other_load(0.0, times, CPU)
    assert not measure.other_load(0.0, {"cudnn": Timing(1.0, 0.9, 1.2, 9)}, torch.device("cuda"))


def test_a_case_is_made_to_fit_the_memory() -> None:
    case = Case("bfloat16", True, 4, 16, 8192, 8192, 64, kv_heads=4)
    score = case.heads * case.q_len * case.kv_len * 2
    assert 6 * 4 * score <= measure.bytes_as_written(case) <= 6.2 * 4 * score  # each of 8.6 GB
    assert measure.fitting(case, None) == case == measure.fitting(case, 13 * 4 * score)
    assert measure.fitting(case, 12 * 4 * score) == replace(case, batch=2)
    assert measure.fitting(case, 2 * 6 * score) == replace(case, batch=1, heads=8, kv_heads=2)
    assert measure.fitting(case, 4 * score) == replace(case, batch=1, heads=4, kv_heads=1)
    assert measure.fitting(case, 2 * score) is None


def test_a_case_that_fits_no_memory_is_not_run(monkeypatch) -> None:
    monkeypatch.setattr(measure, "free_memory", lambda device: 2**20)
    seen = measure.observed([], Case("float32", True, 4, 16, 8192, 8192, 64), CPU, measure.QUICK)
    assert seen.row is None and seen.problem == "as written it takes 96.8 GiB and more; too little is free"


def test_a_result_that_cannot_be_compared_is_that_kernels_fault(monkeypatch) -> None:
    def fails(*_: object) -> bool:
        raise torch.OutOfMemoryError("comparing took too much")

    monkeypatch.setattr(measure, "_agree", fails)
    case = Case("float32", False, 1, 2, 16, 16, 8)
    runs, why_not = measure.prepared(case, CPU, ["cpu_flash"])
    assert [*runs] == [AS_WRITTEN] and why_not == {"cpu_flash": "OutOfMemoryError: comparing took too much"}


def test_a_gradient_that_is_summed_up_better_than_as_written_is_no_fault() -> None:
    case = Case("bfloat16", True, 1, 8, 512, 512, 64, bias="indexed")
    runs, why_not = measure.prepared(case, CPU, ["chunked"])
    assert [*runs] == [AS_WRITTEN, "chunked"] and not why_not
    # The gradient of the table, to which each entry's 512 elements are added in bfloat16 as written.
    written, ours = (runs[name]()[-1] for name in runs)
    assert not torch.allclose(written, ours, rtol=6e-2, atol=6e-2)


@pytest.mark.parametrize("off", [0.0, 0.02, 0.5, math.nan])
def test_a_result_farther_from_the_exact_one_than_as_written_is_wrong(off: float) -> None:
    exact = torch.randn(64)
    written = (exact + 0.1).to(torch.bfloat16)
    case = Case("bfloat16", False, 1, 2, 16, 16, 8)
    assert measure._agree((exact + off).bfloat16(), written, case, lambda: exact) == (off < 0.1)


def test_a_place_that_cannot_be_written(folder: Path, capsys) -> None:
    folder.write_text("a file where a directory should be")
    with pytest.raises(BenchError, match="cannot write ") as raised:
        calibration.calibrate(CPU, grid("cpu")[:1], 1.0, measure.QUICK, five)
    assert "\n" not in str(raised.value)


def test_no_cuda_device(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["calibrate", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "attn_fuse.bench: --device cuda: torch sees no CUDA device\n"


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "attn_fuse.bench", "calibrate", "--device", "nothing", "--show"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr


SPECIMENS = [case for case in grid("cpu", [24], 4) if case.dtype == "float32"]
SPECIMENS += [
    Case("float32", True, 2, 4, 24, 24, 8, bias="indexed"),
    Case("float32", False, 1, 4, 12, 20, 8, bias="indexed"),
    Case("float32", True, 2, 4, 24, 24, 8, function=True, table=True),
    Case("float32", True, 2, 4, 24, 24, 8, bias="gradient", bias_by_entry=True),
    Case("float32", True, 2, 4, 24, 24, 8, bias="positions"),
    Case("float32", False, 2, 4, 1, 20, 8, bias="positions"),
    Case("float32", False, 2, 4, 24, 24, 8, mask="padding"),
    Case("float32", False, 2, 4, 24, 24, 8, mask="prefix", visible=visible_share(24, 24, 0, None, 6)),
    Case("float32", True, 2, 4, 24, 24, 8, mask="padding", visible=visible_share(24, 24, 0, None)),
    Case("float32", True, 2, 4, 24, 24, 8, mask="documents", visible=visible_share(24, 24, 0, None)),
    Case("float32", True, 1, 4, 6, 24, 8, mask="window", visible=visible_share(6, 24, 18, 5)),
]


@pytest.mark.parametrize("case", SPECIMENS, ids=str)
def test_a_specimen_is_recognised_as_its_case(case: Case, monkeypatch) -> None:
    asked: list[Case] = []
    monkeypatch.setattr(evidence, "compare", lambda kernel, case, *rest: asked.append(case))
    run = torch.compile(program(case), backend=backend, dynamic=False, options={"inner_backend": "eager"})
    runner(run, case, tensors(case, CPU))()
    (site,) = attn_fuse.reports()[-1].sites
    if case.q_len == 1:  # the heads that share a key are read as queries
        assert asked and distance(asked[0], case, "cpu") == 0, str(site)
    else:
        assert asked and asked[0] == case, str(site)
