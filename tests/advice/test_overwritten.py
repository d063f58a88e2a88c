"""Variables that the program overwrites before the output: the code by hand does not read them for what they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_fuse.report import Code
from tests.advice.edited import analysed, edited
from tests.harness import _results, assert_as_good_as_eager
from tests.models.spelling import square

MADE_UP = " is a tensor "


def assigned_from_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = k.sum(-1)
    scores = q @ k.mT + scores.unsqueeze(-2)
    return scores.softmax(-1) @ v


def written_by_a_method(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = k.sum(-1)
    scores = q @ k.mT + bias.unsqueeze(-2)
    other = bias.mul_(0)
    return scores.softmax(-1) @ v, other


def written_by_a_function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = k.sum(-1)
    scores = q @ k.mT + bias.unsqueeze(-2)
    other = F.relu(bias, inplace=True)
    return scores.softmax(-1) @ v, other


def written_as_out(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = k.sum(-1)
    scores = q @ k.mT + bias.unsqueeze(-2)
    other = torch.add(bias, 1, out=bias)
    return scores.softmax(-1) @ v, other


def written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = k.sum(-1)
    part = bias[0]
    scores = q @ k.mT + bias.unsqueeze(-2)
    part.zero_()
    return scores.softmax(-1) @ v, bias


def written_by_another_name(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = k.sum(-1)
    scores = q @ k.mT + bias.unsqueeze(-2)
    alias = bias
    alias += 1
    return scores.softmax(-1) @ v, bias


def written_at_an_index(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = k.sum(-1)
    scores = q @ k.mT + bias.unsqueeze(-2)
    alias = bias
    alias[0] = 1
    return scores.softmax(-1) @ v, bias


def assigned_within_the_output(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bias = k.sum(-1)
    scores = q @ k.mT + bias.unsqueeze(-2)
    return (bias := bias + 1), scores.softmax(-1) @ v, bias


def assigned_by_a_loop(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    for q in (q + 1, q + 2):  # noqa: B020 what is tested
        v = v + q
    return scores.softmax(-1) @ v, q


def a_round_later(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = None
    while True:
        k = k + 1
        if scores is not None:
            return scores.softmax(-1) @ v, k
        scores = q @ k.mT


def assigned_on_the_line(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT; q = q + 1  # noqa: E702 # fmt: skip
    return scores.softmax(-1) @ v, q


STALE = (
    assigned_from_itself, written_by_a_method, written_by_a_function, written_as_out, written_through_a_view,
    written_by_another_name, written_at_an_index, assigned_within_the_output, assigned_by_a_loop, a_round_later,
    assigned_on_the_line,
)  # fmt: skip


def written_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 0.5
    q.mul_(0.5)
    scores = q @ k.mT
    return scores.softmax(-1) @ v


def written_after(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = k.sum(-1)
    scores = q @ k.mT + bias.unsqueeze(-2)
    out = scores.softmax(-1) @ v
    bias += 1
    return out, bias


def other_memory(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bias, other = k.sum(-1), v.sum(-1)
    scores = q @ k.mT + bias.unsqueeze(-2)
    other += 1
    return scores.softmax(-1) @ v, other


def the_scores_themselves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 0.25
    scores.masked_fill_(k.new_ones(scores.shape[-2:]).triu(1) > 0, float("-inf"))
    return scores.softmax(-1) @ v


def assigned_by_the_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    q = scores.softmax(-1) @ v
    return q * 2


def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for scale in (0.25,):
        q = q * scale
        scores = (
            q
            @ k.mT
        )  # fmt: skip
        q = q + scores.softmax(-1) @ v
    return q


FRESH = (written_before, written_after, other_memory, the_scores_themselves, assigned_by_the_output, layers)


def code_of(program: Callable[..., object]) -> Code:
    with torch.no_grad():
        (site,) = analysed(program, *square()(torch.float32))
    assert site.code is not None, site.no_code
    return site.code


@pytest.mark.parametrize("program", STALE, ids=lambda program: program.__name__)
def test_what_is_overwritten_is_left_to_a_person(program: Callable[..., object]) -> None:
    code = code_of(program)
    assert any(MADE_UP in note for note in code.notes), code.text


@pytest.mark.parametrize("program", FRESH, ids=lambda program: program.__name__)
def test_what_still_holds_its_value_is_read(program: Callable[..., object]) -> None:
    code, args = code_of(program), square()(torch.float32)
    assert not any(MADE_UP in note for note in code.notes), code.notes
    with edited([code], False):
        got = _results(program, program, args, False)
    assert_as_good_as_eager(got, program, args, False)


def test_a_made_up_name_is_none_of_pythons() -> None:
    def totals(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total = k.sum(-1)
        total = q @ k.mT + total.unsqueeze(-2)
        return total.softmax(-1) @ v

    def unnamed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT; scores = scores + k.sum(-1).unsqueeze(-2); k = k + 1  # noqa: E702 # fmt: skip
        return scores.softmax(-1) @ v

    assert any(f"total_2{MADE_UP}" in note for note in code_of(totals).notes)
    assert any(f"sum_2{MADE_UP}" in note for note in code_of(unnamed).notes)
