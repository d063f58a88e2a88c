"""The search from what failed to what works: its order, its turns and its ends."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from attn_fuse.explain.asked import Asked
from attn_fuse.explain.search import Calls, Failed, searched
from attn_fuse.explain.steps import TimeUp, now


def failed(tried: int, reached: int, kind: str = "") -> Failed[int]:
    return Failed(tried, Asked("", kind or str(tried), (), frozenset(), ()), reached)


class Numbers:
    """A search for `wanted` among whole numbers; `reach` says how far each comes. tried: in order."""

    def __init__(self, wanted: int, reach: Callable[[int], int] = lambda n: n) -> None:
        self.wanted, self.reach = wanted, reach
        self.tried: list[int] = []

    def __call__(self, number: int) -> str | Failed[int]:
        self.tried.append(number)
        return "found" if number == self.wanted else failed(number, self.reach(number))

    def search(
        self,
        starts: list[int],
        changes: Callable[[Failed[int]], Iterator[int]],
        seconds: float = 60.0,
        most: int = 1000,
    ) -> tuple[str | None, list[Failed[int]]]:
        return searched(starts, self, changes, now() + seconds, most)


def test_the_first_start_that_works() -> None:
    numbers = Numbers(5)
    assert numbers.search([3, 5, 7], lambda one: iter(()))[0] == "found" and numbers.tried == [3, 5]


def test_all_starts_come_before_changes() -> None:
    numbers = Numbers(5)
    numbers.search([3, 9, 5], lambda one: iter([4]))
    assert numbers.tried == [3, 9, 5]


def test_step_by_step() -> None:
    numbers = Numbers(40)
    ran, _ = numbers.search([0], lambda one: iter([one.tried + 1]))
    assert ran == "found" and numbers.tried == [*range(41)]


def test_what_came_furthest_is_changed_first() -> None:
    numbers = Numbers(-1)
    numbers.search([1, 30, 20], lambda one: iter([one.tried + 100] if one.tried < 100 else []))
    assert numbers.tried == [1, 30, 20, 130, 120, 101]


def test_what_comes_further_takes_over_at_once() -> None:
    numbers = Numbers(-1)
    numbers.search([0], lambda one: iter([1, 2, 3] if one.tried == 0 else [10] if one.tried == 1 else []))
    assert numbers.tried[:3] == [0, 1, 10]


def test_endless_changes_of_one_leave_the_others_their_turn() -> None:
    numbers = Numbers(999, lambda n: 7)
    endless = itertools.count(1000)
    ran, _ = numbers.search([1, 2], lambda one: endless if one.tried == 1 else iter([999]))
    assert ran == "found" and len(numbers.tried) < 100


def test_the_failed_are_given_furthest_first() -> None:
    ran, found = Numbers(-1).search([3, 30, 20], lambda one: iter(()))
    assert ran is None and [one.tried for one in found] == [30, 20, 3]


def test_nothing_is_tried_twice() -> None:
    numbers = Numbers(-1)
    numbers.search([1, 1, 2], lambda one: iter([1, 2, 3, 3]))
    assert sorted(numbers.tried) == [1, 2, 3]


def test_alike_by_their_key_are_one() -> None:
    numbers = Numbers(-1)
    searched([1, 11, 21, 2], numbers, lambda one: iter(()), now() + 60, 10, lambda n: str(n % 10))
    assert numbers.tried == [1, 2]


def test_the_same_error_at_one_place_leads_on_once() -> None:
    asked_for: list[int] = []

    def attempt(number: int) -> str | Failed[int]:
        return failed(number, 5, "the same")

    def changes(one: Failed[int]) -> Iterator[int]:
        asked_for.append(one.tried)
        yield from range(10, 14)

    searched([1, 2, 3], attempt, changes, now() + 60, 100)
    assert asked_for == [1]


@pytest.mark.parametrize("most", [0, 1, 7])
def test_it_stops_at_its_number_of_tries(most: int) -> None:
    numbers = Numbers(-1)
    ran, _ = numbers.search([0], lambda one: itertools.count(one.tried + 1), most=most)
    assert ran is None and len(numbers.tried) == 1 + most


@pytest.mark.parametrize("starts", [itertools.count(), [0]])
def test_it_stops_at_its_time(starts: Iterator[int]) -> None:
    def attempt(number: int) -> str | Failed[int]:
        time.sleep(0.01)
        return failed(number, number)

    start = now()
    ran, _ = searched(starts, attempt, lambda one: itertools.count(one.tried + 1), start + 0.3, 10**9)
    assert ran is None and now() - start < 3


@pytest.mark.parametrize("before", [0, 1])
def test_a_callers_limit_ends_it_with_what_failed_before(before: int) -> None:
    def attempt(number: int) -> str | Failed[int]:
        if number < before:
            return failed(number, number)
        raise TimeUp

    ended = contextlib.nullcontext() if before else pytest.raises(TimeUp)
    with ended:
        ran, tried = searched([0, 1], attempt, lambda one: iter(()), now() + 60, 10)
        assert ran is None and [one.tried for one in tried] == [0]


class TestCalls:
    def test_the_calls_of_torchs_functions_are_counted(self) -> None:
        with Calls() as none:
            sum(range(3))
        with Calls() as calls:
            torch.zeros(3).add(1).relu()
        assert none.count == 0 and calls.count >= 2 and not calls.attends

    @pytest.mark.parametrize(
        "attends",
        [
            lambda x: x.softmax(-1),
            lambda x: torch.softmax(x, -1),
            lambda x: nn.Softmax(-1)(x),
            lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
            lambda x: nn.MultiheadAttention(8, 2)(x, x, x),
            lambda x: nn.TransformerEncoderLayer(8, 2)(x),
        ],
    )
    def test_what_an_attention_calls(self, attends: Callable[[torch.Tensor], object]) -> None:
        with Calls() as calls:
            attends(torch.randn(2, 4, 8))
        assert calls.attends
