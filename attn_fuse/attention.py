"""Attention: the canonical description that every stage after the patterns sees, and the answer when there is none.

out[b, h, i, v] = sum_j dropout(softmax_j(scale * sum_e query[b, h, i, e] key[b, h, j, e] + bias[b, h, i, j],
                        kept where mask[b, h, i, j])) * value[b, h, j, v]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from attn_fuse.expression import Expr
from attn_fuse.space import Space


@dataclass(frozen=True)
class Refusal:
    """It is mine, and fusing it would change what is computed. `node`: the operation that blocks, if one does."""

    reason: str
    node: Any = None


@dataclass(frozen=True)
class Causal:
    """Query i sees key j where j <= i + offset."""

    offset: sympy.Expr

    def __str__(self) -> str:
        return "causal" if self.offset == 0 else f"causal with offset {self.offset}"


@dataclass(frozen=True)
class DenseMask:
    """Query i sees key j where `keep`, a Boolean element expression, holds."""

    keep: Expr

    def __str__(self) -> str:
        return "a mask kept as a tensor"


MaskPart = Causal | DenseMask


@dataclass(frozen=True)
class Mask:
    """The conjunction of its parts.

    empty_rows: what the original gives for a query that sees no key: "none" (proved that there is none), "nan", or
        "mean" (the mean of all values, which a finite fill gives).
    """

    parts: tuple[MaskPart, ...] = ()
    empty_rows: str = "none"

    @property
    def is_causal(self) -> bool:
        """Whether the mask is the square causal one, aligned at the top left, and nothing else."""
        return len(self.parts) == 1 and isinstance(self.parts[0], Causal) and self.parts[0].offset == 0

    @property
    def causal_parts(self) -> tuple[Causal, ...]:
        return tuple(part for part in self.parts if isinstance(part, Causal))


@dataclass(frozen=True)
class Axes:
    """The index symbols of an attention, each with a range in `Attention.space`.

    batch, kv_heads: in query, key and value alike (a kernel does the same for both; reports tell them apart).
    groups: query heads that share a key and value. query, key: positions (None where the length is 1).
    inner: the head_dim that the scores sum over. value: the value_dim (None where it is 1).
    """

    batch: tuple[sympy.Symbol, ...]
    kv_heads: tuple[sympy.Symbol, ...]
    groups: tuple[sympy.Symbol, ...]
    query: sympy.Symbol | None
    key: sympy.Symbol
    inner: sympy.Symbol
    value: sympy.Symbol | None


@dataclass(frozen=True)
class Attention:
    """One attention. query, key and value are element expressions: a `Load`, or casts of one.

    scale: what the scores are multiplied by: a number, or an expression that does not depend on the key position.
    biases: what is added to the scaled scores, in the order written, each an element expression.
    dropout_p: a number, or a `Scalar` known only when the program runs.
    query_dtype: of the product of query and key as far as its operands carry it (a key widened only for the product
        counts as what it was); value_dtype: of the product with the value and of the output.
    output: the output's dimensions, each the symbols that it is made of, the slowest first.
    softmax_dtype: the dtype that the softmax is computed in as written.
    """

    axes: Axes
    space: Space = field(compare=False, hash=False)
    query: Expr
    key: Expr
    value: Expr
    scale: Expr
    mask: Mask
    biases: tuple[Expr, ...]
    dropout_p: Expr | None
    query_dtype: torch.dtype
    value_dtype: torch.dtype
    softmax_dtype: torch.dtype
    output: tuple[tuple[sympy.Symbol, ...], ...]

    @property
    def batch_axes(self) -> tuple[sympy.Symbol, ...]:
        return self.axes.batch

    @property
    def kv_head_axes(self) -> tuple[sympy.Symbol, ...]:
        return self.axes.kv_heads

    @property
    def head_axes(self) -> tuple[sympy.Symbol, ...]:
        """The query heads: query head number h uses key and value head h // (number of groups)."""
        return self.kv_head_axes + self.axes.groups

    def size(self, symbol: sympy.Symbol | None) -> sympy.Expr:
        return sympy.Integer(1) if symbol is None else self.space.sizes[symbol]
