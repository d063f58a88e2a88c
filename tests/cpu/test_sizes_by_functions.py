"""Offsets, widths and lengths by `math.ceil`, `int`, `%`, `max` and their like, of sizes, integers and floats.

Each program is compiled once for any size and called again at others, with numbers of both signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.utils._sympy.functions import CeilToInt, Max, PowByNatural, RoundToInt, ToFloat, TruncToInt

from attn_fuse.torch_internals import called_on
from tests.harness import assert_fused

pytestmark = pytest.mark.thorough

LENGTHS = ((7, 11), (12, 9), (5, 30), (40, 3), (17, 17))
RATIOS = (0.5, 0.3, 1.4, 0.9, -0.2)
NUMBERS = (3, 5, -2, 0, 8)


def within(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    hidden = (i - j >= width) | (j - i > 2 * width + 1)
    return (q @ k.mT / 4).masked_fill(hidden, -1e9).softmax(-1) @ v


def ceil_of_a_ratio(q, k, v, ratio):
    return within(q, k, v, math.ceil(ratio * k.shape[2]) + 1)


def floor_and_round(q, k, v, ratio):
    return within(q, k, v, math.floor(ratio * k.shape[2]) + round(ratio * q.shape[2]))


def multiple_of_an_int(q, k, v, ratio):
    return within(q, k, v, 2 * int(ratio * k.shape[2]) - 3)


def positions_moved(q, k, v, ratio):
    i = torch.arange(q.shape[2])[:, None] + int(ratio * k.shape[2])
    return (q @ k.mT / 4).masked_fill(torch.arange(k.shape[2]) > i, -1e9).softmax(-1) @ v


def half_of_a_size(q, k, v):
    return within(q, k, v, int(q.shape[2] * 0.5) + 1)


def max_and_min(q, k, v):
    return within(q, k, v, max(int(q.shape[2] * 0.5), 2) + min(k.shape[2], 6))


def remainder_and_quotient(q, k, v):
    return within(q, k, v, k.shape[2] % 4 + q.shape[2] // 3)


def root_and_logarithm(q, k, v):
    return within(q, k, v, int(math.sqrt(k.shape[2])) + int(math.log2(q.shape[2] * 2)))


def offset_of_a_diagonal(q, k, v):
    keep = torch.ones(q.shape[2], k.shape[2]).tril(diagonal=int(k.shape[2] * 0.5)).bool()
    return (q @ k.mT / 4).masked_fill(~keep, -1e9).softmax(-1) @ v


def remainder_of_an_argument(q, k, v, n):
    return within(q, k, v, abs(n) % (q.shape[2] // 3 + 1) + round(q.shape[2] / 3))


def argument_of_either_sign(q, k, v, n):
    return within(q, k, v, n // 2 - n % 3)


def number_in_a_tensor(q, k, v, n):
    return within(q, k, v, n.item() * 2 + int(q.shape[2] * 0.25))


def operands(q_len: int, kv_len: int, *more: Any) -> tuple[Any, ...]:
    return (*(torch.randn(2, 3, length, 16) for length in (q_len, kv_len, kv_len)), *more)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize(
    "program, last",
    [
        *((f, RATIOS) for f in (ceil_of_a_ratio, floor_and_round, multiple_of_an_int, positions_moved)),
        *((f, ()) for f in (half_of_a_size, max_and_min, remainder_and_quotient, root_and_logarithm)),
        (offset_of_a_diagonal, ()),
        *((f, NUMBERS) for f in (remainder_of_an_argument, argument_of_either_sign)),
        (number_in_a_tensor, tuple(map(torch.tensor, NUMBERS))),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_called_again(program: Callable[..., Tensor], last: tuple[Any, ...]) -> None:
    first, *more = (operands(*lengths, *last[n : n + 1]) for n, lengths in enumerate(LENGTHS))
    outcome = assert_fused(program, *first, dynamic=True, more=more, backward=False)
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
