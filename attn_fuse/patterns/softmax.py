"""Softmax, whole or written out: exp(s - max) / sum, exp(log_softmax), with a sink, normalised once more.

Takes exponentials, or weights, divided by their own sum over the keys; a shift of all scores of a query cancels. An
extra term of the sum is a sink (StreamingLLM, arXiv 2309.17453), a key without a value. Declines weights that are not
normalised, and numbers added to the sum that could change the result. A float known only at run time gets a guard that
keeps it small; larger ones are compiled anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import sympy
import torch

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Const, Expr
from attn_fuse.expression.ranges import infinities
from attn_fuse.patterns.layer import bare, dtype_of, maximum_taken_off, sum_of
from attn_fuse.patterns.masks import MASK_FILL_THRESHOLD
from attn_fuse.torch_internals import CLAMP_PASSES_AT_ITS_EDGE, holds_by_guard

_NOT_NORMALISED = Refusal("the weights are not normalised by their own sum over the keys")
_MIXED = Refusal("the product after the softmax sums over another axis than the softmax")
# Advice on a Refusal that holds for one length alone.
LONGER = "pass longer inputs: those of another length are compiled, and looked at, anew"
_ONE_KEY = Refusal("there is a single key, whose weight is 1", advice=LONGER)
_DETACHED = Refusal("the weights are detached: no gradient goes through them")
# Scores this far below the max of their row weigh less than the rounding of any dtype, however many there are.
_FAR_BELOW = -50.0


@dataclass(frozen=True)
class Normalised:
    """Weights exp(body) / (sum over the keys of exp(body) + exp(sink)); without a sink, over the sum alone.

    dtype: that of a whole softmax, else None. zero: whether the weights of a fully masked row are 0.
    zero_for_nan: whether they are read as 0 although a product by 0 leaves them NaN.
    """

    body: Expr
    sink: Expr | None
    dtype: torch.dtype | None
    zero: bool = False
    zero_for_nan: bool = False


def softmax(
    weights: Expr, key: sympy.Symbol, space: Space, numbers: Mapping[int, torch.SymFloat]
) -> Normalised | Refusal:
    """`weights`, at index symbol `key`, as a softmax over all keys, or a Refusal.

    numbers: the leaves that are floats known only at run time, by leaf number.
    """
    match weights:
        case ex.Softmax():
            return _whole(weights, key, space)
        case ex.Unary("detach", _):
            return _DETACHED
        case ex.Div(numerator, denominator):
            numerator, read = bare(numerator), _sum_and_rest(denominator)
            filled = _as_fill(numerator)
            found = _written_out(filled, _over_fills(denominator), key, space, numbers, over_sum=True)
            if filled is numerator or isinstance(found, Refusal):
                return found
            # Divided by the sum alone, a fully masked row is NaN; divided by more, a fill makes it 0.
            return replace(found, zero_for_nan=read is None or read[2:] != (None, None))
        case ex.Unary("exp", x):
            parts = list(ex.terms(bare(x)))
            for part in parts:
                match part:
                    case ex.Mul(ex.Unary("log", total), Const(-1 | -1.0)):
                        rest = sum_of([p for p in parts if p is not part])
                        return _written_out(al.unary("exp", rest), total, key, space, numbers)
    return _NOT_NORMALISED


def _whole(weights: ex.Softmax, key: sympy.Symbol, space: Space) -> Normalised | Refusal:
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
    parts = list(ex.terms(bare(sink)))
    for term in shift:
        if term not in parts:
            return Refusal("a sink is shifted by another number than the scores")
        parts.remove(term)
    logit = sum_of(parts)
    if ex.has_product(logit):
        return Refusal("the softmax runs over a key that has no value")
    if key in ex.index_symbols(logit):
        return Refusal("the sum of the weights has another term for each key")
    held = dtype_of(inner)
    if isinstance(logit, Const) and abs(logit.value) * torch.finfo(held).eps >= 1:
        return Refusal(f"a sink of {logit.value:g} is so large that {held} keeps no digits of the scores beside it")
    return Normalised(inner, logit, dtype)


def _as_fill(weights: Expr) -> Expr:
    """`weights` with a product by a choice of 1 and 0 as a choice of the weight and 0."""
    match weights:
        case ex.Mul(inner, ex.Select(cond, Const(1 | 1.0), Const(0 | 0.0) as zero)):
            return al.select(cond, inner, zero)
        case ex.Mul(inner, ex.Select(cond, Const(0 | 0.0) as zero, Const(1 | 1.0))):
            return al.select(cond, zero, inner)
    return weights


def _over_fills(total: Expr) -> Expr:
    """A denominator with `_as_fill` applied to the summed weights."""
    match bare(total):
        case ex.Reduce("sum", axis, body):
            return ex.Reduce("sum", axis, _as_fill(bare(body)))
        case ex.Contract((axis,), a, b):
            return ex.Reduce("sum", axis, _as_fill(bare(al.mul(a, b))))
        case ex.Binary("maximum", inner, bound):
            return ex.Binary("maximum", _over_fills(inner), bound)
        case ex.Add(a, b):
            return ex.Add(_over_fills(a), _over_fills(b))
    return total


def _written_out(
    numerator: Expr,
    denominator: Expr,
    key: sympy.Symbol,
    space: Space,
    numbers: Mapping[int, torch.SymFloat],
    over_sum: bool = False,
) -> Normalised | Refusal:
    """numerator / denominator as a softmax. over_sum: whether it is written as a division, not by logarithms."""
    read = _sum_and_rest(denominator)
    if read is None:
        return _NOT_NORMALISED
    axis, summed, rest, least = read
    if not space.same_size(space.sizes[axis], space.sizes[key]):
        return Refusal("the weights are normalised over another number of keys")
    if bare(al.substitute(summed, {axis: key}, space)) != numerator:
        return _NOT_NORMALISED
    logarithm = _logarithm(numerator)
    if isinstance(logarithm, Refusal):
        return logarithm
    masked, core = _masks_off(logarithm)
    if isinstance(core, ex.Softmax):
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
        return Refusal(f"the sum of the weights is clamped to at least {_word(least)}, which could change them")
    rounding = torch.finfo(dtype or dtype_of(numerator)).eps
    is_bare = not shift and not isinstance(core, ex.Softmax)
    match rest:
        case None:
            return Normalised(body, None, dtype, zero=least is not None)
        case Const() | ex.Scalar() if at_least_one and _lies_within(rest, 0.0, rounding, numbers):
            return Normalised(body, None, dtype, zero=True)
        case Const(value) if value > 0 and is_bare:
            return Normalised(body, Const(math.log(value)), dtype)
        case ex.Scalar() if is_bare and _lies_within(rest, 0.0, math.inf, numbers):
            return Normalised(body, al.unary("log", rest), dtype)
        case ex.Unary("exp", logit) if not isinstance(core, ex.Softmax):
            return _with_sink(body, shift, logit, key, dtype)
        case Const() | ex.Scalar():
            return Refusal(f"{_word(rest)} is added to the sum of the weights, which could change them")
    return Refusal("the sum of the weights has another term, which is no sink")


def _underflow(dtype: torch.dtype) -> float:
    """The number from which on down exp is 0: below the logarithm of half the smallest subnormal.

    Inductor computes the exp of half-precision numbers in float32.
    """
    return -746.0 if dtype == torch.float64 else -104.0


def _underflowing(body: Expr, underflow: float) -> Expr:
    """`body` with minus infinity for each fill from `underflow` down.

    Without a shift, exp of such a fill is 0, so a fully masked row is 0 / 0 and not the mean.
    """
    match bare(body):
        case ex.Mul(inner, Const(value) as number) if value > 0:
            return al.mul(number, _underflowing(inner, underflow / value))
        case ex.Select(cond, inner, Const(fill)) if -math.inf < fill <= underflow:
            return al.select(cond, _underflowing(inner, underflow), Const(-math.inf))
    return body


def _lies_within(x: Expr, above: float, most: float, numbers: Mapping[int, torch.SymFloat]) -> bool:
    """Whether above < x <= most for the number `x`; a number known only at run time gets a guard."""
    match x:
        case Const(value):
            return above < value <= most
        case ex.Scalar(leaf) if leaf in numbers:
            number = numbers[leaf]
            is_above = math.isinf(above) or holds_by_guard(number > above)
            return is_above and (math.isinf(most) or holds_by_guard(number <= most))
    return False


def _word(x: Expr) -> str:
    return f"{x.value:g}" if isinstance(x, Const) else "an argument"


def _sum_and_rest(x: Expr) -> tuple[sympy.Symbol, Expr, Expr | None, Expr | None] | None:
    """(axis, body, other summand, lower limit) of a denominator that sums `body` over `axis`, or None."""
    match bare(x):
        case ex.Reduce("sum", axis, body):
            return axis, body, None, None
        # A matrix product with a column of ones also sums the weights.
        case ex.Contract((axis,), a, b):
            return axis, al.mul(a, b), None, None
        case ex.Binary("maximum", inner, Const() | ex.Scalar() as least) if (read := _sum_and_rest(inner)) is not None:
            return (*read[:2], None, least) if read[2:] == (None, None) else None
        case ex.Add(a, b):
            for one, other in ((a, b), (b, a)):
                read = _sum_and_rest(one)
                if read is not None and read[2:] == (None, None):
                    return (*read[:2], bare(other), None)
    return None


def _logarithm(x: Expr) -> Expr | Refusal:
    """log x, for an exponential or masked exponential; a softmax as it is; else a Refusal."""
    x = bare(x)
    match x:
        case ex.Unary("exp", a):
            return a
        case ex.Unary("exp2", a):
            return al.mul(Const(math.log(2)), a)
        case ex.Binary("pow", Const(base), a) if base > 0 and math.isfinite(base):
            return al.mul(Const(math.log(base)), a)
        case ex.Softmax():
            return x
        case ex.Select(cond, a, Const(0 | 0.0)) if not ex.has_product(cond):
            inner = _logarithm(a)
            return inner if isinstance(inner, Refusal) else ex.Select(cond, inner, Const(-math.inf))
    return _NOT_NORMALISED


def _masks_off(body: Expr) -> tuple[Callable[[Expr], Expr], Expr]:
    """(a function that restores the outermost masks of minus infinity, `body` without them)"""
    match body:
        case ex.Select(cond, inner, Const(value)) if value == -math.inf:
            more, core = _masks_off(inner)
            return (lambda x: al.select(cond, more(x), Const(-math.inf))), core
    return (lambda x: x), body


def _without_shift(
    body: Expr, key: sympy.Symbol, hidden: bool = False, scale: float = 1.0
) -> tuple[Expr, tuple[Expr, ...]]:
    """(`body` without its shift, the shift: terms computed from the scores and equal for every key)

    hidden: whether a mask follows. scale: the factor that multiplies `body`.
    """
    body = bare(body)
    match body:
        case ex.Mul(inner, Const(value) as number):
            rest, shift = _without_shift(inner, key, hidden, scale * value)
            if not shift:
                return body, ()
            return al.mul(number, rest), tuple(al.mul(number, s) for s in shift)
        # A fill out of reach of the scores is also out of reach of scores shifted by their max.
        case ex.Select(cond, inner, Const(fill)) if fill <= MASK_FILL_THRESHOLD and not ex.has_product(cond):
            rest, shift = _without_shift(inner, key, True, scale)
            return al.select(cond, rest, Const(fill)), shift
        case ex.Binary(name, inner, Const(bound)) if _is_idle_clamp(name, bound, hidden, scale):
            rest, shift = _without_shift(inner, key, hidden, scale)
            return (rest, shift) if len(shift) == 1 and _is_maximum_of(shift[0], rest, key) else (body, ())
    parts = list(ex.terms(body))
    # A term that may be infinite, such as the min of a masked row, is no shift.
    shift = tuple(p for p in parts if ex.has_product(p) and key not in ex.index_symbols(p) and not infinities(p))
    kept = [p for p in parts if p not in shift]
    if not shift or not any(ex.has_product(p) for p in kept):
        return body, ()
    return sum_of(kept), shift


def _is_idle_clamp(name: str, bound: float, hidden: bool, scale: float) -> bool:
    """Whether a clamp at `bound` changes no weight of scores less their max; see `_without_shift`."""
    match name:
        case "maximum":  # A mask may hide the max of a row and leave only scores that are far below it.
            return scale * bound <= _FAR_BELOW and scale > 0 and not hidden
        case "minimum":  # The scores are at most 0, so the bound only matters to a gradient at 0.
            return bound > 0 or (bound == 0 and CLAMP_PASSES_AT_ITS_EDGE)
    return False


def _is_maximum_of(shift: Expr, body: Expr, key: sympy.Symbol) -> bool:
    if (taken_off := maximum_taken_off(shift)) is None:
        return False
    axis, scores = taken_off
    return bare(al.substitute(scores, {axis: key}, Space())) == bare(body)
