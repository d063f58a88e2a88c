"""A float that is made of sizes and known only when the program runs: its bounds are those of the sizes."""

from __future__ import annotations

import math

import pytest
import sympy
from torch.utils._sympy.functions import OpaqueUnaryFn_sqrt

from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Const, Div, Scalar
from attn_fuse.expression.ranges import largest_factor, smallest_divisor

SIZE = sympy.Symbol("s", integer=True, positive=True)
ARGUMENT = sympy.Symbol("f", real=True)
SPACE = Space({SIZE: (4, math.inf)}, {0: OpaqueUnaryFn_sqrt(SIZE), 1: ARGUMENT})


def test_a_root_of_a_size_makes_scores_smaller() -> None:
    assert smallest_divisor(Scalar(0), SPACE, ()) == pytest.approx(2.0)
    assert largest_factor(Div(Const(1.0), Scalar(0)), SPACE, ()) == pytest.approx(0.5)


@pytest.mark.parametrize("leaf", [1, 2])
def test_nothing_is_known_of_an_argument_or_of_another_leaf(leaf: int) -> None:
    assert smallest_divisor(Scalar(leaf), SPACE, ()) == 0.0
    assert largest_factor(Scalar(leaf), SPACE, ()) == math.inf
