"""Write: the score function of an attention as a score program, with the tensors and numbers that it reads.

All kernels but torch's SDPA take the program: `chunked` evaluates it, the Triton kernels and FlexAttention have it
generated into them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from attn_fuse.emit.builder import NotEmitted
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.index import fold_index
from attn_fuse.expression.nodes import Expr
from attn_fuse.graph.names import value_of
from attn_fuse.kernels.score.program import ScoreProgram

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call


@dataclass(frozen=True)
class ScoreCall:
    """A score program and what it reads. inputs, numbers: the graph's nodes (or ints) for these, by position."""

    program: ScoreProgram
    inputs: list[Node]
    numbers: list[Any]


def score_call(call: Call) -> ScoreCall:
    """The score function of the attention of `call`, over the product of query and key without any scale.

    Raises NotEmitted where a part of the function has no place in a score program.
    """
    attention, writer = call.attention, _Writer(call)
    upper, lower = writer.bounds()
    program = ScoreProgram(
        score=writer.lowered(attention.score),
        factor=None if attention.factor is None else writer.lowered(attention.factor),
        sink=None if attention.sink is None else writer.lowered(attention.sink),
        visible=writer.visible(),
        upper=upper,
        lower=lower,
        hides_only_if_others_seen=writer.hides_only_if_others_seen,
        empty_is_nan=call.empty_is_nan,
    )
    return ScoreCall(program, writer.inputs, writer.numbers)


class _Writer:
    """Lowers element expressions to expressions of a score program. inputs, numbers: what these read, by position."""

    def __init__(self, call: Call) -> None:
        self.inputs: list[Node] = []
        self.numbers: list[Any] = []
        self._call = call
        self._space = call.attention.space
        self._known: dict[int, tuple[Expr, Expr]] = {}
        self._read: dict[Expr, Expr] = {}
        self._dtypes_known: dict[Expr, frozenset[torch.dtype]] = {}
        axes = call.attention.axes
        self._digits = {
            symbol: expr
            for name, symbols in (
                ("b", axes.batch), ("h", call.attention.head_axes), ("i", axes.query), ("j", axes.key),
            )
            for symbol, expr in self._digits_of(name, symbols)
        }  # fmt: skip

    def _digits_of(self, name: str, symbols: tuple[sympy.Symbol, ...]) -> Iterator[tuple[sympy.Symbol, Expr]]:
        """Each of `symbols`, with its expression over the position `name` along all of them together."""
        stride = sympy.Integer(1)
        for number, symbol in reversed(list(enumerate(symbols))):
            expr: Expr = ex.Position(name)
            if stride != 1:
                expr = ex.Binary("floor_divide", expr, self._number(stride))
            if number > 0:
                expr = ex.Binary("remainder", expr, self._number(self._space.sizes[symbol]))
            yield symbol, expr
            stride = stride * self._space.sizes[symbol]

    def bounds(self) -> tuple[Expr | None, Expr | None]:
        """(upper, lower): the bounds of j - i beyond which the mask hides the key; None for no bound."""
        mask = self._call.attention.mask
        if mask.empty_rows == "mean":
            return None, None
        lower, upper = mask.bounds
        return (
            None if upper is None else self._number(upper),
            None if lower is None else self._number(lower),
        )

    @property
    def hides_only_if_others_seen(self) -> bool:
        """Whether a fully masked row weighs all keys, so that `visible` counts only for the others."""
        mask = self._call.attention.mask
        return bool(mask.parts_if_others_seen) and (mask.empty_rows == "mean" or not mask.parts)

    def visible(self) -> Expr | None:
        """The condition under which the mask shows a key; None where it hides none, or hidden keys may still count."""
        mask = self._call.attention.mask
        hiding = (
            mask.parts_if_others_seen
            if self.hides_only_if_others_seen
            else ()
            if mask.empty_rows == "mean"
            else mask.parts
        )
        parts = [self.lowered(part.keep) for part in hiding]
        return functools.reduce(ex.And, parts) if parts else None

    def lowered(self, x: Expr) -> Expr:
        """`x` with positions, numbers and inputs in place of index symbols, sizes and leaves."""
        if id(x) not in self._known:
            self._known[id(x)] = x, self._lowered(x)
        return self._known[id(x)][1]

    def _lowered(self, x: Expr) -> Expr:
        match x:
            case ex.Score():
                return ex.Score()
            case ex.Const():
                return x
            case ex.Scalar():
                return self._input(x)
            case ex.Load() if self._is_one_element(x):
                return self._input(x)
            case ex.Load(leaf, index):
                return self._gather(leaf, [self._within(leaf, d, i) for d, i in enumerate(index)])
            case ex.Gather(leaf, positions):
                return self._gather(leaf, [self.lowered(p) for p in positions])
            case ex.Index(value):
                return self._position(value)
            case ex.NonNegative(value):
                return ex.Compare("ge", self._position(value), ex.Const(0))
            case ex.IsZero(value):
                return ex.Compare("eq", self._position(value), ex.Const(0))
            case ex.Cast(dtype, inner):
                # A score stays at least as precise as written; positions and integers round as the program rounds them.
                narrow = dtype in (torch.float16, torch.bfloat16) and ex.has_product(inner)
                return ex.Cast(torch.float32 if narrow else dtype, self.lowered(inner))
            case ex.Unary("detach", inner) if not ex.has_product(inner):
                return self._input(x)
            case ex.Add(a, b) if self._may_hide and self._dtypes(x) == {torch.float16}:
                return self._sum_in_float16(a, b)
        if ex.name_of(x):
            return ex.remade(x, list(map(self.lowered, ex.children(x))))
        raise NotEmitted(f"{type(x).__name__} has no place in a score program")

    @property
    def _may_hide(self) -> bool:
        """Whether a finite number may hide every key of a query: added to the scores, or in their place."""
        return self._call.facts.bias_may_hide or self._call.attention.mask.empty_rows == "mean"

    def _dtypes(self, x: Expr) -> frozenset[torch.dtype]:
        """The floating-point dtypes of the tensors that `x` is computed from; constants have none."""
        if x not in self._dtypes_known:
            self._dtypes_known[x] = self._dtypes_of(x)
        return self._dtypes_known[x]

    def _dtypes_of(self, x: Expr) -> frozenset[torch.dtype]:
        match x:
            case ex.Score(dtype=dtype) | ex.Contract(dtype=dtype) | ex.Cast(dtype=dtype):
                return frozenset({dtype} if dtype.is_floating_point else ())
            case ex.Load(leaf) | ex.Gather(leaf):
                value = value_of(self._call.leaf(leaf))
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    return frozenset({value.dtype})
            case ex.Add(a, b) | ex.Mul(a, b) | ex.Div(a, b) | ex.Select(_, a, b) | ex.Binary(_, a, b):
                return self._dtypes(a) | self._dtypes(b)
            case ex.Unary(_, inner):
                return self._dtypes(inner)
        return frozenset()

    def _sum_in_float16(self, a: Expr, b: Expr) -> Expr:
        """a + b, where float16's min absorbs a term that is less than half the step to the number next to it.

        So a fully masked row that is filled with the min gets the mean of the values.
        """
        one, other = self.lowered(a), self.lowered(b)

        def unless_taken_up(x: Expr, by: Expr) -> Expr:
            is_lowest = ex.Compare("le", by, ex.Const(_LOWEST))
            is_small = ex.Compare("lt", ex.Unary("abs", x), ex.Const(_HALF_STEP))
            return ex.Select(ex.And(is_lowest, is_small), x - ex.Unary("detach", x), x)

        return unless_taken_up(one, other) + unless_taken_up(other, one)

    def _is_one_element(self, load: ex.Load) -> bool:
        """Whether a view of the leaf holds, at each score, the element that is read."""
        return self._call.has_view(load, self._call.score_axes)

    def _input(self, x: Expr) -> Expr:
        if x not in self._read:
            self.inputs.append(self._call.over_scores(x))
            self._read[x] = ex.Input(len(self.inputs) - 1)
        return self._read[x]

    def _gather(self, leaf: int, positions: list[Expr]) -> Expr:
        node = self._call.leaf(leaf)
        if node not in self.inputs:
            self.inputs.append(node)
        return ex.Gather(self.inputs.index(node), tuple(positions))

    def _within(self, leaf: int, dim: int, index: sympy.Expr) -> Expr:
        """A position clamped to the leaf: of tensors laid end to end, those not chosen would be read out of range."""
        place, length = self._position(index), self._call.lengths(leaf)[dim]
        if not self._space.is_nonnegative(index):
            place = ex.Binary("maximum", place, ex.Const(0))
        if not self._space.is_nonnegative(length - 1 - index):
            place = ex.Binary("minimum", place, self._number(length - 1))
        return place

    def _position(self, value: sympy.Expr) -> Expr:
        floordiv, mod = (functools.partial(ex.Binary, name) for name in ("floor_divide", "remainder"))
        try:
            position: Expr = fold_index(sympy.expand(value), self._digit, operator.add, operator.mul, floordiv, mod)
        except ValueError as problem:
            raise NotEmitted(str(problem)) from None
        return position

    def _digit(self, value: sympy.Expr) -> Expr | None:
        return self._digits.get(value) if value.free_symbols & self._digits.keys() else self._number(value)

    def _number(self, value: sympy.Expr) -> Expr:
        value = sympy.sympify(value)
        if value.is_Integer:
            return ex.Const(int(value))
        node = self._call.size(value)
        if node not in self.numbers:
            self.numbers.append(node)
        return ex.Number(self.numbers.index(node))


_LOWEST, _HALF_STEP = torch.finfo(torch.float16).min, 16.0
