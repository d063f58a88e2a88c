"""benchmarks/gpu.py: its six calls at tiny sizes on the CPU, without what a GPU machine lacks; and its failures."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

# Before the tests, which have a `harness`, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_attention
import gpu_cases
import gpu_ncu
import gpu_sections
import gpu_sweep
import gpu_tasks
from attn_fuse.bench.measure import Observation, bytes_as_written
from attn_fuse.picker import evidence
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.workers import note
from gpu_sections import CALLS, Run
from nanogpt import Sizes, programs_of

pytestmark = pytest.mark.thorough

_ALL_RIGHT = {"models": 4, "training": 2, "sites": 4, "fused": 4, "wrong": 0, "failed": 0, "broken": 0}
PUBLISHED = {"published": {"fused": _ALL_RIGHT, "triton": _ALL_RIGHT}, "asked": 8}

BENCHMARKS = Path(gpu.__file__).parent
CPU = torch.device("cpu")
PROGRAMS = programs_of(CPU, gpu_tasks.sizes(tiny=True))
# The machines that the calls are made for have neither, and need not have the others.
LACKING = ("expecttest", "mypy", "ruff", "hypothesis", "xdist")
FORBID = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {LACKING!r} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


# For each call on two cores of a CPU, which compile and compute what a GPU's machine has sixteen for.
MINUTES = 4.0


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "lacking").mkdir(exist_ok=True)
    (folder / "lacking" / "sitecustomize.py").write_text(FORBID)
    paths = os.pathsep.join([str(folder / "lacking"), str(BENCHMARKS.parent)])
    # pytest would load plugins of its own accord.
    environment = os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments, "--results", str(folder / "results")]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder, env=environment)


@pytest.mark.slow
def test_every_call_completes_in_its_time(tmp_path: Path) -> None:
    caches = tmp_path / "caches"
    done = run(tmp_path, "all", "--device", "cpu", "--caches", str(caches), "--minutes", str(MINUTES))
    assert done.returncode == 0, done.stdout + done.stderr
    stored = {path.name: json.loads(path.read_text()) for path in (tmp_path / "results").glob("gpu-*.json")}
    assert set(stored) == {f"gpu-{number}-{name}-cpu.json" for number, name in gpu.NUMBERS.items()}
    for content in stored.values():
        sections = content["sections"]
        assert list(sections) == list(CALLS[content["call"]].sections) and content["tiny"]
        assert all(of["status"] == "complete" and of["rows"] for of in sections.values()), sections
        assert sum(of["seconds"] for of in sections.values()) < 60 * MINUTES
    rows = {name: of["rows"] for content in stored.values() for name, of in content["sections"].items()}
    assert rows["correctness"][-1] == {
        "checked": {"chunked": {"right": 4, "wrong": 0, "lost": 0, "not run": 0}}, "wrong kernels": {},
    }  # fmt: skip
    taken = rows["backend"][-1]["through the backend"]
    assert not any(counts["wrong"] or counts["lost"] for counts in taken.values())
    plain = [counts for name, counts in taken.items() if not name.startswith("flex")]  # which may have no time
    assert [counts["right"] for counts in plain] == [4] * 4
    assert rows["published"][-1] in ({"left out": "transformers is not installed"}, PUBLISHED)
    timed = [row for row in rows["speed"] if "us" in row]
    assert len(timed) > 10 and all(row["us"] and not row["failed"] for row in timed), rows["speed"]
    assert [row["picked"] for row in rows["choices"]] and all("us" in row for row in rows["evidence"])
    sizes, *trained = rows["nanogpt"]
    assert sizes["what"] == "sizes" and [row["what"] for row in trained] == [p.name for p in PROGRAMS]
    assert all(row["seconds"] > 0 and row["peak_bytes"] for row in trained), trained
    assert [row["fused"] for row in trained if row["what"].startswith("attn_fuse, SDPA")] == ["1 of 1"] * 3
    *swept, last = rows["sweep"]
    if importlib.util.find_spec("triton") is None:
        assert last == {"left out": "Triton is not installed"} and not swept
    else:
        assert {row["kernel"] for row in swept} == {"forward", "query", "key_value", "key", "value", "input"}
        assert all(row["us"] and not row["failed"] for row in swept) and len(last["fastest"]) == len(swept)
        *_, looked_into = rows["ncu"]
        assert looked_into == {"launched": [str(trial) for trial in gpu_ncu.looked_into(tiny=True)]}
    (compiled,) = rows["compile"]
    assert compiled["compiled"] == compiled["of"] > 10 and not compiled["failed"]
    assert rows["tests"][0]["exit"] == 0 and "skipped" in rows["tests"][0]["said"]
    # Both what goes home and what the picker reads.
    assert (tmp_path / "results" / "bench-nanogpt-cpu.json").exists()
    (shipped,) = (tmp_path / "results").glob("evidence_*.json")
    (own,) = (caches / "attn_fuse").glob("calibration_*.json")
    for path in (shipped, own):
        assert [{AS_WRITTEN, "chunked"} <= row.times.keys() for row in evidence.read_table(path).rows] == [True] * 3
    assert not [path for path in tmp_path.iterdir() if path.name not in ("results", "caches", "lacking")]


def test_the_calls_fit_their_minutes() -> None:
    assert [call.minutes for call in CALLS.values()] == [1.6, 1.9, 1.35, 0.8, 1.8, 1.5]
    assert sum(call.minutes for call in CALLS.values()) <= 9
    assert all(0 < share <= 1 for call in CALLS.values() for _, share in call.sections.values())
    assert [call.number for call in CALLS.values()] == [1, 2, 6, 3, 4, 5]  # by which results are stored
    for call in CALLS.values():
        assert sum(call.planned().values()) == pytest.approx(60 * call.minutes - gpu_sections.SPARE)
    for _, case in gpu_cases.cases():
        assert bytes_as_written(case) < 7 * 2**30, case
    assert len({case for _, case in gpu_cases.cases()}) == len([*gpu_cases.cases()]) >= 40


def test_the_plan_says_the_seconds_of_each_section(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "all", "--plan"])
    gpu.main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert "sweep: 81 s at most: sweep 46, ncu 28, and 6 to end" in lines and len(lines) == 6
    assert last == "in all 537 s"


def test_what_is_trained_later_is_compiled_before(tmp_path: Path, monkeypatch) -> None:
    """Each case and each program of the table, but eager, is one call; the largest programs do not begin together."""
    asked = []
    monkeypatch.setattr(gpu_sections, "_compiled", lambda run, pool, calls, end: asked.extend(calls) or iter(()))
    run = a_run(tmp_path, 60.0, "chunked")
    assert not [*gpu_sections.everything(run, run.end)]
    steps = [place for place, call in enumerate(asked) if call[0] is gpu_tasks.first_step]
    assert [asked[place][1] for place in steps] == [p.name for p in PROGRAMS if p.name != "eager"]
    assert steps[:4] == [0, 1, 2, 4] and sum(call[0] is gpu_tasks.compiled for call in asked) == len(small())


def test_a_table_that_is_not_made_says_why(tmp_path: Path, monkeypatch) -> None:
    run = a_run(tmp_path, 60.0, "chunked")
    monkeypatch.setattr(gpu_tasks, "sizes", lambda tiny: dataclasses.replace(Sizes(), heads=5))
    (row,) = gpu_sections.nanogpt(run, run.end)
    assert row["failed"].startswith("exit code 2") and "--width 768: it is a multiple of --heads" in row["failed"]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "1")
    assert done.returncode == 1 and done.stderr.startswith("torch sees no CUDA device")
    assert not (tmp_path / "results").exists()


# ---- what a worker may meet: these run there in place of gpu_tasks' functions


def rows_of_the_grid(name: str, device: torch.device, tiny: bool) -> list[str]:
    return ["right", "hangs", "right", "dies", "wrong", "right", "breaks", "raises", "right", "right"]


def meets(name: str, what: str, device: torch.device) -> str:
    match what:
        case "hangs":
            time.sleep(60)
        case "dies":
            os.abort()
        case "wrong":
            return "out is off by 1"
        case "raises":
            raise RuntimeError("out of resource: shared memory")
        case "breaks":  # as an illegal access shows: after a call that seemed right, and with every other from then on
            torch.cuda.is_initialized = lambda: True
            torch.cuda.synchronize = broken
    return ""


def broken() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def dies(*_: object) -> None:
    os.abort()


def hangs(*_: object) -> None:
    time.sleep(60)


def dies_on_sdpa(names: list[str], *_: object) -> list[dict[str, object]]:
    for name in names:
        note(name)
        if name == "sdpa":
            os.abort()
    return [{"us": dict.fromkeys(names, 1.0)}]


# Two of our own, one in plain torch.
TWO = ("triton_flash", "another", "chunked")


def a_run(folder: Path, seconds: float, *operators: str) -> Run:
    about = {"machine": {"cpu": "a CPU", "threads": 1, "torch": torch.__version__}, "operators": operators}
    return Run(CPU, folder / "results", folder / "caches", time.perf_counter() + seconds, 1, about)


def test_a_worker_that_is_broken_is_replaced_and_the_rest_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_tasks, "grid_rows", rows_of_the_grid)
    monkeypatch.setattr(gpu_tasks, "checked", meets)
    monkeypatch.setattr(gpu_sections, "ORDER", TWO)
    monkeypatch.setattr(Run, "patience", lambda self, seconds: 5.0)
    run = a_run(tmp_path, 90.0, "chunked", "another", "triton_flash")
    *wrong, last = gpu_sections.correctness(run, run.end)
    counts = {"right": 5, "wrong": 2, "lost": 3, "not run": 0}
    assert last["checked"] == {"triton_flash": counts, "another": counts}  # in this order, and chunked is left out
    words = "2 rows wrong, 3 lost, 5 right"
    assert last["wrong kernels"] == run.earlier["wrong kernels"] == {"triton_flash": words, "another": words}
    assert [row["kernel"] for row in wrong] == ["triton_flash"] * 5 + ["another"] * 5
    assert {row["case"]: row.get("lost", row.get("wrong")) for row in wrong} == {
        "hangs": "stopped after 5 s",
        "dies": "its process died of signal SIGABRT",
        "breaks": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "wrong": "out is off by 1",
        "raises": "RuntimeError: out of resource: shared memory",
    }
    assert run.own == ["chunked"]


def test_a_kernel_that_breaks_everything_is_given_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_tasks, "grid_rows", nine_rows)
    monkeypatch.setattr(gpu_tasks, "checked", first_dies)
    monkeypatch.setattr(gpu_sections, "ORDER", TWO)
    monkeypatch.setattr(gpu_sections, "MAX_LOST", 2)
    run = a_run(tmp_path, 90.0, "another", "triton_flash")
    last = [*gpu_sections.correctness(run, run.end)][-1]
    assert last["checked"]["triton_flash"] == {"right": 0, "wrong": 0, "lost": 2, "not run": 7}
    assert last["checked"]["another"] == {"right": 9, "wrong": 0, "lost": 0, "not run": 0}
    assert run.own == ["another"]


def nine_rows(name: str, device: torch.device, tiny: bool) -> list[str]:
    return [str(number) for number in range(9)]


def first_dies(name: str, what: str, device: torch.device) -> str:
    return dies() if name == "triton_flash" else ""  # type: ignore[func-returns-value, return-value]


@pytest.mark.slow
def test_what_breaks_a_shape_is_left_out_of_it(tmp_path: Path, monkeypatch) -> None:
    for name in ("plain", "features", "decoding"):
        monkeypatch.setattr(gpu_attention, name, dies_on_sdpa)
    monkeypatch.setattr(gpu_sections, "shapes", lambda tiny: [(64, 16, True)])
    monkeypatch.setattr(gpu_sections, "BEYOND_PLAIN", ["window"])
    run = a_run(tmp_path, 90.0, "chunked")
    rows = [*gpu_sections.speed(run, run.end)]
    died = {"sdpa": "its process died of signal SIGABRT"}
    assert [row["broke"] for row in rows] == [died] * 3
    assert [[*row["us"]] for row in rows] == [["chunked"], ["chunked"], ["flex", "chunked"]]


SECTIONS = [name for call in CALLS.values() for name in call.sections if name != "tests"]


@pytest.mark.parametrize(
    "name", [name if name == "correctness" else pytest.param(name, marks=pytest.mark.slow) for name in SECTIONS]
)
def test_a_section_ends_by_its_time_whatever_hangs(name: str, tmp_path: Path, monkeypatch) -> None:
    for module, tasks in (
        (gpu_attention, ("ceilings", "plain", "features", "decoding")),
        (gpu_sweep, ("swept",)),
        (gpu_tasks, ("checked", "compiled", "picked", "first_step", "answered", "published")),
    ):
        for task in tasks:
            monkeypatch.setattr(module, task, hangs)
    monkeypatch.setattr(gpu_tasks, "grid_rows", nine_rows)
    monkeypatch.setattr(gpu_sections, "Measuring", hanging_measuring(gpu_sections.Measuring))
    run = a_run(tmp_path, 3.0, "chunked")
    run.sections["evidence"] = {"rows": [{"case": str(case), "us": {AS_WRITTEN: 1.0}} for _, case in small()]}
    (rows,) = [rows for call in CALLS.values() for known, (rows, _) in call.sections.items() if known == name]
    started = time.perf_counter()
    found = [*rows(run, run.end)]
    # Processes start, and end, meanwhile.
    assert time.perf_counter() - started < 3.0 + 25.0
    assert not any("us" in row or "seconds" in row.get("what", "") for row in found)


def small() -> list[tuple[str, object]]:
    return gpu_sections._small(gpu_cases.cases())


def hanging_measuring(kind: type) -> type:
    class Hanging(kind):  # type: ignore[misc, valid-type]
        def __init__(self, device, effort, seconds) -> None:
            super().__init__(device, effort, hangs, seconds)

    return Hanging


def test_a_busy_machine_leaves_no_evidence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_tasks, "compiled", nothing)
    monkeypatch.setattr(Run, "tiny", False)
    monkeypatch.setattr(Run, "workers", lambda self: 1)
    monkeypatch.setattr(gpu_cases, "cases", lambda: iter(THREE))
    monkeypatch.setenv("ATTN_FUSE_CACHE", str(tmp_path / "cache"))

    class Busy(gpu_sections.Measuring):
        def observation(self, case, end, kernels):
            row = evidence.Row(case, {AS_WRITTEN: 1.0} | dict.fromkeys(kernels, 1.0))
            return Observation(row, {}, "" if case == THREE[0][1] else "other programs took 30% of the cores")

    monkeypatch.setattr(gpu_sections, "Measuring", Busy)
    run = a_run(tmp_path, 60.0, "chunked")
    *_, first, second, third = gpu_sections.gathered(run, run.end)
    assert "us" in first and second["left out"] == third["left out"] == "other programs took 30% of the cores"
    (path,) = (tmp_path / "results").glob("evidence_*.json")
    assert [row.case for row in evidence.read_table(path).rows] == [THREE[0][1]]


THREE = [*gpu_cases.cases()][:3]


def nothing(*_: object) -> dict[str, str]:
    return {}


# ---- between calls


def test_a_later_call_knows_what_an_earlier_one_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ATTN_FUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_sections, "ORDER", TWO)
    wrong = {"another": "3 rows wrong, 0 lost, 5 right"}
    sections = {"correctness": {"rows": [{"kernel": "another"}, {"checked": {}, "wrong kernels": wrong}]}}
    earlier = tmp_path / "earlier"
    evidence.write_whole(earlier / "gpu-1-correct-h200.json", json.dumps({"sections": sections}))
    head = {"gpu": "NVIDIA H200", "torch": torch.__version__, "cpu": "a CPU", "threads": 1}
    rows = [evidence.Row(case, {AS_WRITTEN: 2.0, "triton_flash": 1.0}) for _, case in THREE]
    evidence.write_table(earlier / "evidence_cuda_h200.json", head, rows)
    gpu.adopt(earlier, tmp_path / "caches")
    run = a_run(tmp_path, 1.0, "another", "triton_flash")
    gpu._read_earlier(run)
    assert run.own == ["triton_flash"]
    evidence.tables.cache_clear()
    (own,) = [table for table in evidence.tables() if table.own]
    evidence.tables.cache_clear()
    assert own.device.name == "NVIDIA H200" and own.rows == tuple(rows)


def test_a_device_is_labelled_by_its_name(tmp_path: Path) -> None:
    run = a_run(tmp_path, 1.0)
    run.device = torch.device("cuda")
    for name, label in (("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3")):
        run.about["machine"]["gpu"] = name
        assert run.label == label
