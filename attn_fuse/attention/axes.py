"""Axes: the roles that index symbols have in an attention."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from attn_fuse.expression.index import Space


@dataclass(frozen=True)
class Axes:
    """The index symbols of an attention by role, slowest first, with their ranges in `Attention.space`.

    batch, kv_heads: shared by query, key and value (a kernel treats both alike; reports tell them apart).
    groups: the query heads that share a head of key and value. query, key: the positions.
    inner: the symbols that the scores sum over, of head_dim. value: those of value_dim.
    An empty tuple stands for a length of 1.
    """

    batch: tuple[sympy.Symbol, ...]
    kv_heads: tuple[sympy.Symbol, ...]
    groups: tuple[sympy.Symbol, ...]
    query: tuple[sympy.Symbol, ...]
    key: tuple[sympy.Symbol, ...]
    inner: tuple[sympy.Symbol, ...]
    value: tuple[sympy.Symbol, ...]


def position(axes: tuple[sympy.Symbol, ...], space: Space) -> sympy.Expr:
    """The position along `axes` as one dimension, the last axis fastest."""
    place = sympy.Integer(0)
    for axis in axes:
        place = place * space.sizes[axis] + axis
    return sympy.expand(place)
