"""Softmax, whole or written out: exp(s - max) / sum, exp(log_softmax), with a sink, normalised once more.

Taken: exponentials, or weights, divided by their own sum over the keys; a shift of all scores of a query cancels.
An extra term of the sum is a sink (StreamingLLM, arXiv 2309.17453): one more key that has no value.
Declined: weights that are not normalised, and a number added to the sum that could be seen in the result. A float that
is known only when the program runs is held small by a guard, so that larger ones are compiled anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import sympy
import torch

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import (
    Add,
    Binary,
    Cast,
    Const,
    Contract,
    Div,
    Expr,
    Mul,
    Reduce,
    Scalar,
    Select,
    Softmax,
    Unary,
)
from attn_fuse.expression.ranges import infinities
from attn_fuse.patterns.layer import dtype_of, maximum_taken_off
from attn_fuse.patterns.masks import MASK_FILL_THRESHOLD
from attn_fuse.torch_internals import CLAMP_PASSES_AT_ITS_EDGE, holds_by_guard

_NOT_NORMALISED = Refusal("the weights are not normalised by their own sum over the keys")
_MIXED = Refusal("the product after the softmax sums over another axis: the weights are mixed, or are none")
# What a user does about a Refusal that holds for one length alone.
LONGER = "pass longer inputs: those of another length are compiled, and looked at, anew"
_ONE_KEY = Refusal("there is a single key, whose weight is 1", advice=LONGER)
_DETACHED = Refusal("the weights are detached: no gradient goes through them")
# A score this far below the max of its row weighs less than any dtype's rounding, however many such scores there are.
_FAR_BELOW = -50.0


@dataclass(frozen=True)
class Normalised:
    """Weights exp(body) / (sum over the keys of exp(body) + exp(sink)); without a sink, the sum alone.

    dtype: that of a whole softmax, else None. zero: whether a fully masked row has weights of 0.
    zero_for_nan: whether they are read as 0 where a product by 0 leaves them NaN.
    """

    body: Expr
    sink: Expr | None
    dtype: torch.dtype | None
    zero: bool = False
    zero_for_nan: bool = False


def softmax(
    weights: Expr, key: sympy.Symbol, space: Space, numbers: Mapping[int, torch.SymFloat] = MappingProxyType({})
) -> Normalised | Refusal:
    """`weights`, at index symbol `key`, as a softmax over all keys; a Refusal where they are none.

    numbers: the leaves that are floats known only when the program runs, by their numbers.
    """
    match weights:
        case Softmax():
            return _whole(weights, key, space)
        case Unary("detach", _):
            return _DETACHED
        case Div(numerator, denominator):
            numerator, read = _bare(numerator), _sum_and_rest(denominator)
            filled = _as_fill(numerator)
            found = _written_out(filled, _over_fills(denominator), key, space, numbers, over_sum=True)
            if filled is numerator or isinstance(found, Refusal):
                return found
            # Over the sum alone a fully masked row is NaN under both; over more, a fill makes it 0.
            return replace(found, zero_for_nan=read is None or read[2:] != (None, None))
        case Unary("exp", x):
            parts = list(ex.terms(_bare(x)))
            for part in parts:
                match part:
                    case Mul(Unary("log", total), Const(-1 | -1.0)):
                        rest = _sum([p for p in parts if p is not part])
                        return _written_out(al.unary("exp", rest), total, key, space, numbers)
    return _NOT_NORMALISED


def _whole(weights: Softmax, key: sympy.Symbol, space: Space) -> Normalised | Refusal:
    axis, count = weights.axis, space.sizes[key]
    if count == 0:
        return Refusal("there is no key", advice=LONGER)
    extra = space.sizes[axis] - count
    first = sympy.expand(weights.at - key)
    if key in first.free_symbols:
        return _ONE_KEY if count == 1 else _MIXED
    body = al.substitute(weights.body, {axis: weights.at}, space)
    if space.is_zero(extra):
        if first != 0:
            return _ONE_KEY if count == 1 else _MIXED
        inner, _ = _without_shift(body, key)
        return Normalised(inner, None, weights.dtype)
    if not space.is_zero(extra - 1) or first not in (0, 1):
        return Refusal("the softmax runs over keys that have no value")
    alone = sympy.Integer(0) if first == 1 else count
    sink = al.substitute(weights.body, {axis: alone}, space)
    inner, shift = _without_shift(body, key)
    return _with_sink(inner, shift, sink, key, weights.dtype)


def _with_sink(
    inner: Expr, shift: tuple[Expr, ...], sink: Expr, key: sympy.Symbol, dtype: torch.dtype | None
) -> Normalised | Refusal:
    parts = list(ex.terms(_bare(sink)))
    for term in shift:
        if term not in parts:
            return Refusal("a sink is shifted by another number than the scores")
        parts.remove(term)
    logit = _sum(parts)
    if ex.has_product(logit):
        return Refusal("the softmax runs over a key that has no value")
    if key in ex.index_symbols(logit):
        return Refusal("the sum of the weights has another term for each key")
    held = dtype_of(inner)
    if isinstance(logit, Const) and abs(logit.value) * torch.finfo(held).eps >= 1:
        return Refusal(f"a sink of {logit.value:g} and scores next to it are whole numbers at most in {held}")
    return Normalised(inner, logit, dtype)


def _as_fill(weights: Expr) -> Expr:
    """`weights` with a product by a choice of 1 and 0 as the choice of a weight and 0."""
    match weights:
        case Mul(inner, Select(cond, Const(1 | 1.0), Const(0 | 0.0) as zero)):
            return al.select(cond, inner, zero)
        case Mul(inner, Select(cond, Const(0 | 0.0) as zero, Const(1 | 1.0))):
            return al.select(cond, zero, inner)
    return weights


def _over_fills(total: Expr) -> Expr:
    """A denominator whose sum of products by a choice of 1 and 0 sums choices of a weight and 0."""
    match _bare(total):
        case Reduce("sum", axis, body):
            return Reduce("sum", axis, _as_fill(_bare(body)))
        case Contract((axis,), a, b):
            return Reduce("sum", axis, _as_fill(_bare(al.mul(a, b))))
        case Binary("maximum", inner, bound):
            return Binary("maximum", _over_fills(inner), bound)
        case Add(a, b):
            return Add(_over_fills(a), _over_fills(b))
    return total


def _written_out(
    numerator: Expr,
    denominator: Expr,
    key: sympy.Symbol,
    space: Space,
    numbers: Mapping[int, torch.SymFloat],
    over_sum: bool = False,
) -> Normalised | Refusal:
    """over_sum: whether the numerator itself is divided, and not a logarithm subtracted."""
    read = _sum_and_rest(denominator)
    if read is None:
        return _NOT_NORMALISED
    axis, summed, rest, least = read
    if not space.same_size(space.sizes[axis], space.sizes[key]):
        return Refusal("the weights are normalised over another number of keys")
    if _bare(al.substitute(summed, {axis: key}, space)) != numerator:
        return _NOT_NORMALISED
    logarithm = _logarithm(numerator)
    if isinstance(logarithm, Refusal):
        return logarithm
    masked, core = _masks_off(logarithm)
    if isinstance(core, Softmax):
        whole = _whole(core, key, space)
        if isinstance(whole, Refusal) or whole.sink is not None:
            return whole if isinstance(whole, Refusal) else _NOT_NORMALISED
        inner, dtype = whole.body, whole.dtype
        shift: tuple[Expr, ...] = ()
        at_least_one = core == logarithm
    else:
        (inner, shift), dtype = _without_shift(core, key, hidden=core != logarithm), None
        inner = inner if shift or not over_sum else _underflowing(inner, _underflow(dtype_of(numerator)))
        at_least_one = core == logarithm and len(shift) == 1 and _is_maximum_of(shift[0], inner, key)
    body = masked(inner)
    if least is not None and not (at_least_one and _lies_within(least, -math.inf, 1.0, numbers)):
        return Refusal(f"the sum of the weights is kept above {_word(least)}, which could be seen in them")
    rounding = torch.finfo(dtype or dtype_of(numerator)).eps
    match rest:
        case None:
            return Normalised(body, None, dtype, zero=least is not None)
        case Const() | Scalar() if at_least_one and _lies_within(rest, 0.0, rounding, numbers):
            return Normalised(body, None, dtype, zero=True)
        case Const(value) if value > 0 and not shift and not isinstance(core, Softmax):
            return Normalised(body, Const(math.log(value)), dtype)
        case Scalar() if not shift and not isinstance(core, Softmax) and _lies_within(rest, 0.0, math.inf, numbers):
            return Normalised(body, al.unary("log", rest), dtype)
        case Unary("exp", logit) if not isinstance(core, Softmax):
            return _with_sink(body, shift, logit, key, dtype)
        case Const() | Scalar():
            return Refusal(f"{_word(rest)} is added to the sum of the weights, which could be seen in them")
    return Refusal("the sum of the weights has another term, which is no sink")


def _underflow(dtype: torch.dtype) -> float:
    """From this number down exp is 0: a whole number below the logarithm of half the smallest subnormal. Of halves
    Inductor takes it in float32."""
    return -746.0 if dtype == torch.float64 else -104.0


def _underflowing(body: Expr, underflow: float) -> Expr:
    """`body` with minus infinity for each fill from `underflow` down, where exp is taken of `body` without a shift: a
    fully masked row is then 0 / 0, not the mean."""
    match _bare(body):
        case Mul(inner, Const(value) as number) if value > 0:
            return al.mul(number, _underflowing(inner, underflow / value))
        case Select(cond, inner, Const(fill)) if -math.inf < fill <= underflow:
            return al.select(cond, _underflowing(inner, underflow), Const(-math.inf))
    return body


def _lies_within(x: Expr, above: float, most: float, numbers: Mapping[int, torch.SymFloat]) -> bool:
    """Whether above < x <= most for the number `x`; one known only when the program runs gets a guard."""
    match x:
        case Const(value):
            return above < value <= most
        case Scalar(leaf) if leaf in numbers:
            number = numbers[leaf]
            is_above = math.isinf(above) or holds_by_guard(number > above)
            return is_above and (math.isinf(most) or holds_by_guard(number <= most))
    return False


def _word(x: Expr) -> str:
    return f"{x.value:g}" if isinstance(x, Const) else "an argument"


def _sum_and_rest(x: Expr) -> tuple[sympy.Symbol, Expr, Expr | None, Expr | None] | None:
    """(axis, body, other summand, lower limit) of a denominator that sums `body` over `axis`; None for any other."""
    match _bare(x):
        case Reduce("sum", axis, body):
            return axis, body, None, None
        # A matrix product with a column of ones sums the weights, too.
        case Contract((axis,), a, b):
            return axis, al.mul(a, b), None, None
        case Binary("maximum", inner, Const() | Scalar() as least) if (read := _sum_and_rest(inner)) is not None:
            return (*read[:2], None, least) if read[2:] == (None, None) else None
        case Add(a, b):
            for one, other in ((a, b), (b, a)):
                read = _sum_and_rest(one)
                if read is not None and read[2:] == (None, None):
                    return (*read[:2], _bare(other), None)
    return None


def _logarithm(x: Expr) -> Expr | Refusal:
    """log x, for x that is positive or zero, but a softmax itself for a softmax; a Refusal where x is neither."""
    x = _bare(x)
    match x:
        case Unary("exp", a):
            return a
        case Unary("exp2", a):
            return al.mul(Const(math.log(2)), a)
        case Binary("pow", Const(base), a) if base > 0 and math.isfinite(base):
            return al.mul(Const(math.log(base)), a)
        case Softmax():
            return x
        case Select(cond, a, Const(0 | 0.0)) if not ex.has_product(cond):
            inner = _logarithm(a)
            return inner if isinstance(inner, Refusal) else Select(cond, inner, Const(-math.inf))
    return _NOT_NORMALISED


def _masks_off(body: Expr) -> tuple[Callable[[Expr], Expr], Expr]:
    """(a function that puts the outermost masks of minus infinity on again, `body` without them)"""
    match body:
        case Select(cond, inner, Const(value)) if value == -math.inf:
            more, core = _masks_off(inner)
            return (lambda x: al.select(cond, more(x), Const(-math.inf))), core
    return (lambda x: x), body


def _without_shift(
    body: Expr, key: sympy.Symbol, hidden: bool = False, scale: float = 1.0
) -> tuple[Expr, tuple[Expr, ...]]:
    """(`body` without its shift, the shift: the terms computed from the scores that are the same for every key)

    hidden: whether a mask is put on `body` afterwards. scale: the factor that multiplies `body`.
    """
    body = _bare(body)
    match body:
        case Mul(inner, Const(value) as number):
            rest, shift = _without_shift(inner, key, hidden, scale * value)
            if not shift:
                return body, ()
            return al.mul(number, rest), tuple(al.mul(number, s) for s in shift)
        # A fill that no score comes near stays out of reach of scores that are shifted by their max.
        case Select(cond, inner, Const(fill)) if fill <= MASK_FILL_THRESHOLD and not ex.has_product(cond):
            rest, shift = _without_shift(inner, key, True, scale)
            return al.select(cond, rest, Const(fill)), shift
        # Not under a mask, which may hide the max of a row and leave only scores that are far below it.
        case Binary("maximum", inner, Const(bound)) if scale * bound <= _FAR_BELOW and scale > 0 and not hidden:
            rest, shift = _without_shift(inner, key, hidden, scale)
            if len(shift) == 1 and _is_maximum_of(shift[0], rest, key):
                return rest, shift
            return body, ()
        # Less their max, scores are at most 0, so the bound only matters to a gradient at 0.
        case Binary("minimum", inner, Const(bound)) if bound > 0 or (bound == 0 and CLAMP_PASSES_AT_ITS_EDGE):
            rest, shift = _without_shift(inner, key, hidden, scale)
            if len(shift) == 1 and _is_maximum_of(shift[0], rest, key):
                return rest, shift
            return body, ()
    parts = list(ex.terms(body))
    # A term that may be infinite is no shift: the min of a row with a mask is minus infinity, say.
    shift = tuple(p for p in parts if ex.has_product(p) and key not in ex.index_symbols(p) and not infinities(p))
    kept = [p for p in parts if p not in shift]
    if not shift or not any(ex.has_product(p) for p in kept):
        return body, ()
    return _sum(kept), shift


def _is_maximum_of(shift: Expr, body: Expr, key: sympy.Symbol) -> bool:
    taken_off = maximum_taken_off(shift)
    return taken_off is not None and _renamed(taken_off[1], taken_off[0], key) == _bare(body)


def _renamed(x: Expr, old: sympy.Symbol, new: sympy.Symbol) -> Expr:
    return _bare(al.substitute(x, {old: new}, Space()))


def _bare(x: Expr) -> Expr:
    """`x` without a cast between floating-point types around it."""
    while isinstance(x, Cast) and x.dtype.is_floating_point:
        x = x.x
    return x


def _sum(parts: list[Expr]) -> Expr:
    total: Expr = Const(0.0)
    for part in parts:
        total = al.add(total, part)
    return total
