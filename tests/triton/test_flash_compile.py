"""The flash kernels compiled for several devices: their registers, spills, shared memory and machine code."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("flash_compile.py")
# The max bytes of a program.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 232448, 100: 232448}
TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
# Bytes known to spill where rows are padded, outside all loops, by capability, width and kernel.
STACK = {(80, 80, "forward"): 48, (80, 80, "key_value"): 16, (90, 80, "key_value"): 40}
# The kernels with bulk copies, by row width.
IN_BULK = {80: ["bulk_forward", "bulk_query"], 128: ["bulk_forward", "bulk_query"], 256: ["bulk_forward"]}
# On 9.0, by row width and case: the max instructions per element of a whole block, for each kernel. The figures are
# those of Triton 3.6, and a tenth more. Tiles of 64 queries and 64 keys take more instructions than larger tiles, but
# an H200 ran them faster, because several programs share a multiprocessor.
BUDGETS = {
    (32, "plain"): {"forward": 8.1, "query": 9.2, "key_value": 10.3},
    (32, "dense bias"): {"forward": 14.5, "query": 12.7, "key_value": 18.9, "input": 16.7},
    (64, "plain"): {"forward": 11.3, "query": 10.7, "key_value": 12.8},
    (64, "grouped"): {"forward": 11.3, "query": 10.7, "key_value": 15.4},
    (64, "dropout"): {"forward": 15.3, "query": 14.6, "key_value": 17.8},
    (64, "padded"): {"forward": 11.5, "query": 10.6, "key_value": 13.2},
    (64, "dense bias"): {"forward": 16.4, "query": 13.5, "key_value": 20.2, "input": 18.7},
    (64, "causal bias"): {"forward": 16.4, "query": 13.5, "key_value": 20.3, "input": 21.0},
    (64, "own bias"): {"forward": 16.4, "query": 14.9, "key_value": 20.0},
    (64, "mask"): {"forward": 18.9, "query": 18.0, "key_value": 17.9},
    (64, "softcap"): {"forward": 15.7, "query": 18.4, "key_value": 20.4},
    (64, "slopes"): {"forward": 16.8, "query": 16.1, "key_value": 18.3, "input": 39.1},
    (128, "plain"): {
        "forward": 10.3, "query": 11.4, "key_value": 15.7,
        "bulk_forward": 8.1, "bulk_query": 9.4,
    },
    (128, "grouped"): {
        "forward": 10.3, "query": 13.1, "key_value": 19.1,
        "bulk_forward": 8.1, "bulk_query": 9.4,
    },
    (128, "dropout"): {"forward": 14.3, "query": 15.3, "key_value": 25.9},
    (128, "dense bias"): {"forward": 18.3, "query": 17.2, "key_value": 23.2, "input": 28.1},
    (128, "softcap"): {"forward": 14.7, "query": 19.3, "key_value": 28.4, "bulk_forward": 12.5},
    (256, "plain"): {"forward": 15.7, "query": 21.5, "key": 26.3, "value": 18.6, "bulk_forward": 13.9},
    (256, "dropout"): {"forward": 19.8, "query": 25.4, "key": 30.6, "value": 23.9},
}  # fmt: skip
SLOW = {"grouped", "causal bias", "mask"}
# The cases in which every loop takes no longer than its matrix products, and the exceptions. Narrow rows have so few
# products that they leave time for 8 instructions per element, and dropout's 3 are too many. For small tiles the times
# on an H200 decide, as in BUDGETS.
BY_PRODUCTS = {"plain", "grouped", "dropout"}
WAITING = {
    (32, "plain"): {"forward", "query", "key_value"},
    (64, "plain"): {"forward"}, (64, "grouped"): {"forward"}, (64, "dropout"): {"forward", "query", "key_value"},
}  # fmt: skip
# Bytes that spill before the loops and are fetched after them, or spill in loops over blocks that a mask cuts.
PUT_AWAY = {
    (32, "plain", "key_value"): 32, (128, "dense bias", "key_value"): 112, (256, "dropout", "forward"): 16,
}  # fmt: skip
# Two stages were faster here on the H200, although the loop waits for each copy at once, because they leave room: in
# `query` for a second program, and in `forward` for a tile with twice the keys. With a bias there are three stages.
TWO_STAGES = {(128, "query"), (256, "forward")}
# The max reads of a whole block that are not copies, and barriers. Where keys are rows, Triton reads a bias ahead into
# registers, sixteen bytes at a time, and transposes it there. It does the same with the statistics in `input`.
READS = {"key_value": 4, "input": 6}
BARRIERS = {"key_value": 9}

# () without Triton.
TRITON = (
    tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) if importlib.util.find_spec("triton") else ()
)

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


@functools.cache
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
    found = compiled(capability, "bfloat16", head_dim, "plain")
    gradients = ["key", "value"] if head_dim > 128 else ["key_value"]
    in_bulk = IN_BULK.get(head_dim, []) if capability == 90 and TRITON == (3, 6) else []
    assert [x["kernel"] for x in found] == ["forward", *in_bulk, "statistics", "query", *gradients]
    for x in found:
        allowed = STACK.get((capability, head_dim, x["kernel"]), 0)
        assert x["stack"] <= allowed and (allowed or not x.get("LDL", 0) + x.get("STL", 0)), x
        assert not x.get("spills"), x
        assert x["shared"] <= SHARED[capability] and x["registers"] <= 255, x
        assert not x.get("ATOM") and not x.get("RED"), x
        # On 10.0, tiles for rows of 256 are too small for the instructions of its tensor cores.
        if x["kernel"] != "statistics" and (head_dim <= 128 or capability == 90):
            assert x.get(TENSOR_CORES[capability]), x


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_of_spans(capability: int) -> None:
    """The kernel is compiled for queries and for keys, and nothing spills."""
    found = [x for x in compiled(capability, "bfloat16", 64, "padded") if x["kernel"] == "seen"]
    assert len(found) == 2
    for x in found:
        assert x["stack"] == 0 and x["shared"] <= 4096 and not x.get("ATOM"), x


@pytest.mark.skipif(TRITON != (3, 6), reason="the figures are Triton 3.6's")
@pytest.mark.parametrize(
    "head_dim, case", [pytest.param(*x, marks=pytest.mark.slow if x[1] in SLOW or x[0] > 128 else ()) for x in BUDGETS]
)
def test_loops_over_whole_blocks(head_dim: int, case: str) -> None:
    """Nothing makes the loops slow: too many instructions for the products, spills, narrow products, waiting for each
    copy at once, or reading a bias one element at a time."""
    every = compiled(90, "bfloat16", head_dim, case)
    found = {x["kernel"]: x for x in every if x["kernel"] not in ("statistics", "seen")}
    budget = BUDGETS[head_dim, case]
    assert found.keys() == budget.keys()
    for kernel, x in found.items():
        if "bulk" in kernel:
            continue
        assert x["per_element"] <= budget[kernel], x
        waiting = case not in BY_PRODUCTS or kernel in WAITING.get((head_dim, case), ())
        assert x["bound_by_issue"] <= 1.0 or waiting, x
        assert x["HGMMA"] and not x.get("HMMA") and not x["spills"] and x["registers"] <= 255, x
        assert x["stack"] <= PUT_AWAY.get((head_dim, case, kernel), 0) and x["shared"] <= SHARED[90], x
        # There are two for each product if ptxas starts no product before the last has ended (C7515).
        assert x["loop"]["WARPGROUP"] < 2 * x["loop"]["HGMMA"], x
        biased = "bias" in case
        assert x["loop"]["LDG"] <= (READS.get(kernel, 0) if biased else 0) or (case, kernel) == ("slopes", "input"), x
        assert x["loop"]["SHFL"] <= 16 and x["loop"]["BAR"] <= (BARRIERS.get(kernel, 3) if biased else 3), x
        # Copies overlap with computation, except in a slope's gradient, which has a branch in its loop.
        at_once = (case, kernel) == ("slopes", "input") or ((head_dim, kernel) in TWO_STAGES and not biased)
        assert (x["in_flight"] > 0) is not at_once, x
        # Two programs of `query` fit a multiprocessor.
        assert (head_dim, kernel) != (128, "query") or biased or 2 * x["shared"] <= SHARED[90], x


@pytest.mark.skipif(TRITON != (3, 6), reason="the figures are Triton 3.6's")
@pytest.mark.parametrize(
    "head_dim, case",
    [
        pytest.param(*how, marks=pytest.mark.slow if how[1] in SLOW or how[0] > 128 else ())
        for how, budget in BUDGETS.items()
        if "bulk_forward" in budget
    ],
)
def test_loops_with_bulk_copies(head_dim: int, case: str) -> None:
    """One thread copies, and the two warp groups, whose loops these are, do not wait for each other."""
    budget = BUDGETS[head_dim, case]
    for x in compiled(90, "bfloat16", head_dim, case):
        kernel = x["kernel"]
        if "bulk" not in kernel:
            continue
        assert x["per_element"] <= budget[kernel] and x["bound_by_issue"] <= 1.0, x
        assert x["HGMMA"] and not x.get("HMMA") and x["UTMALDG"] and not x["misdescribed"], x
        assert x["registers"] == 168 and x["shared"] <= SHARED[90], x
        assert x["stack"] <= STACK.get((90, head_dim, kernel), 0) and not x["spills"], x
        assert x["loop"]["WARPGROUP"] < 2 * x["loop"]["HGMMA"], x
        assert x["loop"]["LDG"] == 0 and x["loop"]["SHFL"] <= 8, x
        assert x["loop"]["BAR"] <= 3 and x["meeting"] == 128, x


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["plain", pytest.param("dense bias", marks=pytest.mark.slow)])
def test_copies_are_in_flight_on_ampere(head_dim: int, case: str) -> None:
    """Three stages fit 8.0. A device with 99 KiB uses fewer where necessary, and runs."""
    for x in compiled(80, "bfloat16", head_dim, case):
        assert x["kernel"] == "statistics" or (x["in_flight"] > 0 and not x["spills"]), x
    for x in compiled(86, "bfloat16", head_dim, case):
        assert x["shared"] <= SHARED[86], x


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float32_compiles(capability: int, head_dim: int) -> None:
    for x in compiled(capability, "float32", head_dim):
        assert x["shared"] <= SHARED[capability], x


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", [16, 40])
def test_narrow_rows_compile(capability: int, head_dim: int) -> None:
    """Triton 3.6 cannot compile a product of 16 columns shared by two warps for 9.0."""
    assert len(compiled(capability, "float16", head_dim, "alibi")) == 5


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_everything_compiles(capability: int) -> None:
    """A table, a factor, sinks, dropout, and all gradients compile without atomic additions."""
    found = compiled(capability, "float16", 64, "everything")
    assert sum(x["kernel"] == "input" for x in found) == 2
    assert all(x["shared"] <= SHARED[capability] and not x.get("ATOM") and not x.get("RED") for x in found), found
