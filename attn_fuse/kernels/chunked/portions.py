"""Portions: what each worker computes of a call of chunked attention."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

# Each slice of the queries needs memory for gradients of all keys and values.
MOST_SLICES = 8


@dataclass(frozen=True)
class Portion:
    """The work of one worker: every `slices`-th block of queries from number `slice` on, in some planes.

    Under a causal mask, later queries take longer, so each slice has early and late ones.
    planes: (start, stop) among the key heads of all batch entries, entry by entry. group: the number of this range.
    """

    planes: tuple[int, int]
    group: int = 0
    slice: int = 0
    slices: int = 1


def portions(planes: int, query_blocks: int, workers: int) -> list[Portion]:
    """At most one portion for each worker, with the smallest possible max, in the fewest slices that allow it."""
    layouts = [
        (math.ceil(planes / groups) * math.ceil(query_blocks / slices), slices, groups)
        for groups in range(1, max(1, min(workers, planes)) + 1)
        for slices in range(1, max(1, min(workers // groups, query_blocks, MOST_SLICES)) + 1)
    ]
    _, slices, groups = min(layouts)
    edges = [planes * n // groups for n in range(groups + 1)]
    return [
        Portion(span, group, n, slices) for group, span in enumerate(itertools.pairwise(edges)) for n in range(slices)
    ]
