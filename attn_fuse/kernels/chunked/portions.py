"""Portions: what each worker computes of a call of chunked attention, and the gradients that it sums up."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Each slice of the queries sums up gradients of all keys and values, in memory of its own.
MOST_SLICES = 8


@dataclass(frozen=True)
class Portion:
    """What one worker goes through: every `slices`-th block of queries from `slice` on, of some planes.

    planes: (start, stop) among the key heads of all batch entries, batch entry after batch entry. group: their number
    among the groups of planes. With a causal mask, later queries take longer: a slice has some of all.
    """

    planes: tuple[int, int]
    group: int = 0
    slice: int = 0
    slices: int = 1


def portions(planes: int, query_blocks: int, workers: int) -> list[Portion]:
    """At most one portion for each worker, so that the largest is as small as can be; the fewest slices for that."""
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


class Sums:
    """The gradient of one input, summed up by several workers: where they would add to one place, each has its own sum.

    total: zeros, and the whole sum once `added_up`. planes_apart, queries_apart: whether workers of other planes, or of
    other queries, add to other places.
    """

    def __init__(self, total: Tensor, planes_apart: bool, queries_apart: bool) -> None:
        self.total, self._planes_apart, self._queries_apart = total, planes_apart, queries_apart
        self._own: dict[tuple[int, int], Tensor] = {}

    def of(self, portion: Portion) -> Tensor:
        """What the worker of `portion` adds to."""
        key = (0 if self._planes_apart else portion.group, 0 if self._queries_apart else portion.slice)
        if key not in self._own:
            self._own[key] = torch.zeros_like(self.total) if self._own else self.total
        return self._own[key]

    def added_up(self) -> Tensor:
        """The sum over all portions, in the order in which `of` was asked for them."""
        for own in list(self._own.values())[1:]:
            self.total.add_(own)
        return self.total
