"""Lifted tensors, and an operation of a normal form with its arguments and result."""

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
# The max parts of an expression. A part used twice counts twice, so thirty doublings would be a billion parts.
_MOST_PARTS = 5000


class NoClosedForm(Exception):
    """This call of the operation has no element expression. node: the operation, once known."""

    node: Node | None = None


@dataclass(frozen=True, eq=False)
class LiftedTensor:
    """A lifted tensor. at: indices -> element expression. leaf: its number if it is a leaf."""

    shape: Indices
    dtype: torch.dtype
    at: Callable[[Indices], Expr]
    leaf: int | None = None


@dataclass(eq=False)
class Operation:
    """A normalised operation; `operation[name]` is its lifted argument of that name in the schema.

    values: the nodes lifted so far. dropout_probability: of a marker, by number. trains: whether a leaf of the region
    needs a gradient. named: the arguments before lifting. result: the fake tensor that the operation returns.
    """

    node: Node
    values: Mapping[Node, Any]
    space: Space
    leaf_dtypes: Mapping[int, torch.dtype]
    dropout_probability: Callable[[int], Expr]
    trains: bool
    named: dict[str, Any] = field(init=False)
    result: torch.Tensor = field(init=False)
    _axes: dict[str, sympy.Symbol] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.result = self.node.meta["val"]
        schema: Any = self.node.target._schema
        self.named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.named |= dict(zip((a.name for a in schema.arguments), self.node.args, strict=False))
        self.named |= self.node.kwargs

    def __getitem__(self, name: str) -> Any:
        return map_arg(self.named[name], self.values.__getitem__)

    @property
    def operand(self) -> LiftedTensor:
        operand: LiftedTensor = self["self"]
        return operand

    def get(self, name: str, usual: Any) -> Any:
        """Argument `name`, or `usual` if the schema has none of this name."""
        return self[name] if name in self.named else usual

    def tensor(self, at: Callable[[Indices], Expr], like: torch.Tensor | None = None) -> LiftedTensor:
        """A result of this operation with the element `at(index)`, and the shape and dtype of `like`, if given.

        Reading it raises NoClosedForm, with this operation as node, if the expression has too many parts.
        """
        value = self.result if like is None else like
        known: dict[Indices, Expr] = {}

        # Readers at the same indices share one object.
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
        """The symbol that this operation sums over, the same for all elements, so equal elements compare equal."""
        if name not in self._axes:
            self._axes[name] = self.space.fresh(name, length)
        return self._axes[name]

    def dim(self, name: str = "dim") -> int:
        """Argument `name`, a dimension of `self`, counted from the front."""
        return int(self[name]) % max(len(self["self"].shape), 1)

    def elements(self, name: str, dtype: torch.dtype, wide: bool = False) -> Callable[[Indices], Expr]:
        """Argument `name` as a function of the result's indices, converted to `dtype`.

        wide: keep a number beside half-precision tensors in float32, as torch's arithmetic does.
        """
        x = self[name]
        if not isinstance(x, LiftedTensor):
            value = number(x)
            if isinstance(value, ex.Const):
                is_half = dtype.is_floating_point and dtype.itemsize < 4
                value = ex.Const(precision.rounded(value.value, torch.float32 if wide and is_half else dtype))
            elif isinstance(value, ex.Index):
                value = precision.cast(dtype, value, torch.int64, self.space)
            return lambda index: value
        extra, element = len(shape_of(self.result)) - len(x.shape), self.converted(x, dtype)
        return lambda index: element(clamped(index[extra:], x.shape))

    def converted(self, x: LiftedTensor, dtype: torch.dtype) -> Callable[[Indices], Expr]:
        """The element of `x` at an index, converted to `dtype`."""
        jumps = x.dtype.is_floating_point and not dtype.is_floating_point
        element = self.exact(x.at) if jumps else x.at
        return lambda index: precision.cast(dtype, element(index), x.dtype, self.space)

    def exact(self, element: Callable[[Indices], Expr]) -> Callable[[Indices], Expr]:
        """`element` with torch's half-precision rounding, which may matter to an operation that jumps."""
        return lambda index: precision.as_rounded(element(index), self.leaf_dtypes)

    def position(self, value: sympy.Expr, length: sympy.Expr) -> sympy.Expr:
        """Position `value` from the front; from the end if negative. Raises NoClosedForm if its sign is unknown."""
        if self.space.is_nonnegative(value):
            return value
        if self.space.is_negative(value):
            return sympy.expand(value + length)
        raise NoClosedForm("positions that may count from the end")

    def slice_start(self, length: sympy.Expr, count: sympy.Expr) -> sympy.Expr:
        """The first position of a slice of `count` elements along a dimension of size `length`, clamped as in Python.

        Raises NoClosedForm if it is unknown.
        """
        space = self.space
        start, end = self["start"], self["end"]
        first = size(0 if start is None else start)
        if space.is_nonnegative(first):
            return first
        from_front = sympy.expand(length + first)
        if space.is_negative(first) and space.is_nonnegative(from_front):
            return from_front
        if space.is_negative(from_front):
            return sympy.Integer(0)
        if self["step"] == 1 and (end is None or space.is_nonnegative(size(end) - length)):
            # The slice reaches the end, so `count` says where it begins.
            return sympy.expand(length - count)
        raise NoClosedForm("a slice from an unknown position")

    def diagonal(self) -> tuple[int, int, sympy.Expr, bool]:
        """(dim1, dim2, offset, whether offset >= 0) of a diagonal. Raises NoClosedForm if the sign is unknown."""
        offset = size(self["offset"])
        above = self.space.is_nonnegative(offset)
        if not above and not self.space.is_negative(offset):
            raise NoClosedForm("a diagonal at an unknown place")
        return self.dim("dim1"), self.dim("dim2"), offset, above


def shape_of(value: torch.Tensor) -> Indices:
    """The sizes of `value` as SymPy expressions."""
    return tuple(size(s) for s in value.shape)


def size(number: Any) -> sympy.Expr:
    """An int or torch.SymInt as a SymPy expression."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def clamped(index: Indices, shape: Indices) -> Indices:
    """`index` with 0 for dimensions of size 1, which broadcast."""
    return tuple(sympy.Integer(0) if length == 1 else i for i, length in zip(index, shape, strict=True))


def number(value: Any) -> Expr:
    """A number of the program as an expression. Raises NoClosedForm for a float known only at run time."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, torch.SymInt):
        return ex.Index(value.node.expr)
    if isinstance(value, (bool, int, float)):
        return ex.Const(value)
    raise NoClosedForm("a number computed at run time")


def filling(given: Any) -> tuple[Expr, torch.dtype]:
    """The value and dtype of a number, or of a tensor with one element, that fills a tensor."""
    if isinstance(given, LiftedTensor):
        return given.at(()), given.dtype
    return number(given), torch.int64 if isinstance(given, torch.SymInt) else torch.float64
