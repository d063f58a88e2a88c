"""Attention: the canonical description that all stages after the patterns use, and the Refusal returned instead.

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

    node: the blocking operation, or the part of an expression that it made; None if not known yet.
    advice: what the user can do, if it is more than rewriting the operation. expression: the mathematics read so far.
    """

    reason: str
    node: Any = field(default=None, compare=False)
    advice: str = ""
    expression: str = field(default="", compare=False)

    def at(self, node: Any) -> Refusal:
        """This refusal with `node`, unless it has a node."""
        return self if self.node is not None else replace(self, node=node)


@dataclass(frozen=True)
class Attention:
    """One attention, in element expressions.

    axes, space: the index symbols by role, and their ranges. query, key, value: usually a `Load` or a cast of one.
    score: the argument of the softmax as written, over `Score`. scale, mask, biases, softcap and score_mod describe its
        structure: bias + ... + softcap(scale * score_mod(query . key)), filled where the mask hides.
    scale: a number, or an expression that does not depend on the key position. biases: added to the scaled scores.
    softcap: the cap in cap * tanh(x / cap) of the scaled scores.
    score_mod: the function of the product, over `Score`, that the other fields do not cover.
    unread: why `score_mod` was not read as structure.
    sink: the logit of one more key, without a value; does not depend on the key position.
    factor: the factor of the weights that depends on the key position. out_scale: the factor that does not.
    dropout_p: a number, or a `Scalar` known only at run time.
    query_dtype: of the product of query and key; the operands' own if they are half precision, widened for the product.
    value_dtype: of the product with the value. softmax_dtype: of the softmax as written.
    output: the symbols that make up each dimension of the output, slowest first.
    zero_for_nan: whether every kernel may give 0 for a row that is NaN as written, because some weights are filled.
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
    def head_axes(self) -> tuple[sympy.Symbol, ...]:
        """The symbols of the query heads. Head h reads key and value head h // (heads / kv_heads)."""
        return self.axes.kv_heads + self.axes.groups

    def size(self, symbol: sympy.Symbol) -> sympy.Expr:
        """The size of the range of an index symbol."""
        return self.space.sizes[symbol]

    def length(self, axes: tuple[sympy.Symbol, ...]) -> sympy.Expr:
        """The number of positions along `axes`; 1 for no axes."""
        return sympy.Mul(*map(self.size, axes))

    def same_length(self, one: tuple[sympy.Symbol, ...], other: tuple[sympy.Symbol, ...]) -> bool:
        """Whether `one` and `other` are proved to be equally long on every call."""
        return self.space.same_size(self.length(one), self.length(other))
