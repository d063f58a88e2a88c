"""Dropout of the weights, between the softmax and the product with the value."""

from __future__ import annotations

from attn_fuse.expression import Dropout, Expr
from attn_fuse.patterns.layer import Answer, Drop, Peeled


def dropout(weights: Expr) -> Answer:
    match weights:
        case Dropout(inner, p):
            return Peeled(inner, Drop(p))
    return None
