"""Attention: the canonical description that every stage after the patterns sees; and the Refusal in its place.

scores[b, h, i, j] = score(sum_e query[b, h, i, e] * key[b, h, j, e])
out[b, h, i, v] = out_scale * sum_j dropout(factor * softmax_j(scores[b, h, i, j])) * value[b, h, j, v]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from attn_fuse.attention.axes import Axes
from attn_fuse.attention.mask import Mask
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Const, Expr


@dataclass(frozen=True)
class Refusal:
    """Why fusing would change the result.

    node: the operation that blocks, or the part of an expression that it made; None where that is not known yet.
    advice: what the user can do; "" where one operation is to be written otherwise.
    expression: the mathematics that was read before.
    """

    reason: str
    node: Any = field(default=None, compare=False)
    advice: str = ""
    expression: str = field(default="", compare=False)

    def at(self, node: Any) -> Refusal:
        """The same refusal with `node` as its node, unless it has one."""
        return self if self.node is not None else replace(self, node=node)


@dataclass(frozen=True)
class Attention:
    """One attention, in element expressions.

    axes, space: the index symbols by role, and their ranges. query, key, value: usually a `Load` or a cast of one.
    score: the argument of the softmax as written, over `Score`. scale, mask, biases, softcap and score_mod say the same
        as structure: score = bias + ... + softcap(scale * score_mod(query . key)), filled where the mask hides.
    scale: a number, or an expression that does not depend on the key position.
    biases: the terms added to the scaled scores.
    softcap: the cap in cap * tanh(x / cap) of the scaled scores; None without one.
    score_mod: the function of the product, over `Score`, that no other field says; None without one.
    unread: why `score_mod` was not read as structure; None without one.
    sink: the logit of one more key that has no value; it does not depend on the key position. None without one.
    factor: the factor of the weights that depends on the key position; None without one.
    out_scale: the factor of the weights, and so of the output, that does not; None without one.
    dropout_p: a number, or a `Scalar` known only when the program runs; None without dropout.
    query_dtype: of the product of query and key; where both are half precision widened only for the product, theirs.
    value_dtype: of the product with the value. softmax_dtype: of the softmax as written.
    output: for each dimension of the output the symbols that it is made of, slowest first.
    zero_for_nan: whether a row that is NaN as written may come out as 0 on every kernel: a fill of some of its weights.
    """

    axes: Axes
    space: Space = field(compare=False, hash=False)
    query: Expr
    key: Expr
    value: Expr
    score: Expr
    query_dtype: torch.dtype
    value_dtype: torch.dtype
    softmax_dtype: torch.dtype
    output: tuple[tuple[sympy.Symbol, ...], ...]
    scale: Expr = field(default=Const(1.0))
    mask: Mask = field(default=Mask())
    biases: tuple[Expr, ...] = ()
    softcap: float | None = None
    score_mod: Expr | None = None
    unread: Refusal | None = None
    sink: Expr | None = None
    factor: Expr | None = None
    out_scale: Expr | None = None
    dropout_p: Expr | None = None
    zero_for_nan: bool = False

    @property
    def batch_axes(self) -> tuple[sympy.Symbol, ...]:
        """The symbols of the batch, slowest first."""
        return self.axes.batch

    @property
    def kv_head_axes(self) -> tuple[sympy.Symbol, ...]:
        """The symbols of the heads of key and value, slowest first."""
        return self.axes.kv_heads

    @property
    def head_axes(self) -> tuple[sympy.Symbol, ...]:
        """The symbols of the query heads: query head h reads key and value head h // (heads / kv_heads)."""
        return self.kv_head_axes + self.axes.groups

    def size(self, symbol: sympy.Symbol) -> sympy.Expr:
        """The number of values of an index symbol."""
        return self.space.sizes[symbol]

    def length(self, axes: tuple[sympy.Symbol, ...]) -> sympy.Expr:
        """The number of positions along `axes` together, 1 for no axes."""
        return sympy.prod([self.size(a) for a in axes]) if axes else sympy.Integer(1)

    def same_length(self, one: tuple[sympy.Symbol, ...], other: tuple[sympy.Symbol, ...]) -> bool:
        """Whether there are as many positions along `one` as along `other` on every call; False if not proved."""
        return self.space.same_size(self.length(one), self.length(other))
