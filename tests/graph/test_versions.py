"""tools/setup.sh where pip finds no torch, and what `make test-versions` reads off pytest's report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import versions  # noqa: E402

REPORT = """<testsuites><testsuite tests="4" skipped="1" failures="1" errors="1">
<testcase classname="tests.a" name="right"/>
<testcase classname="tests.a" name="left out"><skipped/></testcase>
<testcase classname="tests.a" name="wrong"><failure message="no"/></testcase>
<testcase classname="tests.b" name="broken"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_the_outcome_of_a_run(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert versions.outcome(report) == {"passed": 1, "skipped": 1, "failed": ["tests.a::wrong", "tests.b::broken"]}


def test_rows_are_told_apart_by_minor_version() -> None:
    assert versions.minor({"torch": "2.14.1+cu130"}) == versions.minor({"torch": "2.14.0"}) == "2.14"


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="tools/setup.sh needs a shell")
def test_where_pip_finds_no_torch_setup_says_what_to_do(tmp_path: Path) -> None:
    clone = tmp_path / "with a space" / "attn_fuse"
    (clone / "tools").mkdir(parents=True)
    for name in ("pyproject.toml", "tools/setup.sh"):
        shutil.copy(ROOT / name, clone / name)
    venv.create(tmp_path / "bare")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "TORCH"))}
    variables |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    variables["PYTHON"] = str(tmp_path / "bare" / "bin" / "python")
    done = subprocess.run([clone / "tools" / "setup.sh", "dev"], env=variables, capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 1 and last.startswith("setup: pip found no CPU build of torch"), done.stderr
    assert "PYTHON=" in last and "PIP_FIND_LINKS=" in last and "No matching distribution found" in done.stderr
    assert not (clone / ".venv").exists()
