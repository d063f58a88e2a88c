"""What the machine code of a kernel says of its speed: the loops that hold its matrix products.

A multiprocessor issues four instructions of a warp in a clock, and multiplies and adds 2,048 times in one on Hopper,
1,024 times on Ampere, in 16 bits dense. A loop whose instructions take longer than its products is bound by issue,
whatever its memory does.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass

from attn_fuse.kernels.triton.assembled import instructions

_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16|HMMA\.16816")
_WAIT = re.compile(r"DEPBAR\.LE SB0, 0x([0-9a-f]+)")
_BARRIER = re.compile(r"BAR\.SYNC\S* 0x[0-9a-f]+(?:, 0x([0-9a-f]+))?")


@dataclass(frozen=True)
class Loop:
    """An innermost loop. instructions: of each warp, a turn. products: clocks of the tensor cores a turn, by warp
    group, in issue slots of a warp: so both are of one unit. counts: by the first part of their names. in_flight: how
    many groups of copies may still be under way at any time that the loop waits for some; 0 where it copies none.
    meeting: the most threads that a barrier has wait for each other; 0 without a barrier, -1 for all of the program."""

    instructions: int
    products: float
    counts: collections.Counter[str]
    in_flight: int
    meeting: int

    @property
    def bound_by_issue(self) -> float:
        """Above 1 the tensor cores wait for instructions."""
        return self.instructions / self.products


def loops(sass: str) -> list[Loop]:
    """The innermost loops with products, the shortest first: that over whole blocks."""
    lines = instructions(sass)
    at = {address: n for n, (address, _) in enumerate(lines)}
    spans = []
    for n, (address, text) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", text) if text.startswith("BRA") else None
        if target and int(target[1], 16) < address and int(target[1], 16) in at:
            spans.append((at[int(target[1], 16)], n))
    inner = [x for x in spans if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in spans)]
    found = []
    for first, last in inner:
        texts = [text for _, text in lines[first : last + 1]]
        names = [text.split()[0] for text in texts]
        # 64 rows of one warp group times N columns, 16 deep, take N / 2 of the slots in which its warps issue; 16 rows
        # of one warp times 8 columns on Ampere, half as fast, take 8.
        products = sum(int(product[1] or 16) for product in map(_PRODUCT.match, names) if product) / 2
        if products:
            counts = collections.Counter(name.partition(".")[0] for name in names)
            waits = [int(wait[1], 16) for wait in map(_WAIT.match, texts) if wait]
            in_flight = min(waits, default=0)
            found.append(Loop(len(names), products, counts, in_flight, _meeting(texts)))
    return sorted(found, key=lambda loop: loop.instructions)


def _meeting(texts: list[str]) -> int:
    threads = [int(found[1] or "0", 16) for found in map(_BARRIER.match, texts) if found]
    return -1 if 0 in threads else max(threads, default=0)
