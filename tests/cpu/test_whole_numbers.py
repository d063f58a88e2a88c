"""Masks and slices placed by integers and by arithmetic on lengths, called again where a first call proves nothing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_fuse.report import collecting

Program = Callable[[Tensor, Tensor, Tensor, int], Tensor]
LENGTHS = ((32, 32), (24, 48), (48, 24))
INTEGERS = (3, 5, -4, 0, -60, sys.maxsize)


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2])


def attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, fill: float) -> Tensor:
    return (query @ key.mT * 0.25).masked_fill(hidden, fill).softmax(-1) @ value


def first_hidden(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    return attend(query, key, value, places(key) + n < 0, -1e9)


def causal_with_offset(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    return attend(query, key, value, places(key) > places(query)[:, None] + n, -1e9)


def last_hidden_by_a_slice(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    hidden = torch.zeros(query.shape[-2], key.shape[-2], dtype=torch.bool)
    hidden[:, n:] = True
    return attend(query, key, value, hidden, -1e9)


def centred_view(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    return attend(query, key, value, places(key) + (40 - key.shape[-2]) // 2 < 0, -1e9)


def half_the_difference(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    return attend(query, key, value, places(key) + (key.shape[-2] - query.shape[-2]) // 2 < 0, -1e9)


def window(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    return attend(query, key, value, (places(query)[:, None] - places(key)).abs() >= n, -1e9)


def triangle(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    return attend(query, key, value, torch.ones(query.shape[-2], key.shape[-2]).tril(n) == 0, -1e9)


def at_least_three(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    return attend(query, key, value, places(key) >= max(n, 3), -1e9)


def not_negative(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    # max(n, 0) by a choice: it is n for no negative n.
    return attend(query, key, value, places(key) >= torch.where(torch.tensor(n) >= 1, n, 0), -1e9)


def from_the_difference(query: Tensor, key: Tensor, value: Tensor, n: int) -> Tensor:
    start = key.shape[-2] - query.shape[-2]
    return (query @ key[..., start:, :].mT * 0.25).softmax(-1) @ value[..., start:, :]


PROGRAMS = (
    first_hidden, causal_with_offset, last_hidden_by_a_slice, centred_view, half_the_difference, window, triangle,
    at_least_three, not_negative, from_the_difference,
)  # fmt: skip


@pytest.mark.parametrize("kernels", [["cpu_flash"], pytest.param(["chunked"], marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_called_again(program: Program, kernels: list[str]) -> None:
    options = {"inner_backend": "eager", "pick": "fused", "kernels": kernels}
    compiled, fused = torch.compile(program, backend="attn_fuse", options=options, dynamic=True), 0
    for (q_len, kv_len), n in itertools.product(LENGTHS, INTEGERS):
        query, key, value = (torch.randn(1, 2, length, 16) for length in (q_len, kv_len, kv_len))
        expected = program(query, key, value, n)
        with collecting() as reports:
            torch.testing.assert_close(compiled(query, key, value, n), expected, msg=lambda m: f"{n=} {kv_len=} {m}")  # noqa: B023
        fused += sum(site.status == "fused" for report in reports for site in report.sites)
    assert fused or program in (from_the_difference, not_negative)


def test_integers_near_the_end_of_int64_stay_as_written() -> None:
    compiled = torch.compile(
        window, backend="attn_fuse", options={"inner_backend": "eager", "pick": "fused"}, dynamic=True
    )
    tensors = [torch.randn(1, 2, 32, 16) for _ in range(3)]
    statuses = []
    for n in (5, 2**39, 2**41):
        with collecting() as reports:
            torch.testing.assert_close(compiled(*tensors, n), window(*tensors, n))
        statuses.append([site.blocker and site.blocker.reason for report in reports for site in report.sites])
    # The second call is the first one's compilation; the third is beyond what that is guarded for.
    assert statuses == [[None], [], [f"an integer beyond {2**40} in a position"]]
