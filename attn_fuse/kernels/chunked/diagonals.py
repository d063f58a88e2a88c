"""DiagonalBuffer: memory in which sums along the diagonals of a block are sums of columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DiagonalBuffer:
    """Memory for a block that is summed along its diagonals.

    The block is cut into strips of rows. Between two rows lie as many zeros as a strip has rows. `strips` views the
    same memory with rows longer by one, which shifts each row of a strip against the one before, so the sum over its
    rows is a sum along diagonals. The sums of the strips are shifted against each other in the same way and added up.

    block: [.., rows, columns], to be written. strips: [.., count, rows of a strip, width], the same memory.
    total: [.., count, length], whose last rows + columns - 1 columns are used. shifted: [.., count, width], the view
        of `total` to which the sums of the strips are written.
    """

    block: Tensor
    strips: Tensor
    shifted: Tensor
    total: Tensor

    def sums(self) -> Tensor:
        """The sum for each column - row, in ascending order: [.., 1, rows + columns - 1]."""
        torch.sum(self.strips, -2, out=self.shifted)
        return self.total.sum(-2, keepdim=True)[..., 1 - sum(self.block.shape[-2:]) :]


def diagonal_buffer(like: Tensor) -> DiagonalBuffer:
    """A zeroed buffer for a block with the shape, dtype and device of `like`."""
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
