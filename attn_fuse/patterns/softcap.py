"""Softcap: cap * tanh(x / cap), as Gemma 2 does before masking (arXiv 2408.00118)."""

from __future__ import annotations

from attn_fuse.expression.nodes import Cast, Const, Expr, Mul, Unary
from attn_fuse.patterns.layer import Answer, Layered, Softcap


def softcap(scores: Expr) -> Answer:
    """The softcap of cap * tanh(x / cap), for a cap above 0."""
    match scores:
        case Mul(Unary("tanh", inner), Const(cap)) if cap > 0:
            while isinstance(inner, Cast) and inner.dtype.is_floating_point:
                inner = inner.x
            match inner:
                # One number may both scale and divide by the cap: times the cap, a scale is left.
                case Mul(x, Const(number)):
                    return Layered(x * (number * cap), Softcap(float(cap)))
            return Layered(inner * float(cap), Softcap(float(cap)))
    return None
