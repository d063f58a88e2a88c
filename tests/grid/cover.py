"""Covering: few rows in which every few values of different axes meet (Cohen et al., The AETG System, 1997)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

Axes = Mapping[str, Sequence[str]]
Row = dict[str, str]
_Values = frozenset[tuple[str, str]]


def alone(axes: Axes, base: Row) -> list[Row]:
    """`base`, and for each value of each axis `base` with that value and nothing else changed."""
    return [dict(base), *(base | {axis: v} for axis, values in axes.items() for v in values if base[axis] != v)]


def covering(axes: Axes, strength: int = 2) -> list[Row]:
    """Rows in which any values of `strength` axes are together once. Always the same for the same axes."""
    missing: dict[_Values, None] = {
        frozenset(zip(names, values, strict=True)): None
        for names in itertools.combinations(axes, strength)
        for values in itertools.product(*(axes[name] for name in names))
    }
    rows: list[Row] = []
    while missing:
        row: Row = dict(sorted(next(iter(missing))))
        # The longest axes first: they have the most to place.
        for axis in sorted(axes.keys() - row.keys(), key=lambda a: (-len(axes[a]), a)):
            # Where several values place as much, they take turns.
            turn = len(rows) % len(axes[axis])
            candidates = [*axes[axis][turn:], *axes[axis][:turn]]
            known = list(itertools.combinations(row.items(), strength - 1))
            row[axis] = max(candidates, key=lambda v: sum(frozenset([*k, (axis, v)]) in missing for k in known))
        for together in itertools.combinations(row.items(), strength):
            missing.pop(frozenset(together), None)
        rows.append({axis: row[axis] for axis in axes})
    return rows


def distinct(rows: Iterable[Row]) -> Iterator[Row]:
    return iter({tuple(row.items()): row for row in rows}.values())
