"""Algebra: functions that simplify element expressions while they build them.

Normal form: in sums, products, max, min and choices the operand with the matrix product comes first and a constant
last.

A rule holds for every finite number. 0 * x stays a product, but a choice of 1 and 0 times x becomes a choice of x and
0, because programs write masks so, unless x is a quotient or contains an infinite constant.

On scores (expressions with a matrix product) a rule may round differently from the program. Other expressions may be
compared, rounded to integers or cast later, so there a rule gives exactly torch's number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.expression.index import Space, simplify_index
from attn_fuse.expression.nodes import FALSE, TRUE, Const, Expr, Index, Select, has_product
from attn_fuse.expression.ranges import infinities
from attn_fuse.torch_internals import Mod


def ordered(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """The operands of a commutative operation in normal order; a choice of 1 and 0 comes after other parts."""
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
    return _through_select(add, a, b) or ex.Add(a, b)


def _multiple(a: Expr, b: Expr) -> Expr | None:
    """a + b where `b` and a term of `a` are multiples of the same scores, merged into one multiple; else None."""
    scores, n = _with_factor(b)
    match a:
        case ex.Add(x, y):
            if (first := _multiple(x, b)) is not None:
                return add(first, y)
            second = _multiple(y, b) if has_product(y) else None
            return None if second is None else add(x, second)
    other, m = _with_factor(a)
    # Infinities of opposite sign give NaN, which one multiple would not.
    return mul(scores, Const(m + n)) if scores == other and (m * n > 0 or not infinities(scores)) else None


def _with_factor(x: Expr) -> tuple[Expr, float]:
    match x:
        case ex.Mul(inner, Const(n)):
            scores, factor = _with_factor(inner)
            return scores, factor * n
    return x, 1


def mul(a: Expr, b: Expr) -> Expr:
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
        case (ex.Div(Const(1 | 1.0), x), y) | (y, ex.Div(Const(1 | 1.0), x)) if has_product(x) or has_product(y):
            return div(y, x)
        # Scores that are negated later, as for a softmin, are masked from above; a factor beyond -1 may overflow.
        case Select(cond, x, Const(fill)), Const(n) if has_product(x) and -1 <= n < 0:
            return select(cond, mul(x, b), Const(fill * n))
    return _through_select(mul, a, b) or ex.Mul(a, b)


def _may_be_dropped(x: Expr) -> bool:
    """Whether 0 * `x` is 0, judging by the constants in `x`; False for a constant or a quotient."""
    if isinstance(x, (Const, ex.Div)) or infinities(x):
        return False
    # The weights of a fully masked row are NaN.
    rows = (part.body for part in ex.walk(x) if isinstance(part, (ex.Softmax, ex.Reduce)))
    return not any(map(infinities, rows))


def div(a: Expr, b: Expr) -> Expr:
    """a / b, simplified; a product if `b` is a power of two, or a finite number and `a` has a matrix product."""
    match a, b:
        case Const(x), Const(y) if y != 0:
            return Const(x / y)
        case x, Const(y) if y != 0 and math.isfinite(y) and (_is_power_of_two(y) or has_product(x)):
            return mul(x, Const(1.0 / y))
    return _through_select(div, a, b) or ex.Div(a, b)


def _is_power_of_two(value: float) -> bool:
    return abs(math.frexp(value)[0]) == 0.5


def negative(x: Expr) -> Expr:
    return mul(Const(-1), x)


def unary(name: str, x: Expr, dtype: torch.dtype | None = None) -> Expr:
    """Function `name` of `x`, simplified. dtype: torch's for the function of a constant."""
    match name, x:
        case "exp", ex.Unary("log", inner) if has_product(inner):
            return inner
        case "reciprocal", _ if not isinstance(x, Const):
            return ex.Div(Const(1.0), x)
        case "detach", _ if not any(isinstance(e, (ex.Load, ex.Gather, ex.Score)) for e in ex.walk(x)):
            return x
        case _, Const():
            return _folded(name, dtype, x) or ex.Unary(name, x)
        case _, Select(cond, Const() as a, Const() as b):
            return select(cond, unary(name, a, dtype), unary(name, b, dtype))
    return ex.Unary(name, x)


def binary(name: str, a: Expr, b: Expr, dtype: torch.dtype | None = None) -> Expr:
    """Function `name` of `a` and `b`, simplified. dtype: torch's for the function of constants."""
    if isinstance(a, Const) and isinstance(b, Const):
        return _folded(name, dtype, a, b) or ex.Binary(name, a, b)
    # Max and min keep the order of their operands, which decides where the gradient goes at a tie.
    return ex.Binary(name, a, b)


def _folded(name: str, dtype: torch.dtype | None, *operands: Const) -> Const | None:
    """torch's result for constants; None if torch raises or gives NaN or, except for log, an infinity."""
    if dtype is None and any(isinstance(x.value, float) for x in operands):
        dtype = torch.float64
    try:
        value = FUNCTIONS[name].torch(*(torch.tensor(x.value, dtype=dtype) for x in operands)).item()
    except RuntimeError:
        return None
    return None if math.isnan(value) or (math.isinf(value) and name != "log") else Const(value)


def select(cond: Expr, a: Expr, b: Expr, space: Space | None = None) -> Expr:
    """`a` where `cond` holds, else `b`, simplified. space: needed to equate softmaxes over different symbols."""
    match cond:
        case Const(value):
            return a if value else b
        case _ if has_product(b) and not has_product(a):
            return select(logical_not(cond), b, a, space)
        case ex.Not(inner) if has_product(a) == has_product(b):
            return select(inner, b, a, space)
    match a, b:
        case ex.Softmax(), ex.Softmax() if space is not None and space.same_size(
            space.sizes[a.axis], space.sizes[b.axis]
        ):
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
        # A term added to part of the scores, as in place, is a bias that is 0 elsewhere.
        for apart in (_last_apart, _all_apart):
            (scores, term), (others, other) = apart(a, b), apart(b, a)
            if scores == others:
                return add(scores, select(cond, term, other))
    return Select(cond, a, b)


def _last_apart(x: Expr, beside: Expr) -> tuple[Expr, Expr]:
    """(scores, term) with `x` = scores + term; the term is 0 if `beside` is `x` plus a term."""
    match x, beside:
        case _, ex.Add(scores, _) if scores == x:
            return x, Const(0.0)
        case ex.Add(scores, term), _ if not has_product(term):
            return scores, term
    return x, Const(0.0)


def _all_apart(x: Expr, beside: Expr) -> tuple[Expr, Expr]:
    """(scores, terms) with `x` = scores + terms and no term left in the scores."""
    match x:
        case ex.Add(scores, term) if not has_product(term):
            inner, terms = _all_apart(scores, beside)
            return inner, add(terms, term)
    return x, Const(0.0)


def assuming(x: Expr, cond: Expr, space: Space) -> Expr:
    """`x` simplified where `cond` holds; unchanged unless `cond` is a `NonNegative`."""
    if not isinstance(cond, ex.NonNegative):
        return x
    known = cond.value

    def changed(part: Expr) -> Expr:
        match part:
            case ex.NonNegative(value) if space.is_nonnegative(value - known):
                return TRUE
            case ex.NonNegative(value) if space.is_nonnegative(-value - 1 - known):
                return FALSE
        return rebuilt(part, changed)

    return changed(x)


def _continues(cond: Expr, a: Expr, b: Expr) -> bool:
    """Whether the choice is `a` everywhere: `cond` is s >= 1 for a symbol s >= 0, and `b` is `a` at s = 0."""
    match cond, a, b:
        case ex.NonNegative(start), Index(x), Index(y):
            symbol = sympy.expand(start + 1)
            return bool(symbol.is_Symbol and symbol.is_nonnegative and x.subs(symbol, 0) == y)
    return False


def nonnegative(value: sympy.Expr, space: Space) -> Expr:
    """value >= 0, simplified to TRUE or FALSE where `space` proves it."""
    if space.is_nonnegative(value):
        return TRUE
    if space.is_negative(value):
        return FALSE
    return ex.NonNegative(sympy.expand(value))


def is_zero(value: sympy.Expr, space: Space) -> Expr:
    """value == 0, simplified to TRUE or FALSE where `space` proves it."""
    if space.is_zero(value):
        return TRUE
    if space.is_negative(value) or space.is_negative(-value):
        return FALSE
    return ex.IsZero(sympy.expand(value))


_FLIPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def compare(op: str, a: Expr, b: Expr, space: Space | None = None) -> Expr:
    """a op b, simplified. op: eq, ne, lt, le, gt or ge. space: needed to compare positions."""
    match a, b:
        case Const(x), Const(y):
            return Const(bool(getattr(operator, op)(x, y)))
        case Const(), _:
            return compare(_FLIPPED[op], b, a, space)
        case Select(cond, Const() as x, Const() as y), Const():
            return select(cond, compare(op, x, b), compare(op, y, b))
        case ex.Unary("abs", Index(x)), Const(c) if space is not None and _is_whole(c):
            return _compare_distance(op, x, int(c), space)
    left, right = _position(a), _position(b)
    if space is not None and left is not None and right is not None:
        return _compare_positions(op, left, right, space)
    if (
        isinstance(b, Const)
        and b.value in (0, 1)
        and isinstance(a, (ex.Compare, ex.NonNegative, ex.IsZero, ex.Not, ex.And, ex.Or))
    ):
        return select(a, compare(op, Const(1), b), compare(op, Const(0), b))
    return ex.Compare(op, a, b)


def _compare_positions(op: str, a: sympy.Expr, b: sympy.Expr, space: Space) -> Expr:
    match op:
        case "eq" | "ne":
            found = is_zero(a - b, space)
        case "ge" | "lt":
            found = nonnegative(a - b, space)
        case _:
            found = nonnegative(b - a, space)
    return logical_not(found) if op in ("ne", "lt", "gt") else found


def _compare_distance(op: str, x: sympy.Expr, limit: int, space: Space) -> Expr:
    """|x| op limit, as conditions on x."""
    if op in ("eq", "ne"):
        found = FALSE if limit < 0 else logical_or(is_zero(x - limit, space), is_zero(x + limit, space))
    else:
        most = limit if op in ("le", "gt") else limit - 1
        found = logical_and(nonnegative(most - x, space), nonnegative(most + x, space))
    return logical_not(found) if op in ("ne", "gt", "ge") else found


def logical_not(x: Expr) -> Expr:
    match x:
        case Const(value):
            return Const(not value)
        case ex.Not(inner):
            return inner
        case ex.NonNegative(value):
            return ex.NonNegative(sympy.expand(-value - 1))
        # True of NaN, too; the other comparisons and their opposites are both false for NaN.
        case ex.Compare("eq" | "ne" as op, a, b):
            return ex.Compare("ne" if op == "eq" else "eq", a, b)
        case ex.And(a, b):
            return ex.Or(logical_not(a), logical_not(b))
        case ex.Or(a, b):
            return ex.And(logical_not(a), logical_not(b))
    return ex.Not(x)


def logical_and(a: Expr, b: Expr) -> Expr:
    match a, b:
        case (Const(value), x) | (x, Const(value)):
            return x if value else FALSE
    return a if a == b else ex.And(a, b)


def logical_or(a: Expr, b: Expr) -> Expr:
    return logical_not(logical_and(logical_not(a), logical_not(b)))


def _through_select(op: Any, a: Expr, b: Expr) -> Expr | None:
    # A number and a choice of two numbers give a choice of two numbers.
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


def _is_whole(value: float) -> bool:
    return isinstance(value, (bool, int)) or (math.isfinite(value) and value == int(value))


def replaced(expr: Expr, old: Expr, new: Expr) -> Expr:
    """`expr` with each part equal to `old` replaced by `new`, simplified."""
    if expr == old:
        return new
    return rebuilt(expr, lambda child: replaced(child, old, new))


def substitute(expr: Expr, by: Mapping[sympy.Symbol, sympy.Expr], space: Space) -> Expr:
    """`expr` with the index symbols in `by` replaced, simplified."""
    known: dict[int, Expr] = {}

    def index(value: sympy.Expr) -> sympy.Expr:
        try:
            moved = value.xreplace(by)
        except AssertionError:
            # torch's Mod rejects negative numbers, which positions outside a tensor (never read) may be.
            moved = value.replace(Mod, sympy.Mod).xreplace(by)
        return simplify_index(moved, space)

    def changed(x: Expr) -> Expr:
        if id(x) not in known:
            known[id(x)] = ex.as_made(build(x), x)
        return known[id(x)]

    def build(x: Expr) -> Expr:
        match x:
            case ex.Load(leaf, indices):
                return ex.Load(leaf, tuple(map(index, indices)))
            case Index(value):
                return Index(index(value))
            case ex.NonNegative(value):
                return nonnegative(index(value), space)
            case ex.IsZero(value):
                return is_zero(index(value), space)
            case ex.Softmax(axis, body, at, dtype):
                return ex.Softmax(axis, changed(body), index(at), dtype)
            case ex.Compare(op, a, b):
                return compare(op, changed(a), changed(b), space)
        return rebuilt(x, changed)

    return changed(expr)


def rebuilt(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """`expr` with `change` applied to each child, simplified; it keeps the origin of `expr`."""
    parts = list(map(change, ex.children(expr)))
    build = _BUILT.get(type(expr))
    return ex.as_made(build(*parts) if build else ex.remade(expr, parts), expr)


_BUILT: dict[type[Expr], Callable[..., Expr]] = {
    Select: select, ex.Not: logical_not, ex.And: logical_and, ex.Or: logical_or, ex.Add: add, ex.Mul: mul, ex.Div: div,
}  # fmt: skip
