"""Creation operations: constants, ranges, and the triangles cut from a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.nodes import Expr
from attn_fuse.lift.tensor import Indices, LiftedTensor, NoClosedForm, Operation, aten, filling, size


def _filled(name: str) -> Callable[[Operation], LiftedTensor]:
    def handler(call: Operation) -> LiftedTensor:
        value, held = filling(call[name])
        return call.tensor(lambda index: precision.cast(call.result.dtype, value, held, call.space))

    return handler


def _constant_fill(value: float) -> Callable[[Operation], LiftedTensor]:
    return lambda call: call.tensor(lambda index: ex.Const(precision.rounded(value, call.result.dtype)))


def _iota(call: Operation) -> LiftedTensor:
    start, step = (call.get(name, usual) for name, usual in (("start", 0), ("step", 1)))
    if not all(isinstance(v, (int, torch.SymInt)) for v in (start, step)):
        raise NoClosedForm("a range that is not made of whole numbers")
    dtype = call.result.dtype

    def at(index: Indices) -> Expr:
        value = ex.Index(sympy.expand(size(start) + size(step) * index[0]))
        return precision.computed(value, dtype, call.space)

    return call.tensor(at)


def _triangle(keep_lower: bool) -> Callable[[Operation], LiftedTensor]:
    def handler(call: Operation) -> LiftedTensor:
        x, diagonal = call.operand, size(call["diagonal"])

        def at(index: Indices) -> Expr:
            row, column = index[-2], index[-1]
            inside = row + diagonal - column if keep_lower else column - row - diagonal
            zero = ex.Const(precision.rounded(0, x.dtype))
            return al.select(al.nonnegative(inside, call.space), x.at(index), zero)

        return call.tensor(at)

    return handler


class TrianglePlace(sympy.Function):
    """TrianglePlace(axis, n, rows, columns, offset, upper): the row (axis 0) or column (1) of place n of a triangle.

    A single place has no closed form, but a write to all places of a triangle has one.
    """

    nargs = 6
    is_integer = True


def _triangle_indices(upper: int) -> Callable[[Operation], LiftedTensor]:
    def handler(call: Operation) -> LiftedTensor:
        triangle = (size(call["row"]), size(call["col"]), size(call["offset"]), sympy.Integer(upper))
        return call.tensor(lambda index: ex.Index(TrianglePlace(*index, *triangle)))

    return handler


CREATION: dict[Any, Callable[[Operation], Any]] = {
    aten.full.default: _filled("fill_value"),
    aten.full_like.default: _filled("fill_value"),
    aten.scalar_tensor.default: _filled("s"),
    aten.new_full.default: _filled("fill_value"),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _constant_fill(1)),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _constant_fill(0)),
    aten.fill.Scalar: _filled("value"),
    aten.fill.Tensor: _filled("value"),
    aten.arange.start_step: _iota,
    aten.arange.start: _iota,
    aten.arange.default: _iota,
    torch.ops.prims.iota.default: _iota,
    aten.tril_indices.default: _triangle_indices(0),
    aten.triu_indices.default: _triangle_indices(1),
    aten.tril.default: _triangle(True),
    aten.triu.default: _triangle(False),
}
