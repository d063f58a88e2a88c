"""Launches of Triton kernels that cost little Python.

Triton looks at every argument of every launch to find what it has compiled for such arguments. Whoever launches here
knows that already: `key` stands for all that a kernel is compiled for. What it was compiled to is kept under that key
and is launched without a second look.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

ALIGNMENT = 16
# One for each length of a cache that grows, at worst.
KEPT = 4096

Kept = dict[Hashable, Any]


def launch(
    kept: Kept,
    key: Hashable,
    kernel: Any,
    programs: tuple[int, int, int],
    arguments: tuple[Any, ...],
    options: Mapping[str, int],
    *pointers: Tensor | None,
) -> None:
    """Launch `kernel` with all its arguments in order, constants included.

    key: hashable, and equal only where dtypes, constants, options, what is None, and whether a number is 1 or a
    multiple of 16 are equal, of numbers that the kernel is specialised on. pointers: the tensors of the arguments that
    may lie anywhere; where one is not aligned to 16 bytes, Triton looks at the arguments itself, as on a first launch.
    """
    for x in pointers:
        if x is not None and x.data_ptr() % ALIGNMENT:
            kernel[programs](*arguments, **options)
            return
    compiled = kept.get(key)
    if compiled is not None:
        compiled[programs](*arguments)
        return
    compiled = kernel[programs](*arguments, **options)
    if len(kept) >= KEPT:
        kept.clear()
    # Triton's interpreter compiles nothing.
    if compiled is not None:
        kept[key] = compiled


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up: Triton's own takes 2 microseconds when Python calls it."""
    return -(-a // b)
