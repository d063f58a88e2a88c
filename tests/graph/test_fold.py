"""Fold: each rule keeps the value of the scores, on random layers and numbers, in whatever order they lie."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Binary, Const, Expr, Load, Mul, NonNegative, Score
from attn_fuse.patterns.fold import Scores, fold, over
from attn_fuse.patterns.layer import Bias, Floor, Layer, MaskFill, Scale, Softcap

SPACE = Space()
Q, K = SPACE.fresh("i", 5), SPACE.fresh("j", 7)
LOWEST = torch.finfo(torch.float32).min
CAUSAL, TABLE = NonNegative(Q - K), Load(0, (Q, K))
TENSORS = {0: torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
PRODUCT = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def of(x: Expr) -> Tensor:
    match x:
        case Const(value):
            return torch.tensor(float(value), dtype=torch.float64)
        case Load(leaf):
            return TENSORS[leaf]
        case Mul(a, b):
            return of(a) * of(b)
        case Binary("maximum", a, b):
            return torch.maximum(of(a), of(b))
        case NonNegative(value):
            return torch.tensor([[int(value.subs({Q: i, K: j})) >= 0 for j in range(7)] for i in range(5)])
    raise AssertionError(x)


def laid(layer: Layer, x: Tensor) -> Tensor:
    """What a layer makes of scores, as a program computes it."""
    match layer:
        case Scale(factor):
            return of(factor) * x
        case Bias(term):
            return x + of(term)
        case MaskFill(keep, value, added):
            low = torch.tensor(value, dtype=torch.float64)
            return x + torch.where(of(keep), torch.zeros_like(low), low) if added else torch.where(of(keep), x, low)
        case Floor(value):
            return x.clamp(min=value)
        case Softcap(value):
            return value * torch.tanh(x / value)
    return x


def value_of(scores: Scores) -> Tensor:
    """What folded scores are: the softcap of the scaled product, then terms and fills, the innermost first."""
    x = of(scores.scale) * PRODUCT
    x = x if scores.softcap is None else laid(Softcap(scores.softcap), x)
    for after in range(len(scores.fills), -1, -1):
        for term in reversed(scores.terms):
            x = x + of(term.value) if term.below == after else x
        if after:
            x = laid(scores.fills[after - 1], x)
    return x


LAYERS: Any = st.one_of(
    st.sampled_from([0.125, 0.5, 1.0, 3.0]).map(lambda s: Scale(Const(s))),
    st.sampled_from([TABLE, Const(0.5), Mul(Const(2.0), TABLE)]).map(Bias),
    st.sampled_from([-math.inf, LOWEST, -1e9]).map(lambda fill: MaskFill(CAUSAL, fill)),
    st.sampled_from([-1e9, LOWEST]).map(lambda fill: MaskFill(CAUSAL, fill, added=True)),
    st.just(Floor(LOWEST)),
    st.just(Softcap(20.0)),
)


@given(st.lists(LAYERS, max_size=5))
@settings(max_examples=500, deadline=None)
def test_every_rule_keeps_the_value(layers: list[Layer]) -> None:
    """Innermost first. Of a filled score only that it is out of reach: a sum with the fill is the fill."""
    scores, written = Scores(), PRODUCT
    for layer in layers:
        answer = over(scores, layer, torch.float32, (K,), SPACE, (0,))
        if isinstance(answer, Refusal):
            return
        scores, written = answer, laid(layer, written)
        found = value_of(scores)
        hidden = (written < -1e7) | (found < -1e7)
        torch.testing.assert_close(found[~hidden], written[~hidden])
        assert bool((found[hidden] < -1e6).all()) and bool((written[hidden] < -1e6).all())


@given(st.lists(LAYERS, max_size=5))
@settings(max_examples=100, deadline=None)
def test_the_whole_is_its_layers(layers: list[Layer]) -> None:
    found = fold([(layer, Score()) for layer in reversed(layers)], (K,), SPACE, (0,))
    scores: Scores | Refusal = Scores()
    for layer in layers:
        scores = over(scores, layer, torch.float32, (K,), SPACE, (0,)) if isinstance(scores, Scores) else scores
    assert found == scores


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([Floor(LOWEST), Softcap(20.0)], "scores are capped after a mask or a bias"),
        ([MaskFill(CAUSAL, -1e9), Scale(Const(1e-8))],
         "masked scores are scaled to -10, which ordinary scores can reach"),
        ([Scale(Const(1e4)), MaskFill(CAUSAL, -1e9)],
         "masked scores become -1e+09, which scores times 10000 can reach"),
    ],
)  # fmt: skip
def test_what_has_no_such_form(layers: list[Layer], reason: str) -> None:
    """Innermost first; the culprit is the part that the outermost layer was taken off. test_recognize.py has others."""
    parts = [Load(9, (Q,)), *[Score()] * (len(layers) - 1)]
    found = fold(list(zip(reversed(layers), parts, strict=True)), (K,), SPACE, (0,))
    assert found == Refusal(reason) and isinstance(found, Refusal) and found.node is parts[0]
