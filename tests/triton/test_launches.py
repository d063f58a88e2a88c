"""Triton's own launcher, over a driver that runs nothing and refuses what a Hopper GPU would refuse."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HAS = importlib.util.find_spec("triton") is not None and shutil.which("cc") is not None
pytestmark = pytest.mark.skipif(not HAS, reason="needs Triton and a C compiler")


def lines(what: str, folder: Path) -> list[dict[str, Any]]:
    from tests.triton.device import pretend

    command = [sys.executable, "-W", "ignore", "-m", "tests.triton.launched", what]
    done = subprocess.run(command, capture_output=True, text=True, env=pretend(folder))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.thorough
def test_every_launch_is_within_the_limits(tmp_path: Path) -> None:
    said = lines("shapes", tmp_path)
    found = {(x["shape"], x["program"]): dict(x["launched"]) for x in said}
    heads = 2 * 4
    assert found["usual", "plain"] == {
        "forward": 4 * heads, "statistics": 4 * heads, "backward_query": 4 * heads, "backward_key_value": 4 * heads,
    }  # fmt: skip
    assert found["grouped", "plain"]["backward_key_value"] == 2 * heads
    assert "backward_input" in found["usual", "everything"]
    assert found["ragged", "plain"] == {
        "forward": 2 * 4, "statistics": 2 * 4, "backward_query": 2 * 4, "backward_key_value": 3 * 4,
    }  # fmt: skip
    assert found["one query", "plain"]["forward"] == heads
    assert set(found["no keys", "plain"]) == {"statistics", "backward_query"}
    assert set(found["no queries", "plain"]) == {"backward_key_value"}
    assert not found["no batch", "plain"]


@pytest.mark.slow
def test_every_width_dtype_and_configuration_launches(tmp_path: Path) -> None:
    found = lines("all", tmp_path)
    assert len(found) == 3 * 7 * 7 + 3 * 4
    for x in found:
        assert x["shape"].startswith("no ") or x["launched"], x


def test_lengths_that_change_compile_nothing_new(tmp_path: Path) -> None:
    found = lines("lengths", tmp_path)
    assert len(found) == 4
    for line in found:
        assert line["compiled"] == 1, line


def test_a_growing_cache_compiles_nothing_new(tmp_path: Path) -> None:
    assert lines("growing", tmp_path) == [{"kernel": "forward", "compiled": 1}]


def test_what_is_kept_of_a_launch_is_for_calls_like_it(tmp_path: Path) -> None:
    *changes, last = lines("kept", tmp_path)
    found = {x["change"]: (x["compiled"], x["programs"]) for x in changes}
    heads = 2 * 4
    # 256 queries in tiles of 64, each call twice.
    assert found["first"] == found["shifted"] == (1, [4 * heads] * 2)
    assert found["program"] == (1, [4 * heads] * 2)
    # A kernel for tiles of 64 queries on a grid for 32 would leave its tensors.
    assert found["tiles"] == found["tiles, shifted"] == (1, [8 * heads] * 2)
    assert found["hook"] == (0, [8 * heads] * 2)
    assert last["told"][:2] == ["forward"] * 2
    assert last["facts"] <= 3 and last["launches"] <= 3


def test_where_bulk_copies_are_taken(tmp_path: Path) -> None:
    said = {x["call"]: x["launched"] for x in lines("bulk", tmp_path)}
    from attn_fuse.kernels.triton.flash import bulk

    if not bulk.is_there():
        pytest.skip("the kernel is not written for this Triton")
    # 256 queries in programs of 128, by two groups of four warps, and a third of which one warp copies.
    in_bulk, otherwise = [["bulk_forward", 2 * 2 * 4, 384]], [["forward", 2 * 2 * 4, 256]]
    assert said["first"] == said["again"] == in_bulk
    assert said["query shifted"] == said["key shifted"] == said["value shifted"] == said["rows of 130"] == otherwise
    assert [x[0] for x in said["no keys"]] == ["forward"]
    assert said["no batch"] == []
