"""Bounds hold every value that torch computes, and are near enough to tell a padding mask from a slope."""

from __future__ import annotations

import math

import pytest
import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import UNARY
from attn_fuse.expression.index import Space
from attn_fuse.expression.ranges import stays_within

T = 12
SPACE = Space({sympy.Symbol("length", integer=True, positive=True): (2, math.inf)})
ROW, COLUMN = SPACE.fresh("i", T), SPACE.fresh("j", T)
FAR_COLUMN = SPACE.fresh("k", sympy.Symbol("length", integer=True, positive=True))
DISTANCE, FAR = ex.Index(ROW - COLUMN), ex.Index(-FAR_COLUMN)
LEARNED, STORED = ex.Load(0, (ROW,)), ex.Load(1, (COLUMN,))
HALF = ex.Const(0.5)


def within(x: ex.Expr, limit: float) -> bool:
    return stays_within(x, limit, SPACE, {0})


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("shift, step", [(-5, 1.0), (0, 1.0), (1, 1.0), (0, 0.1), (-3, 0.1), (-40, 30.0)])
def test_bounds_hold_all_values(name: str, shift: int, step: float) -> None:
    x = step * torch.arange(shift, shift + T, dtype=torch.float64)
    values = (getattr(torch, name, None) or getattr(torch.nn.functional, name))(x).double()
    most = values.nan_to_num(0.0, math.inf, -math.inf).abs().max().item()
    expr = ex.Unary(name, ex.Mul(ex.Const(step), ex.Index(COLUMN + shift)))
    limits = [0.01, 0.4, 0.9, 1.5, 2.0, 3.0, 50.0, 1e3, 1e6, 1e300]
    assert [limit for limit in limits if within(expr, limit) and not most < limit] == []


@pytest.mark.parametrize("power", [-3, -2, -1, 0, 1, 2, 3, 0.5])
@pytest.mark.parametrize("shift", [-T, -5, 0, 1])
def test_bounds_hold_all_powers(power: float, shift: int) -> None:
    most = (torch.arange(shift, shift + T, dtype=torch.float64) ** power).abs().max().item()
    power_of_position = ex.Binary("pow", ex.Index(COLUMN + shift), ex.Const(power))
    assert [
        limit for limit in (0.5, 2.0, 40.0, 200.0, 1e5) if within(power_of_position, limit) and not most < limit
    ] == []


@pytest.mark.parametrize(
    "x",
    [
        ex.Const(-99.0),
        LEARNED,
        ex.Gather(0, (STORED,)),
        ex.Mul(HALF, DISTANCE),
        ex.Mul(ex.Binary("pow", ex.Const(2.0), ex.Mul(ex.Const(-0.5), ex.Index(ROW + 1))), DISTANCE),
        ex.Mul(ex.Unary("exp2", ex.Mul(ex.Const(-0.5), ex.Index(ROW))), DISTANCE),
        ex.Unary("exp", ex.Mul(ex.Const(-0.5), ex.Binary("pow", ex.Index(ROW - COLUMN), ex.Const(2)))),
        ex.Unary("log1p", ex.Unary("abs", DISTANCE)),
        ex.Select(ex.NonNegative(ROW - COLUMN), ex.Const(0.0), DISTANCE),
        ex.Div(DISTANCE, ex.Index(COLUMN + 1)),
        ex.Cast(torch.bfloat16, DISTANCE),
        ex.Unary("tanh", STORED),
        ex.Binary("minimum", ex.Const(9.0), ex.Unary("abs", FAR)),
    ],
    ids=str,
)
def test_ordinary_biases(x: ex.Expr) -> None:
    assert within(x, 1e3)


@pytest.mark.parametrize(
    "x",
    [
        ex.Const(-math.inf),
        ex.Const(math.nan),
        STORED,
        ex.Scalar(2),
        FAR,
        ex.Unary("log", ex.Index(COLUMN)),
        ex.Div(ex.Const(-1.0), ex.Index(COLUMN)),
        ex.Binary("pow", ex.Index(COLUMN), ex.Const(-2)),
        ex.Unary("neg", ex.Unary("exp", ex.Index(COLUMN * 30))),
        # The power is infinite where it is held, whatever it is divided by.
        ex.Mul(ex.Const(1e-30), ex.Binary("pow", ex.Index(COLUMN), ex.Const(30))),
        ex.Select(ex.NonNegative(ROW - COLUMN), ex.Const(0.0), ex.Const(-1e9)),
        ex.Mul(LEARNED, STORED),
        # As whole numbers, these have wrapped around.
        ex.Unary("exp", ex.Mul(ex.Const(-0.5), ex.Binary("pow", ex.Index(ROW - FAR_COLUMN), ex.Const(2)))),
        ex.Unary("exp", ex.Mul(ex.Const(-1e-17), ex.Binary("pow", ex.Index(COLUMN), ex.Const(20)))),
        ex.Mul(ex.Cast(torch.int8, ex.Index(COLUMN)), ex.Cast(torch.int8, ex.Index(COLUMN))),
        ex.Cast(torch.float16, ex.Index(COLUMN * 10**5)),
        ex.Cast(torch.int16, ex.Index(COLUMN * 10**5)),
        ex.Binary("floor_divide", ex.Index(COLUMN), STORED),
    ],
    ids=str,
)
def test_what_may_be_any_number(x: ex.Expr) -> None:
    assert not within(x, 1e3)
