"""docs/compare.md: what it says of torch's own ways to run attention is so."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.fx_passes import fuse_attention
from torch.nn.attention.flex_attention import flex_attention

# Before the tests, which have a `harness`, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import recall
from tests.models.spelling import function, square

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is about torch 2.13"),
]
LENGTH = 16
MASK = torch.zeros(1, 1, LENGTH, LENGTH)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)) / 4.0


def causal(s: Tensor) -> Tensor:
    return s.masked_fill(torch.tril(torch.ones(LENGTH, LENGTH)) == 0, -math.inf)


def padded(s: Tensor) -> Tensor:
    return s.masked_fill(torch.arange(LENGTH) > 11, -math.inf)


def by_inductor(program: Callable[..., Tensor]) -> tuple[bool, bool]:
    """Whether Inductor's patterns rewrite the program, and whether it then computes something else."""
    done = recall.inductors(function("", program, square(LENGTH, head_dim=LENGTH)), "inference")
    assert not done.failed
    return done.fused > 0, done.wrong


@pytest.mark.parametrize(
    ("program", "is_rewritten"),
    [
        (lambda q, k, v: scores(q, k).softmax(-1) @ v, True),
        (lambda q, k, v: ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v, True),
        (lambda q, k, v: (scores(q, k) + MASK).softmax(-1) @ v, True),
        (lambda q, k, v: (MASK + scores(q, k)).softmax(-1) @ v, False),
        (lambda q, k, v: ((q * 0.25) @ k.transpose(-2, -1)).softmax(-1) @ v, False),
        (lambda q, k, v: (torch.einsum("bhid,bhjd->bhij", q, k) / 4.0).softmax(-1) @ v, False),
        (lambda q, k, v: causal(scores(q, k)).softmax(-1) @ v, False),
        (lambda q, k, v: padded(scores(q, k)).softmax(-1) @ v, False),
        (lambda q, k, v: (torch.tanh(scores(q, k) / 5.0) * 5.0).softmax(-1) @ v, False),
        (lambda q, k, v: scores(q, k[:, :1].repeat_interleave(3, 1)).softmax(-1) @ v, True),
        (lambda q, k, v: ((weights := scores(q, k).softmax(-1)) @ v, weights), False),
    ],
    ids=[
        "divided",
        "multiplied",
        "mask last",
        "mask first",
        "query scaled",
        "einsum",
        "causal",
        "padding",
        "softcap",
        "grouped",
        "weights",
    ],
)
def test_what_inductors_patterns_match(program: Callable[..., Tensor], is_rewritten: bool) -> None:
    assert by_inductor(program) == (is_rewritten, False)


def test_they_rewrite_a_softmax_over_the_queries() -> None:
    assert by_inductor(lambda q, k, v: scores(q, k).softmax(-2) @ v) == (True, True)


def test_they_are_thirty_and_never_causal() -> None:
    source = inspect.getsource(fuse_attention)
    assert source.count("def _sfdp_pattern_") == 30 and "is_causal=True" not in source
    assert 'fp32_precision != "tf32"' in inspect.getsource(fuse_attention._sfdp_params_check)


def test_flex_attention_has_no_dropout_and_no_backward_on_a_cpu() -> None:
    assert not any("dropout" in name for name in inspect.signature(flex_attention).parameters)
    q, k, v = torch.randn(3, 1, 2, LENGTH, LENGTH, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        torch.compile(flex_attention)(q, k, v).sum().backward()


def test_sdpa_takes_masks_as_tensors_and_returns_no_weights() -> None:
    assert "attn_mask=None, dropout_p=0.0" in (F.scaled_dot_product_attention.__doc__ or "").replace("\n", "")
    q, k, v = torch.randn(3, 1, 2, LENGTH, LENGTH)
    assert isinstance(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, enable_gqa=True), Tensor)
