"""Launch: run Triton kernels with little Python in each launch.

Triton looks at every argument of every launch to find the kernel that it has compiled for such arguments. A `Launch` is
kept by its caller for calls that are alike, and looks only at what may differ between them: where tensors lie.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from attn_fuse.kernels.triton.assembled import MisassembledError, is_misassembled

ALIGNMENT = 16
# Max entries of a table of what is kept for calls that are alike: a growing cache needs one for each length.
KEPT = 4096


class Launch:
    """A kernel with its grid, its options and its last arguments, and what Triton has compiled of it.

    Keep one only for calls whose other arguments have equal dtypes, are None in the same places, and whose numbers that
    the kernel is specialised on are equal, or alike in being 1 or a multiple of 16.

    programs: the size of the grid, in one dimension. constants: the last arguments.
    """

    __slots__ = ("_compiled", "constants", "kernel", "options", "programs")

    def __init__(self, kernel: Any, programs: int, constants: tuple[Any, ...], **options: int) -> None:
        self.kernel, self.programs, self.constants, self.options = kernel, programs, constants, options
        self._compiled: dict[tuple[bool, ...], Any] = {}

    def __call__(self, stream: int, misaligned: tuple[bool, ...], *arguments: Any) -> None:
        """Launch with `arguments`, which come before the constants. misaligned: see `misaligned`.

        Raises MisassembledError for a kernel that would not do what its program says, and Triton's OutOfResources for
        one that the device does not hold.
        """
        if not self.programs:
            return
        given = arguments + self.constants
        compiled = self._compiled.get(misaligned)
        if compiled is None:
            compiled = self.kernel.warmup(*given, grid=(self.programs, 1, 1), **self.options)
            if compiled is None:  # Triton's interpreter compiles nothing
                self.kernel[(self.programs, 1, 1)](*given, **self.options)
                return
            _require_assembled(self.kernel, compiled)
            if len(self._compiled) >= KEPT:
                self._compiled.clear()
            self._compiled[misaligned] = compiled
        settings = knobs.runtime
        if _calls(settings.launch_enter_hook) or _calls(settings.launch_exit_hook):
            compiled[(self.programs, 1, 1)](*given, stream=stream)
        else:
            # As the line above does, in half the time: it asks for the stream, and describes the launch for the hooks.
            compiled.run(
                self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *given
            )  # fmt: skip


def misaligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which of the tensors do not lie at a multiple of 16 bytes; empty where all do.

    Triton compiles apart for those that do: it reads 16 bytes at once.
    """
    for x in tensors:
        if x is not None and x.data_ptr() % ALIGNMENT:
            return tuple(y is not None and y.data_ptr() % ALIGNMENT != 0 for y in tensors)
    return ()


def _calls(hook: Any) -> bool:
    """Whether a hook of Triton's is set: None or an empty chain is none."""
    return bool(getattr(hook, "calls", hook))


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


def stream_of(device: torch.device) -> int:
    """torch's current stream on `device`; a CPU, where Triton interprets, has none."""
    stream: int = driver.active.get_current_stream(device.index) if device.type == "cuda" else 0
    return stream
