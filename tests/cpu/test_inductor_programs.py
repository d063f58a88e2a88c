"""What PyTorch's own tests of its attention patterns run, written anew: every program right, fused, and none crashing.

Each runs in training and frozen (grad mode on, nothing requires a gradient), with static and dynamic sizes, and within
both kinds of activation checkpoint. The look-alikes that PyTorch refuses are right, too, fused or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_fuse.report import collecting
from tests.harness import Outcome, _widened, assert_as_good_as_eager, check, compiled, tensors

pytestmark = pytest.mark.thorough

SHAPE = (4, 2, 16, 32)


def turned(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.permute(0, 2, 1, 3) for x in xs)


def dropped(x: Tensor, p: float) -> Tensor:
    return F.dropout(x, p=p, training=p > 0)


def divided(q, k, v, p=0.0):
    return dropped(torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(k.shape[-1])).softmax(dim=-1), p).matmul(v)


def multiplied(q, k, v, p=0.0):
    return dropped(torch.matmul(q, k.transpose(-2, -1)).mul(0.4).softmax(dim=-1), p).matmul(v)


def triangle(q: Tensor, k: Tensor) -> Tensor:
    """A Boolean tensor whose hidden places are filled with minus infinity, and so with True: it hides nothing."""
    mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(diagonal=0)
    return mask.masked_fill(torch.logical_not(mask), -math.inf)


def plus_booleans(q, k, v, p=0.0):
    s = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + triangle(q, k)
    return torch.dropout(torch.softmax(s, dim=-1), p, p > 0) @ v


def plus_false(q, k, v):
    mask = torch.zeros(q.size(-2), k.size(-2), dtype=torch.bool).bool()
    return torch.softmax((q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))) + mask, dim=-1) @ v


def wide_softmax(q, k, v, p=0.0):
    dtype = q.dtype
    q, k, v = turned(q, k, v)
    s = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).to(torch.promote_types(dtype, torch.float32))
    return torch.dropout(torch.softmax(s, dim=-1), p, p > 0).to(dtype) @ v


def wide_softmax_of_scaled_query(q, k, v, p=0.0):
    dtype = q.dtype
    q, k, v = turned(q, k, v)
    q = q / math.sqrt(q.size(-1))
    s = (q @ k.transpose(-2, -1)).to(torch.promote_types(dtype, torch.float32))
    return torch.dropout(torch.softmax(s, dim=-1), p, p > 0).to(dtype) @ v


def turned_and_divided(q, k, v, p=0.0):
    return divided(*turned(q, k, v), p)


def dropout_of_the_output(q, k, v, p=0.0):
    return dropped(turned_and_divided(q, k, v, 0.0), p)


def cloned_weights(q, k, v):
    return torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(k.shape[-1])).softmax(dim=-1).clone().matmul(v)


def turned_and_cloned(q, k, v):
    return cloned_weights(*turned(q, k, v))


def batched(q, k, v, p=0.0):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(dropped(torch.bmm(q, k.transpose(1, 2)).softmax(dim=-1), p), v)


def turned_plus_booleans(q, k, v, p=0.0):
    q, k, v = turned(q, k, v)
    s = torch.matmul(q, k.transpose(-2, -1)).div(3.0) + triangle(q, k)
    return dropped(s.softmax(dim=-1), p).to(dtype=q.dtype).matmul(v)


def padded(q, k, v, p=0.0, scaled_query=False):
    q, k, v = turned(q, k, v)
    mask = torch.ones(q.size(0), k.size(-2), dtype=torch.bool).tril(diagonal=0)
    q = q.div(3.0) if scaled_query else q
    s = torch.matmul(q, k.transpose(-2, -1))
    s = s if scaled_query else s / 3.0
    mask = (mask == 0).view(q.size(0), 1, 1, k.size(-2)).expand_as(s)
    fill = torch.full((), -math.inf, dtype=q.dtype)
    return torch.matmul(dropped(F.softmax(s.masked_fill(mask, fill), dim=-1), p), v)


def padded_with_scaled_query(q, k, v, p=0.0):
    return padded(q, k, v, p, True)


def chosen_by_a_mask(q, k, v, p=0.0):
    q, k, v = turned(q, k, v)
    s = torch.matmul(q, k.permute(0, 1, 3, 2)).div(torch.full((), math.sqrt(v.size(-1)), dtype=q.dtype))
    mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    s = torch.where(mask, s, torch.full((), torch.finfo(q.dtype).min, dtype=q.dtype))
    return dropped(s.softmax(dim=-1), p).matmul(v), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)


def chosen_by_a_mask_and_padded(q, k, v, p=0.0):
    s = torch.matmul(q, k.permute(0, 1, 3, 2)).div(torch.full([], 4.0, dtype=q.dtype))
    mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    s = torch.where(mask, s, torch.full((), torch.finfo(q.dtype).min, dtype=q.dtype))
    s = s + torch.where(torch.arange(k.size(-2)) < 14, 0.0, -1e4).to(q.dtype)
    return dropped(s.softmax(dim=-1).type(v.dtype), p).matmul(v)


def t5(q, k, v, p=0.0):
    dtype = q.dtype
    q, k, v = turned(q, k, v)
    s = torch.matmul(q, k.permute(0, 1, 3, 2))
    s += torch.arange(k.size(-2)).to(dtype) * 0.1
    p_ = s.type_as(q).to(torch.promote_types(dtype, torch.float32)).softmax(dim=-1).type_as(q)
    return dropped(p_, p).matmul(v)


def t5_with_key_and_value(q, k, v, p=0.0):
    return t5(q, k, v, p), *turned(k, v)


def t5_without_a_mask(q, k, v, p=0.0):
    dtype = q.dtype
    q, k, v = turned(q, k, v)
    s = torch.matmul(q, k.permute(0, 1, 3, 2)).to(torch.promote_types(dtype, torch.float32)).type_as(q)
    return dropped(s.softmax(dim=-1).type_as(q), p).matmul(v), k, v


def mbart(q, k, v):
    b, h, n, d = q.shape
    mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None].to(q.dtype)
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    s = torch.bmm(q, k.transpose(1, 2)).view(b, h, n, -1) + mask
    return torch.bmm(F.softmax(s.view(b * h, n, -1), dim=-1), v).view(b, h, n, d)


def visformer(q, k, v, p=0.0):
    q, k, v = (x.transpose(-2, -1).contiguous().transpose(-2, -1) for x in (q, k, v))
    return multiplied(q, k, v, p)


def safe_softmax_of_split_scales(q, k, v):
    q, k, v = turned(q, k, v)
    q, k = torch.ops.aten.mul.Scalar(q, 0.6), torch.ops.aten.mul.Scalar(k.transpose(-2, -1), 0.6)
    return torch.ops.aten._safe_softmax(q @ k, -1) @ v


def safe_softmax_with_a_mask(q, k, v):
    q, k, v = turned(q, k, v)
    mask = torch.where(torch.arange(k.size(-2)) < 14, 0.0, -math.inf).to(q.dtype)
    q, k = torch.ops.aten.mul.Scalar(q, 0.6), torch.ops.aten.mul.Scalar(k.transpose(-2, -1), 0.6)
    return torch.ops.aten._safe_softmax(q @ k + mask, -1) @ v


WITH_DROPOUT = (
    divided, multiplied, plus_booleans, wide_softmax, wide_softmax_of_scaled_query, turned_and_divided,
    dropout_of_the_output, batched, turned_plus_booleans, padded, padded_with_scaled_query, chosen_by_a_mask,
    chosen_by_a_mask_and_padded, t5, t5_with_key_and_value, t5_without_a_mask, visformer,
)  # fmt: skip
PROGRAMS = (
    *WITH_DROPOUT, plus_false, cloned_weights, turned_and_cloned, mbart, safe_softmax_of_split_scales,
    safe_softmax_with_a_mask,
)  # fmt: skip
WRAPPED: dict[str, Callable[[Any], Any]] = {
    "alone": lambda program: program,
    "checkpoint": lambda program: lambda *args: checkpoint(program, *args, use_reentrant=False),
    "reentrant": lambda program: lambda *args: checkpoint(program, *args, use_reentrant=True),
}


def _all_fused(outcome: Outcome) -> None:
    assert outcome.sites and all(site.fused for site in outcome.sites), str(outcome)


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_in_training(program, wrapped) -> None:
    written = program if wrapped != "reentrant" else _reentrant_for_grad(program)
    run = WRAPPED[wrapped](program) if wrapped == "checkpoint" else written
    _all_fused(check(run, *tensors(*SHAPE), inner="aot_eager"))


def _reentrant_for_grad(program: Any) -> Any:
    """Eagerly, torch.autograd.grad does not go through this kind; compiled, both kinds are one."""

    def run(*args: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(program, *args, use_reentrant=True)
        return program(*args)

    return run


@pytest.mark.parametrize("pick", ["fused", "fastest"])
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_frozen(program, wrapped, pick) -> None:
    """Grad mode is on and nothing requires a gradient."""
    run, args = WRAPPED[wrapped](program), tensors(*SHAPE)
    with collecting() as graphs:
        found = compiled(run, "aot_eager", pick=pick)(*args)
    outputs = found if isinstance(found, tuple) else (found,)
    named = {f"output {n}": out for n, out in enumerate(outputs)}
    named |= {f"argument {n} afterwards": a for n, a in enumerate(args)}
    assert_as_good_as_eager(named, run, args, backward=False)
    sites = Outcome({}, tuple(graphs)).sites
    assert sites and not any(site.blocker and "the check" in site.blocker.reason for site in sites)
    assert all(site.fused for site in sites) or pick == "fastest" or wrapped != "alone", sites


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("wrapped", ["alone", "checkpoint"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_dynamic(program, wrapped, backward) -> None:
    more = [tensors(2, 2, 16, 32), tensors(4, 2, 19, 32)]
    # A default would be a number of the call's, and whether dropout is active then too.
    run = WRAPPED[wrapped](program if program not in WITH_DROPOUT else lambda q, k, v: program(q, k, v, 0.0))
    _all_fused(check(run, *tensors(*SHAPE), dynamic=True, inner="aot_eager", backward=backward, more=more))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_in_half_precision(program, dtype) -> None:
    _all_fused(check(program, *tensors(*SHAPE, dtype=dtype), inner="aot_eager"))


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("p", [1e-11, 0.4])
@pytest.mark.parametrize("program", WITH_DROPOUT, ids=lambda f: f.__name__)
def test_with_dropout(program, p, wrapped) -> None:
    """The check compares it without dropout; where nearly nothing is dropped it is also as good as without."""
    args = [x.requires_grad_() for x in tensors(*SHAPE)]
    run = WRAPPED[wrapped](lambda q, k, v: program(q, k, v, p))
    with collecting() as graphs:
        found = compiled(run, "aot_eager")(*args)
    found = found[0] if isinstance(found, tuple) else found
    found.square().sum().backward()
    _all_fused(Outcome({}, tuple(graphs)))
    assert all(x.grad is not None and x.grad.isfinite().all() for x in args)
    if p < 0.1:
        wide = program(*map(_widened, args))
        wide = wide[0] if isinstance(wide, tuple) else wide
        torch.testing.assert_close(found.double(), wide, rtol=1e-4, atol=1e-4)


# ---- look-alikes


def weights_returned(q, k, v):
    weights = torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(k.shape[-1])).softmax(dim=-1)
    return weights.matmul(v), weights


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("program", "factor"),
    [
        (lambda q, k, v, f: torch.matmul(q, k.transpose(-2, -1)).div(f.detach()).softmax(dim=-1).matmul(v), "tensor"),
        (lambda q, k, v, f: torch.matmul(q, k.transpose(-2, -1)).mul(f.detach()).softmax(dim=-1).matmul(v), "tensor"),
        (lambda q, k, v, f: torch.softmax(q @ k.transpose(-2, -1) / 2.0 + f, dim=-1) @ v, "whole numbers"),
        (lambda q, k, v, f: torch.softmax(q @ k.transpose(-2, -1) / 2.0 + f, dim=-1) @ v, "number"),
        (lambda q, k, v, f: weights_returned(q, k, v), "number"),
    ],
    ids=["divided", "multiplied", "whole numbers", "number", "weights returned"],
)
def test_what_pytorch_refuses(program, factor, dynamic, backward) -> None:
    made = {
        "tensor": torch.rand(4, 1, 1) + 0.5,
        "whole numbers": torch.randn(2, 4, 4, 4).to(torch.int),
        "number": 2.0,
    }[factor]
    check(program, *tensors(2, 4, 4, 4), made, inner="aot_eager", dynamic=dynamic, backward=backward)


def test_one_query_over_insignificant_strides() -> None:
    def rotated(x: Tensor, angle: Tensor) -> Tensor:
        angle = torch.cat([angle, angle], 2).unsqueeze(1)
        return x * angle.cos() + torch.cat([-x[..., 16:], x[..., :16]], 3) * angle.sin()

    def program(q, k, v, angle, mask):
        mask = F.pad(mask, (0, 7))[..., :1].expand(1, 32, 1, 1)
        return torch.softmax(rotated(q, angle) @ rotated(k, angle).mT + mask, -1) @ v

    q, k, v = (torch.randn(1, 1, 32, 32).permute(0, 2, 1, 3) for _ in range(3))
    check(program, q, k, v, torch.randn(1, 1, 16), torch.zeros(1, 1, 1, 1), inner="aot_eager")
