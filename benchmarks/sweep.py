"""``python -m attn_fuse.bench sweep``: attention alone, as written under Inductor and on every kernel.

Every length, head_dim, batch, mask and dtype is measured with every other. ^C keeps what is measured.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from attn_fuse.bench.command import INTERRUPTED
from attn_fuse.bench.flags import (
    Parser,
    add_json,
    check_files,
    count,
    device_of,
    kernels_of,
    positive,
    tell,
    write_json,
)
from attn_fuse.bench.measure import Effort, Measuring, Observation, kernels_on
from attn_fuse.picker.case import DTYPES, Case, visible_share
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.timing import machine, seconds_in_words, table, this_device
from attn_fuse.report import bytes_in_words

MASKS = ("none", "causal", "window", "documents", "dense")
_LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192)}
_IN_WORDS = {AS_WRITTEN: "as written (Inductor)"}
_SECONDS = 1.0
# Max seconds of a case beside those of timing, most of them for compiling.
_COMPILING = 240.0

Swept = tuple[Case, Observation]


def cases(
    lengths: Iterable[int],
    head_dims: Iterable[int],
    batches: Iterable[int],
    heads: int,
    masks: Iterable[str],
    dtypes: Iterable[str],
    modes: Iterable[bool],
    window: int | None = None,
) -> list[Case]:
    """The cases of a sweep, short ones first. modes: whether they train.

    window: keys that a window sees; an eighth of the length for None.
    """
    found = []
    for length, dtype, training, batch, head_dim, mask in itertools.product(
        sorted(lengths), dtypes, modes, batches, head_dims, masks
    ):
        case = Case(dtype, training, batch, heads, length, length, head_dim, mask=mask)
        if mask in ("causal", "window"):
            reach = None if mask == "causal" else min(length, window or max(2, length // 8)) - 1
            case = replace(case, visible=visible_share(length, length, 0, reach))
        found.append(case)
    return found


def sweep(cases: Sequence[Case], device: torch.device, kernels: Sequence[str], seconds: float) -> Iterator[Swept]:
    """Measure `cases` one after another, in another process. seconds: of timing, max, for each program of a case."""
    effort = Effort(rounds=30, seconds=seconds * (len(kernels) + 1), whole=True)
    limit = _COMPILING + 3 * effort.seconds
    with Measuring(device, effort, seconds=limit) as measuring:
        for case in cases:
            tell(str(case))
            yield case, measuring.observation(case, time.perf_counter() + 3 * limit, kernels)


def main(arguments: Sequence[str]) -> int:
    """Run the command; gives the exit code. Raises BenchError or OptionError, in one line."""
    args = _parser().parse_args(arguments)
    check_files(args)
    device = device_of(args.device)
    kernels = kernels_of(args.kernels, kernels_on(device))
    asked = cases(
        dict.fromkeys(args.lengths or _LENGTHS[device.type]),
        dict.fromkeys(args.head_dims),
        dict.fromkeys(args.batch),
        args.heads,
        dict.fromkeys(args.masks),
        dict.fromkeys(args.dtype or ["float32" if device.type == "cpu" else "bfloat16"]),
        [False, True] if args.both else [args.training],
        args.window,
    )
    found: list[Swept] = []
    code = 0
    try:
        for seen in sweep(asked, device, kernels, args.seconds):
            found.append(seen)
    except KeyboardInterrupt:
        code = INTERRUPTED
    print(as_text(found, device))
    if code:
        print(f"attn_fuse.bench: interrupted; {len(found)} of {len(asked)} cases are kept", file=sys.stderr)
    if args.json is not None:
        write_json(args.json, {"machine": machine(device), "cases": [as_json(*seen) for seen in found]})
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m attn_fuse.bench sweep", description=__doc__)
    several: dict[str, Any] = {"nargs": "+", "metavar": "N", "type": count}
    parser.add_argument("--lengths", **several, help="of the sequences")
    parser.add_argument("--head-dims", **several, default=[64], help="sizes of a head (64)")
    parser.add_argument("--batch", **several, default=[1], help="batch sizes (1)")
    parser.add_argument("--heads", type=count, metavar="N", default=8, help="number of heads (8)")
    named: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    said = f"of {', '.join(MASKS)} (none and causal)"
    parser.add_argument("--masks", **named, choices=MASKS, default=["none", "causal"], help=said)
    parser.add_argument("--window", type=count, metavar="N", help="keys that a window sees (an eighth of the length)")
    said = f"of {', '.join(DTYPES)} (float32 on the CPU, bfloat16 on CUDA)"
    parser.add_argument("--dtype", **named, choices=DTYPES, help=said)
    parser.add_argument("--training", action="store_true", help="forward and backward, not forward alone")
    parser.add_argument("--both", action="store_true", help="forward alone, and forward and backward")
    parser.add_argument("--kernels", **named, help="only these kernels")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one is the default")
    said = f"of timing, at most, a kernel and case ({_SECONDS:g})"
    parser.add_argument("--seconds", type=positive, default=_SECONDS, help=said)
    add_json(parser)
    return parser


def as_json(case: Case, seen: Observation) -> dict[str, Any]:
    """One case as plain dictionaries and lists."""
    return {
        "case": case.as_json(),
        "seconds": {name: asdict(timing) for name, timing in seen.timings.items()},
        "peak_bytes": dict(seen.peaks),
        "why_not": dict(seen.why_not),
        "busy": seen.busy,
        "problem": seen.problem,
    }


def as_text(found: Sequence[Swept], device: torch.device) -> str:
    """A table for each mask: the time and the memory of each kernel, and the fastest."""
    parts = [f"{this_device(device)}, torch {torch.__version__}"]
    for mask in MASKS:
        of_mask = [(case, seen) for case, seen in found if case.mask == mask and seen.timings]
        if of_mask:
            names = list(dict.fromkeys(name for _, seen in of_mask for name in seen.timings))
            head = [f"mask: {mask}", *(_IN_WORDS.get(name, name) for name in names), "fastest"]
            lines = [
                [f"{_group(case)}, length {case.q_len}", *(_cell(seen, name) for name in names), _fastest(seen)]
                for case, seen in of_mask
            ]
            parts.append(table(head, lines))
    notes = [f"{case}: left out: {seen.problem}" for case, seen in found if seen.problem]
    for case, seen in found:
        mode = "training" if case.training else "inference"
        notes += [f"{name}, {mode}, mask {case.mask}: {why}" for name, why in seen.why_not.items()]
    if busy := [seen.busy for _, seen in found if seen.busy]:
        notes.append(f"{len(busy)} of {len(found)} cases beside other load, as {busy[0]}; measure on a quiet machine")
    parts += ["\n".join(f"note: {note}" for note in dict.fromkeys(notes))] if notes else []
    return "\n\n".join(parts)


def _group(case: Case) -> str:
    mode = "training" if case.training else "inference"
    return f"{mode}, {case.dtype}, {case.batch} x {case.heads} heads of {case.head_dim}"


def _cell(seen: Observation, name: str) -> str:
    if name not in seen.timings:
        return "-"
    return f"{seconds_in_words(seen.timings[name].median)}, {bytes_in_words(seen.peaks[name])}"


def _fastest(seen: Observation) -> str:
    name = min(seen.timings, key=lambda n: seen.timings[n].median)
    ratio = seen.timings[name].median / seen.timings[AS_WRITTEN].median
    return "as written" if name == AS_WRITTEN else f"{name}, {ratio:.2f} of as written"
