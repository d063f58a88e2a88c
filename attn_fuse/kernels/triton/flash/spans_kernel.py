"""The kernel behind `spans`, which evaluates the mask for every query and key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_fuse.kernels.triton.flash.tiles import SPAN, place
from attn_fuse.kernels.triton.launch import Launch, misaligned, on, stream_of
from attn_fuse.kernels.triton.scores import score_code

_CHANGING = ("numbers", "heads", "q_len", "kv_len")
_OPTIONS = {"num_warps": 8, "num_stages": 2}
# How many positions of the other kind one step of the loop covers.
_BLOCK = 128


@triton.jit(do_not_specialize=_CHANGING)
def seen(
    table, empty, reads, numbers, heads, q_len, kv_len,
    VISIBLE: tl.constexpr, OF_KEYS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one entry of `table`, contiguous int32 [batch, heads, entries, 2 or 4], for queries or, if OF_KEYS, keys.

    empty: None, or int32 [batch, heads, entries of queries], whether any query of an entry sees no key and so has
        weights for all keys. The launch for queries writes it, and the one for keys reads it.
    VISIBLE: the function of a `ScoreCode`, or None.
    """
    reads = (reads[0], reads[1], numbers)
    length, others = q_len, kv_len
    if OF_KEYS:
        length, others = kv_len, q_len
    block, h, b = place(tl.cdiv(length, SPAN), heads, False)
    own = block * SPAN + tl.arange(0, SPAN)
    there = tl.minimum(length - block * SPAN, SPAN)
    first, last, inner_first, inner_last = others, others * 0, others, others
    met = tl.zeros([SPAN], tl.int32)
    for start in range(0, others, BLOCK):
        other = start + tl.arange(0, BLOCK)
        if OF_KEYS:
            i, j = other[None, :], own[:, None]
        else:
            i, j = own[:, None], other[None, :]
        sees = (own < length)[:, None] & (other < others)[None, :]
        if VISIBLE is not None:
            sees = sees & VISIBLE(b, h, i, j, q_len, kv_len, reads)
        count = tl.sum(sees.to(tl.int32), 0)
        is_met = count > 0
        if empty is not None:
            if OF_KEYS:
                entries = tl.cdiv(q_len, SPAN)
                at = empty + (tl.cast(b, tl.int64) * heads + h) * entries + other // SPAN
                is_met = is_met | (tl.load(at, mask=other < q_len, other=0) != 0)
            else:
                met = tl.maximum(met, tl.max(sees.to(tl.int32), 1))
        first = tl.minimum(first, tl.min(tl.where(is_met, other, others), 0))
        last = tl.maximum(last, tl.max(tl.where(is_met, other + 1, 0), 0))
        if INNER:
            is_full = count == there
            inner_first = tl.minimum(inner_first, tl.min(tl.where(is_full, other, others), 0))
            inner_last = tl.minimum(inner_last, tl.min(tl.where(is_full | (other < inner_first), others, other), 0))
    entry = tl.cast(tl.program_id(0), tl.int64)
    if empty is not None and not OF_KEYS:
        is_empty = tl.max(((met == 0) & (own < length)).to(tl.int32), 0)
        first, last = tl.where(is_empty != 0, 0, first), tl.where(is_empty != 0, kv_len, last)
        tl.store(empty + entry, is_empty)
    to = table + entry * (4 if INNER else 2)
    tl.store(to, first)
    tl.store(to + 1, last)
    if INNER:
        tl.store(to + 2, inner_first)
        tl.store(to + 3, inner_last)


def fill(
    tables: tuple[Tensor, Tensor], inputs: Sequence[Tensor], numbers: Sequence[int], batch: int, heads: int,
    q_len: int, kv_len: int, program: str, device: torch.device, inner: bool,
) -> None:  # fmt: skip
    """Fill `tables` of queries and of keys, int32 [B|1, H|1, entries, 2 or 4].

    An entry holds the first position seen and one past the last, or [n, 0] if there is none. With four numbers, the
    last two are the first run of keys that all 64 queries see, or of queries that see all 64 keys.
    """
    code = score_code(program, inputs, numbers)
    *reads, whole = code.kernel_args(inputs, numbers)
    of_queries, of_keys = tables
    planes, width = of_queries.shape[1], of_queries.shape[3]
    empty = of_queries.new_empty(of_queries.shape[:3]) if code.program.hides_only_if_others_seen else None
    for table in tables:
        constants = planes, q_len, kv_len, code.visible, table is of_keys, inner, _BLOCK
        launch = Launch(seen, table.numel() // width, constants, **_OPTIONS)
        with on(device):
            launch(stream_of(device), misaligned(*inputs), table, empty, tuple(reads), whole)
