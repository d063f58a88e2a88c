"""What the messages of torch's errors, of einops' and of Python's say of sizes, ranks and kinds of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Said:
    """What a message asks of tensors and of the values beside them.

    sizes: pairs of a size that there is, or that came of one, and one that is wanted; of two that have to be equal
    either may be wrong.
    widths: those of weights that did not fit. lengths: those of what did not fit a sequence.
    ranks: pairs of ranks; the first is None where any may be wrong.
    is_rank_unequal: whether two ranks differ, or one is wrong by an unknown number.
    blocks: pairs of a count of numbers and a block that the model makes of each.
    map: the channels and the dimensions of the map that a convolution takes.
    dtype: the kind of numbers that is wanted.
    small: whether whole numbers go beyond a table.
    index_rank: whether whole numbers lack a dimension.
    scalar: whether a number is wanted in place of a tensor.
    arrays: whether NumPy's arrays are wanted.
    none: whether something is None that must not be. number: whether a number is wanted in place of it.
    several: whether a sequence is wanted in place of a number.
    lists: whether lists are wanted in place of tuples.
    larger: whether a number is wanted that is not rounded down to nothing.
    missing: the arguments that a function was called without.
    """

    sizes: tuple[tuple[int, int], ...] = ()
    widths: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    ranks: tuple[tuple[int | None, int], ...] = ()
    is_rank_unequal: bool = False
    blocks: tuple[tuple[int, int], ...] = ()
    map: tuple[int, int] | None = None
    dtype: torch.dtype | None = None
    small: bool = False
    index_rank: bool = False
    scalar: bool = False
    arrays: bool = False
    none: bool = False
    number: bool = False
    several: bool = False
    lists: bool = False
    larger: bool = False
    missing: tuple[str, ...] = ()


def _any_of(*texts: str) -> tuple[re.Pattern[str], ...]:
    # In a text # is a number, {name} one to keep, [] the sizes of a shape, * anything.
    patterns = []
    for text in texts:
        pattern = re.escape(text).replace(r"\#", r"\d+").replace(r"\*", ".*?").replace(r"\[\]", r"\[[\d, ]*\]")
        patterns.append(re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", pattern)))
    return tuple(patterns)


_WIDTHS = _any_of(
    "shapes cannot be multiplied (#x{has} and {wants}x#)",
    "to have {wants} channels, but got {has} channels",
)
_WANTED = _any_of(
    "input.size(-1) must be equal to input_size. Expected {wants}, got {has}",
    "running_mean should contain {has} elements not {wants}",
    "({has}) must be divisible by * ({wants})",
    "expecting embedding dimension of {wants}, but got {has}",
    "can't divide axis of length {has} in chunks of {wants}",
    "divisible by num_groups, but got input of shape [#, {has}*] and num_groups={wants}",
    "padded input size per channel: ({has} x *). Kernel size: ({wants}",
    "padded input size per channel: ({has}). Kernel size: ({wants}",
)
_LAST_WANTED = re.compile(
    r"expected input with shape \[\*, (?P<wants>\d+)\], but got input of size\[[\d, ]*?(?P<has>\d+)\]"
)
_CONCATENATED = _any_of("Expected size {one} but got size {other} for tensor")
_LENGTHS = _any_of("size of tensor a ({one}) must match the size of tensor b ({other})")
_EQUAL = _any_of(
    "expanded size of the tensor ({one}) must match the existing size ({other})",
    "hape mismatch, {one} != {other}",
    "has size {one} for operand # which does not broadcast with previously seen size {other}",
)
_SHAPE = re.compile(r"\[(\d+(?:, \d+)*)\]|\((\d+(?:, \d+)+)\)")
_SPLIT = re.compile(r"sum exactly to (\d+) .* but got split_sizes=\[([\d, ]+)\]")
_VIEWED = re.compile(r"shape '\[(-?\d+(?:, -?\d+)*)\]' is invalid for input of size (\d+)")
# A convolution that was called on what is no map of its channels.
_MAP = re.compile(r"weight of size \[\d+, \d+((?:, \d+)+)\], expected input\[[\d, ]+\] to have (\d+) channels")
_RANKS = _any_of(
    "input.dim() = {has} is not equal to len(dims) = {wants}",
    "xpected {wants} dims. Received {has}-dim",
    "xpected {wants} or more dims. Received {has}-dim",
    "xpected at least {wants} dims. Received {has}-dim",
    "number of sizes provided ({wants}) must be greater or equal to the number of dimensions in the tensor ({has})",
    "expected {wants}D input (got {has}D input)",
    "or {wants}D input (got {has}D input)",
    "or batched {wants}D tensor but received {has}-D",
    "to be #D or {wants}D, got {has}D",
    "subscripts in the equation ({wants}) does not match the number of dimensions ({has})",
    "batch# must be a {wants}D tensor",
    "unpack (expected {wants}",
)
_RANK_OF_MAP = re.compile(r"or (\d)D \(batched\) input to \w+, but got input of size: \[([\d, ]+)\]")
_TOO_FEW = re.compile(
    r"too many indices for tensor of dimension (\d)|Dimension out of range \(expected to be in range of \[-(\d), \d\]"
)
# In a message of no form that is known: "should be 2D", "a 3-dimensional tensor", "4 dims".
_ANY_RANK = re.compile(r"\b([1-6])[- ]?(?:D|d|dims?|dimensions?|dimensional)\b")
_RANKS_DIFFER = re.compile(
    r"Tensors must have same number of dimensions: got \d and \d|Number of dimensions of repeat dims can not be smaller"
)
_INDEX_RANK = re.compile(r"Index tensor must have the same number of dimensions as (?:input|self) tensor")
_TO_FLOATS = re.compile(
    r"mixed dtype|same dtype|not implemented for '(Long|Int)'|Input type \(long int\)|scalar type Long but found Float"
)
_TO_WHOLE = re.compile(
    r"'indices' to have one of the following scalar types|must be long, int, byte or bool|of type LongTensor"
    r"|Expected dtype int(64|32/int64|32 or int64)|only applicable to index tensor"
)
_TO_TRUTH = re.compile(
    r"only supports boolean masks|expected BoolTensor|bitwise_\w+\" not implemented for 'Float'|'bitwise_\w+' not"
    r"|bitwise_\w+_cpu\" not implemented for 'Float'"
)
_TOO_GREAT = re.compile(r"index out of range in self|index -?\d+ is out of bounds|Target \d+ is out of bounds")
_BEYOND = _any_of("index {index} is out of bounds for dimension # with size {has}")
_SCALAR = re.compile(
    r"only one element tensors can be converted|cannot be converted to Scalar|slice indices must be integers"
    r"|'Tensor' object cannot be interpreted as an|only integer tensors of a single element"
)
_ARRAYS = re.compile(r"'numpy\.ndarray' and 'Tensor'|expected np\.ndarray|has no attribute 'astype'")
_NUMBERS = re.compile(r"'NoneType' and '(int|float)'|'(int|float)' and 'NoneType'")
_SEVERAL = re.compile(
    r"'(int|float)' object is not (subscriptable|iterable)|object of type '(int|float)' has no len"
    r"|cannot unpack non-iterable (int|float)|argument after \* must be an iterable, not (int|float)"
)
_MISSING = re.compile(r"missing \d+ required positional arguments?: (.*)")


def said_in(message: str) -> Said:
    """What the message of an error asks for."""
    width, joined, length = (_found(patterns, message) for patterns in (_WIDTHS, _CONCATENATED, _LENGTHS))
    over, blocks = _MAP.search(message), tuple(_blocks(message))
    wanted_dtypes = ((_TO_FLOATS, torch.float32), (_TO_WHOLE, torch.long), (_TO_TRUTH, torch.bool))
    return Said(
        tuple(dict.fromkeys(pair for pair in _sizes(message) if pair[0] != pair[1])),
        (width["wants"],) if width else tuple(joined.values()),
        (length["other"],) if length else (),
        tuple(dict.fromkeys(_ranks(message))),
        _RANKS_DIFFER.search(message) is not None,
        blocks,
        (int(over[2]), over[1].count(",")) if over else None,
        next((dtype for pattern, dtype in wanted_dtypes if pattern.search(message)), None),
        _TOO_GREAT.search(message) is not None,
        _INDEX_RANK.search(message) is not None,
        _SCALAR.search(message) is not None,
        _ARRAYS.search(message) is not None,
        "NoneType" in message,
        _NUMBERS.search(message) is not None,
        _SEVERAL.search(message) is not None,
        'list (not "tuple")' in message,
        "division" in message and "by zero" in message,
        tuple(re.findall(r"'(\w+)'", missing[1])) if (missing := _MISSING.search(message)) else (),
    )


def _found(patterns: Sequence[re.Pattern[str]], message: str) -> dict[str, int]:
    # The numbers by name of the first of the patterns that the message has; none without one.
    for pattern in patterns:
        if found := pattern.search(message):
            return {name: int(value) for name, value in found.groupdict().items()}
    return {}


def _sizes(message: str) -> Iterator[tuple[int, int]]:
    if found := _found((*_WIDTHS, *_WANTED, _LAST_WANTED), message):
        has, wants = found["has"], found["wants"]
        yield has, wants
        if "Kernel size" in message:
            yield has, -(-wants // has) * has
    elif found := _found((*_CONCATENATED, *_LENGTHS, *_EQUAL), message):
        yield found["one"], found["other"]
        yield found["other"], found["one"]
    elif beyond := _found(_BEYOND, message):
        yield beyond["has"], beyond["index"] + 1
    elif split := _SPLIT.search(message):
        yield int(split[1]), sum(map(int, split[2].split(",")))
    elif viewed := _VIEWED.search(message):
        known, count = _numbers(viewed[1]), int(viewed[2])
        wants = math.prod(size for size in known if size > 0)
        if wants and min(known) < 0:
            yield count, -(-count // wants) * wants
        if wants:
            yield count, wants
    elif len(shapes := _shapes(message)) == 2 and len(shapes[0]) == len(shapes[1]):
        differing = [pair for pair in zip(*shapes, strict=True) if pair[0] != pair[1]]
        yield from differing
        yield from ((other, one) for one, other in differing)


def _shapes(message: str) -> list[tuple[int, ...]]:
    return [tuple(_numbers(one or other)) for one, other in _SHAPE.findall(message)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _blocks(message: str) -> Iterator[tuple[int, int]]:
    viewed = _VIEWED.search(message)
    sizes = _numbers(viewed[1]) if viewed else []
    if viewed and len(sizes) > 1 and sizes[0] == -1 and min(sizes[1:]) > 0:
        yield int(viewed[2]), math.prod(sizes[1:])


def _ranks(message: str) -> Iterator[tuple[int | None, int]]:
    if found := _found(_RANKS, message):
        yield found.get("has"), found["wants"]
    elif few := _TOO_FEW.search(message):
        rank = int(few[1] or few[2])
        yield rank, rank + 1
    elif of_map := _RANK_OF_MAP.search(message):
        yield len(_numbers(of_map[2])), int(of_map[1])
    else:
        yield from ((None, int(rank)) for rank in _ANY_RANK.findall(message))
