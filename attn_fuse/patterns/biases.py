"""Bias: anything added to the scores that is not computed from them, with its exact meaning."""

from __future__ import annotations

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.nodes import Add, Expr
from attn_fuse.patterns.layer import Answer, Bias, Layered, carrier


def bias(scores: Expr) -> Answer:
    match scores:
        case Add(a, b):
            parts = carrier(a, b)
            if parts is None:
                return Refusal("the scores are a sum of several products")
            inner, term = parts
            return Layered(inner, Bias(term))
    return None
