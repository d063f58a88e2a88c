"""Dependence: the positions that each node of a score program depends on, and whether only through j - i."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_fuse.expression.nodes import Diagonal, Expr, Input, Position, Score, children, distinct
from attn_fuse.kernels.score.linear import linear

POSITIONS = ("b", "h", "i", "j")


def varying(shape: Sequence[int]) -> frozenset[str]:
    """The positions along which an input of `shape` [B|1, H|1, Lq|1, Lk|1] varies; meaningless for a table."""
    return frozenset(name for name, length in zip(POSITIONS, shape, strict=False) if length != 1)


def dependences(expr: Expr, varies: Sequence[frozenset[str]]) -> dict[int, frozenset[str]]:
    """The positions, and "score", that each node of `expr` depends on, by the node's identity.

    varies: the positions along which each input varies.
    """
    found: dict[int, frozenset[str]] = {}
    for node in distinct(expr):
        own = frozenset[str]()
        match node:
            case Position(name):
                own = frozenset({name})
            case Score():
                own = frozenset({"score"})
            case Input(n):
                own = varies[n]
            case Diagonal(n):
                own = varies[n] | {"i", "j"}
        found[id(node)] = own.union(*(found[id(part)] for part in children(node)))
    return found


def planes(expr: Expr | None, shapes: Sequence[Sequence[int]], batch: Any, heads: Any) -> tuple[Any, Any]:
    """`batch` and `heads`, or 1 where `expr` does not depend on them. shapes: those of the inputs."""
    names = frozenset[str]() if expr is None else dependences(expr, [*map(varying, shapes)])[id(expr)]
    return batch if "b" in names else 1, heads if "h" in names else 1


def of_difference(expr: Expr, varies: Sequence[frozenset[str]]) -> frozenset[int]:
    """The nodes of `expr`, by identity, that depend on i and j only through j - i, or on neither.

    varies: as for `dependences`.
    """
    found: set[int] = set()
    i, j = linear(Position("i")), linear(Position("j"))
    for node in distinct(expr):
        form = linear(node)
        if form.is_integer:
            alone = form.coeff(i) == -form.coeff(j)
        elif isinstance(node, Input):
            alone = not varies[node.leaf] & {"i", "j"}
        else:
            alone = not isinstance(node, (Position, Score)) and all(id(part) in found for part in children(node))
        if alone:
            found.add(id(node))
    return frozenset(found)
