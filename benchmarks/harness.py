"""What the benchmarks share: interleaved timing, peak memory, the machine, and result files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attn_fuse.bench.memory import peak_memory
from attn_fuse.picker.timing import OtherLoad, Timing, interleaved, seconds_in_words, summary, synchronize, table
from attn_fuse.picker.timing import machine as facts_of
from attn_fuse.report import bytes_in_words

__all__ = [
    "RESULTS", "ROOT", "OtherLoad", "Timing", "bytes_in_words", "commit", "interleaved", "machine", "peak_memory",
    "seconds_in_words", "store", "summary", "synchronize", "table",
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on, for the head of a result file."""
    return {"commit": commit(), **facts_of(device)}


def commit() -> str:
    """The commit checked out, with "+changes" where the code differs from it; "uncommitted" without one.

    Results that were stored since are no code.
    """
    code = ("attn_fuse", "benchmarks", "examples", ":!benchmarks/results")
    try:
        return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", *code) else "")
    except (OSError, subprocess.CalledProcessError):
        return "uncommitted"


def store(name: str, device: torch.device, results: Mapping[str, Any]) -> Path:
    """Write `results` below the machine's facts to results/NAME-DEVICE.json."""
    label = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).lower().replace(" ", "-")
    path = RESULTS / f"{name}-{label}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine(device), **results}, indent=1, default=_plain) + "\n")
    return path


def _plain(value: object) -> object:
    if isinstance(value, Timing):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} does not go into a result file")


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
