"""Linear forms: integers of a score program as sums of positions and numbers, each times an integer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from attn_fuse.expression.nodes import Add, Binary, Cast, Compare, Const, Expr, Mul, Number, Position, Unary


@dataclass(frozen=True)
class Linear:
    """number + the sum of count * atom over `terms`. An atom is a `Position`, a `Number`, or a node's identity."""

    terms: Mapping[Expr | int, int] = field(default_factory=dict)
    number: int = 0

    def __sub__(self, other: Linear) -> Linear:
        return self + other * -1

    def __add__(self, other: Linear) -> Linear:
        atoms = self.terms.keys() | other.terms.keys()
        sums = {atom: self.terms.get(atom, 0) + other.terms.get(atom, 0) for atom in atoms}
        return Linear({atom: count for atom, count in sums.items() if count}, self.number + other.number)

    def __mul__(self, times: int) -> Linear:
        return Linear({atom: count * times for atom, count in self.terms.items() if times}, self.number * times)

    def slope(self, position: str) -> int:
        """The count of a position, by its name."""
        return self.terms.get(Position(position), 0)

    @property
    def is_whole(self) -> bool:
        """Whether every atom is a position or a number, so that the form is an integer."""
        return all(isinstance(atom, Expr) for atom in self.terms)


def linear(expr: Expr) -> Linear:
    """`expr` as a linear form; a part that is no sum, difference or integer multiple becomes an atom."""
    match expr:
        case Const(bool() | int() as value):
            return Linear(number=int(value))
        case Position() | Number():
            return Linear({expr: 1})
        case Cast(torch.int64, inner) if (form := linear(inner)).is_whole:
            return form
        case Add(a, b):
            return linear(a) + linear(b)
        case Binary("sub", a, b):
            return linear(a) - linear(b)
        case Unary("neg", inner):
            return linear(inner) * -1
        case Mul(inner, Const(int() as value)):
            return linear(inner) * value
    return Linear({id(expr): 1})


def at_least_zero(expr: Expr) -> Linear | None:
    """The form that is at least 0 where `expr`, an inequality of integers, holds; None for other expressions."""
    match expr:
        case Compare("ge", a, b) | Compare("le", b, a):
            return linear(a) - linear(b)
        case Compare("gt", a, b) | Compare("lt", b, a):
            return linear(a) - linear(b) - Linear(number=1)
    return None


def complement(form: Linear) -> Linear:
    """The form that is at least 0 exactly where `form` is not: for integers, -1 - form."""
    return Linear(number=-1) - form
