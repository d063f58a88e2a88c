"""Five of our kernels in Nsight Compute: what their warps wait for, and how busy the tensor cores and the memory are.

    PYTHONPATH=. python benchmarks/gpu_ncu.py [--device cpu]      launches each once, for ncu to look at

The section `ncu` of benchmarks/gpu.py runs that under ncu and keeps a few of its metrics. A machine may lack ncu, or
forbid it to read the GPU's counters.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

# First of all: other packages, too, bring a `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import gpu_sweep
from attn_fuse.picker.timing import seconds_in_words
from gpu_attention import Bench, Row
from harness import ROOT

if TYPE_CHECKING:
    from gpu_sections import Run

# The kernel, what is done to the scores, and head_dim, of a trial of the sweep.
LOOKED_INTO = (
    ("forward", "causal", 64),
    ("forward", "causal", 128),
    ("key_value", "causal", 128),
    ("query", "bias", 64),
    ("forward", "bias", 64),
)
# Where the CUDA toolkit has it, and ncu's own installer puts it.
PLACES = ("/usr/local/cuda/bin/ncu", "/usr/local/cuda-*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
# Sections, not metrics: ncu knows their metrics for each GPU, and refuses a name that a GPU does not have.
SECTIONS = ("SpeedOfLight", "Occupancy", "ComputeWorkloadAnalysis", "WarpStateStats")
DURATION = "gpu__time_duration.sum"
KEPT = re.compile(
    r"gpu__time_duration\.sum|sm__warps_active\.avg\.pct.*|(sm|smsp)__.*pipe_tensor.*\.pct.*"
    r"|(sm|lts|gpu__dram|gpu__compute_memory|dram|l1tex)_+throughput\.avg\.pct.*"
    r"|smsp__average_warps_issue_stalled_\w+_per_issue_active\.ratio|smsp__issue_active\.avg\.pct.*"
    r"|launch__(registers_per_thread|occupancy_limit_\w+)"
)
# Of one of them, in microseconds.
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
FORBIDDEN = "ERR_NVGPUCTRPERM"


def ncu(run: Run, end: float) -> Iterator[Row]:
    """A row for each kernel, with the metrics of ncu; or one that says why there are none."""
    command = [sys.executable, str(Path(__file__).resolve()), "--device", run.device.type]
    program = located()
    if program is None:
        yield {"left out": "ncu is neither on the PATH nor in the CUDA toolkit"}
        if not run.tiny:
            return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        if program is not None:
            command = [program, *_options(log), *command]
        left = max(1.0, end - time.perf_counter())
        code, said = ended(command, left, {"TRITON_INTERPRET": "1"} if run.tiny else {})
        logged = log.read_text(errors="replace") if log.exists() else ""
    launched = [line.partition(": ")[2] for line in said.splitlines() if line.startswith("launched: ")]
    if program is None:
        yield {"launched": launched} if code == 0 else {"failed": said[-1000:]}
        return
    if FORBIDDEN in logged + said:
        yield {"left out": f"this machine does not let ncu read the GPU's counters ({FORBIDDEN})"}
        return
    # An ncu that was stopped may not have written all that it had measured.
    rows = [*parsed(logged, launched)]
    yield from rows
    if len(rows) < len(LOOKED_INTO):
        why = f"stopped after {seconds_in_words(left)}" if code is None else f"exit code {code}"
        errors = [line for line in logged.splitlines() if line.startswith("==ERROR==")]
        yield {"failed": f"{len(rows)} of {len(LOOKED_INTO)} kernels: {why}: {' '.join(errors) or said[-500:]}"[:1000]}


def located() -> str | None:
    """ncu, on the PATH or where it is installed; None where it is not."""
    homes = [os.path.join(os.environ[name], "bin", "ncu") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = [path for place in (*homes, *PLACES) for path in sorted(glob.glob(place)) if os.access(path, os.X_OK)]
    return shutil.which("ncu") or (found[-1] if found else None)


def _options(log: Path) -> list[str]:
    options = ["--target-processes", "all", "--profile-from-start", "off", "--csv", "--page", "raw"]
    # The clocks are not ours to lock, and timed calls find the caches as the one before left them.
    options += ["--print-units", "base", "--clock-control", "none", "--cache-control", "none", "--log-file", str(log)]
    return options + [word for name in SECTIONS for word in ("--section", name)]


def ended(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """The exit code of `command`, None where it was stopped after `seconds`, with all that it started; what it said."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=said, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read()


def parsed(logged: str, launched: Sequence[str]) -> Iterator[Row]:
    """The rows of ncu's csv. launched: what each is of, in order."""
    lines = [line for line in logged.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        return
    table = csv.DictReader(lines)
    units = next(table)
    for what, row in zip(launched, table, strict=False):
        metrics = {}
        for name, text in row.items():
            if name and KEPT.fullmatch(name):
                with contextlib.suppress(ValueError):
                    metrics[name] = float(text.replace(",", ""))
        found: Row = {"what": what, "kernel": row.get("Kernel Name", "")}
        if DURATION in metrics and units.get(DURATION) in UNITS:
            found["us"] = round(metrics[DURATION] * UNITS[units[DURATION]], 2)
        yield found | {"metrics": metrics}


def looked_into(tiny: bool) -> list[gpu_sweep.Trial]:
    found = {(t.kernel, t.scores, t.head_dim): t for t in reversed(gpu_sweep.trials())}
    trials = [found[name] for name in LOOKED_INTO]
    return [replace(trial, batch=2, heads=1, length=32) for trial in trials] if tiny else trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda")
    device = parser.parse_args().device
    bench = Bench(device, tiny=device.type == "cpu")
    launches = []
    for trial in looked_into(bench.tiny):
        _, launch, _ = gpu_sweep.Attention(trial, bench).made()
        launch()
        launches.append((trial, launch))
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    for trial, launch in launches:
        launch()
        print(f"launched: {trial}", flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
