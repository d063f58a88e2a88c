"""Axes: the roles that index symbols have in an attention."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from attn_fuse.expression.index import Space


@dataclass(frozen=True)
class Axes:
    """The index symbols of an attention, each with a range in `Attention.space`; of several, the slowest first.

    batch, kv_heads: in query, key and value alike (a kernel does the same for both; reports tell them apart).
    groups: query heads that share a key and value. query, key: positions. inner: what the scores sum over, the
    head_dim. value: the value_dim. An empty tuple stands for a length of 1.
    """

    batch: tuple[sympy.Symbol, ...]
    kv_heads: tuple[sympy.Symbol, ...]
    groups: tuple[sympy.Symbol, ...]
    query: tuple[sympy.Symbol, ...]
    key: tuple[sympy.Symbol, ...]
    inner: tuple[sympy.Symbol, ...]
    value: tuple[sympy.Symbol, ...]


def position(axes: tuple[sympy.Symbol, ...], space: Space) -> sympy.Expr:
    """The place along `axes` together, the last the fastest."""
    place = sympy.Integer(0)
    for axis in axes:
        place = place * space.sizes[axis] + axis
    return sympy.expand(place)
