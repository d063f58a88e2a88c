"""Floor: scores raised to at least the min of their dtype, as OPT and M2M100 do after masking.

Takes a floor out of reach of ordinary scores: it only turns minus infinity into a finite fill. Declines any other
bound, which is a function of the scores.
"""

from __future__ import annotations

from attn_fuse.expression.nodes import Add, Binary, Const, Expr, Mul
from attn_fuse.patterns.layer import Answer, Floor, Layered, dtype_of
from attn_fuse.patterns.masks import is_masking


def floor(scores: Expr) -> Answer:
    """The floor of max(scores, bound), for a bound that no ordinary score comes near."""
    match scores:
        case Binary("maximum", inner, Const(bound)):
            if is_masking(bound, dtype_of(inner)):
                return Layered(inner, Floor(float(bound)))
    return None


def shared_floor(scores: Expr) -> Answer:
    """The floor of `torch.maximum` in training: two halves, which share the gradient where bound and score tie."""
    match scores:
        case Add(Mul(Binary("maximum", inner, bound) as half, Const(0.5)), Mul(other, Const(0.5))):
            return floor(half) if other == Binary("maximum", bound, inner) else None
    return None
