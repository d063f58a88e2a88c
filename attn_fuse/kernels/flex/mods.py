"""Score programs as FlexAttention takes them (arXiv 2412.05496): a `score_mod` and a `mask_mod` over single elements.

The trees are run on tensors of no dimension while the call is traced, so what they compute is generated into the
kernel. The mask stands in the score as well; where `mask_mod` decides, it is taken out of the score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.score.program import POSITIONS, Block, Memo, ScoreProgram, Tree, evaluate, nodes

TRUE: Tree = ("const", True)
FALSE: Tree = ("const", False)


@dataclass(frozen=True)
class Part:
    """A program that reads less. inputs, numbers: what each of its own stands for in the program it was taken from."""

    program: ScoreProgram
    inputs: tuple[int, ...]
    numbers: tuple[int, ...]


def score_part(program: ScoreProgram) -> Part:
    """The score where `mask_part` lets the key count."""
    seen = None if program.unless_empty else program.visible
    return _part(program.score if seen is None else _assuming(seen, program.score))


def blocks_part(program: ScoreProgram) -> Part:
    """What the blocks that are computed depend on: `visible` with its bounds; its score is the raw one."""
    trees = {"visible": program.visible, "upper": program.upper, "lower": program.lower}
    return _part(("score",), program.unless_empty, **trees)


def mask_part(program: ScoreProgram) -> Part:
    """Where a key counts, within the blocks that are computed, as `visible`; its score is the raw one."""
    return _part(("score",)) if program.unless_empty else blocks_part(program)


def sink_part(program: ScoreProgram) -> Part:
    """The sink, if there is one; its score is the raw one."""
    return _part(("score",), sink=program.sink)


def scaled(program: ScoreProgram) -> tuple[float, Tree]:
    """A factor and a tree that gives the score from a raw score multiplied by it."""
    match program.score:
        case ("mul", ("score",), ("const", factor)) | ("mul", ("const", factor), ("score",)) if _is_ordinary(factor):
            return float(factor), ("score",)
        case ("div", ("score",), ("const", by)) if _is_ordinary(by):
            return 1.0 / float(by), ("score",)
    return 1.0, program.score


def score_mod(tree: Tree, count: int) -> Callable[..., Tensor]:
    """(score, b, h, i, j, *inputs, *numbers) -> the final score, float32, or float64 where the scores are.

    count: how many inputs there are; numbers: int64 tensors without dimensions.
    """

    def function(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *read: Tensor) -> Tensor:
        wide = torch.promote_types(score.dtype, torch.float32)
        found = _on_element(tree, score.to(wide), (b, h, i, j), read[:count], read[count:], wide)
        return found.to(wide)

    return function


def mask_mod(tree: Tree | None, count: int) -> Callable[..., Tensor]:
    """(b, h, i, j, *inputs, *numbers) -> whether query i may see key j, a bool; always without a tree."""

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *read: Tensor) -> Tensor:
        if tree is None:
            return torch.ones_like(b, dtype=torch.bool)
        return _on_element(tree, None, (b, h, i, j), read[:count], read[count:], torch.float32).to(torch.bool)

    return function


def over_queries(tree: Tree, inputs: Sequence[Tensor], numbers: Sequence[Tensor], query: Tensor) -> Tensor:
    """A tree that does not depend on the key, such as a sink, as [B, H, Lq] of at least float32."""
    places = [
        torch.arange(n, device=query.device).view([-1 if d == place else 1 for d in range(3)])
        for place, n in enumerate(query.shape[:3])
    ]
    wide = torch.promote_types(query.dtype, torch.float32)
    found = _on_element(tree, None, (*places, torch.zeros_like(places[2])), inputs, numbers, wide)
    return found.to(wide).expand(query.shape[:3])


@dataclass(frozen=True)
class _Element(Block):
    """One element of the scores, or several at given positions."""

    @property
    def one(self) -> tuple[int, ...]:
        return ()


def _on_element(
    tree: Tree,
    score: Tensor | None,
    positions: Sequence[Tensor],
    inputs: Sequence[Tensor],
    numbers: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    # FlexAttention counts in int32, which a flat index into a large tensor overflows.
    places = dict(zip(POSITIONS, (p.to(torch.int64) for p in positions), strict=True))
    element = _Element(1, 1, (0, 1), (0, 1), positions[0].device, dtype)
    memo: Memo = {}
    for node in nodes(tree):
        match node:
            case (name,) if name in POSITIONS:
                memo[id(node)] = places[name]
            case ("number", n):
                memo[id(node)] = numbers[n]
            case ("input", n):
                read = inputs[n][tuple(0 if inputs[n].shape[d] == 1 else places[p] for d, p in enumerate(POSITIONS))]
                memo[id(node)] = read.to(torch.promote_types(read.dtype, dtype)) if read.is_floating_point() else read
            case _:
                memo[id(node)] = None
    return evaluate(tree, score, inputs, (), element, memo)


# ---- a program without what it does not read


def _part(score: Tree, unless_empty: bool = False, **others: Tree | None) -> Part:
    trees = {"score": score} | {name: tree for name, tree in others.items() if tree is not None}
    read = [node for tree in trees.values() for node in nodes(tree)]
    inputs = sorted({node[1] for node in read if node[0] in ("input", "gather")})
    numbers = sorted({node[1] for node in read if node[0] == "number"})

    def renumbered(tree: Any) -> Any:
        match tree:
            case ("input" | "gather" as name, int(n), *positions):
                return (name, inputs.index(n), *map(renumbered, positions))
            case ("number", int(n)):
                return ("number", numbers.index(n))
            case tuple():
                return tuple(map(renumbered, tree))
        return tree

    program = ScoreProgram(**{name: renumbered(tree) for name, tree in trees.items()}, unless_empty=unless_empty)
    return Part(program, tuple(inputs), tuple(numbers))


# ---- the score where the mask is known to hold


def _assuming(condition: Tree, tree: Tree) -> Tree:
    """`tree`, simplified for where `condition` holds. Equal parts of the two are one object, as in one program."""
    facts: dict[Any, Tree] = {}
    known: dict[int, Tree] = {}

    def learn(part: Tree, value: Tree) -> None:
        facts[id(part)] = value
        line = _at_least_zero(part)
        if line is not None:
            facts[line if value is TRUE else _complement(line)] = TRUE
            facts[_complement(line) if value is TRUE else line] = FALSE
        match part:
            case ("not", inner):
                learn(inner, FALSE if value is TRUE else TRUE)
            case ("and", *parts) if value is TRUE:
                for each in parts:
                    learn(each, TRUE)
            case ("or", *parts) if value is FALSE:
                for each in parts:
                    learn(each, FALSE)

    def simplified(node: Any) -> Any:
        if not isinstance(node, tuple):
            return node
        if id(node) not in known:
            value = facts.get(id(node))
            if value is None and (line := _at_least_zero(node)) is not None:
                value = facts.get(line)
            known[id(node)] = _folded((node[0], *map(simplified, node[1:]))) if value is None else value
        return known[id(node)]

    learn(condition, TRUE)
    return simplified(tree)


_Line = tuple[frozenset[tuple[Any, int]], int]


def _at_least_zero(tree: Tree) -> _Line | None:
    """The sum of positions that a comparison of positions asks to be at least 0: what of each, and a number."""
    match tree:
        case ("ge", a, b):
            return _difference(a, b, 0)
        case ("le", a, b):
            return _difference(b, a, 0)
        case ("gt", a, b):
            return _difference(a, b, -1)
        case ("lt", a, b):
            return _difference(b, a, -1)
    return None


def _complement(line: _Line) -> _Line:
    """Of whole numbers, x >= 0 does not hold where -1 - x >= 0 does."""
    terms, number = line
    return frozenset((atom, -count) for atom, count in terms), -1 - number


def _difference(a: Tree, b: Tree, number: int) -> _Line | None:
    terms: dict[Any, int] = {}
    rest = _collect(a, 1, terms), _collect(b, -1, terms)
    if rest[0] is None or rest[1] is None:
        return None
    return frozenset((atom, count) for atom, count in terms.items() if count), rest[0] + rest[1] + number


def _collect(tree: Tree, times: int, terms: dict[Any, int]) -> int | None:
    """Adds the atoms of a sum of positions to `terms`; gives its number, or None for anything else."""
    match tree:
        case ("const", int(value)) if not isinstance(value, bool):
            return times * value
        case ("b" | "h" | "i" | "j",) | ("number", _):
            terms[tree] = terms.get(tree, 0) + times
            return 0
        case ("add", a, b):
            parts = _collect(a, times, terms), _collect(b, times, terms)
        case ("sub", a, b):
            parts = _collect(a, times, terms), _collect(b, -times, terms)
        case ("mul", ("const", int(count)), x) | ("mul", x, ("const", int(count))):
            parts = _collect(x, times * count, terms), 0
        case _:
            return None
    return None if parts[0] is None or parts[1] is None else parts[0] + parts[1]


def _folded(node: Tree) -> Tree:
    match node:
        case ("not", ("const", bool(value))):
            return FALSE if value else TRUE
        case ("and" | "or" as name, *parts):
            through, ends = (TRUE, FALSE) if name == "and" else (FALSE, TRUE)
            left = [part for part in parts if part != through]
            if ends in left or not left:
                return ends if ends in left else through
            return left[0] if len(left) == 1 else (name, *left)
        # Only where the choice that falls away cannot have made a fraction of the other.
        case ("where", ("const", bool(value)), a, b):
            chosen, other = (a, b) if value else (b, a)
            if other[0] == "const" and _is_fraction(chosen):
                return chosen
        case ("add", a, ("const", float(zero))) | ("add", ("const", float(zero)), a):
            if zero == 0.0 and _is_fraction(a):
                return a
    return node


def _is_fraction(tree: Tree) -> bool:
    """Whether a tree is certainly of a floating-point dtype no narrower than the scores."""
    match tree:
        case ("score",) | ("const", float()) | ("cast", "float32" | "float64", _):
            return True
        case ("where", _, *parts) | ("add" | "sub" | "mul" | "div" | "maximum" | "minimum", *parts):
            return any(map(_is_fraction, parts))
        case ("neg" | "abs" | "tanh" | "relu" | "sigmoid", x):
            return _is_fraction(x)
    return False


def _is_ordinary(factor: float) -> bool:
    return 1e-6 < factor < 1e6
