"""The speed of a kernel according to its machine code: the loops with its matrix products.

In one clock a multiprocessor issues four warp instructions, and performs 2,048 dense 16-bit multiply-adds on Hopper or
1,024 on Ampere. A loop whose instructions take longer than its products is bound by issue, whatever its memory does.
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
    """An innermost loop.

    instructions: per iteration and warp. products: the time of the tensor cores per iteration and warp group, in issue
        slots of a warp, so that both have the same unit.
    counts: of instructions, by the first part of their names.
    in_flight: the min number of groups of copies still under way when the loop waits; 0 if it copies nothing.
    meeting: the max number of threads that wait for each other at a barrier; 0 without barriers, -1 for all threads.
    """

    instructions: int
    products: float
    counts: collections.Counter[str]
    in_flight: int
    meeting: int

    @property
    def bound_by_issue(self) -> float:
        """Instructions over products. Above 1 the tensor cores wait for instructions."""
        return self.instructions / self.products


def loops(sass: str) -> list[Loop]:
    """The innermost loops with products. The first one is the shortest, over whole blocks."""
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
        # A product of 64 rows and N columns, 16 deep, takes N / 2 issue slots of the warp group. On Ampere, which is
        # half as fast, a warp's product of 16 rows and 8 columns takes 8.
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
