"""Apart: lookups for each query and key, done once before the attention.

Within a kernel, a lookup is a slow read of each element in each of the four passes of a training step over the scores,
while a stored bias is read sixteen bytes at a time. The program as written stores the same bias. The lookup is an
operator of its own, so layers with the same table share one call, and their gradients are added up at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_fuse.emit.builder import tensor
from attn_fuse.emit.operators import operator
from attn_fuse.expression.nodes import Expr, Gather, Input, children, remade
from attn_fuse.kernels.once import once
from attn_fuse.kernels.score.dependence import dependences, planes, varying
from attn_fuse.kernels.score.program import Block, ScoreProgram, evaluate, of_table
from attn_fuse.kernels.score.write import ScoreCall

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

# Part of the operator's name, by which torch's caches on disk know it. Raise it when its results or the text of score
# programs change.
VERSION = 1
# The max bytes of a stored bias.
_MOST = 256 << 20
# Rows are padded to a multiple of this number of elements, so kernels read them by vectors.
_ROW = 16


def lookups_apart(call: Call, score: ScoreCall) -> ScoreCall:
    """`score` with stored biases, of at most 256 MiB on this call, in place of lookups for each query and key."""
    a, facts = call.attention, call.facts
    sizes = [call.size(a.length(axes)) for axes in (a.axes.batch, a.head_axes, a.axes.query, a.axes.key)]
    shapes = [tensor(x).shape for x in score.inputs]
    depends = dependences(score.program.score, [*map(varying, shapes)])
    inputs = list(score.inputs)
    made: dict[int, Expr] = {}

    def apart(expr: Expr) -> Expr:
        if id(expr) not in made:
            made[id(expr)] = found if (found := stored(expr)) is not None else within(expr)
        return made[id(expr)]

    def within(expr: Expr) -> Expr:
        return expr if isinstance(expr, Gather) else remade(expr, [apart(part) for part in children(expr)])

    def stored(expr: Expr) -> Expr | None:
        if not isinstance(expr, Gather) or not {"i", "j"} <= depends[id(expr)]:
            return None
        elements = math.prod(planes(expr, shapes, facts.batch, facts.heads)) * facts.q_len * facts.kv_len
        if facts.q_len == 1 or elements * tensor(score.inputs[expr.leaf]).dtype.itemsize > _MOST:
            return None
        part = score.part(ScoreProgram(expr))
        inputs.append(call.node_once(look_up, part.inputs, part.numbers, *sizes, part.program.dumps()))
        return Input(len(inputs) - 1)

    looked_up = replace(score.program, score=apart(score.program.score))
    if len(inputs) == len(score.inputs):
        return score
    return ScoreCall(looked_up, inputs, score.numbers).part(looked_up)


def _look_up(
    inputs: Sequence[Tensor], numbers: Sequence[int], batch: int, heads: int, q_len: int, kv_len: int, program: str
) -> Tensor:
    """The result of the program's score, a `Gather`: [B|1, H|1, Lq, Lk] in the table's dtype, with padded rows."""
    node = _gather(program)
    block = Block(batch, heads, (0, q_len), (0, kv_len), inputs[node.leaf].device, torch.float32)
    found = evaluate(node, None, inputs, numbers, block, {})
    return _fake(inputs, numbers, batch, heads, q_len, kv_len, program).copy_(found)


def _fake(
    inputs: Sequence[Tensor], numbers: Sequence[int], batch: int, heads: int, q_len: int, kv_len: int, program: str
) -> Tensor:
    node = _gather(program)
    leading = planes(node, [x.shape for x in inputs], batch, heads)
    padded = (kv_len + _ROW - 1) // _ROW * _ROW
    strides = leading[1] * q_len * padded, q_len * padded, padded, 1
    table = inputs[node.leaf]
    return torch.empty_strided((*leading, q_len, kv_len), strides, dtype=table.dtype, device=table.device)


def _add_up(
    gradient: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int], batch: int, heads: int, program: str
) -> Tensor:
    """The gradient of the table, in its dtype; each entry sums all its readers in float32, in one order."""
    node, (*leading, q_len, kv_len) = _gather(program), gradient.shape

    def of_rows(first: int, last: int, dtype: torch.dtype) -> Tensor:
        return gradient[:, :, first:last].to(dtype)

    sizes = batch, heads, q_len, kv_len
    return of_table(node, of_rows, math.prod(leading) * kv_len, inputs, numbers, sizes).to(inputs[node.leaf].dtype)


def _fake_add_up(gradient: Tensor, inputs: Sequence[Tensor], *rest: Any) -> Tensor:
    return torch.empty_like(inputs[_gather(rest[-1]).leaf], memory_format=torch.contiguous_format)


def _gather(program: str) -> Gather:
    node = ScoreProgram.loads(program).score
    assert isinstance(node, Gather), program
    return node


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, numbers, ctx.batch, ctx.heads, _, _, ctx.program = inputs
    ctx.numbers = list(numbers)
    ctx.save_for_backward(*tensors)


@once
def _gradients(ctx: Any, saved: Sequence[Tensor], gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    leaf = _gather(ctx.program).leaf
    found: list[Tensor | None] = [None] * len(saved)
    if ctx.needs_input_grad[0][leaf]:
        found[leaf] = add_up(gradient, saved, ctx.numbers, ctx.batch, ctx.heads, ctx.program)
    # torch wants [] as the gradient of an empty list.
    return found, None if ctx.numbers else [], None, None, None, None, None


_ARGUMENTS = "Tensor[] inputs, SymInt[] numbers, SymInt batch, SymInt heads"
add_up = operator(
    f"lookup_v{VERSION}_backward(Tensor gradient, {_ARGUMENTS}, str program) -> Tensor", _add_up, _fake_add_up
)
look_up = operator(
    f"lookup_v{VERSION}({_ARGUMENTS}, SymInt q_len, SymInt kv_len, str program) -> Tensor",
    _look_up,
    _fake,
    _gradients,
    _save,
)
