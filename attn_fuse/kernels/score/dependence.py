"""Dependence: which positions the value of each node of a score program depends on, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_fuse.expression.nodes import Diagonal, Expr, Input, Position, Score, children, distinct
from attn_fuse.kernels.score.linear import linear

POSITIONS = ("b", "h", "i", "j")


def varying(shape: Sequence[int]) -> frozenset[str]:
    """The positions that an input of this shape, [B|1, H|1, Lq|1, Lk|1], differs with; of a whole table, no matter."""
    return frozenset(name for name, length in zip(POSITIONS, shape, strict=False) if length != 1)


def own_dependence(node: Expr, varies: Sequence[frozenset[str]]) -> frozenset[str]:
    """Which positions, and "score", `node` reads itself, its children's aside. varies: as for `dependences`."""
    match node:
        case Position(name):
            return frozenset({name})
        case Score():
            return frozenset({"score"})
        case Input(n):
            return varies[n]
        case Diagonal(n):
            return varies[n] | {"i", "j"}
    return frozenset()


def dependences(expr: Expr, varies: Sequence[frozenset[str]]) -> dict[int, frozenset[str]]:
    """Of each node below `expr`, by identity: which positions, and "score", its value depends on.

    varies: of each input, which positions it differs with.
    """
    found: dict[int, frozenset[str]] = {}
    for node in distinct(expr):
        found[id(node)] = own_dependence(node, varies).union(*(found[id(part)] for part in children(node)))
    return found


def planes(expr: Expr | None, shapes: Sequence[Sequence[int]], batch: Any, heads: Any) -> tuple[Any, Any]:
    """batch and heads, each 1 where the value of `expr` is the same along it. shapes: of the inputs."""
    names = frozenset[str]() if expr is None else dependences(expr, [*map(varying, shapes)])[id(expr)]
    return batch if "b" in names else 1, heads if "h" in names else 1


def of_difference(expr: Expr, varies: Sequence[frozenset[str]]) -> frozenset[int]:
    """The nodes below `expr`, by identity, whose value depends on the positions through j - i alone, or not at all.

    varies: as for `dependences`.
    """
    found: set[int] = set()
    for node in distinct(expr):
        form = linear(node)
        if form.is_whole:
            alone = form.slope("i") == -form.slope("j")
        elif isinstance(node, Input):
            alone = not varies[node.leaf] & {"i", "j"}
        else:
            alone = not isinstance(node, (Position, Score)) and all(id(part) in found for part in children(node))
        if alone:
            found.add(id(node))
    return frozenset(found)
