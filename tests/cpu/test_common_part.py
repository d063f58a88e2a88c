"""Gradients as good as eager's where the values have a large common part, and what torch's own kernels make of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_fuse.report import collecting
from tests.common_part import HEAD_DIM, HEADS, Attend, assert_as_good_as_eager, written

pytestmark = pytest.mark.thorough

TOKENS = pytest.mark.parametrize("tokens", [49, 300], ids=["one block of keys", "two blocks of keys"])


def scores(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * HEAD_DIM**-0.5 + bias


def sink(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = scores(q, k, bias)
    logits = torch.tensor([0.5, -1.0, 2.0], dtype=s.dtype).view(1, HEADS, 1, 1).expand(*s.shape[:3], 1)
    return torch.cat([s, logits], -1).softmax(-1)[..., :-1] @ v


def hidden_after_the_softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = scores(q, k, bias).softmax(-1)
    return (weights * (torch.arange(weights.shape[-1]) % 5 != 2)) @ v


def gated_heads(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    gates = torch.tensor([0.5, 1.0, 2.0], dtype=q.dtype)
    return (scores(q, k, bias).softmax(-1) * gates.view(-1, 1, 1)) @ v


def compare(attend: Attend, mean: float, tokens: int, dtype: torch.dtype = torch.float32) -> None:
    options = {"kernels": ["chunked"], "inner_backend": "eager"}
    with collecting() as graphs:
        compiled = torch.compile(attend, backend="attn_fuse", options=options)
        assert_as_good_as_eager(compiled, mean, tokens, eager=attend, dtype=dtype)
    assert {site.kernel for graph in graphs for site in graph.sites} == {"chunked"}


@TOKENS
@pytest.mark.parametrize("mean", [0.0, 5.0, 500.0])
def test_chunked(tokens: int, mean: float) -> None:
    compare(written, mean, tokens)


@TOKENS
@pytest.mark.parametrize("mean", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_in_half_precision(dtype: torch.dtype, tokens: int, mean: float) -> None:
    compare(written, mean, tokens, dtype)


# Not the sink at 500: there one weight of most rows is all there is, and eager's gradient of its score exactly 0.
@TOKENS
@pytest.mark.parametrize(
    ("attend", "mean"),
    [(sink, 5.0), *((attend, mean) for attend in (hidden_after_the_softmax, gated_heads) for mean in (5.0, 500.0))],
)
def test_weights_that_do_not_sum_to_one(attend: Attend, mean: float, tokens: int) -> None:
    compare(attend, mean, tokens)
