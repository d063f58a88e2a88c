"""Builder: new operations in Dynamo's graph, made from element expressions.

A load becomes a chain of views of its leaf, or a lookup where no view has its elements. An arithmetic tree becomes
tensor operations that broadcast. Every new node runs once on fake tensors, which checks shapes and dtypes before
anything is replaced.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.functions import COMPARISONS, FUNCTIONS
from attn_fuse.expression.index import fold_index
from attn_fuse.expression.nodes import Expr
from attn_fuse.graph.names import is_tensor, value_of
from attn_fuse.graph.reach import earlier
from attn_fuse.graph.region import Region
from attn_fuse.graph.trace import call, locate_at
from attn_fuse.torch_internals import (
    CLAMP_BY_A_TENSOR_SPLITS,
    FakeTensorMode,
    FloorDiv,
    Mod,
    called_on,
    on_fake_tensors,
)

Axes = Sequence[sympy.Symbol]


class NotEmitted(Exception):
    """The call cannot be written into the graph; nothing was changed."""


class Builder:
    """Makes operations for one attention. made: the new nodes so far, in order."""

    def __init__(self, region: Region, attention: Attention, facts: Facts, mode: FakeTensorMode) -> None:
        self.attention = attention
        self.facts = facts
        self.made: list[Node] = []
        self._region = region
        self._graph = region.scope.module.graph
        self._mode = mode

    def node(self, target: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A new node, run once on fake tensors. target: a method by its name, or a function."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        made = self._graph.create_node(kind, target, args, kwargs)
        self.made.append(made)
        fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), value_of)
        with on_fake_tensors(self._mode):
            made.meta["example_value"] = call(made, fake_args, fake_kwargs)
        locate_at(made, self._region.output)
        return made

    def node_once(self, target: Callable[..., Any], *args: Any) -> Node:
        """An earlier node that calls `target`, a function without effects, on the same values, or else a new one."""
        found = earlier(self._graph, self._region.output, target, args)
        return self.node(target, *args) if found is None else found

    def undo(self, until: int = 0) -> None:
        """Erase all nodes made but the first `until`."""
        while len(self.made) > until:
            self._graph.erase_node(self.made.pop())

    def tidy(self, keep: Node) -> None:
        """Erase unused nodes among those made, except `keep`."""
        for node in reversed(self.made):
            if not node.users and node is not keep:
                self._graph.erase_node(node)

    def tensor_of(self, x: Expr, axes: Axes) -> Any:
        """`x` as a tensor with one dimension for each of `axes`, of size 1 where `x` does not depend on it.

        A number stays a number, or the node of one. Raises NotEmitted where no operations compute `x`.
        """
        match x:
            case ex.Const(value):
                return value
            case ex.Scalar(leaf):
                return self.leaf(leaf)
            case ex.Load():
                return self._view_or_lookup(x, axes)
            case ex.Gather(leaf, index):
                return self._lookup(leaf, [self._as_positions(i, axes) for i in index])
            case ex.Cast(dtype, inner):
                node = self.tensor_of(inner, axes)
                return self.node("to", node, dtype) if _gives_tensor(node) else node
            case ex.Index(value):
                return self._positions(value, axes)
            case ex.NonNegative(value):
                return self.node(torch.ge, self._positions(value, axes), 0)
            case ex.IsZero(value):
                return self.node(torch.eq, self._positions(value, axes), 0)
            case ex.Select(ex.NonNegative(place), a, b) if (axis := self._end_to_end(place, axes)) is not None:
                return self._laid_end_to_end(axis, axis - place, a, b, axes)
            case ex.Select(cond, a, b):
                return self._choice(self.tensor_of(cond, axes), self.tensor_of(a, axes), self.tensor_of(b, axes), x)
            case ex.Unary(x=inner) | ex.Not(x=inner):
                return self.node(_OPERATIONS[ex.name_of(x)], self._as_tensor(self.tensor_of(inner, axes)))
            case ex.Binary("maximum" | "minimum" as name, a, ex.Const(bound)) if CLAMP_BY_A_TENSOR_SPLITS:
                # With a number as its bound, clamp does not split the gradient.
                sides = {"min" if name == "maximum" else "max": bound}
                return self.node(torch.clamp, self._as_tensor(self.tensor_of(a, axes)), **sides)
            case ex.Binary(_, a, b) | ex.And(a, b) | ex.Or(a, b):
                return self._on_tensors(_OPERATIONS[ex.name_of(x)], a, b, axes, both=True)
            case ex.Add(a, b) | ex.Mul(a, b) | ex.Div(a, b) | ex.Compare(_, a, b):
                return self._on_tensors(_OPERATIONS[ex.name_of(x)], a, b, axes)
        raise NotEmitted(f"{type(x).__name__} cannot be made into a tensor")

    def _end_to_end(self, place: sympy.Expr, axes: Axes) -> sympy.Symbol | None:
        """The axis that `place` >= 0 cuts in two, where `place` is that axis plus a term without axes."""
        cut = [axis for axis in axes if axis in place.free_symbols]
        return cut[0] if len(cut) == 1 and not (place - cut[0]).free_symbols & set(axes) else None

    def _laid_end_to_end(self, axis: sympy.Symbol, start: sympy.Expr, a: Expr, b: Expr, axes: Axes) -> Node:
        """The concatenation along `axis` of `b` up to position `start` and `a` from there."""
        space = self.attention.space
        parts = []
        for x, first, length in ((b, 0, start), (a, start, space.sizes[axis] - start)):
            own = space.fresh("c", length)
            along = [own if other == axis else other for other in axes]
            node = self._as_tensor(self.tensor_of(al.substitute(x, {axis: own + first}, space), along))
            parts.append((node if tensor(node).dim() else self.node("view", node, *[1] * len(axes)), own))
        (sizes, others), cut = (shape(node) for node, _ in parts), list(axes).index(axis)
        wanted = [
            -1 if a == b or other == axis else self.size(space.sizes[other])
            for a, b, other in zip(sizes, others, axes, strict=True)
        ]
        nodes = []
        for node, own in parts:
            wanted[cut] = self.size(space.sizes[own])
            nodes.append(self.node("expand", node, *wanted))
        return self.node(torch.cat, nodes, dim=cut)

    def _on_tensors(self, function: Any, a: Expr, b: Expr, axes: Axes, both: bool = False) -> Node:
        left, right = self.tensor_of(a, axes), self.tensor_of(b, axes)
        # Comparisons keep their operands: torch's default dtype decides, as in the program.
        if function not in COMPARISONS.values():
            left, right = self._alike(left, right)
        if both or not isinstance(left, Node):
            left = self._as_tensor(left)
        if both:
            right = self._as_tensor(right)
        return self.node(function, left, right)

    def _as_tensor(self, value: Any) -> Node:
        if _gives_tensor(value):
            return value
        return self.node(torch.full, [], value, dtype=self.dtype_of_number(value), device=self.facts.device)

    def dtype_of_number(self, value: Any) -> torch.dtype | None:
        """The dtype for a tensor of a number, or of its node; None leaves an integer to torch.

        A float gets at least float32, to be rounded no more than the scores.
        """
        number = value_of(value) if isinstance(value, Node) else value
        if isinstance(number, (float, torch.SymFloat)):
            return self._wide
        return torch.bool if isinstance(number, bool) else None

    def _choice(self, cond: Any, a: Any, b: Any, x: Expr) -> Node:
        a, b = self._alike(a, b)
        if not isinstance(a, Node) and not isinstance(b, Node):
            dtype = torch.bool if isinstance(a, bool) and isinstance(b, bool) else self._wide
            a = self.node(torch.full, [], a, dtype=dtype, device=self.facts.device)
        return self.node(torch.where, self._as_tensor(cond), a, b)

    def _alike(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Both operands. An integer tensor beside a float is cast, since torch would use its default dtype."""
        return self._as_fraction(a, b), self._as_fraction(b, a)

    def _as_fraction(self, x: Any, other: Any) -> Any:
        is_whole = _gives_tensor(x) and not tensor(x).is_floating_point()
        return self.node("to", x, self._wide) if is_whole and isinstance(other, float) else x

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.facts.dtype == torch.float64 else torch.float32

    def _as_positions(self, x: Expr, axes: Axes) -> Node:
        if isinstance(x, ex.Index):
            return self._positions(x.value, axes)
        node = self._as_tensor(self.tensor_of(x, axes))
        return node if tensor(node).dtype == torch.int64 else self.node("to", node, torch.int64)

    def _positions(self, value: sympy.Expr, axes: Axes) -> Node:
        """An index expression as an int64 tensor over `axes`."""
        made = self._position(sympy.expand(value), axes)
        if isinstance(made, Node) and isinstance(value_of(made), torch.Tensor):
            return made
        return self.node(torch.full, [1] * len(axes), made, dtype=torch.int64, device=self.facts.device)

    def _position(self, value: sympy.Expr, axes: Axes) -> Any:
        """An index expression as a tensor over `axes`, or as a number if it depends on none of them."""

        def leaf(part: sympy.Expr) -> Any:
            if not part.free_symbols & set(axes):
                return self.size(part)
            if not part.is_Symbol:
                return None
            line = self.node(torch.arange, self.size(self.attention.size(part)), device=self.facts.device)
            return self.node("view", line, *[-1 if axis == part else 1 for axis in axes])

        functions = (torch.add, torch.mul, torch.floor_divide, torch.remainder)
        try:
            return fold_index(value, leaf, *(functools.partial(self._on_positions, f) for f in functions))
        except ValueError as problem:
            raise NotEmitted(str(problem)) from None

    def _on_positions(self, function: Callable[..., Any], a: Any, b: Any) -> Any:
        if function in (torch.add, torch.mul) and not _gives_tensor(a):
            a, b = b, a
        return self.node(function if _gives_tensor(a) else _OF_NUMBERS.get(function, function), a, b)

    def _view_or_lookup(self, load: ex.Load, axes: Axes) -> Node:
        if self.has_view(load, axes):
            return self.view(load, axes)
        positions = zip(load.index, self.lengths(load.leaf), strict=True)
        return self._lookup(load.leaf, [self._positions_within(i, n, axes) for i, n in positions])

    def _positions_within(self, index: sympy.Expr, length: sympy.Expr, axes: Axes) -> Node:
        space = self.attention.space
        node = self._positions(index, axes)
        # A choice between concatenated tensors reads all of them everywhere and keeps the elements in range.
        if not space.is_nonnegative(index):
            node = self.node(torch.clamp, node, min=0)
        if not space.is_nonnegative(length - 1 - index):
            node = self.node(torch.clamp, node, max=self.size(length - 1))
        return node

    def _lookup(self, leaf: int, positions: Sequence[Node]) -> Node:
        return self.node(operator.getitem, self.leaf(leaf), tuple(positions))

    def leaf(self, number: int) -> Node:
        """The node of leaf `number`, copied to the attention's device if it lies elsewhere.

        The lift ignores copies between devices, and torch takes indices and single numbers from the CPU.
        """
        node, device = self._region.leaves[number], self.facts.device
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.device == device:
            return node
        copies = (made for made in self.made if made.target == "to" and made.args == (node, device))
        return next(copies, None) or self.node("to", node, device)

    def lengths(self, leaf: int) -> list[sympy.Expr]:
        """The sizes of the tensor `leaf`, a leaf's number."""
        return shape(self._region.leaves[leaf])

    def has_view(self, load: ex.Load, axes: Axes) -> bool:
        """Whether a view of the leaf has the elements of `load` over `axes`. The graph stays unchanged."""
        made = len(self.made)
        try:
            self.view(load, axes)
        except Exception:
            # Out of range, not affine or overlapping: there is no view.
            return False
        finally:
            self.undo(made)
        return True

    def view(self, load: ex.Load, axes: Axes) -> Node:
        """The elements of `load` as a view of its leaf, with a dimension for each of `axes`, of size 1 if not read.

        Raises NotEmitted where no view has them.
        """
        node = self.leaf(load.leaf)
        found: list[sympy.Symbol] = []
        lengths = shape(node)
        # Start with the last dimension, because splitting one moves those after it.
        for place in reversed(range(len(load.index))):
            terms, offset = self._affine(load.index[place])
            node, symbols = self._axis(node, place, lengths[place], terms, offset)
            found = symbols + found
        if len(set(found)) != len(found) or not set(found) <= set(axes):
            raise NotEmitted(f"no view of the tensor has the elements {load.index}")
        node = self.permuted(node, [found.index(a) for a in axes if a in found])
        for place, axis in enumerate(axes):
            if axis not in found:
                node = self.node("unsqueeze", node, place)
        return node

    def _affine(self, index: sympy.Expr) -> tuple[list[tuple[sympy.Symbol, sympy.Expr]], sympy.Expr]:
        """((symbol, stride) pairs, largest stride first; the offset). Raises NotEmitted where `index` is not affine."""
        ranges = self.attention.space.sizes
        terms, rest = [], sympy.expand(index)
        for symbol in sorted(rest.free_symbols & ranges.keys(), key=str):
            stride = rest.coeff(symbol)
            rest = sympy.expand(rest - stride * symbol)
            terms.append((symbol, stride))
        if rest.free_symbols & ranges.keys() or any(s.free_symbols & ranges.keys() for _, s in terms):
            raise NotEmitted(f"index {index} is not affine")
        space = self.attention.space

        def rank(stride: sympy.Expr) -> int:
            return sum(space.is_nonnegative(stride - other) for _, other in terms)

        return sorted(terms, key=lambda term: rank(term[1]), reverse=True), rest

    def _axis(
        self,
        node: Node,
        place: int,
        length: sympy.Expr,
        terms: list[tuple[sympy.Symbol, sympy.Expr]],
        offset: sympy.Expr,
    ) -> tuple[Node, list[sympy.Symbol]]:
        """(`node` with dimension `place` replaced by one for each of `terms`, the symbols of these)

        The element read is at `offset` plus the sum of symbol * stride. Raises NotEmitted where elements overlap.
        """
        if not terms:
            return self.node("select", node, place, self.size(offset)), []
        (symbol, stride), inner = terms[0], terms[1:]
        count, space = self.attention.size(symbol), self.attention.space
        if stride == 1 and not inner:
            return self._narrowed(node, place, length, offset, count), [symbol]
        outer = sympy.cancel(length / stride)
        if sympy.denom(outer) != 1:
            node, length, offset = self._narrowed(node, place, length, offset, count * stride), count * stride, 0
            outer = count
        reach = sum((s * (self.attention.size(i) - 1) for i, s in inner), sympy.Integer(0))
        start, within = space.floordiv(sympy.sympify(offset), stride), space.mod(sympy.sympify(offset), stride)
        if not space.is_nonnegative(stride - 1 - within - reach):
            raise NotEmitted(f"elements {terms} overlap")
        node = self.unflattened(node, place, [outer, stride])
        node, symbols = self._axis(node, place + 1, stride, inner, within)
        return self._narrowed(node, place, outer, start, count), [symbol, *symbols]

    def _narrowed(self, node: Node, place: int, length: sympy.Expr, start: sympy.Expr, count: sympy.Expr) -> Node:
        if start == 0 and self.attention.space.same_size(length, count):
            return node
        return self.node("narrow", node, place, self.size(start), self.size(count))

    def unflattened(self, node: Node, place: int, sizes: Sequence[sympy.Expr]) -> Node:
        """`node` with dimension `place` split into `sizes`."""
        symbolic = [s for s in sizes if not s.is_Integer]
        shape = [-1 if len(symbolic) == 1 and not s.is_Integer else self.size(s) for s in sizes]
        return self.node("unflatten", node, place, shape)

    def permuted(self, node: Node, order: list[int]) -> Node:
        """`node` with its dimensions in `order`; `node` itself where they already are."""
        return node if order == sorted(order) else self.node("permute", node, *order)

    def size(self, size: sympy.Expr) -> Any:
        """An expression of sizes as a number or node. Raises NotEmitted where the graph does not hold it."""
        functions = (operator.add, operator.mul, operator.floordiv, operator.mod)
        return fold_index(sympy.sympify(size), self._told, *(functools.partial(self.node, f) for f in functions))

    def _told(self, size: sympy.Expr) -> Any:
        """A number or node for `size` as a whole; None to compute it from its parts."""
        if size.is_Number:
            return int(size) if size.is_Integer else float(size)
        for leaf in (*self._region.leaves, *self._graph.find_nodes(op="placeholder")):
            value = value_of(leaf)
            if isinstance(value, torch.SymInt) and value.node.expr == size:
                return leaf
            if isinstance(value, torch.Tensor):
                for dim, length in enumerate(value.shape):
                    if size_expr(length) == size:
                        return self.node("size", leaf, dim)
        if size in self._numbers:
            return self._numbers[size]
        if size.is_Pow and size.exp.is_Integer and size.exp > 0:
            return functools.reduce(functools.partial(self.node, operator.mul), [self.size(size.base)] * int(size.exp))
        if isinstance(size, (sympy.Add, sympy.Mul, FloorDiv, Mod)):
            return None
        try:
            return called_on(size, [self.size(part) for part in size.args], self.node)
        except KeyError:
            raise NotEmitted(f"size {size} is not that of any tensor here") from None

    @functools.cached_property
    def _numbers(self) -> dict[sympy.Expr, Node]:
        """By symbolic number, the first node before the region's output that computes it."""
        found: dict[sympy.Expr, Node] = {}
        for node in self._graph.nodes:
            if node is self._region.output:
                break
            value = value_of(node)
            if isinstance(value, (torch.SymInt, torch.SymFloat)):
                found.setdefault(value.node.expr, node)
        return found


def tensor(node: Node) -> torch.Tensor:
    """The fake tensor recorded for `node`, which gives a tensor."""
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return value


def shape(node: Node) -> list[sympy.Expr]:
    """The sizes of the tensor that `node` gives."""
    return [size_expr(size) for size in tensor(node).shape]


def size_expr(size: Any) -> sympy.Expr:
    """A size as an expression, with exact divisions carried out."""
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(size)

    def divided(top: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
        quotient = sympy.cancel(top / by)
        return quotient if sympy.denom(quotient) == 1 else FloorDiv(top, by)

    return size.node.expr.replace(FloorDiv, divided)


# Operations on tensors by the names of expressions.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: row.torch for name, row in FUNCTIONS.items()}, **COMPARISONS,
    "not": torch.logical_not, "and": torch.logical_and, "or": torch.logical_or,
}  # fmt: skip
# Operations on sizes, which a graph computes in Python.
_OF_NUMBERS = {torch.add: operator.add, torch.mul: operator.mul}


def _gives_tensor(value: Any) -> bool:
    return isinstance(value, Node) and is_tensor(value)
