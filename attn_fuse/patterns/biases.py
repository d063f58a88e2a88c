"""Bias: a term added to the scores. Taken: any that is not computed from them. Declined: a sum of two products."""

from __future__ import annotations

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.nodes import Add, Expr, has_product
from attn_fuse.patterns.layer import Answer, Bias, Layered


def bias(scores: Expr) -> Answer:
    """The bias of `scores` + term; a Refusal where both summands hold a matrix product."""
    match scores:
        case Add(_, term) if has_product(term):
            return Refusal("the scores are a sum of several products")
        case Add(inner, term):
            return Layered(inner, Bias(term))
    return None
