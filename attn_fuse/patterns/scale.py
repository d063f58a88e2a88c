"""Scale: the scores times or divided by a factor. Takes any finite factor not computed from the scores.

Declines products with something computed from the scores, and quotients by the scores.
"""

from __future__ import annotations

import math

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.nodes import Const, Div, Expr, Mul, has_product
from attn_fuse.expression.simplify import div
from attn_fuse.patterns.layer import Answer, Layered, Scale


def scale(scores: Expr) -> Answer:
    """The scale of scores * factor; a Refusal if both operands hold a matrix product."""
    match scores:
        case Mul(_, factor) if has_product(factor):
            return Refusal("the scores are multiplied with something computed from them")
        case Mul(inner, factor):
            return _scaled(inner, factor)
    return None


def quotient(scores: Expr) -> Answer:
    """The scale of scores / divisor; a Refusal if the divisor holds a matrix product."""
    match scores:
        case Div(_, divisor) if has_product(divisor):
            return Refusal("something is divided by the scores")
        case Div(inner, divisor):
            return _scaled(inner, div(Const(1.0), divisor))
    return None


def _scaled(inner: Expr, factor: Expr) -> Answer:
    if isinstance(factor, Const) and not math.isfinite(factor.value):
        return Refusal(f"the scores are scaled by {factor.value}")
    return Layered(inner, Scale(factor))
