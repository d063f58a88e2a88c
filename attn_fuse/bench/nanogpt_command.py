"""``python -m attn_fuse.bench nanogpt``: the training step of a GPT with hand-written attention.

Eager, Inductor, SDPA's formula, its efficient and flash kernels, edited by hand, flash beside a padded vocabulary, and
dropout: on CUDA GPT-2 small in bfloat16, on the CPU a small GPT in float32.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from attn_fuse.bench import plot
from attn_fuse.bench.flags import (
    Parser,
    add_files,
    check_files,
    count,
    device_of,
    duration,
    write_csv,
    write_json,
)  # fmt: skip
from attn_fuse.bench.memory import bytes_in_words
from attn_fuse.bench.nanogpt import Sizes, Step, Table, as_csv, measure, steps_of
from attn_fuse.bench.progress import Progress
from attn_fuse.bench.ways import EAGER, INDUCTOR
from attn_fuse.errors import BenchError
from attn_fuse.picker.case import DTYPES
from attn_fuse.picker.timing import machine, seconds_in_words, table, this_device

_SECONDS = 10.0
_ON_CPU = Sizes(layers=2, heads=4, width=256, length=512, batch=1, dtype="float32")


def main(arguments: Sequence[str]) -> int:
    """Run the command; gives the exit code. Raises BenchError, in one line."""
    args = _parser().parse_args(arguments)
    check_files(args)
    device = device_of(args.device)
    sizes = _sizes(args, device)
    with Progress(steps_of(device, sizes)) as progress:
        found = measure(sizes, device, args.seconds, progress, args.within)
    print(as_text(found, sizes, device))
    if args.json is not None:
        data = {"machine": machine(device), "sizes": vars(sizes), "load": found.load}
        write_json(args.json, {**data, "rows": [row.as_json() for row in found.rows]})
    if args.csv is not None:
        write_csv(args.csv, as_csv(found.rows, sizes))
    if args.plot is not None:
        draw(args.plot, found.rows, sizes, device)
    return 0


def _parser() -> argparse.ArgumentParser:
    usual, small = Sizes(), _ON_CPU
    parser = Parser(prog="python -m attn_fuse.bench nanogpt", description=__doc__)
    for name, what in (
        ("layers", "blocks"),
        ("heads", "heads of a block"),
        ("width", "size of the embedding"),
        ("length", "tokens of a sequence"),
        ("batch", "sequences of a step"),
        ("vocabulary", "entries of the embedding, before it is padded"),
    ):
        on_gpu, on_cpu = getattr(usual, name), getattr(small, name)
        said = f"{on_gpu}" if on_gpu == on_cpu else f"{on_gpu}; {on_cpu} on the CPU"
        parser.add_argument(f"--{name}", type=count, metavar="N", help=f"{what} ({said})")
    parser.add_argument("--dtype", choices=[d for d in DTYPES if d != "float64"], help="bfloat16; float32 on the CPU")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one is the default")
    parser.add_argument("--seconds", type=duration, default=_SECONDS, help=f"of timing, at most, a row ({_SECONDS:g})")
    parser.add_argument(
        "--within", type=duration, default=math.inf, metavar="SECONDS", help="of all, about; what is late is left out"
    )
    add_files(parser, "bars of time and memory")
    return parser


def _sizes(args: argparse.Namespace, device: torch.device) -> Sizes:
    usual = Sizes() if device.type == "cuda" else _ON_CPU
    sizes = Sizes(**{name: getattr(args, name) or value for name, value in vars(usual).items()})
    if sizes.width % sizes.heads:
        raise BenchError(f"--width {sizes.width}: it is a multiple of --heads, which is {sizes.heads}")
    return sizes


def as_text(found: Table, sizes: Sizes, device: torch.device) -> str:
    """The table: time a step, tokens a second and memory, with ratios to eager and Inductor."""
    bases = [next((r for r in found.rows if r.name == name), None) for name in (EAGER, INDUCTOR)]
    lines = [
        [
            row.name,
            f"{row.vocabulary}",
            str(row.timing) if row.timing else "-",
            *(_over(row, base) for base in bases),
            f"{sizes.tokens / row.timing.median:,.0f}" if row.timing else "-",
            "-" if row.peak is None else bytes_in_words(row.peak),
            f"{row.fused} of {row.sites}" if row.sites else "-",
            "-" if row.first_call is None else seconds_in_words(row.first_call),
        ]
        for row in found.rows
    ]
    head = [
        "training step", "vocabulary", "median (quartiles)", "/ eager", "/ Inductor", "tokens/s", "peak memory",
        "fused", "first call",
    ]  # fmt: skip
    runs = next((row.timing.runs for row in found.rows if row.timing), 0)
    notes = [f"{row.name}: {row.problem}" for row in found.rows if row.problem]
    if device.type == "cpu":
        notes.append("torch has no efficient kernel on the CPU")
    if found.load > 0.1:
        notes.append(f"other programs took {found.load:.0%} of the cores meanwhile; measure on a quiet machine")
    parts = [
        f"{title(sizes)}; {this_device(device)}, torch {torch.__version__}",
        table(head, lines),
        f"{runs} rounds, the rows in turn. A step: forward, backward and AdamW. Peak memory: of tensors, above weights "
        "and optimizer.\nFirst call: with compiling, by torch's caches as they are.",
        "\n".join(f"note: {note}" for note in notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _over(row: Step, base: Step | None) -> str:
    if row.timing is None or base is None or base.timing is None:
        return "-"
    return f"{row.timing.median / base.timing.median:.2f}"


def title(sizes: Sizes) -> str:
    """The sizes in words."""
    return (
        f"GPT of {sizes.layers} layers, {sizes.heads} heads, width {sizes.width}; "
        f"batches of {sizes.batch} x {sizes.length} tokens; {sizes.dtype}"
    )


def draw(path: Path, rows: Sequence[Step], sizes: Sizes, device: torch.device) -> None:
    """Draw time and memory of each row as bars, into a file. Raises BenchError where it cannot be written."""
    times = {_label(row): row.timing for row in rows if row.timing}
    factor, unit = plot.scaled([timing.median for timing in times.values()])
    peaks = {_label(row): row.peak / 2**20 for row in rows if row.timing and row.peak is not None}
    panels = [
        plot.Bars(
            "time of a training step",
            f"{unit}, median and quartiles",
            {name: timing.median * factor for name, timing in times.items()},
            {name: (timing.lower * factor, timing.upper * factor) for name, timing in times.items()},
        ),
        plot.Bars("peak memory of a step", "MiB above weights and optimizer", peaks, {}),
    ]
    plot.bars(path, f"{title(sizes)}\n{this_device(device)}, torch {torch.__version__}", [panels])


def _label(row: Step) -> str:
    return row.name.replace(" + ", "\n+ ").replace(", ", ",\n")
