"""kept: a copy of a tensor that will be written into, as an operator that Inductor neither removes nor repeats.

A kernel keeps what it reads for its backward. Inductor may take `x.clone()` for x itself, or clone x only in the
backward, even where the program has written into x in between (torch 2.13: wrong gradients, without a warning).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_fuse.emit.operators import operator


def _copied(x: Tensor) -> Tensor:
    return x.clone()


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    return grad


kept = operator("kept(Tensor x) -> Tensor", _copied, _copied, _gradient)
