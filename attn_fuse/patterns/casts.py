"""Casts between floating-point types. Taken: any, since the kernels compute at least as precisely as written.

Declined: a cast to whole numbers or Booleans, which is no rounding but another function.
"""

from __future__ import annotations

from attn_fuse.expression.nodes import Cast, Expr
from attn_fuse.patterns.layer import Answer, Layered, Nothing


def widening(scores: Expr) -> Answer:
    """A cast to a floating-point dtype, as a layer that changes nothing."""
    match scores:
        case Cast(dtype, inner) if dtype.is_floating_point:
            return Layered(inner, Nothing())
    return None
