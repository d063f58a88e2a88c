"""Visibility: the blocks of the scores that a mask hides, found without making the mask.

Interval arithmetic evaluates `visible` of a score program, as [min, max] of each node over a block. Comparisons of
positions, lengths and document numbers come out exact or nearly so, at a cost linear in q_len + kv_len. Tables and
tensors that depend on both positions are read element by element.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_fuse.expression.functions import COMPARISONS, FUNCTIONS, Order
from attn_fuse.expression.nodes import TRUE, And, Cast, Compare, Expr, Not, Or, Position, Select, children, name_of
from attn_fuse.kernels.score.dependence import dependences, varying
from attn_fuse.kernels.score.program import Block, ScoreProgram, evaluate

_Interval = tuple[Tensor, Tensor]
# Keys that are checked one by one at the start, and together further on.
_STRETCH = 32
# So far below the max of int64 that the rounding of float64 does not matter.
_LARGE = 2.0**62
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Visibility:
    """The blocks that a mask leaves visible, Bool [B|1, H|1, query blocks, key blocks].

    some: whether some query of a block may see some key; if not, every weight of the block is 0. Under
        `hides_only_if_others_seen`, also True for the blocks of queries that may be fully masked.
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
    """The visibility of each block.

    sizes: batch, heads, q_len, kv_len. blocks: queries and keys in a block; the last of each may be shorter.
    dtype: the kernel's compute dtype, in which functions make fractions of integers.
    """
    batch, heads, q_len, kv_len = sizes
    whole = Block(batch, heads, (0, q_len), (0, kv_len), device, dtype)
    distance = Position("j") - Position("i")
    conditions = [] if program.visible is None else [program.visible]
    if program.upper is not None:
        conditions.append(Compare("le", distance, program.upper))
    if program.lower is not None:
        conditions.append(Compare("ge", distance, program.lower))
    shown = functools.reduce(And, conditions) if conditions else TRUE
    depends = dependences(shown, [varying(x.shape) for x in inputs])
    every, some = _as_bool(_Intervals(inputs, numbers, whole, blocks, depends).of(shown))
    if program.hides_only_if_others_seen:
        # A query sees a key if one of the first is visible, or a whole stretch anywhere.
        first = dataclasses.replace(whole, keys=(0, min(_STRETCH, kv_len)))
        near = evaluate(shown, None, inputs, numbers, first).bool().any(-1, keepdim=True)
        stretches = _Intervals(inputs, numbers, whole, (1, _STRETCH), depends).of(shown)
        sees = near | _as_bool(stretches)[0].any(-1, keepdim=True)
        some = some | ~(sees if sees.shape[2] == 1 else _reduced_along(sees, 2, blocks[0], torch.amin))
    shape = (
        *torch.broadcast_shapes(every.shape, some.shape)[:2],
        *(-(-n // b) for n, b in zip(sizes[2:], blocks, strict=True)),
    )
    return Visibility(some.expand(shape), every.expand(shape))


@dataclass
class _Intervals:
    """[min, max] of expressions over each block, both ends [B|1, H|1, query blocks|1, key blocks|1].

    For a Boolean: whether it holds everywhere in a block, and whether anywhere. NaN in either end means unknown.
    """

    inputs: Sequence[Tensor]
    numbers: Sequence[int]
    whole: Block
    blocks: tuple[int, int]
    depends: Mapping[int, frozenset[str]]
    known: dict[int, _Interval] = field(default_factory=dict)

    def of(self, expr: Expr) -> _Interval:
        if id(expr) not in self.known:
            self.known[id(expr)] = self._found(expr)
        return self.known[id(expr)]

    def _found(self, expr: Expr) -> _Interval:
        if not {"i", "j"} <= self.depends[id(expr)]:
            return self._reduced(evaluate(expr, None, self.inputs, self.numbers, self.whole))
        match expr:
            case And(a, b) | Or(a, b):
                joined = torch.logical_and if isinstance(expr, And) else torch.logical_or
                (a_low, a_high), (b_low, b_high) = (_as_bool(self.of(part)) for part in (a, b))
                return joined(a_low, b_low), joined(a_high, b_high)
            case Not(part):
                must, can = _as_bool(self.of(part))
                return ~can, ~must
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
            # The sum of two Booleans is their disjunction, no arithmetic.
            if dtype != torch.bool:
                return _arithmetic(functools.partial(row.interval, _ENDS), operands, dtype)
        return self._by_strips(expr)

    def _reduced(self, x: Tensor) -> _Interval:
        low = high = _ordered(x)
        for dim, size in zip((2, 3), self.blocks, strict=True):
            if x.shape[dim] != 1 or self.whole.shape[dim] == 1:
                low, high = _reduced_along(low, dim, size, torch.amin), _reduced_along(high, dim, size, torch.amax)
        return low, high

    def _by_strips(self, expr: Expr) -> _Interval:
        """The interval of `expr`, from all its elements, one block of queries at a time."""
        q_len, size = self.whole.shape[2], self.blocks[0]
        found = []
        for start in range(0, max(q_len, 1), size):
            strip = dataclasses.replace(self.whole, queries=(start, min(start + size, q_len)))
            exact = evaluate(expr, None, self.inputs, self.numbers, strip)
            found.append(self._reduced(exact.expand(*exact.shape[:2], *strip.shape[2:])))
        low, high = (torch.cat(ends, 2) for ends in zip(*found, strict=True))
        return low, high


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


def _either(condition: _Interval, a: _Interval, b: _Interval) -> _Interval:
    must, can = condition
    (a_low, a_high), (b_low, b_high) = a, b
    low, high = torch.minimum(a_low, b_low), torch.maximum(a_high, b_high)
    low = torch.where(must, a_low, torch.where(can, low, b_low))
    return low, torch.where(must, a_high, torch.where(can, high, b_high))


def _compared(name: str, a: _Interval, b: _Interval) -> _Interval:
    (a_low, a_high), (b_low, b_high) = a, b
    if name in ("eq", "ne"):
        must = (a_low == a_high) & (b_low == b_high) & (a_low == b_low)
        can = (a_low <= b_high) & (b_low <= a_high)
        if name == "ne":
            must, can = ~can, ~must
    else:
        worst, best = (a_low, b_high), (a_high, b_low)
        if name in ("le", "lt"):
            worst, best = best, worst
        must, can = COMPARISONS[name](*worst), COMPARISONS[name](*best)
    unknown = functools.reduce(torch.logical_or, [x.isnan() for x in (a_low, a_high, b_low, b_high)])
    return must & ~unknown, can | unknown


def _ordered(x: Tensor) -> Tensor:
    """`x` in a dtype of which torch has min and max; NaN, which means unknown, for uint64."""
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
    # NaN and huge numbers may become any integer.
    known, limits = (low >= -_LARGE) & (high <= _LARGE), torch.iinfo(dtype)
    low, high = (torch.where(known, end, 0.0).to(dtype) for end in x)
    return torch.where(known, low, limits.min), torch.where(known, high, limits.max)


def _arithmetic(operation: Callable[..., _Interval], operands: Sequence[_Interval], dtype: torch.dtype) -> _Interval:
    """The interval of `operation` on the ends of `operands`, computed in `dtype`."""
    if dtype.is_floating_point:
        return operation(*((low.to(dtype), high.to(dtype)) for low, high in operands))
    # Integers that may wrap around are unknown.
    limits = torch.iinfo(dtype)
    roughly = operation(*((low.double(), high.double()) for low, high in operands))
    fits = (roughly[0] >= max(limits.min, -_LARGE)) & (roughly[1] <= min(limits.max, _LARGE))
    low, high = operation(*((low.long(), high.long()) for low, high in operands))
    return torch.where(fits, low, limits.min).to(dtype), torch.where(fits, high, limits.max).to(dtype)


_ENDS = Order(torch.minimum, torch.maximum)
