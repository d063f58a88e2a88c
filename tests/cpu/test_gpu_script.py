"""benchmarks/gpu.py goes through all of its sections, on the CPU and at tiny sizes; and through the failures of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
SECTIONS = ("ceilings", "sdpa", "correctness", "ours", "decoding", "flex", "nanogpt")
# SDPA has these on CUDA alone.
ONLY_CUDA = {"cudnn", "efficient"}


def run(results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--results", str(results), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=results)


@pytest.mark.slow
def test_every_section_completes(tmp_path: Path) -> None:
    done = run(tmp_path, "--minutes", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    stored = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(stored) == {f"gpu-{name}-cpu.json" for name in SECTIONS}
    for name, content in stored.items():
        assert content["status"] == "complete" and content["tiny"] and content["rows"], name
        failed = {kernel for row in content["rows"] for kernel in row.get("failed", {})}
        assert failed <= ONLY_CUDA, content["rows"]
    assert stored["gpu-correctness-cpu.json"]["rows"][-1]["wrong"] == 0
    assert all(row["us"] for row in stored["gpu-flex-cpu.json"]["rows"])
    assert any("fused on" in site for row in stored["gpu-nanogpt-cpu.json"]["rows"] for site in row["sites"])


def test_a_section_without_time_is_said_to_be_left_out(tmp_path: Path) -> None:
    done = run(tmp_path, "--minutes", "0.05", "--only", "ceilings")
    assert done.returncode == 1 and "ceilings: not run: no time was left" in done.stdout
    assert not [*tmp_path.glob("*.json")]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 1 and "torch sees no CUDA device" in done.stderr


FAILING = """
import sys, time
sys.argv = [{script!r}, "--device", "cpu"]
sys.path.insert(0, {folder!r})
import gpu
from pathlib import Path

def rows(bench):
    yield {{"n": 1}}
    {then}

gpu.SECTIONS["ceilings"] = gpu.Section(rows, 1)
print(gpu.run_section("ceilings", gpu.Bench(gpu.torch.device("cpu"), True), 1.5, Path({out!r})))
"""


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("raise ValueError('no')", "failed: ValueError: no"),
        ("time.sleep(9)", "out of time after 1.50 s"),
        ("bench.times({'sleeps': lambda: time.sleep(9)})", "out of time after 1.50 s"),
    ],
)
def test_a_section_that_ends_early_keeps_its_rows(tmp_path: Path, then: str, status: str) -> None:
    out = tmp_path / "rows.json"
    program = FAILING.format(script=str(SCRIPT), folder=str(SCRIPT.parent), out=str(out), then=then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == status, done.stdout + done.stderr
    stored = json.loads(out.read_text())
    assert stored["rows"] == [{"n": 1}] and stored["status"] == status
