"""What of a score program can be said before it runs: conditions that hold within its bounds, and its unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attn_fuse.kernels.score.derivative import Trees
from attn_fuse.kernels.score.program import COMPARISONS, ScoreProgram, Tree, nodes

# A sum of integer nodes, each times a number; the numbers by themselves under None.
_Linear = dict[Any, int]


def inside(trees: Trees, program: ScoreProgram) -> Tree:
    """The score where lower <= j - i <= upper is known to hold: comparisons that say the same are gone."""
    bounds = [_linear(("sub", sides[0], sides[1])) for sides in _sides(program)]
    known: dict[int, bool] = {}
    for node in nodes(program.score):
        if node[0] in COMPARISONS and node[0] not in ("eq", "ne"):
            held = _at_least_zero(node)
            for bound in bounds:
                if _implied(held, bound):
                    known[id(node)] = True
                elif _implied(_minus(_minus({}, held), {None: 1}), bound):
                    known[id(node)] = False
    return _with_known(trees, program.score, known)


def in_unit(trees: Trees, tree: Tree, unit: float) -> Tree | None:
    """`unit` times `tree`, where no element is multiplied once more for it; None where that cannot be had.

    A finite fill stays finite, and rows that hold nothing else keep one number in all places.
    """
    match tree:
        case ("score",):
            return trees.node("mul", tree, trees.node("const", unit))
        case ("const", value):
            scaled = float(value) * unit
            return trees.node("const", scaled) if abs(scaled) < _LARGEST or not math.isfinite(value) else None
        case ("where", condition, x, y):
            x, y = in_unit(trees, x, unit), in_unit(trees, y, unit)
            return None if x is None or y is None else trees.node("where", condition, x, y)
        case ("mul", x, ("const", value)) | ("mul", ("const", value), x) if _bounded(x):
            return trees.node("mul", x, trees.node("const", float(value) * unit))
        case ("div", x, ("const", value)) if _bounded(x) and value:
            return trees.node("mul", x, trees.node("const", unit / float(value)))
    return None


_LARGEST = 3e38


def taken_out(trees: Trees, tree: Tree) -> tuple[float, Tree]:
    """A number and the tree whose product `tree` is: sums are multiplied by it once, not each of their elements."""
    match tree:
        case ("mul", x, ("const", float() as value)) | ("mul", ("const", float() as value), x) if _FEWEST < value <= 1:
            return value, x
        case ("div", x, ("const", float() as value)) if 1 <= value < 1 / _FEWEST:
            return 1 / value, x
    return 1.0, tree


# What is no more multiplied must not leave the range of float16, which tensor cores are given.
_FEWEST = 2.0**-6


def _bounded(tree: Tree) -> bool:
    """Whether no fill can be in it, which would be no number any more when multiplied."""
    return all(
        node[0] not in ("input", "gather", "number") and not (node[0] == "const" and abs(node[1]) > 1e30)
        for node in nodes(tree)
    )


def _sides(program: ScoreProgram) -> list[tuple[Tree, Tree]]:
    """Of each bound the two sides whose difference is not negative."""
    distance = ("sub", ("j",), ("i",))
    upper = [] if program.upper is None else [(program.upper, distance)]
    lower = [] if program.lower is None else [(distance, program.lower)]
    return upper + lower


def _at_least_zero(node: Tree) -> _Linear:
    """What is at least 0 where this comparison of integers holds."""
    name, x, y = node
    difference = _linear(("sub", x, y)) if name in ("ge", "gt") else _linear(("sub", y, x))
    return _minus(difference, {None: 1}) if name in ("gt", "lt") else difference


def _implied(held: _Linear, by: _Linear) -> bool:
    """Whether `held` is `by` and a number that is not negative."""
    apart = _minus(held, by)
    return apart.pop(None, 0) >= 0 and not any(apart.values())


def _linear(tree: Tree) -> _Linear:
    match tree:
        case ("const", bool() | int() as value):
            return {None: int(value)}
        case ("add", x, y):
            return _minus(_linear(x), _minus({}, _linear(y)))
        case ("sub", x, y):
            return _minus(_linear(x), _linear(y))
        case ("neg", x):
            return _minus({}, _linear(x))
        case ("mul", ("const", int() as value), x) | ("mul", x, ("const", int() as value)):
            return {key: n * value for key, n in _linear(x).items()}
        case ("cast", "int64", ("i" | "j" | "number", *_) as x):
            return _linear(x)
    return {tree if tree[0] in ("i", "j", "number") else id(tree): 1}


def _minus(x: _Linear, y: _Linear) -> _Linear:
    return {key: x.get(key, 0) - y.get(key, 0) for key in x.keys() | y.keys()}


def _with_known(trees: Trees, tree: Tree, known: Mapping[int, bool]) -> Tree:
    """`tree` with the nodes of `known` replaced, and what follows from them. Itself where nothing changes."""
    if id(tree) in known:
        return trees.node("const", known[id(tree)])
    children = [_with_known(trees, part, known) if isinstance(part, tuple) else part for part in tree[1:]]
    if all(a is b for a, b in zip(children, tree[1:], strict=True)):
        return tree
    match tree[0], children:
        case "where", [("const", bool() as condition), x, y]:
            return x if condition else y
        case "not", [("const", bool() as value)]:
            return trees.node("const", not value)
        case "and" | "or" as name, parts:
            decides = name == "or"
            if any(part[0] == "const" and part[1] is decides for part in parts):
                return trees.node("const", decides)
            left = [part for part in parts if not (part[0] == "const" and part[1] is not decides)]
            # A single part need not be a Boolean.
            return trees.node(name, *left) if left else trees.node("const", not decides)
    return trees.node(tree[0], *children)
