"""What each kernel declines of the grid, one value at a time, and of how many rows of the rest it takes how many.

So a kernel that begins to say no where it said yes fails a test. Those on CUDA are what torch documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.kernel import Kernel

Values = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Takes:
    """declined: values by axis. accepted: of the rows made from the values that are left, how many it takes; None where
    nobody has counted."""

    declined: Values
    accepted: int | None = None


# What a kernel declines that takes only a scale, masks and biases.
_BEYOND = {"function": ("softcap", "arbitrary"), "sink": ("of each head",), "factor": ("of the keys",)}
# A bias that is not learned may fully mask a row, whose gradient torch's kernels get wrong.
_GIVEN = {"bias": ("full", "of the keys", "alibi")}
_LEARNED = (
    "learned", "learned for all batches", "learned for all heads", "learned for all queries", "learned for all keys",
    "relative table",
)  # fmt: skip
_ANY_BIAS = {"bias": (*_GIVEN["bias"], *_LEARNED)}
# By kernel, then "always", in "training", or on a type of device.
_DECLINES: Mapping[str, Mapping[str, Values]] = {
    # In inference it also declines float16 with a bias or a fully masked row.
    "cpu_flash": {"always": _BEYOND | {"dropout": ("0.25",)}, "training": _ANY_BIAS},
    "cudnn": {"always": _BEYOND | _GIVEN},
    "cuda_flash": {
        "always": _BEYOND
        | _ANY_BIAS
        | {
            "dims": ("24, 40", "64, 8"),
            "positions": ("causal with offset", "window", "band", "prefix"),
            "visible": ("lengths", "documents", "a tensor", "a tensor for all batches"),
        }
    },
    "cuda_efficient": {"always": _BEYOND | {"heads": ("4 of 2", "4 of 1")}, "training": _GIVEN},
    "flex": {
        "always": {"dropout": ("0.25",), "factor": ("of the keys",)},
        "cpu": {"sink": ("of each head",)},
        "cuda": {"dims": ("8, 8", "64, 8"), "bias": ("full", "of the keys", "alibi")},
    },
}
_WITHOUT_GRADIENTS = {("flex", "cpu")}

# By device, kernel, and whether there are gradients.
_ACCEPTED = {
    ("cpu", "cpu_flash", True): 69,
    ("cpu", "cpu_flash", False): 97,
    ("cpu", "chunked", True): 122,
    ("cpu", "chunked", False): 120,
    ("cuda", "chunked", True): 122,
    ("cuda", "chunked", False): 120,
}


def takes(kernel: Kernel, device: str) -> dict[bool, Takes]:
    """By whether there are gradients; a kernel that gives none has no entry for training."""
    found = {}
    for training in [True] * ((kernel.name, device) not in _WITHOUT_GRADIENTS) + [False]:
        parts = [_DECLINES.get(kernel.name, {}).get(when, {}) for when in ("always", device, *["training"] * training)]
        declined = {axis: tuple(v for part in parts for v in part.get(axis, ())) for part in parts for axis in part}
        found[training] = Takes(declined, _ACCEPTED.get((device, kernel.name, training)))
    return found


def by_name(device: str, interpreted: Sequence[str] = ()) -> dict[str, dict[bool, Takes]]:
    """What the kernels of a device take. interpreted: those that run there only by Triton's interpreter."""
    named = {kernel.name: kernel for kernel in KERNELS if device in kernel.devices or kernel.name in interpreted}
    return {name: takes(kernel, device) for name, kernel in named.items()}


_INTERPRETED = ("triton_flash",)
TAKES: Mapping[str, Mapping[str, Mapping[bool, Takes]]] = {
    "cpu": by_name("cpu", _INTERPRETED),
    "cuda": by_name("cuda"),
}
