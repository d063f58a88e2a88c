"""`chunked.attend` as operators for torch.compile, autograd and torch's caches.

    chunked(query, key, value, inputs, numbers, seed, dropout_p, program, centred)
        -> out, row_max, row_sum, centre, share
    chunked_backward(grad_out, grad_share, ..., out, row_max, row_sum, centre, share, program, wanted)
        -> dquery, dkey, dvalue, dinputs

Gradients flow through out and, if the weights may not sum to 1, through share. The log-sum-exp of a query's scores is
row_max + log(row_sum).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.emit.operators import gradients_of_inputs, operator
from attn_fuse.kernels.chunked.attend import attend, attend_backward
from attn_fuse.kernels.chunked.plan import shares
from attn_fuse.kernels.once import once
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.program import ScoreProgram

# Part of the operator's name, by which torch's caches on disk know it. Raise it when its results or the text of score
# programs change.
VERSION = 12


def _run(*args: Any) -> tuple[Tensor, ...]:
    return attend(Operands(*args[:8]), args[8])


def _run_backward(grad_out: Tensor, grad_share: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    return attend_backward(Operands(*(*rest[:7], rest[12])), rest[7:12], grad_out, grad_share, rest[13])


def _fake(
    query: Tensor, key: Tensor, value: Tensor, inputs: Any, numbers: Any, seed: Any, p: Any, program: str,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = functools.reduce(torch.promote_types, (key.dtype, value.dtype, torch.float32), query.dtype)
    rows = query.new_empty(query.shape[:3], dtype=dtype)
    centre = value.new_empty(*query.shape[:2], 1, value.shape[3]) if centred else value.new_empty(0)
    share = torch.empty_like(rows) if centred else value.new_empty(0)
    out = query.new_empty(*query.shape[:3], value.shape[3], dtype=dtype if centred else query.dtype)
    return out, rows, torch.empty_like(rows), centre, share


def _fake_backward(
    grad_out: Tensor, grad_share: Any, query: Tensor, key: Tensor, value: Tensor, inputs: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dquery, dkey, dvalue = (x.new_empty(x.shape) for x in (query, key, value))
    return dquery, dkey, dvalue, gradients_of_inputs(inputs, rest[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, tensors, numbers, seed, ctx.dropout_p, ctx.program, centred = inputs
    ctx.numbers = list(numbers)
    ctx.shares = centred and shares(ScoreProgram.loads(ctx.program), seed is not None and ctx.dropout_p > 0)
    ctx.mark_non_differentiable(*output[1 : 4 if ctx.shares else 5])
    ctx.save_for_backward(query, key, value, seed, *output, *tensors)


@once
def _gradients(ctx: Any, saved: Sequence[Tensor], grad_out: Tensor, *rest: Tensor) -> tuple[Any, ...]:
    query, key, value, seed, out, row_max, row_sum, centre, share, *tensors = saved
    wanted = [bool(need) for need in ctx.needs_input_grad[3]]
    dquery, dkey, dvalue, dinputs = chunked_backward(
        grad_out, rest[-1] if ctx.shares else None, query, key, value, tensors, ctx.numbers, seed, ctx.dropout_p,
        out, row_max, row_sum, centre, share, ctx.program, wanted,
    )  # fmt: skip
    dinputs = [d if need else None for d, need in zip(dinputs, wanted, strict=True)]
    # torch wants [] as the gradient of an empty list, and None for anything else without a gradient.
    return (dquery, dkey, dvalue, dinputs, None if ctx.numbers else [], None, None, None, None)


_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor[] inputs, SymInt[] numbers, Tensor? seed, float dropout_p"
chunked_backward = operator(
    f"chunked_v{VERSION}_backward(Tensor grad_out, Tensor? grad_share, {_ARGUMENTS}, Tensor out, Tensor row_max, "
    "Tensor row_sum, Tensor centre, Tensor share, str program, bool[] wanted) -> "
    "(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor[] dinputs)",
    _run_backward,
    _fake_backward,
)
chunked = operator(
    f"chunked_v{VERSION}({_ARGUMENTS}, str program, bool centred) -> "
    "(Tensor out, Tensor row_max, Tensor row_sum, Tensor centre, Tensor share)",
    _run,
    _fake,
    _gradients,
    _save,
)
