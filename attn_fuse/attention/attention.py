"""Attention: the canonical description that every stage after the patterns sees, and the answer when there is none.

out[b, h, i, v] = sum_j dropout(factor * softmax_j(score(sum_e query[b, h, i, e] key[b, h, j, e]))) * value[b, h, j, v]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr


@dataclass(frozen=True)
class Refusal:
    """It is mine, and fusing it would change what is computed. `node`: the operation that blocks, if one does."""

    reason: str
    node: Any = None


@dataclass(frozen=True)
class Causal:
    """Query i sees key j where j <= i + offset. `keep` says the same as an element expression."""

    offset: sympy.Expr
    keep: Expr

    def __str__(self) -> str:
        return "causal" if self.offset == 0 else f"causal with offset {self.offset}"


@dataclass(frozen=True)
class Window:
    """Query i sees key j where j >= i - reach: the far end of a sliding window."""

    reach: sympy.Expr
    keep: Expr

    def __str__(self) -> str:
        return f"window reaching {self.reach} back"


@dataclass(frozen=True)
class Prefix:
    """Query i sees key j where j <= i + offset, and every key of the prefix, which `keep` says the length of."""

    offset: sympy.Expr
    keep: Expr

    def __str__(self) -> str:
        return "causal behind a prefix that all see"


@dataclass(frozen=True)
class KeyPadding:
    """Every query of a batch entry sees the same keys, those where `keep` holds."""

    keep: Expr

    def __str__(self) -> str:
        return "key padding"


@dataclass(frozen=True)
class Documents:
    """A query sees the keys that carry the same number as itself."""

    keep: Expr

    def __str__(self) -> str:
        return "documents"


@dataclass(frozen=True)
class DenseMask:
    """Query i sees key j where `keep`, a Boolean element expression, holds."""

    keep: Expr

    def __str__(self) -> str:
        return "a mask kept as a tensor"


MaskPart = Causal | Window | Prefix | KeyPadding | Documents | DenseMask


@dataclass(frozen=True)
class Mask:
    """The conjunction of its parts.

    empty_rows: what the original gives for a query that sees no key: "none" (proved that there is none), "nan", "zero",
        or "mean" (the mean of all values, which a finite fill gives).
    soft_parts: what finite fills hide from a query that sees some key, where it is not proved that each does. One that
        sees none has weights for all. What the fills make of the scores is said by `parts` or the biases.
    """

    parts: tuple[MaskPart, ...] = ()
    empty_rows: str = "none"
    soft_parts: tuple[MaskPart, ...] = ()

    @property
    def is_causal(self) -> bool:
        """Whether the mask is the square causal one, aligned at the top left, and nothing else."""
        return len(self.parts) == 1 and isinstance(self.parts[0], Causal) and self.parts[0].offset == 0


@dataclass(frozen=True)
class Axes:
    """The index symbols of an attention, each with a range in `Attention.space`; of several, the slowest first.

    batch, kv_heads: in query, key and value alike (a kernel does the same for both; reports tell them apart).
    groups: query heads that share a key and value. query, key: positions. inner: what the scores sum over, the
    head_dim. value: the value_dim. An empty tuple stands for a length of 1.
    """

    batch: tuple[sympy.Symbol, ...]
    kv_heads: tuple[sympy.Symbol, ...]
    groups: tuple[sympy.Symbol, ...]
    query: tuple[sympy.Symbol, ...]
    key: tuple[sympy.Symbol, ...]
    inner: tuple[sympy.Symbol, ...]
    value: tuple[sympy.Symbol, ...]


@dataclass(frozen=True)
class Attention:
    """One attention. query, key and value are element expressions: a `Load`, or casts of one.

    score: what the softmax is taken of, exactly as written, over `Score`. The same read as structure:
        score = bias + ... + softcap(scale * score_mod(query . key)), filled where the mask hides.
    scale: a number, or an expression that does not depend on the key position.
    biases: what is added to the scaled scores, in the order written, each an element expression.
    softcap: cap * tanh(x / cap) of the scaled scores, where it is not None.
    score_mod: what is done to the product before all that and is none of it, over `Score`; None for nothing.
        unread: why it was not read as structure.
    sink: the logit of one more key that has no value; it does not depend on the key position.
    factor: what the weights are multiplied with. out_scale: the same where it does not depend on the key position.
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
    score: Expr
    scale: Expr
    mask: Mask
    biases: tuple[Expr, ...]
    softcap: float | None
    score_mod: Expr | None
    unread: str
    sink: Expr | None
    factor: Expr | None
    out_scale: Expr | None
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

    def size(self, symbol: sympy.Symbol) -> sympy.Expr:
        return self.space.sizes[symbol]

    def length(self, axes: tuple[sympy.Symbol, ...]) -> sympy.Expr:
        """The number of positions along `axes` together."""
        return sympy.prod([self.size(a) for a in axes]) if axes else sympy.Integer(1)
