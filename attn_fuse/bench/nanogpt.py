"""nanoGPT: the training step of a GPT with hand-written attention, on each of SDPA's kernels in turn.

The rows are those of the write-ups on making nanoGPT's training fast: eager, torch.compile, SDPA's formula, efficient
and flash kernels, and flash beside a vocabulary that is padded to a multiple of 64. The model's code is the same in all
of them: attn_fuse puts its attention on the kernel. gpt.py is a link to examples/nanogpt/model.py, and a copy of it in
an installed package.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attn_fuse.bench.gpt import GPT, GPTConfig
from attn_fuse.bench.memory import peak_memory
from attn_fuse.bench.progress import Progress
from attn_fuse.bench.ways import EAGER, INDUCTOR, PICKED, Way, sdpa_kernels
from attn_fuse.errors import BenchError, named
from attn_fuse.picker.case import DTYPES
from attn_fuse.picker.timing import OtherLoad, Timing, interleaved, synchronize
from attn_fuse.report import collecting

MULTIPLE = 64
_ROUNDS = 30
# How far the loss of a first step may be from eager's, by the bytes of the dtype.
_TOLERANCE = {4: 1e-3, 2: 2e-2}


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
class Step:
    """One row: a training step, forward, backward and AdamW. vocabulary: its size.

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

    def as_json(self) -> dict[str, Any]:
        """Everything as a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Table:
    """The rows, and the share of the cores that other programs took while they were measured."""

    rows: tuple[Step, ...]
    load: float


def ways_of(device: torch.device, sizes: Sizes) -> list[tuple[Way, int]]:
    """The rows, as ways to run the model and the sizes of their vocabulary."""
    calls = sdpa_kernels(device)
    ways = [(Way(EAGER), sizes.vocabulary), (Way(INDUCTOR), sizes.vocabulary)]
    math_way = Way("attn_fuse, SDPA math", {"pick": "fused", "kernels": [*calls.values()]}, SDPBackend.MATH)
    ways.append((math_way, sizes.vocabulary))
    for backend, words in ((SDPBackend.EFFICIENT_ATTENTION, "efficient"), (SDPBackend.FLASH_ATTENTION, "flash")):
        if backend in calls:
            ways.append((_forced(f"attn_fuse, SDPA {words}", calls[backend]), sizes.vocabulary))
    ways.append((Way(f"{PICKED}, its own choice", {}), sizes.vocabulary))
    flash = _forced("attn_fuse, SDPA flash + padded vocabulary", calls[SDPBackend.FLASH_ATTENTION])
    return [*ways, (flash, sizes.padded)]


def _forced(name: str, kernel: str) -> Way:
    return Way(name, {"pick": "fused", "kernels": [kernel]})


def measure(sizes: Sizes, device: torch.device, seconds: float, progress: Progress) -> Table:
    """Measure all rows, in turn. seconds: of timing, max, for each row.

    Raises BenchError where the GPT does not run eager, as where memory is short.
    """
    load = OtherLoad()
    expected: dict[int, float] = {}
    rows: list[Step] = []
    runs: dict[str, Callable[[], Tensor]] = {}
    try:
        for way, vocabulary in ways_of(device, sizes):
            progress.step(f"compiling {way.name}" if way.name != EAGER else "running eager")
            if vocabulary not in expected:
                expected[vocabulary] = _first_loss(sizes, vocabulary, device)
            row, run = _prepared(way, vocabulary, sizes, device, expected[vocabulary])
            rows.append(row)
            runs |= {} if run is None else {row.name: run}
            progress.advance()
        progress.step(f"timing {len(runs)} programs in turn")
        timings = interleaved(runs, device, _ROUNDS, seconds * len(runs), 0.0, progress.within(len(runs)), True)
        progress.step("measuring memory")
        peaks = {name: peak_memory(run, device) for name, run in runs.items()}
        rows = [replace(row, timing=timings.get(row.name), peak=peaks.get(row.name)) for row in rows]
    finally:
        torch.compiler.reset()
    return Table(tuple(rows), load.share())


def steps_of(device: torch.device, sizes: Sizes) -> int:
    """About how many steps of a Progress `measure` takes."""
    return 2 * len(ways_of(device, sizes))


def _first_loss(sizes: Sizes, vocabulary: int, device: torch.device) -> float:
    try:
        return float(_step(Way(EAGER), vocabulary, sizes, device)())
    except RuntimeError as error:
        raise BenchError(f"the GPT does not run here: {named(error)}; make it smaller, as by --batch 1") from error


def _prepared(
    way: Way, vocabulary: int, sizes: Sizes, device: torch.device, expected: float
) -> tuple[Step, Callable[[], Tensor] | None]:
    row, started = Step(way.name, vocabulary), time.perf_counter()
    try:
        run = _step(way, vocabulary, sizes, device)
        with collecting() as reports:
            loss = float(run())
        synchronize(device)
        row = replace(row, loss=loss, first_call=time.perf_counter() - started)
        run()
    except Exception as error:
        return replace(row, problem=named(error)), None
    sites = [site for report in reports for site in report.sites]
    row = replace(row, fused=sum(site.fused for site in sites), sites=len(sites) or sizes.layers)
    tolerance = _TOLERANCE[DTYPES[sizes.dtype].itemsize]
    if not abs(loss - expected) <= tolerance * abs(expected):
        return replace(row, problem=f"WRONG: the loss of the first step is {loss:.4f}, eager's {expected:.4f}"), None
    return row, run


def _step(way: Way, vocabulary: int, sizes: Sizes, device: torch.device) -> Callable[[], Tensor]:
    """A training step from the same first weights on, on the same tokens; it gives the loss."""
    torch.manual_seed(0)
    config = GPTConfig(sizes.length, vocabulary, sizes.layers, sizes.heads, sizes.width, bias=False)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=draw).to(device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    run, dtype = way.compiled(model), DTYPES[sizes.dtype]

    def step() -> Tensor:
        cast = contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
        with cast:
            loss: Tensor = run(inputs, targets)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def as_csv(rows: Sequence[Step], sizes: Sizes) -> list[dict[str, Any]]:
    """A dictionary for each row; "" for what is lacking."""
    return [
        {
            "program": row.name,
            "vocabulary": row.vocabulary,
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
