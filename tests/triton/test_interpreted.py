"""The tests marked `interpreted`, run in processes that interpret Triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton.interpreted import INTERPRETED

pytestmark = [
    pytest.mark.every_share,
    pytest.mark.skipif(INTERPRETED, reason="runs in that process"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

FOLDER = Path(__file__).parent
FILES = sorted(path for path in FOLDER.glob("test_*.py") if "@interpreted\n" in path.read_text())
FLASH = FOLDER / "test_flash.py"


def run(which: str, files: list[Path]) -> None:
    """Run the tests in `files` whose marks match `which`, in one process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", which, "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_every_day() -> None:
    run("not thorough and not slow", FILES)


@pytest.mark.thorough
def test_thoroughly() -> None:
    run("thorough and not slow", [path for path in FILES if path != FLASH])


@pytest.mark.thorough
def test_flash_thoroughly() -> None:
    run("thorough and not slow", [FLASH])
