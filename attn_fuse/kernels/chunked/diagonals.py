"""DiagonalBuffer: sums of a block along its diagonals, as sums of rows of memory shifted against each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DiagonalBuffer:
    """Memory for a block that is summed along its diagonals.

    Zeros lie between the block's rows, as many as a strip has rows. A view with rows longer by one shifts each row of a
    strip against the row before, so that a sum over the strip's rows is a sum along diagonals. The sums of the strips
    are shifted against each other in the same way, and added up.

    block: [.., rows, columns], to be written. strips: [.., count, rows of a strip, width], the same memory.
    total: [.., count, length], where the last rows + columns - 1 of length are used. shifted: [.., count, width], the
        view of `total` that takes the sum of each strip.
    """

    block: Tensor
    strips: Tensor
    shifted: Tensor
    total: Tensor

    def sums(self) -> Tensor:
        """The sums over equal column - row, in ascending order of it: [.., 1, rows + columns - 1]."""
        torch.sum(self.strips, -2, out=self.shifted)
        return self.total.sum(-2, keepdim=True)[..., 1 - sum(self.block.shape[-2:]) :]


def diagonal_buffer(like: Tensor) -> DiagonalBuffer:
    """A buffer, all zeros, for a block of the shape, dtype and device of `like`."""
    (*planes, rows, columns), n = like.shape, _ROWS_OF_A_STRIP
    count = -(-rows // n)
    width, step, length = n + columns - 1, n + columns, count * n + columns - 1
    memory = like.new_zeros(*planes, count * n * step + n)
    total = like.new_zeros(*planes, count, length)
    outer, outer_total = memory.stride()[:-1], total.stride()[:-2]
    return DiagonalBuffer(
        memory.as_strided((*planes, rows, columns), (*outer, step, 1), n),
        memory.as_strided((*planes, count, n, width), (*outer, n * step, step + 1, 1), 1),
        total.as_strided((*planes, count, width), (*outer_total, length - n, 1), (count - 1) * n),
        total,
    )


_ROWS_OF_A_STRIP = 16
