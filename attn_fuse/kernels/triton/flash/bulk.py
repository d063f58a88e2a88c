"""Which calls take the kernels with bulk copies, of hopper.py and hopper_backward.py, and their launches."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from attn_fuse.kernels.triton.flash.configs import GROUP_ROWS, GROUPS
from attn_fuse.kernels.triton.launch import ALIGNMENT, Launch, ceil_div
from attn_fuse.kernels.triton.scores import LOG2E

if TYPE_CHECKING:
    from attn_fuse.kernels.triton.flash.facts import CallFacts
    from attn_fuse.kernels.triton.flash.launch import Backward, Call, Table


@dataclass(frozen=True)
class Bulk:
    """block: keys in a block of the loop. stages: how many blocks of keys, and of values, shared memory holds."""

    block: int
    stages: int


# By kernel and max width of a row; None where warps that copy for themselves are as fast.
_BULK: dict[str, dict[int, Bulk | None]] = {
    "forward": {64: None, 128: Bulk(128, 2), 256: Bulk(64, 2)},
    "query": {64: None, 128: Bulk(64, 3)},
}
# When a program begins, each thread has as many registers; the groups of warps share them anew.
OPTIONS = {"num_warps": 4, "maxnreg": 168}


@functools.cache
def is_there() -> bool:
    """Whether this is the Triton with which a GPU has run the kernels. 3.7.1 and 3.8.0 compile them to about the same
    instructions, but Gluon is experimental, and what its barriers mean may change unseen."""
    return triton.__version__.startswith("3.6.") and bool(importlib.util.find_spec("triton.experimental.gluon"))


def bulk(facts: CallFacts) -> dict[str, Bulk]:
    """How each kernel computes such calls by bulk copies; those that do not are missing.

    They need a Hopper GPU; 16 bits, wide rows and strides of the bulk copy engine's; as many queries as a program has;
    and no dropout, no factor and no tensor that is read for each score.
    """
    width, taken = max(facts.widths), facts.taken
    fits = facts.capability == 9 and facts.dtype.itemsize == 2 and facts.query[2] >= GROUP_ROWS * GROUPS
    if not fits or taken.element or taken.looked_up or taken.drops or facts.code.factor is not None:
        return {}
    shapes = facts.query, facts.key, (*facts.key[:3], facts.value_dim)
    if not all(map(is_copied, shapes, facts.strides)) or not is_there():
        return {}
    # What the gradient needs again would take registers that are not there.
    kernels = ("forward",) if taken.again else tuple(_BULK)
    found = {kernel: _of_width(width, _BULK[kernel]) for kernel in kernels}
    return {kernel: how for kernel, how in found.items() if how is not None}


def _of_width(width: int, by_width: Mapping[int, Bulk | None]) -> Bulk | None:
    return next((how for most, how in by_width.items() if width <= most), None)


def is_copied(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the engine copies a 16-bit tensor of four dimensions: it has elements, the last stride is 1, the others
    are multiples of 16 bytes."""
    each = ALIGNMENT // 2
    return (
        strides[3] == 1
        and all(shape)
        and all(n == 1 or (step > 0 and step % each == 0) for n, step in zip(shape[:3], strides[:3], strict=True))
    )


def descriptor(x: Tensor, strides: tuple[int, ...], rows: int, width: int) -> Any:
    """What the engine copies blocks of `rows` rows by; columns up to `width`, beyond the tensor, are 0."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Where there is one entry, its stride is of no use, and may be none that the engine takes.
    steps = [ALIGNMENT if n == 1 else step for n, step in zip(x.shape[:3], strides[:3], strict=True)]
    return TensorDescriptor(x, [*x.shape], [*steps, 1], [1, 1, rows, width], _layout(rows, width, x.dtype))


@functools.cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], kind)


def _programs(facts: CallFacts, shape: torch.Size) -> int:
    return ceil_div(shape[2], GROUPS * GROUP_ROWS) * shape[0] * shape[1]


def forward_in_bulk(call: Call, how: Bulk, out: Tensor, row_max: Tensor, row_sum: Tensor, spans: Table) -> None:
    """Launch `hopper.bulk_forward`."""
    from attn_fuse.kernels.triton.flash import hopper

    facts, code = call.facts, call.facts.code
    launches = facts.launches()
    _, value_dim, block_d, block_v, *_ = facts.sizes("forward")
    launch = launches.get("forward in bulk")
    if launch is None:
        constants = (
            *facts.scalars[:-1], code.score, code.score_whole, code.slope, code.sink, LOG2E / code.unit, facts.inner,
            facts.rescaled, value_dim, block_d, block_v, how.block, how.stages,
        )  # fmt: skip
        programs = _programs(facts, facts.query)
        launch = launches["forward in bulk"] = Launch(hopper.bulk_forward, programs, constants, **OPTIONS)
    sizes = (GROUP_ROWS, block_d), (how.block, block_d), (how.block, block_v)
    described = (descriptor(*operand, *size) for operand, size in zip(call.operands, sizes, strict=True))
    launch(call.stream, call.lie, *described, (out, facts.made[0][1]), row_max, row_sum, spans, *call.reads)


def query_in_bulk(back: Backward, how: Bulk, dquery: Tensor, spans: Table) -> None:
    """Launch `hopper_backward.bulk_query`."""
    from attn_fuse.kernels.triton.flash import hopper_backward

    call, grad_out, saved, launches = back
    facts, code = call.facts, call.facts.code
    head_dim, _, block_d, block_v, *_ = facts.sizes("query")
    launch = launches.get("query in bulk")
    if launch is None:
        constants = (
            *facts.scalars[:-1], code.score, code.score_whole, code.score_backward, code.backward_whole,
            code.backward_factor, LOG2E / code.unit, facts.inner, facts.rescaled, head_dim, block_d, block_v, how.block,
            how.stages,
        )  # fmt: skip
        programs = _programs(facts, facts.query)
        launch = launches["query in bulk"] = Launch(hopper_backward.bulk_query, programs, constants, **OPTIONS)
    sizes = (GROUP_ROWS, block_v), (GROUP_ROWS, block_d), (how.block, block_d), (how.block, block_v)
    described = (descriptor(*x, *size) for x, size in zip((grad_out, *call.operands), sizes, strict=True))
    launch(call.stream, call.lie, *described, (dquery, facts.made[1][1]), saved, saved.shape[3], spans, *call.reads)
