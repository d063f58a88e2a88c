"""Evidence: measured times of attentions as written and on kernels, from which the picker estimates.

A table holds the rows that were measured on one device with one torch. Tables that ship with attn_fuse lie beside this
file (benchmarks/crossover.py writes them); the user's own, from ``python -m attn_fuse.bench --calibrate``, in the
directory that `cache_dir` gives. Only ratios are taken from a row, never times.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_fuse.kernels.case import Case
from attn_fuse.kernels.measure import Device

log = logging.getLogger("attn_fuse")

AS_WRITTEN = "as_written"
_TIME = "_us"


@dataclass(frozen=True)
class Row:
    """Microseconds of one case, by what it ran on: "as_written" and the names of kernels."""

    case: Case
    times: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        return self.case.as_json() | {f"{name}{_TIME}": time for name, time in self.times.items()}

    @staticmethod
    def from_json(data: object) -> Row:
        """Raises ValueError for what `as_json` cannot have given."""
        if not isinstance(data, dict):
            raise ValueError(f"not a row: {data!r}")
        times = {name.removesuffix(_TIME): time for name, time in data.items() if name.endswith(_TIME)}
        if not all(isinstance(time, (int, float)) and time > 0 for time in times.values()):
            raise ValueError("a time is a number above 0")
        return Row(Case.from_json({name: value for name, value in data.items() if not name.endswith(_TIME)}), times)


@dataclass(frozen=True)
class Table:
    """Rows measured on one device. own: whether the user measured them."""

    device: Device
    torch: str
    rows: tuple[Row, ...]
    own: bool = False


@dataclass(frozen=True)
class Comparison:
    """A kernel's time over the time as written. how: how that is known, in words. is_estimate: not measured."""

    ratio: float
    how: str
    is_estimate: bool = False


def compare(
    kernel: str,
    case: Case,
    device: Device,
    torch: str,
    known: Iterable[Table],
    model: Callable[[Case], float] | None = None,
) -> Comparison | None:
    """The ratio of `kernel` on `case`, from the rows nearest to it; None where nothing within REACH was measured.

    Rows that the user measured on this device with this torch, where there are any within reach, are asked alone.
    model: the ratio that is expected of a case; from a row's case to this one, half of what it changes by is believed.
    """
    found = [
        (apart(row.case, case) + _elsewhere(table, device, torch), row, table)
        for table in known
        if table.device.type == device.type
        for row in table.rows
        if kernel in row.times and AS_WRITTEN in row.times
    ]
    found = [near for near in found if near[0] <= REACH]
    found = [near for near in found if _is_own(near[2], device, torch)] or found
    if not found:
        return None
    found.sort(key=lambda near: near[0])
    weights = [(near[0] + _AT_LEAST) ** -2 for near in found[:_NEIGHBOURS]]
    logs = [math.log(row.times[kernel] / row.times[AS_WRITTEN]) for _, row, _ in found[:_NEIGHBOURS]]
    if model is not None:
        here = model(case)
        moved = [_BELIEVED * math.log(here / model(row.case)) for _, row, _ in found[:_NEIGHBOURS]]
        logs = [log + move for log, move in zip(logs, moved, strict=True)]
    ratio = math.exp(sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights))
    _, row, table = found[0]
    return Comparison(ratio, f"measured {_where(table, device, torch)} at {row.case}")


# How far cases are apart: by how many octaves the ratio of a kernel's time to the time as written is expected to
# change from the one to the other. The figures are means over the pairs of rows of the shipped CPU table that differ
# in one thing (torch 2.13, AMD EPYC): an octave of scores 0.17, of their shape 0.15 (a single query against a square
# 1.4), 16-bit against fp32 0.9, training against inference 0.5, one mask against another 0.3, a bias against none 0.1.
# Not measured yet and so set with caution: what only some kernels take is worth a factor of two; an octave of what is
# seen is worth one to a kernel that skips the rest and none to the others.
# What counts as the length of the queries is how many share a key: of a single query, heads that share one are queries.
_PER_OCTAVE = {"scores": 0.17, "shape": 0.15, "head_dim": 0.25, "value_dim": 0.25, "visible": 0.5}
_PER_KIND = {"mask": 0.3, "training": 0.5, "function": 1.0, "dropout": 1.0, "sink": 1.0}
_HALF, _DOUBLE, _BIAS, _BIAS_GRADIENT = 0.9, 0.9, 0.1, 1.0
_OTHER_DEVICE, _OTHER_TORCH = 0.3, 0.1
# Beyond two octaves a row says nothing, and a cost model is the better guess.
REACH = 2.0
_NEIGHBOURS = 3
# Of 60 cases that nothing was measured of (benchmarks/regret.py), 15, 8 and 10 took more than 1.03 of the best with 0,
# 0.5 and 1 of the model believed, before short lengths were measured; after that 6, 6 and 8.
_BELIEVED = 0.5
_AT_LEAST = 0.02


def apart(a: Case, b: Case) -> float:
    """The distance of two cases, in octaves of the ratio."""

    def octaves(x: float, y: float) -> float:
        return abs(math.log2(x / y))

    distance = _PER_OCTAVE["scores"] * octaves(a.scores, b.scores)
    distance += _PER_OCTAVE["shape"] * octaves(_shape(a), _shape(b))
    distance += _PER_OCTAVE["head_dim"] * octaves(a.head_dim, b.head_dim)
    distance += _PER_OCTAVE["value_dim"] * octaves(a.value_dim / a.head_dim, b.value_dim / b.head_dim)
    distance += _PER_OCTAVE["visible"] * octaves(a.visible, b.visible)
    distance += sum(cost for name, cost in _PER_KIND.items() if getattr(a, name) != getattr(b, name))
    distance += _HALF * ((a.itemsize == 2) != (b.itemsize == 2)) + _DOUBLE * ((a.itemsize == 8) != (b.itemsize == 8))
    if a.bias != b.bias:
        distance += _BIAS_GRADIENT if "gradient" in (a.bias, b.bias) else _BIAS
    return distance


def _shape(case: Case) -> float:
    return case.q_len * case.heads / case.kv_heads / case.kv_len


def _elsewhere(table: Table, device: Device, torch: str) -> float:
    return _OTHER_DEVICE * (table.device != device) + _OTHER_TORCH * (_minor(table.torch) != _minor(torch))


def _is_own(table: Table, device: Device, torch: str) -> bool:
    return table.own and table.device == device and _minor(table.torch) == _minor(torch)


def _where(table: Table, device: Device, torch: str) -> str:
    where = "here" if table.own and table.device == device else "" if table.device == device else f"on {table.device}"
    version = "" if _minor(table.torch) == _minor(torch) else f"with torch {_minor(table.torch)}"
    return " ".join(word for word in (where, version) if word) or "on a device of this name"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


# ---- tables


@functools.cache
def tables() -> tuple[Table, ...]:
    """The shipped tables and the user's. One of the user's that cannot be read is left out with a warning, once."""
    found = [read_table(path) for path in sorted(Path(__file__).parent.glob("evidence_*.json"))]
    for path in own_paths():
        try:
            found.append(read_table(path, own=True))
        except (OSError, ValueError) as problem:
            log.warning(
                "the calibration in %s is ignored: %s (python -m attn_fuse.bench --forget deletes it)", path, problem
            )
    return tuple(found)


def read_table(path: Path, own: bool = False) -> Table:
    """Raises OSError, and ValueError for what `write_table` cannot have written."""
    try:
        data = json.loads(path.read_text())
        head = data["machine"]
        rows = tuple(map(Row.from_json, data["rows"]))
        return Table(Device.of_machine(head), str(head["torch"]), rows, own)
    except (KeyError, TypeError) as problem:
        raise ValueError(f"it is no table of measurements ({type(problem).__name__}: {problem})") from problem


def write_table(path: Path, machine: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """`rows` under `machine`, one a line; the file is whole or not there."""
    lines = ",\n".join("  " + json.dumps(row.as_json()) for row in rows)
    write_whole(path, f'{{\n "machine": {json.dumps(dict(machine))},\n "rows": [\n{lines}\n ]\n}}\n')


def write_whole(path: Path, text: str) -> None:
    """`text` as the file at `path`, which another process sees whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
        part.write(text)
    os.replace(part.name, path)


# ---- the user's own


def cache_dir() -> Path:
    """Where what was measured on the user's devices is kept.

    The environment variable ATTN_FUSE_CACHE, where it is set; else attn_fuse in the platform's directory for caches:
    $XDG_CACHE_HOME or ~/.cache, on macOS ~/Library/Caches, on Windows %LOCALAPPDATA%.
    """
    chosen = os.environ.get("ATTN_FUSE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "attn_fuse"


def own_paths() -> list[Path]:
    """The files with the user's calibrations."""
    try:
        return sorted(cache_dir().glob("calibration_*.json"))
    except (OSError, RuntimeError):
        return []


def own_path(device: Device, torch: str) -> Path:
    """The file for calibrations of this device with this torch."""
    name = re.sub(r"[^a-z0-9]+", "-", str(device).lower()).strip("-")
    return cache_dir() / f"calibration_{device.type}_{name}_torch{_minor(torch)}.json"
