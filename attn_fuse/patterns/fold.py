"""Fold: the layers of the scores become one scale, a softcap, a mask as structure, and biases.

The hard case is a fully masked row. A fill of minus infinity gives NaN there; a kernel may give 0. A finite fill gives
a mean of the values; a kernel that skips masked keys does not. So a finite fill is dropped only if every query is
proved to see a key, and otherwise keeps its exact meaning.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from attn_fuse.attention.attention import Refusal
from attn_fuse.attention.axes import Axes
from attn_fuse.attention.mask import EmptyRows, Mask, every_query_sees_a_key, mask_parts
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Const, Expr, index_symbols
from attn_fuse.expression.ranges import largest_factor, smallest_divisor, stays_within
from attn_fuse.lift.lift import Lifted
from attn_fuse.patterns.layer import Bias, Floor, Layer, MaskFill, Scale, Softcap, dtype_of, sum_of
from attn_fuse.patterns.masks import MASK_FILL_THRESHOLD

_ONE = Const(1.0)


@dataclass(frozen=True)
class Term:
    """A bias. below: how many of the fills are applied after it."""

    value: Expr
    below: int


@dataclass(frozen=True)
class Scores:
    """The layers of the scores: softcap(scale * product), plus `terms`, filled by `fills`, both outermost first.

    magnitude: the max of `scale`, infinity if unknown. scaled_fill: whether a scale follows a fill.
    floored: whether a bias is raised to a floor. bounded: whether a floor lies over the product.
    """

    scale: Expr = _ONE
    softcap: float | None = None
    terms: tuple[Term, ...] = ()
    fills: tuple[MaskFill, ...] = ()
    magnitude: float = 1.0
    scaled_fill: bool = False
    floored: bool = False
    bounded: bool = False


def fold(
    layers: Sequence[tuple[Layer, Expr]],
    key_axes: tuple[sympy.Symbol, ...],
    space: Space,
    learned: Container[int],
) -> Scores | Refusal:
    """The layers of the scores, folded, or a Refusal.

    layers: outermost first, each with the expression that it was taken off. key_axes: the axes of the key position.
    space, learned: those of `Lifted`.
    """
    scores = Scores()
    for layer, part in reversed(layers):
        answer = over(scores, layer, dtype_of(part), key_axes, space, learned)
        if isinstance(answer, Refusal):
            return answer.at(part)
        scores = answer
    return scores


def over(
    scores: Scores,
    layer: Layer,
    dtype: torch.dtype,
    key_axes: tuple[sympy.Symbol, ...],
    space: Space,
    learned: Container[int],
) -> Scores | Refusal:
    """`scores` with `layer` laid over them, held in `dtype`."""
    match layer:
        case Scale(factor):
            answer = _scaled(scores, factor, key_axes, largest_factor(factor, space, learned))
            return answer if isinstance(answer, Refusal) else _overflowed(answer, dtype)
        case Softcap(value):
            return _capped(scores, value)
        case Bias(term):
            return _with_bias(scores, term)
        case MaskFill():
            return _filled(scores, layer)
        case Floor(value):
            return _floored(scores, value)
    raise TypeError(f"{layer} is no layer of the scores")


def _with_bias(scores: Scores, term: Expr) -> Scores:
    return replace(scores, terms=(Term(term, 0), *scores.terms))


def without_shift(scores: Scores, key_axes: tuple[sympy.Symbol, ...], lifted: Lifted) -> Scores:
    """`scores` without the terms of positions and numbers that are the same for every key of a query, which cancel.

    Kernels that recompute the weights from the logarithm of their sum would lose digits to a large term.
    """
    limit = _held(_ORDINARY, lifted)
    if scores.bounded or any(math.isfinite(fill.value) for fill in scores.fills):
        return scores

    def cancels(term: Expr) -> bool:
        reads = any(isinstance(part, (ex.Load, ex.Gather, ex.Scalar)) for part in ex.walk(term))
        is_finite = stays_within(term, limit, lifted.space, lifted.learned, lifted.leaf_dtypes.values())
        return not reads and not index_symbols(term) & set(key_axes) and is_finite

    return replace(scores, terms=tuple(term for term in scores.terms if not cancels(term.value)))


def _scaled(scores: Scores, factor: Expr, key_axes: tuple[sympy.Symbol, ...], magnitude: float) -> Scores | Refusal:
    """s * (x + b) = s * x + s * b, and s * where(k, x, f) = where(k, s * x, s * f)."""
    if index_symbols(factor) & set(key_axes):
        return Refusal("the scores are scaled differently for each key")
    if scores.softcap is not None:
        return Refusal("capped scores are scaled or bounded")
    fills = []
    for fill in scores.fills:
        if not (isinstance(factor, Const) and factor.value > 0):
            return Refusal("masked scores are scaled by something that is not a positive number")
        if fill.value * factor.value > WEAKEST_FILL:
            value = fill.value * factor.value
            return Refusal(f"masked scores are scaled to {value:g}, which ordinary scores can reach")
        fills.append(replace(fill, value=fill.value * factor.value))
    return replace(
        scores,
        scale=al.mul(factor, scores.scale),
        magnitude=scores.magnitude * magnitude,
        terms=tuple(replace(term, value=al.mul(factor, term.value)) for term in scores.terms),
        fills=tuple(fills),
        scaled_fill=scores.scaled_fill or (bool(fills) and factor != _ONE),
    )


def _overflowed(scores: Scores, dtype: torch.dtype) -> Scores:
    """`scores` rounded to `dtype`, in which a fill beyond the lowest number is minus infinity."""
    fills = tuple(
        replace(fill, value=-math.inf) if math.isinf(precision.rounded(fill.value, dtype)) else fill
        for fill in scores.fills
    )
    return replace(scores, fills=fills)


def _capped(scores: Scores, value: float) -> Scores | Refusal:
    if scores.terms or scores.fills or scores.bounded:
        return Refusal("scores are capped after a mask or a bias")
    if scores.softcap is not None:
        return Refusal("capped scores are scaled or bounded")
    return replace(scores, softcap=value)


def _filled(scores: Scores, fill: MaskFill) -> Scores | Refusal:
    # A fill above the threshold is the min of the scores' dtype, which no score in it can pass.
    is_near = -math.inf < fill.value <= MASK_FILL_THRESHOLD and scores.magnitude * _ORDINARY > -fill.value
    if is_near and scores.magnitude > 1 and not _absorbs(fill.value):
        if fill.added:
            return _with_bias(scores, _as_bias(fill))
        times = "a factor that may be anything" if math.isinf(scores.magnitude) else f"{scores.magnitude:g}"
        return Refusal(f"masked scores become {fill.value:g}, which scores times {times} can reach")
    terms = tuple(replace(term, below=term.below + 1) for term in scores.terms)
    return replace(scores, terms=terms, fills=(fill, *scores.fills))


def _floored(scores: Scores, least: float) -> Scores | Refusal:
    """max(where(k, x, f), L) = where(k, x, max(f, L)) for scores x above L."""
    if scores.softcap is not None:
        return Refusal("capped scores are scaled or bounded")
    # A floor above the fill replaces the score, which is then no longer lowered.
    fills = tuple(
        replace(fill, value=max(fill.value, least), added=fill.added and fill.value > least) for fill in scores.fills
    )
    terms = tuple(replace(term, value=al.binary("maximum", term.value, Const(least))) for term in scores.terms)
    return replace(scores, terms=terms, fills=fills, floored=scores.floored or bool(terms), bounded=True)


def mask_and_biases(
    scores: Scores, beneath: Expr, axes: Axes, lifted: Lifted
) -> tuple[Mask, tuple[Expr, ...]] | Refusal:
    """(the mask as structure, the biases and the fills that act as biases), or a Refusal. beneath: the inner score."""
    space, leaf_dtypes = lifted.space, lifted.leaf_dtypes
    terms = tuple(term.value for term in scores.terms)
    finite = [fill for fill in scores.fills if math.isfinite(fill.value)]
    # A bias from memory may hide keys by itself. So may a function of the scores, such as log, or of positions, such as
    # exp: only minus infinity is out of their reach.
    unknown = bool(finite) and not (_is_ordinary(beneath, lifted) and _hides_nothing(terms, finite, lifted))
    parts = mask_parts((fill.keep for fill in scores.fills), axes, space)
    seen = every_query_sees_a_key(parts, axes, space, leaf_dtypes)
    if seen and not unknown and not scores.floored:
        return Mask(parts), terms

    soft = [fill for fill in finite if fill.added]
    hard = [fill for fill in scores.fills if fill not in soft]
    biases = terms + tuple(_as_bias(fill) for fill in soft)
    values = {fill.value for fill in hard}
    # In a row that sees a key, keys under a finite fill have no weight, even if other rows are fully masked.
    parts_if_others_seen = parts if finite and not unknown else ()
    # A floor that replaces all scores of a row also stops their gradient; "mean" tells the kernels to do so.
    softly: EmptyRows = "mean" if scores.floored else "none"
    if not hard:
        return Mask(empty_rows=softly, parts_if_others_seen=parts_if_others_seen), biases
    if values == {-math.inf}:
        parts = mask_parts((fill.keep for fill in hard), axes, space)
        sees = every_query_sees_a_key(parts, axes, space, leaf_dtypes)
        return Mask(parts, empty_rows="mean" if scores.floored else "none" if sees else "nan"), biases
    if len(hard) > 1 or (scores.scaled_fill and biases):
        return Refusal("a query that sees no key would get another mean of the values", hard[0].keep)
    if not biases:
        return Mask(mask_parts([hard[0].keep], axes, space), "mean", parts_if_others_seen), ()
    if soft or not _absorbs(hard[0].value):
        return Refusal("a query that sees no key would get another mean of the values", hard[0].keep)
    # A dtype's lowest number absorbs the score that it is added to. So adding is replacing: the fill becomes a bias.
    place = scores.fills.index(hard[0])
    kept = tuple(
        al.select(hard[0].keep, term.value, Const(0.0)) if term.below > place else term.value for term in scores.terms
    )
    return Mask(empty_rows="mean"), (*kept, _as_bias(hard[0]))


def _hides_nothing(terms: Iterable[Expr], fills: Iterable[MaskFill], lifted: Lifted) -> bool:
    """Whether the sum of `terms` stays far above each of the finite `fills` for every query and key."""
    limit = _held(min(abs(fill.value) for fill in fills) / 4, lifted)
    return stays_within(sum_of(terms), limit, lifted.space, lifted.learned, lifted.leaf_dtypes.values())


def _held(limit: float, lifted: Lifted) -> float:
    """`limit`, lowered if a sum of scores and a number near it may overflow float16."""
    return min(limit, torch.finfo(torch.float16).max / 4) if torch.float16 in lifted.leaf_dtypes.values() else limit


def _is_ordinary(score: Expr, lifted: Lifted) -> bool:
    """Whether `score` stays far above every fill if the product of query and key is an ordinary number."""
    if not ex.has_product(score):
        return stays_within(score, _ORDINARY, lifted.space, lifted.learned, lifted.leaf_dtypes.values())
    match score:
        case ex.Score():
            return True
        case ex.Unary(name, _) if FUNCTIONS[name].growth == "bounded":
            return True
        case ex.Unary(name, x) if FUNCTIONS[name].growth == "linear":
            return _is_ordinary(x, lifted)
        case ex.Cast(_, x):
            return _is_ordinary(x, lifted)
        case ex.Div(x, divisor) if not ex.has_product(divisor):
            far = smallest_divisor(divisor, lifted.space, lifted.learned) >= 1 / _ORDINARY
            return far and _is_ordinary(x, lifted)
        case ex.Mul(a, b) if ex.has_product(a) and ex.has_product(b):
            return False
        case ex.Add(a, b) | ex.Mul(a, b) | ex.Binary("maximum" | "minimum", a, b) | ex.Select(_, a, b):
            return _is_ordinary(a, lifted) and _is_ordinary(b, lifted)
    return False


# Max of a scaled fill. Scores are assumed to stay above half of it, and exp(-104) is 0 in float32.
WEAKEST_FILL = -208.0
_ORDINARY = 1e6


def _as_bias(fill: MaskFill) -> Expr:
    return al.select(fill.keep, Const(0.0), Const(fill.value))


def _absorbs(fill: float) -> bool:
    return fill <= 0.99 * torch.finfo(torch.bfloat16).min
