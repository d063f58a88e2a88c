"""Biases and factors read from memory: learned tables, numbers of each key, and narrow whole numbers that wrap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness import check, every_day, tensors

S = 7
APART = torch.arange(S) - torch.arange(S)[:, None]

# The scores, of themselves and a row of numbers.
ROWS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "looked up from the end": (lambda s, table: s + table[APART], torch.arange(2.0 * S - 1).sin()),
    "looked up from the end, then capped": (
        lambda s, table: torch.tanh(s + table[APART]),
        torch.arange(2.0 * S - 1).sin(),
    ),
    **{
        f"products of {row.dtype}": (
            lambda s, x: torch.tanh(s * (x[:, None].to(s.dtype) * x[None, :].to(s.dtype)) * 1e-3),
            row,
        )
        for row in (torch.arange(S, dtype=torch.int8) * 17, torch.arange(S, dtype=torch.uint8) * 40)
    },
    "differences": (
        lambda s, x: torch.tanh(s - 0.01 * (x[:, None].to(s.dtype) - x[None, :].to(s.dtype))),
        torch.arange(S, dtype=torch.uint8) * 40,
    ),
    "products that wrap": (
        lambda s, x: torch.tanh(s * (x[:, None] * x[None, :]) * 0.1),
        torch.arange(S, dtype=torch.int8) * 17,
    ),
    "learned temperature": (lambda s, row: s * row.mean().exp().clamp(max=100), torch.arange(float(S)).sin()),
}


@pytest.mark.parametrize("backward", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("kernels", [["cpu_flash"], ["chunked"]], ids=lambda names: names[0])
@pytest.mark.parametrize("name", every_day(ROWS, "looked up from the end, then capped", "products that wrap"))
def test_numbers_of_each_key(name: str, kernels: list[str], backward: bool) -> None:
    of, row = ROWS[name]

    def program(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
        return of(q @ k.mT / 4, row).softmax(-1) @ v

    check(program, *tensors(2, 3, S, 16), row, kernels=kernels, backward=backward)
