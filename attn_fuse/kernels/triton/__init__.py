"""Our own kernels in Triton. Triton itself is not imported before one of them is to run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from attn_fuse.attention.facts import Facts

# Whether Triton's interpreter runs the kernels, on a CPU; it is chosen before Triton is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"})
# The dispatch keys of our operators.
OPERATOR_DEVICES = tuple(sorted(device.upper() for device in DEVICES))
# The max head_dim and value_dim: rows of more do not fit the registers.
WIDEST = 256


def is_installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def common_limits(facts: Facts) -> Iterator[str]:
    """The reasons against every Triton kernel of ours: wide rows, no Triton."""
    for name in ("head_dim", "value_dim"):
        if name in facts.symbolic:
            yield f"takes a {name} of at most {WIDEST}, and it may change from call to call"
        elif getattr(facts, name) > WIDEST:
            yield f"takes a {name} of at most {WIDEST}, not {getattr(facts, name)}"
    if not is_installed():
        yield "Triton is not installed"
