"""Simplify: drop conditions of a score program that are known to hold, and move constant factors into or out of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.expression.nodes import (
    FALSE,
    TRUE,
    Add,
    And,
    Binary,
    Cast,
    Compare,
    Const,
    Div,
    Expr,
    Gather,
    Input,
    Mul,
    Not,
    Number,
    Or,
    Position,
    Score,
    Select,
    Unary,
    children,
    distinct,
    remade,
)
from attn_fuse.kernels.score.linear import Linear, at_least_zero, complement, linear
from attn_fuse.kernels.score.program import ScoreProgram


def inside(expr: Expr, program: ScoreProgram, seen: bool = False) -> Expr:
    """`expr` where lower <= j - i <= upper is known to hold, without the comparisons that this decides.

    seen: whether the key is known to be visible, too; `expr` is of `program`, so that equal parts are one object.
    """
    distance = linear(Position("j")) - linear(Position("i"))
    upper = [] if program.upper is None else [linear(program.upper) - distance]
    lower = [] if program.lower is None else [distance - linear(program.lower)]
    known = _Knowledge([*upper, *lower])
    if seen and program.visible is not None:
        known.learn(program.visible, True)
    return known.applied(expr)


def assuming(condition: Expr, expr: Expr) -> Expr:
    """`expr` where `condition` is known to hold. Equal parts of the two must be one object, as in one program."""
    known = _Knowledge([])
    known.learn(condition, True)
    return known.applied(expr)


class _Knowledge:
    """Known facts: linear forms that are at least 0, and the values of conditions, by their identity."""

    def __init__(self, forms: Sequence[Linear]) -> None:
        self._forms = [*forms]
        self._facts: dict[int, bool] = {}
        self._done: dict[int, Expr] = {}

    def learn(self, condition: Expr, holds: bool) -> None:
        self._facts[id(condition)] = holds
        # Integers only: for a fraction, x >= 0 and -1 - x >= 0 may both fail.
        if (form := at_least_zero(condition)) is not None and form.is_whole:
            self._forms.append(form if holds else complement(form))
        match condition:
            case Not(inner):
                self.learn(inner, not holds)
            case And(a, b) if holds:
                self.learn(a, True)
                self.learn(b, True)
            case Or(a, b) if not holds:
                self.learn(a, False)
                self.learn(b, False)

    def applied(self, expr: Expr) -> Expr:
        """`expr` simplified; itself where nothing changes."""
        if id(expr) not in self._done:
            self._done[id(expr)] = self._applied(expr)
        return self._done[id(expr)]

    def _applied(self, expr: Expr) -> Expr:
        if (value := self._value(expr)) is not None:
            return TRUE if value else FALSE
        before = children(expr)
        parts = [self.applied(part) for part in before]
        changed = any(a is not b for a, b in zip(before, parts, strict=True))
        return _folded(remade(expr, parts)) if changed else expr

    def _value(self, expr: Expr) -> bool | None:
        if id(expr) in self._facts:
            return self._facts[id(expr)]
        form = at_least_zero(expr)
        if form is None:
            return None
        return True if self._is_known(form) else False if self._is_known(complement(form)) else None

    def _is_known(self, form: Linear) -> bool:
        """Whether `form` is the sum of a known form and a number that is not negative."""
        return any(not (rest := form - known).terms and rest.number >= 0 for known in self._forms)


def _folded(expr: Expr) -> Expr:
    match expr:
        case Not(Const(value)):
            return FALSE if value else TRUE
        case And(Const(value), x) | And(x, Const(value)):
            return _as_truth(x) if value else FALSE
        case Or(Const(value), x) | Or(x, Const(value)):
            return TRUE if value else _as_truth(x)
        # Only where the dropped choice cannot have made a fraction of the other.
        case Select(Const(value), a, b):
            chosen, other = (a, b) if value else (b, a)
            return chosen if isinstance(other, Const) and (_is_fraction(chosen) or _is_int(other)) else expr
        case Add(x, Const(float() as zero)) | Add(Const(float() as zero), x) if zero == 0.0 and _is_fraction(x):
            return x
    return expr


def _as_truth(x: Expr) -> Expr:
    is_truth = isinstance(x, (Compare, And, Or, Not)) or (isinstance(x, Const) and isinstance(x.value, bool))
    return x if is_truth else Cast(torch.bool, x)


def _is_int(x: Const) -> bool:
    return isinstance(x.value, int) and not isinstance(x.value, bool)


def _is_fraction(expr: Expr) -> bool:
    """Whether `expr` is certainly of a floating-point dtype no narrower than the scores."""
    match expr:
        case Score() | Const(float()) | Cast(torch.float32 | torch.float64):
            return True
        case Select(_, a, b) | Add(a, b) | Mul(a, b) | Div(a, b) | Binary(_, a, b):
            return _is_fraction(a) or _is_fraction(b)
        case Unary(name, x):
            return FUNCTIONS[name].gives != "truth" and _is_fraction(x)
    return False


def in_unit(expr: Expr, unit: float) -> Expr | None:
    """`unit` times `expr`, taken into its constants and the raw score; None where that is impossible.

    A finite fill stays finite, and a row of nothing but fills keeps one number in all places.
    """
    match expr:
        case Score():
            return expr * unit
        case Const(value):
            scaled = float(value) * unit
            return Const(scaled) if abs(scaled) < _LARGEST or not math.isfinite(value) else None
        case Select(condition, x, y):
            one, other = in_unit(x, unit), in_unit(y, unit)
            return None if one is None or other is None else Select(condition, one, other)
        case Mul(x, Const(value)) if _has_no_fill(x):
            return x * (float(value) * unit)
        case Div(x, Const(value)) if _has_no_fill(x) and value:
            return x * (unit / float(value))
    return None


_LARGEST = 3e38


def taken_out(expr: Expr) -> tuple[float, Expr]:
    """(number, expression) with product `expr`, so that a kernel multiplies a sum by the number, not each element."""
    match expr:
        case Mul(x, Const(float() as value)) if _FEWEST < value <= 1:
            return value, x
        case Div(x, Const(float() as value)) if 1 <= value < 1 / _FEWEST:
            return 1 / value, x
    return 1.0, expr


# Elements without their factor must stay in the range of float16, a dtype that tensor cores are given.
_FEWEST = 2.0**-6


def _has_no_fill(expr: Expr) -> bool:
    """Whether `expr` can hold no fill, which a multiplication could make infinite."""
    return all(
        not isinstance(node, (Input, Gather, Number)) and not (isinstance(node, Const) and abs(node.value) > 1e30)
        for node in distinct(expr)
    )
