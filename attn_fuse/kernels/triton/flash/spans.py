"""Spans: the first and last key that any of 64 queries sees, and the first and last query that sees any of 64 keys.

The spans tell the flash kernels which blocks to skip, and which blocks hide no key. They come from an operator of their
own, so that layers with the same mask share one call. It evaluates the mask for every query and key, which takes a
hundredth of the time of the attention, and its two launches are faster than the dozens of small operations of interval
arithmetic.
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

# Part of the operator's name, by which torch's caches on disk know it. Raise it whenever the results or the text of
# score programs change.
VERSION = 3


def _spans(*args: Any) -> tuple[Tensor, Tensor]:
    from attn_fuse.kernels.triton.flash.spans_kernel import fill

    tables = _empty(*args)
    fill(tables, *args)
    return tables


def _empty(
    inputs: Sequence[Tensor], _: Any, batch: int, heads: int, q_len: int, kv_len: int, program: str,
    device: torch.device, inner: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Empty tables of spans, of queries and of keys: [B|1, H|1, entries, 4 if inner else 2]."""
    leading = planes(ScoreProgram.loads(program).visible, [x.shape for x in inputs], batch, heads)
    shapes = ((*leading, (n + SPAN - 1) // SPAN, 4 if inner else 2) for n in (q_len, kv_len))
    return tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)  # type: ignore[return-value]


spans = operator(
    f"triton_spans_v{VERSION}(Tensor[] inputs, SymInt[] numbers, SymInt batch, SymInt heads, SymInt q_len, "
    "SymInt kv_len, str program, Device device, bool inner) -> (Tensor of_queries, Tensor of_keys)",
    _spans,
    _empty,
    keeps_strides=True,
)
