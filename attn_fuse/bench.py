"""Measure this device for the kernel picker: ``python -m attn_fuse.bench --calibrate``.

Attentions written out by hand run in turn, compiled by Inductor as written and on every kernel that can run them.
Another process runs them, and is replaced where a kernel kills it, hangs or breaks the device. The times are kept in
the user's cache directory (`$ATTN_FUSE_CACHE`, else attn_fuse in the platform's own) for this device and this version
of torch. ``--show`` prints the times that the picker uses here, ``--forget`` deletes the user's own.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from attn_fuse.backend import attn_fuse
from attn_fuse.errors import NotFusedError, named
from attn_fuse.kernels import KERNELS
from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case, visible_share
from attn_fuse.picker.evidence import AS_WRITTEN, Row, Table
from attn_fuse.picker.regression import distance
from attn_fuse.picker.timing import (
    OtherLoad,
    Timing,
    free_memory,
    interleaved,
    machine,
    synchronize,
    table,
    this_device,
)  # fmt: skip
from attn_fuse.picker.workers import Worker, note, spared
from attn_fuse.picker.workloads import program, runner, tensors

_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}
# Tensors of the size of the scores that the program as written keeps, by whether it trains: a training step keeps the
# scores, the weights, their gradients and what dropout kept.
_SCORES_ALIVE = {False: 3, True: 6}
# Max seconds of a case, most of them for compiling. Max measurements beside other load, and seconds between them.
DEADLINE, _TRIES, _WAIT = 120.0, 3, 2.0
# Max share of the cores for other programs. On a GPU, whose other load the system does not report, the max ratio of the
# upper quartile of a kernel's times to the lower.
_QUIET, _STEADY = 0.1, 1.5
_MINUTES, _QUICK_MINUTES = 9.0, 1.0


class BenchError(Exception):
    """The error that `python -m attn_fuse.bench` prints as one line before it exits with code 2."""


@dataclass(frozen=True)
class Effort:
    """How long a case is measured. rounds, seconds: max of a case. shortest: min seconds of one measurement."""

    rounds: int = 15
    seconds: float = 3.0
    shortest: float = 2e-3


QUICK = Effort(rounds=5, seconds=0.5)


@dataclass(frozen=True)
class Observation:
    """The outcome of measuring a case.

    row: None where the case was not measured. problem: why it was not. why_not: why a kernel has no time.
    busy: the other load meanwhile, in words; unless it is "", the row is not kept.
    """

    row: Row | None = None
    why_not: Mapping[str, str] = field(default_factory=dict)
    busy: str = ""
    problem: str = ""


Observe = Callable[[Sequence[str], Case, torch.device, Effort], Observation]


def measured(
    case: Case, device: torch.device, effort: Effort, kernels: Sequence[str] | None = None
) -> tuple[Row, dict[str, str]]:
    """The row of `case` as written and on `kernels` (None: all that can run it), and why a kernel has no time."""
    timings, why_not = timed(case, device, effort, kernels)
    return _row(case, timings), why_not


def _row(case: Case, timings: Mapping[str, Timing]) -> Row:
    return Row(case, {name: round(timing.median * 1e6, 2) for name, timing in timings.items()})


def timed(
    case: Case, device: torch.device, effort: Effort, kernels: Sequence[str] | None = None
) -> tuple[dict[str, Timing], dict[str, str]]:
    """The timings of which `measured` makes a row, and why a kernel has none."""
    runs, why_not = prepared(case, device, kernels)
    return interleaved(runs, device, effort.rounds, effort.seconds, effort.shortest), why_not


def prepared(
    case: Case, device: torch.device, kernels: Sequence[str] | None = None
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """A call of `case` as written and on each kernel, compiled and run once, and why a kernel has none.

    kernels: their names; None for all that can run on `device`.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    written, values = program(case), tensors(case, device)

    def compiled(*names: str) -> Any:
        options: dict[str, Any] = {"kernels": list(names), "strict": bool(names)}
        return runner(torch.compile(written, backend=attn_fuse, dynamic=False, options=options), case, values)

    note(AS_WRITTEN)
    runs = {AS_WRITTEN: compiled()}
    expected = runs[AS_WRITTEN]()
    synchronize(device)
    why_not = {}
    for name in kernels_on(device) if kernels is None else kernels:
        note(name)
        run = compiled(name)
        try:
            found = run()
            synchronize(device)
            agrees = case.dropout or _agree(found, expected, case, lambda: _in_wider_dtype(written, case, values))
        except NotFusedError as problem:
            why_not[name] = str(problem).rpartition(f"{name}: ")[2]
            continue
        except Exception as problem:
            synchronize(device)  # raises where the kernel broke the device, so that nothing else runs on it
            why_not[name] = named(problem)
            continue
        if agrees:
            runs[name] = run
        else:
            why_not[name] = "its result differs from that as written"
    note("")
    return runs, why_not


def observed(kernels: Sequence[str], case: Case, device: torch.device, effort: Effort) -> Observation:
    """The outcome of measuring `case`, at a smaller batch or with fewer heads where memory is short.

    Beside other load it is measured again, up to three times in all.
    """
    smaller = fitting(case, free_memory(device))
    if smaller is None:
        return Observation(problem=f"as written it takes {in_gib(bytes_as_written(case))} and more; too little is free")
    runs, why_not = prepared(smaller, device, kernels)
    busy = ""
    for left in reversed(range(_TRIES)):
        load = OtherLoad()
        timings = interleaved(runs, device, effort.rounds, effort.seconds, effort.shortest)
        busy = other_load(load.share(), timings, device)
        if not busy:
            break
        if left:
            time.sleep(_WAIT)
    return Observation(_row(smaller, timings), why_not, busy)


def other_load(share: float, timings: Mapping[str, Timing], device: torch.device) -> str:
    """The other load while `timings` were measured, in words; "" for none. share: of the cores, by other programs."""
    if share > _QUIET:
        return f"other programs took {share:.0%} of the cores"
    unsteady = max(timing.upper / timing.lower for timing in timings.values())
    if device.type == "cuda" and unsteady > _STEADY:
        return f"the same call took {unsteady:.1f} times as long at times"
    return ""


def fitting(case: Case, free: int | None) -> Case | None:
    """`case` with its batch, then its heads, halved until it fits half of the `free` bytes; None if never.

    Bytes are those of the program as written. Halving changes the number of (batch, head) pairs and nothing else that a
    kernel's time depends on.
    """
    while free is not None and bytes_as_written(case) > free / 2:
        if case.batch > 1:
            case = replace(case, batch=case.batch // 2)
        elif case.heads % 2 == case.kv_heads % 2 == 0:
            case = replace(case, heads=case.heads // 2, kv_heads=case.kv_heads // 2)
        else:
            return None
    return case


def bytes_as_written(case: Case) -> int:
    """About as many bytes as the program as written holds at once."""
    alive = _SCORES_ALIVE[case.training] + 2 * (case.bias != "none")
    lengths = case.q_len * case.heads * case.head_dim, 2 * case.kv_len * case.heads * case.head_dim
    return case.itemsize * (alive * case.scores + 2 * case.batch * sum(lengths))


def in_gib(count: float) -> str:
    """`count` bytes as text, in GiB."""
    return f"{count / 2**30:.1f} GiB"


def kernels_on(device: torch.device) -> list[str]:
    """The names of the kernels for devices of this type."""
    return [kernel.name for kernel in KERNELS if device.type in kernel.devices]


def _agree(found: Any, expected: Any, case: Case, exact: Callable[[], Any]) -> bool:
    """Whether each result is near that as written or at least as near to the exact one: wrong answers get no time.

    As written, the gradient of a broadcast tensor is summed up in 16 bits; a kernel that is more exact is right.
    """
    tolerance = _TOLERANCE.get(case.dtype, 6e-2)
    pairs = list(zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True))
    near = [torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True) for a, b in pairs]
    return all(near) or all(
        is_near or bool((a - c).norm() <= (b - c).norm())
        for is_near, (a, b), c in zip(near, pairs, pytree.tree_leaves(exact()), strict=True)
    )


def _in_wider_dtype(written: Callable[..., Any], case: Case, values: tuple[Any, ...]) -> Any:
    def wider(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return x.detach().to(torch.float32 if x.dtype.itemsize < 4 else torch.float64).requires_grad_(x.requires_grad)

    return runner(written, case, pytree.tree_map(wider, values))()


# ---- what is measured


def grid(device_type: str, lengths: Sequence[int] = (), heads: int = 0) -> list[Case]:
    """The cases of a calibration, those that tell most first.

    The first is the most usual one; each next one is the farthest, by `regression.apart`, from all before it. So
    wherever a calibration ends, no attention is far from a measured one.
    lengths, heads: of the sequences and of each case; () and 0 for the usual ones.
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


# ---- the three commands


def calibrate(
    device: torch.device, cases: Sequence[Case], minutes: float, effort: Effort, observe: Observe = observed
) -> int:
    """Measure `cases` in order until the time is up, write each row at once, and return the number of rows.

    minutes: for all cases; the first may take longer. observe: called for each case, in another process.
    Raises BenchError where the table cannot be written.
    """
    here = this_device(device)
    path = evidence.own_path(here, torch.__version__)
    rows = {row.case: row for known in _own(here) for row in known.rows}
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
            rows[seen.row.case] = seen.row
            print(f"  {_in_words(seen.row)}", flush=True)
            try:
                evidence.write_table(path, machine(device), list(rows.values()))
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
        self._worker, self._once = Worker(imports=["attn_fuse.bench"]), set[str]()
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
    print(f"calibrations: {evidence.cache_dir()}")
    for known in own:
        print(f"\nmeasured here with torch {known.torch}:\n{as_table(known.rows)}")
    for known in others:
        if known not in own:
            whose = "this device" if known.device == here else "another device, so only ratios are taken from it"
            kernels = sorted({name for row in known.rows for name in row.times} - {AS_WRITTEN})
            print(f"\n{known.device}, torch {known.torch}: {whose}; {len(known.rows)} rows on {', '.join(kernels)}")
    if not own and not others:
        print("\nnothing was measured on such a device: the picker goes by a cost model")


def forget() -> None:
    """Delete all calibrations, and what ``pick="measured"`` and self-checks keep. Raises BenchError if that fails."""
    paths = [path for path in (*evidence.own_paths(), evidence.cache_dir() / "measured") if path.exists()]
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
        print(f"nothing is kept in {evidence.cache_dir()}")
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


# ---- the command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        args = _parsed(arguments)
        if args.forget:
            forget()
            return 0
        device = _device(args.device)
        if args.show:
            show(device)
            return 0
        cases = grid(device.type, args.lengths or (), args.heads or 0)
        minutes = args.minutes or (_QUICK_MINUTES if args.quick else _MINUTES)
        calibrate(device, cases, minutes, QUICK if args.quick else Effort(), observed)
    except BenchError as problem:
        print(f"attn_fuse.bench: {problem}", file=sys.stderr)
        return 2
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m attn_fuse.bench", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--calibrate", action="store_true", help="measure this device; the picker uses it from then on")
    what.add_argument("--show", action="store_true", help="print what the picker has to go by here")
    what.add_argument("--forget", action="store_true", help="delete what was measured here")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one is the default")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"at most, but for the first case; {_MINUTES:g}, and {_QUICK_MINUTES:g} with --quick",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds of each case, and a minute of them")
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths of the sequences, for other than the usual")
    parser.add_argument("--heads", type=int, help="number of heads, for another than the usual")
    args = parser.parse_args(arguments)
    for name in ("minutes", "heads", "lengths"):
        value = getattr(args, name)
        if value is not None and not min(value if isinstance(value, list) else [value]) > 0:
            raise BenchError(f"--{name} is above 0, not {' '.join(map(str, value)) if name == 'lengths' else value}")
    return args


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise BenchError(f"--device {name}: it is cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"--device {name}: torch sees no CUDA device")
    return device


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    raise SystemExit(main())
