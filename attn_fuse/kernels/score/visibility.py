"""Visibility: which blocks of the scores a mask hides, from the mask's structure rather than from the mask.

Interval arithmetic evaluates `visible` of a score program: we track [min, max] of each node over a block. Comparisons
of positions, lengths and document numbers come out exact or nearly so, at a cost linear in q_len + kv_len. Where a
table or a tensor depends on both positions, we read each element.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_fuse.expression.functions import FUNCTIONS, Order
from attn_fuse.expression.nodes import And, Cast, Compare, Expr, Input, Not, Or, Position, Select, children, name_of
from attn_fuse.kernels.score.program import Block, ScoreProgram, bound, evaluate

_Interval = tuple[Tensor, Tensor]
# Keys that are checked one by one at the start, or together further on.
_STRETCH = 32
# Far below where int64 wraps around, so that the rounding of a float64 does not matter.
_LARGE = 2.0**62
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Visibility:
    """The blocks that a mask leaves visible, each field Bool [B|1, H|1, query blocks, key blocks].

    some: whether some query of a block may see some key; if not, every weight of the block is 0. If the program's
        `hides_only_if_others_seen` is set, it holds for every block that has a query which may be fully masked.
    every: whether every query of a block certainly sees every key.
    """

    some: Tensor
    every: Tensor


def visibility(
    program: ScoreProgram,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    sizes: tuple[int, int, int, int],
    blocks: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Visibility:
    """The visibility of each block. Keys and queries beyond the end of a last block count neither for nor against.

    sizes: batch, heads, q_len, kv_len. blocks: queries and keys in a block; the last of each may be shorter.
    dtype: the kernel's compute dtype, in which functions make fractions of integers.
    """
    batch, heads, q_len, kv_len = sizes
    whole = Block(batch, heads, (0, q_len), (0, kv_len), device, dtype)
    every, some = _within_bounds(program, numbers, whole, blocks)
    if program.visible is not None:
        must, can = _as_bool(_Intervals(inputs, numbers, whole, blocks).of(program.visible))
        every, some = every & must, some & can
    if program.hides_only_if_others_seen and program.visible is not None:
        some = some | ~_each_sees_a_key(program.visible, inputs, numbers, whole, blocks[0])
    shape = (
        *torch.broadcast_shapes(every.shape, some.shape)[:2],
        *(-(-n // b) for n, b in zip(sizes[2:], blocks, strict=True)),
    )
    return Visibility(some.expand(shape), every.expand(shape))


def _within_bounds(program: ScoreProgram, numbers: Sequence[int], whole: Block, blocks: tuple[int, int]) -> _Interval:
    """Whether lower <= j - i <= upper: for all of a block, and for any of it."""
    (first_i, last_i), (first_j, last_j) = (
        _ends(length, size, dim, whole.device)
        for length, size, dim in zip(whole.shape[2:], blocks, (2, 3), strict=True)
    )
    least, greatest = first_j - last_i, last_j - first_i
    every = some = torch.ones_like(least, dtype=torch.bool)
    upper, lower = bound(program.upper, numbers), bound(program.lower, numbers)
    if upper is not None:
        every, some = every & (greatest <= upper), some & (least <= upper)
    if lower is not None:
        every, some = every & (least >= lower), some & (greatest >= lower)
    return every, some


def _each_sees_a_key(
    visible: Expr, inputs: Sequence[Tensor], numbers: Sequence[int], whole: Block, rows: int
) -> Tensor:
    """Whether each query of a block of `rows` certainly sees a key: [B|1, H|1, query blocks|1, 1].

    We look for one visible key among the first, or for a whole stretch of them anywhere.
    """
    first = dataclasses.replace(whole, keys=(0, min(_STRETCH, whole.keys[1])))
    near = evaluate(visible, None, inputs, numbers, first).bool().any(-1, keepdim=True)
    certain, _ = _as_bool(_Intervals(inputs, numbers, whole, (1, _STRETCH)).of(visible))
    sees = near | certain.any(-1, keepdim=True)
    return sees if sees.shape[2] == 1 else _reduced_along(sees, 2, rows, torch.amin)


def _ends(length: int, size: int, dim: int, device: torch.device) -> _Interval:
    """The first and the last position of each block, along dimension `dim` of four."""
    first = torch.arange(0, length, size, device=device)
    shape = [-1 if d == dim else 1 for d in range(4)]
    return first.view(shape), (first + size - 1).clamp(max=length - 1).view(shape)


@dataclass
class _Intervals:
    """[min, max] of expressions over each block, both ends [B|1, H|1, query blocks|1, key blocks|1].

    For a Boolean: whether it holds everywhere in a block, and whether anywhere. NaN in either end means unknown.
    """

    inputs: Sequence[Tensor]
    numbers: Sequence[int]
    whole: Block
    blocks: tuple[int, int]
    known: dict[int, _Interval] = field(default_factory=dict)
    dependence: dict[int, frozenset[str]] = field(default_factory=dict)

    def of(self, expr: Expr) -> _Interval:
        if id(expr) not in self.known:
            self.known[id(expr)] = self._found(expr)
        return self.known[id(expr)]

    def _found(self, expr: Expr) -> _Interval:
        if len(self._depends_on(expr)) < 2:
            exact = _ordered(evaluate(expr, None, self.inputs, self.numbers, self.whole))
            return self._reduced(exact, torch.amin), self._reduced(exact, torch.amax)
        match expr:
            case And(a, b) | Or(a, b):
                joined = torch.logical_and if isinstance(expr, And) else torch.logical_or
                (a_low, a_high), (b_low, b_high) = (_as_bool(self.of(part)) for part in (a, b))
                return joined(a_low, b_low), joined(a_high, b_high)
            case Not(part):
                return _negated(_as_bool(self.of(part)))
            case Select(condition, a, b):
                return _either(_as_bool(self.of(condition)), self.of(a), self.of(b))
            case Compare(name, a, b):
                return _compared(name, self.of(a), self.of(b))
            case Cast(torch.bool, part):
                return _as_bool(self.of(part))
            case Cast(dtype, part) if dtype in (torch.int64, *_FLOATING):
                return _converted(self.of(part), dtype)
        row = FUNCTIONS.get(name_of(expr))
        if row is not None and row.interval is not None:
            operands = [self.of(part) for part in children(expr)]
            dtype = functools.reduce(torch.promote_types, [low.dtype for low, _ in operands])
            # torch's sum of two Booleans is their disjunction.
            if dtype != torch.bool:
                return _arithmetic(functools.partial(row.interval, _ENDS), operands, dtype)
        return self._by_strips(expr)

    def _depends_on(self, expr: Expr) -> frozenset[str]:
        """Those of i and j that the value of `expr` depends on."""
        if id(expr) not in self.dependence:
            found = frozenset[str]().union(*map(self._depends_on, children(expr)))
            if isinstance(expr, Input):
                along = zip("ij", self.inputs[expr.leaf].shape[2:], strict=True)
                found = frozenset(name for name, length in along if length != 1)
            elif isinstance(expr, Position) and expr.name in "ij":
                found = frozenset({expr.name})
            self.dependence[id(expr)] = found
        return self.dependence[id(expr)]

    def _reduced(self, x: Tensor, by: Callable[..., Tensor]) -> Tensor:
        for dim, size in zip((2, 3), self.blocks, strict=True):
            if x.shape[dim] != 1 or self.whole.shape[dim] == 1:
                x = _reduced_along(x, dim, size, by)
        return x

    def _by_strips(self, expr: Expr) -> _Interval:
        """The interval of `expr` from each of its elements, one block of queries at a time."""
        lows, highs = [], []
        q_len, size = self.whole.shape[2], self.blocks[0]
        for start in range(0, q_len, size):
            queries = (start, min(start + size, q_len))
            strip = Block(
                self.whole.batch, self.whole.heads, queries, self.whole.keys, self.whole.device, self.whole.dtype
            )
            exact = _ordered(evaluate(expr, None, self.inputs, self.numbers, strip))
            exact = exact.expand(*exact.shape[:2], *strip.shape[2:])
            lows.append(_reduced_along(exact.amin(2, keepdim=True), 3, self.blocks[1], torch.amin))
            highs.append(_reduced_along(exact.amax(2, keepdim=True), 3, self.blocks[1], torch.amax))
        return torch.cat(lows, 2), torch.cat(highs, 2)


def _reduced_along(x: Tensor, dim: int, size: int, by: Callable[..., Tensor]) -> Tensor:
    length = x.shape[dim]
    full = length // size * size
    parts = [by(x.narrow(dim, 0, full).unflatten(dim, (full // size, size)), dim + 1)]
    if full < length:
        parts.append(by(x.narrow(dim, full, length - full), dim, keepdim=True))
    return torch.cat(parts, dim)


def _as_bool(x: _Interval) -> _Interval:
    low, high = x
    if low.dtype == torch.bool:
        return x
    nonzero = (low > 0) | (high < 0)
    return nonzero, (low != 0) | (high != 0)


def _negated(x: _Interval) -> _Interval:
    return ~x[1], ~x[0]


def _either(condition: _Interval, a: _Interval, b: _Interval) -> _Interval:
    must, can = condition
    (a_low, a_high), (b_low, b_high) = a, b
    if a_low.dtype == b_low.dtype == torch.bool:
        low, high = a_low & b_low, a_high | b_high
    else:
        low, high = torch.minimum(*_promoted(a_low, b_low)), torch.maximum(*_promoted(a_high, b_high))
    low = torch.where(must, a_low, torch.where(can, low, b_low))
    return low, torch.where(must, a_high, torch.where(can, high, b_high))


def _compared(name: str, a: _Interval, b: _Interval) -> _Interval:
    (a_low, a_high), (b_low, b_high) = a, b
    unknown = functools.reduce(torch.logical_or, [x.isnan() for x in (a_low, a_high, b_low, b_high)])
    match name:
        case "ge":
            must, can = a_low >= b_high, a_high >= b_low
        case "gt":
            must, can = a_low > b_high, a_high > b_low
        case "le":
            must, can = a_high <= b_low, a_low <= b_high
        case "lt":
            must, can = a_high < b_low, a_low < b_high
        case _:
            must = (a_low == a_high) & (b_low == b_high) & (a_low == b_low)
            can = (a_low <= b_high) & (b_low <= a_high)
            if name == "ne":
                must, can = ~can, ~must
    return must & ~unknown, can | unknown


def _ordered(x: Tensor) -> Tensor:
    """`x` in a dtype whose min and max torch can find; for uint64 NaN, which means unknown."""
    match x.dtype:
        case torch.uint16 | torch.uint32:
            return x.long()
        case torch.uint64:
            return torch.full(x.shape, torch.nan, device=x.device)
    return x


def _converted(x: _Interval, dtype: torch.dtype) -> _Interval:
    """`x` converted to int64 or a floating-point dtype."""
    low, high = x
    if not low.is_floating_point() or dtype.is_floating_point:
        return low.to(dtype), high.to(dtype)
    # NaN and numbers that are too large may become any integer.
    known, limits = (low >= -_LARGE) & (high <= _LARGE), torch.iinfo(dtype)
    low, high = (torch.where(known, end, 0.0).to(dtype) for end in x)
    return torch.where(known, low, limits.min), torch.where(known, high, limits.max)


def _arithmetic(operation: Callable[..., _Interval], operands: Sequence[_Interval], dtype: torch.dtype) -> _Interval:
    """The interval that `operation` gives for the ends of `operands`, computed in `dtype`."""
    if dtype.is_floating_point:
        return operation(*((low.to(dtype), high.to(dtype)) for low, high in operands))
    # Integers wrap around beyond their limits; we treat them as unknown.
    limits = torch.iinfo(dtype)
    roughly = operation(*((low.double(), high.double()) for low, high in operands))
    fits = (roughly[0] >= max(limits.min, -_LARGE)) & (roughly[1] <= min(limits.max, _LARGE))
    low, high = operation(*((low.long(), high.long()) for low, high in operands))
    return torch.where(fits, low, limits.min).to(dtype), torch.where(fits, high, limits.max).to(dtype)


def _promoted(*several: Tensor) -> list[Tensor]:
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in several])
    return [x.to(dtype) for x in several]


_ENDS = Order(torch.minimum, torch.maximum)
