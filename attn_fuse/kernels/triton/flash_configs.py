"""How large the tiles of the flash kernels are and how they are launched, by device, kernel and width of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """block_m, block_n: queries and keys in a tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By kernel, then for rows up to so many elements wide, those of key or value, whichever are wider. 8.0 has 163 KiB of
# shared memory for a program, 9.0 and 10.0 have 227; what is here fits the smaller.
_HALF = {
    "forward": {64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 32, 4, 2)},
    "query": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 8, 1)},
    "key_value": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 8, 2), 256: Config(32, 32, 8, 1)},
    "input": {64: Config(64, 64, 4, 1), 128: Config(64, 64, 8, 1), 256: Config(32, 64, 8, 1)},
}
_FLOAT = {
    "forward": {64: Config(64, 32, 4, 2), 128: Config(32, 32, 4, 2), 256: Config(32, 16, 4, 1)},
    "query": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 16, 4, 1)},
    "key_value": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    "input": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 16, 4, 1)},
}


def config(kernel: str, dtype: torch.dtype, width: int) -> Config:
    """kernel: forward, query, key_value or input. width: of the wider of a row of key and of value."""
    table = (_HALF if dtype.itemsize == 2 else _FLOAT)[kernel]
    return table[next(most for most in table if width <= most)]
