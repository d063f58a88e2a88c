"""Configs: the tile sizes and launch options of the flash kernels, by device, kernel and width of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

# Of the kernels with bulk copies: the queries of a group of warps, and the groups of a program.
GROUP_ROWS, GROUPS = 64, 2


@dataclass(frozen=True)
class Config:
    """The tiles of a kernel, and how it is launched.

    block_m, block_n: queries and keys in a tile.
    statistics: how many statistics of a query one load reads: 1, 2 or 4. Where a load has fewer elements than the
        program has threads, Triton has each thread copy all that it needs.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    statistics: int = 1


@dataclass(frozen=True)
class Taken:
    """What takes registers beside the tiles.

    element: whether a tensor is read for each element of the scores. looked_up: whether it is a table, at positions
    that are computed. drops: whether there is dropout. again: whether the gradient needs the product of query and key,
    or a factor, again.
    """

    element: bool
    looked_up: bool
    drops: bool
    again: bool


# By kernel, then by the max width of a row, the wider of key and value. Three stages: with two, Triton waits for each
# copy before it computes, and only another program fills the time. A device whose shared memory does not hold them runs
# with fewer. tests/triton/test_flash_compile.py checks what spills, and what is copied while products are computed.
_HALF = {
    "forward": {64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 3)},
    "query": {64: Config(64, 64, 4, 3), 128: Config(64, 64, 4, 3), 256: Config(64, 32, 8, 3)},
    "key_value": {64: Config(64, 64, 8, 3), 128: Config(64, 64, 8, 3)},
    "key": {256: Config(32, 64, 8, 3)},
    "value": {256: Config(32, 64, 8, 3)},
    "input": {64: Config(64, 64, 8, 3), 128: Config(32, 64, 8, 3), 256: Config(32, 64, 8, 3)},
}
# What differs on devices of one major capability. 9: the fastest of a sweep on an H200, or within 5% of it where the
# fastest spills in a loop for some score. With one warp group to a program, several programs share a multiprocessor:
# one computes while another waits. Most kernels for rows wider than 64 want two groups, whose 128 queries halve the
# reads of keys and values.
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


# The kernels whose rows are keys; those of the others are queries.
OF_KEYS = ("key_value", "key", "value")


def together_or_apart(dtype: torch.dtype, widths: tuple[int, int]) -> tuple[str, ...]:
    """The kernels for the gradients of key and value: one, or one for each where registers do not hold both."""
    return ("key", "value") if dtype.itemsize == 2 and max(widths) > max(_HALF["key_value"]) else ("key_value",)


# Where the scores read a tensor for each element, whose tiles are copied beside those of the keys.
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
# Where they do, and there is more to keep, or it is a table that is looked up.
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
# Where there is no such tensor, but dropout, or something that the gradient needs again. A kernel that is missing here
# has its config from above; on a device that is missing, dropout counts as such a tensor.
_BUSY_ON: dict[int, dict[str, dict[int, Config]]] = {
    9: {"key_value": {64: Config(64, 64, 4, 3, 2), 128: Config(32, 128, 8, 3)}},
    10: {},
}


def config(kernel: str, dtype: torch.dtype, widths: tuple[int, int], capability: int, taken: Taken) -> Config:
    """The config of `kernel` for a call.

    kernel: forward, query, key_value, key, value or input. widths: of a row of key and of a row of value.
    capability: the major one of the device.
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
    """The config of the first of `tables` that has one for rows of `width`."""
    return next((table[most] for table in tables for most in sorted(table) if width <= most), None)


_NARROW = 16


def _by_one_group(chosen: Config, kernel: str) -> Config:
    """`chosen` with a single group of four warps, and as much of a tile for each warp as before.

    Triton 3.6 does not compile for 9.0 a product of which each of two warps has 8 columns. Half the warps on the same
    tile put registers away by the kilobyte.
    """
    shrunk = max(1, chosen.num_warps // 4)
    if kernel in OF_KEYS:
        return replace(chosen, num_warps=4, block_n=max(16, chosen.block_n // shrunk))
    return replace(chosen, num_warps=4, block_m=max(16, chosen.block_m // shrunk))


def without_groups(chosen: Config, kernel: str) -> Config:
    """`chosen` with so few rows that warps multiply each for itself, not by groups."""
    if kernel in OF_KEYS:
        return replace(chosen, num_warps=4, block_n=min(32, chosen.block_n))
    return replace(chosen, num_warps=4, block_m=min(32, chosen.block_m))
