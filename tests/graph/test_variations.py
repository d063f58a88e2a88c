"""The arguments that dynamic programs are called again with: of the same kind, and unlike the first ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness import assert_fused, call_again, check, tensors
from tests.variations import resized, variations


def lists(*args: object, runs=lambda values: True) -> dict[str, tuple]:
    return dict(variations(args, runs))


def test_numbers_of_both_signs_and_beyond_each_length() -> None:
    values = {made[1] for made in lists(torch.randn(2, 7), 3).values()}
    assert {-3, 0, 1, -1, 7} <= values and max(values) > 7 and min(values) < -7


def test_numbers_read_from_tensors() -> None:
    values = {made[0].item() for made in lists(torch.tensor(3)).values()}
    assert {-3, 0, 1} <= values


def test_flags_and_ids_are_no_numbers() -> None:
    assert not lists(True)
    assert all(
        torch.equal(made[0][:5], torch.arange(5)) for made in lists(torch.arange(5)).values() if len(made[0]) > 5
    )


def test_lengths_shorter_longer_and_swapped() -> None:
    made = lists(*tensors(2, 3, 5, 8, count=1), *tensors(2, 3, 9, 8, count=2))
    shapes = {tuple(x.shape[2] for x in args) for args in made.values()}
    assert {(5, 9, 9), (13, 9, 9), (2, 9, 9), (5, 21, 21), (5, 4, 4), (9, 5, 5), (1, 9, 9)} <= shapes


def test_lengths_equal_by_chance() -> None:
    shapes = {tuple(x.shape[2] for x in args) for args in lists(*tensors(2, 3, 7, 8)).values()}
    assert {(17, 17, 17), (7, 17, 17), (17, 7, 7)} <= shapes


def test_what_does_not_run_is_left_out() -> None:
    made = lists(*tensors(2, 5, 8), runs=lambda args: args[0].shape[2] == args[1].shape[2] == 8)
    assert made and all(x.shape[2] == 8 for args in made.values() for x in args)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 5, 3, 4).transpose(1, 2),
        torch.randn(2, 1, 1, 4).expand(2, 3, 5, 4),
        torch.rand(2, 3, 5, 4) > 0.5,
        torch.randint(0, 9, (2, 3, 5, 4)),
    ],
)
def test_the_same_kind_of_values_and_layout(x: Tensor) -> None:
    y = resized(x, {2: 11})
    assert y.shape == (2, 3, 11, 4) and y.dtype == x.dtype
    assert (y.stride(2) == 0) == (x.stride(2) == 0)
    assert sorted(range(4), key=y.stride) == sorted(range(4), key=x.stride)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def test_the_code_that_there_is_runs_again() -> None:
    outcome = assert_fused(attention, *tensors(2, 3, 5, 8), dynamic=True)
    assert outcome.again["reused"] >= 4, outcome.again


def test_static_programs_are_not_called_again() -> None:
    assert not assert_fused(attention, *tensors(2, 3, 5, 8), dynamic=False).again


def test_a_wrong_answer_at_other_numbers_is_found() -> None:
    def wrong(q: Tensor, n: int) -> Tensor:
        return q * n if n >= 0 else q

    with pytest.raises(AssertionError, match="called again with numbers sign changed"):
        call_again(wrong, lambda q, n: q * n, variations((torch.randn(2, 3), 4), lambda args: True), backward=False)


def test_compiled_again_only_as_often_as_allowed() -> None:
    def program(q: Tensor, n: int) -> Tensor:
        return q * 2 if n == 0 else q * 3 if n == 1 else q * 5 if n == 2 else q * 7

    calls = [(str(n), (torch.randn(2, 3), n)) for n in (0, 1, 2, 3)]
    counts = check(program, torch.randn(2, 3), 5, dynamic=True, again=calls).again
    assert counts["compiled again"] == 1 and counts["not run: compiles again"] == 2, counts
