"""Operators over a packed tensor: query, key and value are read in place, their gradients written in place.

    flash_packed(packed, views, sizes, inputs, numbers, seed, of_queries, of_keys, dropout_p, program, centred)
        -> out, row_max, row_sum, centre
    flash_packed_backward(grad_out, ..., dropout_p, out, row_max, row_sum, centre, program, wanted) -> dpacked, dinputs
    hopper_packed, hopper_packed_backward        # the same, read through tensor descriptors

views, sizes: what `packed_operands` gives. The other arguments are those of `op`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.emit.operators import gradients_of_inputs, operator
from attn_fuse.kernels.once import once
from attn_fuse.kernels.triton import OPERATOR_DEVICES
from attn_fuse.kernels.triton.flash.op import heads_inside

# torch's caches on disk know an operator by its name only: raise this with every change in what it computes, or in
# the text of a score program.
VERSION = 6


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
    """An uninitialised tensor for the gradient of `packed`, or zeros where query, key and value do not cover it."""
    covered = sum(map(math.prod, _shapes(sizes))) == packed.numel()
    return packed.new_empty(packed.shape) if covered else packed.new_zeros(packed.shape)


def _fake(packed: Tensor, views: Sequence[int], sizes: Sequence[int], *rest: Any) -> tuple[Tensor, ...]:
    batch, heads, q_len, value_dim = sizes[0], sizes[1], sizes[3], sizes[6]
    rows = packed.new_empty(batch, heads, q_len, dtype=torch.float32)
    centre = packed.new_empty(batch, heads, 1, value_dim) if rest[-1] else packed.new_empty(0)
    return heads_inside(packed, (batch, heads, q_len, value_dim)), rows, torch.empty_like(rows), centre


def _fake_backward(
    grad_out: Tensor, packed: Tensor, views: Any, sizes: Any, inputs: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, list[Tensor]]:
    return packed.new_empty(packed.shape), gradients_of_inputs(inputs, rest[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    packed, views, sizes, tensors, numbers, seed, of_queries, of_keys, ctx.dropout_p, ctx.program, _ = inputs
    ctx.views, ctx.sizes, ctx.numbers = list(views), list(sizes), list(numbers)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(packed, seed, of_queries, of_keys, *output, *tensors)


def _operators(name: str, descriptors: bool) -> tuple[Any, Any]:
    """The forward and the backward operator. descriptors: whether they read through descriptors."""

    def run(packed: Tensor, views: Sequence[int], sizes: Sequence[int], *rest: Any) -> tuple[Tensor, ...]:
        from attn_fuse.kernels.triton.flash.launch import attend

        return attend(*operands(packed, views, sizes), *rest, descriptors=descriptors)

    def run_backward(
        grad_out: Tensor, packed: Tensor, views: Sequence[int], sizes: Sequence[int], *rest: Any
    ) -> tuple[Tensor, list[Tensor]]:
        from attn_fuse.kernels.triton.flash.launch import attend_backward

        dpacked = gradient_of(packed, sizes)
        of = operands(packed, views, sizes)
        *_, dinputs = attend_backward(
            grad_out, *of, *rest, into=operands(dpacked, views, sizes), descriptors=descriptors
        )  # fmt: skip
        return dpacked, dinputs

    @once
    def gradients(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
        packed, seed, of_queries, of_keys, out, row_max, row_sum, centre, *tensors = saved
        wanted = [bool(need) for need in ctx.needs_input_grad[3]]
        dpacked, dinputs = backward(
            grad_out, packed, ctx.views, ctx.sizes, tensors, ctx.numbers, seed, of_queries, of_keys, ctx.dropout_p, out,
            row_max, row_sum, centre, ctx.program, wanted,
        )  # fmt: skip
        found = [d if need else None for d, need in zip(dinputs, wanted, strict=True)]
        # torch takes [] for the gradient of an empty list, and None where anything else has no gradient; views and
        # sizes are never empty.
        return (dpacked, None, None, found, None if ctx.numbers else [], None, None, None, None, None, None)

    backward = operator(
        f"{name}_packed_v{VERSION}_backward(Tensor grad_out, {_ARGUMENTS}, Tensor out, Tensor row_max, Tensor row_sum, "
        "Tensor centre, str program, bool[] wanted) -> (Tensor dpacked, Tensor[] dinputs)",
        run_backward,
        _fake_backward,
        devices=OPERATOR_DEVICES,
    )
    forward = operator(
        f"{name}_packed_v{VERSION}({_ARGUMENTS}, str program, bool centred) -> "
        "(Tensor out, Tensor row_max, Tensor row_sum, Tensor centre)",
        run,
        _fake,
        gradients,
        _save,
        devices=OPERATOR_DEVICES,
    )
    return forward, backward


_ARGUMENTS = (
    "Tensor packed, SymInt[] views, SymInt[] sizes, Tensor[] inputs, SymInt[] numbers, Tensor? seed, "
    "Tensor? of_queries, Tensor? of_keys, float dropout_p"
)
flash_packed, flash_packed_backward = _operators("triton_flash", descriptors=False)
hopper_packed, hopper_packed_backward = _operators("triton_flash_hopper", descriptors=True)
