"""Memory-efficient attention in plain torch operations, over blocks of queries and keys.

The forward is an online softmax (Rabe and Staats, arXiv 2112.05682); the backward recomputes the scores of each block
(FlashAttention-2, arXiv 2307.08691). Both run on any device and take any score function, as a `ScoreProgram`.
Memory is linear in q_len and kv_len, apart from inputs as large as the scores and their gradients.

A softmax over equal huge scores, such as a finite fill, must give the mean of the values. Rounding would lose log(sum)
from max + log(sum), so max and sum are kept apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.chunked.plan import planned
from attn_fuse.kernels.chunked.portions import Portion
from attn_fuse.kernels.chunked.worker import Worker
from attn_fuse.kernels.chunked.workers import together
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.gradient import pull_back


def attend(given: Operands, centred: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, row_max, row_sum, centre, share): softmax over the final scores, times the factor, times value.

    out: [B, H, Lq, Dv] in query's dtype. A query whose scores are all -inf gives 0, or NaN by the program's
    `empty_is_nan`. NaN and +inf come out as NaN.
    row_max, row_sum: the max score of each query and the sum of exp(score - max), the sink among the scores,
    [B, H, Lq] in the compute dtype; -inf and 0 for a query whose scores are all -inf.
    centre, share: empty unless `centred`. Then they are `centre_of` the values and each output's share of it,
    [B, H, Lq], and out is over values minus the centre, in the compute dtype.

    float16 and bfloat16 are computed in float32. If the processor multiplies bfloat16, all products but the scores take
    it: the weights and the gradients of the scores are rounded, as in FlashAttention, and so are the products, before
    they are added up in float32.

    Raises ValueError for shapes, dtypes, dropout or a program that do not fit.
    """
    query, value = given.query, given.value
    with torch.no_grad(), _no_autocast(query.device):
        plan = planned(given, centred=centred)
        out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=plan.dtype if centred else query.dtype)
        columns = [query.new_empty(query.shape[:3], dtype=plan.dtype) for _ in range(3 if plan.steps.shares else 2)]
        made = [out, *(x.unsqueeze(-1) for x in columns)]

        def work(portion: Portion) -> None:
            worker = Worker(plan)
            for part in plan.parts(portion):
                for rows in plan.rows(portion, part):
                    for whole, found in zip(made, worker.forward(part, rows), strict=True):
                        whole[rows.index].copy_(found)

        together(work, plan.portions())
        row_max, row_sum, *met = columns
        if plan.centre is None:
            return out, row_max, row_sum, value.new_empty(0), value.new_empty(0)
        return out, row_max, row_sum, plan.centre, met[0] if met else (row_sum != 0).to(row_max.dtype)


def attend_backward(
    given: Operands, made: Sequence[Tensor], grad_out: Tensor, grad_share: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of query, key, value and of each input, contiguous, each in its own dtype.

    made: the results of `attend`. grad_share: None where no gradient flows through share.
    wanted: whether an input needs a gradient; one that does not, or is not floating-point, gets an empty tensor.
    Sums are in at least the compute dtype and have one order. Raises ValueError as `attend` does.
    """
    query, key, value = given.query, given.key, given.value
    out, row_max, row_sum, centre, share = made
    with torch.no_grad(), _no_autocast(query.device):
        plan = planned(given, wanted, centre if centre.dim() == 4 else None)
        of_shares = [share, torch.zeros_like(share) if grad_share is None else grad_share] if plan.steps.shares else []
        columns = [x.unsqueeze(-1) for x in (row_max, row_sum, *of_shares)]
        dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        portions = plan.portions()
        sums, slices = plan.sums(portions), portions[0].slices
        # One of each slice of the queries: sums of several are rounded only once.
        found = [x.new_empty(slices, *x.shape, dtype=x.dtype if slices == 1 else plan.dtype) for x in (key, value)]

        def work(task: tuple[Portion, Mapping[int, Tensor]]) -> None:
            worker, portion = Worker(plan, task[1]), task[0]
            for part in plan.parts(portion):
                of_part = [x.new_zeros(x.shape, dtype=plan.dtype) for x in (part.key, part.value)]
                for rows in plan.rows(portion, part):
                    grad, of_rows = grad_out[rows.index].to(plan.dtype), [x[rows.index] for x in columns]
                    dquery[rows.index].copy_(worker.backward(part, rows, grad, out[rows.index], of_rows, of_part))
                for whole, x in zip(found, of_part, strict=True):
                    into = whole[portion.slice][part.of_keys]
                    into.copy_(x.unflatten(0, into.shape[:2]))

        together(work, list(zip(portions, sums, strict=True)))
        total = sums[0]
        for n, x in total.items():
            for own in {id(of_portion[n]): of_portion[n] for of_portion in sums}.values():
                if own is not x:
                    x.add_(own)
        for n, hoisted in enumerate(plan.hoisted.parts, len(given.inputs)):
            if n in total:
                block = hoisted.block(given, plan.dtype)
                pull_back(hoisted.expr, total[n], plan.inputs, given.numbers, block, total)
        dkey, dvalue = (x[0] if slices == 1 else x.sum(0) for x in found)
    dinputs = [total[n].to(x.dtype) if n in total else x.new_empty(0) for n, x in enumerate(given.inputs)]
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), dinputs


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Autocast reaches into an operator and would round the float32 products.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
