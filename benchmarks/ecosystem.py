"""Run tests/ecosystem, other projects' tools with attn_fuse, and store what passed beside the versions of all of them.

make test-ecosystem                    # all of them; the results are stored
make test-ecosystem ARGS="-k trainer"  # some: with arguments for pytest nothing is stored
"""

from __future__ import annotations

import collections
import importlib.metadata
import sys
from dataclasses import dataclass, field

import pytest
import torch

import harness

TOOLS = (
    "accelerate", "bitsandbytes", "diffusers", "lightning", "onnx", "onnxruntime", "onnxscript", "peft", "torch",
    "torchao", "transformers",
)  # fmt: skip


@dataclass
class Outcomes:
    """A pytest plugin. of: "passed", "failed" or the reason why it was skipped, by name of a test."""

    of: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.removeprefix("tests/ecosystem/")
        if report.skipped:
            self.of[name] = f"skipped: {report.longrepr[2]}" if isinstance(report.longrepr, tuple) else "skipped"
        elif report.failed:
            self.of[name] = "failed"
        elif report.when == "call":
            self.of[name] = "passed"


def versions() -> dict[str, str]:
    """The version of each tool; "not installed" without it."""
    found = {}
    for tool in TOOLS:
        try:
            found[tool] = importlib.metadata.version(tool)
        except importlib.metadata.PackageNotFoundError:
            found[tool] = "not installed"
    return found


def main() -> None:
    for tool, version in versions().items():
        print(f"{tool:<14}{version}")
    outcomes = Outcomes()
    here = str(harness.ROOT / "tests" / "ecosystem")
    how = ["-m", "ecosystem", "-v", "--show-capture=no", "-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
    status = pytest.main([*how, here, *sys.argv[1:]], plugins=[outcomes])
    if not sys.argv[1:] and outcomes.of:
        counts = collections.Counter(outcome.partition(":")[0] for outcome in outcomes.of.values())
        stored = {"versions": versions(), "counts": dict(counts), "tests": outcomes.of}
        print(harness.store("ecosystem", torch.device("cpu"), stored))
    raise SystemExit(int(status))


if __name__ == "__main__":
    main()
