"""Axes: the roles of index symbols in an attention."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from attn_fuse.expression.index import Space


@dataclass(frozen=True)
class Axes:
    """The index symbols of an attention by role, slowest first; an empty tuple means length 1.

    batch, kv_heads: shared by query, key and value; kernels treat both alike, reports tell them apart.
    groups: the query heads that share a head of key and value. query, key: the positions.
    inner: head_dim, which the scores sum over. value: value_dim.
    """

    batch: tuple[sympy.Symbol, ...]
    kv_heads: tuple[sympy.Symbol, ...]
    groups: tuple[sympy.Symbol, ...]
    query: tuple[sympy.Symbol, ...]
    key: tuple[sympy.Symbol, ...]
    inner: tuple[sympy.Symbol, ...]
    value: tuple[sympy.Symbol, ...]


def position(axes: tuple[sympy.Symbol, ...], space: Space) -> sympy.Expr:
    """The position along `axes` as one dimension; the last axis is fastest."""
    place = sympy.Integer(0)
    for axis in axes:
        place = place * space.sizes[axis] + axis
    return sympy.expand(place)
