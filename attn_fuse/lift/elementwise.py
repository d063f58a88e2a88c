"""Element-wise operations: each gives a tree over the elements of its arguments, which broadcast."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.functions import BINARY, COMPARISONS, UNARY
from attn_fuse.expression.nodes import Expr
from attn_fuse.lift.tensor import Indices, LiftedTensor, NoClosedForm, Operation, aten, exact, number, operand
from attn_fuse.torch_internals import CLAMP_BY_A_TENSOR_SPLITS


def _pointwise(
    build: Callable[..., Expr], *names: str, jumps: bool = False, wide: bool = False
) -> Callable[[Operation], LiftedTensor]:
    """`build` of the arguments called `names`, each in the dtype of the result, which it is given last.

    Without names it takes every argument. jumps: a rounding of the arguments may change the result by a whole step.
    wide: a number beside half precision is taken in float32.
    """

    def handler(call: Operation) -> LiftedTensor:
        dtype, space = call.result.dtype, call.space
        given = names or [argument.name for argument in call.node.target._schema.arguments]
        operands = [operand(call, name, dtype, wide) for name in given]
        operands = [exact(call, x) for x in operands] if jumps else operands
        return call.tensor(lambda index: precision.computed(build(*(x(index) for x in operands), dtype), dtype, space))

    return handler


def _sum(sign: int) -> Callable[[Operation], LiftedTensor]:
    """self + alpha * other, or with the sign -1 self - alpha * other."""

    def handler(call: Operation) -> LiftedTensor:
        alpha = number(call.get("alpha", 1))

        def build(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
            if alpha not in (ex.Const(1), ex.Const(1.0)):
                b = precision.computed(al.mul(alpha, b), dtype, call.space)
            return al.add(a, b if sign > 0 else al.negative(b))

        return _pointwise(build, "self", "other", wide=True)(call)

    return handler


def _divide(call: Operation) -> LiftedTensor:
    mode = call.named.get("rounding_mode")
    if mode is None:
        return _pointwise(lambda a, b, dtype: al.div(a, b), "self", "other", wide=True)(call)
    return _whole_division(call, "floor_divide" if mode == "floor" else "trunc_divide")


def _whole_division(call: Operation, name: str = "remainder") -> LiftedTensor:
    dtype, space = call.result.dtype, call.space
    a, b = (exact(call, operand(call, which, dtype)) for which in ("self", "other"))

    def at(index: Indices) -> Expr:
        match a(index), b(index):
            case ex.Index(value), ex.Const(by) if by > 0 and by == int(by) and space.is_nonnegative(value):
                whole = sympy.Integer(int(by))
                return ex.Index(space.mod(value, whole) if name == "remainder" else space.floordiv(value, whole))
            case x, y if name == "trunc_divide":
                if not dtype.is_floating_point:
                    raise NoClosedForm("a division that rounds towards zero")
                quotient = precision.as_rounded(precision.computed(al.div(x, y), dtype, space), call.leaf_dtypes)
                return al.unary("trunc", quotient, dtype)
            case x, y:
                return precision.computed(al.binary(name, x, y, dtype), dtype, space)

    return call.tensor(at)


def _of_one(name: str) -> Callable[[Operation], LiftedTensor]:
    return _pointwise(functools.partial(al.unary, name), "self")


def _to_whole(name: str) -> Callable[[Operation], LiftedTensor]:
    """floor and its like, which leave integers as they are."""

    def handler(call: Operation) -> LiftedTensor:
        dtype, space = call.result.dtype, call.space
        x = exact(call, operand(call, "self", dtype))

        def at(index: Indices) -> Expr:
            match x(index):
                case ex.Index() as position:
                    return position
                # The quotient of two integers that a dtype holds exactly is not rounded across an integer.
                case ex.Div(ex.Cast(_, ex.Index(value)), ex.Const(by)) if (
                    name in ("floor", "trunc")
                    and dtype in (torch.float32, torch.float64)
                    and by > 0
                    and by == int(by)
                    and space.is_nonnegative(value)
                    and precision.is_exact(value, dtype, space)
                ):
                    return ex.Index(space.floordiv(value, sympy.Integer(int(by))))
                case element:
                    return al.unary(name, element, dtype)

        return call.tensor(at)

    return handler


def _test(name: str) -> Callable[[Operation], LiftedTensor]:
    return _asked(functools.partial(al.unary, name), of_whole=name == "isfinite")


def _asked(question: Callable[[Expr], Expr], of_whole: bool = False) -> Callable[[Operation], LiftedTensor]:
    """A question about one number, such as isnan, asked in its own dtype. of_whole: the answer for any integer."""

    def handler(call: Operation) -> LiftedTensor:
        x = call.operand
        if not x.dtype.is_floating_point:
            return call.tensor(lambda index: ex.Const(of_whole))
        element = exact(call, x.at)
        return call.tensor(lambda index: question(element(index)))

    return handler


def _clamp(call: Operation) -> LiftedTensor:
    dtype = call.result.dtype
    x, low, high = operand(call, "self", dtype), call["min"], call["max"]
    bounds = [
        (name, operand(call, which, dtype))
        for name, which, bound in (("maximum", "min", low), ("minimum", "max", high))
        if bound is not None
    ]
    of_two: Callable[[str, Expr, Expr, torch.dtype], Expr] = al.binary
    if CLAMP_BY_A_TENSOR_SPLITS and call.trains and dtype.is_floating_point and isinstance(low or high, LiftedTensor):
        if len(bounds) == 2:
            raise NoClosedForm("a clamp between two tensors, in training")
        of_two = _shared

    def at(index: Indices) -> Expr:
        element = x(index)
        for name, bound in bounds:
            element = of_two(name, element, bound(index), dtype)
        return element

    return call.tensor(at)


def _greater(name: str) -> Callable[[Operation], LiftedTensor]:
    """`torch.maximum` or `torch.minimum`: at a tie each operand has half of the gradient.

    `Binary` gives all of it to one operand, as a clamp does. No constant is out of reach of a tie: a score plus the
    dtype's lowest number is that number.
    """

    def handler(call: Operation) -> LiftedTensor:
        dtype, space = call.result.dtype, call.space
        a, b = operand(call, "self", dtype), operand(call, "other", dtype)
        shares = call.trains and dtype.is_floating_point

        def at(index: Indices) -> Expr:
            x, y = a(index), b(index)
            if shares:
                return _shared(name, x, y, dtype)
            return precision.computed(al.binary(name, *al.ordered(x, y), dtype), dtype, space)

        return call.tensor(at)

    return handler


def _shared(name: str, x: Expr, y: Expr, dtype: torch.dtype) -> Expr:
    """The maximum or minimum that shares the gradient of a tie."""
    x, y = al.ordered(x, y)
    halves = (al.mul(ex.Const(0.5), al.binary(name, one, other, dtype)) for one, other in ((x, y), (y, x)))
    return al.add(*halves)


def _between(x: Expr, low: float, high: float, call: Operation) -> Expr:
    """`x` limited to [low, high], without a gradient at either end."""
    inside = al.select(al.compare("ge", x, ex.Const(high), call.space), ex.Const(high), x)
    return al.select(al.compare("le", x, ex.Const(low), call.space), ex.Const(low), inside)


def _hardtanh(call: Operation) -> LiftedTensor:
    dtype = call.result.dtype
    x = operand(call, "self", dtype)
    low, high = (precision.rounded(call.get(name, usual), dtype) for name, usual in (("min_val", 0), ("max_val", 6)))
    return call.tensor(lambda index: _between(x(index), low, high, call))


def _hardsigmoid(call: Operation) -> LiftedTensor:
    x = operand(call, "self", call.result.dtype)
    return call.tensor(lambda index: al.div(_between(al.add(x(index), ex.Const(3.0)), 0.0, 6.0, call), ex.Const(6.0)))


def _hardswish(call: Operation) -> LiftedTensor:
    x, share = operand(call, "self", call.result.dtype), _hardsigmoid(call)
    return call.tensor(lambda index: al.mul(x(index), share.at(index)))


# Klambauer et al., arXiv 1706.02515
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _elu(call: Operation) -> LiftedTensor:
    """ELU, CELU and SELU, without the exponential of a positive number, whose gradient may be infinite."""
    x, name = operand(call, "self", call.result.dtype), call.node.target._schema.name
    alpha, scale, inner = _SELU_ALPHA, _SELU_SCALE, 1.0
    if name == "aten::celu":
        alpha, scale, inner = float(call["alpha"]), 1.0, 1 / float(call["alpha"])
    elif name == "aten::elu":
        alpha, scale, inner = (float(call[part]) for part in ("alpha", "scale", "input_scale"))

    def at(index: Indices) -> Expr:
        element = x(index)
        positive = al.compare("gt", element, ex.Const(0.0), call.space)
        low = al.mul(ex.Const(inner), al.select(positive, ex.Const(0.0), element))
        below = al.mul(ex.Const(alpha * scale), al.unary("expm1", low))
        return al.select(positive, al.mul(ex.Const(scale), element), below)

    return call.tensor(at)


def _comparison(op: str) -> Callable[[Operation], LiftedTensor]:
    def handler(call: Operation) -> LiftedTensor:
        common = torch.result_type(*(_stand_in(call, name) for name in ("self", "other")))
        a, b = (exact(call, operand(call, which, common)) for which in ("self", "other"))

        def at(index: Indices) -> Expr:
            left, right = a(index), b(index)
            if op in ("eq", "ne") and left == right and common.is_floating_point:
                is_nan = al.unary("isnan", left)
                return is_nan if op == "ne" else al.logical_not(is_nan)
            return al.compare(op, left, right, call.space)

        return call.tensor(at)

    return handler


def _stand_in(call: Operation, name: str) -> Any:
    x = call[name]
    if isinstance(x, LiftedTensor):
        return torch.empty((1,) * len(x.shape), dtype=x.dtype)
    return 1.0 if isinstance(x, (float, torch.SymFloat, Expr)) else x if isinstance(x, bool) else 1


def _logical(build: Callable[..., Expr], *names: str) -> Callable[[Operation], LiftedTensor]:
    def handler(call: Operation) -> LiftedTensor:
        if call.result.dtype != torch.bool:
            raise NoClosedForm("a bitwise operation on whole numbers")
        operands = [operand(call, name, torch.bool) for name in names]
        return call.tensor(lambda index: build(*(x(index) for x in operands)))

    return handler


def _exclusive_or(a: Expr, b: Expr) -> Expr:
    return al.logical_or(al.logical_and(a, al.logical_not(b)), al.logical_and(al.logical_not(a), b))


def _choice(condition: str, where_true: str, where_false: str) -> Callable[[Operation], LiftedTensor]:
    def handler(call: Operation) -> LiftedTensor:
        cond = operand(call, condition, torch.bool)
        a, b = (operand(call, name, call.result.dtype) for name in (where_true, where_false))
        return call.tensor(lambda index: al.select(cond(index), a(index), b(index)))

    return handler


def _softplus(call: Operation) -> LiftedTensor:
    if call["beta"] != 1 or call["threshold"] != 20:
        raise NoClosedForm("a softplus with its own beta or threshold")
    return _of_one("softplus")(call)


def _gelu(call: Operation) -> LiftedTensor:
    if call["approximate"] != "none":
        raise NoClosedForm("an approximate GELU")
    return _of_one("gelu")(call)


def _to_copy(call: Operation) -> LiftedTensor:
    x, dtype = call["self"], call.result.dtype
    # A cast to integers or to Booleans jumps.
    element = x.at if dtype.is_floating_point else exact(call, x.at)
    return call.tensor(lambda index: precision.cast(dtype, element(index), x.dtype, call.space))


def _of(name: str) -> list[Any]:
    """torch's overloads of the function `name` that give a tensor of their own."""
    overloads = [getattr(getattr(aten, name), kind) for kind in getattr(aten, name).overloads()]
    return [op for op in overloads if str(op._schema.returns[0].type) == "Tensor" and not op._schema.is_mutable]


# How the lift reads a row of `expression.functions.UNARY`, by its `lifted`.
_LIFTED = {"plain": _of_one, "whole": _to_whole, "test": _test}

_BOTH = ("self", "other")
ELEMENTWISE: dict[Any, Callable[[Operation], Any]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _sum(1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _sum(-1)),
    **dict.fromkeys(
        (aten.mul.Tensor, aten.mul.Scalar), _pointwise(lambda a, b, dtype: al.mul(a, b), *_BOTH, wide=True)
    ),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode), _divide),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _whole_division),
    aten.neg.default: _pointwise(lambda x, dtype: al.negative(x), "self"),
    **{getattr(aten, row.name).default: _LIFTED[row.lifted](row.name) for row in UNARY.values() if row.lifted},
    aten.isneginf.default: _asked(lambda x: al.compare("eq", x, ex.Const(-math.inf))),
    aten.isposinf.default: _asked(lambda x: al.compare("eq", x, ex.Const(math.inf))),
    aten.gelu.default: _gelu,
    aten.softplus.default: _softplus,
    aten.maximum.default: _greater("maximum"),
    aten.minimum.default: _greater("minimum"),
    **dict.fromkeys((aten.hardtanh.default, aten.relu6.default), _hardtanh),
    aten.hardsigmoid.default: _hardsigmoid,
    aten.hardswish.default: _hardswish,
    **dict.fromkeys((aten.elu.default, aten.celu.default, aten.selu.default), _elu),
    **{
        op: _pointwise(functools.partial(al.binary, row.name), jumps=row.lifted == "whole")
        for row in BINARY.values()
        if row.lifted
        for op in _of(row.name)
    },
    **dict.fromkeys((aten.clamp.default, aten.clamp.Tensor), _clamp),
    **{getattr(getattr(aten, op), kind): _comparison(op) for op in COMPARISONS for kind in ("Tensor", "Scalar")},
    **dict.fromkeys((aten.logical_and.default, aten.bitwise_and.Tensor), _logical(al.logical_and, *_BOTH)),
    **dict.fromkeys((aten.logical_or.default, aten.bitwise_or.Tensor), _logical(al.logical_or, *_BOTH)),
    **dict.fromkeys((aten.logical_xor.default, aten.bitwise_xor.Tensor), _logical(_exclusive_or, *_BOTH)),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), _logical(al.logical_not, "self")),
    aten.where.self: _choice("condition", "self", "other"),
    torch.ops.prims.where.default: _choice("pred", "a", "b"),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _choice("mask", "value", "self")),
    aten._to_copy.default: _to_copy,
}
