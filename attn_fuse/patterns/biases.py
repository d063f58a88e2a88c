"""Bias: a term added to the scores. Takes any term not computed from them; declines a sum of two products."""

from __future__ import annotations

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.nodes import Add, Expr, has_product
from attn_fuse.patterns.layer import Answer, Bias, Layered


def bias(scores: Expr) -> Answer:
    """The bias of `scores` + term; a Refusal if both summands hold a matrix product."""
    match scores:
        case Add(_, term) if has_product(term):
            return Refusal("the scores are a sum of several products")
        case Add(inner, term):
            return Layered(inner, Bias(term))
    return None
