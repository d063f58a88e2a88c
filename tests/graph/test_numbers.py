"""Claims about numbers made of sizes and integers, held against brute force and against a solver."""

from __future__ import annotations

import os
import random

import pytest
import sympy
from torch.utils._sympy.functions import (
    CeilToInt,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    ToFloat,
    TruncToInt,
)

from attn_fuse.expression.index import Space
from attn_fuse.expression.numbers import Numbers
from tests.numbers_drawn import (
    RANGES,
    SYMBOLS,
    SYMPY,
    Number,
    as_sympy,
    assignments,
    drawn,
    symbols_of,
    value,
)

s0, s1, u0, n0, n2, n3 = (SYMPY[name] for name in "s0 s1 u0 n0 n2 n3".split())


@pytest.mark.parametrize(
    "expr, answer",
    [
        (s0 - 2, True), (s0 - 3, None), (-s0, False), (s0 * s1 - s0 - s1, True), (n0, None), (n0 * n0, True),
        (4 - n2, True), (n2 - 5, False), (n3 + 3, True), (n3 - 7, False),
        # A centred view of at most 1024 keys: its start is below 0 for more than 1024.
        (FloorDiv(1024 - s0, 2), None), (FloorDiv(s0, 2) - 1, True), (FloorDiv(s0 - s1, 2), None),
        (FloorDiv(n0, 4), None), (FloorDiv(s0, n0), None), (FloorDiv(s0, Max(n0, 1)), True),
        (PythonMod(n0, s0), True), (s0 - 1 - PythonMod(n0, s0), None), (63 - PythonMod(n0, 64), True),
        (PythonMod(n0, -64), None), (-PythonMod(n0, -64), True), (Mod(s0, 8), True), (7 - Mod(s0, 8), True),
        (Max(n0, 0), True), (Max(n0, 3) - 3, True), (Min(n0, 3), None), (3 - Min(n0, 3), True), (Min(n0, -1), False),
        (CeilToInt(IntTrueDiv(s0, 2)) - 1, True), (CeilToInt(ToFloat(n0) * 0.5), None),
        (TruncToInt(ToFloat(s0) * 0.3), True), (TruncToInt(ToFloat(s0) * -0.3), None),
        # A fraction just below 0 is not at least 0, whatever its integer part is.
        (IntTrueDiv(n3, 4), None), (-IntTrueDiv(n3, 8), None),
        # Rounding of what cancels may be on either side of 0.
        (FloorToInt(ToFloat(s0) * 0.1 - 0.2), None),
    ],
)  # fmt: skip
def test_three_answers(expr: sympy.Expr, answer: bool | None) -> None:
    numbers = Numbers(RANGES)
    assert numbers.is_nonnegative(expr) is answer


def claims(seed: int, count: int) -> list[tuple[Number, str]]:
    """What is claimed of numbers of `seed` that is wrong at an assignment of the box; conftest.py asks z3."""
    rng, wrong, made = random.Random(seed), [], 0
    while made < count:
        x = drawn(rng, rng.choice((1, 2, 2, 3, 3, 4)))
        try:
            expr = sympy.expand(as_sympy(x))
        except (ZeroDivisionError, TypeError, AssertionError, RecursionError):
            continue
        numbers = Numbers(RANGES)
        answer, (low, high) = numbers.is_nonnegative(expr), numbers.bounds(expr)
        names = sorted(symbols_of(x))
        if len(names) > 4:
            continue
        for at in assignments(names):
            try:
                found = value(x, at)
            except ZeroDivisionError:
                continue
            # Each assignment holds the three claims together: the sign, the min and the max.
            made += 3
            if not low <= found <= high or (answer is not None and answer != (found >= 0)):
                if is_another(expr, found, at):
                    continue
                wrong.append((x, f"{expr}: {answer}, [{low}, {high}], but {found} at {at}"))
                break
    return wrong


def is_another(expr: sympy.Expr, found: float, at: dict[str, int]) -> bool:
    """Whether torch's own expression is another number than the program's: n // s // n as 1 // s, for a negative n."""
    return bool(expr.subs({SYMPY[name]: number for name, number in at.items()}) != found)


# 12,000 claims of each of eight seeds every day; CLAIMS=200000 SEED=... for more.
@pytest.mark.parametrize("seed", range(8))
def test_what_is_claimed_holds(seed: int) -> None:
    seed += int(os.environ.get("SEED", "0")) * 8
    assert claims(seed, int(os.environ.get("CLAIMS", "12000"))) == []


@pytest.mark.parametrize("count", [60, pytest.param(400, marks=pytest.mark.thorough)])
def test_proofs_with_index_symbols_hold(count: int) -> None:
    """Space's proofs over positions and numbers, at every position and every assignment."""
    rng, wrong, proved = random.Random(5), [], 0
    for _ in range(count):
        space = Space(RANGES)
        length = rng.choice((s0, s1, sympy.Integer(5), n3 + 4, Max(n0, 1)))
        i, j = space.fresh("i", length), space.fresh("j", rng.choice((s0, s1, sympy.Integer(4))))
        offset = drawn(rng, 2)
        try:
            expr = sympy.expand(
                rng.choice((i - j, j, i, -i, length - 1 - i, FloorDiv(i, 3) - 1, FloorDiv(i - 4, 2), Mod(i, 4)))
                + rng.choice((0, 1, -1)) * as_sympy(offset)
            )
        except (ZeroDivisionError, TypeError, AssertionError, RecursionError):
            continue
        proves = space.is_nonnegative(expr), space.is_negative(expr)
        proved += any(proves)
        names = sorted(str(s) for s in expr.free_symbols | length.free_symbols | space.sizes[j].free_symbols)
        for at in assignments([name for name in names if name in SYMBOLS][:4]) if any(proves) else ():
            known = {SYMPY[name]: number for name, number in at.items()}
            sizes = [int(space.sizes[symbol].subs(known)) for symbol in (i, j)]
            for a in range(min(sizes[0], 6)):
                for b in range(min(sizes[1], 6)):
                    try:
                        found = expr.subs({**known, i: a, j: b})
                    except (ZeroDivisionError, AssertionError):
                        continue
                    if found.is_Integer and ((proves[0] and found < 0) or (proves[1] and found >= 0)):
                        wrong.append((expr, at, a, b, found))
    assert proved > count // 10
    assert wrong == []
