"""Creation operations: constants, ranges and the places of triangles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression.nodes import Expr
from attn_fuse.lift.tensor import Indices, LiftedTensor, NoClosedForm, Operation, aten, filling, size


def _filled(call: Operation, name: str = "fill_value") -> LiftedTensor:
    value, held = filling(call[name])
    return call.tensor(lambda index: precision.cast(call.result.dtype, value, held, call.space))


def _constant_fill(call: Operation, value: int) -> LiftedTensor:
    return call.tensor(lambda index: ex.Const(precision.rounded(value, call.result.dtype)))


def _iota(call: Operation) -> LiftedTensor:
    start, step = (call.get(name, usual) for name, usual in (("start", 0), ("step", 1)))
    if not all(isinstance(v, (int, torch.SymInt)) for v in (start, step)):
        raise NoClosedForm("a range of floating-point numbers")
    dtype = call.result.dtype

    def at(index: Indices) -> Expr:
        value = ex.Index(sympy.expand(size(start) + size(step) * index[0]))
        return precision.computed(value, dtype, call.space)

    return call.tensor(at)


class TrianglePlace(sympy.Function):
    """TrianglePlace(axis, n, rows, columns, offset, upper): the row (axis 0) or column (1) of place n in a triangle.

    A single place has no closed form, but a write to all places does.
    """

    nargs = 6
    is_integer = True


def _triangle_indices(call: Operation, upper: int) -> LiftedTensor:
    triangle = (size(call["row"]), size(call["col"]), size(call["offset"]), sympy.Integer(upper))
    return call.tensor(lambda index: ex.Index(TrianglePlace(*index, *triangle)))


_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_RANGES = (aten.arange.start_step, aten.arange.start, aten.arange.default, torch.ops.prims.iota.default)
CREATION: dict[Any, Callable[[Operation], Any]] = {
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.new_full.default), _filled),
    **dict.fromkeys((aten.fill.Scalar, aten.fill.Tensor), partial(_filled, name="value")),
    aten.scalar_tensor.default: partial(_filled, name="s"),
    **dict.fromkeys(_ONES, partial(_constant_fill, value=1)),
    **dict.fromkeys(_ZEROS, partial(_constant_fill, value=0)),
    **dict.fromkeys(_RANGES, _iota),
    aten.tril_indices.default: partial(_triangle_indices, upper=0),
    aten.triu_indices.default: partial(_triangle_indices, upper=1),
}
