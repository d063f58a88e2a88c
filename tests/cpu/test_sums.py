"""A softmax written out with a number beside its sum: small, or known only when the program runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness import assert_fused, assert_refused, check, every_day, tensors

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


@pytest.mark.thorough
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


@pytest.mark.thorough
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_read_from_a_tensor_beside_the_sum() -> None:
    def program(q, k, v, eps):
        return less_the_maximum_plus(q, k, v, eps.item())

    given = (*tensors(*SHAPE), torch.tensor(1e-8))
    assert_refused(program, *given, reason="an argument is added to the sum", backward=False)


@pytest.mark.parametrize("dtype", every_day([torch.float32, torch.float64], torch.float32), ids=str)
@pytest.mark.parametrize("epsilon", [1e-20, 1e-7, 1e-5])
def test_a_small_number_in_the_sum(epsilon: float, dtype: torch.dtype) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * 0.3
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / (weights.sum(-1, keepdim=True) + epsilon) @ value

    operands = tensors(2, 3, 13, 8, dtype=dtype)
    if epsilon <= torch.finfo(dtype).eps:
        assert_fused(program, *operands)
    else:
        assert_refused(program, *operands, reason="is added to the sum of the weights")


# Of the scores, their max and a number of each key: a sink that each key has for itself is none.
SINKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of each key": lambda s, logits: (lambda e: e / (e.sum(-1, keepdim=True) + logits.exp()))(s.exp()),
    "of each key, shifted": lambda s, logits: (lambda e, top: e / (e.sum(-1, keepdim=True) + (logits - top).exp()))(
        (s - s.amax(-1, keepdim=True)).exp(), s.amax(-1, keepdim=True)
    ),
}


@pytest.mark.parametrize("kernels", [["cpu_flash"], ["chunked"]], ids=lambda names: names[0])
@pytest.mark.parametrize("name", SINKS)
def test_a_sink_of_each_key(name: str, kernels: list[str]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
        return SINKS[name](scores(q, k), logits) @ v

    check(program, *tensors(*SHAPE), torch.arange(float(T)).sin(), kernels=kernels)
