"""Bias: a term added to the scores. Taken: any that is not computed from them. Declined: a sum of two products."""

from __future__ import annotations

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.nodes import Add, Expr
from attn_fuse.patterns.layer import Answer, Bias, Layered, carrier


def bias(scores: Expr) -> Answer:
    """The bias of `scores` + term; a Refusal where both summands hold a matrix product."""
    match scores:
        case Add(a, b):
            parts = carrier(a, b)
            if parts is None:
                return Refusal("the scores are a sum of several products")
            inner, term = parts
            return Layered(inner, Bias(term))
    return None
