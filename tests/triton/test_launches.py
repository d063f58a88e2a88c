"""Triton's own launcher on a driver that runs nothing and refuses launches that a Hopper GPU would refuse."""

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


def lines(folder: Path, *modes: str) -> dict[str, list[dict[str, Any]]]:
    """The launches in each of `modes`, all in one process."""
    from tests.triton.device import pretend

    command = [sys.executable, "-W", "ignore", "-m", "tests.triton.launched", *modes]
    done = subprocess.run(command, capture_output=True, text=True, env=pretend(folder))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
        if "mode" in line:
            mode = line["mode"]
            found[mode] = []
        else:
            found[mode].append(line)
    return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return lines(tmp_path_factory.mktemp("driver"), "lengths", "growing", "bulk", "kept")


@pytest.mark.thorough
def test_every_launch_is_within_the_limits(tmp_path: Path) -> None:
    said = lines(tmp_path, "shapes")["shapes"]
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
    found = lines(tmp_path, "all")["all"]
    assert len(found) == 3 * 7 * 7 + 3 * 4
    for x in found:
        assert x["shape"].startswith("no ") or x["launched"], x


def test_other_lengths_and_a_growing_cache_compile_nothing_new(launched: dict[str, Any]) -> None:
    assert [line["compiled"] for line in launched["lengths"]] == [1] * 4
    assert launched["growing"] == [{"kernel": "forward", "compiled": 1}]


def test_what_is_kept_of_a_launch_is_for_calls_like_it(launched: dict[str, Any]) -> None:
    *changes, last = launched["kept"]
    found = {x["change"]: (x["compiled"], x["programs"]) for x in changes}
    heads = 2 * 4
    # 256 queries in tiles of 64, each call twice.
    assert found["first"] == found["shifted"] == (1, [4 * heads] * 2)
    assert found["program"] == (1, [4 * heads] * 2)
    # On a grid for tiles of 32 queries, a kernel for tiles of 64 would access memory outside its tensors.
    assert found["tiles"] == found["tiles, shifted"] == (1, [8 * heads] * 2)
    assert found["hook"] == (0, [8 * heads] * 2)
    assert last["told"][:2] == ["forward"] * 2
    assert last["facts"] <= 3 and last["launches"] <= 3


def test_where_bulk_copies_are_taken(launched: dict[str, Any]) -> None:
    said = {x["call"]: x["launched"] for x in launched["bulk"]}
    from attn_fuse.kernels.triton.flash import bulk

    if not bulk.is_there():
        pytest.skip("the kernel is not written for this Triton")
    # 256 queries in programs of 128, each with two groups of four warps, and a third group in which one warp copies.
    in_bulk, otherwise = [["bulk_forward", 2 * 2 * 4, 384]], [["forward", 2 * 2 * 4, 256]]
    assert said["first"] == said["again"] == in_bulk
    assert said["query shifted"] == said["key shifted"] == said["value shifted"] == said["rows of 130"] == otherwise
    assert [x[0] for x in said["no keys"]] == ["forward"]
    assert said["no batch"] == []
