"""Functions: a table of the element-wise functions of numbers, one row each.

A row has torch's name of the function, the dtype of its result, its gradient, its range, and its Triton code. The lift
and our kernels look here, so adding a row is enough to support a function of one number. tests/graph/test_functions.py
checks each field against torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attn_fuse.expression.nodes import And, Binary, Compare, Expr, Select, Unary, as_expr
from attn_fuse.expression.numbers import UNBOUNDED
from attn_fuse.torch_internals import CLAMP_PASSES_AT_ITS_EDGE

# (gradient of the result, result, operands...) -> gradient of one operand.
Rule = Callable[..., Expr]
Interval = tuple[Any, Any]


class Order(NamedTuple):
    """How to compare the ends of intervals, numbers or tensors: min (`smaller`) and max (`larger`)."""

    smaller: Callable[[Any, Any], Any]
    larger: Callable[[Any, Any], Any]

    def hull(self, values: Iterable[Any]) -> Interval:
        """The interval [min, max] of `values`, which are not empty."""
        low, *rest = values
        high = low
        for value in rest:
            low, high = self.smaller(low, value), self.larger(high, value)
        return low, high


@dataclass(frozen=True, eq=False)
class Function:
    """A function of one or two numbers.

    name: torch's, in lower case without a namespace. torch: the callable, which may stand in a graph.
    gradients: the gradient rule for each operand; None if it has no gradient, as in floor.
    gives: the dtype of the result: "same" as the operands, "fraction" (floating-point even for integers) or "truth".
    lifted: how the lift reads ATen's operation of this name: "plain" (element by element), "whole" (a function that
        jumps), "test" (a question about one number), or "" (by a handler of its own, or not at all).
    interval: (order, operand intervals) -> the exact interval of the results, by arithmetic on the ends, which may be
        floats, integers or tensors.
    image: without `interval`: (value, operand intervals) -> an interval that contains the results. Integer ends are
        exact. None if nothing is known.
    infinite: the sign of the result at (minus infinity, infinity), 0 if it is finite or NaN; None if unknown.
    undefined: the signs of the infinities at which the result is NaN.
    growth: "bounded", "linear" (no faster than the operand) or "".
    triton: Triton's code for floats, with {0} and {1} for the operands. whole: its code for integers.
    """

    name: str
    torch: Callable[..., Tensor]
    gradients: tuple[Rule | None, ...]
    gives: Literal["same", "fraction", "truth"] = "fraction"
    lifted: Literal["plain", "whole", "test", ""] = ""
    image: Callable[..., Interval] | None = None
    interval: Callable[..., Interval] | None = None
    infinite: tuple[int, int] | None = None
    undefined: frozenset[int] = frozenset()
    growth: Literal["bounded", "linear", ""] = ""
    triton: str = ""
    whole: str = ""

    def value(self, *numbers: float) -> float:
        """The value at `numbers` in float64."""
        return float(self.torch(*(torch.tensor(x, dtype=torch.float64) for x in numbers)))


exp, log, cos, sin, cosh, sinh, sign, trunc, rsqrt, erfc, sigmoid = (
    partial(Unary, name) for name in "exp log cos sin cosh sinh sign trunc rsqrt erfc sigmoid".split()
)


def where(condition: Expr, x: Expr | float, y: Expr | float) -> Expr:
    return Select(condition, as_expr(x), as_expr(y))


def compare(op: str, x: Expr, y: Expr | float) -> Expr:
    return Compare(op, x, as_expr(y))


def _leads(x: Expr, other: Expr) -> Expr:
    """x >= other, or x > other since torch 2.14, where a clamp's gradient at a tie goes to its bound."""
    return compare("ge" if CLAMP_PASSES_AT_ITS_EDGE else "gt", x, other)


def _per_square(a: Expr, b: Expr) -> Expr:
    square = a * a + b * b
    return where(compare("eq", square, 0), 0.0, 1 / square)


def _slope_of_sinc(g: Expr, y: Expr, x: Expr) -> Expr:
    is_zero = compare("eq", x, 0)
    # Dividing by 0 would make the gradient of the branch not taken NaN.
    return where(is_zero, 0.0, g * (cos(math.pi * x) - y) / where(is_zero, 1.0, x))


def _within(low: float, high: float) -> Callable[..., Interval]:
    return lambda value, *operands: (low, high)


def _at_ends(value: Callable[[float], float], x: Interval) -> Interval:
    low, high = sorted(map(value, x))
    return low, high


def _sign(value: Callable[[float], float], x: Interval) -> Interval:
    if not _are_integers(x):
        # A positive number may round to 0.
        return -1, 1
    low, high = ((end > 0) - (end < 0) for end in x)
    return low, high


def _at_jumps(value: Callable[[float], float], x: Interval) -> Interval:
    """The interval of a function to integers, one wider for floats, which may round across a jump."""
    return x if _are_integers(x) else (value(x[0]) - 1, value(x[1]) + 1)


def _even(value: Callable[[float], float], x: Interval) -> Interval:
    low, high = _at_ends(value, x)
    return (value(0.0) if x[0] <= 0 <= x[1] else low), high


def _dips(value: Callable[[float], float], x: Interval) -> Interval:
    return -0.5, max(0.0, x[1])


def _falls_above_0(value: Callable[[float], float], x: Interval) -> Interval:
    return UNBOUNDED if x[0] <= 0 else (value(x[1]), value(x[0]))


def _zero(end: Any) -> Any:
    """0 of the same type as `end`."""
    return end - end if isinstance(end, torch.Tensor) else 0


def _absolute(order: Order, x: Interval) -> Interval:
    low, high = x
    return order.larger(_zero(low), order.larger(low, -high)), order.larger(-low, high)


def _above_0(order: Order, x: Interval) -> Interval:
    return order.larger(_zero(x[0]), x[0]), order.larger(_zero(x[0]), x[1])


def _at_corners(function: Callable[[Any, Any], Any], a: Interval, b: Interval) -> Interval:
    """The interval of a function that is monotonic in each argument; NaN if a corner is."""
    return _ENDS.hull(function(x, y) for x in a for y in b)


def _quotient(value: Callable[..., float], a: Interval, b: Interval) -> Interval:
    return UNBOUNDED if b[0] <= 0 <= b[1] else _at_corners(operator.truediv, a, b)


def _floor_quotient(value: Callable[..., float], a: Interval, b: Interval) -> Interval:
    if not _are_integers(a, b) or b == (0, 0):
        return UNBOUNDED
    return _at_corners(operator.floordiv, a, b) if b[0] > 0 or b[1] < 0 else _up_to(a)


def _are_integers(*intervals: Interval) -> bool:
    return all(isinstance(end, int) for x in intervals for end in x)


def _are_numbers(a: Interval, b: Interval) -> bool:
    """Whether both are single integers. A remainder of floats jumps where an operand rounds."""
    return _are_integers(a, b) and bool(a[0] == a[1] and b[0] == b[1])


def _rest(value: Callable[..., float], a: Interval, b: Interval) -> Interval:
    if b == (0, 0):
        return UNBOUNDED
    if not _are_numbers(a, b):
        return _up_to(b)
    rest = abs(a[0]) % abs(b[0])
    return (rest, rest) if a[0] >= 0 else (-rest, -rest)


def _modulo(value: Callable[..., float], a: Interval, b: Interval) -> Interval:
    if b == (0, 0):
        return UNBOUNDED
    if _are_numbers(a, b):
        return a[0] % b[0], a[0] % b[0]
    if b[0] <= 0:
        return _up_to(b)
    return 0, b[1] - 1 if _are_integers(a, b) else b[1]


def _power(value: Callable[..., float], a: Interval, b: Interval) -> Interval:
    if a[0] > 0 or (a[0] == 0 and b[0] >= 0):
        return _at_corners(value, a, b)
    if b[0] == b[1] and b[0] >= 0 and float(b[0]).is_integer():
        return (_even if b[0] % 2 == 0 else _at_ends)(lambda end: value(end, b[0]), a)
    return UNBOUNDED


def _up_to(x: Interval) -> Interval:
    most = max(abs(x[0]), abs(x[1]))
    return -most, most


def _or_nan(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: math.nan if math.isnan(x) or math.isnan(y) else choose(x, y)


_ENDS = Order(_or_nan(min), _or_nan(max))


_LN2, _LN10, _ERF = math.log(2), math.log(10), 2 / math.sqrt(math.pi)
_HALF_TURN = math.pi / 2


def _unary(
    name: str, gradient: Rule | None, image: Callable[..., Interval] | None = None, triton: str = "", **fields: Any
) -> Function:
    function = getattr(torch, name, None) or getattr(functional, name)
    # `fn` is kernels/triton/functions.py: the functions that Triton lacks, by the same names.
    fields = {"lifted": "plain", "triton": triton or f"fn.{name}({{0}})"} | fields
    return Function(name, function, (gradient,), image=image, **fields)


def _jump(name: str, triton: str) -> Function:
    return _unary(
        name, None, _at_jumps, triton, gives="same", lifted="whole", infinite=(-1, 1), growth="linear",
        whole="{0}",
    )  # fmt: skip


def _question(name: str, triton: str) -> Function:
    return _unary(name, None, _within(0.0, 1.0), triton, gives="truth", lifted="test")


_UNARY = (
    _unary("neg", lambda g, y, x: -g, None, "-{0}", gives="same", lifted="", infinite=(1, -1), growth="linear",
           interval=lambda order, x: (-x[1], -x[0]), whole="-{0}"),
    _unary("abs", lambda g, y, x: g * sign(x), None, "tl.abs({0})", gives="same", infinite=(1, 1), growth="linear",
           interval=_absolute, whole="tl.abs({0})"),
    _unary("sign", None, _sign, "fn.sign({0})", gives="same", infinite=(0, 0), growth="bounded",
           whole="fn.sign({0})"),
    _unary("relu", lambda g, y, x: where(compare("le", x, 0), 0.0, g), None, "tl.where({0} <= 0.0, 0.0, {0})",
           gives="same", infinite=(0, 1), growth="linear", interval=_above_0, whole="tl.maximum({0}, 0)"),
    _unary("detach", None, _at_ends, "{0}", gives="same", lifted="", infinite=(-1, 1), growth="linear",
           whole="{0}"),
    _jump("floor", "tl.floor({0})"),
    _jump("ceil", "tl.ceil({0})"),
    _jump("round", "fn.round_({0})"),
    _jump("trunc", "tl.where({0} < 0.0, tl.ceil({0}), tl.floor({0}))"),
    _question("isnan", "{0} != {0}"),
    _question("isinf", 'tl.abs({0}) == float("inf")'),
    _question("isfinite", 'tl.abs({0}) < float("inf")'),
    _unary("exp", lambda g, y, x: g * y, _at_ends, "tl.exp({0})", infinite=(0, 1)),
    _unary("exp2", lambda g, y, x: g * y * _LN2, _at_ends, "tl.exp2({0})", infinite=(0, 1)),
    _unary("expm1", lambda g, y, x: g * (y + 1), _at_ends, infinite=(0, 1)),
    _unary("log", lambda g, y, x: g / x, _at_ends, "tl.log({0})"),
    _unary("log2", lambda g, y, x: g / (x * _LN2), _at_ends, "tl.log2({0})"),
    _unary("log10", lambda g, y, x: g / (x * _LN10), _at_ends, "tl.log({0}) * 0.4342944819032518"),
    _unary("log1p", lambda g, y, x: g / (x + 1), _at_ends),
    _unary("sqrt", lambda g, y, x: g / (2 * y), _at_ends, "tl.sqrt({0})", growth="linear"),
    _unary("rsqrt", lambda g, y, x: g * -0.5 * y**3, _falls_above_0, "tl.rsqrt({0})"),
    _unary("reciprocal", lambda g, y, x: -g * y * y, _falls_above_0, "1.0 / {0}"),
    _unary("sin", lambda g, y, x: g * cos(x), _within(-1.0, 1.0), "tl.sin({0})", growth="bounded"),
    _unary("cos", lambda g, y, x: g * -sin(x), _within(-1.0, 1.0), "tl.cos({0})", growth="bounded"),
    _unary("tan", lambda g, y, x: g * (1 + y * y), None, "tl.sin({0}) / tl.cos({0})"),
    _unary("asin", lambda g, y, x: g * rsqrt(1 - x * x), _within(-_HALF_TURN, _HALF_TURN),
           "fn.atan2({0}, tl.sqrt((1.0 - {0}) * (1.0 + {0})))"),
    _unary("acos", lambda g, y, x: g * -rsqrt(1 - x * x), _within(0.0, math.pi),
           "2.0 * fn.atan2(tl.sqrt(1.0 - {0}), tl.sqrt(1.0 + {0}))"),
    _unary("atan", lambda g, y, x: g / (x * x + 1), _within(-_HALF_TURN, _HALF_TURN), infinite=(0, 0),
           growth="bounded"),
    _unary("sinh", lambda g, y, x: g * cosh(x), _at_ends),
    _unary("cosh", lambda g, y, x: g * sinh(x), _even),
    _unary("tanh", lambda g, y, x: g * (1 - y * y), _within(-1.0, 1.0), infinite=(0, 0), growth="bounded"),
    _unary("asinh", lambda g, y, x: g * rsqrt(x * x + 1), _at_ends, growth="linear"),
    _unary("acosh", lambda g, y, x: g * rsqrt(x * x - 1), _at_ends),
    _unary("atanh", lambda g, y, x: g / (1 - x * x), _at_ends),
    _unary("erf", lambda g, y, x: g * _ERF * exp(-x * x), _within(-1.0, 1.0), "tl.erf({0})", infinite=(0, 0),
           growth="bounded"),
    _unary("erfc", lambda g, y, x: g * -_ERF * exp(-x * x), _within(0.0, 2.0), "1.0 - tl.erf({0})",
           infinite=(0, 0), growth="bounded"),
    _unary("sigmoid", lambda g, y, x: g * y * (1 - y), _within(0.0, 1.0), "1.0 / (1.0 + tl.exp(-{0}))",
           infinite=(0, 0), growth="bounded"),
    _unary("silu", lambda g, y, x: g * sigmoid(x) * (1 + x * (1 - sigmoid(x))), _dips, "{0} / (1.0 + tl.exp(-{0}))",
           infinite=(0, 1), undefined=frozenset({-1}), growth="linear"),
    _unary("gelu", lambda g, y, x: g * (0.5 * erfc(-x / math.sqrt(2)) + x * exp(-x * x / 2) / math.sqrt(2 * math.pi)),
           _dips, "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))", lifted="", infinite=(0, 1),
           undefined=frozenset({-1}), growth="linear"),
    _unary("sinc", _slope_of_sinc, _within(-0.25, 1.0), growth="bounded"),
    _unary("softplus", lambda g, y, x: g * sigmoid(x), _at_ends, lifted="", infinite=(0, 1), growth="linear"),
)  # fmt: skip


_BINARY = (
    Function("add", torch.add, (lambda g, y, a, b: g, lambda g, y, a, b: g), "same", triton="{0} + {1}",
             whole="{0} + {1}", interval=lambda order, a, b: (a[0] + b[0], a[1] + b[1])),
    Function("sub", torch.sub, (lambda g, y, a, b: g, lambda g, y, a, b: -g), "same", triton="{0} - {1}",
             whole="{0} - {1}", interval=lambda order, a, b: (a[0] - b[1], a[1] - b[0])),
    Function("mul", torch.mul, (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a), "same", triton="{0} * {1}",
             whole="{0} * {1}", interval=lambda order, a, b: order.hull(x * y for x in a for y in b)),
    Function("div", torch.div, (lambda g, y, a, b: g / b, lambda g, y, a, b: -g * y / b), image=_quotient,
             triton="{0} / {1}"),
    # At a tie one operand gets the whole gradient, as in a clamp. The lift builds torch.maximum, which shares it, of
    # two of these.
    Function(
        "maximum", torch.clamp_min,
        (lambda g, y, a, b: where(_leads(a, b), g, 0.0), lambda g, y, a, b: where(_leads(a, b), 0.0, g)), "same",
        triton="tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", whole="tl.maximum({0}, {1})",
        interval=lambda order, a, b: (order.larger(a[0], b[0]), order.larger(a[1], b[1])),
    ),
    Function(
        "minimum", torch.clamp_max,
        (lambda g, y, a, b: where(_leads(b, a), g, 0.0), lambda g, y, a, b: where(_leads(b, a), 0.0, g)), "same",
        triton="tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", whole="tl.minimum({0}, {1})",
        interval=lambda order, a, b: (order.smaller(a[0], b[0]), order.smaller(a[1], b[1])),
    ),
    Function(
        "pow", torch.pow,
        (
            lambda g, y, a, b: where(compare("eq", b, 0), 0.0, g * b * Binary("pow", a, b - 1)),
            lambda g, y, a, b: where(And(compare("eq", a, 0), compare("ge", b, 0)), 0.0, g * y * log(a)),
        ), "same", "plain", image=_power, triton="fn.power({0}, {1})",
    ),
    Function("fmod", torch.fmod, (lambda g, y, a, b: g, lambda g, y, a, b: -g * trunc(a / b)), "same", "whole",
             image=_rest, triton="{0} % {1}", whole="{0} % {1}"),
    Function("remainder", torch.remainder,
             (lambda g, y, a, b: g, lambda g, y, a, b: -g * Binary("floor_divide", a, b)), "same",
             image=_modulo, triton="fn.float_modulo({0}, {1})", whole="fn.modulo({0}, {1})"),
    Function("floor_divide", torch.floor_divide, (None, None), "same",
             image=_floor_quotient, triton="fn.float_floor_divide({0}, {1})", whole="fn.floor_divide({0}, {1})"),
    Function("atan2", torch.atan2,
             (lambda g, y, a, b: g * b * _per_square(a, b), lambda g, y, a, b: g * -a * _per_square(a, b)),
             lifted="plain", image=_within(-math.pi, math.pi), triton="fn.atan2({0}, {1})"),
)  # fmt: skip

UNARY: dict[str, Function] = {row.name: row for row in _UNARY}
BINARY: dict[str, Function] = {row.name: row for row in _BINARY}
FUNCTIONS: dict[str, Function] = UNARY | BINARY
COMPARISONS: dict[str, Callable[..., Tensor]] = {op: getattr(torch, op) for op in "ge gt le lt eq ne".split()}


def gives_fraction(name: str) -> bool:
    """Whether function `name` gives floating-point results even for integers; False if it has no row."""
    return name in FUNCTIONS and FUNCTIONS[name].gives == "fraction"


def bounds_of(name: str, *operands: Interval) -> Interval:
    """An interval that contains the results of function `name` on numbers within `operands`; see `Function.image`."""
    row = FUNCTIONS[name]
    if row.interval is not None:
        return row.interval(_ENDS, *operands)
    return UNBOUNDED if row.image is None else row.image(row.value, *operands)
