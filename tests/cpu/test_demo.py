"""examples/nanogpt/train.py: its clock starts after compiling, its graphs have names, and it draws what it measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = "--layers 1 --heads 2 --width 16 --block-size 32 --batch 1 --eval-batches 1 --sample 40 --prompt 8"


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/nanogpt/train.py", *TINY.split(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_it_ends_well_when_the_minutes_are_over(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.svg"
    done = demo("--compile-off", "--steps", "50", "--minutes", "0.000001", "--plot", str(path))
    assert done.returncode == 0, done.stderr
    # Three steps are untimed, and the clock starts after them.
    assert "Stopped after 4 of 50 steps: the --minutes are over." in done.stdout
    assert "training loss, mean of steps     1-1     2-2     3-3     4-4" in done.stdout
    # A curve has at least two points: before training and at the end.
    assert "validation loss after step       0       4" in done.stdout
    # What compiles is named before it does, and the bar starts when all are compiled.
    assert re.search(r"  eager     evaluation \d+ s, training step \d+ s\n", done.stdout), done.stdout
    assert re.search(r" 3/50 \[\d\d:\d\d<", done.stderr), done.stderr
    assert " 2/50 [" not in done.stderr
    assert "Medians of 1 steps" in done.stdout and "</svg>" in path.read_text()


@pytest.mark.thorough
def test_a_plot_of_another_kind_is_refused_at_once() -> None:
    done = demo("--plot", "curves.gif")
    assert done.returncode == 2 and "--plot curves.gif: it is a .png or .svg" in done.stderr and not done.stdout


@pytest.mark.thorough
def test_its_graphs_are_named() -> None:
    done = demo("--steps", "6", "--variants", "attn_fuse")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("What attn_fuse did in the ")]
    named = [line.removeprefix("What attn_fuse did in the ").partition(" (")[0].partition(",")[0] for line in said]
    assert named[0] == "training step" and {*named} == {"training step", "evaluation", "sampling"}, said
