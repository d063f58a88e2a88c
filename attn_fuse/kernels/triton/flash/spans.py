"""Spans: for each 64 queries the first and the last key that any of them may see, and for keys the queries.

By the spans the flash kernels know which blocks to leave out. An operator of its own computes them from the structure
of the mask (`visibility`), so that layers with the same mask share one call of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_fuse.emit.operators import operator
from attn_fuse.kernels.score.dependence import planes
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.visibility import visibility

# torch's caches on disk know an operator by its name only: raise this with every change in what it computes, or in
# the text of a score program.
VERSION = 2
# Queries or keys in one entry.
SPAN = 64


def _spans(
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    program: str,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """of_queries, of_keys: int32 [B|1, H|1, entries, 2], each [first seen, one past the last seen); [n, 0] for none."""
    loaded = ScoreProgram.loads(program)
    some = visibility(loaded, inputs, numbers, (batch, heads, q_len, kv_len), (SPAN, SPAN), device).some
    some = some.expand(*planes(loaded.visible, [x.shape for x in inputs], batch, heads), *some.shape[2:])
    return _ends(some, kv_len), _ends(some.mT, q_len)


def _ends(some: Tensor, length: int) -> Tensor:
    """The position of the first true entry along the last dimension, and one past the last, [..., 2]."""
    place = torch.arange(0, length, SPAN, device=some.device)
    first = torch.where(some, place, length).amin(-1) if len(place) else torch.full_like(some[..., 0], length)
    last = torch.where(some, place + SPAN, 0).amax(-1).clamp(max=length)
    return torch.stack([first, last], -1).to(torch.int32)


def _fake(
    inputs: Sequence[Tensor], numbers: Sequence[int], batch: int, heads: int, q_len: int, kv_len: int, program: str,
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    leading = planes(ScoreProgram.loads(program).visible, [x.shape for x in inputs], batch, heads)
    made = (torch.empty(*leading, (n + SPAN - 1) // SPAN, 2, dtype=torch.int32, device=device) for n in (q_len, kv_len))
    return tuple(made)  # type: ignore[return-value]


spans = operator(
    f"triton_spans_v{VERSION}(Tensor[] inputs, SymInt[] numbers, SymInt batch, SymInt heads, SymInt q_len, "
    "SymInt kv_len, str program, Device device) -> (Tensor of_queries, Tensor of_keys)",
    _spans,
    _fake,
    keeps_strides=True,
)
