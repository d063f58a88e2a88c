"""Picture: the keys that each query sees, as characters in rows, for the report.

Both lengths are cut into at most 32 cells, and the mask is evaluated at every position of every cell, for the first
batch entry and the first head.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping

import sympy
import torch
from torch import Tensor

from attn_fuse.attention.attention import Attention
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import COMPARISONS, FUNCTIONS
from attn_fuse.expression.index import fold_index
from attn_fuse.expression.nodes import Expr

ALL, SOME, NONE = "#", "+", "."
# Cells along one side, and the max length that is drawn.
_CELLS, _LONGEST = 32, 4096


def picture(attention: Attention, tensors: Mapping[int, Tensor]) -> tuple[str, ...]:
    """A row for each cell of queries, a character for each cell of keys: whether ALL, SOME or NONE are seen.

    tensors: the contents of the leaves, by number. Empty where there is no mask, where a length changes from call to
    call or is above 4096, and where the mask reads a tensor without contents.
    """
    mask, axes = attention.mask, attention.axes
    parts = [part.keep for part in mask.parts or mask.parts_if_others_seen]
    q_len, kv_len = (attention.length(side) for side in (axes.query, axes.key))
    if not parts or not all(n.is_Integer and 0 < n <= _LONGEST for n in (q_len, kv_len)):
        return ()
    keys = torch.arange(int(kv_len))
    rows = []
    try:
        for queries in torch.arange(int(q_len)).tensor_split(min(_CELLS, int(q_len))):
            here = _Positions(attention, queries, keys, tensors)
            kept = functools.reduce(operator.and_, (here.of(part).bool() for part in parts))
            cells = kept.expand(len(queries), len(keys)).tensor_split(min(_CELLS, len(keys)), dim=1)
            rows.append("".join(ALL if cell.all() else SOME if cell.any() else NONE for cell in cells))
    except _UnknownError:
        return ()
    return tuple(rows)


class _UnknownError(Exception):
    """A mask that reads what is not known here."""


class _Positions:
    """The values of expressions at some queries and all keys, as tensors that broadcast to [queries, keys]."""

    def __init__(self, attention: Attention, queries: Tensor, keys: Tensor, tensors: Mapping[int, Tensor]) -> None:
        axes = attention.axes
        others = (*axes.batch, *attention.head_axes)
        self._tensors = tensors
        self._at: dict[sympy.Symbol, Tensor] = {
            **dict.fromkeys(others, torch.tensor(0)),
            **dict(_digits(axes.query, queries[:, None], attention)),
            **dict(_digits(axes.key, keys[None, :], attention)),
        }

    def of(self, x: Expr) -> Tensor:
        """The values of `x`. Raises _UnknownError for a tensor without contents, and what depends on the scores."""
        match x:
            case ex.Const(value):
                return torch.tensor(value)
            case ex.Index(value):
                return self._index(value)
            case ex.NonNegative(value):
                return self._index(value) >= 0
            case ex.IsZero(value):
                return self._index(value) == 0
            case ex.Load(leaf, index):
                return self._element(leaf, [self._index(i) for i in index])
            case ex.Gather(leaf, index):
                return self._element(leaf, [self.of(i) for i in index])
            case ex.Compare(op, a, b):
                return COMPARISONS[op](self.of(a), self.of(b))
            case ex.And(a, b):
                return self.of(a).bool() & self.of(b).bool()
            case ex.Or(a, b):
                return self.of(a).bool() | self.of(b).bool()
            case ex.Not(a):
                return ~self.of(a).bool()
            case ex.Select(cond, a, b):
                return torch.where(self.of(cond).bool(), self.of(a), self.of(b))
            case ex.Cast(dtype, a):
                return self.of(a).to(dtype)
            case ex.Add(a, b):
                return self.of(a) + self.of(b)
            case ex.Mul(a, b):
                return self.of(a) * self.of(b)
            case ex.Div(a, b):
                return self.of(a) / self.of(b)
            case ex.Unary(name, a):
                return FUNCTIONS[name].torch(self.of(a))
            case ex.Binary(name, a, b):
                return FUNCTIONS[name].torch(self.of(a), self.of(b))
        raise _UnknownError(type(x).__name__)

    def _element(self, leaf: int, index: list[Tensor]) -> Tensor:
        if leaf not in self._tensors:
            raise _UnknownError(f"leaf {leaf}")
        source = self._tensors[leaf]
        # A choice reads both of its sides, one of which may lie beyond the end.
        places = [i.clamp(0, n - 1) for i, n in zip(index, source.shape, strict=True)]
        return source[tuple(places)] if places else source

    def _index(self, value: sympy.Expr) -> Tensor:
        try:
            place: Tensor = fold_index(value, self._known, operator.add, operator.mul, operator.floordiv, operator.mod)
        except ValueError as problem:
            raise _UnknownError(str(problem)) from None
        return place

    def _known(self, value: sympy.Expr) -> Tensor | None:
        return torch.tensor(int(value)) if value.is_Integer else self._at.get(value)


def _digits(
    axes: tuple[sympy.Symbol, ...], places: Tensor, attention: Attention
) -> Iterator[tuple[sympy.Symbol, Tensor]]:
    """Each of `axes`, with its value at each of `places` along all of them."""
    for axis in reversed(axes):
        size = int(attention.size(axis))
        yield axis, places % size
        places = places // size
