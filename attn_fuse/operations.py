"""Operations: what each core ATen operation does to element expressions.

A layout operation only rewrites the indices; an arithmetic one builds a tree; a product sums over a fresh axis. One
handler an operation, in the table at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node, map_arg

from attn_fuse import expression as ex
from attn_fuse.expression import Expr
from attn_fuse.space import Space

aten = torch.ops.aten
Indices = tuple[sympy.Expr, ...]


class NoClosedForm(Exception):
    """The operation, as it is called here, has no closed element expression."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A shape, a dtype, and the element expression at given indices."""

    shape: Indices
    dtype: torch.dtype
    at: Callable[[Indices], Expr]


class Operation:
    """One normalised operation with its arguments already lifted, by their names in its schema."""

    def __init__(
        self, node: Node, values: Mapping[Node, Any], space: Space, dropout_probability: Callable[[int], Expr]
    ) -> None:
        self.node = node
        self.space = space
        self.dropout_probability = dropout_probability
        self._values = values
        schema = node.target._schema
        self.named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.named |= dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        self.named |= node.kwargs

    def __getitem__(self, name: str) -> Any:
        return map_arg(self.named[name], self._values.__getitem__)

    def get(self, name: str, usual: Any) -> Any:
        """The argument, or `usual` where the schema has none of this name."""
        return self[name] if name in self.named else usual

    @property
    def result(self) -> torch.Tensor:
        return self.node.meta["val"]

    def tensor(self, at: Callable[[Indices], Expr]) -> Tensor:
        return Tensor(shape_of(self.result), self.result.dtype, at)


def shape_of(value: torch.Tensor) -> Indices:
    return tuple(_size(s) for s in value.shape)


def _size(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


# ---- layout: the indices change, the element does not


def _same_element(call: Operation) -> Tensor:
    return call.tensor(call["self"].at)


def _view(call: Operation) -> Tensor:
    x, shape, space = call["self"], shape_of(call.result), call.space

    def at(index: Indices) -> Expr:
        return x.at(_reindex(index, shape, x.shape, space))

    return call.tensor(at)


def _reindex(index: Indices, shape: Indices, into: Indices, space: Space) -> Indices:
    """The position in shape `into` of the element that stands at `index` in `shape`, both in row-major order."""
    if shape == into:
        return index
    # Outer dimensions that agree stay as they are; this keeps symbolic sizes out of the arithmetic.
    if shape and into and space.same_size(shape[0], into[0]):
        return (index[0], *_reindex(index[1:], shape[1:], into[1:], space))
    if shape and into and space.same_size(shape[-1], into[-1]):
        return (*_reindex(index[:-1], shape[:-1], into[:-1], space), index[-1])
    flat = sympy.Integer(0)
    for i, size in zip(index, shape, strict=True):
        flat = sympy.expand(flat * size + i)
    position: list[sympy.Expr] = []
    for size in reversed(into[1:]):
        position.append(space.mod(flat, size) if size != 1 else sympy.Integer(0))
        flat = space.floordiv(flat, size) if size != 1 else flat
    return (flat, *reversed(position)) if into else ()


def _permute(call: Operation) -> Tensor:
    x, dims = call["self"], [d % len(call["self"].shape) for d in call["dims"]]
    return call.tensor(lambda index: x.at(tuple(index[dims.index(d)] for d in range(len(dims)))))


def _transpose(call: Operation) -> Tensor:
    x, a, b = call["self"], call["dim0"] % len(call["self"].shape), call["dim1"] % len(call["self"].shape)

    def at(index: Indices) -> Expr:
        swapped = list(index)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        return x.at(tuple(swapped))

    return call.tensor(at)


def _expand(call: Operation) -> Tensor:
    x = call["self"]
    extra = len(shape_of(call.result)) - len(x.shape)
    return call.tensor(lambda index: x.at(_clamped(index[extra:], x.shape)))


def _clamped(index: Indices, shape: Indices) -> Indices:
    return tuple(sympy.Integer(0) if size == 1 else i for i, size in zip(index, shape, strict=True))


def _repeat(call: Operation) -> Tensor:
    x, space = call["self"], call.space
    extra = len(shape_of(call.result)) - len(x.shape)

    def at(index: Indices) -> Expr:
        return x.at(tuple(space.mod(i, size) for i, size in zip(index[extra:], x.shape, strict=True)))

    return call.tensor(at)


def _unsqueeze(call: Operation) -> Tensor:
    x, dim = call["self"], call["dim"] % (len(call["self"].shape) + 1)
    return call.tensor(lambda index: x.at(index[:dim] + index[dim + 1 :]))


def _squeeze(call: Operation) -> Tensor:
    x = call["self"]
    dims = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
    gone = {d % len(x.shape) for d in dims if x.shape[d % len(x.shape)] == 1} if x.shape else set()

    def at(index: Indices) -> Expr:
        rest = iter(index)
        return x.at(tuple(sympy.Integer(0) if d in gone else next(rest) for d in range(len(x.shape))))

    return call.tensor(at)


def _slice(call: Operation) -> Tensor:
    x, dim, step = call["self"], call["dim"] % len(call["self"].shape), call["step"]
    start = _size(call["start"] if call["start"] is not None else 0)
    if not call.space.is_nonnegative(start):
        if not start.is_Integer:
            raise NoClosedForm("a slice from an unknown position")
        start = x.shape[dim] + start

    def at(index: Indices) -> Expr:
        return x.at((*index[:dim], sympy.expand(start + step * index[dim]), *index[dim + 1 :]))

    return call.tensor(at)


def _select_index(call: Operation) -> Tensor:
    x, dim, position = call["self"], call["dim"] % len(call["self"].shape), _size(call["index"])
    if position.is_Integer and position < 0:
        position = x.shape[dim] + position
    return call.tensor(lambda index: x.at((*index[:dim], position, *index[dim:])))


def _split(call: Operation) -> list[Tensor]:
    x, dim = call["self"], call["dim"] % len(call["self"].shape)
    pieces, start = [], sympy.Integer(0)
    for piece in call.node.meta["val"]:

        def at(index: Indices, start: sympy.Expr = start) -> Expr:
            return x.at((*index[:dim], sympy.expand(index[dim] + start), *index[dim + 1 :]))

        pieces.append(Tensor(shape_of(piece), piece.dtype, at))
        start = start + shape_of(piece)[dim]
    return pieces


def _unbind(call: Operation) -> list[Tensor]:
    x, dim = call["self"], call["dim"] % len(call["self"].shape)
    return [
        Tensor(
            shape_of(piece),
            piece.dtype,
            lambda index, n=n: x.at((*index[:dim], sympy.Integer(n), *index[dim:])),  # type: ignore[misc]
        )
        for n, piece in enumerate(call.node.meta["val"])
    ]


# ---- made from nothing


def _filled(name: str) -> Callable[[Operation], Tensor]:
    def handler(call: Operation) -> Tensor:
        value = _number(call[name])
        return call.tensor(lambda index: ex.cast(call.result.dtype, value, torch.float64))

    return handler


def _constant_fill(value: float) -> Callable[[Operation], Tensor]:
    return lambda call: call.tensor(lambda index: ex.Const(ex.rounded(value, call.result.dtype)))


def _iota(call: Operation) -> Tensor:
    start, step = (call.get(name, usual) for name, usual in (("start", 0), ("step", 1)))
    if not all(isinstance(v, (int, torch.SymInt)) for v in (start, step)):
        raise NoClosedForm("a range that is not made of whole numbers")
    dtype = call.result.dtype

    def at(index: Indices) -> Expr:
        value = ex.Index(sympy.expand(_size(start) + _size(step) * index[0]))
        return ex.cast(dtype, value, torch.int64)

    return call.tensor(at)


def _triangle(keep_lower: bool) -> Callable[[Operation], Tensor]:
    def handler(call: Operation) -> Tensor:
        x, diagonal = call["self"], _size(call["diagonal"])

        def at(index: Indices) -> Expr:
            row, column = index[-2], index[-1]
            inside = row + diagonal - column if keep_lower else column - row - diagonal
            zero = ex.Const(ex.rounded(0, x.dtype))
            return ex.select(ex.nonnegative(inside, call.space), x.at(index), zero)

        return call.tensor(at)

    return handler


# ---- element by element


def _number(value: Any) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, torch.SymInt):
        return ex.Index(value.node.expr)
    if isinstance(value, (bool, int, float)):
        return ex.Const(value)
    raise NoClosedForm("a number that is computed when the program runs")


def _operand(call: Operation, name: str, dtype: torch.dtype | None) -> Callable[[Indices], Expr]:
    """Argument `name` as a function of the result's indices, converted to `dtype`."""
    x = call[name]
    rank = len(shape_of(call.result))
    if not isinstance(x, Tensor):
        number = _number(x)
        if isinstance(number, ex.Const) and dtype is not None:
            number = ex.Const(ex.rounded(number.value, dtype))
        return lambda index: number
    extra = rank - len(x.shape)

    def at(index: Indices) -> Expr:
        element = x.at(_clamped(index[extra:], x.shape))
        return element if dtype is None else ex.cast(dtype, element, x.dtype)

    return at


def _arithmetic(build: Callable[[Expr, Expr], Expr], scaled: bool = False) -> Callable[[Operation], Tensor]:
    def handler(call: Operation) -> Tensor:
        dtype = call.result.dtype
        a, b = _operand(call, "self", dtype), _operand(call, "other", dtype)
        alpha = _number(call.get("alpha", 1)) if scaled else ex.Const(1)

        def at(index: Indices) -> Expr:
            return _rounded_constant(build(a(index), ex.mul(alpha, b(index))), dtype)

        return call.tensor(at)

    return handler


def _rounded_constant(x: Expr, dtype: torch.dtype) -> Expr:
    match x:
        case ex.Const(value) if math.isfinite(value):
            return ex.Const(ex.rounded(value, dtype))
        case ex.Select(cond, ex.Const() as a, ex.Const() as b):
            return ex.select(cond, _rounded_constant(a, dtype), _rounded_constant(b, dtype))
    return x


def _subtract(a: Expr, b: Expr) -> Expr:
    return ex.add(a, ex.negative(b))


def _divide(call: Operation) -> Tensor:
    if call.named.get("rounding_mode") is not None:
        raise NoClosedForm("a division that rounds")
    return _arithmetic(ex.div)(call)


def _of_one(name: str) -> Callable[[Operation], Tensor]:
    def handler(call: Operation) -> Tensor:
        x = _operand(call, "self", call.result.dtype)
        return call.tensor(lambda index: ex.unary(name, x(index)))

    return handler


def _of_two(name: str, second: str = "other") -> Callable[[Operation], Tensor]:
    def handler(call: Operation) -> Tensor:
        dtype = call.result.dtype
        a, b = _operand(call, "self", dtype), _operand(call, second, dtype)
        return call.tensor(lambda index: ex.binary(name, a(index), b(index)))

    return handler


def _negate(call: Operation) -> Tensor:
    x = _operand(call, "self", call.result.dtype)
    return call.tensor(lambda index: ex.negative(x(index)))


def _clamp(call: Operation) -> Tensor:
    x, low, high = _operand(call, "self", call.result.dtype), call["min"], call["max"]
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise NoClosedForm("a clamp to a tensor")

    def at(index: Indices) -> Expr:
        element = x(index)
        element = element if low is None else ex.binary("maximum", element, _number(low))
        return element if high is None else ex.binary("minimum", element, _number(high))

    return call.tensor(at)


def _comparison(op: str) -> Callable[[Operation], Tensor]:
    def handler(call: Operation) -> Tensor:
        common = torch.result_type(*(_stand_in(call, name) for name in ("self", "other")))
        a, b = _operand(call, "self", common), _operand(call, "other", common)
        return call.tensor(lambda index: ex.compare(op, a(index), b(index), call.space))

    return handler


def _stand_in(call: Operation, name: str) -> Any:
    x = call[name]
    if isinstance(x, Tensor):
        return torch.empty((1,) * len(x.shape), dtype=x.dtype)
    return 1.0 if isinstance(x, (float, torch.SymFloat, Expr)) else x if isinstance(x, bool) else 1


def _logical(build: Callable[[Expr, Expr], Expr]) -> Callable[[Operation], Tensor]:
    def handler(call: Operation) -> Tensor:
        if call.result.dtype != torch.bool:
            raise NoClosedForm("a bitwise operation on whole numbers")
        a, b = _operand(call, "self", torch.bool), _operand(call, "other", torch.bool)
        return call.tensor(lambda index: build(a(index), b(index)))

    return handler


def _inverted(call: Operation) -> Tensor:
    if call.result.dtype != torch.bool:
        raise NoClosedForm("a bitwise operation on whole numbers")
    x = _operand(call, "self", torch.bool)
    return call.tensor(lambda index: ex.logical_not(x(index)))


def _exclusive_or(a: Expr, b: Expr) -> Expr:
    return ex.logical_or(ex.logical_and(a, ex.logical_not(b)), ex.logical_and(ex.logical_not(a), b))


def _where(call: Operation) -> Tensor:
    dtype = call.result.dtype
    cond = _operand(call, "condition", torch.bool)
    a, b = _operand(call, "self", dtype), _operand(call, "other", dtype)
    return call.tensor(lambda index: ex.select(cond(index), a(index), b(index)))


def _masked_fill(call: Operation) -> Tensor:
    dtype = call.result.dtype
    cond, x, value = _operand(call, "mask", torch.bool), _operand(call, "self", dtype), _operand(call, "value", dtype)
    return call.tensor(lambda index: ex.select(cond(index), value(index), x(index)))


def _to_copy(call: Operation) -> Tensor:
    x, dtype = call["self"], call.result.dtype
    return call.tensor(lambda index: ex.cast(dtype, x.at(index), x.dtype))


# ---- across an axis


def _bmm(call: Operation) -> Tensor:
    a, b = call["self"], call["mat2"]
    dtype = call.result.dtype

    def at(index: Indices) -> Expr:
        axis = call.space.fresh("e", a.shape[-1])
        *batch, row, column = index
        return ex.Contract(axis, a.at((*batch, row, axis)), b.at((*batch, axis, column)), dtype)

    return call.tensor(at)


def _softmax(call: Operation) -> Tensor:
    x, dim = call["self"], call["dim"] % max(len(call["self"].shape), 1)
    if not x.shape:
        raise NoClosedForm("a softmax of one number")
    dtype = call.result.dtype

    def at(index: Indices) -> Expr:
        axis = call.space.fresh("j", x.shape[dim])
        body = x.at((*index[:dim], axis, *index[dim + 1 :]))
        return ex.Softmax(axis, ex.cast(dtype, body, x.dtype), index[dim], dtype)

    return call.tensor(at)


def _log_softmax(call: Operation) -> Tensor:
    weights = _softmax(call)
    return call.tensor(lambda index: ex.unary("log", weights.at(index)))


def _dropout(call: Operation) -> Tensor:
    x, p = call["x"], call.dropout_probability(call["number"])
    return call.tensor(lambda index: ex.Dropout(x.at(index), p))


OPERATIONS: dict[Any, Callable[[Operation], Any]] = {
    **dict.fromkeys(
        (
            aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default,
            aten.lift_fresh.default, aten.contiguous.default,
        ),
        _same_element,
    ),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select_index,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.full.default: _filled("fill_value"),
    aten.full_like.default: _filled("fill_value"),
    aten.scalar_tensor.default: _filled("s"),
    aten.new_full.default: _filled("fill_value"),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _constant_fill(1)),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _constant_fill(0)),
    aten.fill.Scalar: _filled("value"),
    aten.arange.start_step: _iota,
    aten.arange.start: _iota,
    aten.arange.default: _iota,
    torch.ops.prims.iota.default: _iota,
    aten.tril.default: _triangle(True),
    aten.triu.default: _triangle(False),
    aten.add.Tensor: _arithmetic(ex.add, scaled=True),
    aten.add.Scalar: _arithmetic(ex.add, scaled=True),
    aten.sub.Tensor: _arithmetic(_subtract, scaled=True),
    aten.sub.Scalar: _arithmetic(_subtract, scaled=True),
    aten.mul.Tensor: _arithmetic(ex.mul),
    aten.mul.Scalar: _arithmetic(ex.mul),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode), _divide),
    aten.neg.default: _negate,
    **{
        getattr(aten, name).default: _of_one(name)
        for name in ("exp", "log", "tanh", "sqrt", "rsqrt", "reciprocal", "abs", "sigmoid")
    },
    aten.maximum.default: _of_two("maximum"),
    aten.minimum.default: _of_two("minimum"),
    aten.pow.Tensor_Scalar: _of_two("pow", "exponent"),
    aten.pow.Tensor_Tensor: _of_two("pow", "exponent"),
    aten.clamp.default: _clamp,
    **{
        getattr(getattr(aten, op), kind): _comparison(op)
        for op in ("eq", "ne", "lt", "le", "gt", "ge")
        for kind in ("Tensor", "Scalar")
    },
    aten.logical_and.default: _logical(ex.logical_and),
    aten.bitwise_and.Tensor: _logical(ex.logical_and),
    aten.logical_or.default: _logical(ex.logical_or),
    aten.bitwise_or.Tensor: _logical(ex.logical_or),
    aten.logical_xor.default: _logical(_exclusive_or),
    aten.bitwise_xor.Tensor: _logical(_exclusive_or),
    aten.logical_not.default: _inverted,
    aten.bitwise_not.default: _inverted,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten._to_copy.default: _to_copy,
    aten.bmm.default: _bmm,
    aten.mm.default: _bmm,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    torch.ops.attn_fuse.dropout_marker.default: _dropout,
}  # fmt: skip
