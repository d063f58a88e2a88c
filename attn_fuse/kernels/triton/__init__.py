"""Our kernels in Triton. Triton itself is imported only before one of them runs."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os

# Whether Triton's interpreter runs the kernels on a CPU, which must be decided before Triton is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"})
# Our operators' dispatch keys.
OPERATOR_DEVICES = tuple(sorted(device.upper() for device in DEVICES))
# The max head_dim and value_dim whose rows fit the registers.
WIDEST = 256
# Queries or keys in one entry of a table of spans.
SPAN = 64


def is_installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def version() -> str:
    """The version of the installed Triton, "" without one."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
