"""Decode steps of hand-written models with caches on triton_flash, interpreted on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.report import collecting
from tests.models.surroundings import GrowingCache, SlicedCache
from tests.triton.interpreted import interpreted

pytestmark = pytest.mark.thorough


class Decoder(nn.Module):
    """Two layers with grouped queries and a static cache, masked by rows of a buffer."""

    def __init__(self, length: int = 96, fill: float = float("-inf")) -> None:
        super().__init__()
        self.fill = fill
        self.layers = nn.ModuleList(nn.ModuleList((nn.Linear(32, 48), nn.Linear(32, 32))) for _ in range(2))
        self.register_buffer("cache", torch.zeros(2, 2, 2, 2, length, 4))
        self.register_buffer("causal", torch.tril(torch.ones(length, length, dtype=torch.bool)))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        batch, n, _ = x.shape
        mask = self.causal[position][None, None]
        for layer, (qkv, out) in enumerate(self.layers):
            q, k, v = qkv(x).split([32, 8, 8], dim=-1)
            q, k, v = (y.view(batch, n, -1, 4).transpose(1, 2) for y in (q, k, v))
            keys, values = self.cache[layer].unbind(0)
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            keys, values = keys.repeat_interleave(4, dim=1), values.repeat_interleave(4, dim=1)
            scores = q @ keys.transpose(-2, -1) / 2.0
            scores = scores.masked_fill(~mask, self.fill)
            x = x + out((scores.softmax(-1) @ values).transpose(1, 2).reshape(batch, n, 32))
        return x


def steps(model: nn.Module, calls: list[tuple[Any, ...]], attentions: int, inner: str = "eager") -> None:
    """Assert that every call of the compiled `model` agrees with float64, and that every attention is fused."""
    wide = copy.deepcopy(model).double()
    with torch.no_grad(), collecting() as graphs:
        run = torch.compile(model, backend=backend, options={"kernels": ["triton_flash"], "inner_backend": inner})
        for call in calls:
            exact = wide(*(_widened(x) for x in call))
            for got, wanted in zip(_leaves(run(*call)), _leaves(exact), strict=True):
                torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert graphs and all(len(graph.sites) == attentions for graph in graphs)
    assert all(site.kernel == "triton_flash" for graph in graphs for site in graph.sites), graphs


def _widened(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_widened, x))
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _leaves(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [leaf for part in x for leaf in _leaves(part)]


@interpreted
@pytest.mark.parametrize("fill", [float("-inf"), -1e9], ids=str)
def test_a_static_cache(fill: float) -> None:
    model = Decoder(fill=fill).eval()
    calls = [(torch.randn(2, 5, 32), torch.arange(5))]
    calls += [(torch.randn(2, 1, 32), torch.tensor([n])) for n in range(5, 8)]
    steps(model, calls, attentions=2)


@interpreted
def test_a_static_cache_with_inductor() -> None:
    steps(Decoder().eval(), [(torch.randn(2, 1, 32), torch.tensor([n])) for n in range(3)], 2, "inductor")


@interpreted
def test_a_sliced_cache() -> None:
    steps(SlicedCache().eval(), [(torch.randn(2, 2, 24), start) for start in (0, 2, 4, 6)], attentions=1)


@interpreted
def test_a_growing_cache() -> None:
    def past(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(2, 3, n, 8), torch.randn(2, 3, n, 8)

    steps(GrowingCache().eval(), [(torch.randn(2, 1, 24), past(n)) for n in (7, 8, 9, 40)], attentions=1)


@interpreted
def test_all_queries_of_one_key_head() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v

    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k.expand(-1, 40, -1, -1), v.expand(-1, 40, -1, -1))

    steps(Model(), [(torch.randn(2, 40, 1, 8), *torch.randn(2, 2, 1, 50, 8).unbind(0))], attentions=1)
