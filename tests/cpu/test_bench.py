"""python -m attn_fuse.bench, end to end on tiny sizes, and what its specimens compute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attn_fuse
from attn_fuse import bench
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.bench import grid, main
from attn_fuse.kernels import evidence
from attn_fuse.kernels.case import Case, visible_share
from attn_fuse.kernels.evidence import AS_WRITTEN, Row
from attn_fuse.kernels.nearness import apart
from attn_fuse.kernels.specimens import program, runner, tensors

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("ATTN_FUSE_CACHE", str(tmp_path / "cache"))
    evidence.tables.cache_clear()
    yield tmp_path / "cache"
    evidence.tables.cache_clear()


@pytest.mark.slow
def test_calibrate_show_and_forget(folder: Path, capsys) -> None:
    arguments = "--calibrate --quick --device cpu --lengths 16 --heads 2 --minutes 0.01".split()
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

    assert main(["--show", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "measured here with torch" in printed and str(row.case) in printed
    assert main(["--forget"]) == 0
    assert f"deleted {path}" in capsys.readouterr().out and not path.exists()
    assert main(["--forget"]) == 0
    assert "nothing is kept" in capsys.readouterr().out


def stub(monkeypatch, times: dict[str, float]) -> list[Case]:
    """No case is measured; the ones that would be."""
    asked: list[Case] = []

    def measured(case, *rest):
        asked.append(case)
        return Row(case, times), {}

    monkeypatch.setattr(bench, "measured", measured)
    return asked


def test_a_second_calibration_adds_to_the_first(monkeypatch) -> None:
    first, second, *_ = grid("cpu", [16], 2)
    for cases, time in (([first], 5.0), ([first, second], 7.0)):
        stub(monkeypatch, {AS_WRITTEN: 10.0, "chunked": time})
        assert bench.calibrate(CPU, cases, 1.0, bench.QUICK) == len(cases)
    (own,) = [t for t in evidence.tables() if t.own]
    assert {row.case: row.times["chunked"] for row in own.rows} == {first: 7.0, second: 7.0}


def test_it_stops_when_the_time_is_up(monkeypatch) -> None:
    asked = stub(monkeypatch, {AS_WRITTEN: 10.0})
    assert bench.calibrate(CPU, grid("cpu"), 0.0, bench.QUICK) == len(asked) == 1


def test_a_place_that_cannot_be_written(monkeypatch, folder: Path, capsys) -> None:
    stub(monkeypatch, {AS_WRITTEN: 10.0})
    folder.write_text("a file where a directory should be")
    assert main(["--calibrate", "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("attn_fuse.bench: cannot write ") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("", "one of the arguments --calibrate --show --forget is required"),
        ("--show --forget", "not allowed with"),
        ("--show --device tpu", "--device tpu: it is cpu or cuda"),
        ("--show --device meta", "--device meta: it is cpu or cuda"),
        ("--calibrate --minutes 0", "--minutes is above 0, not 0"),
        ("--calibrate --minutes soon", "argument --minutes: invalid float value: 'soon'"),
        ("--calibrate --lengths 16 -1", "--lengths is above 0, not 16 -1"),
        ("--calibrate --heads 0", "--heads is above 0, not 0"),
        ("--calibrate --fast", "unrecognized arguments: --fast"),
    ],
)
def test_errors_are_one_line(arguments: str, words: str, capsys) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("attn_fuse.bench: ") and words in captured.err


def test_no_cuda_device(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--calibrate", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "attn_fuse.bench: --device cuda: torch sees no CUDA device\n"


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "attn_fuse.bench", "--device", "nothing", "--show"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr


SPECIMENS = [case for case in grid("cpu", [24], 4) if case.dtype == "float32"]
SPECIMENS += [
    Case("float32", False, 2, 4, 24, 24, 8, mask="padding"),
    Case("float32", False, 2, 4, 24, 24, 8, mask="prefix"),
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
        assert asked and apart(asked[0], case, "cpu") == 0, str(site)
    else:
        assert asked and asked[0] == case, str(site)
