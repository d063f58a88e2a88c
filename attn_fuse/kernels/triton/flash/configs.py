"""Configs: the tile sizes and launch options of the flash kernels, by device, kernel and row width."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

# In the kernels with bulk copies: the queries of a warp group, and the groups of a program.
GROUP_ROWS, GROUPS = 64, 2


def block_of(width: int) -> int:
    """The number of columns, a power of 2, of a tile for rows of `width`."""
    return max(16, 1 << (width - 1).bit_length())


@dataclass(frozen=True)
class Config:
    """The tiles of a kernel, and its launch options.

    block_m, block_n: queries and keys in a tile.
    statistics: how many statistics of a query one load reads: 1, 2 or 4. If a load has fewer elements than the program
        has threads, Triton makes each thread copy every element it needs.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    statistics: int = 1

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Taken:
    """Whatever takes registers besides the tiles.

    element: a tensor read for each element of the scores. looked_up: a table read at computed positions.
    drops: dropout. again: a gradient that needs the product of query and key, or a factor, a second time.
    """

    element: bool
    looked_up: bool
    drops: bool
    again: bool


# By kernel, then by max width of a key or value row. With only two stages, Triton waits for each copy before it
# computes, and only another program fills the wait. A device with too little shared memory for three runs with fewer.
# tests/triton/test_flash_compile.py checks for spills, and that copies overlap with products.
_HALF = {
    "forward": {64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 3)},
    "query": {64: Config(64, 64, 4, 3), 128: Config(64, 64, 4, 3), 256: Config(64, 32, 8, 3)},
    "key_value": {64: Config(64, 64, 8, 3), 128: Config(64, 64, 8, 3)},
    "key": {256: Config(32, 64, 8, 3)},
    "value": {256: Config(32, 64, 8, 3)},
    "input": {64: Config(64, 64, 8, 3), 128: Config(32, 64, 8, 3), 256: Config(32, 64, 8, 3)},
}
# Exceptions by major capability. For 9 they are the fastest of a sweep on an H200, or within 5% of the fastest if that
# spills in a loop for some scores. With one warp group per program, several programs share a multiprocessor, and one
# computes while another waits. For rows wider than 64 most kernels are faster with two groups, because 128 queries
# halve the reads of keys and values.
_HALF_ON = {
    8: {"key_value": {64: Config(32, 64, 4, 3)}},
    9: {
        "forward": {
            32: Config(128, 64, 4, 3),
            64: Config(64, 64, 4, 3),
            128: Config(128, 128, 8, 3),
            256: Config(128, 64, 8, 2),
        },
        "query": {64: Config(64, 64, 4, 3), 128: Config(64, 64, 4, 2), 256: Config(128, 32, 8, 3)},
        "key_value": {32: Config(128, 64, 4, 3), 64: Config(64, 64, 4, 3, 2), 128: Config(64, 128, 8, 3)},
        "key": {256: Config(32, 128, 8, 3)},
        "value": {256: Config(32, 128, 8, 3)},
    },
}
_FLOAT = {
    "forward": {64: Config(64, 32, 4, 2), 128: Config(32, 32, 4, 2), 256: Config(32, 16, 4, 1)},
    "query": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 16, 4, 1)},
    "key_value": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    "input": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 16, 4, 1)},
}


# The kernels that have a program for each block of keys; the others have one for each block of queries.
OF_KEYS = ("key_value", "key", "value")


def together_or_apart(dtype: torch.dtype, widths: tuple[int, int]) -> tuple[str, ...]:
    """The kernels for the gradients of key and value: one, or two if registers do not hold both gradients."""
    return ("key", "value") if dtype.itemsize == 2 and max(widths) > max(_HALF["key_value"]) else ("key_value",)


# Scores that read a tensor for each element, whose tiles are copied along with those of the keys.
_READING_ON = {
    9: {
        "forward": {64: Config(64, 64, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(128, 32, 8, 3)},
        "query": {64: Config(128, 128, 8, 3), 128: Config(128, 64, 8, 3), 256: Config(128, 32, 8, 2)},
        "key_value": {64: Config(64, 64, 4, 3, 2), 128: Config(64, 128, 8, 3)},
        "key": {256: Config(16, 128, 8, 3)},
        "value": {256: Config(32, 128, 8, 3)},
        "input": {64: Config(64, 64, 4, 3), 128: Config(64, 64, 8, 3), 256: Config(64, 32, 8, 2)},
    },
}
# The same with dropout or a gradient that needs something again, and scores that look up a table.
_HEAVY_ON = {
    9: {
        "forward": {64: Config(128, 64, 8, 3), 128: Config(128, 64, 8, 3), 256: Config(128, 32, 8, 3)},
        "query": {64: Config(128, 64, 8, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 32, 8, 3)},
        "key_value": {64: Config(32, 128, 8, 3), 128: Config(32, 128, 8, 3)},
        "key": {256: Config(16, 128, 8, 3)},
        "value": {256: Config(32, 128, 8, 3)},
        "input": {64: Config(64, 64, 8, 3), 128: Config(64, 64, 8, 3), 256: Config(64, 32, 8, 2)},
    },
}
# No such tensor, but dropout or a gradient that needs something again. Kernels missing here use the configs above. On
# devices missing here, dropout counts as such a tensor.
_BUSY_ON: dict[int, dict[str, dict[int, Config]]] = {
    9: {"key_value": {64: Config(64, 64, 4, 3, 2), 128: Config(32, 128, 8, 3)}},
    10: {},
}


@functools.cache
def config(kernel: str, dtype: torch.dtype, widths: tuple[int, int], capability: int, taken: Taken) -> Config:
    """The config of `kernel` for a call.

    kernel: forward, query, key_value, key, value or input. widths: head_dim and value_dim. capability: the major one.
    """
    half = dtype.itemsize == 2
    busy = taken.drops or taken.again
    reading = taken.element or taken.looked_up or (taken.drops and not (half and capability in _BUSY_ON))
    if reading:
        special = [_HEAVY_ON] if busy or taken.looked_up else [_READING_ON]
    else:
        special = [_BUSY_ON, _HALF_ON] if busy else [_HALF_ON]
    width = max(widths)
    chosen = _of_width(width, [by.get(capability, {}).get(kernel, {}) for by in special if half])
    if chosen is None:
        usual = _HALF_ON.get(capability, {}).get(kernel, {}) if half else {}
        chosen = _of_width(width, [usual, (_HALF if half else _FLOAT)[kernel]])
        assert chosen is not None, f"rows of {width}"
        if reading:
            rows = max(16, chosen.block_m // 2) if kernel in OF_KEYS else chosen.block_m
            chosen = replace(chosen, block_m=rows, num_warps=8)
    return _by_one_group(chosen, kernel) if min(widths) <= _NARROW else chosen


def _of_width(width: int, tables: Sequence[Mapping[int, Config]]) -> Config | None:
    """The config for rows of `width` in the first of `tables` that has one."""
    return next((table[most] for table in tables for most in sorted(table) if width <= most), None)


_NARROW = 16


def _by_one_group(chosen: Config, kernel: str) -> Config:
    """`chosen` with a single group of four warps, and the same share of a tile for each warp.

    For 9.0, Triton 3.6 cannot compile a product that gives each of two warps 8 columns. Half the warps on the same tile
    would spill kilobytes.
    """
    shrunk = max(1, chosen.num_warps // 4)
    if kernel in OF_KEYS:
        return replace(chosen, num_warps=4, block_n=max(16, chosen.block_n // shrunk))
    return replace(chosen, num_warps=4, block_m=max(16, chosen.block_m // shrunk))


def without_groups(chosen: Config, kernel: str) -> Config:
    """`chosen` with so few rows that each warp multiplies alone instead of in a group."""
    if kernel in OF_KEYS:
        return replace(chosen, num_warps=4, block_n=min(32, chosen.block_n))
    return replace(chosen, num_warps=4, block_m=min(32, chosen.block_m))
