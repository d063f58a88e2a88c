"""Mask: the keys that each query sees, as a conjunction of parts, with a class for each kind of part.

To add a kind of mask, write a class and add it to PARTS. The class says how to read it from a Boolean expression, its
words in the report, bounds on j - i, and which measurements apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import sympy
import torch

from attn_fuse.attention.axes import Axes, position
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Const, Expr

Kind = Literal["none", "causal", "window", "prefix", "padding", "documents", "dense"]
# The kinds of mask in the evidence, cheapest first. A causal mask with an offset counts as "window".
KINDS: tuple[Kind, ...] = get_args(Kind)
# The output of a fully masked row as written ("mean": of all values); "none" if there is no such row.
EmptyRows = Literal["none", "nan", "zero", "mean"]


class Band(NamedTuple):
    """The keys visible by position: i + lower <= j <= i + upper (None: no bound), and the share `first` of all keys."""

    lower: sympy.Expr | None = None
    upper: sympy.Expr | None = None
    first: float = 0.0


@dataclass(frozen=True)
class MaskPart:
    """One condition of a mask. keep: a Boolean expression, True = keep. kind: in the evidence. words: in the report."""

    keep: Expr
    kind: ClassVar[Kind] = "dense"
    words: ClassVar[str] = ""

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> MaskPart | None:
        """`keep` as a part of this kind, or None."""
        raise NotImplementedError

    @property
    def band(self) -> Band:
        """Roughly the keys visible by position, for estimates of speed and the search for a visible key."""
        return Band()

    @property
    def bounds(self) -> tuple[sympy.Expr | None, sympy.Expr | None]:
        """The (min, max) of j - i where a key may be visible; None for no bound. Kernels skip the other keys."""
        lower, upper, first = self.band
        return (None, None) if first else (lower, upper)

    @property
    def rule(self) -> str:
        """A formula for the keys j that query i sees; "" for none."""
        return ""

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Causal(MaskPart):
    """Query i sees key j where j <= i + offset."""

    offset: sympy.Expr
    kind = "causal"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> Causal | None:
        offset = _offset(keep, axes, space, 1)
        return None if offset is None else Causal(keep, offset)

    @property
    def band(self) -> Band:
        return Band(upper=self.offset)

    @property
    def rule(self) -> str:
        return "j <= i" if self.offset == 0 else f"j <= i + {self.offset}"

    def __str__(self) -> str:
        return "causal" if self.offset == 0 else f"causal with offset {self.offset}"


@dataclass(frozen=True)
class Window(MaskPart):
    """Query i sees key j where j >= i - reach, as in a sliding window."""

    reach: sympy.Expr
    kind = "window"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> Window | None:
        reach = _offset(keep, axes, space, -1)
        return None if reach is None else Window(keep, reach)

    @property
    def band(self) -> Band:
        return Band(lower=-self.reach)

    def __str__(self) -> str:
        return f"window reaching {self.reach} back"


@dataclass(frozen=True)
class Prefix(MaskPart):
    """Query i sees key j where j <= i + offset, and the keys where a condition independent of the query holds."""

    offset: sympy.Expr
    kind = "prefix"
    words = "causal after a prefix that every query sees"

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
        # The length of the prefix is known only at run time, so a quarter of all keys is assumed.
        return Band(upper=self.offset, first=0.25)


@dataclass(frozen=True)
class Documents(MaskPart):
    """A query sees the keys of its own document, which have the same number in a tensor."""

    kind = "documents"
    words = "documents"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> Documents | None:
        match keep:
            case ex.Compare("eq", ex.Load(a, at), ex.Load(b, to)) if a == b and axes.query:
                by_key = dict(zip(axes.query, axes.key, strict=False))
                same = all(space.is_zero((i - j).subs(by_key)) for i, j in zip(at, to, strict=True))
                if len(axes.query) == len(axes.key) and at != to and same:
                    return Documents(keep)
        return None


@dataclass(frozen=True)
class KeyPadding(MaskPart):
    """All queries of a batch entry see the same keys; `keep` depends on neither query nor head."""

    kind = "padding"
    words = "key padding"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> KeyPadding | None:
        used = ex.index_symbols(keep)
        is_padding = used & set(axes.key) and not used & {*axes.query, *axes.kv_heads, *axes.groups}
        return KeyPadding(keep) if is_padding else None


@dataclass(frozen=True)
class PositionMask(MaskPart):
    """Query i sees key j where a formula of positions and sizes holds, without a tensor or scalar of the program."""

    words = "a mask computed from positions"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> PositionMask | None:
        reads = any(isinstance(part, (ex.Load, ex.Gather, ex.Scalar)) for part in ex.walk(keep))
        return None if reads else PositionMask(keep)


@dataclass(frozen=True)
class DenseMask(MaskPart):
    """Query i sees key j where `keep`, which reads a tensor, holds."""

    words = "a mask kept as a tensor"

    @classmethod
    def read(cls, keep: Expr, axes: Axes, space: Space) -> DenseMask:
        return DenseMask(keep)


# In the order of trying; the last takes any condition.
PARTS: tuple[type[MaskPart], ...] = (Causal, Window, Prefix, Documents, KeyPadding, PositionMask, DenseMask)


@dataclass(frozen=True)
class Mask:
    """The conjunction of `parts`.

    empty_rows: the output of a fully masked row as written: "none" (proved that there is no such row), "nan", "zero",
        or "mean" (of all values, as a finite fill gives).
    parts_if_others_seen: the conditions of finite fills if some row may be fully masked. They hide keys only in rows
        that see another key; a fully masked row attends to all keys. The fills are in `parts` or the biases, too.
    """

    parts: tuple[MaskPart, ...] = ()
    empty_rows: EmptyRows = "none"
    parts_if_others_seen: tuple[MaskPart, ...] = ()

    @property
    def is_causal(self) -> bool:
        """Whether the mask is only the causal one with offset 0, aligned at the top left."""
        return len(self.parts) == 1 and isinstance(self.parts[0], Causal) and self.parts[0].offset == 0

    @property
    def bounds(self) -> tuple[sympy.Expr | None, sympy.Expr | None]:
        """The (min, max) of j - i where a key may be visible, each from one part; None for no bound."""
        lower = next((part.bounds[0] for part in self.parts if part.bounds[0] is not None), None)
        upper = next((part.bounds[1] for part in self.parts if part.bounds[1] is not None), None)
        return lower, upper


def mask_parts(keeps: Iterable[Expr], axes: Axes, space: Space) -> tuple[MaskPart, ...]:
    """The distinct parts of the conjunction of `keeps`, without conditions that always hold."""
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
        case _:
            yield keep


def _offset(keep: Expr, axes: Axes, space: Space, sign: int) -> sympy.Expr | None:
    """The c in sign * (i - j) + c >= 0, which `keep` says, if it is a number or made of sizes; else None."""
    if not isinstance(keep, ex.NonNegative) or not axes.query:
        return None
    apart = position(axes.query, space) - position(axes.key, space)
    offset = sympy.expand(keep.value - sign * apart)
    return None if offset.free_symbols & space.sizes.keys() else offset


def every_query_sees_a_key(
    parts: Sequence[MaskPart], axes: Axes, space: Space, leaf_dtypes: Mapping[int, torch.dtype]
) -> bool:
    """Whether every query provably sees key 0, the key at its own position, or key i + offset of a causal part.

    leaf_dtypes: the dtype of each leaf that is a tensor.
    """
    return any(
        all(_holds(al.substitute(part.keep, witness, space), leaf_dtypes) for part in parts)
        for witness in _witnesses(parts, axes, space)
    )


def _witnesses(parts: Sequence[MaskPart], axes: Axes, space: Space) -> Iterator[dict[sympy.Symbol, sympy.Expr]]:
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
        case ex.And(a, b) | ex.Select(_, a, b):
            return _holds(a, leaf_dtypes) and _holds(b, leaf_dtypes)
        case ex.Or(a, b):
            return _holds(a, leaf_dtypes) or _holds(b, leaf_dtypes)
        case ex.Compare("eq" | "le" | "ge", a, b):
            # NaN does not equal itself, so only integers do surely.
            loads = [part for part in ex.walk(a) if isinstance(part, (ex.Load, ex.Gather))]
            return a == b and bool(loads) and not any(leaf_dtypes[x.leaf].is_floating_point for x in loads)
    return False
