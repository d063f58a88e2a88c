"""Flags: the flags that commands of `python -m attn_fuse.bench` share, their messages on stderr, and their files."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from attn_fuse.errors import BenchError
from attn_fuse.explain.subject import count as count
from attn_fuse.files import unwritable
from attn_fuse.options import kernel_names


class Parser(argparse.ArgumentParser):
    """A parser whose errors are BenchErrors."""

    def error(self, message: str) -> NoReturn:
        raise BenchError(message)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured as JSON")


def check_files(args: argparse.Namespace) -> None:
    """Raise BenchError if the file of --json or --html cannot be written."""
    for flag in ("json", "html"):
        path: Path | None = getattr(args, flag, None)
        if path is not None and (problem := unwritable(f"--{flag}", path)):
            raise BenchError(problem)


def tell(doing: str) -> None:
    """Print on stderr what begins now, such as "compiling Inductor"."""
    print(doing, file=sys.stderr, flush=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` to `path`. Raises BenchError if that fails."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`. Raises BenchError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise BenchError(f"cannot write {path}: {problem.strerror or problem}") from problem


def positive(text: str) -> float:
    """A number above 0, for `type=` of a flag."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if 0 < number < math.inf:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def device_of(name: str | None) -> torch.device:
    """The device of this name; for None, CUDA if there is one. Raises BenchError for a device that cannot be used."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise BenchError(f"--device {name}: it is cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"--device {name}: torch sees no CUDA device")
    return device


def kernels_of(names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """`names`, or all of `known`, the names of the device's kernels.

    Raises OptionError for a name that no kernel has, BenchError for a kernel of other devices.
    """
    if names is None:
        return list(known)
    for name in kernel_names(list(names)):
        if name not in known:
            raise BenchError(f"--kernels {name}: it does not run on this device; here run {', '.join(known)}")
    return list(names)
