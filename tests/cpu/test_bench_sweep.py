"""`python -m attn_fuse.bench sweep`: its tables, files and errors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

# Before the tests, which have a `harness`, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sweep
from attn_fuse.bench import measure
from attn_fuse.bench.command import main
from attn_fuse.bench.measure import Effort, Observation, observed
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.timing import Timing
from sweep import MASKS, Swept, cases

CPU = torch.device("cpu")
WHOLE = Effort(3, 0.05, 0.0, whole=True)


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.2 * seconds, 9)


def found(case: Case) -> Swept:
    times = {AS_WRITTEN: timing(case.q_len * 1e-6), "cpu_flash": timing(case.q_len * 0.5e-6)}
    return case, Observation(why_not={"flex": "why"}, timings=times, peaks={AS_WRITTEN: 4 << 20, "cpu_flash": 1 << 20})


def test_the_cases_are_all_combinations_short_ones_first() -> None:
    every = cases([64, 32], [16, 32], [1, 2], 4, MASKS, ["float32", "bfloat16"], [False, True], window=8)
    assert len(every) == 2 * 2 * 2 * 5 * 2 * 2 == len({*every})
    assert [case.q_len for case in every] == sorted(case.q_len for case in every)
    shares = {(case.mask, case.q_len): case.visible for case in every}
    assert shares["none", 32] == shares["dense", 32] == 1.0
    assert shares["causal", 32] == pytest.approx(33 / 64, abs=1e-3)
    assert shares["window", 32] == pytest.approx((8 * 32 - 28) / 32**2, abs=1e-3), "eight keys, fewer at the start"


@pytest.mark.thorough
def test_a_case_is_measured_on_each_kernel() -> None:
    case = Case("float32", False, 1, 2, 32, 32, 16)
    seen = observed(["cpu_flash", "cudnn"], case, CPU, WHOLE)
    assert {*seen.timings} == {*seen.peaks} == {AS_WRITTEN, "cpu_flash"} and "cudnn" in seen.why_not
    assert not seen.problem and json.dumps(sweep.as_json(case, seen))


def test_a_wrong_kernel_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = lambda: torch.ones(1)  # noqa: E731
    reason = {"cpu_flash": "its result differs from that as written"}
    monkeypatch.setattr(measure, "prepared", lambda *_: ({AS_WRITTEN: run}, reason))
    case = Case("float32", False, 1, 2, 32, 32, 16)
    seen = observed(["cpu_flash"], case, CPU, WHOLE)
    assert {*seen.timings} == {AS_WRITTEN}
    assert "note: cpu_flash, inference, mask none: its result differs" in sweep.as_text([(case, seen)], CPU)


def test_a_case_that_does_not_fit_is_told_and_not_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("float32", True, 4, 16, 8192, 8192, 64)
    monkeypatch.setattr(measure, "free_memory", lambda device: measure.bytes_as_written(case))
    assert measure.fitting(case, measure.bytes_as_written(case)) is not None
    seen = observed([], case, CPU, WHOLE)
    assert not seen.timings and seen.problem.startswith("as written it takes 96.8 GiB")
    assert "left out: as written it takes" in sweep.as_text([(case, seen)], CPU)


def test_a_busy_machine_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [0.5]
    monkeypatch.setattr(measure, "prepared", lambda *_: ({AS_WRITTEN: lambda: None}, {}))
    monkeypatch.setattr(measure.OtherLoad, "share", lambda self: shares.pop(0))
    case = Case("float32", False, 1, 2, 32, 32, 16)
    seen = observed([], case, CPU, WHOLE)
    assert seen.timings and "1 of 1 cases beside other load" in sweep.as_text([(case, seen)], CPU)


def test_the_tables_have_what_the_files_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "sweep", lambda cases, *_: map(found, cases))
    arguments = "sweep --lengths 64 32 --heads 2 --head-dims 16 --masks causal window --device cpu"
    files = f" --json {tmp_path / 'out.json'}"
    assert main((arguments + files).split()) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^mask: causal +as written \(Inductor\) +cpu_flash +fastest$", printed, re.M)
    assert printed.count("cpu_flash, 0.50 of as written") == 4 and "32 µs, 4.0 MiB" in printed
    assert "note: flex, inference, mask window: why" in printed
    data = json.loads((tmp_path / "out.json").read_text())
    assert [Case(**one["case"]).q_len for one in data["cases"]] == [32, 32, 64, 64]
    assert data["cases"][0]["seconds"]["cpu_flash"]["median"] == 16e-6 and data["machine"]["torch"]
    assert data["cases"][0]["peak_bytes"]["cpu_flash"] == 1 << 20


def test_interrupted_it_keeps_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def two(cases: Sequence[Case], *_: Any) -> Iterator[Swept]:
        yield from map(found, cases[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "sweep", two)
    path = tmp_path / "out.json"
    assert main(["sweep", "--device", "cpu", "--json", str(path)]) == 130
    captured = capsys.readouterr()
    assert "interrupted; 2 of 8 cases are kept" in captured.err and "mask: causal" in captured.out
    assert len(json.loads(path.read_text())["cases"]) == 2
