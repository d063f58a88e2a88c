"""Score programs for FlexAttention (arXiv 2412.05496): a `score_mod` and a `mask_mod` over single elements.

Tracing runs the expressions on tensors without dimensions, which inlines them into the kernel. A score includes its
mask; `inlined` removes what `mask_mod` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Const, Div, Expr, Input, Mul, Number, Position, Score, Select, distinct
from attn_fuse.kernels.score.dependence import POSITIONS
from attn_fuse.kernels.score.program import Block, Memo, ScoreProgram, evaluate
from attn_fuse.kernels.score.simplify import assuming

# Beyond it, float32 rounds multiples by log2(e) so coarsely that exp2 shows it.
_ORDINARY = 1e6


def inlined(program: ScoreProgram) -> ScoreProgram:
    """What FlexAttention inlines: the sink, the condition that shows a key, and the score of a key that it shows."""
    seen = None if program.hides_only_if_others_seen else program.visible
    score = program.score if seen is None else assuming(seen, program.score)
    return ScoreProgram(score, sink=program.sink, visible=seen)


def scaled(score: Expr) -> tuple[float, Expr]:
    """(factor, expression), where the expression gives the score from the raw score multiplied by the factor."""
    match score:
        case Mul(Score() as raw, Const(factor)) if _is_ordinary(factor):
            return float(factor), raw
        case Div(Score() as raw, Const(by)) if _is_ordinary(by):
            return 1.0 / float(by), raw
    return 1.0, score


def score_mod(expr: Expr, count: int) -> Callable[..., Tensor]:
    """(score, b, h, i, j, *inputs, *numbers) -> the final score by `expr`, in float32, or float64 if the score is.

    count: the number of inputs. numbers: int64 tensors without dimensions.
    """

    def function(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *read: Tensor) -> Tensor:
        wide = torch.promote_types(score.dtype, torch.float32)
        return _on_element(expr, score.to(wide), (b, h, i, j), read[:count], read[count:], wide).to(wide)

    return function


def with_exact_fills(expr: Expr) -> Expr | None:
    """`expr`, a score, with powers of two in place of a mask's fills far below 0; None if that is impossible.

    The Triton template takes exp2(x * log2(e) - max), which the compiler fuses into one operation that rounds once,
    while the max was rounded before. For scores like -1e10 the difference is thousands, and a fully masked row gets 0
    or NaN instead of the mean of the values. Powers of two are multiplied without rounding.
    """
    fills, others = set[float](), list[Expr]()
    for branch in _branches(expr):
        if isinstance(branch, Const) and _is_far(branch.value):
            fills.add(branch.value)
        else:
            others.append(branch)
    keep_apart = len({_power(value) for value in fills}) == len(fills)
    return _filled(expr) if keep_apart and not any(map(_reads_far, others)) else None


def _branches(expr: Expr) -> Iterator[Expr]:
    match expr:
        case Select(_, a, b):
            yield from (*_branches(a), *_branches(b))
        case _:
            yield expr


def _filled(expr: Expr) -> Expr:
    match expr:
        case Const(value) if _is_far(value):
            return Const(_power(value))
        case Select(cond, a, b):
            return Select(cond, _filled(a), _filled(b))
    return expr


def _reads_far(expr: Expr) -> bool:
    return any(isinstance(node, Const) and _is_far(node.value) for node in distinct(expr))


def _is_far(value: float) -> bool:
    return _ORDINARY < abs(value) < math.inf


def _power(value: float) -> float:
    """The power of two next to `value`, away from 0, whose multiple by log2(e) is still a float32."""
    return math.copysign(2.0 ** min(126, math.ceil(math.log2(abs(value)))), value)


def mask_mod(expr: Expr | None, count: int) -> Callable[..., Tensor]:
    """(b, h, i, j, *inputs, *numbers) -> whether query i may see key j by `expr`; always if `expr` is None.

    count: as for `score_mod`.
    """

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *read: Tensor) -> Tensor:
        if expr is None:
            return torch.ones_like(b, dtype=torch.bool)
        return _on_element(expr, None, (b, h, i, j), read[:count], read[count:], torch.float32).to(torch.bool)

    return function


def over_queries(expr: Expr, inputs: Sequence[Tensor], numbers: Sequence[Tensor], query: Tensor) -> Tensor:
    """The value of `expr`, which does not depend on the key, such as a sink: [B, H, Lq] in at least float32."""
    places = [
        torch.arange(n, device=query.device).view([-1 if d == place else 1 for d in range(3)])
        for place, n in enumerate(query.shape[:3])
    ]
    wide = torch.promote_types(query.dtype, torch.float32)
    found = _on_element(expr, None, (*places, torch.zeros_like(places[2])), inputs, numbers, wide)
    return found.to(wide).expand(query.shape[:3])


@dataclass(frozen=True)
class _Element(Block):
    """One element of the scores, or several at given positions."""

    @property
    def one(self) -> tuple[int, ...]:
        return ()


def _on_element(
    expr: Expr,
    score: Tensor | None,
    positions: Sequence[Tensor],
    inputs: Sequence[Tensor],
    numbers: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    # FlexAttention's positions are int32, which flat indices into large tensors overflow.
    places = dict(zip(POSITIONS, (p.to(torch.int64) for p in positions), strict=True))
    element = _Element(1, 1, (0, 1), (0, 1), positions[0].device, dtype)
    memo: Memo = {}
    for node in distinct(expr):
        match node:
            case Position(name):
                memo[id(node)] = places[name]
            case Number(n):
                memo[id(node)] = numbers[n]
            case Input(n):
                read = inputs[n][tuple(0 if inputs[n].shape[d] == 1 else places[p] for d, p in enumerate(POSITIONS))]
                memo[id(node)] = read.to(torch.promote_types(read.dtype, dtype)) if read.is_floating_point() else read
            case _:
                memo[id(node)] = None
    return evaluate(expr, score, inputs, (), element, memo)


def _is_ordinary(factor: float) -> bool:
    return 1e-6 < factor < 1e6
