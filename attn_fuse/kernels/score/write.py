"""Write the score function of an attention as a score program, with the tensors and numbers that it reads.

`chunked` evaluates the program; the Triton kernels and FlexAttention inline it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """A score program with its inputs and numbers: nodes of a graph, tensors, or ints."""

    program: ScoreProgram
    inputs: Sequence[Any]
    numbers: Sequence[Any]

    def part(self, program: ScoreProgram) -> ScoreCall:
        """The call of `program`, which reads some inputs and numbers of this call, with these alone."""
        read = [node for expr in program.exprs.values() for node in ex.distinct(expr)]
        inputs = sorted({node.leaf for node in read if isinstance(node, (ex.Input, ex.Gather))})
        numbers = sorted({node.number for node in read if isinstance(node, ex.Number)})

        def renumbered(expr: Expr) -> Expr:
            match expr:
                case ex.Input(n):
                    return ex.Input(inputs.index(n))
                case ex.Number(n):
                    return ex.Number(numbers.index(n))
                case ex.Gather(n, index):
                    return ex.Gather(inputs.index(n), tuple(map(renumbered, index)))
            return ex.remade(expr, list(map(renumbered, ex.children(expr))))

        exprs: dict[str, Any] = {name: renumbered(expr) for name, expr in program.exprs.items()}
        own = replace(program, **exprs)
        return ScoreCall(own, [self.inputs[n] for n in inputs], [self.numbers[n] for n in numbers])


def score_call(call: Call) -> ScoreCall:
    """The score function of the attention of `call`, over the unscaled product of query and key.

    Raises NotEmitted for a part of the function that has no place in a score program.
    """
    attention, mask, writer = call.attention, call.attention.mask, _Writer(call)
    is_mean = mask.empty_rows == "mean"
    # A fully masked row may weigh all keys; `visible` then counts only for other rows.
    only_if_others_seen = bool(mask.parts_if_others_seen) and (is_mean or not mask.parts)
    lower, upper = (None, None) if is_mean else mask.bounds
    hiding = mask.parts_if_others_seen if only_if_others_seen else () if is_mean else mask.parts
    program = ScoreProgram(
        upper=None if upper is None else writer.number(upper),
        lower=None if lower is None else writer.number(lower),
        score=writer.lowered(attention.score),
        factor=None if attention.factor is None else writer.lowered(attention.factor),
        sink=None if attention.sink is None else writer.lowered(attention.sink),
        visible=functools.reduce(ex.And, [writer.lowered(part.keep) for part in hiding]) if hiding else None,
        hides_only_if_others_seen=only_if_others_seen,
        empty_is_nan=call.empty_is_nan,
    )
    return ScoreCall(program, writer.inputs, writer.numbers)


class _Writer:
    """Lowers element expressions to expressions of a score program, which read `inputs` and `numbers`."""

    def __init__(self, call: Call) -> None:
        self.inputs: list[Node] = []
        self.numbers: list[Any] = []
        self._call = call
        self._space = call.attention.space
        self._known: dict[int, tuple[Expr, Expr]] = {}
        self._read: dict[Expr, Expr] = {}
        self._dtypes_known: dict[Expr, frozenset[torch.dtype]] = {}
        self._digits: dict[sympy.Symbol, Expr] = {}
        axes = call.attention.axes
        for name, symbols in zip("bhij", (axes.batch, call.attention.head_axes, axes.query, axes.key), strict=True):
            stride = sympy.Integer(1)
            for number, symbol in reversed(list(enumerate(symbols))):
                digit: Expr = ex.Position(name)
                if stride != 1:
                    digit = ex.Binary("floor_divide", digit, self.number(stride))
                if number > 0:
                    digit = ex.Binary("remainder", digit, self.number(self._space.sizes[symbol]))
                self._digits[symbol] = digit
                stride = stride * self._space.sizes[symbol]

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
            case ex.Load() if self._call.has_view(x, self._call.score_axes):
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
                # A score may be more precise than written; positions and integers are rounded as written.
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
        """Whether a finite number, added to the scores or in their place, may fully mask a row."""
        return self._call.facts.bias_may_hide or self._call.attention.mask.empty_rows == "mean"

    def _dtypes(self, x: Expr) -> frozenset[torch.dtype]:
        """The floating-point dtypes of the tensors from which `x` is computed; constants have none."""
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
        """a + b, in which float16's min absorbs terms smaller than half the step to the next number.

        A row fully masked with the min then gets the mean of the values.
        """
        one, other = self.lowered(a), self.lowered(b)

        def unless_taken_up(x: Expr, by: Expr) -> Expr:
            is_lowest = ex.Compare("le", by, ex.Const(_LOWEST))
            is_small = ex.Compare("lt", ex.Unary("abs", x), ex.Const(_HALF_STEP))
            return ex.Select(ex.And(is_lowest, is_small), x - ex.Unary("detach", x), x)

        return unless_taken_up(one, other) + unless_taken_up(other, one)

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
        """A position clamped to the leaf; a choice between concatenated tensors reads all of them at it."""
        place, length = self._position(index), self._call.lengths(leaf)[dim]
        if not self._space.is_nonnegative(index):
            place = ex.Binary("maximum", place, ex.Const(0))
        if not self._space.is_nonnegative(length - 1 - index):
            place = ex.Binary("minimum", place, self.number(length - 1))
        return place

    def _position(self, value: sympy.Expr) -> Expr:
        floordiv, mod = (functools.partial(ex.Binary, name) for name in ("floor_divide", "remainder"))
        try:
            position: Expr = fold_index(sympy.expand(value), self._digit, operator.add, operator.mul, floordiv, mod)
        except ValueError as problem:
            raise NotEmitted(str(problem)) from None
        return position

    def _digit(self, value: sympy.Expr) -> Expr | None:
        return self._digits.get(value) if value.free_symbols & self._digits.keys() else self.number(value)

    def number(self, value: sympy.Expr) -> Expr:
        value = sympy.sympify(value)
        if value.is_Integer:
            return ex.Const(int(value))
        node = self._call.size(value)
        if node not in self.numbers:
            self.numbers.append(node)
        return ex.Number(self.numbers.index(node))


_LOWEST, _HALF_STEP = torch.finfo(torch.float16).min, 16.0
