"""Calibrate: measure this device for the kernel picker, show what is known of it, forget it.

Attentions written out by hand run in turn, compiled by Inductor as written and on every kernel that can run them.
Another process runs them, and is replaced where a kernel kills it, hangs or breaks the device. The times are kept in
the user's cache directory (`$ATTN_FUSE_CACHE`, else attn_fuse in the platform's own) for this device and this version
of torch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_fuse.bench.measure import Effort, Observation, kernels_on, observed
from attn_fuse.errors import BenchError
from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.cache import cache_dir
from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, Row, Table
from attn_fuse.picker.timing import (
    machine,
    table,
    this_device,
)  # fmt: skip
from attn_fuse.picker.workers import Worker, spared

# Max seconds of a case, most of them for compiling.
DEADLINE = 120.0


Observe = Callable[[Sequence[str], Case, torch.device, Effort], Observation]


def calibrate(
    device: torch.device, cases: Sequence[Case], minutes: float, effort: Effort, observe: Observe = observed
) -> int:
    """Measure `cases` in order until the time is up, write each row at once, and return the number of rows.

    minutes: for all cases; the first may take longer. observe: called for each case, in another process.
    Raises BenchError where the table cannot be written.
    """
    here = this_device(device)
    path = evidence.own_path(here, torch.__version__)
    before = [row for known in _own(here) for row in known.rows]
    print(f"measuring {here} with torch {torch.__version__} for {minutes:g} min at most; kept in {path}")
    end, kept, left_out = time.perf_counter() + 60 * minutes, [], 0  # type: float, list[Row], int
    with Measuring(device, effort, observe, DEADLINE) as measuring:
        for number, case in enumerate(cases, 1):
            left = end - time.perf_counter()
            if left <= 0 and number > 1:
                break
            print(f"case {number} of {len(cases)}, {max(0.0, left) / 60:.1f} min left: {case}", flush=True)
            seen = measuring.observation(case, end if number > 1 else max(end, time.perf_counter() + DEADLINE))
            if seen.row is None or seen.busy:
                left_out += 1
                print(f"  left out: {seen.busy or seen.problem}", flush=True)
                continue
            kept.append(seen.row)
            print(f"  {_in_words(seen.row)}", flush=True)
            try:
                evidence.write_table(path, machine(device), evidence.merged(before, kept))
            except OSError as problem:
                raise BenchError(f"cannot write {path}: {problem.strerror or problem}") from problem
    evidence.tables.cache_clear()
    if kept:
        print("\n" + as_table(kept))
    said = [f"{name}: {why}" for name, why in measuring.broken.items()]
    if left_out:
        said.append(f"{left_out} cases were left out; measure again, on a quiet machine where others kept it busy")
    print("".join(f"note: {line}\n" for line in said), end="")
    return len(kept)


class Measuring:
    """A worker that measures cases one after another, without the kernels that broke it twice.

    seconds: max of a case. broken: those kernels, with what happened.
    """

    def __init__(
        self, device: torch.device, effort: Effort, observe: Observe = observed, seconds: float = DEADLINE
    ) -> None:
        self._device, self._effort, self._observe, self._seconds = device, effort, observe, seconds
        self._worker, self._once = Worker(imports=["attn_fuse.bench.measure"]), set[str]()
        self.broken: dict[str, str] = {}

    def observation(self, case: Case, end: float, kernels: Sequence[str] | None = None) -> Observation:
        """The outcome of measuring `case`, again without each kernel that broke the process.

        end: of all, by `time.perf_counter`. kernels: their names; None for all of the device.
        """
        asked = kernels_on(self._device) if kernels is None else kernels
        names = [name for name in asked if name not in self.broken]
        how = case, self._device, self._effort
        answer, broke = spared(self._worker, self._seconds, end, self._observe, names, *how)
        for name, problem in broke.items():
            if name in self._once:
                self.broken[name] = f"{problem}, twice; not used any more"
            self._once.add(name)
        if answer.problem:
            return Observation(why_not=broke, problem=answer.problem)
        seen: Observation = answer.value
        return replace(seen, why_not={**self.broken, **seen.why_not, **broke})

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()


def show(device: torch.device) -> None:
    """Print the times that the picker uses on `device`."""
    here = this_device(device)
    own, others = _own(here), [t for t in evidence.tables() if t.device.type == device.type]
    print(f"device: {here}, torch {torch.__version__}")
    print(f"calibrations: {cache_dir()}")
    for known in own:
        print(f"\nmeasured here with torch {known.torch}, {known.figures}:\n{as_table(known.rows)}")
    for known in others:
        if known not in own:
            whose = "this device" if known.device == here else "another device, so only ratios are taken from it"
            kernels = sorted({name for row in known.rows for name in row.times} - {AS_WRITTEN})
            what = f"{len(known.rows)} rows of {known.figures} on {', '.join(kernels)}"
            print(f"\n{known.device}, torch {known.torch}: {whose}; {what}")
    if not own and not others:
        print("\nnothing was measured on such a device: the picker goes by a cost model")


def forget() -> None:
    """Delete all calibrations, and what ``pick="measured"`` and self-checks keep. Raises BenchError if that fails."""
    paths = [path for path in (*evidence.own_paths(), cache_dir() / "measured") if path.exists()]
    for path in paths:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as problem:
            raise BenchError(f"cannot delete {path}: {problem.strerror or problem}") from problem
        print(f"deleted {path}")
    if not paths:
        print(f"nothing is kept in {cache_dir()}")
    evidence.tables.cache_clear()


def _own(here: Any) -> list[Table]:
    return [known for known in evidence.tables() if known.own and known.device == here]


def _in_words(row: Row) -> str:
    return f"{row.case}: " + ", ".join(f"{name} {time / 1e3:.3g} ms" for name, time in row.times.items())


def as_table(rows: Sequence[Row]) -> str:
    """`rows` as text: the time as written, and the time of each kernel over it."""
    names = [k.name for k in KERNELS if any(k.name in row.times for row in rows)]
    lines = []
    for row in rows:
        written = row.times[AS_WRITTEN]
        ratios = [f"{row.times[name] / written:.2f}" if name in row.times else "-" for name in names]
        lines.append([str(row.case), f"{written / 1e3:.3g} ms", *ratios])
    return table(["time over that as written", "as written", *names], lines)
