"""Worker: goes through some heads and queries of an attention, block by block, in one thread."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Diagonal, Expr, Gather, Input, Number, Position, children, distinct
from attn_fuse.kernels.chunked.diagonals import DiagonalBuffer, diagonal_buffer
from attn_fuse.kernels.chunked.plan import Part, Plan
from attn_fuse.kernels.chunked.steps import shift_of
from attn_fuse.kernels.score.gradient import pull_back
from attn_fuse.kernels.score.lookup import add_up, head_dimension, look_up, places, rest, rows_of
from attn_fuse.kernels.score.program import Block, Memo, accumulate, evaluate, narrowed, widened

T = TypeVar("T")


class Worker:
    """sums: for a backward, the gradients of the inputs that the worker adds to, by their numbers."""

    def __init__(self, plan: Plan, sums: Mapping[int, Tensor] | None = None) -> None:
        self._plan, self._sums = plan, sums or {}
        # What blocks share: parts of inputs along one side, tables as rows, buffers for sums along diagonals.
        self._kept: dict[object, Any] = {}
        self._buffers: dict[tuple[object, torch.dtype], Tensor] = {}
        # The places of each lookup in the last block.
        self._places: dict[int, tuple[Block, Tensor]] = {}

    def forward(self, part: Part, rows: Block) -> list[Tensor]:
        """[out, max, sum] of the queries of `rows`, and their shares if the steps give any, [B, H, rows, Dv or 1]."""
        plan, steps = self._plan, self._plan.steps
        query = self._together(plan.given.query, part, rows).to(plan.dtype)
        sink = self._sink(rows)
        row_max = query.new_full((*rows.shape[:3], 1), -torch.inf) if sink is None else sink.clone()
        row_sum = (row_max - shift_of(row_max)).exp_()
        out = query.new_zeros(*query.shape[:2], part.value.shape[-1])
        shares = [torch.zeros_like(row_sum)] if steps.shares else []
        for block in plan.key_blocks(rows):
            keys = slice(*block.keys)
            operands = [query, part.key[:, keys], part.value[:, keys], out, row_max, row_sum]
            plan.run("forward", [*operands, *shares, *self._read(block)])
        out = out.view(*rows.shape[:3], -1)
        # Without any key, the product of no weights is 0, whatever their softmax is.
        if steps.program.empty_is_nan and part.value.shape[1]:
            out, *shares = (x / row_sum for x in (out, *shares))
        else:
            out, *shares = (torch.where(row_sum == 0, 0.0, x / row_sum) for x in (out, *shares))
        return [out, row_max, row_sum, *shares]

    def backward(
        self, part: Part, rows: Block, grad: Tensor, out: Tensor, columns: Sequence[Tensor], into: Sequence[Tensor]
    ) -> Tensor:
        """The gradient of the queries of `rows`; adds those of key, value and inputs to `into` and the sums.

        grad, out: [B, H, rows, Dv]. columns: max and sum, and the share and its gradient if there are any,
        [B, H, rows, 1]. into: the gradients of key and value of the part.
        """
        dkey, dvalue = into
        plan, steps = self._plan, self._plan.steps
        row_max, row_sum, *of_shares = columns
        # With weights w, factors f, dropout m: sum_j w_j f_j m_j (grad . value_j) = grad . out.
        delta = (grad * out).sum(-1, keepdim=True)
        # The weights of a fully masked row are NaN if its output is, and so are the gradients that they give.
        over_sum = torch.where(row_sum == 0, math.nan if steps.program.empty_is_nan else 0.0, 1 / row_sum)
        columns = [shift_of(row_max), over_sum, delta, *of_shares]
        query = self._together(plan.given.query, part, rows).to(plan.dtype)
        grad = grad.reshape(len(query), -1, part.value.shape[-1]).to(steps.multiplied).contiguous()
        dquery = torch.zeros_like(query)
        for block in plan.key_blocks(rows):
            keys, read = slice(*block.keys), self._read(block)
            values = {id(node): value for node, value in zip(steps.leaves, read, strict=False)}
            buffers = [self._memory(node, values[id(node)]) for node in steps.into]
            operands = [query, part.key[:, keys], part.value[:, keys], grad, dquery, dkey[:, keys], dvalue[:, keys]]
            memory = [x.block if isinstance(x, DiagonalBuffer) else x for x in buffers]
            found = iter(plan.run("backward", [*operands, *columns, *memory, *read]))
            for node in steps.wanted:
                gradient, indices = next(found), tuple(itertools.islice(found, len(children(node))))
                accumulate(node, gradient, self._sums[node.leaf], indices, block)
            for leaf, place in zip(steps.into, buffers, strict=True):
                self._add(leaf, place, block)
        self._pull_sink_back(rows, columns)
        return dquery.view(*rows.shape[:3], -1)

    def _together(self, x: Tensor, part: Part, rows: Block) -> Tensor:
        """The rows of `x` [B, H, Lq, n], contiguous [key heads, groups * rows, n].

        One product then serves all query heads that share a key head.
        """
        return x[rows.index].reshape(len(part.key), -1, x.shape[-1]).contiguous()

    def _sink(self, rows: Block) -> Tensor | None:
        plan, expr = self._plan, self._plan.steps.program.sink
        if expr is None:
            return None
        found = evaluate(expr, None, plan.inputs, plan.given.numbers, replace(rows, keys=(0, 1)))
        return found.to(plan.dtype).expand(*rows.shape[:3], 1)

    def _pull_sink_back(self, rows: Block, columns: Sequence[Tensor]) -> None:
        plan, expr, sink = self._plan, self._plan.steps.program.sink, self._sink(rows)
        if expr is None or sink is None:
            return
        shift, over_sum, delta, *of_shares = columns
        if of_shares:
            delta = delta + of_shares[0] * of_shares[1]
        gradient = (sink - shift).exp_().mul_(over_sum).mul_(delta).neg_()
        pull_back(expr, gradient, plan.inputs, plan.given.numbers, replace(rows, keys=(0, 1)), self._sums)

    # ---- what a block reads

    def _read(self, block: Block) -> list[Tensor]:
        """The tensors that the steps read on a block: the leaves, the sources, then those of dropout."""
        plan = self._plan
        tensors = [self._leaf(node, block) for node in plan.steps.leaves]
        tensors += [plan.inputs[n] for n in plan.steps.sources]
        return [*tensors, *(self._narrowed(x, block) for x in plan.dropout)]

    def _leaf(self, node: Expr, block: Block) -> Tensor:
        plan = self._plan
        match node:
            case Number(n):
                number = int(plan.given.numbers[n])
                return self._once(id(node), lambda: torch.full(block.one, number, device=block.device))
            case Position(name):
                span = block.spans["bhij".index(name)]
                return self._once((name, span), lambda: evaluate(node, None, (), (), block))
            case Diagonal(n):
                key = (n, block.spans[:2], block.keys[0] - block.queries[1], block.shape)
                along = self._diagonal(plan.inputs[n], block)
                return self._once(key, lambda: _copied(along).squeeze(-2).unfold(-1, block.shape[3], 1))
            case Input(n):
                return self._narrowed(plan.inputs[n], block)
            case Gather():
                return self._looked_up(node, block)
        raise AssertionError("a step has no other leaves")

    def _narrowed(self, source: Tensor, block: Block) -> Tensor:
        """`source` [B|1, H|1, Lq|1, Lk|1] on a block; a side is copied, since each view would be compiled for."""
        if min(source.shape[2:]) > 1:
            part = narrowed(source, block)
            return part if min(part.shape[2:]) > 1 else _copied(part)
        spans = tuple(span for span, n in zip(block.spans, source.shape, strict=True) if n != 1)
        return self._once((id(source), spans), lambda: _copied(narrowed(source, block)))

    def _diagonal(self, values: Tensor, block: Block) -> Tensor:
        """The part of `values` [B|1, H|1, 1, Lq + Lk - 1], one for each j - i, that a block reads, as a view."""
        first = block.keys[0] - block.queries[1] + self._plan.given.sizes[2]
        return narrowed(values, replace(block, queries=(0, 1), keys=(first, first + sum(block.shape[2:]) - 1)))

    def _looked_up(self, node: Gather, block: Block) -> Tensor:
        """The elements that a lookup reads on a block: [B|1, H|1, rows, columns]."""
        table, head = self._plan.inputs[node.leaf], head_dimension(node)
        rows, at = self._once(id(node), lambda: widened(rows_of(head, table), block)), self._places_of(node, block)
        if head is not None:
            rows = rows[slice(*block.spans[1])]
        out = self._room(node, (len(at), len(rows), *block.shape[2:]), rows.dtype)
        look_up(rows, at, out)
        return out

    def _places_of(self, node: Gather, block: Block) -> Tensor:
        """The places that a lookup reads on a block, [B|1, reads], int64."""
        if id(node) not in self._places or self._places[id(node)][0] != block:
            plan, head = self._plan, head_dimension(node)
            hoisted = (part for part in distinct(node) if isinstance(part, Diagonal))
            memo: Memo = {id(part): self._leaf(part, block).flip(-2) for part in hoisted}
            indices = [
                evaluate(x, None, plan.inputs, plan.given.numbers, block, memo).long() for x in rest(head, node.index)
            ]
            shape = (max(map(len, indices)), 1, *block.shape[2:])
            self._places[id(node)] = block, places(rest(head, plan.inputs[node.leaf].shape), indices, shape)
        return self._places[id(node)][1]

    # ---- memory for gradients

    def _memory(self, node: Gather | Diagonal, value: Tensor) -> DiagonalBuffer | Tensor:
        """Memory for the gradient of `value`, which a block reads by `node`."""
        dtype = torch.promote_types(value.dtype, self._plan.dtype)
        if isinstance(node, Gather):
            return self._room(("gradient", node), value.shape, dtype)
        return self._once((id(node), *value.shape), lambda: diagonal_buffer(value.to(dtype)))

    def _add(self, node: Gather | Diagonal, gradient: DiagonalBuffer | Tensor, block: Block) -> None:
        into = self._sums[node.leaf]
        if isinstance(gradient, DiagonalBuffer):
            along = self._diagonal(into, block)
            along.add_(gradient.sums().sum_to_size(along.shape))
        elif isinstance(node, Gather):
            add_up(head_dimension(node), gradient, into, self._places_of(node, block), block.origin[1])

    def _once(self, key: object, made: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = made()
        found: T = self._kept[key]
        return found

    def _room(self, which: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of this shape, which the next block with the same `which` and dtype writes over."""
        count = math.prod(shape)
        if (which, dtype) not in self._buffers or self._buffers[which, dtype].numel() < count:
            self._buffers[which, dtype] = self._plan.given.query.new_empty(count, dtype=dtype)
        return self._buffers[which, dtype][:count].view(shape)


def _copied(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)
