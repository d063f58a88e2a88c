"""Operations across an axis: products, softmax, reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
        raise NoClosedForm("a product of whole numbers")

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


def _safe_softmax(call: Operation) -> LiftedTensor:
    """A softmax that gives zeros for a row of minus infinity."""
    weights, x, dim, space = _softmax(call), call.operand, call.dim(), call.space
    axis = call.axis("r", x.shape[dim])

    def at(index: Indices) -> Expr:
        body = precision.cast(weights.dtype, x.at((*index[:dim], axis, *index[dim + 1 :])), x.dtype, space)
        hidden = ex.Reduce("all", axis, al.compare("eq", body, ex.Const(-math.inf)))
        return al.select(hidden, ex.Const(0.0), weights.at(index))

    return call.tensor(at)


def _log_softmax(call: Operation) -> LiftedTensor:
    weights = _softmax(call)
    return call.tensor(lambda index: al.unary("log", weights.at(index)))


@torch.library.custom_op("attn_fuse::dropout_marker", mutates_args=())
def dropout_marker(x: torch.Tensor, number: int) -> torch.Tensor:
    """`x`, in the place of dropout number `number` of the region; it is traced and never run."""
    return x.clone()


@dropout_marker.register_fake
def _(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(x)


def _dropout(call: Operation) -> LiftedTensor:
    x, p = call["x"], call.dropout_probability(call["number"])
    return call.tensor(lambda index: ex.Dropout(x.at(index), p))


def _reduced(
    call: Operation, name: str, dims: Iterable[int], of: Callable[[Expr], Expr] = lambda x: x
) -> Callable[[Indices], Expr]:
    """The reduction of `of` each element over `dims`, as a function of the result's indices."""
    x, keepdim = call.operand, bool(call.get("keepdim", False))
    axes = {d % len(x.shape): call.axis(f"r{d % len(x.shape)}_", x.shape[d]) for d in dims}

    def at(index: Indices) -> Expr:
        rest = iter(i for d, i in enumerate(index) if not (keepdim and d in axes))
        body = of(x.at(tuple(axes[d] if d in axes else next(rest) for d in range(len(x.shape)))))
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


def _reduction(name: str) -> Callable[[Operation], LiftedTensor]:
    def handler(call: Operation) -> LiftedTensor:
        x = call.operand
        given = call.get("dim", None)
        if name == "sum" and x.dtype != call.result.dtype and not x.dtype.is_floating_point:
            raise NoClosedForm("a sum of whole numbers")
        if not x.shape:
            raise NoClosedForm(f"{name} of one number")
        dims = given if isinstance(given, (list, tuple)) else [given]
        if not dims or dims == [None]:
            dims = list(range(len(x.shape)))
        return call.tensor(_reduced(call, name, dims))

    return handler


def _mean(call: Operation) -> LiftedTensor:
    x, dims = call.operand, call["dim"]
    if not dims or not x.shape:
        raise NoClosedForm("a reduction to one number")
    count = sympy.prod([x.shape[d] for d in dims])
    total = _reduced(call, "sum", dims)
    if count.is_Integer:
        return call.tensor(lambda index: al.mul(ex.Const(1.0 / int(count)), total(index)))
    length = precision.cast(call.result.dtype, ex.Index(count), torch.int64, call.space)
    return call.tensor(lambda index: al.div(total(index), length))


def _extreme(name: str) -> Callable[[Operation], list[LiftedTensor]]:
    """The values of a max or min along a dimension; the positions have no closed form."""

    def handler(call: Operation) -> list[LiftedTensor]:
        values, positions = call.node.meta["val"]
        if not call.operand.shape:
            raise NoClosedForm(f"{name} of one number")

        def unknown(index: Indices) -> Expr:
            raise NoClosedForm("the position of the largest element")

        return [call.like(values, _reduced(call, name, [call.dim()])), call.like(positions, unknown)]

    return handler


def _logsumexp(call: Operation) -> LiftedTensor:
    dims = call["dim"]
    if len(dims) != 1 or not call.operand.shape:
        raise NoClosedForm("a log-sum-exp over several dimensions")
    total = _reduced(call, "sum", dims, of=lambda x: al.unary("exp", x))
    return call.tensor(lambda index: al.unary("log", total(index)))


def _cumsum(call: Operation) -> LiftedTensor:
    x = call.operand

    def at(index: Indices) -> Expr:
        # A running sum of zeros is 0, as where no sequence of a batch is packed from several.
        if x.at(index) in (ex.FALSE, ex.Const(0), ex.Const(0.0)):
            return ex.Const(precision.rounded(0, call.result.dtype))
        raise NoClosedForm("a running sum")

    return call.tensor(at)


ACROSS: dict[Any, Callable[[Operation], Any]] = {
    aten.bmm.default: _bmm,
    aten.mm.default: _bmm,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._safe_softmax.default: _safe_softmax,
    torch.ops.attn_fuse.dropout_marker.default: _dropout,
    aten.sum.dim_IntList: _reduction("sum"),
    aten.mean.dim: _mean,
    aten.amax.default: _reduction("amax"),
    aten.amin.default: _reduction("amin"),
    aten.max.default: _reduction("amax"),
    aten.min.default: _reduction("amin"),
    aten.any.dim: _reduction("any"),
    aten.all.dim: _reduction("all"),
    aten.max.dim: _extreme("amax"),
    aten.min.dim: _extreme("amin"),
    aten.logsumexp.default: _logsumexp,
    aten.cumsum.default: _cumsum,
}
