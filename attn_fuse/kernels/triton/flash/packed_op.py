"""Operators over a packed tensor: query, key and value are read in place, their gradients written in place.

    flash_packed(packed, views, sizes, inputs, numbers, seed, of_queries, of_keys, dropout_p, program, centred)
        -> out, row_max, row_sum, centre
    flash_packed_backward(grad_out, ..., dropout_p, out, row_max, row_sum, centre, program, wanted) -> dpacked, dinputs

views, sizes: what `packed_operands` gives. The other arguments are those of `op`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.emit.operators import gradients_of_inputs
from attn_fuse.kernels.triton.flash.op import heads_inside, operators


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


def _run(packed: Tensor, views: Sequence[int], sizes: Sequence[int], *rest: Any) -> tuple[Tensor, ...]:
    from attn_fuse.kernels.triton.flash.launch import attend

    return attend(*operands(packed, views, sizes), *rest)


def _run_backward(
    grad_out: Tensor, packed: Tensor, views: Sequence[int], sizes: Sequence[int], *rest: Any
) -> tuple[Tensor, list[Tensor]]:
    from attn_fuse.kernels.triton.flash.launch import attend_backward

    dpacked, of = gradient_of(packed, sizes), operands(packed, views, sizes)
    *_, dinputs = attend_backward(grad_out, *of, *rest, into=operands(dpacked, views, sizes))
    return dpacked, dinputs


flash_packed, flash_packed_backward = operators(
    "triton_flash_packed",
    "Tensor packed, SymInt[] views, SymInt[] sizes",
    "Tensor dpacked",
    _run,
    _run_backward,
    _fake,
    _fake_backward,
)
