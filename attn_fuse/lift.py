"""Lift: each tensor of a normal form becomes an expression over indices.

A tensor is a shape, a dtype and a function from indices to an element expression. A layout operation only rewrites the
indices; an arithmetic one builds a tree. Asking the region's output for its element at fresh index symbols gives the
whole attention as one expression.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from attn_fuse import expression as ex
from attn_fuse.constants import ClosedForm
from attn_fuse.expression import Expr
from attn_fuse.normalize import Normal
from attn_fuse.space import Space
from attn_fuse.torch_internals import lower_bounds

aten = torch.ops.aten
Indices = tuple[sympy.Expr, ...]


@dataclass(frozen=True, eq=False)
class Tensor:
    shape: Indices
    dtype: torch.dtype
    at: Callable[[Indices], Expr]


@dataclass(frozen=True, eq=False)
class Lifted:
    """One element of a region's output. `element` is over `indices`, one symbol (or 0, for size 1) a dimension.

    leaf_dtypes: of each leaf that is a tensor, by its number.
    """

    element: Expr
    indices: Indices
    shape: Indices
    dtype: torch.dtype
    space: Space
    leaf_dtypes: Mapping[int, torch.dtype]


class NotLifted(Exception):
    """An operation has no closed element expression. `node` is it, in Dynamo's graph where that is known."""

    def __init__(self, reason: str, node: Node | None) -> None:
        super().__init__(reason)
        self.node = node


def lift(normal: Normal, closed_forms: Mapping[int, ClosedForm]) -> Lifted:
    """The region's output as an element expression.

    closed_forms: for leaves whose contents are known and proved, the form to use instead of a load, by leaf number.
    Raises NotLifted.
    """
    space = Space(lower=lower_bounds(normal.mode))
    lifter = _Lifter(normal, closed_forms, space)
    output = lifter.output()
    indices = tuple(
        sympy.Integer(0) if size == 1 else space.fresh("o", size) for size in output.shape
    )
    return Lifted(output.at(indices), indices, output.shape, output.dtype, space, lifter.leaf_dtypes)


class _Lifter:
    def __init__(self, normal: Normal, closed_forms: Mapping[int, ClosedForm], space: Space) -> None:
        self.normal = normal
        self.closed_forms = closed_forms
        self.space = space
        self.values: dict[Node, Any] = {}
        self.leaf_dtypes: dict[int, torch.dtype] = {}

    def output(self) -> Tensor:
        leaf = 0
        for node in self.normal.graph.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.leaf(node, leaf)
                leaf += 1
            elif node.op == "call_function":
                self.values[node] = self.operation(node)
            elif node.op == "get_attr":
                self.values[node] = self.constant(node)
            elif node.op == "output":
                (result,) = node.all_input_nodes
                return self.values[result]
        raise AssertionError("a graph ends with its output")

    def leaf(self, node: Node, number: int) -> Any:
        value = node.meta["val"] if "val" in node.meta else None
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, torch.SymInt) else ex.Scalar(number)
        self.leaf_dtypes[number] = value.dtype
        form = self.closed_forms.get(number)
        if form is not None:
            return Tensor(_shape(value), value.dtype, lambda index: form.element(index, self.space))
        return Tensor(_shape(value), value.dtype, lambda index: ex.Load(number, index))

    def constant(self, node: Node) -> Tensor:
        value = getattr(self.normal.graph, str(node.target))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise NotLifted("a tensor written out in the program", self.normal.origin.get(node))
        number = getattr(value, "constant", None)
        number = value if number is None else number
        return Tensor(_shape(value), value.dtype, lambda index: ex.Const(number.item()))

    def operation(self, node: Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]
        value = node.meta.get("val")
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        handler = _HANDLERS.get(node.target)
        if handler is None:
            raise NotLifted(f"{_plain(node.target)} has no element expression", self.normal.origin.get(node))
        try:
            return handler(_Call(self, node))
        except NotLifted as problem:
            raise NotLifted(str(problem), problem.node or self.normal.origin.get(node)) from None


class _Call:
    """One normalised operation with its arguments already lifted."""

    def __init__(self, lifter: _Lifter, node: Node) -> None:
        self.lifter = lifter
        self.node = node
        self.space = lifter.space
        schema = node.target._schema  # type: ignore[union-attr]
        self.named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.named |= dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        self.named |= node.kwargs

    def __getitem__(self, name: str) -> Any:
        return torch.fx.map_arg(self.named[name], self.lifter.values.__getitem__)

    def sizes(self, name: str) -> list[sympy.Expr]:
        return [_size(s) for s in self[name]]

    @property
    def result(self) -> torch.Tensor:
        return self.node.meta["val"]

    def tensor(self, at: Callable[[Indices], Expr]) -> Tensor:
        return Tensor(_shape(self.result), self.result.dtype, at)


def _shape(value: torch.Tensor) -> Indices:
    return tuple(_size(s) for s in value.shape)


def _size(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _plain(target: Any) -> str:
    return str(target).split(".")[1] if str(target).startswith("aten.") else str(target)


# ---- layout: the indices change, the element does not


def _same_element(call: _Call) -> Tensor:
    return call.tensor(call["self"].at)


def _view(call: _Call) -> Tensor:
    x, shape, space = call["self"], _shape(call.result), call.space

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


def _permute(call: _Call) -> Tensor:
    x, dims = call["self"], [d % len(call["self"].shape) for d in call["dims"]]
    return call.tensor(lambda index: x.at(tuple(index[dims.index(d)] for d in range(len(dims)))))


def _transpose(call: _Call) -> Tensor:
    x, a, b = call["self"], call["dim0"] % len(call["self"].shape), call["dim1"] % len(call["self"].shape)

    def at(index: Indices) -> Expr:
        swapped = list(index)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        return x.at(tuple(swapped))

    return call.tensor(at)


def _expand(call: _Call) -> Tensor:
    x = call["self"]
    extra = len(_shape(call.result)) - len(x.shape)
    return call.tensor(lambda index: x.at(_clamped(index[extra:], x.shape)))


def _clamped(index: Indices, shape: Indices) -> Indices:
    return tuple(sympy.Integer(0) if size == 1 else i for i, size in zip(index, shape, strict=True))


def _unsqueeze(call: _Call) -> Tensor:
    x, dim = call["self"], call["dim"] % (len(call["self"].shape) + 1)
    return call.tensor(lambda index: x.at(index[:dim] + index[dim + 1 :]))


def _squeeze(call: _Call) -> Tensor:
    x = call["self"]
    dims = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
    gone = {d % len(x.shape) for d in dims if x.shape[d % len(x.shape)] == 1} if x.shape else set()

    def at(index: Indices) -> Expr:
        rest = iter(index)
        return x.at(tuple(sympy.Integer(0) if d in gone else next(rest) for d in range(len(x.shape))))

    return call.tensor(at)


def _slice(call: _Call) -> Tensor:
    x, dim, step = call["self"], call["dim"] % len(call["self"].shape), call["step"]
    start = _size(call["start"] if call["start"] is not None else 0)
    if not call.space.is_nonnegative(start):
        if not start.is_Integer:
            raise NotLifted("a slice from an unknown position", None)
        start = x.shape[dim] + start

    def at(index: Indices) -> Expr:
        return x.at((*index[:dim], sympy.expand(start + step * index[dim]), *index[dim + 1 :]))

    return call.tensor(at)


def _select_index(call: _Call) -> Tensor:
    x, dim, position = call["self"], call["dim"] % len(call["self"].shape), _size(call["index"])
    if position.is_Integer and position < 0:
        position = x.shape[dim] + position
    return call.tensor(lambda index: x.at((*index[:dim], position, *index[dim:])))


def _split(call: _Call) -> list[Tensor]:
    x, dim = call["self"], call["dim"] % len(call["self"].shape)
    pieces, start = [], sympy.Integer(0)
    for piece in call.node.meta["val"]:
        def at(index: Indices, start: sympy.Expr = start) -> Expr:
            return x.at((*index[:dim], sympy.expand(index[dim] + start), *index[dim + 1 :]))

        pieces.append(Tensor(_shape(piece), piece.dtype, at))
        start = start + _shape(piece)[dim]
    return pieces


def _unbind(call: _Call) -> list[Tensor]:
    x, dim = call["self"], call["dim"] % len(call["self"].shape)
    return [
        Tensor(
            _shape(piece),
            piece.dtype,
            lambda index, n=n: x.at((*index[:dim], sympy.Integer(n), *index[dim:])),  # type: ignore[misc]
        )
        for n, piece in enumerate(call.node.meta["val"])
    ]


# ---- made from nothing


def _filled(name: str) -> Callable[[_Call], Tensor]:
    def handler(call: _Call) -> Tensor:
        value = _number(call[name])
        return call.tensor(lambda index: ex.cast(call.result.dtype, value, torch.float64))

    return handler


def _constant_fill(value: float) -> Callable[[_Call], Tensor]:
    return lambda call: call.tensor(lambda index: ex.Const(ex.rounded(value, call.result.dtype)))


def _iota(call: _Call) -> Tensor:
    start = call.named.get("start", 0)
    step = call.named.get("step", 1)
    start, step = (torch.fx.map_arg(v, call.lifter.values.__getitem__) for v in (start, step))
    if not all(isinstance(v, (int, torch.SymInt)) for v in (start, step)):
        raise NotLifted("a range that is not made of whole numbers", None)
    dtype = call.result.dtype

    def at(index: Indices) -> Expr:
        value = ex.Index(sympy.expand(_size(start) + _size(step) * index[0]))
        return ex.cast(dtype, value, torch.int64)

    return call.tensor(at)


def _triangle(keep_lower: bool) -> Callable[[_Call], Tensor]:
    def handler(call: _Call) -> Tensor:
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
    raise NotLifted("a number that is computed when the program runs", None)


def _operand(call: _Call, name: str, dtype: torch.dtype | None) -> Callable[[Indices], Expr]:
    """Argument `name` as a function of the result's indices, converted to `dtype`."""
    x = call[name]
    rank = len(_shape(call.result))
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


def _arithmetic(build: Callable[[Expr, Expr], Expr], scaled: bool = False) -> Callable[[_Call], Tensor]:
    def handler(call: _Call) -> Tensor:
        dtype = call.result.dtype
        a, b = _operand(call, "self", dtype), _operand(call, "other", dtype)
        alpha = _number(call["alpha"]) if scaled and "alpha" in call.named else ex.Const(1)

        def at(index: Indices) -> Expr:
            return _rounded_constant(build(a(index), ex.mul(alpha, b(index))), dtype)

        return call.tensor(at)

    return handler


def _rounded_constant(x: Expr, dtype: torch.dtype) -> Expr:
    return ex.Const(ex.rounded(x.value, dtype)) if isinstance(x, ex.Const) and math.isfinite(x.value) else x


def _subtract(a: Expr, b: Expr) -> Expr:
    return ex.add(a, ex.negative(b))


def _divide(call: _Call) -> Tensor:
    if call.named.get("rounding_mode") is not None:
        raise NotLifted("a division that rounds", None)
    return _arithmetic(ex.div)(call)


def _of_one(name: str) -> Callable[[_Call], Tensor]:
    def handler(call: _Call) -> Tensor:
        x = _operand(call, "self", call.result.dtype)
        return call.tensor(lambda index: ex.unary(name, x(index)))

    return handler


def _of_two(name: str, second: str = "other") -> Callable[[_Call], Tensor]:
    def handler(call: _Call) -> Tensor:
        dtype = call.result.dtype
        a, b = _operand(call, "self", dtype), _operand(call, second, dtype)
        return call.tensor(lambda index: ex.binary(name, a(index), b(index)))

    return handler


def _negate(call: _Call) -> Tensor:
    x = _operand(call, "self", call.result.dtype)
    return call.tensor(lambda index: ex.negative(x(index)))


def _clamp(call: _Call) -> Tensor:
    x, low, high = _operand(call, "self", call.result.dtype), call["min"], call["max"]
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise NotLifted("a clamp to a tensor", None)

    def at(index: Indices) -> Expr:
        element = x(index)
        element = element if low is None else ex.binary("maximum", element, _number(low))
        return element if high is None else ex.binary("minimum", element, _number(high))

    return call.tensor(at)


def _comparison(op: str) -> Callable[[_Call], Tensor]:
    def handler(call: _Call) -> Tensor:
        common = torch.result_type(*(_stand_in(call, name) for name in ("self", "other")))
        a, b = _operand(call, "self", common), _operand(call, "other", common)
        return call.tensor(lambda index: ex.compare(op, a(index), b(index), call.space))

    return handler


def _stand_in(call: _Call, name: str) -> Any:
    x = call[name]
    if isinstance(x, Tensor):
        return torch.empty((1,) * len(x.shape), dtype=x.dtype)
    return 1.0 if isinstance(x, (float, torch.SymFloat, Expr)) else x if isinstance(x, bool) else 1


def _logical(build: Callable[[Expr, Expr], Expr]) -> Callable[[_Call], Tensor]:
    def handler(call: _Call) -> Tensor:
        if call.result.dtype != torch.bool:
            raise NotLifted("a bitwise operation on whole numbers", None)
        a, b = _operand(call, "self", torch.bool), _operand(call, "other", torch.bool)
        return call.tensor(lambda index: build(a(index), b(index)))

    return handler


def _inverted(call: _Call) -> Tensor:
    if call.result.dtype != torch.bool:
        raise NotLifted("a bitwise operation on whole numbers", None)
    x = _operand(call, "self", torch.bool)
    return call.tensor(lambda index: ex.logical_not(x(index)))


def _exclusive_or(a: Expr, b: Expr) -> Expr:
    return ex.logical_or(ex.logical_and(a, ex.logical_not(b)), ex.logical_and(ex.logical_not(a), b))


def _where(call: _Call) -> Tensor:
    dtype = call.result.dtype
    cond = _operand(call, "condition", torch.bool)
    a, b = _operand(call, "self", dtype), _operand(call, "other", dtype)
    return call.tensor(lambda index: ex.select(cond(index), a(index), b(index)))


def _masked_fill(call: _Call) -> Tensor:
    dtype = call.result.dtype
    cond, x, value = _operand(call, "mask", torch.bool), _operand(call, "self", dtype), _operand(call, "value", dtype)
    return call.tensor(lambda index: ex.select(cond(index), value(index), x(index)))


def _to_copy(call: _Call) -> Tensor:
    x, dtype = call["self"], call.result.dtype
    return call.tensor(lambda index: ex.cast(dtype, x.at(index), x.dtype))


# ---- across an axis


def _bmm(call: _Call) -> Tensor:
    a, b = call["self"], call["mat2"]
    dtype = call.result.dtype

    def at(index: Indices) -> Expr:
        axis = call.space.fresh("e", a.shape[-1])
        *batch, row, column = index
        return ex.Contract(axis, a.at((*batch, row, axis)), b.at((*batch, axis, column)), dtype)

    return call.tensor(at)


def _softmax(call: _Call) -> Tensor:
    x, dim = call["self"], call["dim"] % max(len(call["self"].shape), 1)
    if not x.shape:
        raise NotLifted("a softmax of one number", None)
    dtype = call.result.dtype

    def at(index: Indices) -> Expr:
        axis = call.space.fresh("j", x.shape[dim])
        body = x.at((*index[:dim], axis, *index[dim + 1 :]))
        return ex.Softmax(axis, ex.cast(dtype, body, x.dtype), index[dim], dtype)

    return call.tensor(at)


def _dropout(call: _Call) -> Tensor:
    x, p = call["x"], call.lifter.normal.dropout[call["number"]]
    if isinstance(p, Node):
        probability: Expr = ex.Scalar(call.lifter.normal.region.leaves.index(p))
    else:
        probability = ex.Const(float(p))
    return call.tensor(lambda index: ex.Dropout(x.at(index), probability))


_HANDLERS: dict[Any, Callable[[_Call], Any]] = {
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
    torch.ops.attn_fuse.dropout_marker.default: _dropout,
}  # fmt: skip

