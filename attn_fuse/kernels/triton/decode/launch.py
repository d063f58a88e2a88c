"""Split-KV attention for few queries and many keys, as in Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023).

The queries of all heads that share a key head make one tile, so that each key is read once. Several programs take
blocks of keys in turn: the visible part of a half-empty cache, or of a window, falls to all of them alike, wherever it
lies. Each program finds its visible keys by the mask alone and then reads only those. A second kernel joins the results
of the programs, always in the same order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.operands import check_shapes
from attn_fuse.kernels.score.program import ScoreProgram, bound
from attn_fuse.kernels.triton import WIDEST
from attn_fuse.kernels.triton.decode.kernels import attend_split, join_splits
from attn_fuse.kernels.triton.emitter import LONGEST
from attn_fuse.kernels.triton.launch import KEPT, Kept, ceil_div, launch
from attn_fuse.kernels.triton.scores import LOG2E, ScoreCode, score_code

# Partial results joined at a time, and elements of each.
_JOINED, _JOINED_WIDTH = 16, 64
# Programs that one multiprocessor runs at a time, about; and the fixed cost of a split, in blocks.
_RESIDENT, _OVERHEAD = 2, 4
_FEWEST_BLOCKS, _MOST_SPLITS = 2, 128
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a program.

    rows: queries of all heads of a group. keys: in a block. stages: blocks in flight.
    scan: blocks that are searched at a time for visible keys.
    """

    rows: int
    keys: int
    stages: int
    scan: int
    warps: int = 4


def tiles(rows: int, width: int, itemsize: int) -> Tiles:
    """The tiles for `rows` queries of all heads of a group. width: the wider of head_dim and value_dim.

    About 16 KiB of keys in a block and three blocks in flight hide the latency of memory; with as much of values, two
    programs fit on one multiprocessor, on any device from sm_80 on.
    """
    width = _padded(width)
    most = 16 if itemsize > 2 else 32 if width > 128 else 64
    rows = min(most, _padded(rows))
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
    float16, bfloat16 and float32; D and Dv at most 256. inputs, numbers: what the program reads.
    splits: programs that share the keys of a head; None for what `splits_for` gives.
    A query whose scores are all -inf gives 0; NaN and +inf come out as NaN.

    Raises ValueError for shapes, dtypes or a program that do not fit.
    """
    facts = _facts(query, key, value, inputs, numbers, program)
    out, kv_len = query.new_empty(facts.shape), key.shape[2]
    if not facts.planes or not facts.shape[3]:
        return out
    size, q_len = facts.tiles, facts.shape[2]
    first, last = _keys(facts.code.program, numbers, q_len, kv_len, size.keys)
    blocks = ceil_div(last - first, size.keys)
    # Triton sees of a stride only whether 16 divides it, but a multiple of 8 is enough to read several elements at
    # once.
    key_strides, value_strides = _strides(key), _strides(value)
    step = math.gcd(16, *key_strides, *value_strides)
    if splits is None:
        splits = splits_for(facts.planes, blocks, facts.processors)
    part, statistics = out, out
    if splits > 1:
        rows, device = facts.rows * splits, query.device
        part = torch.empty((rows, facts.shape[3]), dtype=torch.float32, device=device)
        statistics = torch.empty((rows, 2), dtype=torch.float32, device=device)
    tensors, sizes, whole = facts.code.kernel_args(inputs, numbers)
    in_steps = (*(n // step for n in key_strides), key.stride(3), *(n // step for n in value_strides), value.stride(3))
    specialized = (in_steps[2], in_steps[3], in_steps[6], in_steps[7], *sizes)
    launch(
        facts.kept, (splits == 1, step, *((n == 1) + 2 * (n % 16 == 0) for n in specialized)),
        attend_split, (facts.planes, splits, 1),
        (query, key, value, part, statistics, (tensors, sizes), whole, *query.stride(), *in_steps,
         key.shape[1], q_len, kv_len, first, last, splits, *facts.constants, step, facts.to_log2, size.scan,
         splits == 1, size.stages),
        facts.options, query, key, value, *tensors,
    )  # fmt: skip
    if splits > 1:
        launch(
            facts.kept, "join", join_splits, facts.joins,
            (out, part, statistics, splits, facts.shape[3], facts.join_width, _JOINED, facts.to_log2), _USUAL,
        )  # fmt: skip
    return out


_USUAL = {"num_warps": 4, "num_stages": 3}


@dataclass(frozen=True, eq=False)
class _Facts:
    """What does not change as a cache grows.

    shape: of the output. planes: programs of one share of the keys. processors: multiprocessors of the device.
    constants: of `attend_split`, from GROUPS to UNLESS_EMPTY.
    """

    code: ScoreCode
    shape: tuple[int, int, int, int]
    planes: int
    processors: int
    tiles: Tiles
    constants: tuple[Any, ...]
    to_log2: float
    options: Mapping[str, int]
    kept: Kept = field(default_factory=dict)

    @functools.cached_property
    def rows(self) -> int:
        """The rows of the output."""
        return math.prod(self.shape[:3])

    @functools.cached_property
    def join_width(self) -> int:
        return min(_JOINED_WIDTH, _padded(self.shape[3]))

    @functools.cached_property
    def joins(self) -> tuple[int, int, int]:
        """The programs of `join_splits`."""
        return self.rows, ceil_div(self.shape[3], self.join_width), 1


def _facts(
    query: Tensor, key: Tensor, value: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int], program: str
) -> _Facts:
    code = score_code(program, inputs, numbers)
    alike: Hashable = (
        id(code), query.dtype, key.dtype, value.dtype, query.device, query.shape, query.stride(), key.shape[:2],
        key.shape[3:], value.shape[:2], value.shape[3:], key.shape[2] == value.shape[2] <= LONGEST,
    )  # fmt: skip
    found = _known.get(alike)
    if found is None:
        _check(query, key, value)
        (batch, heads, q_len, head_dim), kv_heads, value_dim = query.shape, key.shape[1], value.shape[3]
        groups = heads // max(kv_heads, 1)
        size = tiles(groups * q_len, max(head_dim, value_dim), query.element_size())
        constants = (
            groups, head_dim, value_dim, size.rows, size.keys, _padded(head_dim), _padded(value_dim),
            code.score, code.factor, code.sink, code.visible, code.program.hides_only_if_others_seen,
        )  # fmt: skip
        options = {"num_warps": size.warps, "num_stages": size.stages}
        planes = batch * kv_heads * ceil_div(groups * q_len, size.rows)
        shape, processors = (batch, heads, q_len, value_dim), multiprocessors(query.device)
        found = _Facts(code, shape, planes, processors, size, constants, LOG2E / code.unit, options)
        if len(_known) >= KEPT:
            _known.clear()
        _known[alike] = found
    return found


_known: dict[Hashable, _Facts] = {}


@functools.lru_cache(4096)
def splits_for(planes: int, blocks: int, processors: int) -> int:
    """The number of programs that share the `blocks` of keys of each of `planes`, on so many multiprocessors.

    It takes the least time if programs run in rounds, each as long as the blocks of one program and a fixed cost.
    """
    slots = processors * _RESIDENT

    def rounds(splits: int) -> int:
        return ceil_div(planes * splits, slots) * (ceil_div(blocks, splits) + _OVERHEAD)

    # Of equal numbers the smallest is taken: a split that leaves no program fewer blocks is only more to join.
    return min(range(1, max(1, min(blocks // _FEWEST_BLOCKS, _MOST_SPLITS)) + 1), key=rounds)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of `device`; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _keys(program: ScoreProgram, numbers: Sequence[int], q_len: int, kv_len: int, block: int) -> tuple[int, int]:
    """The range of keys that any query may see by the program's bounds; it begins with a block."""
    lower, upper = bound(program.lower, numbers), bound(program.upper, numbers)
    last = kv_len if upper is None else min(kv_len, q_len + upper)
    first = 0 if lower is None else max(0, lower) // block * block
    return first, max(first, last)


def _strides(x: Tensor) -> list[int]:
    """The strides of all dimensions but the last; 0 for a dimension of size 1."""
    return [0 if n == 1 else step for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)]


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    check_shapes(query, key, value)
    if max(query.shape[3], value.shape[3]) > WIDEST or key.shape[2] > LONGEST:
        raise ValueError(f"too large: {[*query.shape]}, {[*key.shape]}, {[*value.shape]}")
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        raise ValueError(f"does not take {query.dtype}, {key.dtype} and {value.dtype}")
