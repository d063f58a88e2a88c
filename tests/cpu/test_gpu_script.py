"""benchmarks/gpu.py: its six calls at tiny sizes on the CPU, without what a GPU machine lacks; and its failures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# Before the tests, which have a `harness`, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_cases
import gpu_ncu
import gpu_sections
import gpu_sweep
import gpu_tasks
from attn_fuse.bench.measure import bytes_as_written
from attn_fuse.kernels.triton.flash.configs import Config
from attn_fuse.picker import evidence
from attn_fuse.picker.evidence import AS_WRITTEN
from gpu_sections import CALLS, Run
from gpu_sweep import AGAIN, SHIPPED
from nanogpt import programs_of

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
    run = a_run(tmp_path, 300.0, "chunked", "another", "triton_flash")
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


THREE = [*gpu_cases.cases()][:3]


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


# ---- the sections `sweep` and `ncu`


def test_about_forty_configs_are_tried_and_each_once() -> None:
    trials = gpu_sweep.trials()
    tried = [(trial.kernel, trial.scores, trial.head_dim, config) for trial in trials for config in trial.configs]
    assert 36 <= len({(kernel, dim, config) for kernel, _, dim, config in tried}) <= 60
    assert len({str(trial) for trial in trials}) == len(trials)
    assert all(len(set(trial.configs)) == len(trial.configs) for trial in trials)
    assert {trial.head_dim for trial in trials} == {32, 64, 128, 256}
    assert {trial.kernel for trial in gpu_sweep.trials(tiny=True)} == {trial.kernel for trial in trials}
    assert [(trial.kernel, trial.scores, trial.head_dim) for trial in gpu_ncu.looked_into(tiny=False)] == [
        *gpu_ncu.LOOKED_INTO
    ]


def test_a_config_that_computes_something_else_is_wrong() -> None:
    right = torch.randn(4, 8)
    assert not gpu_sweep._wrong([right * 1.001], [right])
    assert gpu_sweep._wrong([right, right * 1.1], [right, right]).startswith("wrong: off by 0.1")
    assert gpu_sweep._wrong([right.clone().fill_(torch.nan)], [right]) == "wrong: not finite"


SMALL = Config(64, 64, 4, 3)
NAME = gpu_sweep.written(SMALL)


@pytest.mark.parametrize(
    "times, said",
    [
        ({SHIPPED: 100.0, AGAIN: 101.0, NAME: 80.0}, f"{NAME} takes 0.80 of S"),
        ({SHIPPED: 100.0, AGAIN: 103.0, NAME: 98.0}, f"{NAME} takes 0.98 of S, within the noise"),
        ({SHIPPED: 100.0, AGAIN: 90.0, NAME: 110.0}, "S stays"),
        ({NAME: 110.0}, "not known"),
    ],
)
def test_the_fastest_is_named_against_the_shipped(times: dict[str, float], said: str) -> None:
    assert gpu_sweep.in_words({"shipped": "S"} | gpu_sweep.compared(times)) == said


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_what_breaks_in_a_config_leaves_the_others(tmp_path: Path, monkeypatch) -> None:
    """In Triton's interpreter, in a worker: two trials, of which one's config is no power of two."""
    forward, backward = gpu_sweep.trials(tiny=True)[:2]
    trials = [replace(forward, configs=(Config(48, 64, 4, 3), SMALL)), backward]
    monkeypatch.setattr(gpu_sweep, "trials", lambda tiny: trials)
    run = a_run(tmp_path, 120.0, "chunked")
    first, second, last = gpu_sections.sweep(run, run.end)
    assert [*first["us"]] == [SHIPPED, "Config(64, 64, 4, 3)", AGAIN] and [*first["failed"]] == ["Config(48, 64, 4, 3)"]
    assert second["kernel"] == "key_value" and not second["failed"] and second["over shipped"] > 0
    assert [*last["fastest"]] == [str(trial) for trial in trials]


TENSOR = "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active"
STALLED = "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
CSV = f"""==PROF== Connected to process 7
==PROF== Profiling "forward": 0%....100% - 21 passes
"ID","Process ID","Kernel Name","gpu__time_duration.sum","{WARPS}","{TENSOR}","{STALLED}","launch__grid_size"
"","","","ns","%","%","inst",""
"0","7","forward","691,234","12.50","61.4","1.25","2,048"
"1","7","forward","1,200,000","12.50","n/a","0.5","2,048"
"""
NAMES = ["forward, causal, D 64, T 4096", "forward, causal, D 128, T 4096"]


def test_the_csv_of_ncu_becomes_rows() -> None:
    first, second = gpu_ncu.parsed(CSV, NAMES)
    assert first == {
        "what": NAMES[0], "kernel": "forward", "us": 691.23,
        "metrics": {gpu_ncu.DURATION: 691234.0, WARPS: 12.5, TENSOR: 61.4, STALLED: 1.25},
    }  # fmt: skip
    assert second["us"] == 1200.0 and len(second["metrics"]) == 3
    assert not [*gpu_ncu.parsed("==ERROR== no kernels were profiled", NAMES)]
