"""Element expressions: what one element of a tensor is, as a tree over index symbols.

    scores[b, h, i, j]  =  0.25 * Contract_e(Load(q, b, h, i, e) * Load(k, b, h, j, e))

The classes are what patterns match on; the functions of `algebra` with like names simplify as they build. Index
arithmetic (which element is loaded, which comparison holds) is SymPy over integer symbols that have a range, kept by
`space.Space`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import sympy
import torch


class Expr:
    """Base of the element expressions."""

    __slots__ = ()


@dataclass(frozen=True)
class Const(Expr):
    value: bool | int | float


@dataclass(frozen=True)
class Index(Expr):
    """The integer value of an index expression, as `arange` gives it."""

    value: sympy.Expr


@dataclass(frozen=True)
class Load(Expr):
    """One element of leaf number `leaf`; one index a dimension."""

    leaf: int
    index: tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class Scalar(Expr):
    """A number known only when the program runs: leaf number `leaf`, a Python scalar."""

    leaf: int


@dataclass(frozen=True)
class Cast(Expr):
    """Conversion to a dtype that may round or widen."""

    dtype: torch.dtype
    x: Expr


@dataclass(frozen=True)
class Add(Expr):
    a: Expr
    b: Expr


@dataclass(frozen=True)
class Mul(Expr):
    a: Expr
    b: Expr


@dataclass(frozen=True)
class Div(Expr):
    a: Expr
    b: Expr


@dataclass(frozen=True)
class Unary(Expr):
    """An element-wise function of one argument by its ATen name: exp, tanh, sqrt, ..."""

    name: str
    x: Expr


@dataclass(frozen=True)
class Binary(Expr):
    """An element-wise function of two arguments by its ATen name: maximum, pow, ..."""

    name: str
    a: Expr
    b: Expr


@dataclass(frozen=True)
class NonNegative(Expr):
    """True where an index expression is >= 0: every comparison of positions ends here."""

    value: sympy.Expr


@dataclass(frozen=True)
class IsZero(Expr):
    """True where an index expression is 0: two positions are equal."""

    value: sympy.Expr


@dataclass(frozen=True)
class Compare(Expr):
    """A comparison of values: `op` is eq, ne, lt, le, gt or ge."""

    op: str
    a: Expr
    b: Expr


@dataclass(frozen=True)
class Not(Expr):
    x: Expr


@dataclass(frozen=True)
class And(Expr):
    a: Expr
    b: Expr


@dataclass(frozen=True)
class Or(Expr):
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
    """One element of leaf number `leaf`, at positions that are themselves read or computed; one a dimension."""

    leaf: int
    index: tuple[Expr, ...]


@dataclass(frozen=True)
class Score(Expr):
    """The product of query and key, held in `dtype`, where an expression says what is done with it."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Contract(Expr):
    """Sum over `axes`, each in [0, size), of a * b: an element of a matrix product. `dtype` is the product's."""

    axes: tuple[sympy.Symbol, ...]
    a: Expr
    b: Expr
    dtype: torch.dtype


@dataclass(frozen=True)
class Reduce(Expr):
    """`body` reduced over `axis` by an operation with its ATen name: sum, amax, amin, any, all."""

    name: str
    axis: sympy.Symbol
    body: Expr


@dataclass(frozen=True)
class Softmax(Expr):
    """Softmax of `body` over `axis`, read at index `at`. `dtype` is the one that it is computed and given in."""

    axis: sympy.Symbol
    body: Expr
    at: sympy.Expr
    dtype: torch.dtype


@dataclass(frozen=True)
class Dropout(Expr):
    """x, zeroed with probability p and scaled by 1 / (1 - p). `p` is a number or a `Scalar`."""

    x: Expr
    p: Expr


TRUE, FALSE = Const(True), Const(False)


def children(expr: Expr) -> tuple[Expr, ...]:
    match expr:
        case Const() | Index() | Load() | Scalar() | Score() | NonNegative() | IsZero():
            return ()
        case Gather(_, index):
            return index
    return tuple(value for f in fields(expr) if isinstance(value := getattr(expr, f.name), Expr))  # type: ignore[arg-type]


def walk(expr: Expr) -> Iterator[Expr]:
    """`expr` and everything beneath it, parents first."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def positions(expr: Expr) -> tuple[sympy.Expr, ...]:
    """The index expressions of `expr` itself, its children's aside."""
    match expr:
        case Load(_, index):
            return index
        case Index(value) | NonNegative(value) | IsZero(value):
            return (value,)
        case Softmax(at=at):
            return (at,)
    return ()


def index_symbols(expr: Expr) -> set[sympy.Symbol]:
    """The index symbols that `expr` depends on; the axes of its own products and softmaxes are not among them."""
    match expr:
        case Load(_, index):
            return set().union(*(i.free_symbols for i in index)) if index else set()
        case Index(value) | NonNegative(value) | IsZero(value):
            return set(value.free_symbols)
        case Contract(axes, a, b):
            return (index_symbols(a) | index_symbols(b)) - set(axes)
        case Reduce(_, axis, body):
            return index_symbols(body) - {axis}
        case Softmax(axis, body, at):
            return (index_symbols(body) - {axis}) | set(at.free_symbols)
        case _:
            return set().union(*map(index_symbols, children(expr)))


def has_product(expr: Expr) -> bool:
    """Whether the product of query and key, or any other matrix product, is anywhere in `expr`."""
    found = vars(expr).get("_has_product")
    if found is None:
        found = isinstance(expr, (Contract, Score)) or any(map(has_product, children(expr)))
        vars(expr)["_has_product"] = found
    return found


def size(expr: Expr) -> int:
    """How many parts `expr` has, each as often as it is walked past."""
    found = vars(expr).get("_size")
    if found is None:
        found = 1 + sum(map(size, children(expr)))
        vars(expr)["_size"] = found
    return found


def terms(expr: Expr) -> Iterator[Expr]:
    """What `expr` is the sum of, in order."""
    match expr:
        case Add(a, b):
            yield from terms(a)
            yield from terms(b)
        case _:
            yield expr
