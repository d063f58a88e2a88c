"""Masks as structure: what a Boolean element expression over positions is a conjunction of, and whom it leaves a key.

Causal, window, prefix, key padding and documents are read off index expressions; anything else is carried as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import sympy
import torch

from attn_fuse.attention.attention import Axes, Causal, DenseMask, Documents, KeyPadding, MaskPart, Prefix, Window
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Const, Expr
from attn_fuse.torch_internals import FloorDiv, Mod


def mask_parts(keeps: Iterable[Expr], axes: Axes, space: Space) -> tuple[MaskPart, ...]:
    """The parts of the conjunction of `keeps`, each once; those that always hold are left out."""
    found: list[MaskPart] = []
    for keep in keeps:
        for condition in conjuncts(keep):
            part = _part(condition, axes, space)
            if condition != ex.TRUE and part not in found:
                found.append(part)
    return tuple(found)


def conjuncts(keep: Expr) -> Iterator[Expr]:
    match keep:
        case ex.And(a, b):
            yield from conjuncts(a)
            yield from conjuncts(b)
        case ex.Select(cond, a, Const(False)):
            yield from conjuncts(cond)
            yield from conjuncts(a)
        case ex.Select(cond, Const(False), b):
            yield from conjuncts(al.logical_not(cond))
            yield from conjuncts(b)
        case ex.Not(ex.Or(a, b)):
            yield from conjuncts(al.logical_not(a))
            yield from conjuncts(al.logical_not(b))
        case _:
            yield keep


def position(axes: tuple[sympy.Symbol, ...], space: Space) -> sympy.Expr:
    """The place along `axes` together, the last the fastest."""
    place = sympy.Integer(0)
    for axis in axes:
        place = place * space.sizes[axis] + axis
    return sympy.expand(place)


def _part(keep: Expr, axes: Axes, space: Space) -> MaskPart:
    causal = _causal(keep, axes, space)
    if causal is not None:
        return causal
    match keep:
        case ex.NonNegative(value) if axes.query:
            reach = sympy.expand(value + position(axes.query, space) - position(axes.key, space))
            if _is_number(reach, axes):
                return Window(reach, keep)
        case ex.Or(a, b):
            for one, other in ((a, b), (b, a)):
                triangle = _causal(one, axes, space)
                if triangle is not None and not ex.index_symbols(other) & {*axes.query, *axes.groups}:
                    return Prefix(triangle.offset, keep)
        case ex.Compare("eq", ex.Load(a, at), ex.Load(b, to)) if a == b and axes.query:
            by_key = dict(zip(axes.query, axes.key, strict=False))
            if len(axes.query) == len(axes.key) and at != to and _renamed(at, by_key) == _renamed(to, by_key):
                return Documents(keep)
    used = ex.index_symbols(keep)
    if used & set(axes.key) and not used & {*axes.query, *axes.kv_heads, *axes.groups}:
        return KeyPadding(keep)
    return DenseMask(keep)


def _renamed(index: tuple[sympy.Expr, ...], by: Mapping[sympy.Symbol, sympy.Expr]) -> tuple[sympy.Expr, ...]:
    return tuple(sympy.expand(i.subs(by)) for i in index)


def _causal(keep: Expr, axes: Axes, space: Space) -> Causal | None:
    if not isinstance(keep, ex.NonNegative) or not axes.query:
        return None
    offset = sympy.expand(keep.value - position(axes.query, space) + position(axes.key, space))
    return Causal(offset, keep) if _is_number(offset, axes) else None


def _is_number(value: sympy.Expr, axes: Axes) -> bool:
    """Whether `value` is the same for all elements: a number, or an expression of sizes."""
    known = {*axes.batch, *axes.kv_heads, *axes.groups, *axes.query, *axes.key}
    return not value.free_symbols & known and not value.has(FloorDiv, Mod)


def every_query_sees_a_key(
    parts: Iterable[MaskPart], axes: Axes, space: Space, leaf_dtypes: Mapping[int, torch.dtype]
) -> bool:
    """Whether a key is named that each query sees: the first, or the one that stands where the query does."""
    parts = tuple(parts)
    if not parts:
        return True
    return any(
        all(_holds(al.substitute(part.keep, witness, space), leaf_dtypes) for part in parts)
        for witness in _witnesses(parts, axes, space)
    )


def _witnesses(parts: tuple[MaskPart, ...], axes: Axes, space: Space) -> Iterator[dict[sympy.Symbol, sympy.Expr]]:
    yield dict.fromkeys(axes.key, sympy.Integer(0))
    if len(axes.query) != len(axes.key):
        return
    if all(space.is_nonnegative(space.sizes[k] - space.sizes[q]) for q, k in zip(axes.query, axes.key, strict=True)):
        yield dict(zip(axes.key, axes.query, strict=True))
    if len(axes.key) == 1:
        (query,), (key,) = axes.query, axes.key
        for part in parts:
            offset = part.offset if isinstance(part, (Causal, Prefix)) else None
            last = space.sizes[key] - space.sizes[query]
            if offset is not None and space.is_nonnegative(offset) and space.is_nonnegative(last - offset):
                yield {key: query + offset}


def _holds(keep: Expr, leaf_dtypes: Mapping[int, torch.dtype]) -> bool:
    match keep:
        case Const(value):
            return bool(value)
        case ex.And(a, b):
            return _holds(a, leaf_dtypes) and _holds(b, leaf_dtypes)
        case ex.Or(a, b):
            return _holds(a, leaf_dtypes) or _holds(b, leaf_dtypes)
        case ex.Select(_, a, b):
            return _holds(a, leaf_dtypes) and _holds(b, leaf_dtypes)
        case ex.Compare("eq" | "le" | "ge", a, b):
            # A number that is not equal to itself exists among the floating-point ones only.
            loads = [part for part in ex.walk(a) if isinstance(part, (ex.Load, ex.Gather))]
            return a == b and bool(loads) and not any(leaf_dtypes[x.leaf].is_floating_point for x in loads)
    return False
