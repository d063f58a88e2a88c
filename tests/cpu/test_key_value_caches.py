"""Key-value caches: given, made, kept by a module, written in place in each way, or grown."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_fuse.report import collecting
from tests.harness import (
    assert_fused,
    assert_right,
    assert_zeros_are_kept,
    check,
    compiled,
    every_day,
    same,
    same_and_fused,
    tensors,
)  # fmt: skip

INF = math.inf
B, H, S, D = 2, 4, 12, 8
WIDTH, CACHE = H * D, 32


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


# ---- given


def filled(q, k, v, at, keys, values):
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    hidden = torch.arange(21) > at[:, None]
    return (q @ keys.mT * 0.25).masked_fill(hidden, -INF).softmax(-1) @ values


def indexed(q, k, v, at, keys, values):
    keys[:, :, at], values[:, :, at] = k, v
    return attention(q, keys[:, :, :12], values[:, :, :12])


def put(q, k, v, at, keys, values):
    for cache, new in ((keys, k), (values, v)):
        cache.index_put_((torch.arange(2)[:, None], torch.arange(4), at[:, None, None]), new.movedim(2, 0))
    q.mul_(0.25)
    hidden = torch.arange(21) > at[:, None]
    return (q @ keys.mT).masked_fill(hidden, -INF).softmax(-1) @ values


def cut(q, k, v, at, keys, values):
    end = 2 + k.shape[2]
    keys[:, :, 2:end], values[:, :, 2:end] = k, v
    return attention(q, keys[:, :, :end], values[:, :, :end])


def scattered(q, k, v, at, keys, values):
    where = at.view(1, 1, -1, 1).expand_as(k)
    keys.scatter_(2, where, k)
    values.scatter_(2, where, v)
    return attention(q, keys, values)


def narrowed(q, k, v, at, keys, values):
    keys.narrow(2, 3, k.shape[2]).copy_(k)
    values.narrow(2, 3, v.shape[2]).copy_(v)
    return attention(q, keys, values)


def joined(q, k, v, at, keys, values):
    keys, values = torch.cat([keys, k], 2)[:, :, -16:], torch.cat([values, v], 2)[:, :, -16:]
    return attention(q, keys, values), keys, values


def rolled(q, k, v, at, keys, values):
    new = k.shape[2]
    keys.copy_(torch.roll(keys, -new, 2))
    values.copy_(torch.roll(values, -new, 2))
    keys[:, :, -new:], values[:, :, -new:] = k, v
    return attention(q, keys, values)


def returned(q, k, v, at, keys, values):
    """What is returned is the caller's own cache, or a view of it, as it was."""
    end = k.shape[2]
    keys[:, :, :end], values[:, :, :end] = k, v
    some, others = keys[:, :, :end], values[:, :, :end]
    return (q @ some.mT).softmax(-1) @ others, keys, some, values.transpose(1, 2)


def made(q, k, v, at, keys, values):
    keys, values = (torch.zeros(2, 4, 21, 16, dtype=x.dtype).index_copy_(2, at, x) for x in (k, v))
    return attention(q, keys, values)


GIVEN = {f.__name__: f for f in (filled, indexed, put, cut, scattered, narrowed, joined, rolled, returned, made)}


def given(name: str, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    at = torch.arange(length)
    return (*tensors(2, 4, length, 16, dtype=dtype), at, *tensors(2, 4, 21, 16, count=2, dtype=dtype))


@pytest.mark.parametrize("name", GIVEN)
def test_a_cache_that_is_given(name: str) -> None:
    sites = same(GIVEN[name], given(name, 10))
    assert sites and (all(site.fused for site in sites) or name in ("scattered", "rolled")), sites


@pytest.mark.thorough
@pytest.mark.parametrize("pick", ["fused", "fastest"])
@pytest.mark.parametrize("length", [1, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GIVEN)
def test_a_cache_of_other_lengths_and_dtypes(name: str, dtype: torch.dtype, length: int, pick: str) -> None:
    backward = name == "made"
    assert_right(GIVEN[name], *given(name, length, dtype), backward=backward, picks=(pick,))


# ---- made and filled in part

CACHES = [
    lambda v: torch.empty(2, 3, 12, 16, dtype=v.dtype),
    lambda v: torch.zeros(2, 3, 12, 16, dtype=v.dtype),
    lambda v: torch.ones(2, 3, 12, 16, dtype=v.dtype),
    lambda v: torch.full((2, 3, 12, 16), 0.5, dtype=v.dtype),
    lambda v: torch.zeros_like(v),
    lambda v: torch.empty_like(v.detach()),
    lambda v: torch.zeros_like(v.sin()),
    lambda v: v.new_zeros(2, 3, 12, 16),
    lambda v: v.new_empty(2, 3, 12, 16),
    lambda v: v.new_full((2, 3, 12, 16), 0.5),
    lambda v: v.detach().clone(),
]


@pytest.mark.parametrize("make", [*CACHES[:3:2], *(pytest.param(c, marks=pytest.mark.thorough) for c in CACHES)])
def test_a_cache_that_no_gradient_leaves_is_filled_in_part(make: Callable[[Tensor], Tensor]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = make(v)
        cache[:, :, :9] = k
        return attention(q, cache[:, :, :9], v[:, :, :9])

    assert_fused(program, *tensors(2, 3, 9, 16)[:2], torch.randn(2, 3, 12, 16))


@pytest.mark.parametrize("make", [torch.clone, torch.sin, lambda v: torch.zeros_like(v) * v])
def test_a_cache_that_gives_an_input_a_gradient_of_zeros(make: Callable[[Tensor], Tensor]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, old: Tensor) -> Tensor:
        cache = make(old)
        cache[:, :, :9] = k
        return attention(q, cache[:, :, :9], v)

    assert_zeros_are_kept(program, [torch.randn(2, 3, n, 16, requires_grad=True) for n in (9, 9, 9, 12)])


# ---- kept by a module


class Attention(nn.Module):
    """Grouped queries over a cache, in the manner of the reference code of LLaMA.

    how: whether the caches are buffers, attributes, or attributes moved to the input's device and dtype each time.
    """

    def __init__(self, how: str, kv_heads: int = 2) -> None:
        super().__init__()
        self.how = how
        self.kv_heads = kv_heads
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, kv_heads * D, bias=False) for _ in range(2))
        for name in ("keys", "values"):
            cache = torch.zeros(4, CACHE, kv_heads, D)
            if how == "buffer":
                self.register_buffer(name, cache)
            else:
                setattr(self, name, cache)

    def forward(self, x: Tensor, start: int) -> Tensor:
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, H, D)
        k, v = (project(x).view(batch, length, self.kv_heads, D) for project in (self.key, self.value))
        if self.how == "moved":
            self.keys, self.values = self.keys.to(q), self.values.to(q)
        self.keys[:batch, start : start + length] = k
        self.values[:batch, start : start + length] = v
        k, v = self.keys[:batch, : start + length], self.values[:batch, : start + length]
        groups = H // self.kv_heads
        k = k[:, :, :, None].expand(-1, -1, -1, groups, -1).reshape(batch, -1, H, D)
        v = torch.repeat_interleave(v, groups, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D)
        if length > 1:
            mask = torch.full((length, length), -INF).triu(1)
            scores = scores + torch.hstack([torch.zeros(length, start), mask])
        weights = F.softmax(scores.float(), dim=-1).type_as(q)
        return torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, -1)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("how", every_day(["buffer", "attribute", "moved"], "buffer"))
def test_a_cache_written_by_slices(how: str, dynamic: bool | None) -> None:
    calls = [(torch.randn(2, S, WIDTH), 0), *((torch.randn(2, 1, WIDTH), S + n) for n in range(3))]
    same_and_fused(Attention(how), *calls, dynamic=dynamic)


class StaticCache(nn.Module):
    """A cache of a fixed length, written where the tokens stand; later positions are hidden."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("k", torch.zeros(2, 3, 12, 16))
        self.register_buffer("v", torch.zeros(2, 3, 12, 16))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
        if self.how == "index_copy_":
            self.k.index_copy_(2, place, k)
            self.v.index_copy_(2, place, v)
        elif self.how == "index":
            self.k[:, :, place], self.v[:, :, place] = k, v
        else:
            self.k, self.v = self.k.index_copy(2, place, k), self.v.index_copy(2, place, v)
        hidden = torch.arange(12) > place[:, None]
        return (q @ self.k.mT / 4).masked_fill(hidden, -INF).softmax(-1) @ self.v


@pytest.mark.parametrize(
    ("how", "inner"),
    [
        ("index_copy_", "eager"),
        *(pytest.param(how, "eager", marks=pytest.mark.thorough) for how in ("index", "replaced")),
        *(pytest.param(how, "inductor", marks=pytest.mark.thorough) for how in ("index_copy_", "index", "replaced")),
    ],
)
def test_a_static_cache(how: str, inner: str) -> None:
    model, twin = StaticCache(how), StaticCache(how)
    with collecting() as graphs, torch.no_grad():
        run = compiled(model, inner=inner)
        for first, length in ((0, 4), (4, 1), (5, 1), (6, 3)):
            step = (*tensors(2, 3, length, 16), torch.arange(first, first + length))
            torch.testing.assert_close(run(*step), twin(*step))
            torch.testing.assert_close(model.k, twin.k)
    assert graphs and all(site.fused for graph in graphs for site in graph.sites)


# ---- grown, and read beside new keys


def grown(q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    apart = torch.arange(q.shape[2])[:, None] + past_k.shape[2] - torch.arange(k.shape[2])
    return (q @ k.mT / 4).masked_fill(apart < 0, -INF).softmax(-1) @ v, k, v


def test_a_cache_that_grows() -> None:
    calls = [(*tensors(2, 3, 1, 16), *tensors(2, 3, past, 16, count=2)) for past in (4, 5, 6, 11)]
    outcome = assert_fused(grown, *calls[0], more=calls[1:])
    assert len(outcome.graphs) <= 2
    prompt = (*tensors(2, 3, 5, 16), *tensors(2, 3, 4, 16, count=2))
    torch._dynamo.reset()
    assert "causal with offset 4" in assert_fused(grown, *prompt).site.attention["mask"]


def in_two_parts(first: int, sign: int = 1, queries: int = 0) -> Callable[..., Tensor]:
    """The weights of cached and of new keys, joined, and of each a product of its own; `first` stand first."""

    def program(q, k, v, past_k, past_v):
        other = q.flip(1) if queries else q
        weights = torch.cat([q @ past_k.mT / 4, other @ k.mT / 4], -1).softmax(-1)
        one, rest = (past_v, v) if first == past_v.shape[2] else (v, past_v)
        return weights[..., :first] @ one + sign * (weights[..., first:] @ rest)

    return program


@pytest.mark.parametrize(
    "program",
    [in_two_parts(4), in_two_parts(7), in_two_parts(4, sign=-1), in_two_parts(4, queries=1)],
    ids=["in two parts", "the other way round", "subtracted", "with another query"],
)
def test_products_with_cached_and_new_keys(program: Callable[..., Tensor]) -> None:
    check(program, *tensors(2, 3, 7, 16), *tensors(2, 3, 4, 16, count=2))


@pytest.mark.thorough
def test_every_fourth_of_old_and_new_keys() -> None:
    """The number of new keys is a size of no tensor that the attention reads (Jukebox)."""

    def program(q: Tensor, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k, v = (torch.cat(pair, 1)[:, 1::4] for pair in ((keys, key), (values, value)))
        return attention(q, k, v)

    run = compiled(program, dynamic=True)
    with collecting() as graphs, torch.no_grad():
        for n in range(9, 16):
            q, key, value = torch.randn(3, 2, 1, 16)
            args = (q, torch.randn(2, n, 16), torch.randn(2, n, 16), key, value)
            torch.testing.assert_close(run(*args), program(*args))
    assert all(site.fused for graph in graphs for site in graph.sites)
