"""Bounds: the min and max of an element expression, by interval arithmetic.

Parameters in training are assumed to lie in [-100, 100]; other tensors that the program reads may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import TypeAlias

import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import FUNCTIONS, bounds_of
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr

Bounds: TypeAlias = tuple[float, float]


def stays_within(
    x: Expr, limit: float, space: Space, learned: Container[int], dtypes: Iterable[torch.dtype] = ()
) -> bool:
    """Whether -limit < `x` < limit for every index of `space`, NaN aside; False where that is not proved.

    learned: the leaves whose elements lie in [-100, 100]. dtypes: those that the program computes in; what one of them
    cannot hold counts as unbounded, and so does what int32 cannot. A symbolic size is assumed to be at most 2**24.
    """
    held = min((torch.finfo(dtype).max for dtype in dtypes if dtype.is_floating_point), default=math.inf)
    low, high = _Bounder(min(held, _WRAPS), space, learned).of(x)
    return -limit < low and high < limit


def least(x: Expr, space: Space, learned: Container[int]) -> float:
    """A lower bound of `x`, which may be a huge number; minus infinity where none is known."""
    return _Bounder(math.inf, space, learned).of(x)[0]


def largest_factor(x: Expr, space: Space, learned: Container[int]) -> float:
    """The max magnitude of `x`, a factor of the scores; infinity where nothing is known of it.

    A divisor in training is assumed to be 0.01 or more.
    """
    match x:
        case ex.Mul(a, b):
            return largest_factor(a, space, learned) * largest_factor(b, space, learned)
        case ex.Div(a, b):
            divisor = smallest_divisor(b, space, learned)
            return largest_factor(a, space, learned) / divisor if divisor else math.inf
        case ex.Cast(dtype, a) if dtype.is_floating_point:
            return largest_factor(a, space, learned)
    low, high = _Bounder(math.inf, space, learned).of(x)
    return max(-low, high)


def smallest_divisor(x: Expr, space: Space, learned: Container[int]) -> float:
    """The min magnitude of `x`, a divisor of the scores; 0 where nothing is known of it."""
    match x:
        case ex.Load(leaf) | ex.Gather(leaf) if leaf in learned:
            return 1 / _LEARNED
        case ex.Mul(a, b):
            return smallest_divisor(a, space, learned) * smallest_divisor(b, space, learned)
        case ex.Cast(dtype, a) if dtype.is_floating_point:
            return smallest_divisor(a, space, learned)
        case ex.Unary("sqrt", a):
            return math.sqrt(smallest_divisor(a, space, learned))
    low, high = _Bounder(math.inf, space, learned).of(x)
    return max(0.0, low, -high)


def infinities(x: Expr) -> frozenset[int]:
    """The signs (1, -1) of the infinities that `x` may take by infinite constants in it, such as a mask's fill."""
    return _infinities(x, {})


def may_be_no_number(x: Expr) -> bool:
    """Whether constants in `x` may make a part of it NaN, as in infinity times a possible 0, or inf - inf."""
    known: dict[int, frozenset[int]] = {}
    return any(_is_no_number(part, known) for part in ex.walk(x))


def _is_no_number(x: Expr, known: dict[int, frozenset[int]]) -> bool:
    match x:
        case ex.Const(value):
            return math.isnan(value)
        case ex.Mul(a, b):
            return any(_infinities(m, known) and not _is_number_but_0(n) for m, n in ((a, b), (b, a)))
        case ex.Div(a, b):
            return bool(_infinities(b, known))
        case ex.Add(a, b):
            return len(_infinities(a, known) | _infinities(b, known)) == 2
        case ex.Unary(name, inner):
            row, signs = FUNCTIONS[name], _infinities(inner, known)
            return bool(signs if row.infinite is None else signs & row.undefined)
        case ex.Binary(name, a, b):
            return name not in ("maximum", "minimum") and bool(_infinities(a, known) | _infinities(b, known))
    return False


def _is_number_but_0(x: Expr) -> bool:
    return isinstance(x, ex.Const) and x.value != 0 and math.isfinite(x.value)


def _infinities(x: Expr, known: dict[int, frozenset[int]]) -> frozenset[int]:
    # Keyed by identity: to hash by value walks through all of an expression, for each of its parts.
    if id(x) not in known:
        known[id(x)] = _signs(x, known)
    return known[id(x)]


def _signs(x: Expr, known: dict[int, frozenset[int]]) -> frozenset[int]:
    match x:
        case ex.Const(value):
            return frozenset({1 if value > 0 else -1}) if math.isinf(value) else frozenset()
        case ex.Unary(name, inner) if signs := _infinities(inner, known):
            infinite = FUNCTIONS[name].infinite
            return _BOTH if infinite is None else infinite(signs)
        case ex.Cast(_, inner):
            return _infinities(inner, known)
        case ex.Mul(a, b) if _infinities(a, known) and a == b:
            return frozenset({1})
        case ex.Mul(a, b) | ex.Div(a, b):
            # A factor that is read from memory is assumed to be positive.
            signs = _infinities(a, known) | _infinities(b, known)
            return _negated(signs) if any(isinstance(n, ex.Const) and n.value < 0 for n in (a, b)) else signs
        case ex.Binary(name, a, b):
            signs = _infinities(a, known) | _infinities(b, known)
            bound = next((n.value for n in (a, b) if isinstance(n, ex.Const)), None)
            stopped = {"maximum": -1, "minimum": 1}.get(name) if bound is not None and math.isfinite(bound) else None
            return (signs - {stopped}) if name in ("maximum", "minimum") else _BOTH if signs else signs
        case ex.Add(a, b) | ex.Select(_, a, b):
            return _infinities(a, known) | _infinities(b, known)
        case ex.Reduce("sum" | "amax" | "amin" | "mean" as name, _, body):
            # The max of a row is minus infinity only where the row is fully masked, which is left aside here.
            return _infinities(body, known) - {{"amax": -1, "amin": 1}.get(name)}
    return frozenset()


def _negated(signs: frozenset[int]) -> frozenset[int]:
    return frozenset(-sign for sign in signs)


_BOTH = frozenset({1, -1})
_LEARNED = 100.0
# Where int32 wraps around.
_WRAPS = 2.0**31
_ANY: Bounds = (-math.inf, math.inf)
_TRUTH: Bounds = (0.0, 1.0)


class _Bounder:
    def __init__(self, most: float, space: Space, learned: Container[int]) -> None:
        self.most = most
        self.space = space
        self.learned = learned

    def of(self, x: Expr) -> Bounds:
        low, high = self._of(x)
        # Overflow may give inf or wrap around; we treat both as unknown.
        known = not (math.isnan(low) or math.isnan(high)) and -self.most < low and high < self.most
        return (low, high) if known else _ANY

    def _of(self, x: Expr) -> Bounds:
        match x:
            case ex.Const(value):
                return float(value), float(value)
            case ex.Index(value):
                return self.space.bounds(value)
            case ex.Scalar(leaf):
                return self.space.bounds_of_scalar(leaf)
            case ex.Load(leaf) | ex.Gather(leaf):
                return (-_LEARNED, _LEARNED) if leaf in self.learned else _ANY
            case ex.NonNegative() | ex.IsZero() | ex.Compare() | ex.Not() | ex.And() | ex.Or() | ex.Softmax():
                return _TRUTH
            case ex.Add() | ex.Mul() | ex.Div() | ex.Unary() | ex.Binary():
                # As floats, whose functions may give what those of integers cannot.
                parts = [(float(low), float(high)) for low, high in map(self.of, ex.children(x))]
                return bounds_of(ex.name_of(x), *parts)
            case ex.Select(_, a, b):
                (low, high), (other_low, other_high) = self.of(a), self.of(b)
                return min(low, other_low), max(high, other_high)
            case ex.Cast(dtype, inner):
                return _held_in(dtype, self.of(inner))
            case ex.Contract(axes, a, b):
                times = math.prod(self.space.longest(self.space.sizes[axis]) for axis in axes)
                low, high = bounds_of("mul", self.of(a), self.of(b))
                return min(0.0, times * low), max(0.0, times * high)
            case ex.Reduce("amax" | "amin" | "any" | "all", _, body):
                return self.of(body)
        return _ANY


def _held_in(dtype: torch.dtype, x: Bounds) -> Bounds:
    if dtype.is_floating_point:
        most = torch.finfo(dtype).max
        return (x[0] if x[0] >= -most else -math.inf, x[1] if x[1] <= most else math.inf)
    # An integer of fewer than 32 bits wraps around below `_WRAPS`.
    return x if torch.iinfo(dtype).bits >= 32 and max(-x[0], x[1]) < _WRAPS else _ANY
