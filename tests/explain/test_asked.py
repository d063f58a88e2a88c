"""What errors ask for: the numbers, names and choices of a message and of the comparison that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.explain.asked import LARGEST, Asked, asked_by

Program = Callable[[Any], Any]


def asked(program: Program, x: Any) -> Asked:
    with pytest.raises(Exception) as raised:
        program(x)
    return asked_by(raised.value)


class Wide:
    width = 16


def asserts_width(x: Tensor) -> None:
    assert x.shape[-1] == Wide.width, "wrong"


def asserts_both(x: Tensor) -> None:
    n, width = x.shape
    assert (
        n == 2  #
        and width == Wide.width
    )


def raises_for_width(x: Tensor) -> None:
    width = x.size(1)
    if width != Wide.width:
        raise ValueError(f"no width of {width}")


def raises_for_remainder(x: Tensor) -> None:
    if x.shape[1] % Wide.width:
        raise ValueError("no multiple")


def asserts_multiple(x: Tensor) -> None:
    assert x.shape[1] % Wide.width == 0


def asserts_at_most(x: Tensor) -> None:
    assert x.shape[1] <= Wide.width


def asserts_shape(x: Tensor) -> None:
    assert x.shape == (2, 16)


def asserts_length(x: Tensor) -> None:
    assert len(x[0]) == Wide.width


@pytest.mark.parametrize(
    "program",
    [
        asserts_width,
        asserts_both,
        raises_for_width,
        raises_for_remainder,
        asserts_multiple,
        asserts_at_most,
        asserts_shape,
        asserts_length,
        lambda x: x @ torch.zeros(16, 3),
        lambda x: x + torch.zeros(2, 16),
        lambda x: nn.LayerNorm(16)(x),
        lambda x: torch.cat([x, torch.zeros(1, 16)]),
        lambda x: x.view(2, 16),
        lambda x: nn.Linear(16, 3)(x),
    ],
)
def test_the_size_that_there_is_and_the_one_that_is_wanted(program: Program) -> None:
    found = asked(program, torch.zeros(2, 21))
    assert {16} <= {*found.numbers, *found.others_for(21)}
    assert 16 in found.others_for(21)


def knows_texts(way: str) -> None:
    if way not in ("mean", "max"):
        raise ValueError(f"{way} is no way")


def knows_a_text(way: str) -> None:
    assert way == "mean"


TABLE = {"gelu": 1, "silu": 2}


def looks_up(way: str) -> int:
    return TABLE[way]


@pytest.mark.parametrize(
    ("program", "value", "others"),
    [
        (knows_texts, "?", ("mean", "max")),
        (knows_a_text, "?", ("mean",)),
        (looks_up, "relu", ("gelu", "silu")),
    ],
)
def test_values_that_the_code_knows(program: Program, value: str, others: tuple[str, ...]) -> None:
    assert (value, others) in asked(program, value).choices


def misses_an_argument(x: Tensor, memory: Tensor | None = None, other: Tensor | None = None) -> Tensor:
    return x + memory.sum()  # type: ignore[union-attr]


def raises_in_vmap(x: Tensor) -> None:
    torch.vmap(speaks_of_one)(x)


def raises_in_grad(x: Tensor) -> None:
    torch.func.grad(speaks_of_one)(x)


@pytest.mark.parametrize("program", [raises_in_vmap, raises_in_grad])
def test_errors_within_transforms_of_functions(program: Program) -> None:
    assert "strength" in asked(program, torch.zeros(2, 3)).names


def speaks_of_one(x: Tensor) -> None:
    raise ValueError("the 'strength' was not given")


def test_names_of_the_failing_line_and_of_the_message() -> None:
    found = asked(misses_an_argument, torch.zeros(2))
    assert "memory" in found.names and "other" not in found.names
    assert "strength" in asked(speaks_of_one, None).names


class Counted:
    calls = 0

    def __call__(self, x: Tensor) -> int:
        Counted.calls += 1
        return x.shape[1]

    def max(self) -> int:
        Counted.calls += 1
        return 16


@pytest.mark.parametrize("program", [lambda x: exec("assert False") if Counted()(x) == 21 else None])
def test_calls_without_source_are_no_problem(program: Program) -> None:
    assert asked(program, torch.zeros(2, 21)).numbers == ()


def asserts_a_call(x: Tensor) -> None:
    assert Counted()(x) == 16


def asserts_a_method(x: Tensor) -> None:
    assert x.shape[1] == Counted().max()


@pytest.mark.parametrize("program", [asserts_a_call, asserts_a_method])
def test_no_code_of_the_model_is_called_again(program: Program) -> None:
    Counted.calls = 0
    asked(program, torch.zeros(2, 21))
    assert Counted.calls == 1


def test_an_error_is_told_in_one_line_and_by_its_place() -> None:
    one, other = asked(asserts_width, torch.zeros(2, 21)), asked(asserts_at_most, torch.zeros(2, 21))
    assert one.words.startswith("AssertionError: wrong (test_asked.py:") and "\n" not in one.words
    assert one.kind != other.kind and one.kind.startswith("AssertionError ")


@pytest.mark.parametrize("message", ["", "it does not work", "division by zero", "1.5 of version 2.13.0"])
def test_an_error_of_no_sizes_has_no_numbers(message: str) -> None:
    assert asked_by(RuntimeError(message)).numbers == ()


def test_a_message_of_many_numbers_is_cut_short() -> None:
    assert len(asked_by(RuntimeError(" ".join(map(str, range(1, 1000))))).numbers) < 20


def with_numbers(*numbers: int) -> Asked:
    return Asked("", "", numbers, frozenset(), ())


SIZES = (3, 8, 64, 100, 512)


class TestEquations:
    """A size, what was computed of it, and what that was to be: the size with which it is so is among the others."""

    @pytest.mark.parametrize("times", [1, 2, 3, 7, 64])
    def test_several_times_it(self, times: int) -> None:
        for size in SIZES:
            for wanted in SIZES:
                if wanted != size:
                    assert wanted in with_numbers(times * size, times * wanted).others_for(size)

    @pytest.mark.parametrize("part", [2, 4, 8])
    def test_a_part_of_it(self, part: int) -> None:
        for size, wanted in ((64, 16), (16, 64), (512, 8)):
            assert wanted in with_numbers(size // part, wanted // part).others_for(size)

    @pytest.mark.parametrize("more", [0, 1, 2])
    @pytest.mark.parametrize("patch", [8, 14, 16])
    def test_the_patches_of_a_picture_and_tokens_beside_them(self, patch: int, more: int) -> None:
        for has in (4, 7):
            for wants in (2, 8, 14):
                numbers = with_numbers(has**2 + more, wants**2 + more)
                assert wants * patch in numbers.others_for(has * patch)

    @pytest.mark.parametrize("more", [-2, -1, 1, 2, 4])
    def test_a_constant_more(self, more: int) -> None:
        for size, wanted in ((64, 128), (10, 7), (100, 512)):
            assert wanted in with_numbers(size + more, wanted + more).others_for(size)

    def test_each_once_and_within_limits(self) -> None:
        others = [*with_numbers(8, 16, 0, LARGEST * 4, 24, 1).others_for(8)]
        assert len(others) == len({*others}) and 8 not in others and all(0 < other <= LARGEST for other in others)

    def test_the_likeliest_comes_first(self) -> None:
        assert next(with_numbers(21, 16).others_for(21)) == 16
        assert next(with_numbers(42, 32).others_for(21)) == 16

    def test_without_numbers_there_is_none(self) -> None:
        assert [*with_numbers().others_for(8)] == []
