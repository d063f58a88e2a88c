"""``python -m attn_fuse.bench model PATH``: what attn_fuse gains on the model in a file, in every way to run it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_fuse.bench import plot
from attn_fuse.bench.command import INTERRUPTED
from attn_fuse.bench.flags import (
    Parser,
    add_files,
    check_files,
    duration,
    kernels_of,
    write_csv,
    write_json,
    write_text,
)
from attn_fuse.bench.measure import kernels_on
from attn_fuse.bench.memory import bytes_in_words
from attn_fuse.bench.model import Measured, Row, device_of, measure, steps_of
from attn_fuse.bench.profile import INDUCTORS, Profile
from attn_fuse.bench.progress import Progress
from attn_fuse.bench.ways import EAGER, FUSED, INDUCTOR
from attn_fuse.errors import BenchError, ExplainError, OptionError
from attn_fuse.explain.page import Figures
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.subject import add_flags, subject_of
from attn_fuse.picker.timing import machine, seconds_in_words, table, this_device

_SECONDS, _OPERATORS = 5.0, 8
_COVERS = (
    "eager: from query times key to weights times value, the mask, and their backward, run operator by operator.\n"
    f"fused: calls of fused kernels and their backward; what is made before a call is among {INDUCTORS}.\n"
    "Inductor mixes attention with what stands around it. By difference: its time less what the fused program takes\n"
    "outside of attention."
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; gives the exit code. Raises BenchError, ExplainError or OptionError, in one line."""
    args = _parser().parse_args(arguments)
    if args.train and args.inference:
        raise BenchError("--train and --inference each ask for one of the two; leave both out to measure both")
    check_files(args)
    measured: list[Measured] = []
    problem, code = "", 0
    modes = [args.train] if args.train or args.inference else [False, True]
    try:
        for train in modes:
            try:
                measured.append(_measured(args, train))
            except ExplainError as error:
                if len(modes) == 1 or not measured:
                    raise
                problem = f"training is left out: {error}"
            print(_text(measured[-1], args.profile) if not problem else f"\nnote: {problem}", flush=True)
    except KeyboardInterrupt:
        print("\nattn_fuse.bench: interrupted; what was measured before is kept", file=sys.stderr)
        code = INTERRUPTED
    if measured:
        _write(args, measured)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m attn_fuse.bench model", description=__doc__)
    add_flags(parser)
    parser.add_argument("--inference", action="store_true", help="only inference (without this and --train: both)")
    parser.add_argument("--seconds", type=duration, default=_SECONDS, help=f"of timing, at most, a row ({_SECONDS:g})")
    parser.add_argument("--kernels", nargs="*", metavar="NAME", help="force only these kernels; none: force nothing")
    parser.add_argument(
        "--profile",
        metavar="N",
        type=_operators,
        default=_OPERATORS,
        help=f"rows of the profile by operator ({_OPERATORS}; 0: no profile)",
    )
    add_files(parser, "bars of time and memory")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write explain's page, with these tables first on it")
    return parser


def _operators(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")


def _measured(args: argparse.Namespace, train: bool) -> Measured:
    # What the model's own code prints stays out of the tables.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            with subject_of(argparse.Namespace(**{**vars(args), "train": train})) as subject:
                kernels = kernels_of(args.kernels, kernels_on(device_of(subject)))
                with Progress(steps_of(device_of(subject), kernels)) as progress:
                    return measure(subject, kernels, args.seconds, args.profile > 0, progress)
        except (BenchError, ExplainError, OptionError):
            raise
        except (Exception, SystemExit) as error:
            raise ExplainError(
                f"{args.path}: {in_one_line(error)}; name the class with --entry and its arguments with --inputs"
            ) from error


def _write(args: argparse.Namespace, measured: Sequence[Measured]) -> None:
    if args.json is not None:
        write_json(args.json, as_json(measured))
    if args.csv is not None:
        write_csv(args.csv, as_csv(measured))
    if args.html is not None and measured[0].explanation is not None:
        write_text(args.html, measured[0].explanation.html([_figures(one) for one in measured]))
    if args.plot is not None:
        draw(args.plot, measured)


def as_json(measured: Sequence[Measured]) -> dict[str, Any]:
    """The modes that were measured, below the facts of the machine."""
    return {"machine": machine(torch.device(measured[0].device)), "measured": [m.as_json() for m in measured]}


def as_csv(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """A dictionary for each row of each mode: seconds, bytes, ratios to eager and Inductor; "" for what is lacking."""
    return [
        {
            "mode": one.mode,
            "program": row.name,
            "fused": row.fused,
            "sites": row.sites,
            "seconds": row.timing.median if row.timing else "",
            "lower_quartile": row.timing.lower if row.timing else "",
            "upper_quartile": row.timing.upper if row.timing else "",
            "over_eager": _over(row, one.row(EAGER), ""),
            "over_inductor": _over(row, one.row(INDUCTOR), ""),
            "peak_bytes": "" if row.peak is None else row.peak,
            "first_call_seconds": "" if row.first_call is None else row.first_call,
            "max_difference": "" if row.difference is None else row.difference,
            "problem": row.problem,
        }
        for one in measured
        for row in one.rows
    ]


def _over(row: Row, base: Row | None, otherwise: str) -> Any:
    if row.timing is None or base is None or base.timing is None:
        return otherwise
    return row.timing.median / base.timing.median


def _text(measured: Measured, operators: int) -> str:
    said = [f"  {line}" for line in measured.said]
    parts = ["\n".join([measured.subject, *said]), _table(measured)]
    notes = [f"{row.name}: {row.problem}" for row in measured.rows if row.problem]
    notes += [f"{name} is no row: {why}" for name, why in measured.left_out.items()]
    partly = [row for row in measured.rows if row.by_kernel and len(row.by_kernel) + (row.fused < row.sites) > 1]
    notes += [f"{row.name}: {', '.join(f'{n} on {kernel}' for kernel, n in row.by_kernel.items())}" for row in partly]
    if measured.random:
        notes.append("the model draws random numbers, so results are held against two calls of eager with other draws")
    if measured.load > 0.1:
        notes.append(f"other programs took {measured.load:.0%} of the cores meanwhile; measure on a quiet machine")
    parts += ["\n".join(f"note: {line}" for line in notes)] if notes else []
    if measured.profiles:
        parts += [_shares(measured), _operators_table(measured, operators)]
    return "\n\n".join(parts) + "\n"


def _table(measured: Measured) -> str:
    head, lines, said = _measurements(measured)
    return f"{table(head, lines)}\n{said}"


def _figures(measured: Measured) -> Figures:
    head, lines, said = _measurements(measured)
    words = {"inference": "Inference, measured", "training": "A training step, measured"}
    return Figures(words[measured.mode], ("", *head[1:]), tuple(map(tuple, lines)), said)


def _measurements(measured: Measured) -> tuple[list[str], list[list[str]], str]:
    """The head of the table, its rows, and what its columns mean."""
    head = [
        measured.mode, "median (quartiles)", "/ eager", "/ Inductor", "peak memory", "fused", "max difference",
        "first call",
    ]  # fmt: skip
    lines = []
    for row in measured.rows:
        ratios = [_over(row, measured.row(base), "-") for base in (EAGER, INDUCTOR)]
        lines.append(
            [
                row.name,
                str(row.timing) if row.timing else "-",
                *(ratio if isinstance(ratio, str) else f"{ratio:.2f}" for ratio in ratios),
                "-" if row.peak is None else bytes_in_words(row.peak),
                f"{row.fused} of {row.sites}",
                "-" if row.difference is None else f"{row.difference:.1e}",
                "-" if row.first_call is None else seconds_in_words(row.first_call),
            ]
        )
    runs = next((row.timing.runs for row in measured.rows if row.timing), 0)
    said = (
        f"{runs} rounds, the rows in turn. Peak memory: of tensors, above what the model and its inputs take.\n"
        "Max difference: from eager's outputs and gradients, over the max of the tensor. First call: with compiling,\n"
        "by torch's caches as they are. A training step: forward and backward, without an optimizer."
    )
    return head, lines, said


def _shares(measured: Measured) -> str:
    lines = []
    for name, found in measured.profiles.items():
        known = "not told apart"
        if found.attention is not None:
            known = f"{found.share:.0%} ({seconds_in_words(found.attention)})"
        lines.append([name, known, seconds_in_words(found.seconds)])
    if (rest := _by_difference(measured)) is not None:
        lines.append([f"{INDUCTOR}, by difference", *rest])
    return f"{table(['share of attention', 'attention', 'all, while profiled'], lines)}\n{_COVERS}"


def _by_difference(measured: Measured) -> list[str] | None:
    """Attention's share of Inductor's row, if all else takes what it takes in attn_fuse's; None where it is unknown."""
    inductor, fused = measured.row(INDUCTOR), measured.row(FUSED)
    if inductor is None or fused is None or inductor.timing is None or fused.timing is None:
        return None
    share = measured.profiles[fused.name].share if fused.name in measured.profiles else None
    if share is None:
        return None
    attention = inductor.timing.median - fused.timing.median * (1 - share)
    if attention <= 0:
        return None
    said = f"{attention / inductor.timing.median:.0%} ({seconds_in_words(attention)})"
    return [said, seconds_in_words(inductor.timing.median)]


def _operators_table(measured: Measured, most: int) -> str:
    profiles = measured.profiles
    names = sorted({n for p in profiles.values() for n in p.operators}, key=lambda n: -_most(profiles, n))[:most]
    lines = [[name, *(_time_of(found, name) for found in profiles.values())] for name in names]
    return table(["time of one call by operator, without what it calls", *_short(profiles)], lines)


def _short(profiles: Mapping[str, Profile]) -> list[str]:
    return [name.split(" = ")[0] for name in profiles]


def _most(profiles: Mapping[str, Profile], name: str) -> float:
    return max(found.operators.get(name, 0.0) for found in profiles.values())


def _time_of(found: Profile, name: str) -> str:
    return seconds_in_words(found.operators[name]) if name in found.operators else "-"


def draw(path: Path, measured: Sequence[Measured]) -> None:
    """Draw time and memory of each mode as bars, into a file. Raises BenchError where it cannot be written."""
    rows = []
    for one in measured:
        times = {_wrapped(row): row.timing for row in one.rows if row.timing}
        factor, unit = plot.scaled([timing.median for timing in times.values()])
        peaks = {_wrapped(row): row.peak / 2**20 for row in one.rows if row.timing and row.peak is not None}
        rows.append(
            [
                plot.Bars(
                    f"{one.mode}: time of a call",
                    f"{unit}, median and quartiles",
                    {name: timing.median * factor for name, timing in times.items()},
                    {name: (timing.lower * factor, timing.upper * factor) for name, timing in times.items()},
                ),
                plot.Bars(f"{one.mode}: peak memory", "MiB above model and inputs", peaks, {}),
            ]
        )
    plot.bars(path, _title(measured), rows)


def _wrapped(row: Row) -> str:
    return "\n= ".join(row.names)


def _title(measured: Sequence[Measured]) -> str:
    model = measured[0].subject.partition("), ")[0] + ")"
    return f"{model}\n{this_device(torch.device(measured[0].device))}, torch {torch.__version__}"
