"""A query that sees no key: NaN under minus infinity, a mean of the values under a finite fill, exactly as written."""

from __future__ import annotations

import pytest
import torch

import attn_fuse
from attn_fuse.backend import attn_fuse as backend

T = 8
LOWEST = torch.finfo(torch.float32).min


def above() -> torch.Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def causal_then_padding(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """GPT-2 in Hugging Face's form: a finite causal fill, then a finite padding mask added."""
    return ((q @ q.mT).masked_fill(above(), LOWEST) + padding).softmax(-1) @ q


def padding_then_causal(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + padding).masked_fill(above(), LOWEST).softmax(-1) @ q


def both_added(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + padding + torch.full((T, T), -1e9).triu(1)).softmax(-1) @ q


def infinite_causal_then_padding(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return ((q @ q.mT).masked_fill(above(), float("-inf")) + padding).softmax(-1) @ q


def less_than_lowest_causal(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return ((q @ q.mT).masked_fill(above(), -1e9) + padding).softmax(-1) @ q


def two_fills(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).masked_fill(padding < 0, -1e9).masked_fill(above(), float("-inf")).softmax(-1) @ q


def finite_padding(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).masked_fill(padding < 0, -1e9).softmax(-1) @ q


MEAN = "a query that sees no key would get another mean of the values"
CASES = [
    (causal_then_padding, None),
    (padding_then_causal, None),
    (both_added, None),
    (infinite_causal_then_padding, None),
    (finite_padding, None),
    (less_than_lowest_causal, MEAN),
    (two_fills, MEAN),
]


def padding(first: int) -> torch.Tensor:
    """Left padding, as generation has it: the first queries see nothing."""
    mask = torch.zeros(2, 1, 1, T)
    mask[0, ..., :first] = LOWEST
    return mask


@pytest.mark.parametrize(("written", "refusal"), CASES, ids=lambda c: getattr(c, "__name__", ""))
@pytest.mark.parametrize("first", [0, 3, T])
def test_inference(written, refusal, first: int) -> None:
    q = torch.randn(2, 4, T, 16)
    fused = torch.compile(written, backend=backend, options={"inner_backend": "eager", "pick": "fused"})
    torch.testing.assert_close(fused(q, padding(first)), written(q, padding(first)))
    (site,) = attn_fuse.reports()[-1].sites
    assert site.fused == (refusal is None)
    assert refusal is None or site.blocker.reason == refusal


@pytest.mark.parametrize("written", [case for case, _ in CASES], ids=lambda c: c.__name__)
def test_gradients(written) -> None:
    q = torch.randn(2, 4, T, 16, requires_grad=True)
    mask = padding(3)
    (wanted,) = torch.autograd.grad(written(q, mask).square().sum(), q)
    fused = torch.compile(written, backend=backend, options={"inner_backend": "eager", "pick": "fused"})
    (got,) = torch.autograd.grad(fused(q, mask).square().sum(), q)
    torch.testing.assert_close(got, wanted)
