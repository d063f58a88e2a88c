"""The flash kernels as operators that torch.compile, autograd and the caches take as they are.

    triton_flash(query, key, value, inputs, numbers, seed, of_queries, of_keys, dropout_p, program, centred)
        -> out, row_max, row_sum, centre
    triton_flash_backward(grad_out, ..., dropout_p, out, row_max, row_sum, centre, program, wanted)
        -> dquery, dkey, dvalue, dinputs

Triton is imported with the first call. Under its interpreter (TRITON_INTERPRET=1) they also run on CPU.
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
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_FORWARD = f"triton_flash_v{VERSION}"
_BACKWARD = f"triton_flash_v{VERSION}_backward"


def _attend(*args: Any) -> Any:
    from attn_fuse.kernels.triton.flash import attend

    return attend(*args)


def _attend_backward(*args: Any) -> Any:
    from attn_fuse.kernels.triton.flash import attend_backward

    return attend_backward(*args)


def _laid_out(like: Tensor, width: Any) -> Tensor:
    batch, heads, length, _ = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, centred = query.new_empty(query.shape[:3], dtype=torch.float32), rest[-1]
    centre = value.new_empty(*query.shape[:2], 1, value.shape[3]) if centred else value.new_empty(0)
    return _laid_out(query, value.shape[3]), rows, torch.empty_like(rows), centre


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, inputs: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    wanted = rest[-1]
    sizes = [x.shape if wanted[n] and x.is_floating_point() else (0,) for n, x in enumerate(inputs)]
    dinputs = [x.new_empty(size) for x, size in zip(inputs, sizes, strict=True)]
    dquery, dkey, dvalue = (_laid_out(x, x.shape[3]) for x in (query, key, value))
    return dquery, dkey, dvalue, dinputs


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    query, key, value, tensors, numbers, seed, of_queries, of_keys, ctx.dropout_p, ctx.program, _ = inputs
    ctx.numbers = list(numbers)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(query, key, value, seed, of_queries, of_keys, *output, *tensors)


@once
def _gradients(ctx: Any, saved: Sequence[Tensor], grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    query, key, value, seed, of_queries, of_keys, out, row_max, row_sum, centre, *tensors = saved
    wanted = [bool(need) for need in ctx.needs_input_grad[3]]
    dquery, dkey, dvalue, dinputs = triton_flash_backward(
        grad_out, query, key, value, tensors, ctx.numbers, seed, of_queries, of_keys, ctx.dropout_p, out, row_max,
        row_sum, centre, ctx.program, wanted,
    )  # fmt: skip
    dinputs = [d if need else None for d, need in zip(dinputs, wanted, strict=True)]
    # torch takes an empty list for the gradients of a list, and None for no gradient of anything else.
    return (dquery, dkey, dvalue, dinputs, None if ctx.numbers else [], None, None, None, None, None, None)


_LIBRARY = torch.library.Library("attn_fuse", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor[] inputs, SymInt[] numbers, Tensor? seed, Tensor? of_queries, "
    "Tensor? of_keys, float dropout_p"
)
_LIBRARY.define(
    f"{_FORWARD}({_ARGUMENTS}, str program, bool centred) -> "
    "(Tensor out, Tensor row_max, Tensor row_sum, Tensor centre)",
    tags=_TAGS,
)
_LIBRARY.define(
    f"{_BACKWARD}(Tensor grad_out, {_ARGUMENTS}, Tensor out, Tensor row_max, Tensor row_sum, Tensor centre, "
    "str program, bool[] wanted) -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor[] dinputs)",
    tags=_TAGS,
)
for _device in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
    _LIBRARY.impl(_FORWARD, _attend, _device)
    _LIBRARY.impl(_BACKWARD, _attend_backward, _device)
torch.library.register_fake(f"attn_fuse::{_FORWARD}", _fake, lib=_LIBRARY)
torch.library.register_fake(f"attn_fuse::{_BACKWARD}", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd(f"attn_fuse::{_FORWARD}", _gradients, setup_context=_save, lib=_LIBRARY)

triton_flash = getattr(torch.ops.attn_fuse, _FORWARD).default
triton_flash_backward = getattr(torch.ops.attn_fuse, _BACKWARD).default
