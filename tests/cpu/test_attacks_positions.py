"""Masks by positions and numbers that were computed wrong, and their neighbours, as test_attacks.py has others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness import assert_right as right
from tests.harness import tensors

pytestmark = pytest.mark.thorough

PICKS = ("fused", "fastest")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("divisor", [7, 41])
@pytest.mark.parametrize(
    "group",
    [
        lambda p, n: torch.floor(p / n),
        lambda p, n: p // n,
        lambda p, n: (p / n) % 1,
        lambda p, n: torch.frac(p / n),
        lambda p, n: torch.trunc(p / n),
        lambda p, n: (p / n).to(torch.int64),
        lambda p, n: torch.div(p, n, rounding_mode="floor"),
        lambda p, n: torch.ceil(p * (1 / n)),
        lambda p, n: torch.remainder(p, n) / n * n,
        lambda p, n: torch.round(p / n - 0.5),
    ],
)
def test_positions_that_are_divided(group, divisor, dtype) -> None:
    def program(q, k, v):
        block = group(torch.arange(124).to(dtype), divisor)
        return (q @ k.mT * 0.3).masked_fill(block[:, None] != block, -torch.inf).softmax(-1) @ v

    right(program, *tensors(1, 2, 124, 8), backward=False)


@pytest.mark.parametrize("first", [3, 4, 5])
@pytest.mark.parametrize(
    "seen",
    [
        lambda i, j: (i // 2) == (j // 2),
        lambda i, j: (i // 2) >= (j // 2),
        lambda i, j: (i - j).abs() < 2,
        lambda i, j: (i % 2) == (j % 2),
        lambda i, j: j < 2,
        lambda i, j: (i * j) % 3 != 1,
        lambda i, j: j <= i + 1,
    ],
)
def test_a_mask_by_position_of_any_length(seen, first) -> None:
    """What holds for the lengths of the first call, or the least there are, need not hold for others."""

    def program(q, k, v):
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        return (q @ k.mT).masked_fill(~seen(i, j), -torch.inf).softmax(-1) @ v

    more = [tensors(1, 2, size, 4) for size in (first + 2, 9)]
    right(program, *tensors(1, 2, first, 4), dynamic=True, backward=False, more=more)


@pytest.mark.parametrize("picks", PICKS)
@pytest.mark.parametrize("size", [255, 256, 300])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_an_identity_in_the_mask(size, dtype, picks) -> None:
    def program(q, k, v, keep):
        s = (q @ k.mT * 0.3).masked_fill(torch.eye(size, dtype=dtype).bool(), torch.finfo(q.dtype).min)
        return s.masked_fill(~(keep | torch.eye(size, dtype=torch.bool)), -torch.inf).softmax(-1) @ v

    right(program, *tensors(1, 2, size, 8), torch.rand(size, size) > 0.5, backward=False, picks=(picks,))


def _ids(dtype: torch.dtype, size: int = 300) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(max(limits.min, -(2**31)), min(limits.max, 2**31 - 1), (1, size)).to(dtype)


NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    "hide",
    [
        lambda s, a, b: s == -1,
        lambda s, a, b: (a - b).abs() > 1,
        lambda s, a, b: s * 100 > 50,
        lambda s, a, b: -s > 5,
        lambda s, a, b: a + b <= 0,
        lambda s, a, b: a * b > 0,
        lambda s, a, b: (s << 3) > 3,
        lambda s, a, b: (s ^ -1) > 5,
        lambda s, a, b: s.abs() < 0,
        lambda s, a, b: s // 3 * 3 != s,
        lambda s, a, b: s % 3 == 1,
        lambda s, a, b: s + 200 > 100,
        lambda s, a, b: ~s > 7,
        lambda s, a, b: s**2 > 9,
        lambda s, a, b: (a - b).float() > 0.5,
    ],
)
def test_narrow_integers_wrap_around(hide, dtype) -> None:
    def program(q, k, v, ids):
        s, a, b = ids[:, None, None, :], ids[:, None, :, None], ids[:, None, None, :]
        return (q @ k.mT * 0.3).masked_fill(hide(s, a, b), -1e9).softmax(-1) @ v

    right(program, *tensors(1, 2, 300, 8), _ids(dtype), backward=False)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("reach", [5, 100])
def test_positions_in_narrow_integers(dtype, reach) -> None:
    def program(q, k, v):
        p = torch.arange(300).to(dtype)
        return (q @ k.mT * 0.3).masked_fill((p[:, None] - p) >= reach, -1e9).softmax(-1) @ v

    right(program, *tensors(1, 2, 300, 8), backward=False)


@pytest.mark.parametrize("dtype", [*NARROW, torch.bool])
def test_numbers_cast_to_narrow_integers(dtype) -> None:
    def program(q, k, v):
        hidden = (torch.ones(30, 30, dtype=torch.int64).tril() * 256).to(dtype) == 0
        hidden = hidden | ((torch.arange(30) * 77).to(dtype).long() > 40)
        return (q @ k.mT * 0.3).masked_fill(hidden, -1e9).softmax(-1) @ v

    right(program, *tensors(1, 2, 30, 8), backward=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("step", [2**4, 2**7, 2**20, 2**50])
def test_positions_beyond_the_exact_numbers(dtype, step) -> None:
    def program(q, k, v):
        p, s = (torch.arange(300) * step + 1).to(dtype), (torch.arange(300) * step).to(dtype)
        return (q @ k.mT * 0.3).masked_fill(p[:, None] < s + 1, -1e9).softmax(-1) @ v

    right(program, *tensors(1, 2, 300, 8), backward=False)


def test_whole_numbers_that_wrap_around_as_they_grow() -> None:
    def program(q, k, v):
        p = torch.arange(300, dtype=torch.int32) * 2**27
        return (q @ k.mT * 0.3).masked_fill(p[:, None] < p, -1e9).softmax(-1) @ v

    right(program, *tensors(1, 2, 300, 8), backward=False)
