"""A query that sees no key: NaN under minus infinity, a mean of the values under a finite fill, 0 behind a guard.

tests/cpu/test_nan_rows.py has what a program can tell of a row that is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.attention.attention import Refusal
from tests.harness import assert_chunked, assert_fused, assert_refused, check, compiled, every_day, tensors
from tests.recognised import recognised

T, INF = 8, math.inf
LOWEST = torch.finfo(torch.float32).min
ABOVE = torch.ones(T, T, dtype=torch.bool).triu(1)
ALLOWED = pytest.mark.parametrize("kernels", [["cpu_flash"], ["chunked"]], ids=lambda names: names[0])

MEAN = "a query that sees no key would get another mean of the values"
GRADIENT = "a query that sees no key would get a gradient, which the program's fill value stops"
HIDING = "a bias that may hide every key of a query, as padding does, would get a wrong gradient"


def guarded_by_its_scores(s: Tensor, padding: Tensor) -> Tensor:
    s = s.masked_fill(padding < 0, -INF)
    return torch.where((s == -INF).all(-1, keepdim=True), 0.0, s.softmax(-1))


# The weights, of the scores and a padding that is added, and what cpu_flash says in inference and in training. The
# first is GPT-2 in Hugging Face's form.
CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str | None, str | None]] = {
    "causal then padding": (lambda s, p: (s.masked_fill(ABOVE, LOWEST) + p).softmax(-1), None, HIDING),
    "padding then causal": (lambda s, p: (s + p).masked_fill(ABOVE, LOWEST).softmax(-1), None, HIDING),
    "both added": (lambda s, p: (s + p + torch.full((T, T), -1e9).triu(1)).softmax(-1), None, HIDING),
    "infinite causal then padding": (lambda s, p: (s.masked_fill(ABOVE, -INF) + p).softmax(-1), None, HIDING),
    "added twice": (lambda s, p: (s + p.clamp(min=-1e9) + p.clamp(min=-1e9)).softmax(-1), None, HIDING),
    "finite padding": (lambda s, p: s.masked_fill(p < 0, -1e9).softmax(-1), None, GRADIENT),
    "less than lowest causal": (lambda s, p: (s.masked_fill(ABOVE, -1e9) + p).softmax(-1), MEAN, MEAN),
    "two fills": (lambda s, p: s.masked_fill(p < 0, -1e9).masked_fill(ABOVE, -INF).softmax(-1), MEAN, MEAN),
    "infinite padding made zero": (lambda s, p: s.masked_fill(p < 0, -INF).softmax(-1).nan_to_num(0.0), None, None),
    "infinite padding safe": (lambda s, p: torch.ops.aten._safe_softmax(s.masked_fill(p < 0, -INF), -1), None, None),
    "infinite padding guarded": (guarded_by_its_scores, None, None),
}


def attention(weights: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda q, padding: weights(q @ q.mT, padding) @ q


GUARDED = ("infinite padding made zero", "infinite padding safe", "infinite padding guarded")


def padding(first: int) -> Tensor:
    """Left padding, as generation has it: the first queries see nothing."""
    mask = torch.zeros(2, 1, 1, T)
    mask[0, ..., :first] = LOWEST
    return mask


@pytest.mark.parametrize("backward", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("first", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (0, T))])
@pytest.mark.parametrize("name", every_day(CASES, "causal then padding", "finite padding", GUARDED[2]))
def test_every_case(name: str, first: int, backward: bool) -> None:
    weights, inference, training = CASES[name]
    q, mask = torch.randn(2, 4, T, 16), padding(first)

    def program(q: Tensor) -> Tensor:
        return weights(q @ q.mT, mask) @ q  # no argument, as a mask takes no gradient

    declined = training if backward else inference
    if declined is None:
        assert assert_fused(program, q, backward=backward).site.kernel == "cpu_flash"
    else:
        assert_chunked(program, q, reason=declined, backward=backward)
    check(program, q, backward=backward, kernels=["chunked"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["infinite causal then padding", *GUARDED])
def test_float16(name: str) -> None:
    # The others fill with numbers that float16 does not have.
    q, mask = torch.randn(2, 4, T, 16).half(), padding(3).clamp(min=torch.finfo(torch.float16).min).half()
    check(attention(CASES[name][0]), q, mask, backward=False)


@ALLOWED
@pytest.mark.parametrize("name", every_day(GUARDED, GUARDED[2]))
def test_a_guard_gives_exactly_zero(name: str, kernels: list[str]) -> None:
    out = compiled(attention(CASES[name][0]), kernels=kernels)(torch.randn(2, 4, T, 16), padding(T))
    assert not out[0].any() and out[1].all()


# ---- masks and guards together


def seen_in_part(empty: bool = True) -> Tensor:
    """A mask; the third query of the first batch entry sees nothing if `empty`."""
    seen = torch.rand(2, 1, T, T) > 0.4
    seen[..., 0] = True
    seen[0, 0, 2] = not empty
    return seen


# The weights, of the scores and what is seen.
TWICE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "guard after a finite fill": lambda s, seen: s.masked_fill(~seen, -1e9).softmax(-1).nan_to_num(0.0),
    "guard after the lowest fill": lambda s, seen: s.masked_fill(~seen, LOWEST).softmax(-1).nan_to_num(0.0),
    "row guard after a finite fill": lambda s, seen: (
        lambda low: torch.where((low == -INF).all(-1, keepdim=True), 0.0, low.softmax(-1))
    )(s.masked_fill(~seen, -1e9)),
    "safe after a finite fill": lambda s, seen: torch.ops.aten._safe_softmax(s.masked_fill(~seen, -1e9), -1),
    "mask again after a finite fill": lambda s, seen: s.masked_fill(~seen, -1e9).softmax(-1) * seen,
    "part of the mask again": lambda s, seen: (lambda part: s.masked_fill(~(seen & part), -1e9).softmax(-1) * part)(
        seen | (torch.arange(T)[:, None] == 2)
    ),
    "part of the mask filled again": lambda s, seen: (
        s.masked_fill(~(seen & (torch.arange(T) < 4)), -1e9).softmax(-1).masked_fill(torch.arange(T) >= 4, 0.0)
    ),
    "mask again after infinity": lambda s, seen: s.masked_fill(~seen, -INF).softmax(-1).nan_to_num(0.0) * seen,
    "another mask afterwards": lambda s, seen: s.masked_fill(~seen, -1e9).softmax(-1) * seen.roll(1, -1),
    # Questions about a function of the weights or scores.
    "zero where a logarithm is no number": lambda s, seen: torch.where(s.log().isnan(), 0.0, s.softmax(-1)),
    "filled where the logarithm is infinite": lambda s, seen: (lambda p: torch.where(p.log().isinf(), 0.3, p))(
        s.masked_fill(ABOVE, -INF).softmax(-1)
    ),
    "filled where the inverse is infinite": lambda s, seen: (lambda p: torch.where((1 / p) == INF, 0.3, p))(
        s.masked_fill(ABOVE, -INF).softmax(-1)
    ),
}


@pytest.mark.parametrize("backward", [True, False], ids=["training", "inference"])
@ALLOWED
@pytest.mark.parametrize("name", every_day(TWICE, "part of the mask again"))
def test_a_mask_or_guard_afterwards(name: str, kernels: list[str], backward: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return TWICE[name](q @ k.mT / 4, seen) @ v

    check(program, *tensors(2, 3, T, 16), seen_in_part(), kernels=kernels, backward=backward)


def exponentials(s: Tensor) -> Tensor:
    e = s.exp()
    return e / e.sum(-1, keepdim=True)


ZERO_FOR_NAN: dict[str, Callable[[Tensor], Tensor]] = {
    "nan_to_num": torch.nan_to_num,
    "a choice": lambda w: torch.where(w.isnan(), 0.0, w),
    "a fill": lambda w: w.masked_fill(w != w, 0.0),
}


@pytest.mark.parametrize("name", every_day(ZERO_FOR_NAN, "a choice"))
@pytest.mark.parametrize("fill", [-1e9, -INF])
def test_a_guard_of_exponentials_that_are_all_zero(name: str, fill: float) -> None:
    seen = torch.ones(2, 1, 1, T, dtype=torch.bool)
    seen[1] = False

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ZERO_FOR_NAN[name](exponentials((q @ k.mT / 4).masked_fill(~seen, fill))) @ v

    assert_refused(program, *tensors(2, 3, T, 16), reason="the weights are")


def with_bias(s: Tensor, kept: Tensor, bias: Tensor) -> Tensor:
    return s.masked_fill(~kept, 0.0) + bias


NO_NUMBERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "masked by a product": lambda s, kept, low: low * kept + -1e9 * (1 - kept.to(s.dtype)),
    "times a mask": lambda s, kept, low: low * kept,
    "times nothing": lambda s, kept, low: s.relu() * kept + low * 0.0,
    "times what may be 0": lambda s, kept, low: low * kept.any(0),
    "times positions": lambda s, kept, low: low * torch.arange(T),
    "less itself": lambda s, kept, low: s + (low - low),
    "less the minimum": lambda s, kept, low: low - low.amin(-1, keepdim=True),
    "less the sum": lambda s, kept, low: low - low.sum(-1, keepdim=True),
    "bias times a mask": lambda s, kept, low: with_bias(s, kept, torch.zeros(T, T).masked_fill(~kept, -INF) * kept),
    "infinity times a mask": lambda s, kept, low: with_bias(s, kept, (1 - kept.float()) * -INF),
    "a cosine": lambda s, kept, low: low.cos(),
    "silu": lambda s, kept, low: nn.functional.silu(low),
    "gelu": lambda s, kept, low: nn.functional.gelu(low),
}


@pytest.mark.parametrize("filled", [False, True], ids=["behind a guard", "under filled weights"])
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_scores_that_are_no_number(name: str, filled: bool) -> None:
    """As written a row with one becomes 0 behind a guard; one whose weights are all filled is 0 in any case."""
    left = torch.ones(T, T, dtype=torch.bool)
    left[2:5] = False

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT / 4
        weights = NO_NUMBERS[name](s, ~ABOVE, s.masked_fill(ABOVE, -INF)).softmax(-1)
        return (weights.masked_fill(~left, 0.0) if filled else weights.nan_to_num(0.0)) @ v

    (found,) = recognised(program, *(x.requires_grad_() for x in tensors(2, 3, T, 16)))
    assert isinstance(found, Refusal)
    assert found.reason.startswith(
        "the weights are guarded or filled where a score may be infinity times zero, which is NaN"
    )


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda s: 0.5 * s,
    "less the maximum": lambda s: s - s.amax(-1, keepdim=True),
    "shifted": lambda s: s / 3 + 1,
    "clamped": lambda s: 2 * s.clamp(max=5),
}
AFTERWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: lambda s, hidden, of=of: of(s).softmax(-1).nan_to_num(0.0) for name, of in NUMBERS.items()},
    "filled weights": lambda s, hidden: s.softmax(-1).masked_fill(hidden, 0.0),
    "weights times a mask": lambda s, hidden: s.softmax(-1) * ~hidden,
}


@pytest.mark.parametrize("name", every_day(AFTERWARDS, "less the maximum", "filled weights"))
def test_scores_that_are_numbers(name: str) -> None:
    hidden = ABOVE.clone()
    hidden[3] = True

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return AFTERWARDS[name]((q @ k.mT / 4).masked_fill(hidden, -INF), hidden) @ v

    assert_fused(program, *tensors(2, 3, T, 16), backward=False)
