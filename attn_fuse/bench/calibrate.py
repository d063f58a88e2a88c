"""``python -m attn_fuse.bench calibrate``: measure this device; the picker goes by it from then on.

``--show`` prints the times that the picker uses here, ``--forget`` deletes the user's own. Hand-written attentions are
measured in turn, compiled by Inductor as written and on every kernel that can run them. The times go to the user's
cache directory (`$ATTN_FUSE_CACHE`, else attn_fuse in the platform's own), for this device and version of torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from attn_fuse.bench.flags import Parser, count, device_of, positive
from attn_fuse.bench.measure import DEADLINE, QUICK, Effort, Measuring, Observe, observed
from attn_fuse.errors import BenchError
from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.cache import cache_dir
from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case, visible_share
from attn_fuse.picker.evidence import AS_WRITTEN, Row, Table
from attn_fuse.picker.regression import distance
from attn_fuse.picker.timing import Device, machine, table, this_device

_MINUTES, _QUICK_MINUTES = 9.0, 1.0


def main(arguments: Sequence[str]) -> int:
    """Run the command; gives the exit code. Raises BenchError, in one line."""
    args = _parser().parse_args(arguments)
    if args.forget:
        forget()
        return 0
    device = device_of(args.device)
    if args.show:
        show(device)
        return 0
    minutes = args.minutes or (_QUICK_MINUTES if args.quick else _MINUTES)
    calibrate(device, grid(device.type, args.lengths, args.heads), minutes, QUICK if args.quick else Effort())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m attn_fuse.bench calibrate", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="print the times that the picker uses here")
    what.add_argument("--forget", action="store_true", help="delete everything measured here")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one is the default")
    said = f"max, except for the first case ({_MINUTES:g}; {_QUICK_MINUTES:g} with --quick)"
    parser.add_argument("--minutes", type=positive, help=said)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of each case, for one minute")
    parser.add_argument("--lengths", type=count, nargs="+", default=(), help="of the sequences")
    parser.add_argument("--heads", type=count, default=0, help="number of heads")
    return parser


def grid(device_type: str, lengths: Sequence[int] = (), heads: int = 0) -> list[Case]:
    """The cases of a calibration, the most informative ones first.

    The first is the most usual case, and each further one is the farthest, by `regression.distance`, from all before
    it. Wherever a calibration ends, no attention is far from a measured one.
    lengths: of the sequences. heads: of each case. () and 0 stand for the usual ones.
    """
    on_gpu = device_type == "cuda"
    lengths = lengths or ((256, 1024, 4096, 8192) if on_gpu else (64, 256, 1024, 2048))
    dtypes = ("bfloat16", "float32") if on_gpu else ("float32", "bfloat16")
    usual = Case(dtypes[0], True, 4 if on_gpu else 1, heads or (16 if on_gpu else 8), max(lengths), max(lengths), 64)
    left = list(dict.fromkeys(_cases(usual, lengths, dtypes)))
    ordered = [left.pop(0)]
    distances = [distance(ordered[0], case, device_type) for case in left]
    while left:
        farthest = max(range(len(left)), key=distances.__getitem__)
        ordered.append(left.pop(farthest))
        distances.pop(farthest)
        distances = [min(d, distance(ordered[-1], case, device_type)) for d, case in zip(distances, left, strict=True)]
    return ordered


def _cases(usual: Case, lengths: Sequence[int], dtypes: Sequence[str]) -> Iterator[Case]:
    for dtype in dtypes:
        for length in sorted(lengths, reverse=True):
            square = replace(usual, dtype=dtype, q_len=length, kv_len=length)
            causal = replace(square, mask="causal", visible=visible_share(length, length, 0, None))
            window = max(2, length // 8)
            narrow = replace(square, mask="window", visible=visible_share(length, length, 0, window))
            for training in (True, False):
                for case in (
                    causal,
                    square,
                    narrow,
                    replace(square, mask="dense"),
                    replace(square, mask="documents"),
                    replace(square, bias="constant"),
                    replace(causal, function=True),
                    replace(causal, sink=True),
                    replace(causal, kv_heads=max(1, usual.heads // 4)),
                    replace(causal, head_dim=128, value_dim=128),
                    replace(square, value_dim=128),
                ):
                    yield replace(case, training=training)
            yield replace(causal, dropout=True)
            yield replace(square, dropout=True)
            yield replace(square, bias="gradient")
            yield replace(square, training=False, q_len=1)
            yield replace(square, training=False, q_len=1, kv_heads=max(1, usual.heads // 4))
            yield replace(square, training=False, q_len=1, kv_heads=1)


def calibrate(
    device: torch.device, cases: Sequence[Case], minutes: float, effort: Effort, observe: Observe | None = None
) -> int:
    """Measure `cases` in order until the time is up, write each row at once, and return the number of rows.

    minutes: for all cases; the first may take longer. observe: runs for each case in another process; None: `observed`.
    Raises BenchError if the table cannot be written.
    """
    here = this_device(device)
    path = evidence.own_path(here, torch.__version__)
    before = [row for known in _own(here) for row in known.rows]
    print(f"measuring {here} with torch {torch.__version__} for {minutes:g} min at most; kept in {path}")
    end, kept, left_out = time.perf_counter() + 60 * minutes, [], 0  # type: float, list[Row], int
    with Measuring(device, effort, observe or observed, DEADLINE) as measuring:
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
            times = ", ".join(f"{name} {us / 1e3:.3g} ms" for name, us in seen.row.times.items())
            print(f"  {seen.row.case}: {times}", flush=True)
            try:
                evidence.write_table(path, machine(device), evidence.merged(before, kept))
            except OSError as problem:
                raise BenchError(f"cannot write {path}: {problem.strerror or problem}") from problem
    evidence.tables.cache_clear()
    if kept:
        print("\n" + as_table(kept))
    said = [f"{name}: {why}" for name, why in measuring.broken.items()]
    if left_out:
        said.append(f"{left_out} cases were left out; measure again, on a quiet machine if other programs kept it busy")
    for line in said:
        print(f"note: {line}")
    return len(kept)


def show(device: torch.device) -> None:
    """Print the times that the picker uses on `device`."""
    here = this_device(device)
    own, others = _own(here), [t for t in evidence.tables() if t.device.type == device.type]
    print(f"device: {here}, torch {torch.__version__}")
    print(f"calibrations: {cache_dir()}")
    for known in own:
        print(f"\nmeasured here with torch {known.torch}:\n{as_table(known.rows)}")
    for known in others:
        if known not in own:
            whose = "this device" if known.device == here else "another device, so only ratios are taken from it"
            kernels = sorted({name for row in known.rows for name in row.times} - {AS_WRITTEN})
            what = f"{len(known.rows)} rows on {', '.join(kernels)}"
            print(f"\n{known.device}, torch {known.torch}: {whose}; {what}")
    if not own and not others:
        print("\nnothing was measured on such a device: the picker goes by size alone")


def forget() -> None:
    """Delete all calibrations and the results of ``pick="measured"`` and of self-checks. Raises BenchError."""
    paths = [path for path in (*evidence.own_paths(), cache_dir() / "measured") if path.exists()]
    for path in paths:
        try:
            (shutil.rmtree if path.is_dir() else os.unlink)(path)
        except OSError as problem:
            raise BenchError(f"cannot delete {path}: {problem.strerror or problem}") from problem
        print(f"deleted {path}")
    if not paths:
        print(f"nothing is kept in {cache_dir()}")
    evidence.tables.cache_clear()


def _own(here: Device) -> list[Table]:
    return [known for known in evidence.tables() if known.own and known.device == here]


def as_table(rows: Sequence[Row]) -> str:
    """`rows` as text: the time as written, and the time of each kernel over it."""
    names = [k.name for k in KERNELS if any(k.name in row.times for row in rows)]
    lines = []
    for row in rows:
        written = row.times[AS_WRITTEN]
        ratios = [f"{row.times[name] / written:.2f}" if name in row.times else "-" for name in names]
        lines.append([str(row.case), f"{written / 1e3:.3g} ms", *ratios])
    return table(["time over that as written", "as written", *names], lines)
