"""Algebra: element expressions that simplify as they are built, and are rebuilt from others.

A rule holds for every number that is not infinite or NaN. Products with an unknown 0 stay products; only a choice of 1
and 0 becomes a choice, since that is how programs write masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import sympy
import torch

from attn_fuse.expression import (
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
    Index,
    IsZero,
    Load,
    Mul,
    NonNegative,
    Not,
    Or,
    Scalar,
    Score,
    Select,
    Softmax,
    Unary,
    walk,
)
from attn_fuse.space import Space, simplify_index


def rounded(value: float, dtype: torch.dtype) -> bool | int | float:
    """The number that `value` becomes when stored in `dtype`."""
    if dtype == torch.bool:
        return bool(value)
    if not dtype.is_floating_point:
        return int(value)
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


def add(a: Expr, b: Expr) -> Expr:
    match a, b:
        case Const(x), Const(y):
            return Const(x + y)
        case (Const(0 | 0.0), x) | (x, Const(0 | 0.0)) if not isinstance(x, Const):
            return x
        case Index(x), Index(y):
            return Index(sympy.expand(x + y))
        case (Index(x), Const(c)) | (Const(c), Index(x)) if _is_whole(c):
            return Index(sympy.expand(x + int(c)))
        case Select(cond, x, y), Select(other, z, w) if cond == other:
            return select(cond, add(x, z), add(y, w))
    return _through_select(add, a, b) or Add(a, b)


def mul(a: Expr, b: Expr) -> Expr:
    match a, b:
        case Const(x), Const(y):
            return Const(x * y)
        case (Const(1 | 1.0), x) | (x, Const(1 | 1.0)) if not isinstance(x, Const):
            return x
        case (Index(x), Const(c)) | (Const(c), Index(x)) if _is_whole(c):
            return Index(sympy.expand(x * int(c)))
        case Select(cond, Const(x), Const(y)), Select(other, Const(z), Const(w)) if cond == other:
            return select(cond, Const(x * z), Const(y * w))
        case (Select(cond, Const(1 | 1.0), Const(0 | 0.0)), x) | (x, Select(cond, Const(1 | 1.0), Const(0 | 0.0))) if (
            not isinstance(x, Const)
        ):
            return select(cond, x, Const(0.0))
        case (Div(Const(1 | 1.0), x), y) | (y, Div(Const(1 | 1.0), x)) if not isinstance(y, Const):
            return div(y, x)
        case (Select(cond, Const(0 | 0.0), Const(1 | 1.0)), x) | (x, Select(cond, Const(0 | 0.0), Const(1 | 1.0))) if (
            not isinstance(x, Const)
        ):
            return select(cond, Const(0.0), x)
    return _through_select(mul, a, b) or Mul(a, b)


def div(a: Expr, b: Expr) -> Expr:
    match a, b:
        case Const(x), Const(y) if y != 0:
            return Const(x / y)
        case x, Const(y) if y != 0 and math.isfinite(y) and not isinstance(x, Const):
            return mul(x, Const(1.0 / y))
    return Div(a, b)


def negative(x: Expr) -> Expr:
    return mul(Const(-1), x)


def unary(name: str, x: Expr) -> Expr:
    if name == "exp" and isinstance(x, Unary) and x.name == "log":
        return x.x
    if name == "reciprocal" and not isinstance(x, Const):
        return Div(Const(1.0), x)
    if name == "detach" and not any(isinstance(e, (Load, Gather, Score)) for e in walk(x)):
        return x
    function = _FOLDED.get(name)
    if function is not None:
        match x:
            case Const(value):
                try:
                    return Const(function(float(value)))
                except (ValueError, OverflowError, ZeroDivisionError):
                    return Unary(name, x)
            case Select(cond, Const() as a, Const() as b):
                return select(cond, unary(name, a), unary(name, b))
    return Unary(name, x)


_FOLDED = {
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "exp": math.exp,
    "log": lambda x: math.log(x) if x != 0 else -math.inf,
    "tanh": math.tanh,
    "abs": abs,
}


def binary(name: str, a: Expr, b: Expr) -> Expr:
    if name == "pow" and isinstance(a, Const) and isinstance(b, Const) and a.value > 0:
        return Const(float(a.value) ** float(b.value))
    if isinstance(a, Const) and isinstance(b, Const) and name in ("maximum", "minimum"):
        return Const(max(a.value, b.value) if name == "maximum" else min(a.value, b.value))
    return Binary(name, a, b)


def cast(dtype: torch.dtype, x: Expr, from_dtype: torch.dtype) -> Expr:
    """x, held in `from_dtype`, converted to `dtype`."""
    if dtype == from_dtype:
        return x
    match x:
        case Const(value):
            return Const(rounded(value, dtype))
        case Select(cond, Const() as a, Const() as b):
            return select(cond, cast(dtype, a, from_dtype), cast(dtype, b, from_dtype))
        # Positions stay below 2**24, so these types hold them exactly.
        case Index() if dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
            return x
    if from_dtype == torch.bool:
        one, zero = Const(rounded(1, dtype)), Const(rounded(0, dtype))
        return select(x, one, zero)
    if dtype == torch.bool:
        return compare("ne", x, Const(0))
    return Cast(dtype, x)


def select(cond: Expr, a: Expr, b: Expr) -> Expr:
    match cond:
        case Const(value):
            return a if value else b
        case Not(inner):
            return select(inner, b, a)
    if a == b or _continues(cond, a, b):
        return a
    match a, b:
        case Const(True), Const(False):
            return cond
        case Const(False), Const(True):
            return logical_not(cond)
        case Select(inner, x, _), _ if inner == cond:
            return select(cond, x, b)
        case _, Select(inner, _, y) if inner == cond:
            return select(cond, a, y)
    return Select(cond, a, b)


def _continues(cond: Expr, a: Expr, b: Expr) -> bool:
    """Whether `b`, chosen at the single place before `a` begins, is what `a` would be there."""
    match cond, a, b:
        case NonNegative(start), Index(x), Index(y):
            symbol = sympy.expand(start + 1)
            return bool(symbol.is_Symbol and x.subs(symbol, 0) == y)
    return False


def nonnegative(value: sympy.Expr, space: Space) -> Expr:
    if space.is_nonnegative(value):
        return TRUE
    if space.is_negative(value):
        return FALSE
    return NonNegative(sympy.expand(value))


def is_zero(value: sympy.Expr, space: Space) -> Expr:
    if space.is_zero(value):
        return TRUE
    if space.is_negative(value) or space.is_negative(-value):
        return FALSE
    return IsZero(sympy.expand(value))


_FLIPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_PYTHON = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def compare(op: str, a: Expr, b: Expr, space: Space | None = None) -> Expr:
    match a, b:
        case Const(x), Const(y):
            return Const(bool(_PYTHON[op](x, y)))
        case Const(), _:
            return compare(_FLIPPED[op], b, a, space)
        case Select(cond, Const() as x, Const() as y), Const():
            return select(cond, compare(op, x, b), compare(op, y, b))
    left, right = _position(a), _position(b)
    if space is not None and left is not None and right is not None:
        return _compare_positions(op, left, right, space)
    if isinstance(b, Const) and b.value in (0, 1) and _is_boolean(a):
        return select(a, compare(op, Const(1), b), compare(op, Const(0), b))
    return Compare(op, a, b)


def _compare_positions(op: str, a: sympy.Expr, b: sympy.Expr, space: Space) -> Expr:
    match op:
        case "ge":
            return nonnegative(a - b, space)
        case "gt":
            return nonnegative(a - b - 1, space)
        case "le":
            return nonnegative(b - a, space)
        case "lt":
            return nonnegative(b - a - 1, space)
        case "eq":
            return is_zero(a - b, space)
        case _:
            return logical_not(is_zero(a - b, space))


def logical_not(x: Expr) -> Expr:
    match x:
        case Const(value):
            return Const(not value)
        case Not(inner):
            return inner
        case NonNegative(value):
            return NonNegative(sympy.expand(-value - 1))
        case And(a, b):
            return Or(logical_not(a), logical_not(b))
        case Or(a, b):
            return And(logical_not(a), logical_not(b))
    return Not(x)


def logical_and(a: Expr, b: Expr) -> Expr:
    match a, b:
        case (Const(value), x) | (x, Const(value)):
            return x if value else FALSE
    return a if a == b else And(a, b)


def logical_or(a: Expr, b: Expr) -> Expr:
    return logical_not(logical_and(logical_not(a), logical_not(b)))


def _through_select(op: Any, a: Expr, b: Expr) -> Expr | None:
    # A number applied to a choice between two numbers is a choice between two numbers.
    match a, b:
        case Select(cond, Const() as x, Const() as y), Const():
            return select(cond, op(x, b), op(y, b))
        case Const(), Select(cond, Const() as x, Const() as y):
            return select(cond, op(a, x), op(a, y))
    return None


def _position(x: Expr) -> sympy.Expr | None:
    match x:
        case Index(value):
            return value
        case Const(value) if _is_whole(value):
            return sympy.Integer(int(value))
    return None


def _is_boolean(x: Expr) -> bool:
    return isinstance(x, (Compare, NonNegative, IsZero, Not, And, Or))


def _is_whole(value: float) -> bool:
    return isinstance(value, (bool, int)) or (math.isfinite(value) and value == int(value))


def replaced(expr: Expr, old: Expr, new: Expr) -> Expr:
    """`expr` with `new` wherever `old` stands."""
    if expr == old:
        return new
    return rebuilt(expr, lambda child: replaced(child, old, new))


def substitute(expr: Expr, by: Mapping[sympy.Symbol, sympy.Expr], space: Space) -> Expr:
    """`expr` with index symbols replaced, and simplified again."""
    known: dict[int, Expr] = {}

    def index(value: sympy.Expr) -> sympy.Expr:
        return simplify_index(value.subs(by, simultaneous=True), space)

    def changed(x: Expr) -> Expr:
        if id(x) not in known:
            known[id(x)] = build(x)
        return known[id(x)]

    def build(x: Expr) -> Expr:
        match x:
            case Load(leaf, indices):
                return Load(leaf, tuple(map(index, indices)))
            case Gather(leaf, positions):
                return Gather(leaf, tuple(map(changed, positions)))
            case Index(value):
                return Index(index(value))
            case NonNegative(value):
                return nonnegative(index(value), space)
            case IsZero(value):
                return is_zero(index(value), space)
            case Softmax(axis, body, at, dtype):
                return Softmax(axis, changed(body), index(at), dtype)
            case Compare(op, a, b):
                return compare(op, changed(a), changed(b), space)
        return rebuilt(x, changed)

    return changed(expr)


def rebuilt(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """`expr` with each child replaced by what `change` gives for it, simplified again."""
    match expr:
        case Select(cond, a, b):
            return select(change(cond), change(a), change(b))
        case Not(x):
            return logical_not(change(x))
        case And(a, b):
            return logical_and(change(a), change(b))
        case Or(a, b):
            return logical_or(change(a), change(b))
        case Add(a, b):
            return add(change(a), change(b))
        case Mul(a, b):
            return mul(change(a), change(b))
        case Div(a, b):
            return div(change(a), change(b))
        case Gather(leaf, index):
            return Gather(leaf, tuple(map(change, index)))
        case Const() | Index() | Load() | Scalar() | Score() | NonNegative() | IsZero():
            return expr
    new: dict[str, Any] = {
        f.name: change(value)
        for f in fields(expr)  # type: ignore[arg-type]
        if isinstance(value := getattr(expr, f.name), Expr)
    }
    return replace(expr, **new)  # type: ignore[type-var]
