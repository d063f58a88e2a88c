"""A softmax written out with a number beside its sum that is known only when the program runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness import assert_refused, check, tensors

pytestmark = pytest.mark.thorough

B, H, T, D = 2, 4, 12, 8
SHAPE = (B, H, T, D)
Program = Callable[..., Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(D)


def less_the_maximum_plus(q, k, v, eps):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / (e.sum(-1, keepdim=True) + eps) @ v


def sum_plus(q, k, v, eps):
    e = scores(q, k).exp()
    return e / (e.sum(-1, keepdim=True) + eps) @ v


def sum_kept_above(q, k, v, eps):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True).clamp(min=eps) @ v


def masked_and_sum_plus(q, k, v, eps):
    p = scores(q, k).softmax(-1) * torch.ones(T, T).tril()
    return p / (p.sum(-1, keepdim=True) + eps) @ v


@pytest.mark.parametrize(
    "program, fused",
    [
        (less_the_maximum_plus, {1e-8: True, 3e-9: True, 0.5: False, -0.2: False, 0.0: False}),
        (sum_plus, {1e-8: True, 0.5: True, 3.0: True, -0.2: False, 0.0: False}),
        (sum_kept_above, {1e-8: True, 0.5: True, -0.2: True, 1.0: True, 20.0: False}),
        (masked_and_sum_plus, {1e-8: False, 0.5: False}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_number_known_when_the_program_runs_beside_the_sum(program: Program, fused: dict[float, bool]) -> None:
    """Small numbers share a compilation; a guard sends the others to one of their own."""
    values = [tensors(*SHAPE) for _ in fused]
    for eps, is_fused in fused.items():
        torch._dynamo.reset()
        outcome = check(program, *tensors(*SHAPE), eps, dynamic=True)
        assert outcome.site.fused is is_fused, str(outcome)
        if not is_fused:
            assert "an argument" in outcome.site.blocker.reason
    torch._dynamo.reset()
    first, *more = ((*given, eps) for given, eps in zip(values, fused, strict=True))
    outcome = check(program, *first, dynamic=True, more=more)
    same = [eps for eps, is_fused in fused.items() if is_fused]
    assert len(outcome.graphs) <= 1 + len(fused) - len(same)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_read_from_a_tensor_beside_the_sum() -> None:
    def program(q, k, v, eps):
        return less_the_maximum_plus(q, k, v, eps.item())

    given = (*tensors(*SHAPE), torch.tensor(1e-8))
    assert_refused(program, *given, reason="an argument is added to the sum", backward=False)
