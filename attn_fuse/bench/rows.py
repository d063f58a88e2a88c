"""Rows: the time and memory of programs, and the cells of a table of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch

from attn_fuse.bench.flags import tell
from attn_fuse.bench.memory import peak_memory
from attn_fuse.bench.ways import EAGER, INDUCTOR
from attn_fuse.picker.timing import Timing, interleaved, seconds_in_words
from attn_fuse.report import bytes_in_words

ROUNDS, _SHORTEST = 30, 2e-3
# From this share of the cores on, the load of other programs is reported.
_BUSY = 0.1


@dataclass(frozen=True)
class Row:
    """One program. names: the ways to run the model that result in this program.

    sites, fused: the number of attentions, and of those on a fused kernel, the program's own fused calls included.
    by_kernel: the number on each kernel. first_call: seconds of the first call, with compiling.
    difference: the max from eager's outputs and gradients, over the max of the tensor.
    peak: bytes of a call above the bytes before it. problem: why there is no time.
    """

    names: tuple[str, ...]
    fused: int = 0
    sites: int = 0
    by_kernel: Mapping[str, int] = field(default_factory=dict)
    first_call: float | None = None
    difference: float | None = None
    timing: Timing | None = None
    peak: int | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """Its names, joined."""
        return " = ".join(self.names)

    def as_json(self) -> dict[str, Any]:
        """Everything as a plain dictionary; an infinite difference is None, since JSON has no infinity."""
        difference = None if self.difference == math.inf else self.difference
        return {**asdict(self), "name": self.name, "difference": difference}


_Row = TypeVar("_Row", bound=Row)


def named(rows: Sequence[_Row], way: str) -> _Row | None:
    """The row of the way of this name."""
    return next((row for row in rows if way in row.names), None)


def measured(
    rows: Sequence[_Row],
    runs: Mapping[str, Callable[[], Any]],
    device: torch.device,
    seconds: float,
    before: Callable[[], None] = lambda: None,
) -> list[_Row]:
    """`rows` with the time and the peak memory of those that have a call in `runs`, by name.

    seconds: of timing all rows, max. before: called before the memory of each is measured.
    """
    tell(f"timing {len(runs)} programs in turn, for {seconds:.0f} s at most")
    timings = interleaved(runs, device, ROUNDS, seconds, _SHORTEST, whole_programs=True)
    found = []
    for row in rows:
        if row.name in runs:
            tell(f"memory of {row.name}")
            before()
            row = replace(row, timing=timings[row.name], peak=peak_memory(runs[row.name], device))
        found.append(row)
    return found


def over(row: Row, rows: Sequence[Row], base: str) -> float | None:
    """The time of `row` over that of the way `base`; None if one of them has none."""
    other = named(rows, base)
    if row.timing is None or other is None or other.timing is None:
        return None
    return row.timing.median / other.timing.median


def cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """The cells of `row` in a table, by the head of the column; "-" for missing figures."""
    ratios = {f"/ {base}": over(row, rows, base) for base in (EAGER, INDUCTOR)}
    return {
        "median (quartiles)": str(row.timing or "-"),
        **{head: "-" if ratio is None else f"{ratio:.2f}" for head, ratio in ratios.items()},
        "peak memory": "-" if row.peak is None else bytes_in_words(row.peak),
        "fused": f"{row.fused} of {row.sites}" if row.sites else "-",
        "max difference": "-" if row.difference is None else f"{row.difference:.1e}",
        "first call": "-" if row.first_call is None else seconds_in_words(row.first_call),
    }


def notes_of(rows: Sequence[Row], load: float) -> list[str]:
    """Why rows have no time, and the other load. load: the share of the cores that other programs took."""
    notes = [f"{row.name}: {row.problem}" for row in rows if row.problem]
    if load > _BUSY:
        notes.append(f"other programs took {load:.0%} of the cores meanwhile; measure on a quiet machine")
    return notes


def rounds(rows: Sequence[Row]) -> int:
    """The number of rounds that were measured."""
    return next((row.timing.runs for row in rows if row.timing), 0)
