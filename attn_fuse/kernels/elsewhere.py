"""Elsewhere: a CUDA device that this machine lacks, for reports as they would be on it (`explain --on`).

torch answers only for devices that are here, so its rules for its fused kernels are repeated: those of
aten/native/transformers/cuda/sdp_utils.cpp in torch 2.11, with cuDNN 9.19.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Elsewhere:
    """A device by its driver's name and its compute capability."""

    name: str
    capability: tuple[int, int]


_current: contextvars.ContextVar[Elsewhere | None] = contextvars.ContextVar("attn_fuse_elsewhere", default=None)


@contextlib.contextmanager
def on(device: Elsewhere | None) -> Iterator[None]:
    """A block in which attentions are judged as on `device`; None changes nothing. Nothing can be compiled in it."""
    token = _current.set(device)
    try:
        yield
    finally:
        _current.reset(token)


def elsewhere() -> Elsewhere | None:
    """The device of the innermost block of `on`."""
    return _current.get()


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None where torch sees none."""
    if (other := elsewhere()) is not None:
        return other.capability
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def rule_of(can_use: Callable[[Any, bool], bool]) -> Callable[[Any, bool], bool]:
    """`can_use`, torch's test of a kernel, or the rule that stands for it elsewhere."""
    return can_use if elsewhere() is None else _RULES[can_use]


def _cudnn(asked: Any, debug: bool) -> bool:
    query, key, value, mask = asked.query, asked.key, asked.value, asked.attn_mask
    widths = (query.shape[-1], value.shape[-1])
    return (
        (mask is None or not mask.requires_grad)
        and max(widths) <= (256 if _at_least(9, 0) else 128)  # on sm_90 from cuDNN 9.10
        and not any(width % 8 for width in widths)
        and key.shape[2] != 1
        and not (asked.dropout and query.shape[2] == 1)
        and (16 * asked.dropout).is_integer()  # pytorch#174245
    )


def _flash(asked: Any, debug: bool) -> bool:
    query, key, value = asked.query, asked.key, asked.value
    return (
        _at_least(8, 0)
        and asked.attn_mask is None
        and query.shape[-1] == value.shape[-1] <= 256
        and (not asked.is_causal or query.shape[2] == key.shape[2])
    )


def _efficient(asked: Any, debug: bool) -> bool:
    query, value = asked.query, asked.value
    least = 4 if query.dtype == torch.float32 else 8
    return not query.shape[-1] % least and not value.shape[-1] % least


def _at_least(*wanted: int) -> bool:
    other = elsewhere()
    return other is not None and other.capability >= wanted


_RULES: dict[Callable[[Any, bool], bool], Callable[[Any, bool], bool]] = {
    torch.backends.cuda.can_use_cudnn_attention: _cudnn,
    torch.backends.cuda.can_use_flash_attention: _flash,
    torch.backends.cuda.can_use_efficient_attention: _efficient,
}
