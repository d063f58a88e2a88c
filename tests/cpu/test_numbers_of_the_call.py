"""Masks and slices placed by integers and by arithmetic on lengths, compiled once and called again at others.

The numbers have both signs, though the first call shows one, and come by `math.ceil`, `int`, `%`, `max` and their like.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.utils._sympy.functions import CeilToInt, Max, PowByNatural, RoundToInt, ToFloat, TruncToInt

from attn_fuse.report import collecting
from attn_fuse.torch_internals import called_on
from tests.harness import assert_fused, check, every_day, tensors

INF = math.inf


def filled_from(N: int, M: int, n: int, made: Tensor) -> Tensor:
    """What is not filled, where the columns from `n` on are."""
    made[:, n:] = -1
    return made >= 0


# What is seen, of i and j, the positions of queries and keys, their lengths N and M, and a number n.
SEEN: dict[str, Callable[[Tensor, Tensor, int, int, int], Tensor]] = {
    "first keys hidden": lambda i, j, N, M, n: j + n >= 0,
    "causal with an offset": lambda i, j, N, M, n: j <= i + n,
    "later rows and keys": lambda i, j, N, M, n: (i >= -n) & (j >= -n),
    "rows from a half": lambda i, j, N, M, n: (i >= -(n // 2)) | (j == 0),
    "a view in the middle": lambda i, j, N, M, n: j + (16 - M) // 2 >= 0,
    "half of a difference": lambda i, j, N, M, n: j + (M - N) // 2 >= 0,
    "columns from a number": lambda i, j, N, M, n: filled_from(N, M, n, torch.zeros(N, M)),
    "columns from a difference": lambda i, j, N, M, n: filled_from(N, M, 2 * n - M, torch.zeros(N, M)),
    "numbers from a number": lambda i, j, N, M, n: filled_from(N, M, min(n, M), torch.arange(M).repeat(N, 1)),
    "a window": lambda i, j, N, M, n: (i - j).abs() < n,
    "a triangle": lambda i, j, N, M, n: torch.ones(N, M).tril(n) != 0,
    "at least three": lambda i, j, N, M, n: j < max(n, 3),
    # max(n, 0) by a choice: it is n for no negative n.
    "not negative": lambda i, j, N, M, n: j < torch.where(torch.tensor(n) >= 1, n, 0),
}


def seen_by(name: str, finite: bool) -> Callable[..., Tensor]:
    def program(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        N, M = q.shape[-2], k.shape[-2]
        i, j = torch.arange(N)[:, None], torch.arange(M)[None]
        # A float that is not written here would be an argument of the graph.
        fill = -1e9 if finite else -INF
        return (q @ k.mT * 0.25).masked_fill(~SEEN[name](i, j, N, M, n), fill).softmax(-1) @ v

    return program


@pytest.mark.parametrize("finite", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", every_day(SEEN, "columns from a difference"))
def test_numbers_of_both_signs(name: str, finite: bool) -> None:
    q = tensors(2, 3, 9, 8, count=1)
    outcome = check(seen_by(name, finite), *q, *tensors(2, 3, 13, 8, count=2), 5, dynamic=True)
    assert outcome.again["reused"] >= 3, outcome.again


LENGTHS = ((32, 32), (24, 48), (48, 24))
INTEGERS = (3, 5, -4, 0, -60, sys.maxsize)


def from_the_difference(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    start = key.shape[-2] - query.shape[-2]
    return (query @ key[..., start:, :].mT * 0.25).softmax(-1) @ value[..., start:, :]


@pytest.mark.parametrize("kernels", [["cpu_flash"], pytest.param(["chunked"], marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize("name", every_day([*SEEN, "from the difference"], "half of a difference"))
def test_called_again(name: str, kernels: list[str]) -> None:
    program = seen_by(name, True) if name in SEEN else from_the_difference
    options = {"inner_backend": "eager", "pick": "fused", "kernels": kernels}
    compiled, fused = torch.compile(program, backend="attn_fuse", options=options, dynamic=True), 0
    for (q_len, kv_len), n in itertools.product(LENGTHS, INTEGERS):
        query, key, value = (torch.randn(1, 2, length, 16) for length in (q_len, kv_len, kv_len))
        expected = program(query, key, value, n)
        with collecting() as reports:
            torch.testing.assert_close(compiled(query, key, value, n), expected, msg=lambda m: f"{n=} {kv_len=} {m}")  # noqa: B023
        fused += sum(site.status == "fused" for report in reports for site in report.sites)
    assert fused or name in ("from the difference", "not negative")


def test_integers_near_the_end_of_int64_stay_as_written() -> None:
    program = seen_by("a window", True)
    options = {"inner_backend": "eager", "pick": "fused"}
    compiled = torch.compile(program, backend="attn_fuse", options=options, dynamic=True)
    tensors = [torch.randn(1, 2, 32, 16) for _ in range(3)]
    statuses = []
    for n in (5, 2**39, 2**41):
        with collecting() as reports:
            torch.testing.assert_close(compiled(*tensors, n), program(*tensors, n))
        statuses.append([site.blocker and site.blocker.reason for report in reports for site in report.sites])
    # The second call is the first one's compilation; the third is beyond what that is guarded for.
    assert statuses == [[None], [], [f"an integer beyond {2**40} in a position"]]


# ---- numbers by functions


def within(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    hidden = (i - j >= width) | (j - i > 2 * width + 1)
    return (q @ k.mT / 4).masked_fill(hidden, -1e9).softmax(-1) @ v


# Of the lengths N and M, and a ratio or a number.
WIDTHS: dict[str, Callable[[int, int, Any], int]] = {
    "ceil of a ratio": lambda N, M, x: math.ceil(x * M) + 1,
    "floor and round": lambda N, M, x: math.floor(x * M) + round(x * N),
    "multiple of an int": lambda N, M, x: 2 * int(x * M) - 3,
    "half of a size": lambda N, M: int(N * 0.5) + 1,
    "max and min": lambda N, M: max(int(N * 0.5), 2) + min(M, 6),
    "remainder and quotient": lambda N, M: M % 4 + N // 3,
    "root and logarithm": lambda N, M: int(math.sqrt(M)) + int(math.log2(N * 2)),
    "remainder of a number": lambda N, M, n: abs(n) % (N // 3 + 1) + round(N / 3),
    "number of either sign": lambda N, M, n: n // 2 - n % 3,
    "number in a tensor": lambda N, M, n: n.item() * 2 + int(N * 0.25),
}
RATIOS, NUMBERS = (0.5, 0.3, 1.4, 0.9, -0.2), (3, 5, -2, 0, 8)
GIVEN = {
    **dict.fromkeys(("ceil of a ratio", "floor and round", "multiple of an int", "positions moved"), RATIOS),
    **dict.fromkeys(("remainder of a number", "number of either sign"), NUMBERS),
    "number in a tensor": tuple(map(torch.tensor, NUMBERS)),
}


def positions_moved(q: Tensor, k: Tensor, v: Tensor, ratio: float) -> Tensor:
    i = torch.arange(q.shape[2])[:, None] + int(ratio * k.shape[2])
    return (q @ k.mT / 4).masked_fill(torch.arange(k.shape[2]) > i, -1e9).softmax(-1) @ v


def offset_of_a_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.shape[2], k.shape[2]).tril(diagonal=int(k.shape[2] * 0.5)).bool()
    return (q @ k.mT / 4).masked_fill(~keep, -1e9).softmax(-1) @ v


BY_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: lambda q, k, v, *x, of=of: within(q, k, v, of(q.shape[2], k.shape[2], *x)) for name, of in WIDTHS.items()},
    "positions moved": positions_moved,
    "offset of a diagonal": offset_of_a_diagonal,
}


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("name", every_day(BY_FUNCTIONS, "number of either sign"))
def test_a_number_by_functions(name: str) -> None:
    first, *more = (
        (*(torch.randn(2, 3, length, 16) for length in (q_len, kv_len, kv_len)), *GIVEN.get(name, ())[n : n + 1])
        for n, (q_len, kv_len) in enumerate(((7, 11), (12, 9), (5, 30), (40, 3), (17, 17)))
    )
    outcome = assert_fused(BY_FUNCTIONS[name], *first, dynamic=True, more=more, backward=False)
    assert len(outcome.graphs) == 1, "compiled anew"


S, N = sympy.Symbol("s", integer=True, positive=True), sympy.Symbol("n", integer=True)


@pytest.mark.parametrize(
    "expr",
    [
        CeilToInt(0.3 * ToFloat(S)), TruncToInt(0.7 * ToFloat(N)), RoundToInt(0.3 * ToFloat(S)), Max(N, S, 4),
        PowByNatural(S, 3),
    ],
    ids=str,
)  # fmt: skip
def test_a_function_that_the_graph_does_not_hold(expr: sympy.Expr) -> None:
    """What stands for the function is torch's, called on what stands for its arguments."""

    def value(part: sympy.Expr, at: dict[sympy.Symbol, int]) -> Any:
        if part.is_Symbol:
            return at[part]
        if part.is_Number:
            return int(part) if part.is_Integer else float(part)
        return called_on(part, [value(x, at) for x in part.args], lambda function, *args: function(*args))

    for s, n in ((1, -7), (10, 0), (37, 41)):
        assert value(expr, {S: s, N: n}) == expr.subs({S: s, N: n})


# ---- sizes by divisions

B, H, T, D = 2, 4, 12, 8


def sizes_by_division(q, k, v):
    """The width of a head as a tensor, as GCViT takes it: torch reads the number in it where a shape is asked for."""
    width = torch.div(H * D, H, rounding_mode="floor")
    q, k, v = (t.reshape(B, T, H, width).transpose(1, 2) for t in (q, k, v))
    return (q @ k.mT * width**-0.5).softmax(-1) @ v


def sizes_by_two_divisions(q, k, v):
    width = torch.div(H * D, H, rounding_mode="floor")
    twice = q.reshape(B, T, H, width).transpose(1, 2)
    width = 2 * width
    q, k, v = (t.reshape(B, T, H // 2, width).transpose(1, 2) for t in (q, k, v))
    return (q @ k.mT * width**-0.5).softmax(-1) @ v + twice.sum()


@pytest.mark.parametrize("program", [sizes_by_division, sizes_by_two_divisions])
def test_sizes_by_division(program: Callable[..., Tensor]) -> None:
    assert_fused(program, *tensors(B, T, H * D), inner="aot_eager")


@pytest.mark.thorough
def test_sizes_by_division_of_a_size_that_changes() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = torch.div(q.shape[-1], H, rounding_mode="floor")
        q, k, v = (t.reshape(B, T, H, width).transpose(1, 2) for t in (q, k, v))
        return (q @ k.mT * width**-0.5).softmax(-1) @ v

    more = [tensors(B, T, H * D * n) for n in (2, 3)]
    check(program, *tensors(B, T, H * D), inner="aot_eager", more=more)
