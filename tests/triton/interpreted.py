"""Tests of Triton kernels on a machine without a GPU.

Triton is told to interpret before it is imported, so such tests run in a process of their own: a module of them has one
test for every other process, `test_in_a_process_that_interprets`, which runs it there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 from the start")


def run_interpreted(file: str) -> None:
    """Run the tests in `file`, but the slow ones, in a process that interprets."""
    if INTERPRETED:
        pytest.skip("runs in that process")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
