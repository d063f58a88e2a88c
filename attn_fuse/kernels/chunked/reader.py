"""Reader: what the blocks of one worker read of a call's inputs, and the memory that they share.

What a block reads along one of its sides, other blocks read, too: it is taken once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Diagonal, Expr, Gather, Input, Number, Position, distinct
from attn_fuse.kernels.chunked.diagonals import DiagonalBuffer, diagonal_buffer
from attn_fuse.kernels.chunked.plan import Plan
from attn_fuse.kernels.score.dependence import POSITIONS
from attn_fuse.kernels.score.lookup import head_dimension, look_up, places, rest, rows_of
from attn_fuse.kernels.score.program import Block, Memo, evaluate, narrowed, widened

T = TypeVar("T")


class Reader:
    """Reads for one worker, in one thread."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # What blocks share: sides, tables as rows, buffers for sums along diagonals.
        self._kept: dict[object, Any] = {}
        self._buffers: dict[tuple[object, torch.dtype], Tensor] = {}
        # For each lookup the places of the last block.
        self._places: dict[int, tuple[Block, Tensor]] = {}

    def read(self, block: Block) -> list[Tensor]:
        """The tensors that the steps read on a block: of the leaves, the sources, then those of dropout."""
        plan = self._plan
        tensors = [self._leaf(node, block) for node in plan.steps.leaves]
        tensors += [plan.inputs[n] for n in plan.steps.sources]
        if (d := plan.dropout) is not None:
            tensors += [self._narrowed(d.rows, block), self._narrowed(d.keys, block), d.threshold, d.scale]
        return tensors

    def _leaf(self, node: Expr, block: Block) -> Tensor:
        plan = self._plan
        match node:
            case Number(n):
                return plan.constants[n]
            case Diagonal(n):
                key = (n, block.spans[:2], block.keys[0] - block.queries[1], block.shape)
                return self._once(key, lambda: _along_diagonals(diagonal(plan, plan.inputs[n], block), block))
            case Input(n):
                return self._narrowed(plan.inputs[n], block)
            case Gather():
                return self._looked_up(node, block)
            case Position(name):
                return self._narrowed(plan.positions[POSITIONS.index(name)], block)
        raise AssertionError("a step has no other leaves")

    def _narrowed(self, source: Tensor, block: Block) -> Tensor:
        """`source` [B|1, H|1, Lq|1, Lk|1] on a block; a side is copied, since each view would be compiled for."""
        if min(source.shape[2:]) > 1:
            part = narrowed(source, block)
            return part if min(part.shape[2:]) > 1 else _copied(part)
        spans = tuple(span for span, n in zip(block.spans, source.shape, strict=True) if n != 1)
        return self._once((id(source), spans), lambda: _copied(narrowed(source, block)))

    def _once(self, key: object, made: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = made()
        found: T = self._kept[key]
        return found

    def _looked_up(self, node: Gather, block: Block) -> Tensor:
        """The elements that a lookup reads on a block: [B|1, H|1, rows, columns]."""
        table, head = self._plan.inputs[node.leaf], head_dimension(node)
        rows, at = self._once(id(node), lambda: widened(rows_of(head, table), block)), self.places(node, block)
        if head is not None:
            rows = rows[slice(*block.spans[1])]
        out = self._room(node, (len(at), len(rows), *block.shape[2:]), rows.dtype)
        look_up(rows, at, out)
        return out

    def places(self, node: Gather, block: Block) -> Tensor:
        """The places that a lookup reads on a block, [B|1, reads], int64."""
        plan = self._plan
        if id(node) not in self._places or self._places[id(node)][0] != block:
            hoisted = (part for part in distinct(node) if isinstance(part, Diagonal))
            memo: Memo = {id(part): self._leaf(part, block).flip(-2) for part in hoisted}
            indices = [
                evaluate(x, None, plan.inputs, plan.given.numbers, block, memo).long()
                for x in rest(head_dimension(node), node.index)
            ]
            shape = (max(map(len, indices)), 1, *block.shape[2:])
            self._places[id(node)] = (
                block,
                places(rest(head_dimension(node), plan.inputs[node.leaf].shape), indices, shape),
            )
        return self._places[id(node)][1]

    def gradient_of(self, node: Gather | Diagonal, block: Block, value: Tensor) -> DiagonalBuffer | Tensor:
        """Memory for the gradient of `value`, which `node` reads on a block along diagonals or from a table."""
        dtype = torch.promote_types(value.dtype, self._plan.dtype)
        if isinstance(node, Gather):
            return self._room(("gradient", node), value.shape, dtype)
        return self._once((id(node), *value.shape), lambda: diagonal_buffer(value.to(dtype)))

    def _room(self, which: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of this shape, which the next block with the same `which` and dtype writes over."""
        count = math.prod(shape)
        if (which, dtype) not in self._buffers or self._buffers[which, dtype].numel() < count:
            self._buffers[which, dtype] = self._plan.given.query.new_empty(count, dtype=dtype)
        return self._buffers[which, dtype][:count].view(shape)


def diagonal(plan: Plan, values: Tensor, block: Block) -> Tensor:
    """The part of `values` [B|1, H|1, 1, Lq + Lk - 1], one for each j - i, that a block reads, as a view."""
    first = block.keys[0] - block.queries[1] + plan.given.sizes[2]
    whole = Block(block.batch, block.heads, (0, 1), (first, first + sum(block.shape[2:]) - 1), block.device,
                  block.dtype, block.origin)  # fmt: skip
    return narrowed(values, whole)


def _along_diagonals(values: Tensor, block: Block) -> Tensor:
    return _copied(values).squeeze(-2).unfold(-1, block.shape[3], 1)


def _copied(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)
