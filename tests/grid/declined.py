"""What each kernel declines of the grid, one value at a time, and of how many rows of the rest it takes how many.

Written down, so that a kernel which begins to say no where it said yes fails a test. Those on CUDA are what torch
documents; where `accepted` is None nobody has counted yet.
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


def _all_but(axis: str, *taken: str) -> Values:
    return {axis: tuple(value for value in AXES[axis] if value not in taken)}


_BEYOND_SDPA: Values = {"function": ("softcap", "arbitrary"), "sink": ("of each head",), "factor": ("of the keys",)}
_TWO_DIMS: Values = {"dims": ("24, 40", "64, 8")}
_DROPOUT: Values = {"dropout": ("0.25",)}
_ANY_BIAS = _all_but("bias", "none")
# A bias that is not learned may hide all keys of a query, and many a backward gets that wrong.
_GIVEN_BIAS: Values = {"bias": ("full", "of the keys", "alibi")}
# In inference the rows that it declines are float16, with a bias or fully masked queries.
_CPU_FLASH = _BEYOND_SDPA | _DROPOUT
_CUDA_FLASH = (
    _BEYOND_SDPA
    | _TWO_DIMS
    | _ANY_BIAS
    | _all_but("positions", "every key", "causal")
    | _all_but("visible", "every key")
)
_EFFICIENT: Values = _BEYOND_SDPA | {"heads": ("4 of 2", "4 of 1")}
_FLEX = _DROPOUT | {"factor": ("of the keys",)}
_FLEX_CUDA: Values = _FLEX | {"dims": ("8, 8", "64, 8")}
_DECODE: Values = _DROPOUT | {"lengths": ("251, 127", "257, 515")}

# By device and kernel, then by whether there are gradients. A kernel that gives none has no entry for training.
TAKES: Mapping[str, Mapping[str, Mapping[bool, Takes]]] = {
    "cpu": {
        "cpu_flash": {True: Takes(_CPU_FLASH | _ANY_BIAS, accepted=69), False: Takes(_CPU_FLASH, accepted=97)},
        "triton_flash": {True: Takes({}), False: Takes({})},
        "triton_flash_hopper": {True: Takes({}), False: Takes({})},
        "triton_decode": {False: Takes(_DECODE)},
        "flex": {False: Takes(_FLEX | {"sink": ("of each head",)})},
        "chunked": {True: Takes({}, accepted=122), False: Takes({}, accepted=120)},
    },
    "cuda": {
        "cudnn": {True: Takes(_BEYOND_SDPA | _GIVEN_BIAS), False: Takes(_BEYOND_SDPA)},
        "cuda_flash": {True: Takes(_CUDA_FLASH), False: Takes(_CUDA_FLASH)},
        "cuda_efficient": {True: Takes(_EFFICIENT | _GIVEN_BIAS), False: Takes(_EFFICIENT)},
        "triton_flash": {True: Takes({}), False: Takes({})},
        "triton_flash_hopper": {True: Takes({}), False: Takes({})},
        "triton_decode": {False: Takes(_DECODE)},
        "flex": {True: Takes(_FLEX_CUDA | _GIVEN_BIAS), False: Takes(_FLEX_CUDA)},
        "chunked": {True: Takes({}, accepted=122), False: Takes({}, accepted=120)},
    },
}
