"""Visibility: which blocks of the scores a mask hides, from the mask's structure rather than from the mask.

The tree `visible` of a score program is evaluated over blocks with interval arithmetic: each part of it is held between
the least and the greatest value that it takes in a block. Comparisons of positions, lengths and document numbers come
out exact or nearly so, at a cost linear in q_len + kv_len; of what depends on both positions only by table or tensor,
each element is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_fuse.kernels.score_program import ScoreProgram


@dataclass(frozen=True)
class Visibility:
    """Bool [B|1, H|1, query blocks, key blocks]. some: a query may see a key there; every: each sees each, certainly.

    Where `some` does not hold, every weight of the block is 0.
    """

    some: Tensor
    every: Tensor


def visibility(
    program: ScoreProgram,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    sizes: tuple[int, int, int, int],
    blocks: tuple[int, int],
    device: torch.device,
) -> Visibility:
    """sizes: batch, heads, q_len, kv_len. blocks: queries and keys in one; the last of each may be shorter.

    Keys beyond kv_len and queries beyond q_len, in a last block, count neither for `some` nor against `every`.
    """
    raise NotImplementedError
