"""``python -m attn_fuse.bench sweep``: attention alone, as written under Inductor and on every kernel.

Every length, head_dim, batch, mask and dtype is measured with every other. ^C keeps what is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from attn_fuse.bench import plot
from attn_fuse.bench.command import INTERRUPTED
from attn_fuse.bench.flags import (
    Parser,
    add_files,
    check_files,
    count,
    device_of,
    duration,
    kernels_of,
    write_csv,
    write_json,
)  # fmt: skip
from attn_fuse.bench.measure import kernels_on
from attn_fuse.bench.progress import Progress
from attn_fuse.bench.sweep import MASKS, Swept, as_csv, cases, sweep
from attn_fuse.picker.case import DTYPES, Case
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.timing import machine, seconds_in_words, table, this_device

_SECONDS = 1.0
_LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192)}
_IN_WORDS = {AS_WRITTEN: "as written (Inductor)"}


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
    with Progress(len(asked)) as progress:
        try:
            for seen in sweep(asked, device, kernels, args.seconds, progress):
                found.append(seen)
        except KeyboardInterrupt:
            code = INTERRUPTED
    print(as_text(found, device))
    if code:
        said = f"interrupted; {len(found)} of {len(asked)} cases are kept"
        print(f"attn_fuse.bench: {said}", file=sys.stderr)
    if args.json is not None:
        write_json(args.json, {"machine": machine(device), "cases": [seen.as_json() for seen in found]})
    if args.csv is not None:
        write_csv(args.csv, as_csv(found))
    if args.plot is not None and any(seen.timings for seen in found):
        draw(args.plot, found, device)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m attn_fuse.bench sweep", description=__doc__)
    parser.add_argument("--lengths", type=count, nargs="+", metavar="N", help="of the sequences")
    parser.add_argument("--head-dims", type=count, nargs="+", metavar="N", default=[64], help="sizes of a head (64)")
    parser.add_argument("--batch", type=count, nargs="+", metavar="N", default=[1], help="batch sizes (1)")
    parser.add_argument("--heads", type=count, metavar="N", default=8, help="number of heads (8)")
    parser.add_argument(
        "--masks",
        nargs="+",
        metavar="MASK",
        choices=MASKS,
        default=["none", "causal"],
        help=f"of {', '.join(MASKS)} (none and causal)",
    )
    parser.add_argument("--window", type=count, metavar="N", help="keys that a window sees (an eighth of the length)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        metavar="DTYPE",
        choices=DTYPES,
        help=f"of {', '.join(DTYPES)} (float32 on the CPU, bfloat16 on CUDA)",
    )
    parser.add_argument("--training", action="store_true", help="forward and backward, not forward alone")
    parser.add_argument("--both", action="store_true", help="forward alone, and forward and backward")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="only these kernels")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one is the default")
    parser.add_argument(
        "--seconds", type=duration, default=_SECONDS, help=f"of timing, at most, a kernel and case ({_SECONDS:g})"
    )
    add_files(parser, "time and memory against length")
    return parser


def as_text(found: Sequence[Swept], device: torch.device) -> str:
    """A table for each mask: the time of each kernel, the fastest marked, and its memory below it."""
    parts = [f"{this_device(device)}, torch {torch.__version__}"]
    for mask in MASKS:
        of_mask = [seen for seen in found if seen.case.mask == mask and seen.timings]
        if not of_mask:
            continue
        names = _names(of_mask)
        head = [f"mask: {mask}", *(f"{_IN_WORDS.get(name, name)}" for name in names), "fastest"]
        lines = [[_sizes(seen.case), *(_cell(seen, name) for name in names), _fastest(seen)] for seen in of_mask]
        parts.append(table(head, [line for line in lines if line]))
    notes = dict.fromkeys(_notes(found))
    parts += ["\n".join(f"note: {note}" for note in notes)] if notes else []
    return "\n\n".join(parts)


def _names(found: Sequence[Swept]) -> list[str]:
    return list(dict.fromkeys(name for seen in found for name in seen.timings))


def _sizes(case: Case) -> str:
    mode = "training" if case.training else "inference"
    return f"{mode}, {case.dtype}, {case.batch} x {case.heads} heads of {case.head_dim}, length {case.q_len}"


def _cell(seen: Swept, name: str) -> str:
    if name not in seen.timings:
        return "-"
    return f"{seconds_in_words(seen.timings[name].median)}, {seen.peaks[name] / 2**20:.1f} MiB"


def _fastest(seen: Swept) -> str:
    name = min(seen.timings, key=lambda n: seen.timings[n].median)
    ratio = seen.timings[name].median / seen.timings[AS_WRITTEN].median
    return "as written" if name == AS_WRITTEN else f"{name}, {ratio:.2f} of as written"


def _notes(found: Sequence[Swept]) -> list[str]:
    notes = [f"{seen.case}: left out: {seen.problem}" for seen in found if seen.problem]
    for seen in found:
        mode = "training" if seen.case.training else "inference"
        notes += [f"{name}, {mode}, mask {seen.case.mask}: {why}" for name, why in seen.why_not.items()]
    if busy := [seen.busy for seen in found if seen.busy]:
        notes.append(f"{len(busy)} of {len(found)} cases beside other load, as {busy[0]}; measure on a quiet machine")
    return notes


def draw(path: Path, found: Sequence[Swept], device: torch.device) -> None:
    """Draw time and memory against length into a file: a column for each mask, two rows for all else that differs."""
    seen_cases = [seen for seen in found if seen.timings]
    masks = [mask for mask in MASKS if any(seen.case.mask == mask for seen in seen_cases)]
    longest = [timing.median for seen in seen_cases for timing in seen.timings.values()]
    factor, unit = plot.scaled(longest)
    rows: list[list[plot.Lines]] = []
    for group in dict.fromkeys(_group(seen.case) for seen in seen_cases):
        of_group = [seen for seen in seen_cases if _group(seen.case) == group]
        for what, label, value in (
            ("time", f"{unit}, median", lambda seen, name: seen.timings[name].median * factor),
            ("peak memory", "MiB above the operands", lambda seen, name: max(seen.peaks[name], 1) / 2**20),
        ):  # type: str, str, Callable[[Swept, str], float]
            rows.append([_panel(of_group, mask, f"{what}, mask {mask}\n{group}", label, value) for mask in masks])
    plot.lines(path, f"attention alone\n{this_device(device)}, torch {torch.__version__}", rows)


def _group(case: Case) -> str:
    mode = "training" if case.training else "inference"
    return f"{mode}, {case.dtype}, {case.batch} x {case.heads} heads of {case.head_dim}"


def _panel(
    found: Sequence[Swept], mask: str, title: str, label: str, value: Callable[[Swept, str], float]
) -> plot.Lines:
    of_mask = [seen for seen in found if seen.case.mask == mask]
    lines = {
        _IN_WORDS.get(name, name): [
            (float(seen.case.q_len), value(seen, name)) for seen in of_mask if name in seen.timings
        ]
        for name in _names(of_mask)
    }
    return plot.Lines(title, "length", label, lines)
