"""Bulk copies: which calls use the kernels of hopper.py and hopper_backward.py, and the descriptors of the copies."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import triton
from torch import Tensor

from attn_fuse.kernels.triton.flash.configs import GROUP_ROWS, GROUPS, block_of
from attn_fuse.kernels.triton.launch import ALIGNMENT

if TYPE_CHECKING:
    from attn_fuse.kernels.triton.flash.facts import CallFacts

# A tensor with its strides, as the kernels take it.
Strided = tuple[Tensor, tuple[int, ...]]


@dataclass(frozen=True)
class Bulk:
    """The tiles of a kernel with bulk copies; other kernels have a `Config`.

    block_n: keys in a block of the loop. num_stages: the number of blocks of keys, and of values, in shared memory.
    """

    block_n: int
    num_stages: int
    block_m: ClassVar[int] = GROUPS * GROUP_ROWS
    statistics: ClassVar[int] = 1
    # Each thread starts with this many registers; the groups of warps then divide them differently.
    options: ClassVar[dict[str, int]] = {"num_warps": 4, "maxnreg": 168}


# By kernel and max width of a row. For narrow rows the kernels without bulk copies are as fast.
_BULK = {"forward": {128: Bulk(128, 2), 256: Bulk(64, 2)}, "query": {128: Bulk(64, 3)}}
_NARROW = 64


@functools.cache
def is_there() -> bool:
    """Whether this is the Triton with which the kernels ran on a GPU.

    3.7.1 and 3.8.0 compile them to about the same instructions, but Gluon is experimental, and the meaning of its
    barriers could change unnoticed.
    """
    return triton.__version__.startswith("3.6.") and bool(importlib.util.find_spec("triton.experimental.gluon"))


def bulk(facts: CallFacts) -> dict[str, Bulk]:
    """The tiles of the kernels that use bulk copies for these calls.

    Bulk copies need a Hopper GPU, 16-bit dtypes, wide rows, strides that the engine takes, and at least as many queries
    as one program has. The kernels do not support dropout, a factor, or a tensor read for each score.
    """
    width, taken = max(facts.widths), facts.taken
    fits = facts.capability == 9 and facts.dtype.itemsize == 2 and facts.query[2] >= Bulk.block_m and width > _NARROW
    if not fits or taken.element or taken.looked_up or taken.drops or facts.code.factor is not None:
        return {}
    shapes = (shape for shape, _ in (facts.made[1], facts.made[2], facts.made[3]))
    if not all(map(is_copied, shapes, facts.strides)) or not is_there():
        return {}
    # Too few registers are left for a gradient that needs the score or the factor again.
    kernels = ("forward",) if taken.again else tuple(_BULK)
    found = {kernel: [how for most, how in _BULK[kernel].items() if width <= most] for kernel in kernels}
    return {kernel: several[0] for kernel, several in found.items() if several}


def is_copied(shape: Sequence[int], strides: tuple[int, ...]) -> bool:
    """Whether the engine can copy a 16-bit tensor of four dimensions.

    It must have elements, a last stride of 1, and other strides that are multiples of 16 bytes.
    """
    each = ALIGNMENT // 2
    return (
        strides[3] == 1
        and all(shape)
        and all(n == 1 or (step > 0 and step % each == 0) for n, step in zip(shape[:3], strides[:3], strict=True))
    )


def descriptors(tensors: Sequence[Strided], tile: Bulk) -> list[Any]:
    """A descriptor for each of `tensors`, the last two of which are key and value."""
    rows = [GROUP_ROWS] * (len(tensors) - 2) + [tile.block_n] * 2
    return [descriptor(x, strides, n, block_of(x.shape[3])) for (x, strides), n in zip(tensors, rows, strict=True)]


def descriptor(x: Tensor, strides: tuple[int, ...], rows: int, width: int) -> Any:
    """The descriptor of blocks of `rows` rows and `width` columns of `x`. Columns beyond the tensor are 0."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # The stride of a dimension of size 1 is never used, but the engine may not accept it.
    steps = [ALIGNMENT if n == 1 else step for n, step in zip(x.shape[:3], strides[:3], strict=True)]
    return TensorDescriptor(x, [*x.shape], [*steps, 1], [1, 1, rows, width], _layout(rows, width, x.dtype))


@functools.cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], kind)
