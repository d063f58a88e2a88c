"""Split-KV attention for few queries and many keys, as Flash-Decoding does it (Dao, Haziza, Massa and Sizov, 2023).

The queries of all heads that share a key head make one tile, so that each key is read once. The keys are dealt to
several programs, block by block in turn: the visible part of a cache that is half empty, or of a window, falls to all
of them alike, wherever it lies. Each program finds its visible keys by the mask alone and then reads only those. What
the programs leave is joined by a second kernel, always in the same order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from attn_fuse.kernels.operands import check_shapes
from attn_fuse.kernels.score_program import ScoreProgram, bound
from attn_fuse.kernels.triton.decode_kernels import attend_split, join_splits
from attn_fuse.kernels.triton.emitter import LONGEST
from attn_fuse.kernels.triton.scores import LOG2E, score_code
from attn_fuse.kernels.triton_decode import WIDEST_HEAD

# Partial results that are joined at a time, and of each so many elements.
_JOINED, _JOINED_WIDTH = 16, 64
# Programs that one multiprocessor runs at a time, about; and what a split costs beside its blocks, in blocks.
_RESIDENT, _OVERHEAD = 2, 4
_FEWEST_BLOCKS, _MOST_SPLITS = 2, 128
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Tiles:
    """rows: queries of all heads of a group. keys: in a block. stages: blocks under way. scan: blocks looked at."""

    rows: int
    keys: int
    stages: int
    scan: int
    warps: int = 4


def tiles(rows: int, width: int, itemsize: int) -> Tiles:
    """For `rows` queries of all heads of a group, `width` the wider of head_dim and value_dim.

    About 16 KiB of keys in a block and three blocks under way hide the latency of the memory; with as much of values,
    two programs fit on one multiprocessor, and what they take fits on any from sm_80 on.
    """
    width = max(16, triton.next_power_of_2(width))
    most = 16 if itemsize > 2 else 32 if width > 128 else 64
    rows = min(most, max(16, triton.next_power_of_2(rows)))
    keys = max(16, min(32, 4096 // width)) if itemsize > 2 else max(32, min(128, 8192 // width))
    stages = 2 if rows == 64 else 3
    return Tiles(rows, keys, stages, scan=max(1, 256 // keys))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    program: str,
    splits: int | None = None,
) -> Tensor:
    """softmax over the final scores, times the factor, times value: [B, H, Lq, Dv], in query's dtype.

    query [B, H, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv], H a multiple of Hkv, any strides, one dtype of
    float16, bfloat16 and float32; D and Dv at most 256. inputs, numbers: what the program reads. splits:
    programs among which the keys of a head are shared; by default, as many as the device runs at a time.
    A query whose scores are all -inf gives 0; NaN and +inf come out as NaN.

    Raises ValueError for shapes, dtypes or a program that do not fit.
    """
    _check(query, key, value)
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len, value_dim = key.shape[1], key.shape[2], value.shape[3]
    out = query.new_empty(batch, heads, q_len, value_dim)
    if out.numel() == 0:
        return out
    code = score_code(program, inputs, numbers)
    size = tiles(heads // kv_heads * q_len, max(head_dim, value_dim), query.element_size())
    first, last = _keys(code.program, numbers, q_len, kv_len, size.keys)
    blocks = triton.cdiv(last - first, size.keys)
    # Triton sees of a stride only whether 16 divides it; 8 elements are enough to be read at a time.
    key_strides, value_strides = _strides(key), _strides(value)
    step = math.gcd(16, *key_strides, *value_strides)
    to_log2 = LOG2E / code.unit
    planes = batch * kv_heads * triton.cdiv(heads // kv_heads * q_len, size.rows)
    if splits is None:
        splits = splits_for(planes, blocks, multiprocessors(query.device))
    part, row_max, row_sum = out, out, out
    if splits > 1:
        part = query.new_empty(batch, heads, q_len, splits, value_dim, dtype=torch.float32)
        row_max, row_sum = query.new_empty(2, batch, heads, q_len, splits, dtype=torch.float32)
    attend_split[planes, splits](
        query, key, value, part, row_max, row_sum, code.reads(inputs, numbers),
        *query.stride(), *(n // step for n in key_strides), key.stride(3),
        *(n // step for n in value_strides), value.stride(3),
        kv_heads, q_len, kv_len, first, last, splits,
        GROUPS=heads // kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        ROWS=size.rows, KEYS=size.keys, INNER=_padded(head_dim), WIDTH=_padded(value_dim),
        SCORE=code.score, FACTOR=code.factor, SINK=code.sink, VISIBLE=code.visible,
        UNLESS_EMPTY=code.program.unless_empty,
        STEP=step, TO_LOG2=to_log2, SCAN=size.scan, WHOLE=splits == 1, STAGES=size.stages,
        num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    if splits > 1:
        width = min(_JOINED_WIDTH, _padded(value_dim))
        join_splits[batch * heads * q_len, triton.cdiv(value_dim, width)](
            out, part, row_max, row_sum, splits, VALUE_DIM=value_dim, WIDTH=width, SPLITS=_JOINED, TO_LOG2=to_log2
        )
    return out


@functools.lru_cache(4096)
def splits_for(planes: int, blocks: int, processors: int) -> int:
    """Among how many programs each of `planes` shares its `blocks` of keys, on so many multiprocessors.

    What takes least if they run in rounds, each as long as the blocks of one program and a fixed cost.
    """
    slots = processors * _RESIDENT

    def rounds(splits: int) -> int:
        return triton.cdiv(planes * splits, slots) * (triton.cdiv(blocks, splits) + _OVERHEAD)

    # A split that leaves no program fewer blocks would only be more to join.
    return min(range(1, max(1, min(blocks // _FEWEST_BLOCKS, _MOST_SPLITS)) + 1), key=rounds)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _keys(program: ScoreProgram, numbers: Sequence[int], q_len: int, kv_len: int, block: int) -> tuple[int, int]:
    """The keys that any query may see by the program's bounds, from the start of a block on."""
    lower, upper = bound(program.lower, numbers), bound(program.upper, numbers)
    last = kv_len if upper is None else min(kv_len, q_len + upper)
    first = 0 if lower is None else max(0, lower) // block * block
    return first, max(first, last)


def _strides(x: Tensor) -> list[int]:
    """Those of all dimensions but the last; 0 where there is nothing to step to."""
    return [0 if n == 1 else step for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)]


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    check_shapes(query, key, value)
    if max(query.shape[3], value.shape[3]) > WIDEST_HEAD or key.shape[2] > LONGEST:
        raise ValueError(f"too large: {[*query.shape]}, {[*key.shape]}, {[*value.shape]}")
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        raise ValueError(f"does not take {query.dtype}, {key.dtype} and {value.dtype}")
