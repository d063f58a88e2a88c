"""Operations across an axis: products, softmax, reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.nodes import Expr
from attn_fuse.lift.tensor import Indices, LiftedTensor, NoClosedForm, Operation, aten


def _bmm(call: Operation) -> LiftedTensor:
    a, b = call.operand, call["mat2"]
    dtype, axis = call.result.dtype, call.axis("e", a.shape[-1])
    if not dtype.is_floating_point:
        raise NoClosedForm("a matrix product of integers")

    def at(index: Indices) -> Expr:
        *batch, row, column = index
        return ex.Contract((axis,), a.at((*batch, row, axis)), b.at((*batch, axis, column)), dtype)

    return call.tensor(at)


def _softmax(call: Operation) -> LiftedTensor:
    x, dim = call.operand, call.dim()
    if not x.shape:
        raise NoClosedForm("a softmax of one number")
    dtype, axis = call.result.dtype, call.axis("j", x.shape[dim])

    def at(index: Indices) -> Expr:
        body = x.at((*index[:dim], axis, *index[dim + 1 :]))
        return ex.Softmax(axis, precision.cast(dtype, body, x.dtype, call.space), index[dim], dtype)

    return call.tensor(at)


@torch.library.custom_op("attn_fuse::dropout_marker", mutates_args=())
def dropout_marker(x: torch.Tensor, number: int) -> torch.Tensor:
    """`x`, a marker for dropout number `number` of the region; traced, never run."""
    return x.clone()


@dropout_marker.register_fake
def _(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(x)


def _dropout(call: Operation) -> LiftedTensor:
    x, p = call["x"], call.dropout_probability(call["number"])
    return call.tensor(lambda index: ex.Dropout(x.at(index), p))


def _reduced(call: Operation, name: str, dims: Iterable[int]) -> Callable[[Indices], Expr]:
    """The reduction of the operand over `dims`, as a function of the result's indices."""
    x, keepdim = call.operand, bool(call.get("keepdim", False))
    axes = {d % len(x.shape): call.axis(f"r{d % len(x.shape)}_", x.shape[d]) for d in dims}

    def at(index: Indices) -> Expr:
        rest = iter(i for d, i in enumerate(index) if not (keepdim and d in axes))
        body = x.at(tuple(axes[d] if d in axes else next(rest) for d in range(len(x.shape))))
        if not ex.has_product(body) and not (name == "sum" and isinstance(body, ex.Mul)):
            written = call.node.target._schema.name.removeprefix("aten::")
            raise NoClosedForm(f"{written} of something other than the scores")
        for axis in axes.values():
            body = _sum(axis, body, call.result.dtype) if name == "sum" else ex.Reduce(name, axis, body)
        return body

    return at


def _sum(axis: sympy.Symbol, body: Expr, dtype: torch.dtype) -> Expr:
    match body:
        case ex.Mul(inner, ex.Const() as number):
            return al.mul(number, _sum(axis, inner, dtype))
        case ex.Mul(a, b) if axis in ex.index_symbols(a) and axis in ex.index_symbols(b):
            return ex.Contract((axis,), a, b, dtype)
        case ex.Contract(axes, a, b, _):
            return ex.Contract((*axes, axis), a, b, dtype)
    return ex.Reduce("sum", axis, body)


def _reduction(call: Operation, name: str) -> LiftedTensor:
    x, given = call.operand, call.get("dim", None)
    if name == "sum" and x.dtype != call.result.dtype and not x.dtype.is_floating_point:
        raise NoClosedForm("a sum of integers")
    if not x.shape:
        raise NoClosedForm(f"{name} of one number")
    dims = [given] if isinstance(given, int) else given or range(len(x.shape))
    return call.tensor(_reduced(call, name, dims))


def _extreme(call: Operation, name: str) -> list[LiftedTensor]:
    """The values of a max or min along a dimension; their positions have no closed form."""
    values, positions = call.node.meta["val"]
    if not call.operand.shape:
        raise NoClosedForm(f"{name} of one number")

    def unknown(index: Indices) -> Expr:
        raise NoClosedForm("the position of a max or min")

    return [call.tensor(_reduced(call, name, [call.dim()]), values), call.tensor(unknown, positions)]


def _cumsum(call: Operation) -> LiftedTensor:
    x = call.operand

    def at(index: Indices) -> Expr:
        # Of zeros, as for a batch without packed sequences.
        if x.at(index) in (ex.FALSE, ex.Const(0), ex.Const(0.0)):
            return ex.Const(precision.rounded(0, call.result.dtype))
        raise NoClosedForm("a running sum")

    return call.tensor(at)


ACROSS: dict[Any, Callable[[Operation], Any]] = {
    aten.bmm.default: _bmm,
    aten.mm.default: _bmm,
    aten._softmax.default: _softmax,
    torch.ops.attn_fuse.dropout_marker.default: _dropout,
    aten.sum.dim_IntList: partial(_reduction, name="sum"),
    **dict.fromkeys((aten.amax.default, aten.max.default), partial(_reduction, name="amax")),
    **dict.fromkeys((aten.amin.default, aten.min.default), partial(_reduction, name="amin")),
    aten.any.dim: partial(_reduction, name="any"),
    aten.all.dim: partial(_reduction, name="all"),
    aten.max.dim: partial(_extreme, name="amax"),
    aten.min.dim: partial(_extreme, name="amin"),
    aten.cumsum.default: _cumsum,
}
