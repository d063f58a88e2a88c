"""Evidence: measured times of attentions as written and on kernels, from which the picker estimates.

A table holds rows measured on one device with one version of torch. Shipped tables lie beside this file, written by
benchmarks/crossover.py; the user's own, from ``python -m attn_fuse.bench calibrate``, lie in `cache_dir`. Only the
ratios of a row's times are used. On a GPU these are the GPU's own times, without waiting for the host.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attn_fuse.kernels.cache import cache_dir
from attn_fuse.kernels.elsewhere import Elsewhere
from attn_fuse.picker.case import Case
from attn_fuse.picker.regression import apart, expected, point_of
from attn_fuse.picker.timing import Device
from attn_fuse.report import log

AS_WRITTEN = "as_written"
_TIME = "_us"


@dataclass(frozen=True)
class Row:
    """The times of one case, microseconds of a call on the device, by the name of a kernel or "as_written"."""

    case: Case
    times: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """The fields of the case, and each time under its name with "_us" behind it."""
        return self.case.as_json() | {f"{name}{_TIME}": time for name, time in self.times.items()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Row:
        """The row that `as_json` wrote as `data`. Raises ValueError or TypeError for data that it cannot write."""
        times = {name.removesuffix(_TIME): time for name, time in data.items() if name.endswith(_TIME)}
        if not all(isinstance(time, (int, float)) and time > 0 for time in times.values()):
            raise ValueError("a time is a number above 0")
        return Row(Case(**{name: value for name, value in data.items() if not name.endswith(_TIME)}), times)


@dataclass(frozen=True)
class Table:
    """Rows measured on one device. torch: its version. own: whether the user measured them.

    capability: the compute capability of a GPU; () for a CPU.
    """

    device: Device
    torch: str
    rows: tuple[Row, ...]
    own: bool = False
    capability: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A kernel's time over the time as written.

    how: its source, in words. seconds: roughly the time of a call as written.
    is_estimate: whether all measured rows are beyond REACH.
    """

    ratio: float
    how: str
    seconds: float
    is_estimate: bool = False

    def slower_by(self, seconds: float, what: str) -> Comparison:
        """The comparison if the kernel takes `seconds` more, for `what`."""
        return replace(self, ratio=self.ratio + seconds / self.seconds, how=f"{self.how}, with {what}")


# Beyond this distance a row's ratio is an estimate. With fewer than _ENOUGH rows nearer, all rows show the trend.
REACH = 3.0
_ENOUGH = 8
# How far rows of another device and of another minor version of torch are moved away.
_OTHER_DEVICE, _OTHER_TORCH = 0.3, 0.1


def compare(
    kernel: str, case: Case, device: Device, torch: str, known: Iterable[Table], beside: Iterable[str] = ()
) -> Comparison | None:
    """The ratio of `kernel` on `case`, interpolated between measured rows; None if no row is comparable.

    If the user measured rows within REACH on this device and minor version of torch, no others are used.
    beside: the other candidates. If some rows have the times of all candidates, only those rows are used: a kernel that
        was also measured on other masks and biases would otherwise seem as fast as it is on those.
    """
    here = (*point_of(case, device.type), 0.0, 0.0)
    rows = []
    for table in known:
        away = _OTHER_DEVICE * (table.device != device), _OTHER_TORCH * (_minor(table.torch) != _minor(torch))
        for row in table.rows:
            # On a GPU other units multiply 16 bits than 32, and our kernels have other tiles.
            alike = device.type != "cuda" or row.case.itemsize == case.itemsize
            if table.device.type == device.type and AS_WRITTEN in row.times and alike:
                point = (*point_of(row.case, device.type), *away)
                rows.append((apart(here, point), point, row, table))
    of_kernel = sorted((one for one in rows if kernel in one[2].times), key=lambda one: one[0])
    if not of_kernel:
        return None
    own = [(d, p, row, of) for d, p, row, of in of_kernel if d <= REACH and of.own and not any(p[-2:])]
    wanted = {*beside} & {name for _, _, row, _ in own or rows for name in row.times}
    found = [one for one in own or of_kernel if wanted <= one[2].times.keys()] or own or of_kernel
    near = [one for one in found if one[0] <= REACH]
    if own or len(near) >= _ENOUGH:
        found = near
    _, points, measured, tables = zip(*found, strict=True)
    ratio = math.exp(expected(here, points, [math.log(row.times[kernel] / row.times[AS_WRITTEN]) for row in measured]))
    nearest = measured[0]
    how = f"{'by' if near else 'estimated from'} measurements {_where(tables[0], device, torch)}"
    seconds = nearest.times[AS_WRITTEN] * 1e-6 * case.scores / nearest.case.scores
    return Comparison(ratio, f"{how}, the nearest at {nearest.case}", seconds, not near)


def _where(table: Table, device: Device, torch: str) -> str:
    where = f"on {table.device}" if table.device != device else "here" if table.own else ""
    version = "" if _minor(table.torch) == _minor(torch) else f"with torch {_minor(table.torch)}"
    return " ".join(word for word in (where, version) if word) or "on a device of this name"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


# ---- tables


@functools.cache
def tables() -> tuple[Table, ...]:
    """The shipped tables and the user's own, without unreadable calibrations, of which a warning tells once."""
    found = [read_table(path) for path in sorted(Path(__file__).parent.glob("evidence_*.json"))]
    for path in own_paths():
        try:
            found.append(read_table(path, own=True))
        except (OSError, ValueError) as problem:
            log.warning(
                "the calibration in %s is ignored: %s (python -m attn_fuse.bench calibrate --forget deletes it)",
                path,
                problem,
            )
    return tuple(found)


def read_table(path: Path, own: bool = False) -> Table:
    """The table in the file at `path`. Raises OSError, and ValueError for a file that `write_table` cannot write."""
    try:
        data = json.loads(path.read_text())
        head = data["machine"]
        rows = tuple(map(Row.from_json, data["rows"]))
        # "sm_90" is 9.0.
        digits = str(head.get("capability", "")).removeprefix("sm_")
        capability = (int(digits[:-1]), int(digits[-1])) if digits.isdecimal() else ()
        return Table(Device.of_machine(head), str(head["torch"]), rows, own, capability)
    except (AttributeError, KeyError, TypeError) as problem:
        raise ValueError(f"it is no table of measurements ({type(problem).__name__}: {problem})") from problem


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """`new`, and the rows of `old` for other cases."""
    return list({row.case: row for row in (*old, *new)}.values())


def write_table(path: Path, machine: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write `rows`, one a line, under the head `machine`; the file appears whole or not at all."""
    lines = ",\n".join("  " + json.dumps(row.as_json()) for row in rows)
    write_whole(path, f'{{\n "machine": {json.dumps(dict(machine))},\n "rows": [\n{lines}\n ]\n}}\n')


def write_whole(path: Path, text: str) -> None:
    """Write `text` to the file at `path`, in one step: other processes never see a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
        part.write(text)
    os.chmod(part.name, 0o644)
    os.replace(part.name, path)


# ---- the user's own


def own_paths() -> list[Path]:
    """The files of the user's calibrations."""
    try:
        return sorted(cache_dir().glob("calibration_*.json"))
    except (OSError, RuntimeError):
        return []


def own_path(device: Device, torch: str) -> Path:
    """The file of the calibrations of `device` with this minor version of torch."""
    name = re.sub(r"[^a-z0-9]+", "-", str(device).lower()).strip("-")
    return cache_dir() / f"calibration_{device.type}_{name}_torch{_minor(torch)}.json"


def gpus() -> list[Elsewhere]:
    """The GPUs with evidence, which `explain --on` can stand in for."""
    return list(dict.fromkeys(Elsewhere(t.device.name, t.capability[:2]) for t in tables() if len(t.capability) == 2))
