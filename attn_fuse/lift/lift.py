"""Lift: each tensor of a normal form becomes an expression over indices.

A lifted tensor is a shape, a dtype and a function from indices to an element expression. Layout operations only rewrite
the indices, arithmetic builds a tree. The region's output at fresh index symbols is then the whole attention as one
expression.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from attn_fuse.attention.facts import is_learned
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import WIDEST, Space
from attn_fuse.expression.nodes import Expr
from attn_fuse.graph.names import value_of
from attn_fuse.graph.walk import batch_dimensions, is_product
from attn_fuse.lift.closed_forms import ClosedForm, Diagonals
from attn_fuse.lift.creation import CREATION
from attn_fuse.lift.elementwise import ELEMENTWISE
from attn_fuse.lift.layout import LAYOUT
from attn_fuse.lift.normalize import Normal
from attn_fuse.lift.reductions import ACROSS
from attn_fuse.lift.tensor import Indices, LiftedTensor, NoClosedForm, Operation, shape_of
from attn_fuse.lift.written import WRITTEN
from attn_fuse.torch_internals import FakeTensor, limit_integer, number_ranges

# The handler of each core ATen operation, which says what it does to element expressions.
OPERATIONS = {**LAYOUT, **WRITTEN, **CREATION, **ELEMENTWISE, **ACROSS}
# The max size of a tensor of constants that is written out.
_MOST_WRITTEN_OUT = 16


@dataclass(frozen=True, eq=False)
class Lifted:
    """One element of a region's output. Leaves are named by number.

    element: over `indices`, which has a symbol (or 0, for size 1) for each dimension.
    leaf_dtypes: of the leaves that are tensors.
    learned: the leaves that are parameters in training, assumed to lie in [-100, 100].
    batch_of: for each leaf that is a matrix product, its batch dimensions.
    numbers: the leaves that are floats known only at run time.
    """

    element: Expr
    indices: Indices
    shape: Indices
    dtype: torch.dtype
    space: Space
    leaf_dtypes: Mapping[int, torch.dtype]
    learned: frozenset[int]
    batch_of: Mapping[int, frozenset[int]] = field(default_factory=dict)
    numbers: Mapping[int, torch.SymFloat] = field(default_factory=dict)


class NotLifted(Exception):
    """An operation has no element expression. node: the operation in Dynamo's graph, if known."""

    def __init__(self, reason: str, node: Node | None) -> None:
        super().__init__(reason)
        self.node = node


def lift(normal: Normal, closed_forms: Mapping[int, ClosedForm | Diagonals]) -> Lifted:
    """The region's output as an element expression. Raises NotLifted.

    closed_forms: for leaves with known contents, the form to use instead of a load. `Diagonals` serve only lookups in a
        parameter in training, whose gradient is then summed along the diagonals.
    """
    _limit_integers(normal)
    values = list(map(value_of, normal.region.leaves))
    numbers = {n: x for n, x in enumerate(values) if isinstance(x, torch.SymFloat)}
    space = Space(number_ranges(normal.mode), {n: x.node.expr for n, x in numbers.items()})
    lifter = _Lifter(normal, closed_forms, space)
    output = lifter.output()
    indices = tuple(sympy.Integer(0) if size == 1 else space.fresh("o", size) for size in output.shape)
    try:
        element = output.at(indices)
    except NoClosedForm as problem:
        raise NotLifted(str(problem), normal.origin.get(problem.node) if problem.node is not None else None) from None
    learned = frozenset(n for n, x in enumerate(values) if is_learned(x))
    along = {n: form for n, form in closed_forms.items() if isinstance(form, Diagonals)}
    element = lifter.read_along(element, along, learned) if along else element
    batch_of = {n: batch_dimensions(leaf) for n, leaf in enumerate(normal.region.leaves) if is_product(leaf)}
    return Lifted(element, indices, output.shape, output.dtype, space, lifter.leaf_dtypes, learned, batch_of, numbers)


def _limit_integers(normal: Normal) -> None:
    """Guard that integers of the program stay far enough from the ends of int64 for sums of positions not to wrap."""
    for leaf in normal.region.leaves:
        value = value_of(leaf)
        for symbol in value.node.expr.free_symbols if isinstance(value, torch.SymInt) else ():
            if not symbol.is_positive and not limit_integer(normal.mode, symbol, WIDEST):
                raise NotLifted(f"an integer beyond {WIDEST} in a position", leaf)


class _Lifter:
    def __init__(self, normal: Normal, closed_forms: Mapping[int, ClosedForm | Diagonals], space: Space) -> None:
        self.normal = normal
        self.closed_forms = closed_forms
        self.space = space
        self.values: dict[Node, Any] = {}
        self.leaf_dtypes: dict[int, torch.dtype] = {}

    def output(self) -> LiftedTensor:
        graph = self.normal.graph.graph
        for n, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                self.values[node] = self.leaf(node, n)
            elif node.op == "call_function":
                self.values[node] = self.operation(node)
            elif node.op == "get_attr":
                self.values[node] = self.constant(node)
        lifted: LiftedTensor = self.values[graph.output_node().all_input_nodes[0]]
        return lifted

    def leaf(self, node: Node, number: int) -> Any:
        value = node.meta.get("val", None)
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, torch.SymInt) else ex.Scalar(number)
        self.leaf_dtypes[number] = value.dtype
        form = self.closed_forms.get(number)
        if isinstance(form, ClosedForm):
            return LiftedTensor(shape_of(value), value.dtype, lambda index: form.element(index, self.space))
        return LiftedTensor(shape_of(value), value.dtype, lambda index: ex.Load(number, index), leaf=number)

    def read_along(self, x: Expr, along: Mapping[int, Diagonals], learned: frozenset[int]) -> Expr:
        """`x` with lookups in `learned` leaves reading an index in `along` from its first row or column."""

        def changed(x: Expr) -> Expr:
            if isinstance(x, ex.Gather) and x.leaf in learned:
                return ex.Gather(x.leaf, tuple(map(place, x.index)))
            return al.rebuilt(x, changed)

        def place(x: Expr) -> Expr:
            if isinstance(x, ex.Load) and x.leaf in along and self._is_within(x):
                return ex.Gather(x.leaf, along[x.leaf].places(x.index))
            return al.rebuilt(x, place)

        return changed(x)

    def _is_within(self, load: ex.Load) -> bool:
        """Whether `load` stays within its tensor; in a concatenation, loads that are not chosen may not."""
        tensor = value_of(self.normal.region.leaves[load.leaf])
        assert isinstance(tensor, torch.Tensor)
        return all(map(self.space.is_within, load.index, shape_of(tensor)))

    def constant(self, node: Node) -> LiftedTensor:
        value = getattr(self.normal.graph, str(node.target))
        value = getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
        if not isinstance(value, torch.Tensor) or not 0 < value.numel() <= _MOST_WRITTEN_OUT:
            raise NotLifted("a tensor written out in the program", self.normal.origin.get(node))
        numbers = [ex.Const(number) for number in value.flatten().tolist()]
        strides = [math.prod(value.shape[d + 1 :]) for d in range(value.dim())]

        def at(index: Indices) -> Expr:
            place = sum((i * stride for i, stride in zip(index, strides, strict=True)), sympy.Integer(0))
            result: Expr = numbers[0]
            for n, number in enumerate(numbers[1:], 1):
                result = al.select(al.is_zero(place - n, self.space), number, result)
            return result

        return LiftedTensor(shape_of(value), value.dtype, at)

    def operation(self, node: Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]
        value = node.meta.get("val")
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        handler = OPERATIONS.get(node.target)
        if handler is None:
            raise NotLifted(f"{_plain(node.target)} has no element expression", self.normal.origin.get(node))
        try:
            return handler(
                Operation(node, self.values, self.space, self.leaf_dtypes, self.dropout_probability, self.normal.trains)
            )
        except NoClosedForm as problem:
            raise NotLifted(str(problem), self.normal.origin.get(node)) from None

    def dropout_probability(self, number: int) -> Expr:
        p = self.normal.dropout[number]
        if isinstance(p, Node):
            return ex.Scalar(self.normal.region.leaves.index(p))
        return ex.Const(float(p))


def _plain(target: Any) -> str:
    return str(target).split(".")[1] if str(target).startswith("aten.") else str(target)
