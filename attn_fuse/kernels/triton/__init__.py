"""Our own kernels in Triton. Triton itself is not imported before one of them is to run."""

from __future__ import annotations

import importlib.util
import os

# Whether Triton's interpreter runs the kernels, on a CPU; it is chosen before Triton is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"})
# The dispatch keys of our operators.
OPERATOR_DEVICES = tuple(sorted(device.upper() for device in DEVICES))
# The max head_dim and value_dim: rows of more do not fit the registers.
WIDEST = 256
# Queries or keys in one entry of a table of spans.
SPAN = 64


def is_installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None
