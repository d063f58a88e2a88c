"""benchmarks/gpu_results.py: the results of a GPU become evidence that the picker finds, and tables."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

# Before the tests, which have a `harness`, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_cases
import gpu_results
from attn_fuse.picker import evidence
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.timing import Device

ROOT = Path(gpu_results.__file__).parents[1]
HEAD = {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "cpu": "a CPU", "threads": 16, "date": "2026-11-27"}
COMMIT = "0123456789abcdef"
(ONE, FIRST), (TWO, SECOND), (_, THIRD), *_ = gpu_cases.cases()
TIMES = {AS_WRITTEN: 400.0, "cuda_efficient": 150.0, "triton_flash": 100.0}
SPEED = [
    {"section": "plain", "head_dim": 128, "length": 4096, "pass": "forward",
     "us": {"sdpa": 100.0, "cudnn": 90.0, "triton_flash": 110.0},
     "graph_us": {"cudnn": 80.0, "triton_flash": 100.0}, "failed": {}},
    {"section": "plain", "head_dim": 128, "length": 16384, "pass": "forward",
     "us": {"sdpa": 100.0, "cudnn": 90.0, "triton_flash": 60.0}, "failed": {}},
    {"section": "plain", "head_dim": 128, "length": 4096, "pass": "backward", "us": {}, "failed": {"cudnn": "no"}},
    {"section": "features", "feature": "documents", "pass": "forward",
     "us": {"flex": 30.0, "sdpa": 90.0, "triton_flash": 20.0}, "failed": {}},
    {"section": "decoding", "batch": 32, "cache": 4096, "pass": "forward", "us": {"sdpa": 9.0},
     "tb_per_s": {"sdpa": 2.0, "triton_flash": 1.0}, "failed": {}},
    {"not run": "plain (512, 64, False)"},
]  # fmt: skip
STEPS = [
    {"what": "sizes", "batch": 12, "length": 1024, "dtype": "bfloat16"},
    {"what": "eager", "vocabulary": 50257, "fused": "0 of 12", "seconds": 0.2, "peak_bytes": 30 << 30},
    {"what": "Inductor", "vocabulary": 50257, "fused": "0 of 12", "seconds": 0.1, "peak_bytes": 20 << 30},
    {"what": "attn_fuse, its own choice", "vocabulary": 50257, "fused": "12 of 12", "seconds": 0.05,
     "peak_bytes": 10 << 30},
    {"what": "attn_fuse, SDPA flash", "vocabulary": 50304, "fused": "0 of 0", "failed": "no time was left"},
]  # fmt: skip
SWEEP = [
    {"what": "forward, causal, D 64, T 4096", "shipped": "Config(128, 128, 8, 3)", "us": {"shipped": 100.0},
     "fastest": "Config(128, 64, 4, 3)", "over shipped": 0.9, "noise": 0.01, "failed": {}},
    {"what": "query, causal, D 64, T 4096", "shipped": "Config(64, 64, 4, 3)", "us": {"shipped": 100.0},
     "fastest": "shipped", "over shipped": 1.0, "noise": 0.0, "failed": {}},
    {"not run": "value, causal, D 256, T 4096"},
    {"fastest": {"forward, causal, D 64, T 4096": "Config(128, 64, 4, 3)"}},
]  # fmt: skip
NCU = [
    {"what": "forward, causal, D 64, T 4096", "kernel": "forward", "us": 691.2, "metrics": {
        "sm__warps_active.avg.pct_of_peak_sustained_active": 12.5,
        "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active": 61.4,
        "lts__throughput.avg.pct_of_peak_sustained_elapsed": 33.2,
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": 4.9,
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": 0.5,
        "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": 1.25,
    }},
    {"failed": "1 of 5 kernels: stopped after 28 s"},
]  # fmt: skip
CALLS = {
    "correct": {
        "ceilings": [{"what": "bf16 matmul 8192", "us": 1.0, "tflops": 790.0}],
        "correctness": [{"checked": {"triton_flash": {"right": 9, "wrong": 1, "lost": 0, "not run": 3}}}],
    },
    "speed": {"speed": SPEED},
    "evidence": {
        "evidence": [{"compiled": 3}, {"what": ONE, "case": str(FIRST), "us": TIMES}],
        "choices": [
            {"what": ONE, "case": str(FIRST), "picked": "triton_flash", "over the best": 1.0, "over as written": 0.25},
            {"what": TWO, "failed": "stopped"},
        ],
    },
    "models": {"nanogpt": STEPS, "tests": [{"exit": 0}]},
    "sweep": {"sweep": SWEEP, "ncu": NCU},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the calls bring back."""
    for number, (call, sections) in enumerate(CALLS.items(), 1):
        content = {"machine": HEAD, "commit": COMMIT, "call": call, "tiny": False}
        content["sections"] = {name: {"status": "complete", "rows": rows} for name, rows in sections.items()}
        evidence.write_whole(tmp_path / "back" / f"gpu-{number}-{call}-h200.json", json.dumps(content))
    rows = [evidence.Row(case, TIMES) for case in (FIRST, SECOND)]
    evidence.write_table(tmp_path / "back" / "evidence_cuda_h200.json", HEAD, rows)
    return tmp_path / "back"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """As much of a checkout as is written to, from which the picker then reads."""
    made = tmp_path / "checkout"
    (made / "attn_fuse" / "picker").mkdir(parents=True)
    for path in (
        *(ROOT / "attn_fuse" / "picker").glob("evidence_cpu*.json"),
        ROOT / "attn_fuse" / "picker" / "evidence.py",
    ):
        shutil.copy(path, made / "attn_fuse" / "picker")
    (made / gpu_results.RESULTS_PAGE).parent.mkdir()
    shutil.copy(ROOT / gpu_results.RESULTS_PAGE, made / gpu_results.RESULTS_PAGE)
    monkeypatch.setattr(evidence, "__file__", str(made / "attn_fuse" / "picker" / "evidence.py"))
    monkeypatch.setenv("ATTN_FUSE_CACHE", str(tmp_path / "cache"))
    evidence.tables.cache_clear()
    yield made
    evidence.tables.cache_clear()


def test_evidence_ships_and_is_found(folder: Path, checkout: Path) -> None:
    gpu_results.main([str(folder), "--into", str(checkout)])
    h200, h100 = Device("cuda", "NVIDIA H200"), Device("cuda", "NVIDIA H100 80GB HBM3")
    assert {table.device.type for table in evidence.tables()} == {"cpu", "cuda"}
    found = evidence.compare("triton_flash", FIRST, h200, HEAD["torch"], evidence.tables())
    assert found is not None and found.ratio == pytest.approx(0.25) and "on a device of this name" in found.how
    found = evidence.compare("triton_flash", FIRST, h100, HEAD["torch"], evidence.tables())
    assert found is not None and "on NVIDIA H200" in found.how
    # A second device has a file of its own.
    evidence.write_table(folder / "evidence_cuda_h100.json", HEAD | {"gpu": h100.name}, [evidence.Row(FIRST, TIMES)])
    gpu_results.main([str(folder), "--into", str(checkout)])
    evidence.tables.cache_clear()
    assert {table.device for table in evidence.tables() if table.device.type == "cuda"} == {h100, h200}


def test_what_is_measured_again_replaces_and_the_rest_stays(folder: Path, checkout: Path) -> None:
    gpu_results.main([str(folder), "--into", str(checkout)])
    again = TIMES | {"triton_flash": 50.0}
    path, shipped = folder / "evidence_cuda_h200.json", checkout / "attn_fuse" / "picker" / "evidence_cuda_h200.json"
    evidence.write_table(path, HEAD, [evidence.Row(case, again) for case in (SECOND, THIRD)])
    gpu_results.main([str(folder), "--into", str(checkout)])
    rows = evidence.read_table(shipped).rows
    assert {row.case: row.times["triton_flash"] for row in rows} == {FIRST: 100.0, SECOND: 50.0, THIRD: 50.0}
    # Rows of another torch do not stand beside.
    evidence.write_table(path, HEAD | {"torch": "2.12.0"}, [evidence.Row(THIRD, again)])
    gpu_results.main([str(folder), "--into", str(checkout)])
    assert [row.case for row in evidence.read_table(shipped).rows] == [THIRD]


def test_the_readme_has_the_figures_and_can_be_written_again(folder: Path, checkout: Path) -> None:
    before = (checkout / gpu_results.RESULTS_PAGE).read_text()
    gpu_results.main([str(folder), "--into", str(checkout)])
    written = (checkout / gpu_results.RESULTS_PAGE).read_text()
    start, end = before.index(gpu_results.BEGIN), before.index(gpu_results.END)
    assert written.startswith(before[:start]) and written.endswith(before[end:])
    for line in (
        "On one NVIDIA H200, torch 2.11.0+cu130",
        "A bf16 matmul 8192: 790.0 TFLOP/s. `triton_flash`: 9 of 10 rows of the shared grid right against float64.",
        "| D 128, T >= 4k | 0.95 of cuDNN forward | 0.80 to 1.50 | - | 0.80 to 1.50 | - |",
        "| documents | 1.3 of FlexAttention | 1.50 | - | 1.50 | - |",
        "| decoding, 32 heads, 8 of keys, D 128 | - | 1.00 TB/s | - | 2.00 TB/s | - |",
        "backward by the clock before today's, which includes the time that the GPU waited for the host:",
        "`correct`, `speed`, `evidence`, `models`, `sweep` at 0123456, 2026-11-27.",
        f"| {ONE} | {FIRST} | - | - | 0.38 | - | 0.25 | 1.50 | `triton_flash` |",
        "that the GPU waited for the host. `triton_flash` is faster than torch's best kernel on 1 of the 1 attentions "
        "that both run, and picked on 1 of 1.",
        "| forward, causal, D 64, T 4096 | `Config(128, 128, 8, 3)` | `Config(128, 64, 4, 3)` | 0.90 | 0.01 |",
        "| query, causal, D 64, T 4096 | `Config(64, 64, 4, 3)` | the same | 1.00 | 0.00 |",
        "| forward, causal, D 64, T 4096 | 691 µs | 12% | 61% | 33% | 5% | wait 1.25, long scoreboard 0.50 |",
        "12 sequences of 1024 tokens, autocast to bfloat16, with AdamW:",
        "| eager | 50257 | 200 ms | 1.00 | 2.00 | 30.0 GiB | 0 of 12 |",
        "| attn_fuse, its own choice | 50257 | 50 ms | 0.25 | 0.50 | 10.0 GiB | 12 of 12 |",
        "| attn_fuse, SDPA flash | 50304 | no time was left | - | - | - | - |",
    ):
        assert line in written, written[start:]
    gpu_results.main([str(folder), "--into", str(checkout)])
    assert (checkout / gpu_results.RESULTS_PAGE).read_text() == written
    stored = checkout / "benchmarks" / "results"
    assert len([*stored.glob("gpu-*.json")]) == 5
    # A call that is made again alone leaves the tables of the others.
    for path in folder.glob("gpu-[234]-*.json"):
        path.unlink()
    gpu_results.main([str(folder), "--into", str(checkout)])
    assert (checkout / gpu_results.RESULTS_PAGE).read_text() == written


def test_what_is_no_result_is_refused(folder: Path, checkout: Path, tmp_path: Path) -> None:
    before = (checkout / gpu_results.RESULTS_PAGE).read_text()
    (tmp_path / "empty").mkdir()
    dry = json.loads((folder / "gpu-1-correct-h200.json").read_text()) | {"tiny": True}
    evidence.write_whole(tmp_path / "dry" / "gpu-1-correct-cpu.json", json.dumps(dry))
    for where, words in (
        ("empty", "has no gpu-N-CALL-DEVICE.json"),
        ("dry", "is of a dry run, whose figures mean nothing"),
    ):
        with pytest.raises(SystemExit, match=words):
            gpu_results.main([str(tmp_path / where), "--into", str(checkout)])
    (checkout / gpu_results.RESULTS_PAGE).write_text("nothing to write between")
    with pytest.raises(SystemExit, match="has not the lines"):
        gpu_results.main([str(folder), "--into", str(checkout)])
    assert before.count(gpu_results.BEGIN) == before.count(gpu_results.END) == 1
