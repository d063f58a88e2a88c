"""Launches of Triton kernels that take little Python time.

At each launch, Triton examines every argument to find the kernel compiled for such arguments. Callers keep a `Launch`
for similar calls, and it examines only what may still differ between them: the alignment of the tensors.
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
# The max number of entries in a table kept for similar calls. A growing KV cache needs an entry for each length.
KEPT = 4096


class Launch:
    """A kernel with its grid, its options, its last arguments, and its compiled forms.

    Reuse it only for calls whose other arguments have equal dtypes and are None in the same places. Numbers on which
    the kernel specialises must be equal, or agree in being 1 and in being a multiple of 16.

    programs: the size of the one-dimensional grid. constants: the last arguments.
    """

    __slots__ = ("_compiled", "constants", "kernel", "options", "programs")

    def __init__(self, kernel: Any, programs: int, constants: tuple[Any, ...], **options: int) -> None:
        self.kernel, self.programs, self.constants, self.options = kernel, programs, constants, options
        self._compiled: dict[tuple[bool, ...], Any] = {}

    def __call__(self, stream: int, misaligned: tuple[bool, ...], *arguments: Any) -> None:
        """Launch with `arguments`, followed by the constants. misaligned: the result of `misaligned`.

        Raises MisassembledError if the machine code is known to be wrong, and Triton's OutOfResources if the kernel is
        too large for the device.
        """
        if not self.programs:
            return
        given = arguments + self.constants
        compiled = self._compiled.get(misaligned)
        if compiled is None:
            compiled = self.kernel.warmup(*given, grid=(self.programs, 1, 1), **self.options)
            if compiled is None:  # in Triton's interpreter
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
            # Half the time of the line above, which also asks for the stream and describes the launch to the hooks.
            compiled.run(
                self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *given
            )  # fmt: skip


def misaligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which tensors do not start at a multiple of 16 bytes; empty if all do.

    Triton compiles separately for aligned tensors, of which it reads 16 bytes at once.
    """
    for x in tensors:
        if x is not None and x.data_ptr() % ALIGNMENT:
            return tuple(y is not None and y.data_ptr() % ALIGNMENT != 0 for y in tensors)
    return ()


def _calls(hook: Any) -> bool:
    """Whether a hook of Triton is set. It may be None or a chain, perhaps empty."""
    return bool(getattr(hook, "calls", hook))


# Whether a compiled kernel is wrong. A wrong kernel comes up at every call, and checking takes a tenth of a second.
_wrong: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _require_assembled(kernel: Any, compiled: Any) -> None:
    _ = compiled.run  # loads the kernel
    if compiled not in _wrong:
        _wrong[compiled] = is_misassembled(compiled)
    if _wrong[compiled]:
        raise MisassembledError(f"{kernel.__name__} was assembled wrongly by ptxas; a newer Triton may help")


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own function takes 2 microseconds when called from Python."""
    return -(-a // b)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context that makes `device` the current one, because Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


_HERE = contextlib.nullcontext()


def stream_of(device: torch.device) -> int:
    """torch's current stream on `device`, or 0 on a CPU, where Triton interprets."""
    stream: int = driver.active.get_current_stream(device.index) if device.type == "cuda" else 0
    return stream
