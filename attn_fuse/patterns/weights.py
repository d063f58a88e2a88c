"""Layers of the weights, between the softmax and the product with the value.

Takes dropout; a guard that turns the NaN of a fully masked row into zero; a factor, such as a head mask, the mask once
more or a random mask. Declines weights selected by a condition on the scores.
"""

from __future__ import annotations

import functools
import math

from sympy import Symbol

from attn_fuse.attention.attention import Refusal
from attn_fuse.attention.mask import conjuncts
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.nodes import Const, Expr, has_product, terms
from attn_fuse.expression.simplify import div, logical_and, logical_not, select
from attn_fuse.patterns.layer import Answer, DropoutLayer, EmptyIsZero, Factor, Layered, bare, maximum_taken_off


class _Infinite:
    """Infinities by dotted names, which `case` compares by value."""

    PLUS = math.inf
    MINUS = -math.inf


def dropout(weights: Expr) -> Answer:
    """The dropout of the weights."""
    match weights:
        case ex.Dropout(inner, p):
            return Layered(inner, DropoutLayer(p))
    return None


def guard(weights: Expr) -> Answer:
    """The guard that zeroes the weights of a fully masked row; a Refusal of any other condition on the scores."""
    match weights:
        case ex.Select(cond, a, b) if has_product(cond):
            return (
                _fill_apart(cond, a, b)
                or _fill_apart(logical_not(cond), b, a)
                or _guarded(cond, a, b)
                or _guarded(logical_not(cond), b, a)
                or Refusal("the weights are selected by a condition on scores or weights", cond)
            )
    return None


def _fill_apart(keep: Expr, inner: Expr, instead: Expr) -> Layered | None:
    """A fill by 0 under conditions of a guard and others, as a fill over the guard; None unless there are both."""
    if instead != Const(0):
        return None
    conditions = list(conjuncts(keep))
    asks = [condition for condition in conditions if has_product(condition)]
    fills = [condition for condition in conditions if not has_product(condition)]
    if not asks or not fills:
        return None
    guarded = ex.Select(functools.reduce(logical_and, asks), inner, instead)
    return Layered(guarded, Factor(select(functools.reduce(logical_and, fills), Const(1.0), Const(0.0)), filled=True))


def _guarded(cond: Expr, instead: Expr, inner: Expr) -> Layered | None:
    match cond:
        # A weight is never infinite, and NaN only in a fully masked row.
        case ex.Unary("isnan", x) if instead == Const(0):
            return Layered(inner, EmptyIsZero() if _is_weight(x) else EmptyIsZero(x))
        case ex.Unary("isinf", x) | ex.Compare("eq", x, Const(_Infinite.PLUS | _Infinite.MINUS)) if _is_weight(x):
            return Layered(inner, EmptyIsZero())
        case ex.Compare("eq", x, Const(_Infinite.MINUS)) if instead == Const(0):
            return Layered(inner, EmptyIsZero(x))
    row = _all_hidden(cond)
    return Layered(inner, EmptyIsZero(*row)) if row is not None and instead == Const(0) else None


def _is_weight(x: Expr) -> bool:
    """Whether `x` is the weights, perhaps cast or guarded already."""
    match bare(x):
        case ex.Softmax():
            return True
        case ex.Select(_, inner, Const()):
            return _is_weight(inner)
        case ex.Div(numerator, denominator):
            return _guarded_quotient(numerator, denominator)
    return False


def _guarded_quotient(numerator: Expr, denominator: Expr) -> bool:
    """Whether the quotient is at most 1, and NaN only in a fully masked row: exp(x - max) over its own sum.

    Without the max, all exponentials of a row may be infinite, or 0 under a finite fill.
    """
    match numerator, denominator:
        case ex.Softmax(), ex.Reduce("sum", _, _):
            return True
        case ex.Unary("exp", x), ex.Reduce("sum", _, _):
            return any(map(maximum_taken_off, terms(x)))
    return False


def _all_hidden(cond: Expr) -> tuple[Expr, Symbol] | None:
    """(scores, axis) if `cond` asks whether all scores along the axis are minus infinity, else None."""
    match cond:
        case ex.Reduce("all", axis, ex.Compare("eq", x, Const(_Infinite.MINUS))):
            return x, axis
        case ex.Not(ex.Reduce("any", axis, ex.Not(ex.Compare("eq", x, Const(_Infinite.MINUS))))):
            return x, axis
        case ex.Not(ex.Reduce("any", axis, ex.Compare("ne", x, Const(_Infinite.MINUS)))):
            return x, axis
    return None


def factor(weights: Expr) -> Answer:
    """The factor that multiplies the weights, or fills them with 0; a Refusal of a fill by anything else."""
    match weights:
        case ex.Select(cond, inner, Const(0 | 0.0)):
            return Layered(inner, Factor(select(cond, Const(1.0), Const(0.0)), filled=True))
        case ex.Select():
            return Refusal("weights are replaced by something that is not zero")
        case ex.Mul(inner, value) if not has_product(value):
            return Layered(inner, Factor(value))
        case ex.Div(inner, divisor) if not has_product(divisor):
            return Layered(inner, Factor(div(Const(1.0), divisor)))
    return None
