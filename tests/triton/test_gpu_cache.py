"""benchmarks/gpu_cache.py: what it packs of Triton's cache, another checkout finds."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, for a driver that runs nothing")
@pytest.mark.parametrize("section", ["speed", "sweep"])
def test_a_packed_cache_hits_from_another_checkout(section: str, tmp_path: Path) -> None:
    caches, archive = tmp_path / "caches", tmp_path / "cache.tar.xz"
    other = tmp_path / "other"
    for name in ("attn_fuse", "benchmarks", "examples", "tests"):
        shutil.copytree(ROOT / name, other / name, ignore=shutil.ignore_patterns("__pycache__", "results"))

    def said(root: Path) -> str:
        command = [sys.executable, "benchmarks/gpu_cache.py", "--only", section, "--most", "1"]
        done = subprocess.run(
            [*command, "--caches", str(caches), "--out", str(archive)],
            cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = said(ROOT)
    assert "kernels compiled, 0 found in the cache, by 1 calls" in first
    count = int(first.split()[0])
    assert count >= 3  # forward, and the kernels of the backward; or forward in several configs
    shutil.rmtree(caches)
    with tarfile.open(archive) as packed:
        names = packed.getnames()
        packed.extractall(caches, filter="data")
    assert sum(name.endswith(".cubin") for name in names) == count
    assert {Path(name).suffix for name in names} == {".cubin", ".json", ".so"}
    assert json.loads((caches / "triton" / "made_with.json").read_text())["python"] == sys.version.split()[0]
    assert said(other).startswith(f"0 kernels compiled, {count} found in the cache, by 1 calls")
