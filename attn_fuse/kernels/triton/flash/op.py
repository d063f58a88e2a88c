"""The flash kernels as operators, which torch.compile, autograd and torch's caches can use.

    triton_flash(query, key, value, inputs, numbers, seed, of_queries, of_keys, dropout_p, program, centred)
        -> out, row_max, row_sum, centre
    triton_flash_backward(grad_out, ..., dropout_p, out, row_max, row_sum, centre, program, wanted)
        -> dquery, dkey, dvalue, dinputs

The first call imports Triton. In its interpreter (TRITON_INTERPRET=1) the operators also run on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.emit.operators import gradients_of_inputs, operator
from attn_fuse.kernels.once import once
from attn_fuse.kernels.operands import Operands, strides_inside
from attn_fuse.kernels.triton import OPERATOR_DEVICES

# Part of the operators' names, by which torch's caches on disk know them. Raise it whenever their results or the text
# of score programs change.
VERSION = 12


def heads_inside(like: Tensor, shape: Sequence[Any]) -> Tensor:
    """An empty tensor [batch, heads, length, dim], in memory [batch, length, heads, dim]."""
    return like.new_empty_strided(shape, strides_inside(shape))


@functools.cache
def _launches() -> Any:
    from attn_fuse.kernels.triton.flash import launch

    return launch


def _run(*args: Any) -> Any:
    return _launches().attend(Operands(*(*args[:6], *args[8:10])), args[6:8], args[10])


def _run_backward(grad_out: Tensor, *rest: Any) -> Any:
    given = Operands(*(*rest[:6], rest[8], rest[13]))
    return _launches().attend_backward(given, rest[6:8], rest[9:13], grad_out, rest[14])


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, centred = query.new_empty(query.shape[:3], dtype=torch.float32), rest[-1]
    centre = value.new_empty(*query.shape[:2], 1, value.shape[3]) if centred else value.new_empty(0)
    return heads_inside(query, (*query.shape[:3], value.shape[3])), rows, torch.empty_like(rows), centre


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, inputs: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dquery, dkey, dvalue = (heads_inside(x, x.shape) for x in (query, key, value))
    return dquery, dkey, dvalue, gradients_of_inputs(inputs, rest[-1])


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
        grad_out, query, key, value, tensors, ctx.numbers, seed, of_queries, of_keys, ctx.dropout_p,
        out, row_max, row_sum, centre, ctx.program, wanted,
    )  # fmt: skip
    dinputs = [d if need else None for d, need in zip(dinputs, wanted, strict=True)]
    # torch wants [] for the gradient of an empty list, and None for every other missing gradient.
    return (dquery, dkey, dvalue, dinputs, None if ctx.numbers else [], None, None, None, None, None, None)


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor[] inputs, SymInt[] numbers, Tensor? seed, Tensor? of_queries, "
    "Tensor? of_keys, float dropout_p"
)
triton_flash_backward = operator(
    f"triton_flash_v{VERSION}_backward(Tensor grad_out, {_ARGUMENTS}, Tensor out, Tensor row_max, Tensor row_sum, "
    "Tensor centre, str program, bool[] wanted) -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor[] dinputs)",
    _run_backward,
    _fake_backward,
    devices=OPERATOR_DEVICES,
)
triton_flash = operator(
    f"triton_flash_v{VERSION}({_ARGUMENTS}, str program, bool centred) -> "
    "(Tensor out, Tensor row_max, Tensor row_sum, Tensor centre)",
    _run,
    _fake,
    _gradients,
    _save,
    devices=OPERATOR_DEVICES,
)
