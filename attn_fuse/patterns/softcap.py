"""Softcap: cap * tanh(x / cap), as Gemma 2 does before masking (arXiv 2408.00118)."""

from __future__ import annotations

from attn_fuse.expression.nodes import Const, Expr, Mul, Unary
from attn_fuse.patterns.layer import Answer, Layered, Softcap, bare


def softcap(scores: Expr) -> Answer:
    """The softcap of cap * tanh(x / cap), for a cap above 0."""
    match scores:
        case Mul(Unary("tanh", inner), Const(cap)) if cap > 0:
            match inner := bare(inner):
                # One number may both scale the scores and divide them by the cap.
                case Mul(x, Const(number)):
                    return Layered(x * (number * cap), Softcap(float(cap)))
            return Layered(inner * float(cap), Softcap(float(cap)))
    return None
