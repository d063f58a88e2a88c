"""The sections `sweep` and `ncu` of benchmarks/gpu.py: what they time, leave out, and make of what came back."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# Before the tests, which have a `harness`, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_ncu
import gpu_sections
import gpu_sweep
from attn_fuse.kernels.triton.flash.configs import Config
from gpu_attention import Bench
from gpu_sections import Run
from gpu_sweep import AGAIN, SHIPPED

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
SMALL, LARGE = Config(64, 64, 4, 3), Config(128, 64, 8, 3, 2)


def a_run(folder: Path, seconds: float) -> Run:
    about = {"machine": {"cpu": "a CPU"}, "operators": ["chunked"]}
    return Run(CPU, folder / "results", folder / "caches", time.perf_counter() + seconds, 6, about)


# ---- what is tried


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


def test_a_config_is_written_as_it_ships() -> None:
    for config in (SMALL, LARGE):
        assert eval(gpu_sweep.written(config), {"Config": Config}) == config


# ---- what is left out, and what is said


class Compiled:
    def __init__(self, spilled: int) -> None:
        self.n_spills = spilled


class Kernel:
    def __init__(self, spilled: int) -> None:
        self.spilled = spilled

    def warmup(self, *arguments: object, grid: object, **options: object) -> Compiled:
        return Compiled(self.spilled)


@pytest.mark.parametrize(
    "used, spilled, why",
    [
        (SMALL, 0, ""),
        (SMALL, 32, ""),
        (SMALL, 100, "puts 400 bytes of registers away"),
        (replace(SMALL, num_stages=2), 0, "does not fit, or is misassembled: it would run as Config(64, 64, 4, 2)"),
        (LARGE, 0, "is the shipped one"),
    ],
)
def test_a_config_that_is_not_timed_says_why(used: Config, spilled: int, why: str) -> None:
    launch = gpu_sweep.Launch(Kernel(spilled), (1, 1, 1), (), {})
    assert gpu_sweep._why_not(LARGE if used == LARGE else SMALL, LARGE, used, launch) == why


def test_a_config_that_computes_something_else_is_wrong() -> None:
    right = torch.randn(4, 8)
    assert not gpu_sweep._wrong([right * 1.001], [right])
    assert gpu_sweep._wrong([right, right * 1.1], [right, right]).startswith("wrong: off by 0.1")
    assert gpu_sweep._wrong([right.clone().fill_(torch.nan)], [right]) == "wrong: not finite"


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


@needs_triton
@pytest.mark.thorough
def test_what_breaks_in_a_config_leaves_the_others(tmp_path: Path, monkeypatch) -> None:
    """In Triton's interpreter, in a worker: two trials, of which one's config is no power of two."""
    forward, backward = gpu_sweep.trials(tiny=True)[:2]
    trials = [replace(forward, configs=(Config(48, 64, 4, 3), SMALL)), backward]
    monkeypatch.setattr(gpu_sweep, "trials", lambda tiny: trials)
    run = a_run(tmp_path, 120.0)
    first, second, last = gpu_sections.sweep(run, run.end)
    assert [*first["us"]] == [SHIPPED, "Config(64, 64, 4, 3)", AGAIN] and [*first["failed"]] == ["Config(48, 64, 4, 3)"]
    assert second["kernel"] == "key_value" and not second["failed"] and second["over shipped"] > 0
    assert [*last["fastest"]] == [str(trial) for trial in trials]


def test_a_wrong_kernel_is_not_swept(tmp_path: Path) -> None:
    run = a_run(tmp_path, 9.0)
    run.earlier["wrong kernels"] = {"triton_flash": "3 rows wrong"}
    (row,) = gpu_sections.sweep(run, run.end)
    assert row["left out"] in ("3 rows wrong", "Triton is not installed")


def test_configs_that_time_did_not_reach_are_named() -> None:
    trial = gpu_sweep.trials(tiny=True)[0]
    (row,) = gpu_sweep.swept(trial.names, Bench(CPU, tiny=True), trial, 0.0)
    assert row["failed"] == dict.fromkeys(trial.names, "no time was left") and row["us"] == {}


# ---- Nsight Compute

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


def an_ncu(folder: Path, script: str, monkeypatch) -> None:
    path = folder / "bin" / "ncu"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\nfor log; do case $before in --log-file) break;; esac; before=$log; done\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    "script, why",
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission' > $log; exit 1", "left out"),
        ("echo '==ERROR== Failed to prepare kernel for profiling' > $log; exit 3", "exit code 3: ==ERROR== Failed"),
        ("sleep 60 & sleep 60", "stopped after 2"),
    ],
)
def test_where_ncu_cannot_measure_one_row_says_so(script: str, why: str, tmp_path: Path, monkeypatch) -> None:
    an_ncu(tmp_path, script, monkeypatch)
    run, started = a_run(tmp_path, 2.5), time.perf_counter()
    (row,) = gpu_ncu.ncu(run, run.end)
    assert time.perf_counter() - started < 20
    assert why in row or why in row["failed"]
    assert "ERR_NVGPUCTRPERM" in row.get("left out", "ERR_NVGPUCTRPERM")


def test_what_ncu_measured_is_kept_with_what_it_did_not(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "csv").write_text(CSV)
    said = "".join(f"echo 'launched: {name}'; " for name in NAMES)
    an_ncu(tmp_path, f"cp {tmp_path}/csv $log; {said}", monkeypatch)
    run = a_run(tmp_path, 30.0)
    *rows, last = gpu_ncu.ncu(run, run.end)
    assert [row["what"] for row in rows] == NAMES and last["failed"].startswith("2 of 5 kernels: exit code 0")


def test_a_machine_without_ncu_says_so_and_the_run_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_ncu, "located", lambda: None)
    monkeypatch.setattr(Run, "tiny", False)
    run = a_run(tmp_path, 9.0)
    assert [*gpu_ncu.ncu(run, run.end)] == [{"left out": "ncu is neither on the PATH nor in the CUDA toolkit"}]


def test_ncu_is_found_in_the_toolkit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_ncu, "PLACES", ())
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert gpu_ncu.located() is None
    path = tmp_path / "bin" / "ncu"
    path.parent.mkdir()
    path.touch(mode=0o755)
    assert gpu_ncu.located() == str(path)
