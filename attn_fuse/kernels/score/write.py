"""Writer: the score function of an attention as a score program, with the tensors and numbers that it reads.

Every kernel of our own takes this: `chunked` interprets the program, the Triton kernels and FlexAttention have it
generated into them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from attn_fuse.attention.attention import Causal, Window
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.nodes import Expr
from attn_fuse.graph.names import value_of
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.torch_internals import FloorDiv, Mod

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

Tree = tuple[Any, ...]


@dataclass(frozen=True)
class Written:
    """A score program. inputs, numbers: the nodes of what it reads, by position."""

    program: ScoreProgram
    inputs: list[Node]
    numbers: list[Any]


def written(call: Call) -> Written:
    """The score function of the attention that `call` is for, over the product of query and key without any scale.

    Raises NotEmitted where part of it has no place in a score program.
    """
    attention, writer = call.attention, _Writer(call)
    upper, lower = writer.bounds()
    program = ScoreProgram(
        score=writer.tree(attention.score),
        factor=None if attention.factor is None else writer.tree(attention.factor),
        sink=None if attention.sink is None else writer.tree(attention.sink),
        visible=writer.visible(),
        upper=upper,
        lower=lower,
        unless_empty=writer.hides_softly,
    )
    return Written(program, writer.inputs, writer.numbers)


class _Writer:
    """Writes element expressions as trees of the score program. inputs, numbers: what these read, by position."""

    def __init__(self, call: Call) -> None:
        self.inputs: list[Node] = []
        self.numbers: list[Any] = []
        self._call = call
        self._space = call.attention.space
        self._known: dict[Expr, Tree] = {}
        self._dtypes_known: dict[Expr, frozenset[torch.dtype]] = {}
        axes = call.attention.axes
        self._digits = {
            symbol: tree
            for name, symbols in (
                ("b", axes.batch), ("h", call.attention.head_axes), ("i", axes.query), ("j", axes.key),
            )
            for symbol, tree in self._digits_of(name, symbols)
        }  # fmt: skip

    def _digits_of(self, name: str, symbols: tuple[sympy.Symbol, ...]) -> Iterator[tuple[sympy.Symbol, Tree]]:
        """Each symbol as a function of the place along all of `symbols` together."""
        stride = sympy.Integer(1)
        for number, symbol in reversed(list(enumerate(symbols))):
            tree: Tree = (name,)
            if stride != 1:
                tree = ("floordiv", tree, self._number(stride))
            if number > 0:
                tree = ("mod", tree, self._number(self._space.sizes[symbol]))
            yield symbol, tree
            stride = stride * self._space.sizes[symbol]

    def bounds(self) -> tuple[Tree | None, Tree | None]:
        """Bounds of (key position - query position) outside of which the mask hides the key."""
        mask = self._call.attention.mask
        if mask.empty_rows == "mean":
            return None, None
        upper = next((part.offset for part in mask.parts if isinstance(part, Causal)), None)
        lower = next((-part.reach for part in mask.parts if isinstance(part, Window)), None)
        return (
            None if upper is None else self._number(upper),
            None if lower is None else self._number(lower),
        )

    @property
    def hides_softly(self) -> bool:
        """Whether a query that sees no key has weights for all."""
        mask = self._call.attention.mask
        return bool(mask.soft_parts) and (mask.empty_rows == "mean" or not mask.parts)

    def visible(self) -> Tree | None:
        """Where the mask lets a query see a key; None where it hides none, or hidden keys may count all the same."""
        mask = self._call.attention.mask
        hiding = mask.soft_parts if self.hides_softly else () if mask.empty_rows == "mean" else mask.parts
        parts = [self.tree(part.keep) for part in hiding]
        return None if not parts else parts[0] if len(parts) == 1 else ("and", *parts)

    def tree(self, x: Expr) -> Tree:
        if x not in self._known:
            self._known[x] = self._written(x)
        return self._known[x]

    def _written(self, x: Expr) -> Tree:
        match x:
            case ex.Score():
                return ("score",)
            case ex.Const(value):
                return ("const", value)
            case ex.Scalar():
                return self._input(x)
            case ex.Load() if self._is_one_element(x):
                return self._input(x)
            case ex.Load(leaf, index):
                return self._gather(leaf, [self._within(leaf, d, i) for d, i in enumerate(index)])
            case ex.Gather(leaf, positions):
                return self._gather(leaf, [self.tree(p) for p in positions])
            case ex.Index(value):
                return self._position(value)
            case ex.NonNegative(value):
                return ("ge", self._position(value), ("const", 0))
            case ex.IsZero(value):
                return ("eq", self._position(value), ("const", 0))
            case ex.Select(cond, a, b):
                return ("where", self.tree(cond), self.tree(a), self.tree(b))
            case ex.Cast(dtype, inner):
                # A score stays at least as precise as it was written; positions and whole numbers round as they do.
                narrow = dtype in (torch.float16, torch.bfloat16) and ex.has_product(inner)
                return ("cast", "float32" if narrow else _short(dtype), self.tree(inner))
            case ex.Unary("detach", inner) if not ex.has_product(inner):
                return self._input(x)
            case ex.Unary(name, inner):
                return (name, self.tree(inner))
            case ex.Binary(name, a, b):
                return (_BINARY.get(name, name), self.tree(a), self.tree(b))
            case ex.Compare(op, a, b):
                return (op, self.tree(a), self.tree(b))
            case ex.Not(inner):
                return ("not", self.tree(inner))
            case ex.Add(a, b) if self._call.facts.bias_may_hide and self._dtypes(x) == {torch.float16}:
                return self._sum_in_float16(a, b)
            case ex.And(a, b) | ex.Or(a, b) | ex.Add(a, b) | ex.Mul(a, b) | ex.Div(a, b):
                return (type(x).__name__.lower(), self.tree(a), self.tree(b))
        raise NotEmitted(f"{type(x).__name__} has no place in a score program")

    def _dtypes(self, x: Expr) -> frozenset[torch.dtype]:
        """The floating-point dtypes of what the value of `x` is made of; numbers have none."""
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

    def _sum_in_float16(self, a: Expr, b: Expr) -> Tree:
        """The sum; float16's lowest number takes up what is less than half the step to the number next to it.

        So a query all of whose keys are filled with it gets the mean of the values.
        """
        one, other = self.tree(a), self.tree(b)

        def unless_taken_up(x: Tree, by: Tree) -> Tree:
            taken_up = ("and", ("le", by, ("const", _LOWEST)), ("lt", ("abs", x), ("const", _HALF_STEP)))
            return ("where", taken_up, ("sub", x, ("detach", x)), x)

        return ("add", unless_taken_up(one, other), unless_taken_up(other, one))

    def _is_one_element(self, load: ex.Load) -> bool:
        """Whether a view of the leaf has, at each score, the element that is read."""
        return self._call.has_view(load, self._call.score_axes)

    def _input(self, x: Expr) -> Tree:
        self.inputs.append(self._call.over_scores(x))
        return ("input", len(self.inputs) - 1)

    def _gather(self, leaf: int, positions: list[Tree]) -> Tree:
        node = self._call.leaf(leaf)
        if node not in self.inputs:
            self.inputs.append(node)
        return ("gather", self.inputs.index(node), *positions)

    def _within(self, leaf: int, dim: int, index: sympy.Expr) -> Tree:
        """A position, held within the leaf: of tensors laid end to end, those not chosen are read out of range."""
        tree, length = self._position(index), self._call.lengths(leaf)[dim]
        if not self._space.is_nonnegative(index):
            tree = ("maximum", tree, ("const", 0))
        if not self._space.is_nonnegative(length - 1 - index):
            tree = ("minimum", tree, self._number(length - 1))
        return tree

    def _position(self, value: sympy.Expr) -> Tree:
        value = sympy.expand(value)
        if not value.free_symbols & self._digits.keys():
            return self._number(value)
        match value:
            case sympy.Symbol():
                return self._digits[value]
            case sympy.Add():
                return self._joined("add", value.args)
            case sympy.Mul():
                return self._joined("mul", value.args)
            case FloorDiv():
                return self._joined("floordiv", value.args)
            case Mod():
                return self._joined("mod", value.args)
        raise NotEmitted(f"position {value} cannot be computed")

    def _joined(self, name: str, parts: tuple[sympy.Expr, ...]) -> Tree:
        tree = self._position(parts[0])
        for part in parts[1:]:
            tree = (name, tree, self._position(part))
        return tree

    def _number(self, value: sympy.Expr) -> Tree:
        value = sympy.sympify(value)
        if value.is_Integer:
            return ("const", int(value))
        node = self._call.size(value)
        if node not in self.numbers:
            self.numbers.append(node)
        return ("number", self.numbers.index(node))


_BINARY = {"floor_divide": "floordiv"}
_LOWEST, _HALF_STEP = torch.finfo(torch.float16).min, 16.0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
