"""Grad modes, autocast, vmap, derivatives and checkpoints around an attention, and how its result lies in memory.

Whatever is made of a program, it is right: the judge is the program in float64.
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

from attn_fuse.report import collecting
from tests.harness import assert_fused, check, compiled, every_day, tensors
from tests.harness import assert_right as right

PICKS = ("fused", "fastest")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v


def causal(size: int) -> Tensor:
    return torch.ones(size, size).triu(1).bool()


# ---- grad modes


def _plain(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 0.5


def _laid_out(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.transpose(1, 2).contiguous().transpose(1, 2)


def _switched(x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        return x + 0.25


def _partly(x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x * 0.5
        with torch.enable_grad():
            return x * 2


def _detached(x: Tensor) -> Tensor:
    return (x * 0.5).detach()


def _data(x: Tensor) -> Tensor:
    return (x * 0.5).data


WITHOUT = [_plain, _laid_out, _switched, _partly, _detached, _data]
EVERY_DAY = ((_plain, "key"), (_partly, "scores"), (_data, "value"))


@pytest.mark.parametrize(
    ("without", "place"),
    [
        pytest.param(f, place, marks=() if (f, place) in EVERY_DAY else pytest.mark.thorough)
        for f in WITHOUT
        for place in ("query", "key", "value", "scores", "bias", "weights", "out")
    ],
)
def test_what_has_no_gradient(without, place) -> None:
    def at(here: str, x: Tensor) -> Tensor:
        return without(x) if here == place else x

    def program(q, k, v, b):
        q, k, v = at("query", q), at("key", k), at("value", v)
        s = at("scores", q @ k.mT) + at("bias", b)
        return at("out", at("weights", s.softmax(-1)) @ v)

    right(program, *tensors(2, 3, 13, 8), torch.randn(2, 3, 13, 13))


@pytest.mark.thorough
@pytest.mark.parametrize("picks", PICKS)
def test_a_key_transposed_and_scaled_without_gradient(picks) -> None:
    def program(q, k, v):
        with torch.no_grad():
            k = k.transpose(-2, -1) * 0.3
        return (q @ k).softmax(-1) @ v

    right(program, *tensors(2, 3, 13, 8), picks=(picks,))


def test_a_mask_made_without_gradient() -> None:
    def program(q, k, v):
        with torch.no_grad():
            mask = torch.triu(torch.ones(13, 13), 1) * -1e9
        return (q @ k.mT * 0.3 + mask).softmax(-1) @ v

    right(program, *tensors(2, 3, 13, 8))


@pytest.mark.parametrize("place", ["product", "softmax", "values", "between"])
def test_autocast_switched_on_and_off_on_the_way(place) -> None:
    def within(here: str) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=(here == place) != (place == "between"))

    def program(q, k, v):
        with within("product"):
            s = q @ k.mT * 0.3
        with within("softmax"):
            p = s.softmax(-1).to(v.dtype)
        with within("values"):
            return (p @ v).float()

    right(program, *tensors(2, 3, 13, 8))


# ---- torch.func


@pytest.mark.thorough
@pytest.mark.parametrize("picks", PICKS)
@pytest.mark.parametrize("levels", [1, 2])
def test_a_vmap_with_no_grad_inside(levels, picks) -> None:
    def one(q, k, v):
        with torch.no_grad():
            k = k * 0.5
        return (q @ k.mT).softmax(-1) @ v

    def program(q, k, v):
        return torch.vmap(one)(q, k, v) if levels == 1 else torch.vmap(torch.vmap(one))(q, k, v)

    right(program, *tensors(2, 3, 13, 8), picks=(picks,))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "*=": lambda x: operator.imul(x, 2),
    "sub_": lambda x: x.sub_(1),
}


@pytest.mark.parametrize("name", every_day(WRITES, "*="))
def test_a_vmap_with_writes_inside(name: str) -> None:
    write = WRITES[name]

    def one(q, k, v):
        q = q + 1
        s = q @ k.T
        write(q)
        write(s)
        return s.softmax(-1) @ v + q

    # What the product saved for its gradient is written.
    right(torch.vmap(torch.vmap(one)), *tensors(2, 3, 13, 8), backward=False)


@pytest.mark.parametrize("picks", every_day(PICKS, "fused"))
def test_a_counter_inside_a_vmap(picks) -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            def one(x: Tensor) -> Tensor:
                self.calls.add_(1)
                return x * 2

            return torch.vmap(one)(x)

    from attn_fuse.backend import attn_fuse as backend

    model = Counts()
    run = torch.compile(model, backend=backend, options={"inner_backend": "aot_eager", "pick": picks})
    for _ in range(2):
        run(torch.randn(2, 3))
    assert model.calls == 2


LEVELS: dict[str, Callable[..., Any]] = {
    "grad": lambda f: torch.func.grad(lambda q, k, v: f(q, k, v).square().sum()),
    "vmap_of_grad": lambda f: torch.vmap(torch.func.grad(lambda q, k, v: f(q, k, v).square().sum())),
    "grad_of_vmap": lambda f: torch.func.grad(lambda q, k, v: torch.vmap(f)(q, k, v).square().sum()),
    "vjp": lambda f: lambda q, k, v: torch.func.vjp(lambda q: f(q, k, v), q)[1](v)[0],
    "jvp": lambda f: lambda q, k, v: torch.func.jvp(lambda q: f(q, k, v), (q,), (k,))[1],
    "jacrev": lambda f: torch.func.jacrev(lambda q, k, v: f(q, k, v).sum((0, 2, 3))),
    "jacfwd": lambda f: torch.func.jacfwd(lambda q, k, v: f(q, k, v).sum((0, 2, 3))),
    "vmap": torch.vmap,
    "vmap_over_another": lambda f: torch.vmap(f, (0, None, 0)),
    "vmap_out": lambda f: torch.vmap(f, out_dims=1),
    "grad_and_value": lambda f: torch.func.grad_and_value(lambda q, k, v: f(q, k, v).square().sum()),
}


@pytest.mark.parametrize(
    "backward", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["inference", "training"]
)
@pytest.mark.parametrize("kernels", [None, pytest.param(["chunked"], marks=pytest.mark.thorough)])
@pytest.mark.parametrize("level", every_day(LEVELS, "vmap_of_grad", "jvp", "vmap"))
def test_derivatives_and_vmaps_inside(level, kernels, backward) -> None:
    def inside(q, k, v):
        return (q @ k.mT * 0.3).masked_fill(causal(7), -torch.inf).softmax(-1) @ v

    q, k, v = tensors(2, 3, 7, 4)
    if level == "vmap_over_another":
        k = k[0]
    right(LEVELS[level](inside), q, k, v, kernels=kernels, backward=backward)


def test_a_vmap_of_a_gradient_without_any_attention() -> None:
    right(torch.vmap(torch.func.grad(lambda x: x.square().sum())), torch.randn(2, 4, 8), picks=PICKS)
    right(torch.vmap(lambda p: (p * torch.tensor([1.0] * 8)).sum()), torch.randn(2, 8), picks=PICKS)


# ---- gradients


@pytest.mark.thorough
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_the_gradient_of_a_table_that_is_read_by_buckets(mode, logarithm, segments, permuted) -> None:
    def program(q, k, v, table, ids):
        with torch.set_grad_enabled(mode == "grad"):
            p = torch.arange(q.shape[2], dtype=torch.int32)
            r = p[None, :] - p[:, None]
            bucket, r = (r > 0).to(torch.int32) * 8, r.abs()
            large = torch.full_like(r, 6)
            if logarithm:
                large = (4 + (torch.log(r.float() / 4) / math.log(16) * 4).to(torch.int32)).clamp(max=7)
            bucket += torch.where(r < 4, r, large)
            if segments:
                other = ids[:, :, None] * 2 + ids[:, None, :] + 16
                bucket = torch.where(ids[:, None, :] == ids[:, :, None], bucket[None], other)
        bias = F.embedding(bucket, table)
        bias = bias.permute(0, 3, 1, 2) if bias.dim() == 4 else bias.permute(2, 0, 1)
        return (q @ k.mT / 4 + (bias.contiguous() if permuted else bias)).softmax(-1) @ v

    ids = (torch.arange(28) > 9).int()[None].repeat(2, 1)
    right(program, *tensors(2, 4, 28, 16), torch.randn(32, 4), ids)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("shift", [-1e4, 1e5, -1e5])
def test_scores_that_a_number_takes_far_from_zero(shift, sink, dtype) -> None:
    """Weights that a backward computes again from the logarithm of their sum would have four digits."""

    def program(q, k, v):
        scores = q @ k.mT * 0.3 * 0 + shift
        if sink:
            scores = torch.cat([scores, torch.full_like(scores[..., :1], max(-6e4, min(shift, 6e4)))], -1)
        return scores.softmax(-1)[..., : k.shape[-2]] @ v

    right(program, *tensors(1, 2, 7, 8, dtype=dtype))


# ---- how results lie in memory


@pytest.mark.thorough
@pytest.mark.parametrize(
    "seen",
    [
        lambda out: out.reshape(2, 4, 7, 8).view(8, 7, 8),
        lambda out: out.flatten(0, 0).view(8, 7, 8),
        lambda out: out.contiguous().view(8, 7, 8),
        lambda out: out.reshape(2, 4, 7, 2, 4).view(8, 7, 2, 4),
        lambda out: out.transpose(1, 2).reshape(2, 7, 32).view(14, 32),
        lambda out: out.transpose(1, 2).reshape(2, 7, 4, 8).transpose(1, 2).view(2, 4, 7, 8),
        lambda out: out.reshape(2, 4, 7, 8),
        lambda out: out.mT.reshape(2, 4, 8, 7),
        lambda out: out.to(out.dtype).view(-1),
        lambda out: out.expand(2, 4, 7, 8).view(8, 56),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_what_sees_how_the_output_lies_in_memory(seen, turned) -> None:
    q, k, v = tensors(2, 7, 4, 8) if turned else tensors(2, 4, 7, 8)
    if turned:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    right(lambda q, k, v: seen((q @ k.mT).softmax(-1) @ v), q, k, v)


def test_the_product_of_transposed_operands_lies_as_it_did() -> None:
    right(lambda q, k, v: (v.mT @ (q @ k.mT).softmax(-1).mT).mT.reshape(2, 4, 7, 8), *tensors(2, 4, 7, 8))


# ---- dropout where it does something else


def of_weights(of: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[..., Any]:
    return lambda q, k, v: of((q @ k.mT / 4).softmax(-1), k, v)


def dropped(p: Tensor, rate: float = 0.5) -> Tensor:
    return torch.dropout(p, rate, True)


def used_twice(p: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = dropped(p)
    return p @ v, p @ k


def returned(p: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = dropped(p)
    return p @ v, p


OUTSIDE = "the weights after dropout are also used outside the attention"
DROPOUTS: dict[str, tuple[Callable[..., Any], str]] = {
    "before softmax": (lambda q, k, v: dropped(q @ k.mT / 4).softmax(-1) @ v,
        "the scores pass through dropout before the softmax"),
    "twice": (of_weights(lambda p, k, v: dropped(dropped(p)) @ v), "the weights pass through dropout twice"),
    "of all": (of_weights(lambda p, k, v: dropped(p, 1.0) @ v), "dropout with probability 1"),
    "returned": (of_weights(returned), OUTSIDE),
    "used twice": (of_weights(used_twice), OUTSIDE),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPOUTS)
def test_refused_with_dropout(name: str) -> None:
    program, reason = DROPOUTS[name]
    q, k, v = tensors(2, 3, 7, 16)
    torch.manual_seed(3)
    with collecting() as graphs:
        got = compiled(program)(q, k, v)
    torch.manual_seed(3)
    torch.testing.assert_close(got, program(q, k, v))
    sites = [site for graph in graphs for site in graph.sites]
    assert sites and all(not site.fused and reason in site.blocker.reason for site in sites)


@torch.no_grad()
def test_detached_weights_where_nothing_has_a_gradient() -> None:
    program = of_weights(lambda p, k, v: p.detach() @ v)
    assert_fused(program, *tensors(2, 4, 12, 8), inner="aot_eager", backward=False)


@pytest.mark.thorough
def test_a_vmap_that_cannot_be_written_out_leaves_no_level_open() -> None:
    factor = torch.tensor(0.35)

    def program(q, k, v):
        return torch.vmap(torch.vmap(lambda q, k, v: (q @ k.mT * factor.item()).softmax(-1) @ v))(q, k, v)

    check(program, *tensors(2, 4, 12, 8), inner="aot_eager", dynamic=True)
