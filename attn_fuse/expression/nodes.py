"""Element expressions: trees over index symbols that say what one element of a tensor is.

    scores[b, h, i, j]  =  0.25 * Contract_e(Load(q, b, h, i, e) * Load(k, b, h, j, e))

The lift and the kernels speak this one language, and differ only in how they name positions. The lift writes them in
SymPy over integer index symbols, in `Index`, `Load`, `NonNegative` and `IsZero`. A score program (`kernels.score`)
writes them as arithmetic on `Position`, with `Input`, `Number`, `Gather` and `Compare`.

Patterns match on the classes. The functions of `simplify` (`add`, `mul`, `select`, ...) simplify what they build;
Python's operators build a node as it stands. Both put a constant last in sums and products, so that a pattern matches
one order of operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch


class Expr:
    """Base of the element expressions. `a + b`, `-a` and their like build nodes, and numbers become `Const`."""

    __slots__ = ()

    def __add__(self, other: Expr | float) -> Expr:
        return Add(*constant_last(self, as_expr(other)))

    def __radd__(self, other: float) -> Expr:
        return self + other

    def __sub__(self, other: Expr | float) -> Expr:
        return Binary("sub", self, as_expr(other))

    def __rsub__(self, other: float) -> Expr:
        return Binary("sub", Const(other), self)

    def __mul__(self, other: Expr | float) -> Expr:
        return Mul(*constant_last(self, as_expr(other)))

    def __rmul__(self, other: float) -> Expr:
        return self * other

    def __truediv__(self, other: Expr | float) -> Expr:
        return Div(self, as_expr(other))

    def __rtruediv__(self, other: float) -> Expr:
        return Div(Const(other), self)

    def __pow__(self, other: Expr | float) -> Expr:
        return Binary("pow", self, as_expr(other))

    def __neg__(self) -> Expr:
        return Unary("neg", self)


@dataclass(frozen=True)
class Const(Expr):
    """A number or Boolean that is known when compiling."""

    value: bool | int | float


@dataclass(frozen=True)
class Index(Expr):
    """The integer value of an index expression, such as an element of `arange`."""

    value: sympy.Expr


@dataclass(frozen=True)
class Load(Expr):
    """One element of leaf number `leaf`. index: its position along each dimension."""

    leaf: int
    index: tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class Scalar(Expr):
    """Leaf number `leaf`, a Python scalar that is known only when the program runs."""

    leaf: int


@dataclass(frozen=True)
class Position(Expr):
    """The position along one dimension of the scores: b (batch), h (query head), i (query) or j (key); int64."""

    name: str


@dataclass(frozen=True)
class Number(Expr):
    """Entry `number` of the integers that a score program is called with."""

    number: int


@dataclass(frozen=True)
class Input(Expr):
    """The element of tensor `leaf` of a score program, [B|1, H|1, Lq|1, Lk|1], at the position of the score."""

    leaf: int


@dataclass(frozen=True)
class Diagonal(Expr):
    """A part that depends on j - i alone, which `chunked.hoisted` takes out and computes once as tensor `leaf`."""

    leaf: int


@dataclass(frozen=True)
class Given(Expr):
    """Argument `number` of a gradient rule: 0 is the gradient of the result, 1 the result, 2 the first operand."""

    number: int


@dataclass(frozen=True)
class Cast(Expr):
    """`x` converted to `dtype`, narrower or wider."""

    dtype: torch.dtype
    x: Expr


@dataclass(frozen=True)
class Add(Expr):
    """a + b"""

    a: Expr
    b: Expr


@dataclass(frozen=True)
class Mul(Expr):
    """a * b"""

    a: Expr
    b: Expr


@dataclass(frozen=True)
class Div(Expr):
    """a / b"""

    a: Expr
    b: Expr


@dataclass(frozen=True)
class Unary(Expr):
    """An element-wise function of one operand, by its name in `functions.UNARY`: exp, tanh, sqrt, ..."""

    name: str
    x: Expr


@dataclass(frozen=True)
class Binary(Expr):
    """An element-wise function of two operands, by its name in `functions.BINARY`: maximum, pow, ..."""

    name: str
    a: Expr
    b: Expr


@dataclass(frozen=True)
class NonNegative(Expr):
    """Whether an index expression is >= 0; <, <=, > and >= between positions all become this."""

    value: sympy.Expr


@dataclass(frozen=True)
class IsZero(Expr):
    """Whether an index expression is 0; two positions are equal where their difference is."""

    value: sympy.Expr


@dataclass(frozen=True)
class Compare(Expr):
    """A comparison of two values. op: eq, ne, lt, le, gt or ge."""

    op: str
    a: Expr
    b: Expr


@dataclass(frozen=True)
class Not(Expr):
    """not x"""

    x: Expr


@dataclass(frozen=True)
class And(Expr):
    """a and b"""

    a: Expr
    b: Expr


@dataclass(frozen=True)
class Or(Expr):
    """a or b"""

    a: Expr
    b: Expr


@dataclass(frozen=True)
class Select(Expr):
    """`a` where `cond` holds, else `b`."""

    cond: Expr
    a: Expr
    b: Expr


@dataclass(frozen=True)
class Gather(Expr):
    """One element of leaf number `leaf`. index: its position along each dimension, itself read or computed."""

    leaf: int
    index: tuple[Expr, ...]


@dataclass(frozen=True)
class Score(Expr):
    """The product of query and key, held in `dtype`, in an expression over it."""

    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Contract(Expr):
    """Sum over `axes`, each in [0, size), of a * b: an element of a matrix product. dtype: that of the product."""

    axes: tuple[sympy.Symbol, ...]
    a: Expr
    b: Expr
    dtype: torch.dtype


@dataclass(frozen=True)
class Reduce(Expr):
    """`body` reduced over `axis`. name: ATen's for the reduction: sum, amax, amin, any, all."""

    name: str
    axis: sympy.Symbol
    body: Expr


@dataclass(frozen=True)
class Softmax(Expr):
    """Softmax of `body` over `axis`, read at index `at`. dtype: that of its computation and of its result."""

    axis: sympy.Symbol
    body: Expr
    at: sympy.Expr
    dtype: torch.dtype


@dataclass(frozen=True)
class Dropout(Expr):
    """x, zeroed with probability p, else scaled by 1 / (1 - p). p: a `Const` or a `Scalar`."""

    x: Expr
    p: Expr


TRUE, FALSE = Const(True), Const(False)


def as_expr(x: Expr | float) -> Expr:
    """`x` as an expression: a number becomes a `Const`."""
    return x if isinstance(x, Expr) else Const(x)


def constant_last(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """The operands of a sum or product in their order: the other way round where only `a` is a `Const`."""
    return (b, a) if isinstance(a, Const) and not isinstance(b, Const) else (a, b)


def name_of(expr: Expr) -> str:
    """The name of the operation at the root of `expr`, torch's for arithmetic and functions; "" where it has none."""
    match expr:
        case Unary(name) | Binary(name) | Compare(name):
            return name
    return _NAMES.get(type(expr), "")


_NAMES: dict[type[Expr], str] = {
    Add: "add", Mul: "mul", Div: "div", Select: "where", Not: "not", And: "and", Or: "or", Cast: "cast",
    Gather: "gather",
}  # fmt: skip


def children(expr: Expr) -> tuple[Expr, ...]:
    """The element expressions that `expr` is made of directly, in the order of its fields."""
    if isinstance(expr, Gather):
        return expr.index
    return tuple(value for name in _fields(type(expr)) if isinstance(value := getattr(expr, name), Expr))


def remade(expr: Expr, parts: Sequence[Expr]) -> Expr:
    """`expr` with `parts` in the place of its children, as many as these, not simplified."""
    if isinstance(expr, Gather):
        return Gather(expr.leaf, tuple(parts))
    own, given = (getattr(expr, name) for name in _fields(type(expr))), iter(parts)
    return type(expr)(*(next(given) if isinstance(value, Expr) else value for value in own))


def _fields(kind: type[Expr]) -> tuple[str, ...]:
    names: tuple[str, ...] = vars(kind)["__match_args__"]
    return names


def distinct(expr: Expr | None, ends: Callable[[Expr], bool] = lambda node: False) -> Iterator[Expr]:
    """Every node of `expr` once, by identity, children first; the walk does not go below nodes where `ends` holds."""
    seen: set[int] = set()

    def below(node: Expr) -> Iterator[Expr]:
        if id(node) not in seen:
            seen.add(id(node))
            for child in () if ends(node) else children(node):
                yield from below(child)
            yield node

    if expr is not None:
        yield from below(expr)


def interned(expr: Expr, known: dict[Any, Expr]) -> Expr:
    """`expr` with equal parts as one object, shared with all expressions interned by the same `known`.

    Two parts are equal where they apply the same operation to the same objects; True, 1 and 1.0 are three constants.
    """
    if ("object", id(expr)) in known:
        return known["object", id(expr)]
    parts = [interned(part, known) for part in children(expr)]
    values = [getattr(expr, name) for name in _fields(type(expr)) if not (isinstance(expr, Gather) and name == "index")]
    own = (repr(value) for value in values if not isinstance(value, Expr))
    made = known.setdefault((type(expr), *own, *map(id, parts)), remade(expr, parts))
    # Python may give the id of a dead object to a new one, so the object is kept alive.
    known["kept", id(expr)] = expr
    known["object", id(expr)] = made
    return made


def walk(expr: Expr) -> Iterator[Expr]:
    """`expr` and every node beneath it, parents first; a shared node comes up each time."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def positions(expr: Expr) -> tuple[sympy.Expr, ...]:
    """The index expressions that `expr` itself holds, without those of its children."""
    match expr:
        case Load(_, index):
            return index
        case Index(value) | NonNegative(value) | IsZero(value):
            return (value,)
        case Softmax(at=at):
            return (at,)
    return ()


def index_symbols(expr: Expr) -> set[sympy.Symbol]:
    """The index symbols that `expr` depends on, without the axes that it sums, reduces or takes a softmax over."""
    own: tuple[sympy.Symbol, ...] = ()
    match expr:
        case Contract(axes=axes):
            own = axes
        case Reduce(axis=axis) | Softmax(axis=axis):
            own = (axis,)
    beneath = set().union(*map(index_symbols, children(expr))) - {*own}
    return beneath.union(*(place.free_symbols for place in positions(expr)))


def has_product(expr: Expr) -> bool:
    """Whether the product of query and key, or any other matrix product, is anywhere in `expr`."""
    found = vars(expr).get("_has_product")
    if found is None:
        found = isinstance(expr, (Contract, Score)) or any(map(has_product, children(expr)))
        vars(expr)["_has_product"] = found
    return found


def size(expr: Expr) -> int:
    """The number of nodes that `walk` gives, so that a shared node counts each time."""
    found = vars(expr).get("_size")
    if found is None:
        found = 1 + sum(map(size, children(expr)))
        vars(expr)["_size"] = found
    return found


def mark(expr: Expr, origin: Any) -> None:
    """Record that operation `origin` made `expr`, unless one is recorded. `Const` and `Index` have no origin."""
    if not isinstance(expr, (Const, Index)):
        vars(expr).setdefault("_origin", origin)


def origin_of(expr: Expr) -> Any:
    """The operation that made `expr`, else the first part of it that has an origin; None where none has."""
    return next((vars(part)["_origin"] for part in walk(expr) if "_origin" in vars(part)), None)


def as_made(new: Expr, old: Expr) -> Expr:
    """`new`, which replaces `old`, with the origin of `old` unless it has its own."""
    if new is not old and "_origin" in vars(old):
        mark(new, vars(old)["_origin"])
    return new


def terms(expr: Expr) -> Iterator[Expr]:
    """The terms whose sum is `expr`, in order."""
    match expr:
        case Add(a, b):
            yield from terms(a)
            yield from terms(b)
        case _:
            yield expr
