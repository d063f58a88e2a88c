"""``python -m attn_fuse.bench nanogpt``: the training step of a GPT with hand-written attention, on each SDPA kernel.

The rows are those of the write-ups on making nanoGPT's training fast: eager, torch.compile, SDPA's formula, efficient
and flash kernels, and flash beside a vocabulary padded to a multiple of 64; then with dropout. One row is edited by
hand to SDPA; all others run the same code, since attn_fuse puts its attention on the kernel. On CUDA it is GPT-2 small
in bfloat16, on the CPU a small GPT in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "nanogpt"))

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attn_fuse.bench import rows as of_rows
from attn_fuse.bench.flags import Parser, add_json, check_files, count, device_of, positive, tell, write_json
from attn_fuse.bench.rows import Row
from attn_fuse.bench.ways import EAGER, INDUCTOR, PICKED, Way, sdpa_kernels
from attn_fuse.errors import BenchError, named
from attn_fuse.picker.case import DTYPES
from attn_fuse.picker.timing import OtherLoad, machine, synchronize, table, this_device
from attn_fuse.report import collecting
from model import GPT, GPTConfig
from model_sdpa import SDPAGPT

MULTIPLE = 64
# How far the loss of a first step may be from eager's, by the bytes of the dtype. With dropout, which each program
# draws anew, it may be as far as in 16 bits.
_TOLERANCE = {4: 1e-3, 2: 2e-2}
_DROPOUT = 0.1
_NO_TIME = "no time was left"
_SECONDS = 10.0


@dataclass(frozen=True)
class Sizes:
    """The sizes of the GPT and of its batch. vocabulary: before it is padded. dtype: of autocast; float32: none."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    length: int = 1024
    batch: int = 8
    vocabulary: int = 50257
    dtype: str = "bfloat16"

    @property
    def padded(self) -> int:
        """The vocabulary, rounded up to a multiple of 64."""
        return math.ceil(self.vocabulary / MULTIPLE) * MULTIPLE

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


@dataclass(frozen=True)
class Program:
    """What one row runs: the GPT in one way. by_hand: with its attention edited to a call of SDPA."""

    way: Way
    vocabulary: int
    dropout: float = 0.0
    by_hand: bool = False

    @property
    def name(self) -> str:
        """The row's name: the way, and what else is unlike the first rows."""
        words = f"edited by hand to SDPA, {self.way.name}" if self.by_hand else self.way.name
        return words + (f", dropout {self.dropout:g}" if self.dropout else "")


_ON_CPU = Sizes(layers=2, heads=4, width=256, length=512, batch=1, dtype="float32")


@dataclass(frozen=True, kw_only=True)
class Step(Row):
    """One row: a training step, forward, backward and AdamW. vocabulary: its size. dropout: its probability.

    loss: of the first step. The peak is above the weights and the optimizer's state.
    """

    vocabulary: int
    dropout: float = 0.0
    loss: float | None = None


@dataclass(frozen=True)
class Table:
    """The rows, and the share of the cores that other programs took while they were measured."""

    rows: tuple[Step, ...]
    load: float


def programs_of(device: torch.device, sizes: Sizes) -> list[Program]:
    """The rows, in order."""
    calls = sdpa_kernels(device)
    choice = Way(f"{PICKED}, its own choice", {})
    ways = [Way(EAGER), Way(INDUCTOR)]
    ways.append(Way("attn_fuse, SDPA math", {"pick": "fused", "kernels": [*calls.values()]}, SDPBackend.MATH))
    for backend, words in ((SDPBackend.EFFICIENT_ATTENTION, "efficient"), (SDPBackend.FLASH_ATTENTION, "flash")):
        if backend in calls:
            ways.append(_forced(f"attn_fuse, SDPA {words}", calls[backend]))
    flash = _forced("attn_fuse, SDPA flash + padded vocabulary", calls[SDPBackend.FLASH_ATTENTION])
    return [
        *(Program(way, sizes.vocabulary) for way in (*ways, choice)),
        Program(Way(INDUCTOR), sizes.vocabulary, by_hand=True),
        Program(flash, sizes.padded),
        *(Program(way, sizes.vocabulary, _DROPOUT) for way in (Way(INDUCTOR), choice)),
    ]


def _forced(name: str, kernel: str) -> Way:
    return Way(name, {"pick": "fused", "kernels": [kernel]})


def measure(sizes: Sizes, device: torch.device, seconds: float, within: float = math.inf) -> Table:
    """Measure all rows, in turn. seconds: of timing, max, for each row. within: about so many seconds in all.

    A program that would not be compiled and timed within that time is left out, and its row says so. Raises BenchError
    where the GPT does not run eager, as where memory is short.
    """
    load = OtherLoad()
    end = time.perf_counter() + within
    expected: dict[tuple[int, float], float] = {}
    rows: list[Step] = []
    runs: dict[str, Callable[[], Tensor]] = {}
    try:
        for program in programs_of(device, sizes):
            if runs and time.perf_counter() + seconds * len(runs) > end:
                rows.append(replace(_row(program), problem=_NO_TIME))
                continue
            tell(f"compiling {program.name}" if program.name != EAGER else "running eager")
            eager = program.vocabulary, program.dropout
            if eager not in expected:
                expected[eager] = _first_loss(sizes, Program(Way(EAGER), *eager), device)
            row, run = _prepared(program, sizes, device, expected[eager])
            rows.append(row)
            runs |= {} if run is None else {row.name: run}
        left = max(1.0, min(seconds * len(runs), end - time.perf_counter()))
        rows = of_rows.measured(rows, runs, device, left)
    finally:
        torch.compiler.reset()
    return Table(tuple(rows), load.share())


def first_step(name: str, sizes: Sizes, device: torch.device) -> float:
    """The loss of the first step of the row `name`, whose compiled program torch's caches then have."""
    (program,) = (program for program in programs_of(device, sizes) if program.name == name)
    return float(_step(program, sizes, device)())


def _first_loss(sizes: Sizes, eager: Program, device: torch.device) -> float:
    try:
        return float(_step(eager, sizes, device)())
    except RuntimeError as error:
        raise BenchError(f"the GPT does not run here: {named(error)}; make it smaller, as by --batch 1") from error


def _row(program: Program) -> Step:
    return Step((program.name,), vocabulary=program.vocabulary, dropout=program.dropout)


def _prepared(
    program: Program, sizes: Sizes, device: torch.device, expected: float
) -> tuple[Step, Callable[[], Tensor] | None]:
    row, started = _row(program), time.perf_counter()
    try:
        run = _step(program, sizes, device)
        with collecting() as reports:
            loss = float(run())
        synchronize(device)
        row = replace(row, loss=loss, first_call=time.perf_counter() - started)
        run()
    except Exception as error:
        return replace(row, problem=named(error)), None
    sites = [site for report in reports for site in report.sites]
    row = replace(row, fused=sum(site.fused for site in sites), sites=len(sites) or sizes.layers)
    tolerance = _TOLERANCE[2 if program.dropout else DTYPES[sizes.dtype].itemsize]
    if not abs(loss - expected) <= tolerance * abs(expected):
        return replace(row, problem=f"WRONG: the loss of the first step is {loss:.4f}, eager's {expected:.4f}"), None
    return row, run


def gpt(sizes: Sizes, program: Program) -> GPT:
    """The GPT that `program` trains, on the CPU."""
    shape = sizes.length, program.vocabulary, sizes.layers, sizes.heads, sizes.width, program.dropout
    return (SDPAGPT if program.by_hand else GPT)(GPTConfig(*shape, bias=False))


def _step(program: Program, sizes: Sizes, device: torch.device) -> Callable[[], Tensor]:
    """A training step from the same first weights on, on the same tokens; it gives the loss."""
    torch.manual_seed(0)
    model = gpt(sizes, program).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=draw).to(device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    run, dtype = program.way.compiled(model), DTYPES[sizes.dtype]

    def step() -> Tensor:
        cast = contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
        with cast:
            loss: Tensor = run(inputs, targets)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def main(arguments: Sequence[str]) -> int:
    """Run the command; gives the exit code. Raises BenchError, in one line."""
    args = _parser().parse_args(arguments)
    check_files(args)
    device = device_of(args.device)
    sizes = _sizes(args, device)
    found = measure(sizes, device, args.seconds, args.within)
    print(as_text(found, sizes, device))
    if args.json is not None:
        data = {"machine": machine(device), "sizes": vars(sizes), "load": found.load}
        write_json(args.json, {**data, "rows": [row.as_json() for row in found.rows]})
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
    parser.add_argument("--seconds", type=positive, default=_SECONDS, help=f"of timing, at most, a row ({_SECONDS:g})")
    parser.add_argument(
        "--within", type=positive, default=math.inf, metavar="SECONDS", help="of all, about; what is late is left out"
    )
    add_json(parser)
    return parser


def _sizes(args: argparse.Namespace, device: torch.device) -> Sizes:
    usual = Sizes() if device.type == "cuda" else _ON_CPU
    sizes = Sizes(**{name: getattr(args, name) or value for name, value in vars(usual).items()})
    if sizes.width % sizes.heads:
        raise BenchError(f"--width {sizes.width}: it is a multiple of --heads, which is {sizes.heads}")
    return sizes


def as_text(found: Table, sizes: Sizes, device: torch.device) -> str:
    """The table: time a step, tokens a second and memory, with ratios to eager and Inductor."""
    heads = ["median (quartiles)", f"/ {EAGER}", f"/ {INDUCTOR}", "tokens/s", "peak memory", "fused", "first call"]
    lines = []
    for row in found.rows:
        cells = of_rows.cells(row, found.rows)
        cells["tokens/s"] = f"{sizes.tokens / row.timing.median:,.0f}" if row.timing else "-"
        lines.append([row.name, f"{row.vocabulary}", *(cells[head] for head in heads)])
    notes = of_rows.notes_of(found.rows, found.load)
    if device.type == "cpu":
        notes.append("torch has no efficient kernel on the CPU")
    parts = [
        f"{title(sizes)}; {this_device(device)}, torch {torch.__version__}",
        table(["training step", "vocabulary", *heads], lines),
        f"{of_rows.rounds(found.rows)} rounds, the rows in turn. A step: forward, backward and AdamW. Peak memory: of "
        "tensors, above weights\nand optimizer. First call: with compiling, by torch's caches as they are.",
        "\n".join(f"note: {note}" for note in notes),
    ]
    return "\n\n".join(part for part in parts if part)


def title(sizes: Sizes) -> str:
    """The sizes in words."""
    return (
        f"GPT of {sizes.layers} layers, {sizes.heads} heads, width {sizes.width}; "
        f"batches of {sizes.batch} x {sizes.length} tokens; {sizes.dtype}"
    )
