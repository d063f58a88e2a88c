"""Element-wise operations: a tree over the elements of their arguments, which broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.functions import BINARY, COMPARISONS, UNARY
from attn_fuse.expression.nodes import Expr
from attn_fuse.lift.tensor import Indices, LiftedTensor, NoClosedForm, Operation, aten, number
from attn_fuse.torch_internals import CLAMP_BY_A_TENSOR_SPLITS

_BOTH = ("self", "other")


def _pointwise(
    call: Operation, build: Callable[..., Expr], names: Iterable[str] = (), jumps: bool = False, wide: bool = False
) -> LiftedTensor:
    """`build` of the arguments `names` (default: all), in the dtype of the result, and this dtype.

    jumps: rounding an argument may change the result by a whole step. wide: a number beside half-precision tensors
    stays in float32.
    """
    dtype, space = call.result.dtype, call.space
    operands = [call.elements(name, dtype, wide) for name in names or call.named]
    operands = [call.exact(x) for x in operands] if jumps else operands
    return call.tensor(lambda index: precision.computed(build(*(x(index) for x in operands), dtype), dtype, space))


def _sum(call: Operation, sign: int) -> LiftedTensor:
    """self + sign * alpha * other."""
    alpha = number(call.get("alpha", 1))

    def build(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
        if alpha not in (ex.Const(1), ex.Const(1.0)):
            b = precision.computed(al.mul(alpha, b), dtype, call.space)
        return al.add(a, b if sign > 0 else al.negative(b))

    return _pointwise(call, build, _BOTH, wide=True)


def _divide(call: Operation) -> LiftedTensor:
    mode = call.named.get("rounding_mode")
    if mode is None:
        return _pointwise(call, lambda a, b, dtype: al.div(a, b), _BOTH, wide=True)
    return _whole_division(call, "floor_divide" if mode == "floor" else "trunc_divide")


def _whole_division(call: Operation, name: str = "remainder") -> LiftedTensor:
    dtype, space = call.result.dtype, call.space
    a, b = (call.exact(call.elements(which, dtype)) for which in _BOTH)

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


def _of_one(call: Operation, name: str, **usual: Any) -> LiftedTensor:
    """Function `name` of `self`, for arguments that are as `usual`."""
    for argument, value in usual.items():
        if call[argument] != value:
            raise NoClosedForm(f"{name} with {argument}={call[argument]}")
    return _pointwise(call, partial(al.unary, name), ["self"])


def _to_whole(call: Operation, name: str) -> LiftedTensor:
    """floor, ceil, round or trunc, which leave integers as they are."""
    dtype, space = call.result.dtype, call.space
    x = call.exact(call.elements("self", dtype))

    def at(index: Indices) -> Expr:
        match x(index):
            case ex.Index() as position:
                return position
            # The quotient of two integers that the dtype holds exactly does not round across an integer.
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


def _test(call: Operation, name: str) -> LiftedTensor:
    """A question about one number, such as isnan, in its own dtype."""
    x = call.operand
    if not x.dtype.is_floating_point:
        return call.tensor(lambda index: ex.Const(name == "isfinite"))
    element = call.exact(x.at)
    return call.tensor(lambda index: al.unary(name, element(index)))


def _clamp(call: Operation) -> LiftedTensor:
    dtype = call.result.dtype
    x, low, high = call.elements("self", dtype), call["min"], call["max"]
    bounds = [
        (name, call.elements(which, dtype))
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


def _greater(call: Operation, name: str) -> LiftedTensor:
    """`torch.maximum` or `torch.minimum`: at a tie each operand gets half of the gradient.

    `Binary` gives all of it to one operand, as a clamp does. Any constant may tie: a score plus the dtype's lowest
    number is that number.
    """
    shares = call.trains and call.result.dtype.is_floating_point

    def build(x: Expr, y: Expr, dtype: torch.dtype) -> Expr:
        return _shared(name, x, y, dtype) if shares else al.binary(name, *al.ordered(x, y), dtype)

    return _pointwise(call, build, _BOTH)


def _shared(name: str, x: Expr, y: Expr, dtype: torch.dtype) -> Expr:
    """The max or min that shares the gradient at a tie."""
    x, y = al.ordered(x, y)
    halves = (al.mul(ex.Const(0.5), al.binary(name, one, other, dtype)) for one, other in ((x, y), (y, x)))
    return al.add(*halves)


def _comparison(call: Operation, op: str) -> LiftedTensor:
    common = torch.result_type(*(_stand_in(call, name) for name in _BOTH))
    a, b = (call.exact(call.elements(which, common)) for which in _BOTH)

    def at(index: Indices) -> Expr:
        left, right = a(index), b(index)
        if op in ("eq", "ne") and left == right and common.is_floating_point:
            is_nan = al.unary("isnan", left)
            return is_nan if op == "ne" else al.logical_not(is_nan)
        return al.compare(op, left, right, call.space)

    return call.tensor(at)


def _stand_in(call: Operation, name: str) -> Any:
    x = call[name]
    if isinstance(x, LiftedTensor):
        return torch.empty((1,) * len(x.shape), dtype=x.dtype)
    return 1.0 if isinstance(x, (float, torch.SymFloat, Expr)) else x if isinstance(x, bool) else 1


def _logical(call: Operation, build: Callable[..., Expr]) -> LiftedTensor:
    if call.result.dtype != torch.bool:
        raise NoClosedForm("a bitwise operation on integers")
    operands = [call.elements(name, torch.bool) for name in call.named]
    return call.tensor(lambda index: build(*(x(index) for x in operands)))


def _exclusive_or(a: Expr, b: Expr) -> Expr:
    return al.logical_or(al.logical_and(a, al.logical_not(b)), al.logical_and(al.logical_not(a), b))


def _choice(call: Operation) -> LiftedTensor:
    """where(condition, a, b) or masked_fill(b, mask, a)."""
    condition, where_true, where_false = ("mask", "value", "self") if "mask" in call.named else call.named
    cond = call.elements(condition, torch.bool)
    a, b = (call.elements(name, call.result.dtype) for name in (where_true, where_false))
    return call.tensor(lambda index: al.select(cond(index), a(index), b(index)))


def _of(name: str) -> list[Any]:
    """torch's overloads of function `name` that return a new tensor."""
    overloads = [getattr(getattr(aten, name), kind) for kind in getattr(aten, name).overloads()]
    return [op for op in overloads if str(op._schema.returns[0].type) == "Tensor" and not op._schema.is_mutable]


# The handler for a row of `expression.functions.UNARY`, by its `lifted`.
_LIFTED = {"plain": _of_one, "whole": _to_whole, "test": _test}

ELEMENTWISE: dict[Any, Callable[[Operation], Any]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), partial(_sum, sign=1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), partial(_sum, sign=-1)),
    **dict.fromkeys(
        (aten.mul.Tensor, aten.mul.Scalar), partial(_pointwise, build=lambda a, b, dtype: al.mul(a, b), wide=True)
    ),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode), _divide),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _whole_division),
    aten.neg.default: partial(_pointwise, build=lambda x, dtype: al.negative(x)),
    **{
        getattr(aten, row.name).default: partial(_LIFTED[row.lifted], name=row.name)
        for row in UNARY.values()
        if row.lifted
    },
    aten.gelu.default: partial(_of_one, name="gelu", approximate="none"),
    aten.softplus.default: partial(_of_one, name="softplus", beta=1, threshold=20),
    aten.maximum.default: partial(_greater, name="maximum"),
    aten.minimum.default: partial(_greater, name="minimum"),
    **{
        op: partial(_pointwise, build=partial(al.binary, row.name), jumps=row.lifted == "whole")
        for row in BINARY.values()
        if row.lifted
        for op in _of(row.name)
    },
    **dict.fromkeys((aten.clamp.default, aten.clamp.Tensor), _clamp),
    **{
        getattr(getattr(aten, op), kind): partial(_comparison, op=op)
        for op in COMPARISONS
        for kind in ("Tensor", "Scalar")
    },
    **dict.fromkeys((aten.logical_and.default, aten.bitwise_and.Tensor), partial(_logical, build=al.logical_and)),
    **dict.fromkeys((aten.logical_or.default, aten.bitwise_or.Tensor), partial(_logical, build=al.logical_or)),
    **dict.fromkeys((aten.logical_xor.default, aten.bitwise_xor.Tensor), partial(_logical, build=_exclusive_or)),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), partial(_logical, build=al.logical_not)),
    **dict.fromkeys(
        (aten.where.self, torch.ops.prims.where.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor), _choice
    ),
}
