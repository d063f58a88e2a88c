"""Dynamic programs are called again with other arguments, and a wrong answer there is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness import assert_fused, call_again, check, tensors
from tests.variations import variations


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def test_the_code_that_there_is_runs_again() -> None:
    outcome = assert_fused(attention, *tensors(2, 3, 5, 8), dynamic=True)
    assert outcome.again["reused"] >= 4, outcome.again


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
