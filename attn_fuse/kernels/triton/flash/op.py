"""The flash kernels as operators, which torch.compile, autograd and torch's caches take as they are.

    triton_flash(query, key, value, inputs, numbers, seed, of_queries, of_keys, dropout_p, program, centred)
        -> out, row_max, row_sum, centre
    triton_flash_backward(grad_out, ..., dropout_p, out, row_max, row_sum, centre, program, wanted)
        -> dquery, dkey, dvalue, dinputs

`packed_op` has the same over a packed tensor. The first call imports Triton. Under its interpreter (TRITON_INTERPRET=1)
the operators also run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.emit.operators import gradients_of_inputs, operator
from attn_fuse.kernels.once import once
from attn_fuse.kernels.triton import OPERATOR_DEVICES

# torch's caches on disk know an operator by its name only: raise this with every change in what it computes, or in
# the text of a score program.
VERSION = 8


def operators(
    name: str,
    operands: str,
    gradients: str,
    run: Callable[..., Any],
    run_backward: Callable[..., Any],
    fake: Callable[..., Any],
    fake_backward: Callable[..., Any],
) -> tuple[Any, Any]:
    """The forward and the backward operator over the three arguments that hold query, key and value.

    operands: the signatures of these arguments, tensors or lists of integers. gradients: those of the results of
        `run_backward`, one for each tensor among the arguments.
    run, run_backward, fake, fake_backward: as `emit.operators.operator` takes them.
    """
    arguments = (
        f"{operands}, Tensor[] inputs, SymInt[] numbers, Tensor? seed, Tensor? of_queries, Tensor? of_keys, "
        "float dropout_p"
    )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        *own, tensors, numbers, seed, of_queries, of_keys, ctx.dropout_p, ctx.program, _ = inputs
        ctx.own, ctx.numbers = [None if isinstance(x, Tensor) else list(x) for x in own], list(numbers)
        ctx.mark_non_differentiable(*output[1:])
        own_tensors = (x for x in own if isinstance(x, Tensor))
        ctx.save_for_backward(*own_tensors, seed, of_queries, of_keys, *output, *tensors)

    @once
    def gradient(ctx: Any, saved: Sequence[Tensor], grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
        held = iter(saved)
        own = [next(held) if x is None else x for x in ctx.own]
        seed, of_queries, of_keys, *rest = held
        output, tensors = rest[:4], rest[4:]
        wanted = [bool(need) for need in ctx.needs_input_grad[3]]
        *made, dinputs = backward(
            grad_out, *own, tensors, ctx.numbers, seed, of_queries, of_keys, ctx.dropout_p, *output, ctx.program, wanted
        )
        of_tensors = iter(made)
        of_own = (next(of_tensors) if x is None else None for x in ctx.own)
        dinputs = [d if need else None for d, need in zip(dinputs, wanted, strict=True)]
        # torch takes [] for the gradient of an empty list, and None where anything else has no gradient; a list among
        # the operands is never empty.
        return (*of_own, dinputs, None if ctx.numbers else [], None, None, None, None, None, None)

    backward = operator(
        f"{name}_v{VERSION}_backward(Tensor grad_out, {arguments}, Tensor out, Tensor row_max, Tensor row_sum, "
        f"Tensor centre, str program, bool[] wanted) -> ({gradients}, Tensor[] dinputs)",
        run_backward,
        fake_backward,
        devices=OPERATOR_DEVICES,
    )
    forward = operator(
        f"{name}_v{VERSION}({arguments}, str program, bool centred) -> "
        "(Tensor out, Tensor row_max, Tensor row_sum, Tensor centre)",
        run,
        fake,
        gradient,
        save,
        devices=OPERATOR_DEVICES,
    )
    return forward, backward


def heads_inside(like: Tensor, shape: Sequence[Any]) -> Tensor:
    """An empty [batch, heads, length, dim] that lies in memory as [batch, length, heads, dim]."""
    batch, heads, length, dim = shape
    strides = (length * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided((batch, heads, length, dim), strides, dtype=like.dtype, device=like.device)


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, centred = query.new_empty(query.shape[:3], dtype=torch.float32), rest[-1]
    centre = value.new_empty(*query.shape[:2], 1, value.shape[3]) if centred else value.new_empty(0)
    return heads_inside(query, (*query.shape[:3], value.shape[3])), rows, torch.empty_like(rows), centre


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, inputs: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dquery, dkey, dvalue = (heads_inside(x, x.shape) for x in (query, key, value))
    return dquery, dkey, dvalue, gradients_of_inputs(inputs, rest[-1])


def _run(*args: Any) -> Any:
    from attn_fuse.kernels.triton.flash.launch import attend

    return attend(*args)


def _run_backward(*args: Any) -> Any:
    from attn_fuse.kernels.triton.flash.launch import attend_backward

    return attend_backward(*args)


triton_flash, triton_flash_backward = operators(
    "triton_flash",
    "Tensor query, Tensor key, Tensor value",
    "Tensor dquery, Tensor dkey, Tensor dvalue",
    _run,
    _run_backward,
    _fake,
    _fake_backward,
)
