"""Attention over a packed tensor: query, key and value are read in place, their gradients written in place.

    flash_packed(packed, views, sizes, inputs, numbers, seed, of_queries, of_keys, dropout_p, program, centred)
        -> out, row_max, row_sum, centre
    flash_packed_backward(grad_out, ..., dropout_p, out, row_max, row_sum, centre, program, wanted) -> dpacked, dinputs
    hopper_packed(packed, views, sizes, inputs, numbers, program, scale) -> out, lse
    hopper_packed_backward(grad_out, packed, views, sizes, out, lse, inputs, ...) -> dpacked

views, sizes: what `packed_operands` gives. The other arguments are those of `flash_op` and `hopper_op`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.once import once
from attn_fuse.kernels.triton import hopper_op

# torch's caches on disk know an operator by its name and see no change in what it computes: raise it with each.
VERSION = 3

_FLASH = f"triton_flash_packed_v{VERSION}"
_FLASH_BACKWARD = f"triton_flash_packed_v{VERSION}_backward"
_HOPPER = f"triton_flash_hopper_packed_v{VERSION}"
_HOPPER_BACKWARD = f"triton_flash_hopper_packed_v{VERSION}_backward"


def operands(packed: Tensor, views: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, H, Lq, D], key [B, Hkv, Lk, D] and value [B, Hkv, Lk, Dv], as views of `packed`."""
    dims, strides = packed.dim(), packed.stride()

    def place(steps: Sequence[int]) -> int:
        return sum(step * stride for step, stride in zip(steps, strides, strict=True))

    found = []
    for number, shape in enumerate(_shapes(sizes)):
        start = number * 5 * dims
        offset, *steps = (place(views[first : first + dims]) for first in range(start, start + 5 * dims, dims))
        found.append(packed.as_strided(shape, steps, packed.storage_offset() + offset))
    query, key, value = found
    return query, key, value


def _shapes(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim = sizes
    return [
        (batch, heads, q_len, head_dim),
        (batch, kv_heads, kv_len, head_dim),
        (batch, kv_heads, kv_len, value_dim),
    ]


def gradient_of(packed: Tensor, sizes: Sequence[int]) -> Tensor:
    """What the gradients are written into: 0 where neither of the three is."""
    covered = sum(map(math.prod, _shapes(sizes))) == packed.numel()
    return packed.new_empty(packed.shape) if covered else packed.new_zeros(packed.shape)


def _run_flash(packed: Tensor, views: Sequence[int], sizes: Sequence[int], *rest: Any) -> tuple[Tensor, ...]:
    from attn_fuse.kernels.triton.flash import attend

    return attend(*operands(packed, views, sizes), *rest)


def _run_flash_backward(
    grad_out: Tensor, packed: Tensor, views: Sequence[int], sizes: Sequence[int], *rest: Any
) -> tuple[Tensor, list[Tensor]]:
    from attn_fuse.kernels.triton.flash import attend_backward

    dpacked = gradient_of(packed, sizes)
    into = operands(dpacked, views, sizes)
    *_, dinputs = attend_backward(*(grad_out, *operands(packed, views, sizes), *rest, into))
    return dpacked, dinputs


def _fake_flash(packed: Tensor, views: Sequence[int], sizes: Sequence[int], *rest: Any) -> tuple[Tensor, ...]:
    batch, heads, q_len, value_dim = sizes[0], sizes[1], sizes[3], sizes[6]
    rows = packed.new_empty(batch, heads, q_len, dtype=torch.float32)
    centre = packed.new_empty(batch, heads, 1, value_dim) if rest[-1] else packed.new_empty(0)
    return hopper_op.heads_inside(packed, (batch, heads, q_len, value_dim)), rows, torch.empty_like(rows), centre


def _fake_flash_backward(
    grad_out: Tensor, packed: Tensor, views: Any, sizes: Any, inputs: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, list[Tensor]]:
    wanted = rest[-1]
    shapes = [x.shape if wanted[n] and x.is_floating_point() else (0,) for n, x in enumerate(inputs)]
    return packed.new_empty(packed.shape), [x.new_empty(shape) for x, shape in zip(inputs, shapes, strict=True)]


def _save_flash(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    packed, views, sizes, tensors, numbers, seed, of_queries, of_keys, ctx.dropout_p, ctx.program, _ = inputs
    ctx.views, ctx.sizes, ctx.numbers = list(views), list(sizes), list(numbers)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(packed, seed, of_queries, of_keys, *output, *tensors)


@once
def _flash_gradients(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    packed, seed, of_queries, of_keys, out, row_max, row_sum, centre, *tensors = saved
    wanted = [bool(need) for need in ctx.needs_input_grad[3]]
    dpacked, dinputs = flash_packed_backward(
        grad_out, packed, ctx.views, ctx.sizes, tensors, ctx.numbers, seed, of_queries, of_keys, ctx.dropout_p, out,
        row_max, row_sum, centre, ctx.program, wanted,
    )  # fmt: skip
    found = [d if need else None for d, need in zip(dinputs, wanted, strict=True)]
    return (dpacked, *_NO_PLACE, found, None if ctx.numbers else [], None, None, None, None, None, None)


# torch takes an empty list for the gradients of an empty list, and None for no gradient of anything else; views and
# sizes are never empty.
_NO_PLACE = (None, None)


def _run_hopper(packed: Tensor, views: Sequence[int], sizes: Sequence[int], *score: Any) -> tuple[Tensor, Tensor]:
    return hopper_op.forward(operands(packed, views, sizes), *score)


def _run_hopper_backward(
    grad_out: Tensor, packed: Tensor, views: Sequence[int], sizes: Sequence[int], out: Tensor, lse: Tensor, *score: Any
) -> Tensor:
    dpacked = gradient_of(packed, sizes)
    into = operands(dpacked, views, sizes)
    hopper_op.backward(grad_out, operands(packed, views, sizes), into, out, lse, *score)
    return dpacked


def _fake_hopper(packed: Tensor, views: Sequence[int], sizes: Sequence[int], *_: Any) -> tuple[Tensor, Tensor]:
    return hopper_op.fake_results(packed, sizes[6], (sizes[0], sizes[1], sizes[3]))


def _fake_hopper_backward(grad_out: Tensor, packed: Tensor, *_: Any) -> Tensor:
    return packed.new_empty(packed.shape)


def _save_hopper(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed, views, sizes, tensors, numbers, *ctx.rest = inputs
    ctx.views, ctx.sizes, ctx.numbers = list(views), list(sizes), list(numbers)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(packed, *output, *tensors)


@once
def _hopper_gradients(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    packed, out, lse, *tensors = saved
    found = hopper_packed_backward(grad_out, packed, ctx.views, ctx.sizes, out, lse, tensors, ctx.numbers, *ctx.rest)
    return (found, *_NO_PLACE, [None] * len(tensors), None if ctx.numbers else [], None, None)


_LIBRARY = torch.library.Library("attn_fuse", "FRAGMENT")
_PLACED = "Tensor packed, SymInt[] views, SymInt[] sizes"
_FLASH_ARGUMENTS = (
    f"{_PLACED}, Tensor[] inputs, SymInt[] numbers, Tensor? seed, Tensor? of_queries, Tensor? of_keys, float dropout_p"
)
_LIBRARY.define(
    f"{_FLASH}({_FLASH_ARGUMENTS}, str program, bool centred) -> "
    "(Tensor out, Tensor row_max, Tensor row_sum, Tensor centre)",
    tags=hopper_op.TAGS,
)
_LIBRARY.define(
    f"{_FLASH_BACKWARD}(Tensor grad_out, {_FLASH_ARGUMENTS}, Tensor out, Tensor row_max, Tensor row_sum, "
    "Tensor centre, str program, bool[] wanted) -> (Tensor dpacked, Tensor[] dinputs)",
    tags=hopper_op.TAGS,
)
_LIBRARY.define(f"{_HOPPER}({_PLACED}, {hopper_op.SCORE}) -> (Tensor out, Tensor lse)", tags=hopper_op.TAGS)
_LIBRARY.define(
    f"{_HOPPER_BACKWARD}(Tensor grad_out, {_PLACED}, Tensor out, Tensor lse, {hopper_op.SCORE}) -> Tensor",
    tags=hopper_op.TAGS,
)
flash_packed, flash_packed_backward = hopper_op.register(
    _LIBRARY, (_FLASH, _FLASH_BACKWARD), (_run_flash, _run_flash_backward), (_fake_flash, _fake_flash_backward),
    (_flash_gradients, _save_flash),
)  # fmt: skip
hopper_packed, hopper_packed_backward = hopper_op.register(
    _LIBRARY, (_HOPPER, _HOPPER_BACKWARD), (_run_hopper, _run_hopper_backward), (_fake_hopper, _fake_hopper_backward),
    (_hopper_gradients, _save_hopper),
)  # fmt: skip
