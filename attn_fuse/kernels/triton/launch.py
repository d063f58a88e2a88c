"""Launch: run Triton kernels with little Python in each launch.

Triton looks at every argument of every launch to find the kernel that it has compiled for such arguments. Here the
caller gives a `key` for all that a kernel is compiled for: we keep the compiled kernel under the key, and launch it
without looking at the arguments.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.triton.assembled import MisassembledError, is_misassembled

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
    pointers: the tensors among the arguments that may lie anywhere: Triton compiles apart for those that are aligned to
        16 bytes.

    Raises MisassembledError for a kernel that would not do what its program says, and Triton's OutOfResources for one
    that the device does not hold.
    """
    for x in pointers:
        if x is not None and x.data_ptr() % ALIGNMENT:
            key = key, *(y is not None and y.data_ptr() % ALIGNMENT != 0 for y in pointers)
            break
    compiled = kept.get(key)
    if compiled is None:
        compiled = kernel.warmup(*arguments, grid=programs, **options)
        if compiled is None:  # Triton's interpreter compiles nothing
            kernel[programs](*arguments, **options)
            return
        _require_assembled(kernel, compiled)
        if len(kept) >= KEPT:
            kept.clear()
        kept[key] = compiled
    compiled[programs](*arguments)


def launch_once(
    kernel: Any, programs: tuple[int, int, int], arguments: tuple[Any, ...], options: Mapping[str, int]
) -> None:
    """Launch `kernel`, whose arguments Triton looks at. Raises MisassembledError as `launch` does."""
    compiled = kernel.warmup(*arguments, grid=programs, **options)
    if compiled is None:
        kernel[programs](*arguments, **options)
        return
    _require_assembled(kernel, compiled)
    compiled[programs](*arguments)


# Whether a compiled kernel is wrong: one that is comes back with every call, and to look takes a tenth of a second.
_wrong: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _require_assembled(kernel: Any, compiled: Any) -> None:
    _ = compiled.run  # loads it
    if compiled not in _wrong:
        _wrong[compiled] = is_misassembled(compiled)
    if _wrong[compiled]:
        raise MisassembledError(f"{kernel.__name__} is not assembled as it is written; a newer Triton may do it")


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes 2 microseconds when Python calls it."""
    return -(-a // b)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which `device` is the current one, on which Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


_HERE = contextlib.nullcontext()
