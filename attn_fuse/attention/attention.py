"""Attention: the canonical description that every stage after the patterns sees, and the answer when there is none.

out[b, h, i, v] = sum_j dropout(factor * softmax_j(score(sum_e query[b, h, i, e] key[b, h, j, e]))) * value[b, h, j, v]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from attn_fuse.attention.axes import Axes
from attn_fuse.attention.mask import Mask
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr


@dataclass(frozen=True)
class Refusal:
    """Why fusing would change what is computed.

    node: the culprit: the operation that blocks, or the part of an expression which that operation made.
    """

    reason: str
    node: Any = field(default=None, compare=False)

    def at(self, node: Any) -> Refusal:
        """The same, with `node` as the culprit unless there is one."""
        return self if self.node is not None else Refusal(self.reason, node)


@dataclass(frozen=True)
class Attention:
    """One attention. query, key and value are element expressions: a `Load`, or casts of one.

    score: what the softmax is taken of, exactly as written, over `Score`. The same read as structure:
        score = bias + ... + softcap(scale * score_mod(query . key)), filled where the mask hides.
    scale: a number, or an expression that does not depend on the key position.
    biases: what is added to the scaled scores, in the order written, each an element expression.
    softcap: cap * tanh(x / cap) of the scaled scores, where it is not None.
    score_mod: what is done to the product before all that and is none of it, over `Score`; None for nothing.
        unread: why it was not read as structure; None where all was.
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
    unread: Refusal | None
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
