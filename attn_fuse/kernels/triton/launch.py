"""Launch: run Triton kernels with little Python in each launch.

Triton looks at every argument of every launch to find the kernel that it has compiled for such arguments. Here the
caller gives a `key` for all that a kernel is compiled for: we keep the compiled kernel under the key, and launch it
without looking at the arguments.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

ALIGNMENT = 16
# Max kernels kept: at worst, a growing cache of keys needs one for each length.
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

    kept: compiled kernels, by key. programs: the sizes of the grid.
    key: equal only where dtypes, constants, options and which arguments are None are equal, and for each number that
        the kernel is specialised on, whether it is 1 or a multiple of 16.
    pointers: the tensors among the arguments that may lie anywhere. Where one is not aligned to 16 bytes, Triton looks
        at the arguments itself, as on a first launch.
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
    """a / b, rounded up. Triton's own takes 2 microseconds when Python calls it."""
    return -(-a // b)
