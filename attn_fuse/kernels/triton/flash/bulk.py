"""Whether a call takes the forward kernel of hopper.py, and how it is launched there."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from attn_fuse.kernels.triton.launch import ALIGNMENT

if TYPE_CHECKING:
    from attn_fuse.kernels.triton.flash.facts import CallFacts

# Queries of a program: below so many the wider tiles of this kernel do not pay.
_FEWEST = 128
# The registers of a thread when a program begins; the groups share them anew.
_REGISTERS = 168


@dataclass(frozen=True)
class Bulk:
    """Keys in a block, and how many blocks of keys and of values are in shared memory."""

    block_n: int
    stages: int


# By the max width of a row. Below, warps that copy for themselves are as fast, and several programs share a
# multiprocessor.
_BULK = {128: Bulk(128, 2), 256: Bulk(64, 2)}
_NARROWEST = 64


@functools.cache
def is_there() -> bool:
    """Whether this Triton has Gluon in the version that the kernel is written in; it changes from one to the next."""
    return triton.__version__.startswith(("3.6.", "3.7.")) and bool(importlib.util.find_spec("triton.experimental"))


def bulk(facts: CallFacts) -> Bulk | None:
    """How the forward kernel of hopper.py computes such calls, or None where it does not take them: on other devices;
    rows of other widths or strides than the bulk copy engine's; scores that read a tensor for each of them, dropout, a
    factor."""
    width = max(facts.widths)
    fits = facts.capability == 9 and facts.dtype.itemsize == 2 and width > _NARROWEST and facts.query[2] >= _FEWEST
    taken = facts.taken
    if not fits or taken.element or taken.looked_up or taken.drops or facts.code.factor is not None:
        return None
    shapes = facts.query, facts.key, (*facts.key[:3], facts.value_dim)
    if not all(map(_is_copied, shapes, facts.strides)) or not is_there():
        return None
    return next(chosen for most, chosen in _BULK.items() if width <= most)


def _is_copied(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the engine copies a tensor of 16-bit elements: the last stride is 1, the others are multiples of 16
    bytes."""
    each = ALIGNMENT // 2
    return strides[3] == 1 and all(
        n == 1 or (step > 0 and step % each == 0) for n, step in zip(shape[:3], strides[:3], strict=True)
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


OPTIONS = {"num_warps": 4, "maxnreg": _REGISTERS}
