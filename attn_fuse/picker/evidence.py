"""Evidence: measured times of attentions as written and on kernels, from which the picker estimates.

A table holds the rows measured on one device with one version of torch. Shipped tables lie beside this file
(benchmarks/crossover.py writes them); the user's own, from ``python -m attn_fuse.bench calibrate``, lie in the
directory that `cache_dir` gives. Only the ratios of a row's times are used, never the times. On a GPU these are its
own times; rows measured before the host's times were kept hold what the GPU waited for the host as well.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_fuse.kernels.cache import cache_dir
from attn_fuse.picker.case import Case
from attn_fuse.picker.regression import distance, expected, point_of
from attn_fuse.picker.timing import Device
from attn_fuse.report import log

AS_WRITTEN = "as_written"
_TIME, _HOST = "_us", "_host_us"


@dataclass(frozen=True)
class Row:
    """The times of one case, by the name of a kernel or "as_written".

    times: microseconds of a call on the device, by which the picker goes. host: microseconds in which the host issues
    the call to a GPU; empty on a CPU, and where they were not measured.
    """

    case: Case
    times: Mapping[str, float]
    host: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The fields of the case, and each time under its name with "_us" or "_host_us" behind it."""
        times = {f"{name}{_TIME}": time for name, time in self.times.items()}
        return self.case.as_json() | times | {f"{name}{_HOST}": time for name, time in self.host.items()}

    @staticmethod
    def from_json(data: object) -> Row:
        """The row that `as_json` wrote as `data`. Raises ValueError for data that it cannot write."""
        if not isinstance(data, dict):
            raise ValueError(f"not a row: {data!r}")
        host = {name.removesuffix(_HOST): time for name, time in data.items() if name.endswith(_HOST)}
        others = {name: value for name, value in data.items() if not name.endswith(_HOST)}
        times = {name.removesuffix(_TIME): time for name, time in others.items() if name.endswith(_TIME)}
        if not all(isinstance(time, (int, float)) and time > 0 for time in (*times.values(), *host.values())):
            raise ValueError("a time is a number above 0")
        case = Case.from_json({name: value for name, value in others.items() if not name.endswith(_TIME)})
        return Row(case, times, host)


@dataclass(frozen=True)
class Table:
    """Rows measured on one device. torch: its version. own: whether the user measured them."""

    device: Device
    torch: str
    rows: tuple[Row, ...]
    own: bool = False

    @property
    def figures(self) -> str:
        """What the times are, in words."""
        if self.device.type == "cpu":
            return "wall time"
        return "GPU time" if any(row.host for row in self.rows) else "GPU time, its waits for the host included"


@dataclass(frozen=True)
class Comparison:
    """A kernel's time over the time as written.

    how: its source, in words. seconds: about what a call of the program as written takes. is_estimate: whether all
        measured rows are beyond REACH.
    """

    ratio: float
    how: str
    seconds: float
    is_estimate: bool = False


def compare(
    kernel: str, case: Case, device: Device, torch: str, known: Iterable[Table], beside: Iterable[str] = ()
) -> Comparison | None:
    """The ratio of `kernel` on `case`, interpolated between measured rows; None where no row is comparable.

    Where rows within REACH are the user's own, of this device and minor version of torch, no others are used.
    beside: kernels that it is compared with. Rows that have the times of all of them are used alone where there are
        any: a kernel that was also measured on other masks and biases would else seem as fast as it is on those.
    """
    rows = [
        (distance(row.case, case, device.type) + sum(away), (*point_of(row.case, device.type), *away), row, table)
        for table in known
        if table.device.type == device.type
        for away in [_elsewhere(table, device, torch)]
        for row in table.rows
        if AS_WRITTEN in row.times and _same_units(row.case, case, device)
    ]
    of_kernel = sorted((row for row in rows if kernel in row[2].times), key=lambda row: row[0])
    if not of_kernel:
        return None
    own = [row for row in of_kernel if row[0] <= REACH and _is_own(row[3], device, torch)]
    wanted = {*beside} & {name for _, _, row, _ in own or rows for name in row.times}
    found = [row for row in own or of_kernel if wanted <= row[2].times.keys()] or own or of_kernel
    near = [row for row in found if row[0] <= REACH]
    found = near if own or len(near) >= _ENOUGH else found
    ratios = [math.log(row.times[kernel] / row.times[AS_WRITTEN]) for _, _, row, _ in found]
    here = (*point_of(case, device.type), 0.0, 0.0)
    ratio = math.exp(expected(here, [point for _, point, _, _ in found], ratios))
    _, _, row, table = found[0]
    how = f"{'by' if near else 'estimated from'} measurements {_where(table, device, torch)}"
    seconds = row.times[AS_WRITTEN] * 1e-6 * case.scores / row.case.scores
    return Comparison(ratio, f"{how}, the nearest at {row.case}", seconds, not near)


def _same_units(a: Case, b: Case, device: Device) -> bool:
    # On a GPU other units multiply 16 bits than 32, and our kernels have other tiles.
    return device.type != "cuda" or a.itemsize == b.itemsize


# Beyond this distance what a row says is an estimate. Where fewer rows are nearer, all show the trend.
REACH = 3.0
_ENOUGH = 8
_OTHER_DEVICE, _OTHER_TORCH = 0.3, 0.1


def _elsewhere(table: Table, device: Device, torch: str) -> tuple[float, float]:
    return _OTHER_DEVICE * (table.device != device), _OTHER_TORCH * (_minor(table.torch) != _minor(torch))


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
    """The shipped tables and the user's own. A calibration that cannot be read is left out, with one warning."""
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
        return Table(Device.of_machine(head), str(head["torch"]), rows, own)
    except (KeyError, TypeError) as problem:
        raise ValueError(f"it is no table of measurements ({type(problem).__name__}: {problem})") from problem


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """`new`, and the rows of `old` for other cases whose times are of the same kind."""
    apart = any(row.host for row in new)
    return list({row.case: row for row in (*(row for row in old if row.host or not apart), *new)}.values())


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
