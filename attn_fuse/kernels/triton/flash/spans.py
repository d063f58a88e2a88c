"""Spans: for each 64 queries the first and the last key that any of them sees, and for 64 keys the queries.

By the spans the flash kernels know which blocks to leave out, and in which no key is hidden. An operator of its own
computes them, so that layers with the same mask share one call of it. It asks the mask about every query and key, which
takes a hundredth of what the attention takes: two launches are quicker than the dozens of small operations that
interval arithmetic would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.emit.operators import operator
from attn_fuse.kernels.score.dependence import planes
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.triton import SPAN

# torch's caches on disk know an operator by its name only: raise this with every change in what it computes, or in
# the text of a score program.
VERSION = 3


def _spans(*args: Any) -> tuple[Tensor, Tensor]:
    from attn_fuse.kernels.triton.flash.spans_kernel import find_spans

    return find_spans(*args)


def _fake(
    inputs: Sequence[Tensor], numbers: Sequence[int], batch: int, heads: int, q_len: int, kv_len: int, program: str,
    device: torch.device, inner: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    leading = planes(ScoreProgram.loads(program).visible, [x.shape for x in inputs], batch, heads)
    shapes = ((*leading, (n + SPAN - 1) // SPAN, 4 if inner else 2) for n in (q_len, kv_len))
    return tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)  # type: ignore[return-value]


spans = operator(
    f"triton_spans_v{VERSION}(Tensor[] inputs, SymInt[] numbers, SymInt batch, SymInt heads, SymInt q_len, "
    "SymInt kv_len, str program, Device device, bool inner) -> (Tensor of_queries, Tensor of_keys)",
    _spans,
    _fake,
    keeps_strides=True,
)
