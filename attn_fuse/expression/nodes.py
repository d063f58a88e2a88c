"""Element expressions: trees over index symbols that give one element of a tensor.

    scores[b, h, i, j]  =  0.25 * Contract_e(Load(q, b, h, i, e) * Load(k, b, h, j, e))

The lift and the kernels write positions differently. The lift uses SymPy expressions over integer index symbols, in
`Index`, `Load`, `NonNegative` and `IsZero`. A score program (`kernels.score`) uses arithmetic on `Position`, with
`Input`, `Number`, `Gather` and `Compare`.

Patterns match on the classes. The functions of `simplify` (`add`, `mul`, `select`, ...) simplify the expression that
they build; Python's operators do not. Both put a constant last in sums and products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import sympy
import torch

T = TypeVar("T")


class Expr:
    """Base class. Python's operators (`a + b`, `-a`) build nodes, and numbers become `Const`."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __add__(self, other: Expr | float) -> Expr:
        return Add(*constant_last(self, as_expr(other)))

    __radd__ = __add__

    def __sub__(self, other: Expr | float) -> Expr:
        return Binary("sub", self, as_expr(other))

    def __rsub__(self, other: float) -> Expr:
        return Binary("sub", Const(other), self)

    def __mul__(self, other: Expr | float) -> Expr:
        return Mul(*constant_last(self, as_expr(other)))

    __rmul__ = __mul__

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
    """A number or Boolean known at compile time."""

    value: bool | int | float


@dataclass(frozen=True)
class Index(Expr):
    """An index expression used as an integer, such as an element of `arange`."""

    value: sympy.Expr


@dataclass(frozen=True)
class Load(Expr):
    """The element of tensor number `leaf` at `index`, one position per dimension."""

    leaf: int
    index: tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class Scalar(Expr):
    """Leaf number `leaf`, a Python scalar known only at run time."""

    leaf: int


@dataclass(frozen=True)
class Position(Expr):
    """The position along one dimension of the scores: b (batch), h (query head), i (query) or j (key); int64."""

    name: str


@dataclass(frozen=True)
class Number(Expr):
    """Integer argument `number` of a score program."""

    number: int


@dataclass(frozen=True)
class Input(Expr):
    """The element of tensor `leaf` of a score program, [B|1, H|1, Lq|1, Lk|1], at the position of the score."""

    leaf: int


@dataclass(frozen=True)
class Diagonal(Expr):
    """A part that depends on j - i alone; `chunked.hoisted` computes it once, as tensor `leaf`."""

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
class _Pair(Expr):
    """An operation on two operands, named by its class."""

    a: Expr
    b: Expr


class Add(_Pair):
    """a + b"""


class Mul(_Pair):
    """a * b"""


class Div(_Pair):
    """a / b"""


@dataclass(frozen=True)
class Unary(Expr):
    """A function of one operand, by its name in `functions.UNARY`: exp, tanh, sqrt, ..."""

    name: str
    x: Expr


@dataclass(frozen=True)
class Binary(Expr):
    """A function of two operands, by its name in `functions.BINARY`: maximum, pow, ..."""

    name: str
    a: Expr
    b: Expr


@dataclass(frozen=True)
class NonNegative(Expr):
    """Whether an index expression is >= 0, the form of every <, <=, > and >= between positions."""

    value: sympy.Expr


@dataclass(frozen=True)
class IsZero(Expr):
    """Whether an index expression is 0, the form of == between positions."""

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


class And(_Pair):
    """a and b"""


class Or(_Pair):
    """a or b"""


@dataclass(frozen=True)
class Select(Expr):
    """`a` where `cond` holds, else `b`."""

    cond: Expr
    a: Expr
    b: Expr


@dataclass(frozen=True)
class Gather(Expr):
    """A `Load` at positions that are themselves read from a tensor or computed."""

    leaf: int
    index: tuple[Expr, ...]


@dataclass(frozen=True)
class Score(Expr):
    """The product of query and key, in `dtype`."""

    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Contract(Expr):
    """Sum of a * b over `axes`: an element of a matrix product in `dtype`."""

    axes: tuple[sympy.Symbol, ...]
    a: Expr
    b: Expr
    dtype: torch.dtype


@dataclass(frozen=True)
class Reduce(Expr):
    """`body` reduced over `axis`, by ATen's name for the reduction: sum, amax, amin, any, all."""

    name: str
    axis: sympy.Symbol
    body: Expr


@dataclass(frozen=True)
class Softmax(Expr):
    """Softmax of `body` over `axis`, computed in `dtype` and read at index `at`."""

    axis: sympy.Symbol
    body: Expr
    at: sympy.Expr
    dtype: torch.dtype


@dataclass(frozen=True)
class Dropout(Expr):
    """x, zeroed with probability p (a `Const` or `Scalar`), else scaled by 1 / (1 - p)."""

    x: Expr
    p: Expr


TRUE, FALSE = Const(True), Const(False)


def as_expr(x: Expr | float) -> Expr:
    """`x`, with a number made a `Const`."""
    return x if isinstance(x, Expr) else Const(x)


def constant_last(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """The operands of a sum or product, swapped where only `a` is a `Const`."""
    return (b, a) if isinstance(a, Const) and not isinstance(b, Const) else (a, b)


def name_of(expr: Expr) -> str:
    """The name of the operation at the root of `expr`, as torch calls it; "" where it has none."""
    match expr:
        case Unary(name) | Binary(name) | Compare(name):
            return name
    return _NAMES.get(type(expr), "")


_NAMES: dict[type[Expr], str] = {
    Add: "add", Mul: "mul", Div: "div", Select: "where", Not: "not", And: "and", Or: "or", Cast: "cast",
    Gather: "gather",
}  # fmt: skip


def children(expr: Expr) -> tuple[Expr, ...]:
    """The operands of `expr`, in the order of its fields."""
    if isinstance(expr, Gather):
        return expr.index
    return tuple(value for value in _values(expr) if isinstance(value, Expr))


def remade(expr: Expr, parts: Sequence[Expr]) -> Expr:
    """`expr` with `parts` as its children, not simplified."""
    if isinstance(expr, Gather):
        return Gather(expr.leaf, tuple(parts))
    if not parts:
        return expr
    given = iter(parts)
    return type(expr)(*(next(given) if isinstance(value, Expr) else value for value in _values(expr)))


def _values(expr: Expr) -> list[Any]:
    """The values of the fields."""
    return [getattr(expr, name) for name in expr.__match_args__]


def distinct(expr: Expr | None, ends: Callable[[Expr], bool] = lambda node: False) -> Iterator[Expr]:
    """Every node of `expr` once (by identity), children first, without those beneath a node where `ends` holds."""
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
    """`expr` with equal parts made one object, shared by all expressions interned with the same `known`.

    True, 1 and 1.0 are different constants.
    """
    if ("object", id(expr)) in known:
        return known["object", id(expr)]
    parts = [interned(part, known) for part in children(expr)]
    values = [expr.leaf] if isinstance(expr, Gather) else _values(expr)
    own = (repr(value) for value in values if not isinstance(value, Expr))
    made = known.setdefault((type(expr), *own, *map(id, parts)), remade(expr, parts))
    # Kept alive, since Python reuses the id of a dead object.
    known["kept", id(expr)] = expr
    known["object", id(expr)] = made
    return made


def walk(expr: Expr) -> Iterator[Expr]:
    """Every node of `expr`, parents first; a shared node appears once per use."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def parts(expr: Expr, kind: type[T]) -> list[T]:
    """The parts of `expr`, itself included, that are of a kind."""
    return [part for part in walk(expr) if isinstance(part, kind)]


def positions(expr: Expr) -> tuple[sympy.Expr, ...]:
    """The index expressions in the fields of `expr` itself."""
    match expr:
        case Load(_, index):
            return index
        case Index(value) | NonNegative(value) | IsZero(value):
            return (value,)
        case Softmax(at=at):
            return (at,)
    return ()


def index_symbols(expr: Expr) -> set[sympy.Symbol]:
    """The index symbols that `expr` depends on, without the axes that it sums or reduces over."""
    beneath = set().union(*map(index_symbols, children(expr)))
    match expr:
        case Contract(axes=axes):
            beneath -= {*axes}
        case Reduce(axis=axis) | Softmax(axis=axis):
            beneath -= {axis}
    return beneath.union(*(place.free_symbols for place in positions(expr)))


def remembered(function: Callable[[Expr], T]) -> Callable[[Expr], T]:
    """`function`, computed once per expression object; hashing by value would walk the whole expression."""

    @functools.wraps(function)
    def looked_up(expr: Expr) -> T:
        known: dict[str, T] = vars(expr)
        if function.__name__ not in known:
            known[function.__name__] = function(expr)
        return known[function.__name__]

    return looked_up


@remembered
def has_product(expr: Expr) -> bool:
    """Whether `expr` contains a matrix product."""
    return isinstance(expr, (Contract, Score)) or any(map(has_product, children(expr)))


@remembered
def size(expr: Expr) -> int:
    """The number of nodes; a shared node counts once per use."""
    return 1 + sum(map(size, children(expr)))


def mark(expr: Expr, origin: Any) -> None:
    """Record that operation `origin` made `expr`, unless an origin is recorded. `Const` and `Index` have none."""
    if not isinstance(expr, (Const, Index)):
        vars(expr).setdefault("_origin", origin)


def origin_of(expr: Expr) -> Any:
    """The operation that made `expr`, or its first part with a known origin; None if there is none."""
    return next((vars(part)["_origin"] for part in walk(expr) if "_origin" in vars(part)), None)


def as_made(new: Expr, old: Expr) -> Expr:
    """`new` with the origin of `old`, unless it has its own."""
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
