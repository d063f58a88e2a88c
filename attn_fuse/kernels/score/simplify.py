"""Simplify score programs: decide conditions from known ones, and move constant factors into or out of a score."""

from __future__ import annotations

import math
from collections.abc import Sequence

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.expression.nodes import Expr, children, distinct
from attn_fuse.kernels.score.linear import at_least_zero, linear
from attn_fuse.kernels.score.program import ScoreProgram


def inside(expr: Expr, program: ScoreProgram, seen: bool = False) -> Expr:
    """`expr`, a part of `program`, without the comparisons that lower <= j - i <= upper decides.

    seen: whether the key is also known to be visible.
    """
    distance = linear(ex.Position("j")) - linear(ex.Position("i"))
    upper = [] if program.upper is None else [linear(program.upper) - distance]
    lower = [] if program.lower is None else [distance - linear(program.lower)]
    known = _Knowledge([*upper, *lower])
    if seen and program.visible is not None:
        known.learn(program.visible, True)
    return known.applied(expr)


def assuming(condition: Expr, expr: Expr) -> Expr:
    """`expr` simplified for where `condition` holds. Equal parts must be one object, as in one program."""
    known = _Knowledge([])
    known.learn(condition, True)
    return known.applied(expr)


class _Knowledge:
    """Known facts: linear forms that are at least 0, and the values of conditions, by their identity."""

    def __init__(self, forms: Sequence[sympy.Expr]) -> None:
        self._forms = [*forms]
        self._facts: dict[int, bool] = {}
        self._done: dict[int, Expr] = {}

    def learn(self, condition: Expr, holds: bool) -> None:
        self._facts[id(condition)] = holds
        # Not for fractions, of which x >= 0 and -1 - x >= 0 may both fail.
        if (form := at_least_zero(condition)) is not None and form.is_integer:
            self._forms.append(form if holds else -1 - form)
        match condition:
            case ex.Not(inner):
                self.learn(inner, not holds)
            case ex.And(a, b) if holds:
                self.learn(a, True)
                self.learn(b, True)
            case ex.Or(a, b) if not holds:
                self.learn(a, False)
                self.learn(b, False)

    def applied(self, expr: Expr) -> Expr:
        """`expr` simplified; the same object if nothing changes."""
        if id(expr) not in self._done:
            self._done[id(expr)] = self._applied(expr)
        return self._done[id(expr)]

    def _applied(self, expr: Expr) -> Expr:
        if (value := self._value(expr)) is not None:
            return ex.TRUE if value else ex.FALSE
        before = children(expr)
        parts = [self.applied(part) for part in before]
        changed = any(a is not b for a, b in zip(before, parts, strict=True))
        return _folded(ex.remade(expr, parts)) if changed else expr

    def _value(self, expr: Expr) -> bool | None:
        if id(expr) in self._facts:
            return self._facts[id(expr)]
        form = at_least_zero(expr)
        if form is None:
            return None
        return True if self._is_known(form) else False if self._is_known(-1 - form) else None

    def _is_known(self, form: sympy.Expr) -> bool:
        """Whether `form` is the sum of a known form and a number that is not negative."""
        return any((form - known).is_nonnegative for known in self._forms)


def _folded(expr: Expr) -> Expr:
    match expr:
        case ex.Not(ex.Const(value)):
            return ex.FALSE if value else ex.TRUE
        case ex.And(ex.Const(value), x) | ex.And(x, ex.Const(value)):
            return _as_truth(x) if value else ex.FALSE
        case ex.Or(ex.Const(value), x) | ex.Or(x, ex.Const(value)):
            return ex.TRUE if value else _as_truth(x)
        # Unless the dropped choice may have promoted the other.
        case ex.Select(ex.Const(value), a, b):
            chosen, other = (a, b) if value else (b, a)
            goes = isinstance(other, ex.Const) and (_is_fraction(chosen) or type(other.value) is int)
            return chosen if goes else expr
        case ex.Add(x, ex.Const(0.0 as zero)) | ex.Add(ex.Const(0.0 as zero), x):
            return x if isinstance(zero, float) and _is_fraction(x) else expr
    return expr


def _as_truth(x: Expr) -> Expr:
    match x:
        case ex.Compare() | ex.And() | ex.Or() | ex.Not() | ex.Const(bool()):
            return x
    return ex.Cast(torch.bool, x)


def _is_fraction(expr: Expr) -> bool:
    """Whether `expr` is certainly of a floating-point dtype no narrower than the scores."""
    match expr:
        case ex.Score() | ex.Const(float()) | ex.Cast(torch.float32 | torch.float64):
            return True
        case ex.Select(_, a, b) | ex.Add(a, b) | ex.Mul(a, b) | ex.Div(a, b) | ex.Binary(_, a, b):
            return _is_fraction(a) or _is_fraction(b)
        case ex.Unary(name, x):
            return FUNCTIONS[name].gives != "truth" and _is_fraction(x)
    return False


def in_unit(expr: Expr, unit: float) -> Expr | None:
    """`unit` times `expr`, multiplied into its constants and the raw score; None if that is impossible.

    A finite fill stays finite, and a row of nothing but fills keeps one number in all places.
    """
    match expr:
        case ex.Score():
            return expr * unit
        case ex.Const(value):
            scaled = float(value) * unit
            return ex.Const(scaled) if abs(scaled) < _LARGEST or not math.isfinite(value) else None
        case ex.Select(condition, x, y):
            one, other = in_unit(x, unit), in_unit(y, unit)
            return None if one is None or other is None else ex.Select(condition, one, other)
        case ex.Mul(x, ex.Const(value)) if _has_no_fill(x):
            return x * (float(value) * unit)
        case ex.Div(x, ex.Const(value)) if _has_no_fill(x) and value:
            return x * (unit / float(value))
    return None


_LARGEST = 3e38


def taken_out(expr: Expr) -> tuple[float, Expr]:
    """(number, expression) with product `expr`: a kernel multiplies a sum by the number instead of each element."""
    match expr:
        case ex.Mul(x, ex.Const(float() as value)) if _FEWEST < value <= 1:
            return value, x
        case ex.Div(x, ex.Const(float() as value)) if 1 <= value < 1 / _FEWEST:
            return 1 / value, x
    return 1.0, expr


# Elements without their factor must stay in the range of float16, which tensor cores may get.
_FEWEST = 2.0**-6


def _has_no_fill(expr: Expr) -> bool:
    """Whether `expr` certainly has no fill, which a multiplication could make infinite."""
    return all(
        not isinstance(node, (ex.Input, ex.Gather, ex.Number))
        and not (isinstance(node, ex.Const) and abs(node.value) > 1e30)
        for node in distinct(expr)
    )
