"""Functions under `allow_in_graph`: a traceable one is looked into, one that makes its own gradients is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import assert_fused, check, tensors
from tests.own_functions import doubled


def allowed(function: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return function(q @ k.mT * 0.25).softmax(-1) @ v


class SevenTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 7


@torch._dynamo.allow_in_graph
def shifted(scores: Tensor) -> Tensor:
    return scores - scores.amax(-1, keepdim=True).detach()


@torch._dynamo.allow_in_graph
def filled(scores: Tensor) -> Tensor:
    return torch.where(scores > 5, torch.tensor(-1e9), scores)


@torch._dynamo.allow_in_graph
def whole(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    return F.softmax(torch.where(keep[:, None, None, :], scores, -1e9), -1) @ v


@torch._dynamo.allow_in_graph
def seven_times(scores: Tensor) -> Tensor:
    return SevenTimes.apply(scores)  # type: ignore[no-any-return]


@torch._dynamo.allow_in_graph
def half_without_gradient(scores: Tensor) -> Tensor:
    with torch.no_grad():
        half = scores * 0.5
    return scores + half


@torch._dynamo.allow_in_graph
def with_a_hook(scores: Tensor) -> Tensor:
    scores = scores * 1
    if scores.requires_grad:
        scores.register_hook(lambda grad: grad * 3)
    return scores


@torch._dynamo.allow_in_graph
def written_and_seven_times(scores: Tensor) -> Tensor:
    return SevenTimes.apply(scores.mul_(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [doubled, shifted, filled], ids=lambda f: f.__name__)
@pytest.mark.parametrize("gradient", [True, False])
def test_it_is_looked_into(function: Callable[[Tensor], Tensor], gradient: bool) -> None:
    with torch.set_grad_enabled(gradient):
        assert_fused(lambda q, k, v: allowed(function, q, k, v), *tensors(2, 3, 9, 16), backward=gradient)


def test_a_whole_attention_in_one_function() -> None:
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    outcome = assert_fused(lambda q, k, v: whole(q, k, v, keep), *tensors(2, 3, 9, 16))
    assert outcome.site.attention["mask"] == "key padding"


def test_it_is_looked_into_under_autocast() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return allowed(shifted, q, k, v)

    assert_fused(program, *tensors(2, 3, 9, 16))


@pytest.mark.parametrize(
    "function", [seven_times, half_without_gradient, with_a_hook, written_and_seven_times], ids=lambda f: f.__name__
)
def test_one_that_makes_its_own_gradient_stays(function: Callable[[Tensor], Tensor]) -> None:
    outcome = check(lambda q, k, v: allowed(function, q, k, v), *tensors(2, 3, 9, 16), check=False)
    assert outcome.site.blocker is not None and function.__name__ in outcome.site.blocker.reason


def test_without_gradients_an_autograd_function_is_its_forward() -> None:
    with torch.no_grad():
        assert_fused(lambda q, k, v: allowed(seven_times, q, k, v), *tensors(2, 3, 9, 16), backward=False)


def test_one_that_writes_its_argument_stays_in_training() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        written_and_seven_times(scores)
        return scores.softmax(-1) @ v

    (site,) = check(program, *tensors(2, 3, 9, 16), check=False).sites
    assert site.blocker is not None and "may write it, and define its own gradient" in site.blocker.reason
