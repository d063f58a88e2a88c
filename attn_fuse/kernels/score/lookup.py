"""Lookups: read a table as a `Gather` does, and add up the gradient of the table.

All heads read a relative position bias at the same places of their own columns, so the places are found once. Every sum
has one order; there are no atomics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Diagonal, Gather, Input, Position, distinct
from attn_fuse.kernels.chunked.diagonals import diagonal_buffer
from attn_fuse.kernels.score.dependence import of_difference

T = TypeVar("T")
_HEAD = Position("h")


@functools.cache
def head_dimension(node: Gather) -> int | None:
    """The only dimension indexed by the head alone, if others exist and the head is in none of these; else None."""
    found = [dim for dim, place in enumerate(node.index) if place == _HEAD]
    others = [part for place in node.index if place != _HEAD for part in distinct(place)]
    return found[0] if len(found) == 1 and others and _HEAD not in others else None


def rows_of(head: int | None, table: Tensor) -> Tensor:
    """The table as contiguous [heads, places], or [1, places] without a dimension `head` of the heads."""
    return (table.unsqueeze(0) if head is None else table.movedim(head, 0)).flatten(1).contiguous()


def rest(head: int | None, of_dimensions: Sequence[T]) -> list[T]:
    """`of_dimensions`, one for each dimension of a table, without the one of dimension `head`."""
    return [x for dim, x in enumerate(of_dimensions) if dim != head]


def places(sizes: Sequence[int], indices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The places that a block of this shape reads in contiguous memory of these sizes, [B|1, reads], int64.

    indices: int64, one for each dimension, broadcasting to `shape`, [B|1, ...]; negative ones count from the end. For
    a CPU only, since the host looks at their values. Raises IndexError for an index out of range.
    """
    found = None
    for size, index in zip(sizes, indices, strict=True):
        index = _from_the_front(index, size)
        found = index if found is None else found * size + index
    assert found is not None, "a table without a dimension is not looked up"
    return found.expand(shape).reshape(shape[0], -1)


def look_up(rows: Tensor, at: Tensor, out: Tensor) -> None:
    """Write the elements of `rows` [H, places] at `at` [B|1, reads] into `out`, contiguous [B|1, H, .., ..]."""
    for of_batch, into in zip(at, out.flatten(2), strict=True):
        torch.gather(rows, 1, of_batch.expand(len(rows), -1), out=into)


def add_up(head: int | None, gradient: Tensor, into: Tensor, at: Tensor, first_head: int) -> None:
    """Add `gradient` [B|1, H|1, rows|1, columns|1] to that of the whole table, `into`, at the places `at` [B|1, reads].

    On a CPU; both have one dtype. head: the heads' dimension of the table, in which the gradient's heads begin at
    `first_head`; None without one.
    """
    if head is None:
        rows, of_rows = into.unsqueeze(0), gradient.reshape(1, -1)
    else:
        rows = into.movedim(head, 0).narrow(0, first_head, gradient.shape[1])
        of_rows = gradient.movedim(1, 0).reshape(len(rows), -1)
    sums = rows.new_zeros(len(rows), math.prod(rows.shape[1:]))
    sums.scatter_add_(1, at.reshape(1, -1).expand(len(rows), -1), of_rows)
    rows.add_(sums.view(rows.shape))


def accumulate(node: Gather, gradient: Tensor, into: Tensor, indices: Sequence[Tensor], first_head: int) -> None:
    """Add `gradient`, that of the elements `node` has read, to `into`, the gradient of the whole table.

    gradient: [B|1, H|1, rows|1, columns|1] in the dtype of `into`, in the shape to which `indices` broadcast. indices:
    int64, one for each dimension. first_head: that of the block. On a CPU, raises IndexError for an index out of range.
    """
    if min(gradient.shape[2:]) > 1 and _is_of_difference(node):
        gradient, indices = _along_diagonals(gradient, indices)
    head = head_dimension(node)
    if any(index.shape[1] != 1 for index in rest(head, indices)):
        head = None
    sizes, indices = rest(head, into.shape), rest(head, indices)
    if into.device.type == "cpu":
        batch, heads, *block = gradient.shape
        at = places(sizes, indices, (batch, heads if head is None else 1, *block))
        add_up(head, gradient, into, at, first_head)
    else:
        add_sorted(head, gradient, into, indices, first_head)


def add_sorted(head: int | None, gradient: Tensor, into: Tensor, indices: Sequence[Tensor], first_head: int) -> None:
    """`add_up` on a GPU: torch sorts `indices`, one for each dimension but the heads', and adds in that order."""
    if head is not None:
        into, gradient = into.movedim(head, -1).narrow(-1, first_head, gradient.shape[1]), gradient.movedim(1, -1)
        indices = [index.squeeze(1) for index in indices]
    into.index_put_(tuple(indices), gradient, accumulate=True)


@functools.cache
def _is_of_difference(node: Gather) -> bool:
    if any(isinstance(part, (Input, Diagonal)) for part in distinct(node)):
        return False
    return id(node) in of_difference(node, ())


def _along_diagonals(gradient: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The sum of `gradient` for each j - i, [B|1, H|1, 1, rows + columns - 1], and the indices of each sum."""
    memory = diagonal_buffer(gradient)
    memory.block.copy_(gradient)

    def along(index: Tensor) -> Tensor:
        if index.shape[2] == index.shape[3] == 1:
            return index
        index = index.expand(*index.shape[:2], *gradient.shape[2:])
        return torch.cat([index[..., 0].flip(-1), index[..., 0, 1:]], -1).unsqueeze(-2)

    return memory.sums(), list(map(along, indices))


def _from_the_front(index: Tensor, size: int) -> Tensor:
    if not index.numel():
        return index
    index = index.contiguous()
    low, high = map(int, index.aminmax())
    if low < -size or high >= size:
        wrong = low if low < -size else high
        raise IndexError(f"index {wrong} is out of bounds for a dimension of size {size}")
    return index if low >= 0 else torch.where(index < 0, index + size, index)
