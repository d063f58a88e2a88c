"""Element expressions: what one element of a tensor is, as a tree over index symbols.

    scores[b, h, i, j]  =  0.25 * Contract_e(Load(q, b, h, i, e) * Load(k, b, h, j, e))

One language, from the lift to the kernels. The lift says which element is read by SymPy over integer index symbols:
`Index`, `Load`, `NonNegative`, `IsZero`. A score program (`kernels.score`) says the same by arithmetic on `Position`:
`Input`, `Number`, `Gather`, `Compare`. All other nodes mean the same in both.

Patterns match on the classes. The functions of `simplify` with like names simplify as they build; Python's operators
build a node as it stands.
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
        return Add(self, as_expr(other))

    def __radd__(self, other: float) -> Expr:
        return Add(Const(other), self)

    def __sub__(self, other: Expr | float) -> Expr:
        return Binary("sub", self, as_expr(other))

    def __rsub__(self, other: float) -> Expr:
        return Binary("sub", Const(other), self)

    def __mul__(self, other: Expr | float) -> Expr:
        return Mul(self, as_expr(other))

    def __rmul__(self, other: float) -> Expr:
        return Mul(Const(other), self)

    def __truediv__(self, other: Expr | float) -> Expr:
        return Div(self, as_expr(other))

    def __rtruediv__(self, other: float) -> Expr:
        return Div(Const(other), self)

    def __pow__(self, other: Expr | float) -> Expr:
        return Binary("pow", self, as_expr(other))

    def __neg__(self) -> Expr:
        return Unary("neg", self)

    def __str__(self) -> str:
        from attn_fuse.expression.text import as_text

        return as_text(self)


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
class Position(Expr):
    """The position along one dimension of the scores: b (batch), h (query head), i (query) or j (key); int64."""

    name: str


@dataclass(frozen=True)
class Number(Expr):
    """Entry `number` of the whole numbers that a score program is handed."""

    number: int


@dataclass(frozen=True)
class Input(Expr):
    """Tensor `leaf` that a score program is handed, [B|1, H|1, Lq|1, Lk|1], at this element of the scores."""

    leaf: int


@dataclass(frozen=True)
class Diagonal(Expr):
    """What `chunked.hoisted` has computed in the place of a part that depends on j - i: tensor `leaf`."""

    leaf: int


@dataclass(frozen=True)
class Given(Expr):
    """Operand `number` of a gradient rule: the gradient that flows in, the result, or an operand of the function."""

    number: int


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
    """An element-wise function of one argument by its name in `functions`: exp, tanh, sqrt, ..."""

    name: str
    x: Expr


@dataclass(frozen=True)
class Binary(Expr):
    """An element-wise function of two arguments by its name in `functions`: maximum, pow, ..."""

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

    dtype: torch.dtype = torch.float32


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


def as_expr(x: Expr | float) -> Expr:
    return x if isinstance(x, Expr) else Const(x)


def name_of(expr: Expr) -> str:
    """The name of the operation that `expr` is, "" for a leaf; of arithmetic and functions torch's."""
    match expr:
        case Unary(name) | Binary(name) | Compare(name):
            return name
    return _NAMES.get(type(expr), "")


_NAMES: dict[type[Expr], str] = {
    Add: "add", Mul: "mul", Div: "div", Select: "where", Not: "not", And: "and", Or: "or", Cast: "cast",
    Gather: "gather",
}  # fmt: skip


def children(expr: Expr) -> tuple[Expr, ...]:
    if isinstance(expr, Gather):
        return expr.index
    return tuple(value for name in _fields(type(expr)) if isinstance(value := getattr(expr, name), Expr))


def remade(expr: Expr, parts: Sequence[Expr]) -> Expr:
    """`expr` as it stands with other children, as many as it has."""
    if isinstance(expr, Gather):
        return Gather(expr.leaf, tuple(parts))
    own, given = (getattr(expr, name) for name in _fields(type(expr))), iter(parts)
    return type(expr)(*(next(given) if isinstance(value, Expr) else value for value in own))


def _fields(kind: type[Expr]) -> tuple[str, ...]:
    return vars(kind)["__match_args__"]


def distinct(expr: Expr | None, ends: Callable[[Expr], bool] = lambda node: False) -> Iterator[Expr]:
    """Every object that `expr` is made of once, children first; of those that `ends` holds for no children."""
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
    """`expr` with equal parts as one object, and as one with those in `known`.

    Equal are operations alike on the same objects. Of constants True, 1 and 1.0 are three.
    """
    if ("object", id(expr)) in known:
        return known["object", id(expr)]
    parts = [interned(part, known) for part in children(expr)]
    values = [getattr(expr, name) for name in _fields(type(expr)) if not (isinstance(expr, Gather) and name == "index")]
    own = (repr(value) for value in values if not isinstance(value, Expr))
    made = known.setdefault((type(expr), *own, *map(id, parts)), remade(expr, parts))
    # The object is kept too: the identity of one that is gone could come back.
    known["kept", id(expr)] = expr
    known["object", id(expr)] = made
    return made


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


def mark(expr: Expr, origin: Any) -> None:
    """Remember that operation `origin` made `expr`, unless an earlier operation did. Numbers are nobody's."""
    if not isinstance(expr, (Const, Index)):
        vars(expr).setdefault("_origin", origin)


def origin_of(expr: Expr) -> Any:
    """The operation that made `expr`, or else the first of its parts that one made; None where none is known."""
    return next((vars(part)["_origin"] for part in walk(expr) if "_origin" in vars(part)), None)


def as_made(new: Expr, old: Expr) -> Expr:
    """`new`, which stands for `old`, with the origin of `old` unless it has one."""
    if new is not old and "_origin" in vars(old):
        mark(new, vars(old)["_origin"])
    return new


def terms(expr: Expr) -> Iterator[Expr]:
    """What `expr` is the sum of, in order."""
    match expr:
        case Add(a, b):
            yield from terms(a)
            yield from terms(b)
        case _:
            yield expr
