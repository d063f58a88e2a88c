"""The Hopper kernels as operators that torch.compile, autograd and the caches take as they are.

    hopper(query, key, value, inputs, numbers, program, scale) -> out, lse
    hopper_backward(grad_out, query, key, value, out, lse, inputs, ...) -> dquery, dkey, dvalue

program: the score function; scale: greater than 0 where it does no more than scale, and hide what is out of its bounds.
The inputs have no gradient, and neither has lse. `out` lies in memory as [B, L, H, D], which is how it is used next. On
the CPU they run only under Triton's interpreter. Triton is imported by the first call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.once import once

# torch's caches on disk know an operator by its name and see no change in what it computes: raise it with each.
VERSION = 2

_FORWARD = f"triton_flash_hopper_v{VERSION}"
_BACKWARD = f"triton_flash_hopper_v{VERSION}_backward"

SCORE = "Tensor[] inputs, SymInt[] numbers, str program, float scale"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def heads_inside(like: Tensor, shape: Sequence[Any]) -> Tensor:
    """An empty [batch, heads, length, dim] that lies in memory as [batch, length, heads, dim]."""
    batch, heads, length, dim = shape
    return like.new_empty(batch, length, heads, dim).transpose(1, 2)


def forward(
    operands: Sequence[Tensor],
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    program: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out and lse of query, key and value."""
    from attn_fuse.kernels.triton import hopper_launch as launch

    query, key, value = operands
    out = heads_inside(query, (*query.shape[:3], value.shape[3]))
    score = launch.score_of(program, inputs, numbers, scale)
    return out, launch.attend(query, key, value, score, out)


def backward(
    grad_out: Tensor,
    operands: Sequence[Tensor],
    into: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    program: str,
    scale: float,
) -> None:
    """Writes the gradients of query, key and value into three tensors."""
    from attn_fuse.kernels.triton import hopper_launch as launch

    query, key, value = operands
    score = launch.score_of(program, inputs, numbers, scale)
    launch.attend_backward(grad_out, query, key, value, out, lse, score, into)


def fake_results(query: Tensor, value_dim: Any, sizes: Sequence[Any]) -> tuple[Tensor, Tensor]:
    batch, heads, q_len = sizes
    lse = query.new_empty(batch, heads, (q_len + 3) // 4 * 4, dtype=torch.float32)
    return heads_inside(query, (batch, heads, q_len, value_dim)), lse


def register(
    library: torch.library.Library, names: tuple[str, str], runs: Sequence[Any], fakes: Sequence[Any], autograd: Any
) -> tuple[Any, Any]:
    """Implements a forward and a backward operator, defined already; for the CPU where Triton is interpreted."""
    for name, run, fake in zip(names, runs, fakes, strict=True):
        for device in ("CUDA", "CPU") if os.environ.get("TRITON_INTERPRET") == "1" else ("CUDA",):
            library.impl(name, run, device)
        torch.library.register_fake(f"attn_fuse::{name}", fake, lib=library)
    gradients, save = autograd
    torch.library.register_autograd(f"attn_fuse::{names[0]}", gradients, setup_context=save, lib=library)
    return tuple(getattr(torch.ops.attn_fuse, name).default for name in names)


def _run(query: Tensor, key: Tensor, value: Tensor, *score: Any) -> tuple[Tensor, Tensor]:
    return forward((query, key, value), *score)


def _run_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *score: Any
) -> tuple[Tensor, ...]:
    into = tuple(heads_inside(x, x.shape) for x in (query, key, value))
    backward(grad_out, (query, key, value), into, out, lse, *score)
    return into


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fake_results(query, value.shape[3], query.shape[:3])


def _fake_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(heads_inside(x, x.shape) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, tensors, numbers, *ctx.rest = inputs
    ctx.numbers = list(numbers)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, *tensors)


@once
def _gradients(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    found = hopper_backward(grad_out, *saved[:5], saved[5:], ctx.numbers, *ctx.rest)
    # torch takes an empty list for the gradients of a list, and None for no gradient of anything else.
    return (*found, [None] * len(saved[5:]), None if ctx.numbers else [], None, None)


_LIBRARY = torch.library.Library("attn_fuse", "FRAGMENT")
_OPERANDS = "Tensor query, Tensor key, Tensor value"
_LIBRARY.define(f"{_FORWARD}({_OPERANDS}, {SCORE}) -> (Tensor out, Tensor lse)", tags=TAGS)
_LIBRARY.define(
    f"{_BACKWARD}(Tensor grad_out, {_OPERANDS}, Tensor out, Tensor lse, {SCORE}) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue)",
    tags=TAGS,
)
hopper, hopper_backward = register(
    _LIBRARY, (_FORWARD, _BACKWARD), (_run, _run_backward), (_fake, _fake_backward), (_gradients, _save)
)
