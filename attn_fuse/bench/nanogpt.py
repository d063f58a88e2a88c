"""nanoGPT: the training step of a GPT with hand-written attention, on each of SDPA's kernels in turn.

The rows are those of the write-ups on making nanoGPT's training fast: eager, torch.compile, SDPA's formula, efficient
and flash kernels, and flash beside a vocabulary that is padded to a multiple of 64; then with dropout. The model's code
is the same in all of them, since attn_fuse puts its attention on the kernel, but for one that is edited by hand. gpt.py
is a link to examples/nanogpt/model.py, and a copy of it in an installed package.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from attn_fuse.bench.gpt import GPT, Block, CausalSelfAttention, GPTConfig
from attn_fuse.bench.memory import peak_memory
from attn_fuse.bench.progress import Progress
from attn_fuse.bench.ways import EAGER, INDUCTOR, PICKED, Way, sdpa_kernels
from attn_fuse.errors import BenchError, named
from attn_fuse.picker.case import DTYPES
from attn_fuse.picker.timing import OtherLoad, Timing, interleaved, synchronize
from attn_fuse.report import collecting

MULTIPLE = 64
_ROUNDS = 30
# How far the loss of a first step may be from eager's, by the bytes of the dtype; with dropout, of which each program
# draws its own, as far as in 16 bits.
_TOLERANCE = {4: 1e-3, 2: 2e-2}
_DROPOUT = 0.1
_NO_TIME = "no time was left"


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


@dataclass(frozen=True)
class Step:
    """One row: a training step, forward, backward and AdamW. vocabulary: its size. dropout: its probability.

    fused, sites: how many attentions are on a fused kernel, of how many. loss: of the first step. peak: bytes above
    weights and the optimizer's state. problem: why there is no time.
    """

    name: str
    vocabulary: int
    fused: int = 0
    sites: int = 0
    loss: float | None = None
    first_call: float | None = None
    timing: Timing | None = None
    peak: int | None = None
    problem: str = ""
    dropout: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything as a plain dictionary."""
        return asdict(self)


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


def measure(sizes: Sizes, device: torch.device, seconds: float, progress: Progress, within: float = math.inf) -> Table:
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
                rows.append(Step(program.name, program.vocabulary, problem=_NO_TIME, dropout=program.dropout))
                continue
            progress.step(f"compiling {program.name}" if program.name != EAGER else "running eager")
            eager = program.vocabulary, program.dropout
            if eager not in expected:
                expected[eager] = _first_loss(sizes, Program(Way(EAGER), *eager), device)
            row, run = _prepared(program, sizes, device, expected[eager])
            rows.append(row)
            runs |= {} if run is None else {row.name: run}
            progress.advance()
        progress.step(f"timing {len(runs)} programs in turn")
        left = max(1.0, min(seconds * len(runs), end - time.perf_counter()))
        timings = interleaved(runs, device, _ROUNDS, left, done=progress.within(len(runs)), whole_programs=True)
        progress.step("measuring memory")
        peaks = {name: peak_memory(run, device) for name, run in runs.items()}
        rows = [replace(row, timing=timings.get(row.name), peak=peaks.get(row.name)) for row in rows]
    finally:
        torch.compiler.reset()
    return Table(tuple(rows), load.share())


def steps_of(device: torch.device, sizes: Sizes) -> int:
    """About how many steps of a Progress `measure` takes."""
    return 2 * len(programs_of(device, sizes))


def first_step(name: str, sizes: Sizes, device: torch.device) -> float:
    """The loss of the first step of the row `name`, whose compiled program torch's caches then have."""
    (program,) = (program for program in programs_of(device, sizes) if program.name == name)
    return float(_step(program, sizes, device)())


def _first_loss(sizes: Sizes, eager: Program, device: torch.device) -> float:
    try:
        return float(_step(eager, sizes, device)())
    except RuntimeError as error:
        raise BenchError(f"the GPT does not run here: {named(error)}; make it smaller, as by --batch 1") from error


def _prepared(
    program: Program, sizes: Sizes, device: torch.device, expected: float
) -> tuple[Step, Callable[[], Tensor] | None]:
    row, started = Step(program.name, program.vocabulary, dropout=program.dropout), time.perf_counter()
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


def _step(program: Program, sizes: Sizes, device: torch.device) -> Callable[[], Tensor]:
    """A training step from the same first weights on, on the same tokens; it gives the loss."""
    torch.manual_seed(0)
    config = GPTConfig(
        sizes.length, program.vocabulary, sizes.layers, sizes.heads, sizes.width, program.dropout, bias=False
    )
    model = (_ByHandGPT if program.by_hand else GPT)(config).to(device)
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


class _ByHandAttention(CausalSelfAttention):
    """What attn_fuse saves its users: the same attention, edited to a call of SDPA."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.p = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0)
        out: Tensor = self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))
        return out


class _ByHandBlock(Block):
    attention = _ByHandAttention


class _ByHandGPT(GPT):
    block = _ByHandBlock


def as_csv(rows: Sequence[Step], sizes: Sizes) -> list[dict[str, Any]]:
    """A dictionary for each row; "" for what is lacking."""
    return [
        {
            "program": row.name,
            "vocabulary": row.vocabulary,
            "dropout": row.dropout,
            "fused": row.fused,
            "sites": row.sites,
            "seconds": row.timing.median if row.timing else "",
            "lower_quartile": row.timing.lower if row.timing else "",
            "upper_quartile": row.timing.upper if row.timing else "",
            "tokens_per_second": sizes.tokens / row.timing.median if row.timing else "",
            "peak_bytes": "" if row.peak is None else row.peak,
            "first_call_seconds": "" if row.first_call is None else row.first_call,
            "first_loss": "" if row.loss is None else row.loss,
            "problem": row.problem,
        }
        for row in rows
    ]
