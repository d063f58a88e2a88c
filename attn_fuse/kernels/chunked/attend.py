"""Memory-efficient attention in plain torch operations, over blocks of queries and keys.

The forward is an online softmax (Rabe and Staats, arXiv 2112.05682); the backward computes the scores of each block
again (FlashAttention-2, arXiv 2307.08691). Both run on any device and take any score function, as a `ScoreProgram`.
Memory is linear in q_len and kv_len: only an input that is as large as the scores, and its gradient, are quadratic.

A softmax over equal huge scores, as a finite fill makes them, must give the mean of the values. Rounding would lose
log(sum) from max + log(sum), so we keep max and sum apart.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Gather, children
from attn_fuse.kernels.chunked.diagonals import DiagonalBuffer
from attn_fuse.kernels.chunked.plan import Part, Plan, planned
from attn_fuse.kernels.chunked.portions import Portion
from attn_fuse.kernels.chunked.reader import Reader, diagonal
from attn_fuse.kernels.chunked.steps import shift_of
from attn_fuse.kernels.chunked.workers import together
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.gradient import pull_back
from attn_fuse.kernels.score.lookup import add_up, head_dimension
from attn_fuse.kernels.score.program import accumulate, evaluate


def attend(given: Operands, centred: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, row_max, row_sum, centre, share); out is softmax over the final scores, times the factor, times value.

    float16 and bfloat16 are computed in float32. Where the processor multiplies bfloat16, all products but the scores
    take bfloat16: we round the weights, and in the backward the gradients of the scores, as FlashAttention does, and
    the products themselves, before they are added up in float32.
    centred: whether to attend over values minus their centre.

    out: [B, H, Lq, Dv] in query's dtype. row_max, row_sum: the max score of each query and the sum of exp(score - max),
    the sink among the scores, [B, H, Lq] in the compute dtype. A query whose scores are all -inf gives 0, or NaN by
    the program's `empty_is_nan`; without a sink its max is -inf and its sum 0.
    NaN and +inf come out as NaN. centre, share: empty unless `centred`; else `centre_of` the values and each output's
    share of it, [B, H, Lq], while out is over values minus the centre, in the compute dtype.

    Raises ValueError for shapes, dtypes, dropout or a program that do not fit.
    """
    query, value = given.query, given.value
    with torch.no_grad(), _no_autocast(query.device):
        plan = planned(given, centred=centred)
        batch, heads, q_len, _ = query.shape
        out = query.new_empty(batch, heads, q_len, value.shape[-1], dtype=plan.dtype if centred else query.dtype)
        row_max = query.new_empty(batch, heads, q_len, dtype=plan.dtype)
        row_sum = torch.empty_like(row_max)
        met = [torch.empty_like(row_max)] if plan.steps.shares else []

        def work(portion: Portion) -> None:
            reader = Reader(plan)
            for part in plan.parts(portion):
                for start, stop in plan.query_blocks(portion):
                    rows = part.rows(start, stop)
                    block_out, *columns = _attend_rows(plan, reader, part, start, stop)
                    out[rows].copy_(block_out)
                    for whole, column in zip((row_max, row_sum, *met), columns, strict=True):
                        whole[rows].copy_(column.squeeze(-1))

        together(work, plan.portions())
        if plan.centre is None:
            return out, row_max, row_sum, value.new_empty(0), value.new_empty(0)
        return out, row_max, row_sum, plan.centre, met[0] if met else (row_sum != 0).to(row_max.dtype)


def _attend_rows(plan: Plan, reader: Reader, part: Part, start: int, stop: int) -> tuple[Tensor, ...]:
    """(out, max, sum) of queries [start, stop) of the part, and their shares where the steps give any."""
    query = plan.rows_of(plan.given.query, part, start, stop).to(plan.dtype)
    whole = plan.block(part, (start, stop), (0, 1))
    row_max = torch.full((*whole.shape[:3], 1), -torch.inf, dtype=plan.dtype, device=whole.device)
    sink = plan.steps.program.sink
    if sink is not None:
        row_max = (
            evaluate(sink, None, plan.inputs, plan.given.numbers, whole).to(plan.dtype).expand(row_max.shape).clone()
        )
    row_sum = (row_max - shift_of(row_max)).exp_()
    met = [torch.zeros_like(row_sum)] if plan.steps.shares else []
    out = query.new_zeros(*query.shape[:2], plan.given.value.shape[-1])
    for keys in plan.key_blocks(part, start, stop):
        read = reader.read(plan.block(part, (start, stop), keys))
        key, value = part.key[:, slice(*keys)], part.value[:, slice(*keys)]
        plan.run("forward", [query, key, value, out, row_max, row_sum, *met, *read])
    out = out.view(*whole.shape[:3], -1)
    # Over no keys at all the product of no weights is 0, whatever their softmax is.
    if plan.steps.program.empty_is_nan and plan.given.value.shape[-2]:
        out, *met = (x / row_sum for x in (out, *met))
    else:
        out, *met = (torch.where(row_sum == 0, 0.0, x / row_sum) for x in (out, *met))
    return out, row_max, row_sum, *met


def attend_backward(
    given: Operands, made: Sequence[Tensor], grad_out: Tensor, grad_share: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of query, key, value and of each input, contiguous, each in its own dtype.

    made: what `attend` gave. grad_share: None where no gradient flows through share.
    wanted: whether an input needs a gradient; one that does not, or is not floating-point, gets an empty tensor.
    Sums are in at least the compute dtype and have one order. Raises ValueError as `attend` does.
    """
    query, key, value = given.query, given.key, given.value
    out, row_max, row_sum, centre, share = made
    with torch.no_grad(), _no_autocast(query.device):
        plan = planned(given, wanted, centre if centre.dim() == 4 else None)
        of_shares = [share, torch.zeros_like(share) if grad_share is None else grad_share] if plan.steps.shares else []
        dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        summed, every = plan.sums(), plan.portions()
        slices = max((portion.slices for portion in every), default=1)
        # Of each slice of the queries: sums of several are rounded only once.
        found = [x.new_empty(slices, *x.shape, dtype=x.dtype if slices == 1 else plan.dtype) for x in (key, value)]

        def work(task: tuple[Portion, dict[int, Tensor]]) -> None:
            portion, sums = task
            reader = Reader(plan)
            for part in plan.parts(portion):
                dkeys, dvalues = (x.new_zeros(x.shape, dtype=plan.dtype) for x in (part.key, part.value))
                for start, stop in plan.query_blocks(portion):
                    rows = part.rows(start, stop)
                    grad_rows, block_sum = grad_out[rows].to(plan.dtype), row_sum[rows].unsqueeze(-1)
                    # With weights w, factors f, dropout m: sum_j w_j f_j m_j (grad_out . value_j) = grad_out . out.
                    delta = (grad_rows * out[rows]).sum(-1, keepdim=True)
                    # Where a fully masked row is NaN, so are its weights, and the gradients that they give.
                    none = math.nan if plan.steps.program.empty_is_nan else 0.0
                    over_sum = torch.where(block_sum == 0, none, 1 / block_sum)
                    columns = [shift_of(row_max[rows].unsqueeze(-1)), over_sum, delta]
                    columns += [x[rows].unsqueeze(-1) for x in of_shares]
                    span = (start, stop)
                    of_rows = _rows_backward(plan, reader, part, span, columns, grad_rows, dkeys, dvalues, sums)
                    dquery[rows].copy_(of_rows)
                    _sink_backward(plan, part, span, columns, sums)
                for whole, x in zip(found, (dkeys, dvalues), strict=True):
                    into = whole[portion.slice][part.keys]
                    into.copy_(x.unflatten(0, into.shape[:2]))

        together(work, [(portion, {n: sum_.of(portion) for n, sum_ in summed.items()}) for portion in every])
        sums = {n: sum_.added_up() for n, sum_ in summed.items()}
        _hoisted_backward(plan, sums)
        dkey, dvalue = (x[0] if slices == 1 else x.sum(0) for x in found)
    dinputs = [sums[n].to(x.dtype) if n in sums else x.new_empty(0) for n, x in enumerate(given.inputs)]
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), dinputs


def _rows_backward(
    plan: Plan,
    reader: Reader,
    part: Part,
    span: tuple[int, int],
    columns: Sequence[Tensor],
    grad_rows: Tensor,
    dkeys: Tensor,
    dvalues: Tensor,
    sums: dict[int, Tensor],
) -> Tensor:
    """The gradient of the queries of `span`; adds those of keys, values and inputs to dkeys, dvalues and sums.

    columns: shift, 1 / sum, grad_out . out, and the shares and their gradient where there are any, [B, H, rows, 1].
    """
    query, grad = (
        plan.rows_of(plan.given.query, part, *span),
        grad_rows.reshape(len(part.key), -1, plan.given.value.shape[-1]),
    )
    query, grad = query.to(plan.dtype), grad.to(plan.multiplied).contiguous()
    dquery = torch.zeros_like(query)
    for keys in plan.key_blocks(part, *span):
        block, of_keys = plan.block(part, span, keys), (slice(None), slice(*keys))
        read = reader.read(block)
        value_of = {id(node): value for node, value in zip(plan.steps.leaves, read, strict=False)}
        into = [reader.gradient_of(node, block, value_of[id(node)]) for node in plan.steps.into]
        memory = [x.block if isinstance(x, DiagonalBuffer) else x for x in into]
        tensors = [query, part.key[of_keys], part.value[of_keys], grad, dquery, dkeys[of_keys], dvalues[of_keys]]
        found = iter(plan.run("backward", [*tensors, *columns, *memory, *read]))
        for node in plan.steps.wanted:
            accumulate(node, next(found), sums[node.leaf], tuple(itertools.islice(found, len(children(node)))), block)
        for leaf, gradient in zip(plan.steps.into, into, strict=True):
            if isinstance(gradient, DiagonalBuffer):
                along = diagonal(plan, sums[leaf.leaf], block)
                along.add_(gradient.sums().sum_to_size(along.shape))
            elif isinstance(leaf, Gather):
                add_up(head_dimension(leaf), gradient, sums[leaf.leaf], reader.places(leaf, block), block.origin[1])
    return dquery.view(*grad_rows.shape[:3], -1)


def _sink_backward(
    plan: Plan, part: Part, span: tuple[int, int], columns: Sequence[Tensor], sums: dict[int, Tensor]
) -> None:
    expr = plan.steps.program.sink
    if expr is None:
        return
    block = plan.block(part, span, (0, 1))
    shift, over_sum, delta, *of_shares = columns
    if of_shares:
        delta = delta + of_shares[0] * of_shares[1]
    sink = evaluate(expr, None, plan.inputs, plan.given.numbers, block).to(plan.dtype).expand(delta.shape)
    gradient = (sink - shift).exp_().mul_(over_sum).mul_(delta).neg_()
    pull_back(expr, gradient, plan.inputs, plan.given.numbers, block, sums)


def _hoisted_backward(plan: Plan, sums: dict[int, Tensor]) -> None:
    """Add the gradients that flow through the hoisted parts to those of the inputs that the parts read."""
    batch, heads, q_len, kv_len = plan.given.sizes
    for number, part in enumerate(plan.hoisted.parts, plan.hoisted.first):
        if number in sums:
            block = part.block(q_len, kv_len, batch, heads, plan.given.query.device, plan.dtype)
            pull_back(part.expr, sums[number], plan.inputs, plan.given.numbers, block, sums)


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Autocast reaches into an operator and would round the float32 products.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
