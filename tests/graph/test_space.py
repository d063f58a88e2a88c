"""Proofs over index ranges, against every value they speak of."""

from __future__ import annotations

import itertools
import math

import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_fuse.expression.index import Space, simplify_index
from attn_fuse.torch_internals import FloorDiv, Mod

COEFFICIENTS = st.integers(-4, 6)


def values(space: Space, expr: sympy.Expr, symbols: list[sympy.Symbol]) -> list[int]:
    ranges = [range(int(space.sizes[s])) for s in symbols]
    return [int(expr.subs(dict(zip(symbols, at, strict=True)))) for at in itertools.product(*ranges)]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.tuples(COEFFICIENTS, st.integers(1, 4)), min_size=1, max_size=3), st.integers(-6, 6))
def test_a_proof_holds_everywhere(terms: list[tuple[int, int]], constant: int) -> None:
    space = Space()
    symbols = [space.fresh("i", size) for _, size in terms]
    expr = sum((c * s for (c, _), s in zip(terms, symbols, strict=True)), sympy.Integer(constant))
    found = values(space, sympy.sympify(expr), symbols)
    # For affine expressions over boxes the proof is exact, not only sound.
    assert space.is_nonnegative(expr) == (min(found) >= 0)
    assert space.is_negative(expr) == (max(found) < 0)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(0, 9),
    st.integers(1, 8),
)
def test_floor_division_and_modulo(terms: list[tuple[int, int]], constant: int, by: int) -> None:
    space = Space()
    symbols = [space.fresh("i", size) for _, size in terms]
    expr = sympy.sympify(sum((c * s for (c, _), s in zip(terms, symbols, strict=True)), constant))
    by = sympy.Integer(by)
    exact = values(space, expr, symbols)
    assert values(space, space.floordiv(expr, by), symbols) == [v // int(by) for v in exact]
    assert values(space, space.mod(expr, by), symbols) == [v % int(by) for v in exact]


def test_symbolic_sizes() -> None:
    length = sympy.Symbol("s0", integer=True, positive=True)
    space = Space({length: (2, math.inf)})
    i, j = space.fresh("i", length), space.fresh("j", length)
    assert space.is_nonnegative(length - 2) and not space.is_nonnegative(length - 3)
    assert space.is_nonnegative(i + length - 1 - j)
    assert not space.is_nonnegative(i - j) and not space.is_negative(i - j)
    assert space.is_negative(i - length)
    assert space.floordiv(8 * i + space.fresh("d", 8), sympy.Integer(8)) == i
    assert space.floordiv(length * i + j, length) == i and space.mod(length * i + j, length) == j


def test_a_common_factor_is_divided_out() -> None:
    space = Space()
    n, d = space.fresh("n", 6), space.fresh("d", 8)
    # As where batch and heads were merged before a packed projection was taken apart.
    assert space.floordiv(8 * n + d, sympy.Integer(24)) == FloorDiv(n, 3)
    assert sympy.expand(space.mod(8 * n + d, sympy.Integer(24)) - 8 * Mod(n, 3) - d) == 0


def test_a_size_of_which_nothing_is_known_proves_nothing() -> None:
    length = sympy.Symbol("u0", integer=True)
    assert not Space().is_nonnegative(length - 1)


def test_simplification_carries_out_what_the_ranges_allow() -> None:
    space = Space()
    h, d = space.fresh("h", 4), space.fresh("d", 8)
    assert simplify_index(FloorDiv(8 * h + d, 8) + Mod(8 * h + d, 8), space) == h + d
