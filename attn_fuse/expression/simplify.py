"""Algebra: functions that simplify element expressions as they build them, or rebuild them from others.

Normal form: in sums, products, max, min and choices the operand with the matrix product stands first, and a constant
last, so that patterns match one order.

A rule holds for every finite number. 0 * x stays a product. A choice of 1 and 0 times x becomes a choice of x and 0,
since that is how programs write masks, unless x is a quotient or a constant makes it infinite.

A rule may round scores (expressions with a matrix product) otherwise than the program does. Any other expression may be
compared, rounded to integers or cast further up, so there a rule gives exactly the number that torch gives.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch

from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.expression.index import Space, simplify_index
from attn_fuse.expression.nodes import (
    FALSE,
    TRUE,
    Add,
    And,
    Binary,
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
    Reduce,
    Score,
    Select,
    Softmax,
    Unary,
    as_made,
    children,
    has_product,
    remade,
    walk,
)
from attn_fuse.expression.ranges import infinities
from attn_fuse.torch_internals import Mod


def ordered(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """The operands of an operation that commutes, in one order; a choice of 1 and 0 comes after other parts."""
    return (b, a) if _rank(b) < _rank(a) else (a, b)


def _rank(x: Expr) -> int:
    match x:
        case _ if has_product(x):
            return 0
        case Const():
            return 3
        case Select(_, Const(0 | 0.0), Const(1 | 1.0)) | Select(_, Const(1 | 1.0), Const(0 | 0.0)):
            return 2
    return 1


def add(a: Expr, b: Expr) -> Expr:
    """a + b, simplified."""
    a, b = ordered(a, b)
    match a, b:
        case Const(x), Const(y):
            return Const(x + y)
        case x, Const(0 | 0.0):
            return x
        case Index(x), Index(y):
            return Index(sympy.expand(x + y))
        case Index(x), Const(c) if _is_whole(c):
            return Index(sympy.expand(x + int(c)))
        case Select(cond, x, y), Select(other, z, w) if cond == other:
            return select(cond, add(x, z), add(y, w))
        case x, y if has_product(y) and (multiple := _multiple(x, y)) is not None:
            return multiple
    return _through_select(add, a, b) or Add(a, b)


def _multiple(a: Expr, b: Expr) -> Expr | None:
    """a + b where `b` and a term of `a` are multiples of the same scores, which become one multiple; else None."""
    scores, n = _with_factor(b)
    match a:
        case Add(x, y):
            if (first := _multiple(x, b)) is not None:
                return add(first, y)
            second = _multiple(y, b) if has_product(y) else None
            return None if second is None else add(x, second)
    other, m = _with_factor(a)
    # What is infinite may cancel to NaN, which one multiple would not.
    return mul(scores, Const(m + n)) if scores == other and (m * n > 0 or not infinities(scores)) else None


def _with_factor(x: Expr) -> tuple[Expr, float]:
    match x:
        case Mul(inner, Const(n)):
            scores, factor = _with_factor(inner)
            return scores, factor * n
    return x, 1


def mul(a: Expr, b: Expr) -> Expr:
    """a * b, simplified."""
    a, b = ordered(a, b)
    match a, b:
        case Const(x), Const(y):
            return Const(x * y)
        case x, Const(1 | 1.0):
            return x
        case Index(x), Const(c) if _is_whole(c):
            return Index(sympy.expand(x * int(c)))
        case Select(cond, Const(x), Const(y)), Select(other, Const(z), Const(w)) if cond == other:
            return select(cond, Const(x * z), Const(y * w))
        case x, Select(cond, Const(1 | 1.0), Const(0 | 0.0) as zero) if _may_be_dropped(x):
            return select(cond, x, zero)
        case x, Select(cond, Const(0 | 0.0) as zero, Const(1 | 1.0)) if _may_be_dropped(x):
            return select(cond, zero, x)
        case (Div(Const(1 | 1.0), x), y) | (y, Div(Const(1 | 1.0), x)) if has_product(x) or has_product(y):
            return div(y, x)
        # Scores are masked from above where they are negated afterwards, as for a softmin; a larger factor overflows.
        case Select(cond, x, Const(fill)), Const(n) if has_product(x) and -1 <= n < 0:
            return select(cond, mul(x, b), Const(fill * n))
    return _through_select(mul, a, b) or Mul(a, b)


def _may_be_dropped(x: Expr) -> bool:
    """Whether 0 * `x` is 0 as far as the constants in `x` tell; False for a constant or a quotient."""
    if isinstance(x, (Const, Div)) or infinities(x):
        return False
    # A row of nothing but minus infinity has weights that are no number.
    rows = (part.body for part in walk(x) if isinstance(part, (Softmax, Reduce)))
    return not any(map(infinities, rows))


def div(a: Expr, b: Expr) -> Expr:
    """a / b, simplified: a product where `b` is a power of two, or a finite number and `a` holds a matrix product."""
    match a, b:
        case Const(x), Const(y) if y != 0:
            return Const(x / y)
        case x, Const(y) if y != 0 and math.isfinite(y) and (_is_power_of_two(y) or has_product(x)):
            return mul(x, Const(1.0 / y))
    return _through_select(div, a, b) or Div(a, b)


def _is_power_of_two(value: float) -> bool:
    return abs(math.frexp(value)[0]) == 0.5


def negative(x: Expr) -> Expr:
    """-1 * x, simplified."""
    return mul(Const(-1), x)


def unary(name: str, x: Expr, dtype: torch.dtype | None = None) -> Expr:
    """Function `name` of `x`, simplified. dtype: the one in which torch computes the function of a constant."""
    match name, x:
        case "exp", Unary("log", inner) if has_product(inner):
            return inner
        case "reciprocal", _ if not isinstance(x, Const):
            return Div(Const(1.0), x)
        case "detach", _ if not any(isinstance(e, (Load, Gather, Score)) for e in walk(x)):
            return x
        case _, Const():
            return _folded(name, dtype, x) or Unary(name, x)
        case _, Select(cond, Const() as a, Const() as b):
            return select(cond, unary(name, a, dtype), unary(name, b, dtype))
    return Unary(name, x)


def binary(name: str, a: Expr, b: Expr, dtype: torch.dtype | None = None) -> Expr:
    """Function `name` of `a` and `b`, simplified. dtype: the one in which torch computes it for constants."""
    if isinstance(a, Const) and isinstance(b, Const):
        return _folded(name, dtype, a, b) or Binary(name, a, b)
    # Max and min keep the order of their operands, which says where the gradient goes at a tie.
    return Binary(name, a, b)


def _folded(name: str, dtype: torch.dtype | None, *operands: Const) -> Const | None:
    """torch's result for these constants; None where it raises, or gives NaN or, other than for log, an infinity."""
    if dtype is None and any(isinstance(x.value, float) for x in operands):
        dtype = torch.float64
    try:
        value = FUNCTIONS[name].torch(*(torch.tensor(x.value, dtype=dtype) for x in operands)).item()
    except RuntimeError:
        return None
    return None if math.isnan(value) or (math.isinf(value) and name != "log") else Const(value)


def select(cond: Expr, a: Expr, b: Expr, space: Space | None = None) -> Expr:
    """`a` where `cond` holds, else `b`, simplified. space: needed to see that softmaxes differ only in axis names."""
    match cond:
        case Const(value):
            return a if value else b
        case _ if has_product(b) and not has_product(a):
            return select(logical_not(cond), b, a, space)
        case Not(inner) if has_product(a) == has_product(b):
            return select(inner, b, a, space)
    match a, b:
        case Softmax(), Softmax() if space is not None and space.same_size(space.sizes[a.axis], space.sizes[b.axis]):
            if a == replace(b, axis=a.axis, body=substitute(b.body, {b.axis: a.axis}, space)):
                return a
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
        case Select(inner, x, y), _ if y == b:
            return select(logical_and(cond, inner), x, b)
    if has_product(a) and has_product(b) and not has_product(cond):
        # What is added to a part of the scores alone, as in place, is a bias that is 0 elsewhere.
        for apart in (_last_apart, _all_apart):
            (scores, term), (others, other) = apart(a, b), apart(b, a)
            if scores == others:
                return add(scores, select(cond, term, other))
    return Select(cond, a, b)


def _last_apart(x: Expr, beside: Expr) -> tuple[Expr, Expr]:
    """(scores, term) with `x` = scores + term; the term is 0 where `beside` is `x` and a term."""
    match x, beside:
        case _, Add(scores, _) if scores == x:
            return x, Const(0.0)
        case Add(scores, term), _ if not has_product(term):
            return scores, term
    return x, Const(0.0)


def _all_apart(x: Expr, beside: Expr) -> tuple[Expr, Expr]:
    """(scores, terms) with `x` = scores + terms, and no term left in the scores."""
    match x:
        case Add(scores, term) if not has_product(term):
            inner, terms = _all_apart(scores, beside)
            return inner, add(terms, term)
    return x, Const(0.0)


def assuming(x: Expr, cond: Expr, space: Space) -> Expr:
    """`x` simplified under the assumption that `cond` holds; unchanged unless `cond` is a `NonNegative`."""
    if not isinstance(cond, NonNegative):
        return x
    known = cond.value

    def changed(part: Expr) -> Expr:
        match part:
            case NonNegative(value) if space.is_nonnegative(value - known):
                return TRUE
            case NonNegative(value) if space.is_nonnegative(-value - 1 - known):
                return FALSE
        return rebuilt(part, changed)

    return changed(x)


def _continues(cond: Expr, a: Expr, b: Expr) -> bool:
    """Whether `a` holds everywhere: `cond` is s >= 1 for a symbol s that is never negative, and `b` is `a` at s = 0."""
    match cond, a, b:
        case NonNegative(start), Index(x), Index(y):
            symbol = sympy.expand(start + 1)
            return bool(symbol.is_Symbol and symbol.is_nonnegative and x.subs(symbol, 0) == y)
    return False


def nonnegative(value: sympy.Expr, space: Space) -> Expr:
    """Whether `value` >= 0, as an expression: TRUE or FALSE where `space` proves it."""
    if space.is_nonnegative(value):
        return TRUE
    if space.is_negative(value):
        return FALSE
    return NonNegative(sympy.expand(value))


def is_zero(value: sympy.Expr, space: Space) -> Expr:
    """Whether `value` is 0, as an expression: TRUE or FALSE where `space` proves it."""
    if space.is_zero(value):
        return TRUE
    if space.is_negative(value) or space.is_negative(-value):
        return FALSE
    return IsZero(sympy.expand(value))


_FLIPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def compare(op: str, a: Expr, b: Expr, space: Space | None = None) -> Expr:
    """a op b, simplified. op: eq, ne, lt, le, gt or ge. space: needed to compare positions as positions."""
    match a, b:
        case Const(x), Const(y):
            return Const(bool(getattr(operator, op)(x, y)))
        case Const(), _:
            return compare(_FLIPPED[op], b, a, space)
        case Select(cond, Const() as x, Const() as y), Const():
            return select(cond, compare(op, x, b), compare(op, y, b))
        case Unary("abs", Index(x)), Const(c) if space is not None and _is_whole(c):
            return _compare_distance(op, x, int(c), space)
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


def _compare_distance(op: str, x: sympy.Expr, limit: int, space: Space) -> Expr:
    """|x| op limit, as conditions on x: a window is a band."""

    def within(most: int) -> Expr:
        return logical_and(nonnegative(most - x, space), nonnegative(most + x, space))

    match op:
        case "le":
            return within(limit)
        case "lt":
            return within(limit - 1)
        case "gt":
            return logical_not(within(limit))
        case "ge":
            return logical_not(within(limit - 1))
    at = FALSE if limit < 0 else logical_or(is_zero(x - limit, space), is_zero(x + limit, space))
    return at if op == "eq" else logical_not(at)


def logical_not(x: Expr) -> Expr:
    """not x, simplified."""
    match x:
        case Const(value):
            return Const(not value)
        case Not(inner):
            return inner
        case NonNegative(value):
            return NonNegative(sympy.expand(-value - 1))
        # Of NaN, too; of the other comparisons NaN makes both false.
        case Compare("eq" | "ne" as op, a, b):
            return Compare("ne" if op == "eq" else "eq", a, b)
        case And(a, b):
            return Or(logical_not(a), logical_not(b))
        case Or(a, b):
            return And(logical_not(a), logical_not(b))
    return Not(x)


def logical_and(a: Expr, b: Expr) -> Expr:
    """a and b, simplified."""
    match a, b:
        case (Const(value), x) | (x, Const(value)):
            return x if value else FALSE
    return a if a == b else And(a, b)


def logical_or(a: Expr, b: Expr) -> Expr:
    """a or b, simplified."""
    return logical_not(logical_and(logical_not(a), logical_not(b)))


def _through_select(op: Any, a: Expr, b: Expr) -> Expr | None:
    # An operation on a number and a choice of two numbers is a choice of two numbers.
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
    """`expr` with each part that equals `old` replaced by `new`, simplified again."""
    if expr == old:
        return new
    return rebuilt(expr, lambda child: replaced(child, old, new))


def substitute(expr: Expr, by: Mapping[sympy.Symbol, sympy.Expr], space: Space) -> Expr:
    """`expr` with each index symbol that `by` names replaced by its expression, simplified again."""
    known: dict[int, Expr] = {}

    def index(value: sympy.Expr) -> sympy.Expr:
        try:
            moved = value.xreplace(by)
        except AssertionError:
            # torch's Mod takes no number below 0, which a position outside the tensor, never read, can be.
            moved = value.replace(Mod, sympy.Mod).xreplace(by)
        return simplify_index(moved, space)

    def changed(x: Expr) -> Expr:
        if id(x) not in known:
            known[id(x)] = as_made(build(x), x)
        return known[id(x)]

    def build(x: Expr) -> Expr:
        match x:
            case Load(leaf, indices):
                return Load(leaf, tuple(map(index, indices)))
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
    """`expr` with `change` applied to each child, simplified again; with the origin of `expr`."""
    return as_made(_rebuilt(expr, change), expr)


def _rebuilt(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    parts = list(map(change, children(expr)))
    if (build := _BUILT.get(type(expr))) is not None:
        return build(*parts)
    return remade(expr, parts) if parts else expr


_BUILT: dict[type[Expr], Callable[..., Expr]] = {
    Select: select, Not: logical_not, And: logical_and, Or: logical_or, Add: add, Mul: mul, Div: div,
}  # fmt: skip
