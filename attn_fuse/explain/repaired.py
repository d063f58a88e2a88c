"""Inputs of other sizes, as the error that a model raises on some asks for: what a person does who reads the error."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from attn_fuse.explain.inputs import Inputs

# The size that there is, and the size that is wanted, in the words of torch's errors; of two that have to be equal,
# either may be wrong.
WANTED = re.compile(
    r"shapes cannot be multiplied \(\d+x(?P<has>\d+) and (?P<wants>\d+)x\d+\)"
    r"|to have (?P<wants1>\d+) channels, but got (?P<has1>\d+) channels"
    r"|expected input with shape \[\*, (?P<wants2>\d+)\], but got input of size\[[\d, ]*?(?P<has2>\d+)\]"
    r"|input.size\(-1\) must be equal to input_size\. Expected (?P<wants3>\d+), got (?P<has3>\d+)"
    r"|running_mean should contain (?P<has4>\d+) elements not (?P<wants4>\d+)"
    r"|expecting embedding dimension of (?P<wants5>\d+), but got (?P<has5>\d+)"
)
EQUAL = re.compile(
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"
    r"|Expected size (\d+) but got size (\d+) for tensor"
    r"|expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)"
)
UNPACKED = re.compile(r"(?:not enough|too many) values to unpack \(expected (\d)")
TO_FLOATS = re.compile(
    r"mixed dtype|same dtype|not implemented for '(Long|Int)'|Input type \(long int\)|scalar type Long but found Float"
)
TO_WHOLE = re.compile(
    r"'indices' to have one of the following scalar types|must be long, int, byte or bool|of type LongTensor"
    r"|Expected dtype int(64|32/int64)"
)
RESHAPED = re.compile(r"shape '\[-1, ([\d, ]+)\]' is invalid for input of size (\d+)")
# How large a side, and how many numbers of an argument, may be that an error asks for.
LARGEST, MOST_NUMBERS = 4096, 1 << 22
# Sides of the patches of a picture that a model may count.
PATCHES = (1, 2, 4, 8, 14, 16, 32)
# Size of a dimension that is put in.
NEW = 8


def repaired(inputs: Inputs, message: str) -> Iterator[Inputs]:
    """The inputs with another size, rank or dtype of one argument, such that what `message` complains of would fit.

    A size of an argument that is n times another may have come of it: where 12 was wanted and 48 was there, a side of
    32 becomes one of 8, or of 16 where a model counts the places of a square. So may one that differs by a constant,
    as by the tokens that a model adds. `message`: of an error; one that speaks of no sizes gives nothing.
    """
    seen: set[str] = set()
    to = torch.float32 if TO_FLOATS.search(message) else torch.long if TO_WHOLE.search(message) else None
    places: list[int | str] = [*range(len(inputs.args)), *inputs.kwargs]
    for key, value in zip(places, [*inputs.args, *inputs.kwargs.values()], strict=True):
        if isinstance(value, Tensor) and to is not None and value.is_floating_point() != to.is_floating_point:
            shapes = (value.shape, value.shape[:-1])
            yield from (_with(inputs, key, _numbers(shape, to, value.device)) for shape in shapes if shape)
        for shape in _shapes(value, message) if isinstance(value, Tensor) and 0 < value.dim() < 6 else ():
            if min(shape) > 0 and max(shape) <= LARGEST and math.prod(shape) <= MOST_NUMBERS:
                made = _with(inputs, key, _of_shape(value, shape))
                if str(made) not in seen:
                    seen.add(str(made))
                    yield made


def _shapes(tensor: Tensor, message: str) -> Iterator[tuple[int, ...]]:
    shape = tuple(tensor.shape)
    if found := UNPACKED.search(message):
        yield from _of_rank(shape, int(found[1]))
    if (found := RESHAPED.search(message)) and tensor.numel() == int(found[2]):
        # Of each number the model makes a whole block.
        yield (*shape, math.prod(int(size) for size in found[1].split(",")))
    for has, wants in _sizes_in(message):
        yield from _fitting(shape, has, wants)


def _of_rank(shape: tuple[int, ...], rank: int) -> Iterator[tuple[int, ...]]:
    # Without the dimension after the batch, or with one more there.
    if len(shape) == rank + 1:
        yield (shape[0], *shape[2:])
    if len(shape) == rank - 1:
        yield (shape[0], NEW, *shape[1:])


def _sizes_in(message: str) -> Iterator[tuple[int, int]]:
    if found := WANTED.search(message):
        groups = found.groupdict()
        yield (
            next(int(v) for n, v in groups.items() if v and n.startswith("has")),
            next(int(v) for n, v in groups.items() if v and n.startswith("wants")),
        )
    elif found := EQUAL.search(message):
        one, other = (int(v) for v in found.groups() if v)
        yield one, other
        yield other, one


def _fitting(shape: tuple[int, ...], has: int, wants: int) -> Iterator[tuple[int, ...]]:
    # The shapes that may have `wants` where the model made `has` of this one; the batch stays as it is.
    if has in (0, wants):
        return
    last = range(len(shape) - 1, 0, -1) if len(shape) > 1 else [0]
    is_square = len(shape) >= 4 and shape[-1] == shape[-2]
    for dim in last:
        if shape[dim] == has:
            yield _changed(shape, {dim: wants})
    for dim in last:
        if shape[dim] * wants % has == 0:
            yield _changed(shape, {dim: shape[dim] * wants // has})
    if is_square:
        for side in _sides(shape[-1], has, wants):
            yield _changed(shape, {-1: side, -2: side})
    for dim in last:
        if shape[dim] != has and shape[dim] + wants - has > 0:
            yield _changed(shape, {dim: shape[dim] + wants - has})


def _sides(side: int, has: int, wants: int) -> Iterator[int]:
    # Sides of a square of which the model counts the places, the patches with some more tokens, or the lines.
    if (places := side**2 * wants) % has == 0 and math.isqrt(places // has) ** 2 == places // has:
        yield math.isqrt(places // has)
    for patch in PATCHES:
        count = (side // patch) ** 2 + wants - has
        if side % patch == 0 and count > 0 and math.isqrt(count) ** 2 == count:
            yield math.isqrt(count) * patch
    if side * wants % has == 0:
        yield side * wants // has


def _changed(shape: tuple[int, ...], new: dict[int, int]) -> tuple[int, ...]:
    return tuple(new.get(dim, new.get(dim - len(shape), size)) for dim, size in enumerate(shape))


def _numbers(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Whole numbers are 0 or 1, which every table has a row for.
    is_whole = not dtype.is_floating_point
    return torch.randint(2, shape, device=device) if is_whole else torch.randn(shape, dtype=dtype, device=device)


def _of_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    # Numbers of the kind that `tensor` holds.
    if tensor.is_floating_point():
        return torch.randn(shape, dtype=tensor.dtype, device=tensor.device)
    picked = torch.arange(math.prod(shape), device=tensor.device) % tensor.numel()
    return tensor.flatten()[picked].reshape(shape)


def _with(inputs: Inputs, key: int | str, value: Tensor) -> Inputs:
    if isinstance(key, str):
        return Inputs(inputs.args, {**inputs.kwargs, key: value})
    return Inputs((*inputs.args[:key], value, *inputs.args[key + 1 :]), inputs.kwargs)
