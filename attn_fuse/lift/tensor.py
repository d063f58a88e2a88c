"""An operation of a normal form while it is lifted: its arguments and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node, map_arg

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr

aten = torch.ops.aten
Indices = tuple[sympy.Expr, ...]
# The max parts of an expression. A part that is used twice counts twice: thirty doublings would be a billion parts.
_MOST_PARTS = 5000


class NoClosedForm(Exception):
    """The operation, as it is called here, has no closed element expression. node: the operation, once known."""

    node: Node | None = None


@dataclass(frozen=True, eq=False)
class LiftedTensor:
    """A tensor while it is lifted. at: its element expression at given indices. leaf: its number if it is a leaf."""

    shape: Indices
    dtype: torch.dtype
    at: Callable[[Indices], Expr]
    leaf: int | None = None


@dataclass(eq=False)
class Operation:
    """One normalised operation; `operation[name]` is the argument of that name in its schema, lifted already.

    values: the nodes lifted so far. dropout_probability: that of dropout marker number n. trains: whether a leaf of the
    region needs a gradient. named: the arguments by name, not lifted.
    """

    node: Node
    values: Mapping[Node, Any]
    space: Space
    leaf_dtypes: Mapping[int, torch.dtype]
    dropout_probability: Callable[[int], Expr]
    trains: bool
    named: dict[str, Any] = field(init=False)
    _axes: dict[str, sympy.Symbol] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schema: Any = self.node.target._schema
        self.named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.named |= dict(zip((a.name for a in schema.arguments), self.node.args, strict=False))
        self.named |= self.node.kwargs

    def __getitem__(self, name: str) -> Any:
        return map_arg(self.named[name], self.values.__getitem__)

    @property
    def operand(self) -> LiftedTensor:
        """The argument `self`, for an operation that takes a tensor there."""
        operand: LiftedTensor = self["self"]
        return operand

    def get(self, name: str, usual: Any) -> Any:
        """Argument `name`, or `usual` where the schema has none of this name."""
        return self[name] if name in self.named else usual

    @property
    def result(self) -> torch.Tensor:
        """The fake tensor that the operation gives."""
        result: torch.Tensor = self.node.meta["val"]
        return result

    def tensor(self, at: Callable[[Indices], Expr]) -> LiftedTensor:
        """The result of this operation. at: its element expression at given indices."""
        return self.like(self.result, at)

    def like(self, value: torch.Tensor, at: Callable[[Indices], Expr]) -> LiftedTensor:
        """A result of this operation with the shape and dtype of `value`. at: its element at given indices.

        Its `at` raises NoClosedForm, with the operation as node, where an expression has too many parts.
        """
        known: dict[Indices, Expr] = {}

        # The same indices give the same object again, so that several readers share it.
        def remembered(index: Indices) -> Expr:
            if index not in known:
                try:
                    element = at(index)
                    if ex.size(element) > _MOST_PARTS:
                        raise NoClosedForm("an expression with too many parts")
                    ex.mark(element, self.node)
                    known[index] = element
                except NoClosedForm as problem:
                    problem.node = problem.node or self.node
                    raise
            return known[index]

        return LiftedTensor(shape_of(value), value.dtype, remembered)

    def axis(self, name: str, length: sympy.Expr) -> sympy.Symbol:
        """The symbol that this operation sums over; one for all its elements, so that equal elements look equal."""
        if name not in self._axes:
            self._axes[name] = self.space.fresh(name, length)
        return self._axes[name]

    def dim(self, name: str = "dim") -> int:
        """Argument `name`, a dimension of `self`, counted from the front."""
        return int(self[name]) % max(len(self["self"].shape), 1)


def shape_of(value: torch.Tensor) -> Indices:
    """The sizes of `value` as SymPy expressions."""
    return tuple(size(s) for s in value.shape)


def size(number: Any) -> sympy.Expr:
    """An int or torch.SymInt as a SymPy expression."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def clamped(index: Indices, shape: Indices) -> Indices:
    """`index` with 0 for each dimension of size 1, which broadcasts."""
    return tuple(sympy.Integer(0) if length == 1 else i for i, length in zip(index, shape, strict=True))


def number(value: Any) -> Expr:
    """A number of the program as an expression. Raises NoClosedForm for one known only when the program runs."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, torch.SymInt):
        return ex.Index(value.node.expr)
    if isinstance(value, (bool, int, float)):
        return ex.Const(value)
    raise NoClosedForm("a number that is computed when the program runs")


def filling(given: Any) -> tuple[Expr, torch.dtype]:
    """(the number that fills a tensor, the dtype it is held in), of a number of the program or of a single element."""
    if isinstance(given, LiftedTensor):
        return given.at(()), given.dtype
    return number(given), torch.int64 if isinstance(given, torch.SymInt) else torch.float64


def diagonal(call: Operation) -> tuple[int, int, sympy.Expr, bool]:
    """(dim1, dim2, offset, whether offset >= 0) of a diagonal. Raises NoClosedForm where the sign is not proved."""
    offset = size(call["offset"])
    above = call.space.is_nonnegative(offset)
    if not above and not call.space.is_negative(offset):
        raise NoClosedForm("a diagonal at an unknown place")
    return call.dim("dim1"), call.dim("dim2"), offset, above


def operand(call: Operation, name: str, dtype: torch.dtype, wide: bool = False) -> Callable[[Indices], Expr]:
    """Argument `name` as a function of the result's indices, converted to `dtype`.

    wide: whether a number beside tensors in half precision is taken in float32, as torch's arithmetic does.
    """
    x = call[name]
    rank = len(shape_of(call.result))
    if not isinstance(x, LiftedTensor):
        value = number(x)
        if isinstance(value, ex.Const):
            is_half = dtype.is_floating_point and dtype.itemsize < 4
            value = ex.Const(precision.rounded(value.value, torch.float32 if wide and is_half else dtype))
        elif isinstance(value, ex.Index):
            value = precision.cast(dtype, value, torch.int64, call.space)
        return lambda index: value
    extra = rank - len(x.shape)
    jumps = x.dtype.is_floating_point and not dtype.is_floating_point
    element = exact(call, x.at) if jumps else x.at
    return lambda index: precision.cast(dtype, element(clamped(index[extra:], x.shape)), x.dtype, call.space)


def exact(call: Operation, element: Callable[[Indices], Expr]) -> Callable[[Indices], Expr]:
    """`element` with every rounding that torch does in half precision: an operation that jumps would show them."""
    return lambda index: precision.as_rounded(element(index), call.leaf_dtypes)


def position(call: Operation, value: sympy.Expr, length: sympy.Expr) -> sympy.Expr:
    """Position `value` along a dimension of size `length`, counted from the front; below 0 it counts from the end.

    Raises NoClosedForm where its sign is not proved.
    """
    if call.space.is_nonnegative(value):
        return value
    if call.space.is_negative(value):
        return sympy.expand(value + length)
    raise NoClosedForm("positions that may count from the end")


def slice_start(call: Operation, length: sympy.Expr, count: sympy.Expr) -> sympy.Expr:
    """The first position of the slice that `start`, `end` and `step` say, clamped as in Python.

    length: the size of the dimension. count: the number of elements in the slice. Raises NoClosedForm where the first
    position is not proved.
    """
    space = call.space
    start, end = call["start"], call["end"]
    first = size(0 if start is None else start)
    if space.is_nonnegative(first):
        return first
    from_front = sympy.expand(length + first)
    if space.is_negative(first) and space.is_nonnegative(from_front):
        return from_front
    if space.is_negative(from_front):
        return sympy.Integer(0)
    if call["step"] == 1 and (end is None or space.is_nonnegative(size(end) - length)):
        # The slice reaches the end, so `count` says where it begins.
        return sympy.expand(length - count)
    raise NoClosedForm("a slice from an unknown position")
