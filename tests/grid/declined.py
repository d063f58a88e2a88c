"""What each kernel declines of the grid, one value at a time, and of how many rows of the rest it takes how many.

Written down, so that a kernel which begins to say no where it said yes fails a test. The figures of the CUDA kernels
come from what torch documents; where `accepted` is None nobody has counted yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.grid.case import AXES

Values = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Takes:
    """declined: values by axis. accepted: of the rows made from the values that are left, how many it takes."""

    declined: Values
    accepted: int | None = None


_BEYOND_SDPA: Values = {"function": ("softcap", "arbitrary"), "sink": ("of each head",), "factor": ("of the keys",)}
_BEYOND_CPU_FLASH: Values = _BEYOND_SDPA | {"dropout": ("0.25",), "dims": ("24, 40", "64, 8")}
_ANY_BIAS: Values = {"bias": tuple(name for name in AXES["bias"] if name != "none")}

# By kernel, then by whether there are gradients. A kernel that gives none has no entry for training.
TAKES: Mapping[str, Mapping[bool, Takes]] = {
    "cpu_flash": {
        # A bias may hide all keys of a query, and their backward gets that wrong.
        True: Takes(_BEYOND_CPU_FLASH | _ANY_BIAS, accepted=59),
        False: Takes(_BEYOND_CPU_FLASH, accepted=99),
    },
    "chunked": {True: Takes({}, accepted=122), False: Takes({}, accepted=120)},
}
