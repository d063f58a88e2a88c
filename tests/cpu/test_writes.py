"""Operands, scores, masks and results written in place: by operator, method, function, slice and `out=`.

Nothing may be applied twice, lost or seen too early: outputs, gradients and what was written are held against float64.
Views and other names of what is written are in tests/cpu/test_memory.py, caches in test_key_value_caches.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import (
    assert_fused,
    assert_refused,
    assert_right,
    check,
    every_day,
    tensors,
)

INF = math.inf
B, H, S, D = 2, 3, 12, 8


def product(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / D**0.5


# ---- every write on every value


def _sets(x: Tensor) -> None:
    x[..., :2] = 0.5


def _sets_rows(x: Tensor) -> None:
    x[:, :, ::3] *= 0.5


def _writes_where(x: Tensor) -> None:
    x[x > 1] = 1.0


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
    "view.add_": lambda x: x.transpose(1, 2).add_(0.25),
    "diagonal.fill_": lambda x: x.diagonal(dim1=-2, dim2=-1).fill_(0.1),
    "index_copy_": lambda x: x.index_copy_(2, torch.tensor([1, 3]), torch.zeros_like(x[:, :, :2])),
    "where =": _writes_where,
    "out=": lambda x: torch.mul(x, 0.5, out=x),
}

EVERY_DAY = {("/=", "query"), ("*=", "scores"), ("view.add_", "key"), ("diagonal.fill_", "scores"), ("out=", "out")}


@pytest.mark.parametrize(
    ("write", "place"),
    [
        pytest.param(write, place, marks=() if (write, place) in EVERY_DAY else pytest.mark.thorough)
        for write in WRITES
        for place in ("query", "key", "value", "scores", "weights", "out")
    ],
)
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
    assert_right(program, x, w, backward=place != "weights" and write != "out=")


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


@pytest.mark.thorough
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
    assert_right(program, x, w, backward=backward, picks=(pick,))


@pytest.mark.parametrize("dtype", every_day([torch.float16, torch.bfloat16, torch.float64], torch.bfloat16))
def test_operands_written_in_other_dtypes(dtype) -> None:
    def program(q, k, v):
        q, k = q * 1, k.contiguous() * 1
        q /= math.sqrt(8)
        k.mul_(0.5)
        return (q @ k.mT).softmax(-1) @ v

    assert_right(program, *tensors(2, 3, 13, 8, dtype=dtype))


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.thorough)])
def test_arguments_written_in_place(dynamic) -> None:
    def program(q, k, v):
        q *= 0.25
        k[:, :, :2] = v[:, :, 1:3]
        s = q @ k.mT
        out = s.softmax(-1) @ v
        v.add_(1)
        return out, s

    assert_right(program, *tensors(2, 3, 13, 8), backward=False, dynamic=dynamic, more=[tensors(2, 3, 17, 8)])


@pytest.mark.parametrize(
    ("when", "what"),
    [
        pytest.param(
            when, what, marks=() if (when, what) in (("between", "s"), ("after", "q")) else pytest.mark.thorough
        )
        for when in ("before", "between", "after")
        for what in "qkvsp"
    ],
)
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

    assert_right(program, *tensors(2, 3, 13, 8), backward=False)


@pytest.mark.thorough
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

    assert_right(program, *tensors(2, 3, 13, 8), torch.randint(0, 2, (2, 1, 13, 13)))


# ---- scores and masks, of what else was written


def bucketed(q: Tensor, k: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """T5's buckets as CPM-Ant writes them, added to in place, and a padding of `lengths`."""
    at = torch.arange(S)
    apart = at[None, :] - at[:, None]
    buckets = (apart > 0).to(torch.int32) * 4
    buckets += torch.where(apart.abs() < 3, apart.abs(), 3).to(torch.int32)
    scores = product(q, k) + table[buckets].permute(2, 0, 1)
    return scores.masked_fill((at >= lengths[:, None])[:, None, None], -INF)


def lengths_of(change: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    def scores(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        lengths = torch.sum(ids != 0, -1)
        change(lengths)
        return bucketed(q, k, table, lengths)

    return scores


def counted_and_cleared_afterwards(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    lengths = torch.sum(ids != 0, -1)
    scores = bucketed(q, k, table, lengths)
    lengths.zero_()
    return scores


def counted_from_what_is_written(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    some = ids * 1
    some[:, 2:3] = 0
    return bucketed(q, k, table, torch.sum(some != 0, -1))


def other_product_in_a_part_of_the_scores(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    scores = product(q, k)
    scores[..., :4] = q @ k.flip(-1)[:, :, :4].transpose(-2, -1)
    return scores


def other_product_over_all_of_the_scores(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    scores = product(q, k)
    scores[:] = q.flip(-1) @ k.transpose(-2, -1)
    return scores


def other_product_of_the_scores(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    scores = product(q, k)
    scores += product(q, k) @ product(q, k)
    return scores


def diagonal_of_the_mask(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    keep = (ids != 0)[:, None, None, :].expand(B, 1, S, S).clone()
    keep.diagonal(dim1=-2, dim2=-1).fill_(True)
    return product(q, k).masked_fill(~keep, -1e9)


def view_of_the_mask_taken_before(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    bias = (ids * 1.0)[:, None, None, :] + torch.zeros(S, 1)
    part = bias.as_strided((B, 1, S, 4), (S * S, S * S, S, 1))
    part -= 3.0
    return product(q, k) + bias


def transposed_view_of_the_mask(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    bias = (ids * 1.0)[:, None, None, :] + torch.zeros(S, 1)
    bias.mT[..., 2:5, :] = -4.0
    return product(q, k) + bias


@pytest.mark.parametrize(
    "backward", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["inference", "training"]
)
@pytest.mark.parametrize(
    "scores_of",
    [
        lengths_of(lambda lengths: lengths.add_(2)), lengths_of(lambda lengths: lengths.view(-1)[1:].add_(3)),
        counted_and_cleared_afterwards, counted_from_what_is_written, other_product_in_a_part_of_the_scores,
        other_product_over_all_of_the_scores, other_product_of_the_scores, diagonal_of_the_mask,
        view_of_the_mask_taken_before, transposed_view_of_the_mask,
    ],
)  # fmt: skip
def test_right_in_any_case(scores_of, backward: bool) -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        return scores_of(q, k, table, ids).softmax(-1) @ v

    ids = torch.tensor([[1] * 9 + [0] * 3, [1] * 7 + [0] * 5])
    check(written, *tensors(B, H, S, D), torch.randn(8, H), ids, backward=backward)


def test_lengths_that_are_counted_beside_buckets_written_in_place() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        return lengths_of(lambda lengths: None)(q, k, table, ids).softmax(-1) @ v

    ids = torch.tensor([[1] * S, [1] * 7 + [0] * 5])
    assert_fused(program, *tensors(B, H, S, D), torch.randn(8, H), ids)


def counted_of_what_is_written(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    some = ids * 1
    some.clamp_(max=1)
    seen = torch.arange(S) < torch.sum(some, -1)[:, None]
    scores = product(q, k) + some[:, None, None, :]
    return scores.masked_fill(~seen[:, None, None], -INF).softmax(-1) @ v


def bias_used_again(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    some = ids * 1
    some.clamp_(max=1)
    bias = some[:, None, None, :] * 2.0
    return (product(q, k) + bias).softmax(-1) @ v, bias


def bias_of_a_leaf_used_again(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    some = torch.nn.functional.linear(ids * 1.0, torch.eye(S))
    some += 1.0
    bias = some[:, None, None, :] * 2.0
    return (product(q, k) + bias).softmax(-1) @ v, bias


def bias_of_two_layers(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    some = ids * 1
    some.clamp_(max=1)
    bias = some[:, None, None, :] * 2.0
    out = (product(q, k) + bias).softmax(-1) @ v
    return (product(out, k) + bias).softmax(-1).square() @ v


@pytest.mark.parametrize(
    "program", [counted_of_what_is_written, bias_used_again, bias_of_a_leaf_used_again, bias_of_two_layers]
)
def test_what_is_left_still_finds_it_written(program) -> None:
    check(program, *tensors(B, H, S, D), torch.tensor([[3] * 4 + [0] * 8, [2] * 3 + [0] * 9]), backward=False)


def mask_of_ones(like: Tensor) -> Tensor:
    return torch.ones_like(like).triu_(1).bool()


def mask_by_slices(like: Tensor) -> Tensor:
    mask = torch.zeros_like(like)
    mask[:, 3:] = 1
    mask[:3, 5:] = 0
    return mask != 0


def mask_of_buckets(like: Tensor) -> Tensor:
    at = torch.arange(len(like))
    apart = at - at[:, None]
    buckets = torch.zeros_like(apart)
    buckets += (apart > 0).long() * 4
    return torch.linspace(-1, 1, 8)[buckets] > 0


@pytest.mark.parametrize("mask", [mask_of_ones, mask_by_slices, mask_of_buckets])
@pytest.mark.parametrize(
    "filled", every_day([torch.Tensor.masked_fill_, lambda s, m, value: s.add_(m * value)], torch.Tensor.masked_fill_)
)
def test_scores_written_with_a_mask_that_was_written(mask, filled) -> None:
    """The mask lies in memory of its own, and what writes the scores is a statement."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = product(q, k)
        filled(scores, mask(scores[0, 0]), -1e9)
        return scores.softmax(-1) @ v

    assert_fused(program, *tensors(B, H, S, D))


def less_the_largest(scores: Tensor) -> object:
    scores -= scores.detach().amax(-1, keepdim=True)
    return None


def looked_at(scores: Tensor) -> object:
    spread = scores.detach()[:, 1:].std()
    scores.masked_fill_(torch.arange(S) > 3, -1e9)
    return spread


def looked_at_before_and_after(scores: Tensor) -> object:
    before = scores.detach()
    scores.mul_(0.3)
    return before, before.view(-1).sum(), scores.data.unbind(0)[0]


@pytest.mark.parametrize("seen", [less_the_largest, looked_at, looked_at_before_and_after])
def test_written_scores_read_without_a_gradient(seen) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[object, Tensor]:
        scores = product(q, k)
        extra = seen(scores)
        return extra, scores.softmax(-1) @ v

    assert_fused(program, *tensors(B, H, S, D))


WITHOUT_GRADIENT: dict[str, Callable[[Tensor], Any]] = {
    "a part": lambda s: s.detach()[:, 1:].mul_(0.3),
    "one of several": lambda s: s.data.unbind(0)[0].add_(1),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_scores_written_without_a_gradient(name: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = product(q, k)
        scores.mul_(2)
        WITHOUT_GRADIENT[name](scores)
        return scores.softmax(-1) @ v

    assert_refused(program, *tensors(B, H, S, D), reason="written through an alias that is detached from its gradient")
