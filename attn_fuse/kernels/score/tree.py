"""Trees: the nodes of a score program, and what the value of each depends on.

A node is a tuple whose first entry names it (score_program.py lists them). Equal parts of a tree are one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Tree = tuple[Any, ...]

POSITIONS = ("b", "h", "i", "j")


def nodes(tree: Tree | None, ends: Callable[[Tree], bool] = lambda node: False) -> Iterator[Tree]:
    """Every distinct node of a tree, children first; of those that `ends` holds for no children."""
    seen: set[int] = set()

    def walk(node: Tree) -> Iterator[Tree]:
        if id(node) not in seen:
            seen.add(id(node))
            for child in () if ends(node) else children(node):
                yield from walk(child)
            yield node

    if tree is not None:
        yield from walk(tree)


def children(node: Tree) -> Iterator[Tree]:
    return (part for part in node[1:] if isinstance(part, tuple))


def varying(shape: Sequence[int]) -> frozenset[str]:
    """The positions that an input of this shape, [B|1, H|1, Lq|1, Lk|1], differs with; of a whole table, no matter."""
    return frozenset(name for name, length in zip(POSITIONS, shape, strict=False) if length != 1)


def dependences(tree: Tree, varies: Sequence[frozenset[str]]) -> dict[int, frozenset[str]]:
    """Of each node below `tree`, by identity: which positions, and "score", its value depends on.

    varies: of each input, which positions it differs with.
    """
    found: dict[int, frozenset[str]] = {}
    for node in nodes(tree):
        own = frozenset({node[0]} & {*POSITIONS, "score"})
        if node[0] in ("input", "diagonal"):
            own = varies[node[1]] | ({"i", "j"} if node[0] == "diagonal" else set())
        found[id(node)] = own.union(*(found[id(part)] for part in children(node)))
    return found


def of_difference(tree: Tree, varies: Sequence[frozenset[str]]) -> frozenset[int]:
    """The nodes below `tree`, by identity, whose value depends on the positions through j - i alone, or not at all.

    varies: as for `dependence`.
    """
    slopes: dict[int, tuple[int, int] | None] = {}
    found: set[int] = set()
    for node in nodes(tree):
        slopes[id(node)] = slope = _slope(node, [slopes[id(part)] for part in children(node)])
        if slope is not None:
            alone = slope[0] == -slope[1]
        elif node[0] == "input":
            alone = not varies[node[1]] & {"i", "j"}
        else:
            alone = node[0] != "score" and all(id(part) in found for part in children(node))
        if alone:
            found.add(id(node))
    return frozenset(found)


def _slope(node: Tree, of_children: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """How an exact linear function of the positions grows with i and with j; None for what is none."""
    match node[0]:
        case "i":
            return 1, 0
        case "j":
            return 0, 1
        case "b" | "h" | "number":
            return 0, 0
        case "const" if type(node[1]) is int:
            return 0, 0
        case "cast" if node[1] == "int64":
            return of_children[0]
    known = [slope for slope in of_children if slope is not None]
    if len(known) < len(of_children):
        return None
    match node:
        case ("add", _, _):
            return known[0][0] + known[1][0], known[0][1] + known[1][1]
        case ("sub", _, _):
            return known[0][0] - known[1][0], known[0][1] - known[1][1]
        case ("neg", _):
            return -known[0][0], -known[0][1]
        case ("mul", ("const", int(c)), _):
            return c * known[1][0], c * known[1][1]
        case ("mul", _, ("const", int(c))):
            return c * known[0][0], c * known[0][1]
    return None
