"""``python -m attn_fuse.bench model PATH``: the gain of attn_fuse on the model in a file, in every way to run it."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from attn_fuse.bench import rows as of_rows
from attn_fuse.bench.command import INTERRUPTED
from attn_fuse.bench.flags import Parser, add_json, check_files, kernels_of, positive, write_json, write_text
from attn_fuse.bench.measure import kernels_on
from attn_fuse.bench.model import Measured, device_of, measure
from attn_fuse.errors import BenchError, ExplainError, OptionError
from attn_fuse.explain.page import Bar, Figures
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.subject import add_flags, subject_of
from attn_fuse.picker.timing import machine, table

_SECONDS = 5.0
_HEADS = "median (quartiles)", "/ eager", "/ Inductor", "peak memory", "fused", "max difference", "first call"


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
            print(_text(measured[-1]) if not problem else f"\nnote: {problem}", flush=True)
    except KeyboardInterrupt:
        print("\nattn_fuse.bench: interrupted; what was measured before is kept", file=sys.stderr)
        code = INTERRUPTED
    if measured:
        _write(args, measured, arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m attn_fuse.bench model", description=__doc__)
    add_flags(parser)
    parser.add_argument("--inference", action="store_true", help="only inference (without this and --train: both)")
    parser.add_argument("--seconds", type=positive, default=_SECONDS, help=f"of timing, at most, a row ({_SECONDS:g})")
    parser.add_argument("--kernels", nargs="*", metavar="NAME", help="force only these kernels, or none")
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", type=Path, help="write explain's page, with these tables first on it")
    return parser


def _measured(args: argparse.Namespace, train: bool) -> Measured:
    # The output of the model's own code stays out of the tables.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            with subject_of(argparse.Namespace(**{**vars(args), "train": train})) as subject:
                kernels = kernels_of(args.kernels, kernels_on(device_of(subject)))
                return measure(subject, kernels, args.seconds)
        except (BenchError, ExplainError, OptionError):
            raise
        except (Exception, SystemExit) as error:
            raise ExplainError(
                f"{args.path}: {in_one_line(error)}; name the class with --entry and its arguments with --inputs"
            ) from error


def _write(args: argparse.Namespace, measured: Sequence[Measured], arguments: Sequence[str]) -> None:
    if args.json is not None:
        head = machine(torch.device(measured[0].device))
        write_json(args.json, {"machine": head, "measured": [one.as_json() for one in measured]})
    if args.html is not None and measured[0].explanation is not None:
        command = shlex.join(["python", "-m", "attn_fuse.bench", "model", *arguments])
        write_text(args.html, measured[0].explanation.html([_figures(one) for one in measured], command))


def _text(measured: Measured) -> str:
    said = [f"  {line}" for line in measured.said]
    head, lines, meaning = _measurements(measured)
    parts = ["\n".join([measured.subject, *said]), f"{table(head, lines)}\n{meaning}"]
    notes = _notes(measured)
    parts += ["\n".join(f"note: {line}" for line in notes)] if notes else []
    return "\n\n".join(parts) + "\n"


def _notes(measured: Measured) -> list[str]:
    notes = of_rows.notes_of(measured.rows, measured.load)
    notes += [f"{name} is no row: {why}" for name, why in measured.left_out.items()]
    partly = [row for row in measured.rows if row.by_kernel and len(row.by_kernel) + (row.fused < row.sites) > 1]
    notes += [f"{row.name}: {', '.join(f'{n} on {kernel}' for kernel, n in row.by_kernel.items())}" for row in partly]
    if measured.random:
        notes.append("the model draws random numbers, so results are held against two calls of eager with other draws")
    return notes


def _figures(measured: Measured) -> Figures:
    head, lines, said = _measurements(measured)
    words = {"inference": "Inference, measured", "training": "A training step, measured"}
    drawn: dict[int, list[float | None]] = {
        head.index("median (quartiles)"): [row.timing.median if row.timing else None for row in measured.rows],
        head.index("peak memory"): [row.peak for row in measured.rows],
    }
    rows = [
        tuple(_cell(text, drawn[column], n) if column in drawn else text for column, text in enumerate(line))
        for n, line in enumerate(lines)
    ]
    return Figures(words[measured.mode], ("", *head[1:]), tuple(rows), (said, *_notes(measured)))


def _cell(text: str, column: Sequence[float | None], row: int) -> str | Bar:
    """The cell `text` in a row of a column of figures, with its bar."""
    most, figure = max((n for n in column if n is not None), default=0), column[row]
    return text if figure is None or not most else Bar(text, figure / most)


def _measurements(measured: Measured) -> tuple[list[str], list[list[str]], str]:
    """The head of the table, its rows, and a legend."""
    cells = [{"": row.name, **of_rows.cells(row, measured.rows)} for row in measured.rows]
    lines = [[cell[head] for head in ("", *_HEADS)] for cell in cells]
    said = (
        f"{of_rows.rounds(measured.rows)} rounds, the rows in turn. Peak memory: of tensors, above what the model and "
        "its inputs take.\n"
        "Max difference: from eager's outputs and gradients, over the max of the tensor. First call: with compiling,\n"
        "by torch's caches as they are. A training step: forward and backward, without an optimizer."
    )
    return [measured.mode, *_HEADS], lines, said
