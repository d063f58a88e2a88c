"""Fold: the layers of the scores become one scale, a mask as structure, and biases.

What is delicate here is a query that sees no key. Minus infinity gives NaN there, and a kernel may give 0. A finite
fill gives a mean of the values, over those keys that share the least score; a kernel that skips masked keys does not.
So a finite fill is dropped only where every query is proved to see a key, and keeps its exact meaning elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import sympy
import torch

from attn_fuse import expression as ex
from attn_fuse.attention import Axes, Causal, DenseMask, Mask, MaskPart, Refusal
from attn_fuse.expression import Const, Expr, index_symbols
from attn_fuse.patterns.layer import Bias, Fill, Floor, Layer, Scale
from attn_fuse.space import Space
from attn_fuse.torch_internals import FloorDiv, Mod


@dataclass(frozen=True)
class Term:
    """A bias. below: how many of the fills were applied after it."""

    value: Expr
    below: int


@dataclass(frozen=True)
class Scores:
    """The layers of the scores: scale * product, plus terms, filled. Terms and fills stand outermost first.

    scaled_fill: the scores are scaled after a fill. floored: a term was raised to a floor.
    """

    scale: Expr
    terms: tuple[Term, ...]
    fills: tuple[Fill, ...]
    scaled_fill: bool
    floored: bool


def fold(layers: Iterable[Layer], key_axis: sympy.Symbol) -> Scores | Refusal:
    """`layers`, outermost first, over scores whose keys run along `key_axis`."""
    scale: Expr = Const(1.0)
    terms: list[Term] = []
    fills: list[Fill] = []
    floored = scaled_fill = False
    least = -math.inf
    for layer in layers:
        match layer:
            case Scale(factor):
                if key_axis in index_symbols(factor):
                    return Refusal("the scores are scaled differently for each key")
                scale = ex.mul(scale, factor)
            case Bias(term):
                floored = floored or least > -math.inf
                raised = term if least == -math.inf else ex.binary("maximum", term, Const(least))
                terms.append(Term(ex.mul(scale, raised), len(fills)))
            case Fill(keep, value, added):
                if not (isinstance(scale, Const) and scale.value > 0):
                    return Refusal("masked scores are scaled by something that is not a positive number")
                scaled_fill = scaled_fill or scale != Const(1.0)
                # A score that a floor lifts is no longer lowered by the fill but replaced by the floor.
                lifted = value <= least
                fills.append(Fill(keep, max(value, least) * scale.value, added and not lifted))
            case Floor(value):
                least = max(least, value)
    return Scores(scale, tuple(terms), tuple(fills), scaled_fill, floored)


def mask_and_biases(scores: Scores, axes: Axes, space: Space) -> tuple[Mask, tuple[Expr, ...]] | Refusal:
    """The mask as structure, and the biases, among them what only looked like a mask."""
    terms = tuple(term.value for term in scores.terms)
    # A term that is read from memory may hide keys by itself, so that only minus infinity is out of its reach.
    unknown = any(isinstance(part, ex.Load) for term in terms for part in ex.walk(term))
    finite = [fill for fill in scores.fills if math.isfinite(fill.value)]
    parts = _parts((fill.keep for fill in scores.fills), axes)
    seen = _every_row_sees_a_key(parts, space)
    if seen and not (unknown and finite) and not scores.floored:
        return Mask(parts), terms

    soft = [fill for fill in finite if fill.added]
    hard = [fill for fill in scores.fills if fill not in soft]
    biases = terms + tuple(_as_bias(fill) for fill in soft)
    values = {fill.value for fill in hard}
    # Where a floor replaced the scores of a whole row, it also stopped their gradient.
    softly = "mean" if scores.floored else "none"
    if not hard:
        return Mask(empty_rows=softly), biases
    if values == {-math.inf}:
        parts = _parts((fill.keep for fill in hard), axes)
        sees = _every_row_sees_a_key(parts, space)
        return Mask(parts, empty_rows="mean" if scores.floored else "none" if sees else "nan"), biases
    if len(hard) > 1 or (scores.scaled_fill and biases):
        return Refusal("a query that sees no key would get another mean of the values")
    if not biases:
        return Mask(_parts([hard[0].keep], axes), empty_rows="mean"), ()
    if soft or not _absorbs(hard[0].value):
        return Refusal("a query that sees no key would get another mean of the values")
    # Added to a score, the lowest number swallows it: then adding is replacing, and the fill is one more bias.
    place = scores.fills.index(hard[0])
    kept = tuple(
        ex.select(hard[0].keep, term.value, Const(0.0)) if term.below > place else term.value for term in scores.terms
    )
    return Mask(empty_rows="mean"), (*kept, _as_bias(hard[0]))


def _as_bias(fill: Fill) -> Expr:
    return ex.select(fill.keep, Const(0.0), Const(fill.value))


def _absorbs(fill: float) -> bool:
    return fill <= 0.99 * torch.finfo(torch.bfloat16).min


def _parts(keeps: Iterable[Expr], axes: Axes) -> tuple[MaskPart, ...]:
    parts: list[MaskPart] = []
    for keep in keeps:
        for condition in _conjuncts(keep):
            part = _causal(condition, axes) or DenseMask(condition)
            if part not in parts and condition != ex.TRUE:
                parts.append(part)
    return tuple(parts)


def _conjuncts(keep: Expr) -> Iterator[Expr]:
    match keep:
        case ex.And(a, b):
            yield from _conjuncts(a)
            yield from _conjuncts(b)
        case ex.Select(cond, a, Const(False)):
            yield from _conjuncts(cond)
            yield from _conjuncts(a)
        case ex.Select(cond, Const(False), b):
            yield from _conjuncts(ex.logical_not(cond))
            yield from _conjuncts(b)
        case _:
            yield keep


def _causal(condition: Expr, axes: Axes) -> Causal | None:
    if not isinstance(condition, ex.NonNegative) or axes.query is None:
        return None
    offset = sympy.expand(condition.value - axes.query + axes.key)
    known = {*axes.batch, *axes.kv_heads, *axes.groups, axes.query, axes.key}
    return None if offset.free_symbols & known or offset.has(FloorDiv, Mod) else Causal(offset)


def _every_row_sees_a_key(parts: Iterable[MaskPart], space: Space) -> bool:
    return all(isinstance(part, Causal) and space.is_nonnegative(part.offset) for part in parts)
