"""Scale: the scores times, or divided by, something that is the same for every key."""

from __future__ import annotations

import math

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.nodes import Const, Div, Expr, Mul
from attn_fuse.expression.simplify import div
from attn_fuse.patterns.layer import Answer, Layered, Scale, carrier


def scale(scores: Expr) -> Answer:
    match scores:
        case Mul(a, b):
            parts = carrier(a, b)
            if parts is None:
                return Refusal("the scores are multiplied with something computed from them")
            return _scaled(*parts)
    return None


def quotient(scores: Expr) -> Answer:
    match scores:
        case Div(a, b):
            parts = carrier(a, b)
            if parts is None or parts[0] is not a:
                return Refusal("something is divided by the scores")
            return _scaled(a, div(Const(1.0), b))
    return None


def _scaled(inner: Expr, factor: Expr) -> Answer:
    if isinstance(factor, Const) and not math.isfinite(factor.value):
        return Refusal(f"the scores are scaled by {factor.value}")
    return Layered(inner, Scale(factor))
