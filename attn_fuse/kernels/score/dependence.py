"""Dependence: the positions that each node of a score program depends on, and whether through j - i alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_fuse.expression.nodes import Diagonal, Expr, Input, Position, Score, children, distinct
from attn_fuse.kernels.score.linear import linear

POSITIONS = ("b", "h", "i", "j")


def varying(shape: Sequence[int]) -> frozenset[str]:
    """The positions that an input of `shape` [B|1, H|1, Lq|1, Lk|1] varies along; meaningless for a table."""
    return frozenset(name for name, length in zip(POSITIONS, shape, strict=False) if length != 1)


def own_dependence(node: Expr, varies: Sequence[frozenset[str]]) -> frozenset[str]:
    """The positions, and "score", that `node` reads without its children. varies: as for `dependences`."""
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
    """For each node of `expr`, by identity: the positions, and "score", that its value depends on.

    varies: for each input, the positions that it varies along.
    """
    found: dict[int, frozenset[str]] = {}
    for node in distinct(expr):
        found[id(node)] = own_dependence(node, varies).union(*(found[id(part)] for part in children(node)))
    return found


def planes(expr: Expr | None, shapes: Sequence[Sequence[int]], batch: Any, heads: Any) -> tuple[Any, Any]:
    """`batch` and `heads`, but 1 for one along which the value of `expr` is the same. shapes: of the inputs."""
    names = frozenset[str]() if expr is None else dependences(expr, [*map(varying, shapes)])[id(expr)]
    return batch if "b" in names else 1, heads if "h" in names else 1


def of_difference(expr: Expr, varies: Sequence[frozenset[str]]) -> frozenset[int]:
    """The nodes of `expr`, by identity, whose value depends on i and j through j - i alone, or on neither.

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
