"""Operands, scores, caches and results that are written in place: by operator, method, function, slice and `out=`.

Nothing may be applied twice, lost or seen too early: outputs, gradients and what was written are held against float64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_fuse.backend import attn_fuse as backend
from tests.harness import assert_right as right
from tests.harness import tensors

pytestmark = pytest.mark.thorough


def _sets(x: Tensor) -> None:
    x[..., :2] = 0.5


def _sets_rows(x: Tensor) -> None:
    x[:, :, ::3] *= 0.5


def _adds_to_a_view(x: Tensor) -> None:
    x.transpose(1, 2).add_(0.25)


def _fills_the_diagonal(x: Tensor) -> None:
    x.diagonal(dim1=-2, dim2=-1).fill_(0.1)


def _writes_by_index(x: Tensor) -> None:
    x.index_copy_(2, torch.tensor([1, 3]), torch.zeros_like(x[:, :, :2]))


def _writes_where(x: Tensor) -> None:
    x[x > 1] = 1.0


def _into_itself(x: Tensor) -> None:
    torch.mul(x, 0.5, out=x)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "/=": lambda x: operator.itruediv(x, math.sqrt(8)),
    "*=": lambda x: operator.imul(x, 0.25),
    "+=": lambda x: operator.iadd(x, 0.5),
    "-=": lambda x: operator.isub(x, x.mean(-1, keepdim=True).detach()),
    "= mul_": lambda x: x.mul_(0.25),
    "mul_": lambda x: x.mul_(0.5),
    "div_": lambda x: x.div_(4.0),
    "add_": lambda x: x.add_(0.5, alpha=2),
    "neg_": lambda x: x.neg_(),
    "clamp_": lambda x: x.clamp_(-1, 1),
    "copy_": lambda x: x.copy_(x * 0.5),
    "relu_": lambda x: F.relu(x, inplace=True),
    "masked_fill_": lambda x: x.masked_fill_(torch.arange(x.shape[-1]) > 6, -1e9 if x.shape[-1] == 13 else 0.0),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, True, True),
    "slice =": _sets,
    "steps *=": _sets_rows,
    "view.add_": _adds_to_a_view,
    "diagonal.fill_": _fills_the_diagonal,
    "index_copy_": _writes_by_index,
    "where =": _writes_where,
    "out=": _into_itself,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", ["query", "key", "value", "scores", "weights", "out"])
def test_every_write_on_every_value(write, place) -> None:
    def at(here: str, x: Tensor) -> Tensor:
        if here != place:
            return x
        made = WRITES[write](x)
        # An operator gives the variable its new value, a method mostly stands alone.
        return made if (write.endswith("=") and made is not None) or write.startswith("=") else x

    def program(x, w):
        q, k, v = (F.linear(x, part).view(2, 13, 3, 8).transpose(1, 2) for part in w.chunk(3))
        q, k, v = at("query", q), at("key", k), at("value", v)
        p = at("scores", q @ k.transpose(-2, -1)).softmax(-1)
        return at("out", at("weights", p) @ v)

    x, w = torch.randn(2, 13, 24), torch.randn(72, 24) / 3
    # Autograd does not let softmax's result be written; `out=` it does not take at all.
    right(program, x, w, backward=place != "weights" and write != "out=")


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 4, -1).transpose(1, 2)


def before_the_heads(x, w):
    q, k, v = (F.linear(x, part) for part in w.chunk(3))
    q /= 4.0
    return heads(q), heads(k), heads(v)


def on_the_packed(x, w):
    q, k, v = map(heads, F.linear(x, w).chunk(3, -1))
    q *= 0.25
    return q, k, v


def on_the_whole(x, w):
    qkv = F.linear(x, w)
    qkv *= 0.5
    qkv[..., :64] *= 0.5
    q, k, v = map(heads, qkv.split(64, -1))
    return q, k, v


def after_a_copy(x, w):
    q, k, v = (F.linear(x, part).reshape(2, 16, 4, -1).permute(0, 2, 1, 3) for part in w.chunk(3))
    q = q.clone()
    q /= 4.0
    return q, k, v


def on_all_three(x, w):
    q, k, v = (heads(F.linear(x, part)) for part in w.chunk(3))
    q *= 0.5
    k *= 0.5
    v *= 2.0
    return q, k, v


def unbound(x, w):
    q, k, v = F.linear(x, w).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
    q *= 0.25
    return q, k, v


def with_names_kept(x, w):
    q, k, v = (heads(F.linear(x, part)) for part in w.chunk(3))
    scaled = q
    scaled *= 0.25
    same = k[:]
    same += 0.1
    return q, k, v


LAYOUTS = (before_the_heads, on_the_packed, on_the_whole, after_a_copy, on_all_three, unbound, with_names_kept)


@pytest.mark.parametrize("pick", ["fused", "fastest"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_operands_written_in_every_layout(layout, backward, pick) -> None:
    def program(x, w):
        q, k, v = layout(x, w)
        s = torch.einsum("bhic,bhjc->bhij", q, k)
        s += 0.5
        return torch.einsum("bhij,bhjc->bhic", s.softmax(-1), v)

    x, w = torch.randn(2, 16, 64), 3 * torch.randn(192, 64) / 8
    if layout in (on_the_packed, unbound):
        backward = False  # autograd does not let one of several views be written
    right(program, x, w, backward=backward, picks=(pick,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_operands_written_in_other_dtypes(dtype) -> None:
    def program(q, k, v):
        q, k = q * 1, k.contiguous() * 1
        q /= math.sqrt(8)
        k.mul_(0.5)
        return (q @ k.mT).softmax(-1) @ v

    right(program, *tensors(2, 3, 13, 8, dtype=dtype))


@pytest.mark.parametrize("dynamic", [None, True])
def test_arguments_written_in_place(dynamic) -> None:
    def program(q, k, v):
        q *= 0.25
        k[:, :, :2] = v[:, :, 1:3]
        s = q @ k.mT
        out = s.softmax(-1) @ v
        v.add_(1)
        return out, s

    right(program, *tensors(2, 3, 13, 8), backward=False, dynamic=dynamic, more=[tensors(2, 3, 17, 8)])


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("what", ["q", "k", "v", "s", "p"])
def test_a_write_at_any_time(when, what) -> None:
    """What was read before a write holds the old numbers, what is read after it the new."""

    def program(q, k, v):
        q, k, v = q * 1, k * 1, v * 1
        s = q @ k.mT
        p = s.softmax(-1)
        values = {"q": q, "k": k, "v": v, "s": s, "p": p}
        if when == "before":
            values[what].mul_(0.5)
        out = p @ v
        if when == "between":
            values[what].mul_(0.5)
        again = s.softmax(-1) @ v
        if when == "after":
            values[what].mul_(0.5)
        return out, again, q + 0, k + 0, v + 0, s.sum(-1), p.sum(-1)

    right(program, *tensors(2, 3, 13, 8), backward=False)


# ---- weights and scores that are kept


@pytest.mark.parametrize("kept", ["scores", "weights", "both", "in_a_list", "weights_before_dropout"])
@pytest.mark.parametrize("in_place", [True, False])
def test_scores_masked_in_place_and_kept(kept, in_place) -> None:
    def program(q, k, v, mask):
        s = q @ k.mT / 4
        s = s.masked_fill_(mask == 0, -1e9) if in_place else s.masked_fill(mask == 0, -1e9)
        p = s.softmax(-1)
        made = [p]
        p = F.dropout(p, 0.0, True)
        out = p @ v
        return {
            "scores": (out, s), "weights": (out, p), "both": (out, s, p), "in_a_list": (out, made[0]),
            "weights_before_dropout": (out, made[-1].mean(1)),
        }[kept]  # fmt: skip

    right(program, *tensors(2, 3, 13, 8), torch.randint(0, 2, (2, 1, 13, 13)))


# ---- caches


def made_and_filled(q, k, v, at):
    keys, values = (torch.zeros(2, 4, 21, 16, dtype=k.dtype) for _ in range(2))
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    return (q @ keys.mT * 0.25).softmax(-1) @ values


def given_and_filled(q, k, v, at, keys, values):
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    hidden = torch.arange(21) > at[:, None]
    return (q @ keys.mT * 0.25).masked_fill(hidden, -torch.inf).softmax(-1) @ values


def given_and_indexed(q, k, v, at, keys, values):
    keys[:, :, at] = k
    values[:, :, at] = v
    return (q @ keys[:, :, :12].mT * 0.25).softmax(-1) @ values[:, :, :12]


def given_and_cut(q, k, v, at, keys, values):
    keys[:, :, 2 : 2 + k.shape[2]] = k
    values[:, :, 2 : 2 + k.shape[2]] = v
    return (q @ keys[:, :, : 2 + k.shape[2]].mT * 0.25).softmax(-1) @ values[:, :, : 2 + k.shape[2]]


def given_and_scattered(q, k, v, at, keys, values):
    where = at.view(1, 1, -1, 1).expand_as(k)
    keys.scatter_(2, where, k)
    values.scatter_(2, where, v)
    return (q @ keys.mT * 0.25).softmax(-1) @ values


def given_and_narrowed(q, k, v, at, keys, values):
    keys.narrow(2, 3, k.shape[2]).copy_(k)
    values.narrow(2, 3, v.shape[2]).copy_(v)
    return (q @ keys.mT * 0.25).softmax(-1) @ values


def given_and_joined(q, k, v, at, keys, values):
    keys, values = torch.cat([keys, k], 2)[:, :, -16:], torch.cat([values, v], 2)[:, :, -16:]
    return (q @ keys.mT * 0.25).softmax(-1) @ values, keys, values


def given_and_rolled(q, k, v, at, keys, values):
    keys.copy_(torch.roll(keys, -k.shape[2], 2))
    values.copy_(torch.roll(values, -k.shape[2], 2))
    keys[:, :, -k.shape[2] :] = k
    values[:, :, -k.shape[2] :] = v
    return (q @ keys.mT * 0.25).softmax(-1) @ values


@pytest.mark.parametrize("pick", ["fused", "fastest"])
@pytest.mark.parametrize("length", [1, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cache",
    [
        given_and_filled, given_and_indexed, given_and_cut, given_and_scattered, given_and_narrowed, given_and_joined,
        given_and_rolled,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_cache_that_is_given(cache, dtype, length, pick) -> None:
    inputs = (*tensors(2, 4, length, 16, dtype=dtype), torch.arange(length))
    right(cache, *inputs, *tensors(2, 4, 21, 16, count=2, dtype=dtype), backward=False, picks=(pick,))


@pytest.mark.parametrize("pick", ["fused", "fastest"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("length", [1, 10])
def test_a_cache_that_is_made(length, backward, pick) -> None:
    right(made_and_filled, *tensors(2, 4, length, 16), torch.arange(length), backward=backward, picks=(pick,))


class Cached(nn.Module):
    """Meta's way: the caches are attributes, written by slices, moved to the input's device and dtype each time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(32, 96)
        cache = torch.zeros(4, 24, 4, 8)
        if how == "buffer":
            self.register_buffer("keys", cache)
            self.register_buffer("values", cache.clone())
        else:
            self.keys, self.values = cache, cache.clone()

    def forward(self, x: Tensor, start: int) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).unbind(2)
        if self.how == "reassigned":
            self.keys, self.values = self.keys.to(x), self.values.to(x)
        length = start + x.shape[1]
        self.keys[: x.shape[0], start:length] = k
        self.values[: x.shape[0], start:length] = v
        q, k, v = (t.transpose(1, 2) for t in (q, self.keys[: len(x), :length], self.values[: len(x), :length]))
        s = q @ k.mT / math.sqrt(8)
        if x.shape[1] > 1:
            s = s + torch.full((x.shape[1], length), -math.inf).triu(start + 1)
        return (s.float().softmax(-1).type_as(q) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("pick", ["fused", "fastest"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("how", ["buffer", "attribute", "reassigned"])
def test_a_cache_that_the_module_keeps(how, dynamic, pick) -> None:
    torch.manual_seed(0)
    eager, model = Cached(how), Cached(how)
    model.load_state_dict(eager.state_dict())
    options = {"inner_backend": "aot_eager", "pick": pick, "check": True}
    run = torch.compile(model, backend=backend, dynamic=dynamic, options=options)
    x = torch.randn(2, 20, 32)
    with torch.no_grad():
        for start, end in ((0, 12), (12, 13), (13, 14), (14, 18)):
            torch.testing.assert_close(run(x[:, start:end], start), eager(x[:, start:end], start))
    torch.testing.assert_close(model.keys, eager.keys)
    torch.testing.assert_close(model.values, eager.values)
