"""The flash kernels compiled for devices that are not there: what they keep in registers and in shared memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("flash_compile.py")
# Bytes that one program can have.
SHARED = {80: 163 * 1024, 90: 232448, 100: 232448}
TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
# What is known to spill a little, in bytes.
STACK = {
    (80, 80, "forward"): 80,
    (90, 256, "query"): 48,
    (100, 80, "sum_of_products"): 8,
    (100, 128, "sum_of_products"): 8,
}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def compiled(*how: Any) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *map(str, how)]
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    "head_dim", [64, 128, pytest.param(80, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_nothing_spills(capability: int, head_dim: int) -> None:
    found = compiled(capability, "bfloat16", head_dim)
    assert [x["kernel"] for x in found] == ["forward", "sum_of_products", "query", "key_value"]
    for x in found:
        allowed = STACK.get((capability, head_dim, x["kernel"]), 0)
        assert x["stack"] <= allowed and (allowed or not x.get("LDL", 0) + x.get("STL", 0)), x
        assert x["shared"] <= SHARED[capability] and x["registers"] <= 255, x
        assert not x.get("ATOM") and not x.get("RED"), x
        # Tiles of 256 wide rows are too narrow for the tensor cores' own instructions on 9.0 and 10.0.
        if x["kernel"] != "sum_of_products" and head_dim <= 128:
            assert x.get(TENSOR_CORES[capability]), x


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float32_compiles(capability: int, head_dim: int) -> None:
    for x in compiled(capability, "float32", head_dim):
        assert x["shared"] <= SHARED[capability], x


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", [16, 40])
def test_narrow_rows_compile(capability: int, head_dim: int) -> None:
    """Two warps that share 16 columns of a product are more than Triton 3.6 compiles for 9.0."""
    assert len(compiled(capability, "float16", head_dim, "alibi")) == 5


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_everything_compiles(capability: int) -> None:
    """A table looked up, a factor, sinks, dropout, and the gradients of what is learned, without atomic additions."""
    found = compiled(capability, "float16", 64, "everything")
    assert sum(x["kernel"] == "input" for x in found) == 2
    assert all(x["shared"] <= SHARED[capability] and not x.get("ATOM") and not x.get("RED") for x in found), found
