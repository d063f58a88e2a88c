"""The examples run, in small, and fuse what they are there to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--seconds", "0.1", "--pick", "fused", "--device", "cpu"]


def output_of(name: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, env=environment, timeout=400
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "arguments", "sites"),
    [
        ("bert_padded.py", ["--batch", "2", "--length", "32", "--width", "32"], 2),
        ("vit.py", ["--image", "64", "--layers", "2"], 2),
        ("sliding_window.py", ["--length", "64", "--window", "8", "--width", "64"], 1),
        ("decoding.py", ["--prompt", "16", "--tokens", "8", "--width", "32", "--layers", "2"], 4),
    ],
)
def test_an_example(name: str, arguments: list[str], sites: int) -> None:
    said = output_of(name, *arguments, *SMALL)
    assert said.count(": fused on ") == sites and ": as written" not in said and ": refused" not in said
    assert [line.split()[0] for line in said.splitlines()[-3:]] == ["eager", "inductor", "attn_fuse"]


@pytest.mark.thorough
def test_the_example_of_export(tmp_path: Path) -> None:
    said = output_of("export.py", "--folder", str(tmp_path))
    assert said.count(": fused on ") == 3 and "computes the same" in said and (tmp_path / "gpt.pt2").exists()


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert all(f'{file.name}"' in tests for file in EXAMPLES.glob("*.py") if file.name != "compare.py")
