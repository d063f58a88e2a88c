"""The everyday tests under several versions of torch: `make test-versions`. The outcome is stored for each.

Each version gets a clone of HEAD, in which `make test` sets itself up: with the torch of a --python, or with the CPU
build of that version where pip finds one. What pip does not find is stored as not had, with its words.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness import RESULTS, ROOT

# The last release of each minor version that is supported.
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
_ASKED = "import torch, sys; print(torch.__version__, sys.version.split()[0])"


def tested(version: str | None, python: str | None, arguments: str) -> dict[str, Any]:
    """The outcome of `make test` in a clone, with the CPU build of `version` or else the torch of `python`."""
    with tempfile.TemporaryDirectory() as folder:
        clone, report = Path(folder) / "attn_fuse", Path(folder) / "report.xml"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
        variables |= {"TORCH": version} if version else {}
        variables |= {"PYTHON": python} if python else {}
        done = subprocess.run(["make", ".venv/ready-dev"], cwd=clone, env=variables, stderr=subprocess.PIPE, text=True)
        row: dict[str, Any] = {"torch": version, "commit": commit(), "day": f"{datetime.date.today():%Y-%m-%d}"}
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("setup: pip")]
            return row | {"not had": said[-1] if said else done.stderr[-300:]}
        asked = subprocess.run(
            [".venv/bin/python", "-c", _ASKED], cwd=clone, capture_output=True, text=True, check=True
        )
        row["torch"], row["python"] = asked.stdout.split()
        # No PYTHON: the environment is there.
        variables["ARGS"] = f"{arguments} --junitxml={report}"
        subprocess.run(["make", "test"], cwd=clone, env=variables)
        return row | outcome(report)


def outcome(report: Path) -> dict[str, Any]:
    """The numbers of tests in pytest's report, and the names of those that failed."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    return {"passed": tests - skipped - len(failed), "skipped": skipped, "failed": failed}


def commit() -> str:
    """The short hash of HEAD."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="*", default=None, help=f"of torch, CPU builds: {', '.join(VERSIONS)}")
    parser.add_argument("--python", nargs="*", default=[], help="interpreters that have a torch, of any build")
    parser.add_argument("--tests", default="", help="arguments for pytest")
    args = parser.parse_args()
    versions = args.versions if args.versions is not None else [] if args.python else list(VERSIONS)
    path = RESULTS / "versions-cpu.json"
    rows = {minor(row): row for row in (json.loads(path.read_text())["versions"] if path.exists() else [])}
    found = []
    for version, python in [*((v, None) for v in versions), *((None, p) for p in args.python)]:
        found.append(tested(version, python, args.tests))
        print(json.dumps(found[-1], indent=1), flush=True)
        # A version that was tested is not forgotten because it is not to be had here.
        if "not had" not in found[-1] or "passed" not in rows.get(minor(found[-1]), {}):
            rows[minor(found[-1])] = found[-1]
        path.write_text(json.dumps({"versions": [rows[key] for key in sorted(rows)]}, indent=1) + "\n")
    return int(any(row.get("failed") for row in found))


def minor(row: dict[str, Any]) -> str:
    """The version of torch up to its minor number."""
    return ".".join(row["torch"].split(".")[:2])


if __name__ == "__main__":
    raise SystemExit(main())
