"""Mask: the keys that a query sees, as a conjunction of parts. A kind of part is a class that owns all of its facts.

A new kind of mask is a class here and its place in PARTS: how it is read off a Boolean element expression, what the
report says of it, what it bounds, and which measurements stand for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import sympy
import torch

from attn_fuse.attention.axes import Axes, position
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Const, Expr
from attn_fuse.torch_internals import FloorDiv, Mod

Kind = Literal["none", "causal", "window", "prefix", "padding", "documents", "dense"]
# The kinds of mask that evidence knows, the cheapest first. "window": a band of keys around each query, or a causal
# mask with an offset.
KINDS: tuple[Kind, ...] = ("none", "causal", "window", "prefix", "padding", "documents", "dense")
# What a query that sees no key gives as written: there is no such query, NaN, zero, or the mean of all values.
EmptyRows = Literal["none", "nan", "zero", "mean"]


class Band(NamedTuple):
    """The keys that query i sees by positions alone: i + lower <= j <= i + upper, and a share of the first keys."""

    lower: sympy.Expr | None = None
    upper: sympy.Expr | None = None
    first: float = 0.0


@dataclass(frozen=True)
class MaskPart:
    """One condition of a mask. keep: a Boolean element expression, True where the query sees the key."""

    keep: Expr
    kind: ClassVar[Kind] = "dense"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> MaskPart | None:
        """The part that `keep` is, or None for another kind."""
        raise NotImplementedError

    @property
    def band(self) -> Band:
        """The keys that positions alone leave visible, about; an estimate of speed and a search for a seen key ask."""
        return Band()

    @property
    def bounds(self) -> tuple[sympy.Expr | None, sympy.Expr | None]:
        """The min and max of j - i where a key may be seen; None for no bound. Kernels skip keys beyond."""
        return None, None

    @property
    def rule(self) -> str:
        """Which keys query i sees, in a formula; "" where none says it."""
        return ""

    def __str__(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Causal(MaskPart):
    """Query i sees key j where j <= i + offset."""

    offset: sympy.Expr
    kind = "causal"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> Causal | None:
        if not isinstance(keep, ex.NonNegative) or not axes.query:
            return None
        offset = sympy.expand(keep.value - position(axes.query, space) + position(axes.key, space))
        return Causal(keep, offset) if _is_number(offset, axes) else None

    @property
    def band(self) -> Band:
        return Band(upper=self.offset)

    @property
    def bounds(self) -> tuple[None, sympy.Expr]:
        return None, self.offset

    @property
    def rule(self) -> str:
        return "j <= i" if self.offset == 0 else f"j <= i + {self.offset}"

    def __str__(self) -> str:
        return "causal" if self.offset == 0 else f"causal with offset {self.offset}"


@dataclass(frozen=True)
class Window(MaskPart):
    """Query i sees key j where j >= i - reach: the far end of a sliding window."""

    reach: sympy.Expr
    kind = "window"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> Window | None:
        if not isinstance(keep, ex.NonNegative) or not axes.query:
            return None
        reach = sympy.expand(keep.value + position(axes.query, space) - position(axes.key, space))
        return Window(keep, reach) if _is_number(reach, axes) else None

    @property
    def band(self) -> Band:
        return Band(lower=-self.reach)

    @property
    def bounds(self) -> tuple[sympy.Expr, None]:
        return -self.reach, None

    def __str__(self) -> str:
        return f"window reaching {self.reach} back"


@dataclass(frozen=True)
class Prefix(MaskPart):
    """Query i sees key j where j <= i + offset, and every key of the prefix, which `keep` says the length of."""

    offset: sympy.Expr
    kind = "prefix"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> Prefix | None:
        match keep:
            case ex.Or(a, b):
                for one, other in ((a, b), (b, a)):
                    triangle = Causal.read(one, axes, space)
                    if triangle is not None and not ex.index_symbols(other) & {*axes.query, *axes.groups}:
                        return Prefix(keep, triangle.offset)
        return None

    @property
    def band(self) -> Band:
        # The length of the prefix is known only when the program runs.
        return Band(upper=self.offset, first=0.25)

    def __str__(self) -> str:
        return "causal behind a prefix that all see"


@dataclass(frozen=True)
class Documents(MaskPart):
    """A query sees the keys that carry the same number as itself."""

    kind = "documents"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> Documents | None:
        match keep:
            case ex.Compare("eq", ex.Load(a, at), ex.Load(b, to)) if a == b and axes.query:
                by_key = dict(zip(axes.query, axes.key, strict=False))
                if len(axes.query) == len(axes.key) and at != to and _renamed(at, by_key) == _renamed(to, by_key):
                    return Documents(keep)
        return None

    def __str__(self) -> str:
        return "documents"


@dataclass(frozen=True)
class KeyPadding(MaskPart):
    """Every query of a batch entry sees the same keys, those where `keep` holds."""

    kind = "padding"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> KeyPadding | None:
        used = ex.index_symbols(keep)
        is_padding = used & set(axes.key) and not used & {*axes.query, *axes.kv_heads, *axes.groups}
        return KeyPadding(keep) if is_padding else None

    def __str__(self) -> str:
        return "key padding"


@dataclass(frozen=True)
class PositionMask(MaskPart):
    """Query i sees key j where a formula of positions and sizes holds; no tensor is read."""

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> PositionMask | None:
        reads = any(isinstance(part, (ex.Load, ex.Gather, ex.Scalar)) for part in ex.walk(keep))
        return None if reads else PositionMask(keep)

    def __str__(self) -> str:
        return "a mask computed from positions"


@dataclass(frozen=True)
class DenseMask(MaskPart):
    """Query i sees key j where `keep` holds, which reads a tensor."""

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> DenseMask:
        return DenseMask(keep)

    def __str__(self) -> str:
        return "a mask kept as a tensor"


# In the order in which they are tried; the last takes what no other does.
PARTS: tuple[type[MaskPart], ...] = (Causal, Window, Prefix, Documents, KeyPadding, PositionMask, DenseMask)


@dataclass(frozen=True)
class Mask:
    """The conjunction of its parts.

    empty_rows: what the original gives for a fully masked row: "none" (proved that there is none), "nan", "zero", or
        "mean" (the mean of all values, which a finite fill gives).
    parts_if_others_seen: what finite fills hide from a query that sees some key, where not every row is proved to see
        one. A fully masked row has weights for all keys. `parts` or the biases say what the fills make of the scores.
    """

    parts: tuple[MaskPart, ...] = ()
    empty_rows: EmptyRows = "none"
    parts_if_others_seen: tuple[MaskPart, ...] = ()

    @property
    def is_causal(self) -> bool:
        """Whether the mask is the square causal one, aligned at the top left, and nothing else."""
        return len(self.parts) == 1 and isinstance(self.parts[0], Causal) and self.parts[0].offset == 0

    @property
    def bounds(self) -> tuple[sympy.Expr | None, sympy.Expr | None]:
        """The min and max of j - i where a key may be seen, by one part each; None for no bound."""
        lower = next((part.bounds[0] for part in self.parts if part.bounds[0] is not None), None)
        upper = next((part.bounds[1] for part in self.parts if part.bounds[1] is not None), None)
        return lower, upper


def mask_parts(keeps: Iterable[Expr], axes: Axes, space: Space) -> tuple[MaskPart, ...]:
    """The parts of the conjunction of `keeps`, each once; those that always hold are left out."""
    found: list[MaskPart] = []
    for keep in keeps:
        for condition in conjuncts(keep):
            part = next(part for kind in PARTS if (part := kind.read(condition, axes, space)) is not None)
            if condition != ex.TRUE and part not in found:
                found.append(part)
    return tuple(found)


def conjuncts(keep: Expr) -> Iterator[Expr]:
    """The conditions of which `keep` is the conjunction."""
    match keep:
        case ex.And(a, b):
            yield from conjuncts(a)
            yield from conjuncts(b)
        case ex.Select(cond, a, Const(False)):
            yield from conjuncts(cond)
            yield from conjuncts(a)
        case ex.Select(cond, Const(False), b):
            yield from conjuncts(al.logical_not(cond))
            yield from conjuncts(b)
        case ex.Not(ex.Or(a, b)):
            yield from conjuncts(al.logical_not(a))
            yield from conjuncts(al.logical_not(b))
        case _:
            yield keep


def _renamed(index: tuple[sympy.Expr, ...], by: Mapping[sympy.Symbol, sympy.Expr]) -> tuple[sympy.Expr, ...]:
    return tuple(sympy.expand(i.subs(by)) for i in index)


def _is_number(value: sympy.Expr, axes: Axes) -> bool:
    """Whether `value` is the same for all elements: a number, or an expression of sizes."""
    known = {*axes.batch, *axes.kv_heads, *axes.groups, *axes.query, *axes.key}
    return not value.free_symbols & known and not value.has(FloorDiv, Mod)


def every_query_sees_a_key(
    parts: Iterable[MaskPart], axes: Axes, space: Space, leaf_dtypes: Mapping[int, torch.dtype]
) -> bool:
    """Whether a key is named that each query sees: the first, or the one that stands where the query does."""
    parts = tuple(parts)
    if not parts:
        return True
    return any(
        all(_holds(al.substitute(part.keep, witness, space), leaf_dtypes) for part in parts)
        for witness in _witnesses(parts, axes, space)
    )


def _witnesses(parts: tuple[MaskPart, ...], axes: Axes, space: Space) -> Iterator[dict[sympy.Symbol, sympy.Expr]]:
    yield dict.fromkeys(axes.key, sympy.Integer(0))
    if len(axes.query) != len(axes.key):
        return
    if all(space.is_nonnegative(space.sizes[k] - space.sizes[q]) for q, k in zip(axes.query, axes.key, strict=True)):
        yield dict(zip(axes.key, axes.query, strict=True))
    if len(axes.key) == 1:
        (query,), (key,) = axes.query, axes.key
        for part in parts:
            offset = part.band.upper
            last = space.sizes[key] - space.sizes[query]
            if offset is not None and space.is_nonnegative(offset) and space.is_nonnegative(last - offset):
                yield {key: query + offset}


def _holds(keep: Expr, leaf_dtypes: Mapping[int, torch.dtype]) -> bool:
    match keep:
        case Const(value):
            return bool(value)
        case ex.And(a, b):
            return _holds(a, leaf_dtypes) and _holds(b, leaf_dtypes)
        case ex.Or(a, b):
            return _holds(a, leaf_dtypes) or _holds(b, leaf_dtypes)
        case ex.Select(_, a, b):
            return _holds(a, leaf_dtypes) and _holds(b, leaf_dtypes)
        case ex.Compare("eq" | "le" | "ge", a, b):
            # A number that is not equal to itself exists among the floating-point ones only.
            loads = [part for part in ex.walk(a) if isinstance(part, (ex.Load, ex.Gather))]
            return a == b and bool(loads) and not any(leaf_dtypes[x.leaf].is_floating_point for x in loads)
    return False
