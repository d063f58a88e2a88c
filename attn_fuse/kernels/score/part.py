"""Part: expressions of a score program as a program of their own, which reads only what they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_fuse.expression.nodes import Expr, Gather, Input, Number, children, distinct, remade
from attn_fuse.kernels.score.program import ScoreProgram


@dataclass(frozen=True)
class Part:
    """A program taken from another. inputs, numbers: for each of its own, the index of the same in the other."""

    program: ScoreProgram
    inputs: tuple[int, ...]
    numbers: tuple[int, ...]


def part_of(score: Expr, hides_only_if_others_seen: bool = False, **others: Expr | None) -> Part:
    """The part with these expressions. others: by name, for other fields of `ScoreProgram`; None leaves a field out."""
    exprs = {"score": score} | {name: expr for name, expr in others.items() if expr is not None}
    read = [node for expr in exprs.values() for node in distinct(expr)]
    inputs = sorted({node.leaf for node in read if isinstance(node, (Input, Gather))})
    numbers = sorted({node.number for node in read if isinstance(node, Number)})
    new_input, new_number = ({old: new for new, old in enumerate(some)} for some in (inputs, numbers))
    made: dict[str, Any] = {name: _renumbered(expr, new_input, new_number) for name, expr in exprs.items()}
    return Part(
        ScoreProgram(**made, hides_only_if_others_seen=hides_only_if_others_seen), tuple(inputs), tuple(numbers)
    )


def _renumbered(expr: Expr, inputs: Mapping[int, int], numbers: Mapping[int, int]) -> Expr:
    match expr:
        case Input(n):
            return Input(inputs[n])
        case Number(n):
            return Number(numbers[n])
        case Gather(n, index):
            return Gather(inputs[n], tuple(_renumbered(x, inputs, numbers) for x in index))
    return remade(expr, [_renumbered(part, inputs, numbers) for part in children(expr)])
