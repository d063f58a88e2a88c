"""Mask: the keys that a query sees, as a conjunction of parts, with a class for each kind of part.

A new kind of mask is a class here and its place in PARTS. The class owns all facts of its kind: how to read it off a
Boolean element expression, the words of the report, bounds on j - i, and the measurements that stand for it.
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

Kind = Literal["none", "causal", "window", "prefix", "padding", "documents", "dense"]
# The kinds of mask that evidence knows, the cheapest first. "window": a band of keys around each query, or a causal
# mask with an offset.
KINDS: tuple[Kind, ...] = ("none", "causal", "window", "prefix", "padding", "documents", "dense")
# The result of a fully masked row as written: there is no such row, NaN, zero, or the mean of all values.
EmptyRows = Literal["none", "nan", "zero", "mean"]


class Band(NamedTuple):
    """The keys that query i sees by positions alone: i + lower <= j <= i + upper, and the share `first` from key 0.

    None for no bound.
    """

    lower: sympy.Expr | None = None
    upper: sympy.Expr | None = None
    first: float = 0.0


@dataclass(frozen=True)
class MaskPart:
    """One condition of a mask. keep: a Boolean element expression, True = keep. kind: its name in the evidence."""

    keep: Expr
    kind: ClassVar[Kind] = "dense"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> MaskPart | None:
        """`keep` as a part of this kind; None where it is of another kind."""
        raise NotImplementedError

    @property
    def band(self) -> Band:
        """About the keys that positions alone leave visible, for estimates of speed and the search for a seen key."""
        return Band()

    @property
    def bounds(self) -> tuple[sympy.Expr | None, sympy.Expr | None]:
        """The (min, max) of j - i where a key may be seen; None for no bound. Kernels skip the keys beyond."""
        lower, upper, first = self.band
        return (None, None) if first else (lower, upper)

    @property
    def rule(self) -> str:
        """A formula for the keys j that query i sees; "" where there is none."""
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
        """`keep` as j <= i + offset, where the offset is the same for all elements; else None."""
        offset = _offset(keep, axes, space, 1)
        return None if offset is None else Causal(keep, offset)

    @property
    def band(self) -> Band:
        """The keys up to i + offset."""
        return Band(upper=self.offset)

    @property
    def rule(self) -> str:
        """The condition; an offset of 0 is left out."""
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
        """`keep` as j >= i - reach, where the reach is the same for all elements; else None."""
        reach = _offset(keep, axes, space, -1)
        return None if reach is None else Window(keep, reach)

    @property
    def band(self) -> Band:
        """The keys from i - reach on."""
        return Band(lower=-self.reach)

    def __str__(self) -> str:
        return f"window reaching {self.reach} back"


@dataclass(frozen=True)
class Prefix(MaskPart):
    """Query i sees key j where j <= i + offset, and every key of a prefix whose length is in `keep`."""

    offset: sympy.Expr
    kind = "prefix"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> Prefix | None:
        """`keep` as "j <= i + offset, or a condition that does not depend on the query"; None for another kind."""
        match keep:
            case ex.Or(a, b):
                for one, other in ((a, b), (b, a)):
                    triangle = Causal.read(one, axes, space)
                    if triangle is not None and not ex.index_symbols(other) & {*axes.query, *axes.groups}:
                        return Prefix(keep, triangle.offset)
        return None

    @property
    def band(self) -> Band:
        """The keys up to i + offset, and a quarter of all keys for the prefix."""
        # The length of the prefix is known only when the program runs.
        return Band(upper=self.offset, first=0.25)

    def __str__(self) -> str:
        return "causal behind a prefix that all see"


@dataclass(frozen=True)
class Documents(MaskPart):
    """A query sees the keys of its own document: those with the same number as its own."""

    kind = "documents"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> Documents | None:
        """`keep` as one tensor at the query's position == the same tensor at the key's; else None."""
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
        """`keep` as a condition that depends on the key, but neither on the query nor on the head; else None."""
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
        """`keep` as a formula that reads neither a tensor nor a number of the program; else None."""
        reads = any(isinstance(part, (ex.Load, ex.Gather, ex.Scalar)) for part in ex.walk(keep))
        return None if reads else PositionMask(keep)

    def __str__(self) -> str:
        return "a mask computed from positions"


@dataclass(frozen=True)
class DenseMask(MaskPart):
    """Query i sees key j where `keep`, which reads a tensor, holds."""

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> DenseMask:
        """`keep`, whatever it is."""
        return DenseMask(keep)

    def __str__(self) -> str:
        return "a mask kept as a tensor"


# In the order in which they are tried; the last takes every condition that no other takes.
PARTS: tuple[type[MaskPart], ...] = (Causal, Window, Prefix, Documents, KeyPadding, PositionMask, DenseMask)


@dataclass(frozen=True)
class Mask:
    """The conjunction of `parts`.

    empty_rows: the result of a fully masked row as written: "none" (proved that there is no such row), "nan", "zero",
        or "mean" (the mean of all values, which a finite fill gives).
    parts_if_others_seen: the conditions of finite fills, where not every row is proved to see a key. They hide keys in
        rows that see some key; a fully masked row has weights for all keys. `parts` or the biases hold the fills, too.
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
        """The (min, max) of j - i where a key may be seen, each from one part; None for no bound."""
        lower = next((part.bounds[0] for part in self.parts if part.bounds[0] is not None), None)
        upper = next((part.bounds[1] for part in self.parts if part.bounds[1] is not None), None)
        return lower, upper


def mask_parts(keeps: Iterable[Expr], axes: Axes, space: Space) -> tuple[MaskPart, ...]:
    """The parts of the conjunction of `keeps`, each once, without conditions that always hold."""
    found: list[MaskPart] = []
    for keep in keeps:
        for condition in conjuncts(keep):
            part = next(part for kind in PARTS if (part := kind.read(condition, axes, space)) is not None)
            if condition != ex.TRUE and part not in found:
                found.append(part)
    return tuple(found)


def conjuncts(keep: Expr) -> Iterator[Expr]:
    """The conditions whose conjunction is `keep`."""
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


def _offset(keep: Expr, axes: Axes, space: Space, sign: int) -> sympy.Expr | None:
    """c in `keep`, sign * (i - j) + c >= 0, if it is the same for all elements: a number, or made of sizes."""
    if not isinstance(keep, ex.NonNegative) or not axes.query:
        return None
    apart = position(axes.query, space) - position(axes.key, space)
    offset = sympy.expand(keep.value - sign * apart)
    return None if offset.free_symbols & space.sizes.keys() else offset


def every_query_sees_a_key(
    parts: Iterable[MaskPart], axes: Axes, space: Space, leaf_dtypes: Mapping[int, torch.dtype]
) -> bool:
    """Whether each query is proved to see key 0, the key at its own position, or key i + offset of a causal part.

    leaf_dtypes: the dtype of each leaf that is a tensor.
    """
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
            # An integer equals itself; a floating-point number may be NaN, which does not.
            loads = [part for part in ex.walk(a) if isinstance(part, (ex.Load, ex.Gather))]
            return a == b and bool(loads) and not any(leaf_dtypes[x.leaf].is_floating_point for x in loads)
    return False
