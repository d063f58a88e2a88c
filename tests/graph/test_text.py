"""Expressions as mathematics: each kind of node, and whole attentions as explain --expression prints them."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from attn_fuse.expression.nodes import (
    And,
    Binary,
    Cast,
    Compare,
    Const,
    Contract,
    Div,
    Dropout,
    Expr,
    Gather,
    Index,
    Input,
    IsZero,
    Load,
    NonNegative,
    Not,
    Number,
    Or,
    Position,
    Reduce,
    Scalar,
    Score,
    Select,
    Softmax,
    Unary,
)
from attn_fuse.expression.text import Names, as_text
from attn_fuse.report import collecting
from tests.harness import compiled

i, j, e = sympy.symbols("i j e", integer=True)
X, Y = Load(0, (i, j)), Load(1, (j,))
F32 = torch.float32


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (Const(0.125), "0.125"),
        (Const(-math.inf), "-inf"),
        (Const(True), "True"),
        (Index(i - 2 * j), "i - 2·j"),
        (X, "leaf0[i,j]"),
        (Load(2, ()), "leaf2"),
        (Scalar(3), "leaf3"),
        (Gather(1, (Binary("maximum", Index(i - j), Const(0)),)), "leaf1[max(i - j, 0)]"),
        (X + Y * 2, "leaf0[i,j] + 2·leaf1[j]"),
        ((X + Y) * Y, "(leaf0[i,j] + leaf1[j])·leaf1[j]"),
        (X - (Y - X), "leaf0[i,j] - (leaf1[j] - leaf0[i,j])"),
        (X + Const(-1) * Y, "leaf0[i,j] - leaf1[j]"),
        (Div(X, Y * Y), "leaf0[i,j] / (leaf1[j]·leaf1[j])"),
        (-X, "-leaf0[i,j]"),
        (X**2, "leaf0[i,j]^2"),
        (Unary("tanh", X / 30.0), "tanh(leaf0[i,j] / 30)"),
        (Binary("minimum", X, Const(5.0)), "min(leaf0[i,j], 5)"),
        (Binary("remainder", Position("i") - Position("j"), Number(0)), "(i - j) mod number0"),
        (NonNegative(i - j), "j ≤ i"),
        (NonNegative(j - i + 3), "i ≤ j + 3"),
        (NonNegative(j), "j ≥ 0"),
        (IsZero(i - j), "j = i"),
        (Compare("gt", X, Const(0)), "leaf0[i,j] > 0"),
        (Not(Compare("lt", X, Y)), "not (leaf0[i,j] < leaf1[j])"),
        (And(NonNegative(i - j), Or(IsZero(i), IsZero(j))), "j ≤ i and (i = 0 or j = 0)"),
        (Select(NonNegative(i - j), X, Const(-math.inf)), "leaf0[i,j] where j ≤ i else -inf"),
        (Select(NonNegative(j - i - 1), Const(-math.inf), X), "leaf0[i,j] where j ≤ i else -inf"),
        (Select(IsZero(i), X, Const(0.0)) * Y, "(leaf0[i,j] where i = 0 else 0)·leaf1[j]"),
        (Cast(torch.float16, X + Y), "float16(leaf0[i,j] + leaf1[j])"),
        (Contract((e,), Load(0, (i, e)), Load(1, (j, e)), F32), "leaf0[i,:]·leaf1[j,:]"),
        (Contract((e,), Load(0, (i, e + 64)), Load(1, (j, e)), F32), "sum_e(leaf0[i,e + 64]·leaf1[j,e])"),
        (Contract((e,), Load(0, (e, e)), Load(1, (j, e)), F32), "sum_e(leaf0[e,e]·leaf1[j,e])"),
        (Reduce("amax", j, X), "amax_j(leaf0[i,j])"),
        (Softmax(j, X * 2, i, F32), "softmax_j(2·leaf0[i,j])"),
        (Dropout(X, Const(0.1)), "dropout(leaf0[i,j], 0.1)"),
        (Score() + Input(0), "score + leaf0"),
    ],
    ids=lambda x: x if isinstance(x, str) else as_text(x),
)  # fmt: skip
def test_each_node(expr: Expr, expected: str) -> None:
    assert as_text(expr) == expected


def test_names() -> None:
    names = Names({i: "b"}, {0: "mask"}, "q·k")
    assert as_text(Score() + X, names) == "q·k + mask[b,j]"


def expression(program: object, *args: Tensor) -> str:
    with collecting() as graphs:
        compiled(program)(*args)
    (site,) = (site for graph in graphs for site in graph.sites)
    return site.expression


def test_nanogpt() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(torch.tril(torch.ones(7, 7)) == 0, float("-inf"))
        return att.softmax(-1) @ v

    assert_expected_inline(
        expression(attention, *torch.randn(3, 2, 3, 7, 16)),
        """\
score[b,h,i,j] = 0.25·q[b,h,i,:]·k[b,h,j,:] where j ≤ i else -inf
out[b,h,i,d] = sum_j(softmax_j(score)·v[b,h,j,d])""",
    )


def test_a_relative_bias_a_softcap_and_a_sink() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sink: Tensor) -> Tensor:
        distance = torch.arange(7)[:, None] - torch.arange(7) + 6
        scores = 30.0 * torch.tanh(q @ k.mT / 4 / 30.0) + table[:, distance]
        both = torch.cat([scores, sink.view(1, 3, 1, 1).expand(2, 3, 7, 1)], -1)
        return both.softmax(-1)[..., :-1] @ v

    assert_expected_inline(
        expression(attention, *torch.randn(3, 2, 3, 7, 16), torch.randn(3, 13), torch.randn(3)),
        """\
score[b,h,i,j] = 30·tanh(0.0333333·0.25·q[b,h,i,:]·k[b,h,j,:]) + getitem_1[h,i,j]
out[b,h,i,d] = sum_j(softmax_j(score, sink sink[h])·v[b,h,j,d])""",
    )


def test_what_is_refused_prints_as_far_as_it_was_read() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).sigmoid() @ v

    found = expression(attention, *torch.randn(3, 2, 3, 7, 16))
    assert found.startswith("out = sum_") and "sigmoid(softmax_" in found
