"""Masks: scores replaced by a fill value, or lowered by one, where a condition does not hold.

A fill masks if no ordinary score comes near it: minus infinity, the min of the scores' dtype, or -1e9 and below. Other
fills are a bias if added to the scores, and are refused in their place.
"""

from __future__ import annotations

import functools
import math

import torch

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.nodes import FALSE, TRUE, Add, Cast, Const, Expr, Select, has_product, terms
from attn_fuse.expression.simplify import select
from attn_fuse.patterns.layer import Answer, Layered, MaskFill, dtype_of

MASK_FILL_THRESHOLD = -1e9


def is_masking(fill: float, dtype: torch.dtype) -> bool:
    """Whether `fill` is out of reach of ordinary scores in `dtype`."""
    return not math.isnan(fill) and (fill <= MASK_FILL_THRESHOLD or fill <= torch.finfo(dtype).min)


def mask(scores: Expr) -> Answer:
    """The mask that replaces scores by a fill; a Refusal if it depends on the scores or the fill does not mask."""
    match scores:
        case Select(cond, inner, fill):
            if has_product(cond):
                return Refusal("the mask is computed from the scores", cond)
            if has_product(fill):
                return Refusal("the scores are chosen from several products")
            if not isinstance(fill, Const):
                return Refusal("masked scores become something that is not one number")
            if not is_masking(fill.value, dtype_of(inner)):
                return Refusal(f"masked scores become {fill.value:g}, which ordinary scores can reach")
            return Layered(inner, MaskFill(cond, float(fill.value)))
    return None


def additive_mask(scores: Expr) -> Answer:
    """The mask added to the scores: a choice between 0 and fills that mask."""
    match scores:
        case Add(inner, term) if not has_product(term):
            summands = list(terms(term))
            for n, summand in enumerate(summands):
                choice = _zero_or_fill(summand, dtype_of(inner))
                if choice is not None:
                    keep, fill = choice
                    others = summands[:n] + summands[n + 1 :]
                    beneath = Add(inner, functools.reduce(Add, others)) if others else inner
                    return Layered(beneath, MaskFill(keep, fill, added=True))
    return None


def _zero_or_fill(term: Expr, dtype: torch.dtype) -> tuple[Expr, float] | None:
    """(where `term` is 0, the max of its other values), or None unless every other value masks."""
    match term:
        case Const(value) if value == 0:
            return TRUE, -math.inf
        case Const(value) if is_masking(value, dtype):
            return FALSE, float(value)
        case Cast(to, x) if to.is_floating_point:
            return _zero_or_fill(x, dtype)
        case Select(cond, a, b):
            first, second = _zero_or_fill(a, dtype), _zero_or_fill(b, dtype)
            if first is not None and second is not None:
                return select(cond, first[0], second[0]), max(first[1], second[1])
    return None
