"""Bounds of an element expression, by interval arithmetic.

Parameters in training are assumed to lie in [-100, 100]; other tensors may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import FUNCTIONS, bounds_of
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr
from attn_fuse.expression.numbers import UNBOUNDED, Bounds


def stays_within(
    x: Expr, limit: float, space: Space, learned: Container[int], dtypes: Iterable[torch.dtype] = ()
) -> bool:
    """Whether -limit < `x` < limit is proved for every index of `space`, NaN aside.

    learned: the leaves whose elements lie in [-100, 100]. dtypes: the dtypes of the program; values beyond any of them,
    or beyond int32, count as unbounded. Symbolic sizes are assumed to be at most 2**24.
    """
    held = min((torch.finfo(dtype).max for dtype in dtypes if dtype.is_floating_point), default=math.inf)
    low, high = _bounds(x, space, learned, min(held, _WRAPS))
    return -limit < low and high < limit


def least(x: Expr, space: Space, learned: Container[int]) -> float:
    """A lower bound of `x`, however large; minus infinity if unknown."""
    return _bounds(x, space, learned)[0]


def largest_factor(x: Expr, space: Space, learned: Container[int]) -> float:
    """The max magnitude of `x`, a factor of the scores; infinity if unknown.

    A divisor in training is assumed to be at least 0.01.
    """
    match x:
        case ex.Mul(a, b):
            return largest_factor(a, space, learned) * largest_factor(b, space, learned)
        case ex.Div(a, b):
            divisor = smallest_divisor(b, space, learned)
            return largest_factor(a, space, learned) / divisor if divisor else math.inf
        case ex.Cast(dtype, a) if dtype.is_floating_point:
            return largest_factor(a, space, learned)
    low, high = _bounds(x, space, learned)
    return max(-low, high)


def smallest_divisor(x: Expr, space: Space, learned: Container[int]) -> float:
    """The min magnitude of `x`, a divisor of the scores; 0 if unknown."""
    match x:
        case ex.Load(leaf) | ex.Gather(leaf) if leaf in learned:
            return 1 / _LEARNED
        case ex.Mul(a, b):
            return smallest_divisor(a, space, learned) * smallest_divisor(b, space, learned)
        case ex.Cast(dtype, a) if dtype.is_floating_point:
            return smallest_divisor(a, space, learned)
        case ex.Unary("sqrt", a):
            return math.sqrt(smallest_divisor(a, space, learned))
    low, high = _bounds(x, space, learned)
    return max(0.0, low, -high)


def may_be_no_number(x: Expr) -> bool:
    """Whether constants in `x` may make a part of it NaN, as in inf * 0 or inf - inf."""
    return any(map(_is_no_number, ex.walk(x)))


def _is_no_number(x: Expr) -> bool:
    match x:
        case ex.Const(value):
            return math.isnan(value)
        case ex.Mul(a, b):
            return any(infinities(m) and not _is_number_but_0(n) for m, n in ((a, b), (b, a)))
        case ex.Div(a, b):
            return bool(infinities(b))
        case ex.Add(a, b):
            return len(infinities(a) | infinities(b)) == 2
        case ex.Unary(name, inner):
            row, signs = FUNCTIONS[name], infinities(inner)
            return bool(signs if row.infinite is None else signs & row.undefined)
        case ex.Binary(name, a, b):
            return name not in ("maximum", "minimum") and bool(infinities(a) | infinities(b))
    return False


def _is_number_but_0(x: Expr) -> bool:
    return isinstance(x, ex.Const) and x.value != 0 and math.isfinite(x.value)


@ex.remembered
def infinities(x: Expr) -> frozenset[int]:
    """The signs (1, -1) of infinite values of `x` that come from infinite constants, such as a mask's fill."""
    match x:
        case ex.Const(value):
            return frozenset({1 if value > 0 else -1}) if math.isinf(value) else frozenset()
        case ex.Unary(name, inner) if signs := infinities(inner):
            infinite = FUNCTIONS[name].infinite
            return _BOTH if infinite is None else frozenset(infinite[sign > 0] for sign in signs) - {0}
        case ex.Cast(_, inner):
            return infinities(inner)
        case ex.Mul(a, b) if infinities(a) and a == b:
            return frozenset({1})
        case ex.Mul(a, b) | ex.Div(a, b):
            # Factors read from memory are assumed to be positive.
            signs = infinities(a) | infinities(b)
            is_negative = any(isinstance(n, ex.Const) and n.value < 0 for n in (a, b))
            return frozenset(-sign for sign in signs) if is_negative else signs
        case ex.Binary(name, a, b):
            signs = infinities(a) | infinities(b)
            bound = next((n.value for n in (a, b) if isinstance(n, ex.Const)), None)
            stopped = {"maximum": -1, "minimum": 1}.get(name) if bound is not None and math.isfinite(bound) else None
            return (signs - {stopped}) if name in ("maximum", "minimum") else _BOTH if signs else signs
        case ex.Add(a, b) | ex.Select(_, a, b):
            return infinities(a) | infinities(b)
        case ex.Reduce("sum" | "amax" | "amin" | "mean" as name, _, body):
            # The max of a row is minus infinity only if the row is fully masked; `Mask.empty_rows` is about these.
            return infinities(body) - {{"amax": -1, "amin": 1}.get(name)}
    return frozenset()


_BOTH = frozenset({1, -1})
_LEARNED = 100.0
# Where int32 wraps around.
_WRAPS = 2.0**31


def _bounds(x: Expr, space: Space, learned: Container[int], most: float = math.inf) -> Bounds:
    """The (min, max) of `x`; a part that may reach `most` is unknown."""

    def of(x: Expr) -> Bounds:
        low, high = exactly(x)
        # Overflow may give inf or wrap around.
        known = not (math.isnan(low) or math.isnan(high)) and -most < low and high < most
        return (low, high) if known else UNBOUNDED

    def exactly(x: Expr) -> Bounds:
        match x:
            case ex.Const(value):
                return float(value), float(value)
            case ex.Index(value):
                return space.bounds(value)
            case ex.Scalar(leaf):
                return space.bounds(space.scalars[leaf]) if leaf in space.scalars else UNBOUNDED
            case ex.Load(leaf) | ex.Gather(leaf):
                return (-_LEARNED, _LEARNED) if leaf in learned else UNBOUNDED
            case ex.NonNegative() | ex.IsZero() | ex.Compare() | ex.Not() | ex.And() | ex.Or() | ex.Softmax():
                return 0.0, 1.0
            case ex.Add() | ex.Mul() | ex.Div() | ex.Unary() | ex.Binary():
                # Integer ends would be taken for ranges of integers.
                parts = [(float(low), float(high)) for low, high in map(of, ex.children(x))]
                return bounds_of(ex.name_of(x), *parts)
            case ex.Select(_, a, b):
                (low, high), (other_low, other_high) = of(a), of(b)
                return min(low, other_low), max(high, other_high)
            case ex.Cast(dtype, inner):
                return _held_in(dtype, of(inner))
            case ex.Contract(axes, a, b):
                times = math.prod(space.bounds(space.sizes[axis])[1] for axis in axes)
                low, high = bounds_of("mul", of(a), of(b))
                return min(0.0, times * low), max(0.0, times * high)
            case ex.Reduce("amax" | "amin" | "any" | "all", _, body):
                return of(body)
        return UNBOUNDED

    return of(x)


def _held_in(dtype: torch.dtype, x: Bounds) -> Bounds:
    if dtype.is_floating_point:
        most = torch.finfo(dtype).max
        return (x[0] if x[0] >= -most else -math.inf, x[1] if x[1] <= most else math.inf)
    # Integers of fewer than 32 bits wrap around below `_WRAPS`.
    return x if torch.iinfo(dtype).bits >= 32 and max(-x[0], x[1]) < _WRAPS else UNBOUNDED
