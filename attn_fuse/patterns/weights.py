"""Layers of the weights, between the softmax and the product with the value.

Taken: dropout; a guard that turns the NaN of a fully masked row into zero; a factor, such as a head mask, a mask put on
once more or a random mask. Declined: weights that are chosen by what the scores are.
"""

from __future__ import annotations

import functools
import math

from sympy import Symbol

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.nodes import (
    And,
    Cast,
    Compare,
    Const,
    Div,
    Dropout,
    Expr,
    Mul,
    Not,
    Reduce,
    Select,
    Softmax,
    Unary,
    has_product,
    terms,
)
from attn_fuse.expression.simplify import div, logical_and, logical_not, select
from attn_fuse.patterns.layer import Answer, DropoutLayer, EmptyIsZero, Factor, Layered, maximum_taken_off


class _Infinite:
    """Infinities by dotted names, which `case` compares by value."""

    PLUS = math.inf
    MINUS = -math.inf


def dropout(weights: Expr) -> Answer:
    """The dropout of the weights."""
    match weights:
        case Dropout(inner, p):
            return Layered(inner, DropoutLayer(p))
    return None


def guard(weights: Expr) -> Answer:
    """The guard that zeroes the weights of a fully masked row; a Refusal of any other choice by the scores."""
    match weights:
        case Select(cond, a, b) if has_product(cond):
            apart = _fill_apart(cond, a, b) or _fill_apart(logical_not(cond), b, a)
            if apart is not None:
                return apart
            return (
                _guarded(cond, a, b)
                or _guarded(logical_not(cond), b, a)
                or Refusal("the weights are chosen by what they or the scores are", cond)
            )
    return None


def _fill_apart(keep: Expr, inner: Expr, instead: Expr) -> Layered | None:
    """A fill by 0 where conditions of positions or of a guard fail, as the fill over the guard; None for one alone."""
    if instead != Const(0):
        return None
    asks: list[Expr] = []
    fills: list[Expr] = []
    waiting = [keep]
    while waiting:
        match waiting.pop():
            case And(x, y):
                waiting += [y, x]
            case part:
                (asks if has_product(part) else fills).append(part)
    if not asks or not fills:
        return None
    guarded = Select(functools.reduce(logical_and, asks), inner, instead)
    return Layered(guarded, Factor(select(functools.reduce(logical_and, fills), Const(1.0), Const(0.0)), filled=True))


def _guarded(cond: Expr, instead: Expr, inner: Expr) -> Layered | None:
    match cond:
        # A weight is never infinite, and NaN only in a fully masked row.
        case Unary("isnan", x) if instead == Const(0):
            return Layered(inner, EmptyIsZero() if _is_weight(x) else EmptyIsZero(x))
        case Unary("isinf", x) | Compare("eq", x, Const(_Infinite.PLUS | _Infinite.MINUS)) if _is_weight(x):
            return Layered(inner, EmptyIsZero())
        case Compare("eq", x, Const(_Infinite.MINUS)) if instead == Const(0):
            return Layered(inner, EmptyIsZero(x))
    row = _all_hidden(cond)
    return Layered(inner, EmptyIsZero(*row)) if row is not None and instead == Const(0) else None


def _is_weight(x: Expr) -> bool:
    """Whether `x` is the weights themselves, at most cast or guarded already."""
    match x:
        case Softmax():
            return True
        case Cast(dtype, inner):
            return dtype.is_floating_point and _is_weight(inner)
        case Select(_, inner, Const()):
            return _is_weight(inner)
        case Div(numerator, denominator):
            return _guarded_quotient(numerator, denominator)
    return False


def _guarded_quotient(numerator: Expr, denominator: Expr) -> bool:
    """Whether the quotient is at most 1, and NaN only in a fully masked row, as exp(x - max) over its own sum is.

    Without the max subtracted, all exponentials of a row may be infinite, or 0 under a finite fill.
    """
    match numerator, denominator:
        case Softmax(), Reduce("sum", _, _):
            return True
        case Unary("exp", x), Reduce("sum", _, _):
            return any(map(maximum_taken_off, terms(x)))
    return False


def _all_hidden(cond: Expr) -> tuple[Expr, Symbol] | None:
    """(scores, axis) if `cond` asks whether all of the scores along the axis are minus infinity, else None."""
    match cond:
        case Reduce("all", axis, Compare("eq", x, Const(_Infinite.MINUS))):
            return x, axis
        case Not(Reduce("any", axis, Not(Compare("eq", x, Const(_Infinite.MINUS))))):
            return x, axis
        case Not(Reduce("any", axis, Compare("ne", x, Const(_Infinite.MINUS)))):
            return x, axis
    return None


def factor(weights: Expr) -> Answer:
    """The factor that multiplies the weights, or fills them with 0; a Refusal of a fill by anything else."""
    match weights:
        case Select(cond, inner, Const(0 | 0.0)):
            return Layered(inner, Factor(select(cond, Const(1.0), Const(0.0)), filled=True))
        case Select():
            return Refusal("weights are replaced by something that is not zero")
        case Mul(inner, value) if not has_product(value):
            return Layered(inner, Factor(value))
        case Div(inner, divisor) if not has_product(divisor):
            return Layered(inner, Factor(div(Const(1.0), divisor)))
    return None
