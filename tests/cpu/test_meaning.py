"""What operations mean, in whole programs: dtypes that wrap or round, slices that clamp, sums and fills at their edges.

Each defect that was found stands among its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness import assert_fused, assert_refused, check, tensors

N = 13
HIDDEN = torch.ones(N, N).triu(1).bool()


def attention(query: Tensor, key: Tensor, value: Tensor, hide: Tensor, fill: float = -math.inf) -> Tensor:
    return (query @ key.mT * 0.3).masked_fill(hide, fill).softmax(-1) @ value


@pytest.mark.parametrize("window", [5, N, N + 1, 64])
@pytest.mark.parametrize("where", ["cache", "mask", "front"])
def test_a_slice_beyond_the_front(window: int, where: str) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if where == "cache":
            key, value = key[:, :, -window:], value[:, :, -window:]
            return (query @ key.mT * 0.3).softmax(-1) @ value
        keep = torch.ones(N, 70).tril().bool()[:, -64 - N : N] if where == "front" else torch.ones(N, N).tril().bool()
        keep = keep[-window:, -window:]
        return attention(query[:, :, -window:], key[:, :, -window:], value[:, :, -window:], ~keep)

    assert_fused(program, *tensors(2, 3, N, 8))


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "blocks by a floor": lambda p: apart(torch.floor(p / 41)),
    "blocks by whole numbers": lambda p: apart(p // 41),
    "blocks by a cast": lambda p: apart((p / 41).long()),
    "thirds": lambda p: apart((p / 3) % 1),
    "sevenths": lambda p: torch.frac(p / 7)[:, None] < torch.frac(p / 7),
    "tenths": lambda p: (p * 0.1)[:, None] < (p * 0.1).round(),
    "double": lambda p: (p.double() / 41 * 41).long()[:, None] < p,
    "half": lambda p: (p.half() * 0.1)[:, None] < (p * 0.1),
    "bfloat16 positions": lambda p: p.bfloat16()[:, None] < p.bfloat16(),
    "bytes": lambda p: p.to(torch.uint8)[:, None] - p.to(torch.uint8) >= 100,
    "a byte of a triangle": lambda p: (torch.ones(N, N, dtype=torch.int64).tril() * 256).to(torch.uint8) != 0,
    "far out": lambda p: (p.int() * 2**27)[:, None] < p.int() * 2**20,
    "beyond 2**24": lambda p: (p * 2**20 + 1).float()[:, None] < (p * 2**20).float(),
}


def apart(p: Tensor) -> Tensor:
    return p[:, None] != p


@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.float32) for name in MASKS]
    + [(name, torch.float64) for name in ("blocks by a floor", "sevenths", "tenths", "half")],
    ids=str,
)
def test_masks_of_positions(name: str, dtype: torch.dtype) -> None:
    length = N if "triangle" in name else 120

    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, MASKS[name](torch.arange(length)), -1e9)

    assert_fused(program, *tensors(1, 2, length, 8, dtype=dtype))


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "equal to -1": lambda x: x == -1,
    "equal to 255": lambda x: x == 255,
    "negative": lambda x: -x > 5,
    "a product": lambda x: x * 100 > 50,
    "differences": lambda x: (x[:, None, :, None] - x[:, None, None, :]).abs() > 1,
    "sums": lambda x: x[:, None, :, None] + x[:, None, None, :] <= 0,
    "a remainder": lambda x: x % 3 == 1,
    "a floor": lambda x: x // -3 > -2,
    "quotients": lambda x: x / 3 * 3 != x,
    "powers": lambda x: x**2 > 100,
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", READ)
def test_masks_of_stored_whole_numbers(name: str, dtype: torch.dtype) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor, stored: Tensor) -> Tensor:
        hide = READ[name](stored)
        return attention(query, key, value, hide if hide.dim() == 4 else hide[:, None, None], -1e9)

    info = torch.iinfo(dtype)
    stored = torch.randint(info.min, info.max, (2, N)).to(dtype)
    stored[0, :3] = torch.tensor([info.max, info.min, 1])
    check(program, *tensors(2, 3, N, 8), stored)
    check(program, *tensors(2, 3, N, 8), stored, kernels=["chunked"], backward=False)


@pytest.mark.parametrize("bound", [-60.0, -1.0])
@pytest.mark.parametrize("masked", ["before", "after", "as a product"])
@pytest.mark.parametrize("scaled", [1.0, 0.01])
def test_a_clamp_of_shifted_scores(bound: float, masked: str, scaled: float) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT
        if masked == "before":
            scores = scores.masked_fill(HIDDEN, -math.inf)
        scores = (scores - scores.amax(-1, keepdim=True)).clamp(min=bound) * scaled
        if masked == "after":
            scores = scores.masked_fill(HIDDEN, -math.inf)
        weights = scores.exp()
        if masked == "as a product":
            weights = weights * ~HIDDEN
        return weights / weights.sum(-1, keepdim=True) @ value

    # Scores that lie more than 60 apart, and yet are computed again to 1e-5 in the backward.
    operands = [3 * x for x in tensors(2, 3, N, 8)]
    if masked == "before" and bound * scaled < -50:
        assert_fused(program, *operands)
    else:
        assert_refused(program, *operands, reason="the scores pass through amax over an axis")


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4, 1e10])
def test_a_scale_that_takes_scores_below_the_fill(scale: float) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT * scale).masked_fill(HIDDEN, -1e9).softmax(-1) @ value

    def divided(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / (1 / scale)).masked_fill(HIDDEN, -1e9).softmax(-1) @ value

    for run in (program, divided):
        outcome = check(run, *tensors(2, 3, N, 8), backward=False)
        said = str(outcome)
        assert outcome.site.fused and ("can reach" in said) == (scale > 100), said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("epsilon", [1e-20, 1e-7, 1e-5])
def test_a_small_number_in_the_sum(epsilon: float, dtype: torch.dtype) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * 0.3
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / (weights.sum(-1, keepdim=True) + epsilon) @ value

    operands = tensors(2, 3, N, 8, dtype=dtype)
    if epsilon <= torch.finfo(dtype).eps:
        assert_fused(program, *operands)
    else:
        assert_refused(program, *operands, reason="is added to the sum of the weights")


def exp2_over(query: Tensor, key: Tensor, value: Tensor, total: str, masked: bool = False) -> Tensor:
    scores = query @ key.mT * 0.3
    if masked:
        scores = scores.masked_fill(HIDDEN, -math.inf)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    sums = {
        "itself": weights.sum(-1, keepdim=True),
        "exp": (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True),
        "queries": weights.sum(-2, keepdim=True),
    }
    return weights / sums[total] @ value


def relaxed(query: Tensor, key: Tensor, value: Tensor, dim: int, masked: bool = False) -> Tensor:
    """CogView's scores, moved by their largest before they are scaled up again (arXiv 2105.13290)."""
    scores = query @ key.mT * 0.3 / 32
    if masked:
        scores = scores.masked_fill(HIDDEN, -math.inf)
    return ((scores - scores.amax(dim, keepdim=True)) * 32).softmax(-1) @ value


@pytest.mark.parametrize("masked", [False, True])
def test_exp2_and_relaxed_scores(masked: bool) -> None:
    operands = tensors(2, 3, N, 8)
    assert_fused(lambda q, k, v: exp2_over(q, k, v, "itself", masked), *operands)
    assert_fused(lambda q, k, v: relaxed(q, k, v, -1, masked), *operands)


def test_neither_is_one_with_another_sum_or_shift() -> None:
    operands = tensors(2, 3, N, 8)
    for total in ("exp", "queries"):
        assert_refused(lambda q, k, v, t=total: exp2_over(q, k, v, t), *operands, reason="not normalised by their own")
    assert_refused(lambda q, k, v: relaxed(q, k, v, -2), *operands, reason="the scores pass through amax over an axis")


def test_scores_that_double_in_parts() -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * 0.1
        for _ in range(30):
            scores = scores + 0.01 * scores.tanh()
        return scores.softmax(-1) @ value

    assert_refused(program, *tensors(2, 3, N, 8), reason="an expression with too many parts")
