"""Masks moved by numbers of both signs: right at each call, though the first call shows one sign only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness import check, tensors

# What is seen, of i and j, the positions of queries and keys, their lengths N and M, and a number n.
Seen = Callable[[Tensor, Tensor, int, int, int], Tensor]


def columns_from(N: int, M: int, n: int) -> Tensor:
    seen = torch.ones(N, M, dtype=torch.bool)
    seen[:, n:] = False
    return seen


def numbers_from(N: int, M: int, n: int) -> Tensor:
    seen = torch.arange(M).repeat(N, 1)
    seen[:, min(n, M) :] = -1
    return seen >= 0


SEEN: dict[str, Seen] = {
    "first keys hidden": lambda i, j, N, M, n: j + n >= 0,
    "causal with an offset": lambda i, j, N, M, n: j <= i + n,
    "later rows and keys": lambda i, j, N, M, n: (i >= -n) & (j >= -n),
    "rows from a half": lambda i, j, N, M, n: (i >= -(n // 2)) | (j == 0),
    "a view in the middle": lambda i, j, N, M, n: j + (16 - M) // 2 >= 0,
    "half of a difference": lambda i, j, N, M, n: j + (M - N) // 2 >= 0,
    "columns from a number": lambda i, j, N, M, n: columns_from(N, M, n),
    "columns from a difference": lambda i, j, N, M, n: columns_from(N, M, 2 * n - M),
    "numbers from a number": lambda i, j, N, M, n: numbers_from(N, M, n),
}


@pytest.mark.parametrize("fill", [-torch.inf, -1e9])
@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
def test_numbers_of_both_signs(seen: Seen, fill: float) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        N, M = q.shape[-2], k.shape[-2]
        i, j = torch.arange(N)[:, None], torch.arange(M)[None]
        return (q @ k.mT).masked_fill(~seen(i, j, N, M, n), fill).softmax(-1) @ v

    q = tensors(2, 3, 9, 8, count=1)
    outcome = check(program, *q, *tensors(2, 3, 13, 8, count=2), 5, dynamic=True)
    assert outcome.again["reused"] >= 3, outcome.again
