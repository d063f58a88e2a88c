"""How large the tiles of the flash kernels are and how they are launched, by device, kernel and width of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Config:
    """block_m, block_n: queries and keys in a tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By kernel, then for rows up to so many elements wide, those of key or value, whichever are wider. 99 KiB of shared
# memory is what the least of the devices has for a program. tests/triton/test_flash_compile.py holds what spills.
_HALF = {
    "forward": {64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 32, 4, 2)},
    "query": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 8, 1)},
    "key_value": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 8, 2), 256: Config(32, 32, 8, 1)},
    "input": {64: Config(64, 64, 4, 1), 128: Config(64, 64, 8, 1), 256: Config(32, 64, 8, 1)},
}
# What differs on devices of one major capability.
_HALF_ON = {
    8: {"forward": {256: Config(64, 32, 8, 2)}, "key_value": {64: Config(32, 64, 4, 2)}},
    9: {"query": {256: Config(128, 32, 8, 1)}},
    10: {"key_value": {128: Config(32, 64, 8, 2)}},
}
_FLOAT = {
    "forward": {64: Config(64, 32, 4, 2), 128: Config(32, 32, 4, 2), 256: Config(32, 16, 4, 1)},
    "query": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 16, 4, 1)},
    "key_value": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    "input": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 16, 4, 1)},
}


def config(kernel: str, dtype: torch.dtype, widths: tuple[int, int], capability: int, heavy: bool) -> Config:
    """kernel: forward, query, key_value or input. widths: of a row of key and of one of value.

    capability: the major one of the device. heavy: whether the scores need many registers of their own.
    """
    half = dtype.itemsize == 2
    table = (_HALF if half else _FLOAT)[kernel]
    most = next(most for most in table if max(widths) <= most)
    others = _HALF_ON.get(capability, {}).get(kernel, {}) if half else {}
    chosen = others.get(most, table[most])
    if heavy:
        rows = max(16, chosen.block_m // 2) if kernel == "key_value" else chosen.block_m
        chosen = replace(chosen, block_m=rows, num_warps=8, num_stages=min(2, chosen.num_stages))
    # Triton 3.6 does not compile for 9.0 what gives each of two warps 8 columns of a product.
    return replace(chosen, num_warps=4) if min(widths) <= _NARROW else chosen


_NARROW = 32
