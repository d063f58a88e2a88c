"""``python -m attn_fuse.bench calibrate``: measure this device; the picker goes by it from then on.

``--show`` prints the times that the picker uses here, ``--forget`` deletes the user's own. Attentions written out by
hand run in turn, compiled by Inductor as written and on every kernel that can run them. The times are kept in the
user's cache directory (`$ATTN_FUSE_CACHE`, else attn_fuse in the platform's own) for this device and this version of
torch.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from typing import Any

import torch

from attn_fuse.bench.cases import grid
from attn_fuse.bench.flags import Parser, device_of
from attn_fuse.bench.measure import DEADLINE, QUICK, Effort, Measuring, Observe, observed
from attn_fuse.errors import BenchError
from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.cache import cache_dir
from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, Row, Table
from attn_fuse.picker.timing import machine, table, this_device

_MINUTES, _QUICK_MINUTES = 9.0, 1.0


def main(arguments: Sequence[str]) -> int:
    """Run the command; gives the exit code. Raises BenchError, in one line."""
    args = _parsed(arguments)
    if args.forget:
        forget()
        return 0
    device = device_of(args.device)
    if args.show:
        show(device)
        return 0
    cases = grid(device.type, args.lengths or (), args.heads or 0)
    minutes = args.minutes or (_QUICK_MINUTES if args.quick else _MINUTES)
    calibrate(device, cases, minutes, QUICK if args.quick else Effort(), observed)
    return 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m attn_fuse.bench calibrate", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="print what the picker has to go by here")
    what.add_argument("--forget", action="store_true", help="delete what was measured here")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one is the default")
    said = f"at most, but for the first case; {_MINUTES:g}, and {_QUICK_MINUTES:g} with --quick"
    parser.add_argument("--minutes", type=float, help=said)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of each case, and a minute of them")
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths of the sequences, for other than the usual")
    parser.add_argument("--heads", type=int, help="number of heads, for another than the usual")
    args = parser.parse_args(arguments)
    for name in ("minutes", "heads", "lengths"):
        value = getattr(args, name)
        if value is not None and not min(value if isinstance(value, list) else [value]) > 0:
            raise BenchError(f"--{name} is above 0, not {' '.join(map(str, value)) if name == 'lengths' else value}")
    return args


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
