"""Operators that a graph has as methods, as Dynamo of torch 2.11 records them: `a.__eq__(b)` for `a == b`."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness import assert_fused, every_day, tensors

B, H, T, D = SHAPE = 2, 4, 12, 8
Program = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def seen_by_operators(ids: Tensor, i: Tensor) -> dict[str, Tensor]:
    """What is visible, by the names of the methods that say it in `seen_by_methods`."""
    same, row = ids[:, :, None] == ids[:, None, :], i[:, None]
    return {
        "eq": same,
        "ne": ~(ids[:, :, None] != ids[:, None, :]),
        "and le": same & (i <= row),
        "rand": (i <= row) & same,
        "or gt": same | (row > i),
        "ror": (row > i) | same,
        "xor lt": (row < i) ^ same,
        "rxor": same ^ (row < i),
        "ge": row >= i,
    }


def seen_by_methods(ids: Tensor, i: Tensor) -> dict[str, Tensor]:
    same, row = ids[:, :, None].__eq__(ids[:, None, :]), i[:, None]
    return {
        "eq": same,
        "ne": ids[:, :, None].__ne__(ids[:, None, :]).__invert__(),
        "and le": same.__and__(i.__le__(row)),
        "rand": i.__le__(row).__rand__(same),
        "or gt": same.__or__(row.__gt__(i)),
        "ror": row.__gt__(i).__ror__(same),
        "xor lt": row.__lt__(i).__xor__(same),
        "rxor": same.__rxor__(row.__lt__(i)),
        "ge": row.__ge__(i),
    }


@pytest.mark.parametrize(
    "name", every_day(["eq", "ne", "and le", "rand", "or gt", "ror", "xor lt", "rxor", "ge"], "ne", "rand", "xor lt")
)
def test_comparisons_by_their_methods(name: str) -> None:
    """Both give one attention, by one expression, on one kernel."""
    ids = torch.arange(T).div(5, rounding_mode="floor").expand(B, T).contiguous()

    def attended(seen: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> Program:
        def program(q, k, v, ids):
            mask = seen(ids, torch.arange(T))[name]
            mask = mask if mask.ndim == 2 else mask[:, None]
            return (q @ k.mT * D**-0.5).masked_fill(~mask, -math.inf).softmax(-1) @ v

        return program

    by_operators, by_methods = (
        assert_fused(attended(seen), *tensors(*SHAPE), ids) for seen in (seen_by_operators, seen_by_methods)
    )
    assert by_methods.site.attention == by_operators.site.attention
    assert by_methods.site.expression == by_operators.site.expression
    assert by_methods.site.kernel == by_operators.site.kernel
