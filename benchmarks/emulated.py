"""A process without a GPU in which Triton compiles and launches for sm_90, through a driver that runs nothing
(tests/triton/driver.c).

What our operators launch, on tensors on the CPU, is compiled as on an H100 or H200 and kept in Triton's cache; what
they compute is not computed. Import it before attn_fuse: where Triton interprets, our operators take the CPU, and only
they are to be imported so, not Triton itself and not the kernels, which their first call imports.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

# First of all: other packages, too, bring a `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.pop("TRITON_INTERPRET", None)

import triton.language  # noqa: F401
from triton import knobs
from triton.runtime.jit import JITFunction

os.environ["TRITON_INTERPRET"] = "1"

import attn_fuse.kernels
import attn_fuse.kernels.triton.flash.op  # noqa: F401
import gpu_attention
from tests.grid import operators as grid_operators
from tests.triton import device

del os.environ["TRITON_INTERPRET"]

# How many kernels were compiled, and how many were found in the cache, in this process.
counts: collections.Counter[str] = collections.Counter()


@functools.cache
def begin(library: Path) -> None:
    """From here on this process believes in the device."""
    # The launchers that Triton builds and loads are linked against this name.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    device.use()
    knobs.compilation.listener = lambda *, cache_hit, **_: counts.update(["found" if cache_hit else "compiled"])

    from attn_fuse.kernels.triton.flash import forward as flash_forward

    if not isinstance(flash_forward.forward, JITFunction):
        raise RuntimeError("import emulated before attn_fuse: its kernels are to be interpreted")
    known = {grid_operators.FLASH.name: grid_operators.FLASH}
    for module in (grid_operators, gpu_attention):
        _replace(module, "operators", lambda _: known)
    # What the kernels would have computed is not there to be looked at.
    _replace(grid_operators, "complaint", lambda *_: "")


def _replace(module: Any, name: str, value: Any) -> None:
    if not hasattr(module, name):
        raise RuntimeError(f"{module.__name__} has no {name} any more, by which it asks about the device")
    setattr(module, name, value)
