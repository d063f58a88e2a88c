"""Call: what a kernel builds its call with, operations in Dynamo's graph made from element expressions.

A load becomes a chain of views of its leaf; an arithmetic tree becomes tensor operations that broadcast. Every new node
is run once on fake tensors, so that shapes and dtypes are known to agree before anything is replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from attn_fuse import expression as ex
from attn_fuse.attention import Attention, Causal, DenseMask
from attn_fuse.expression import Expr
from attn_fuse.facts import Facts
from attn_fuse.region import Region, op_name, value_of
from attn_fuse.torch_internals import FakeTensorMode, on_fake_tensors

Axis: TypeAlias = sympy.Symbol | None


class NotEmitted(Exception):
    """The call cannot be written into the graph; nothing was changed."""


class Call:
    """What a kernel's `emit` builds its call with."""

    def __init__(self, region: Region, attention: Attention, facts: Facts, mode: FakeTensorMode) -> None:
        self.attention = attention
        self.facts = facts
        self._region = region
        self._graph = region.scope.module.graph
        self._mode = mode
        self.made: list[Node] = []

    # ---- what kernels ask for

    def query(self) -> Node:
        """[batch, heads, q_len, head_dim]"""
        a = self.attention
        query = a.query if self.scale_is_number else ex.mul(a.query, a.scale)
        return self._operand(query, a.head_axes, (a.axes.query, a.axes.inner))

    def key(self) -> Node:
        """[batch, kv_heads, kv_len, head_dim]"""
        a = self.attention
        return self._operand(a.key, a.kv_head_axes, (a.axes.key, a.axes.inner))

    def value(self) -> Node:
        """[batch, kv_heads, kv_len, value_dim]"""
        a = self.attention
        return self._operand(a.value, a.kv_head_axes, (a.axes.key, a.axes.value))

    @property
    def scale_is_number(self) -> bool:
        return isinstance(self.attention.scale, ex.Const)

    def scale(self) -> float:
        """What is left for the kernel to scale by; 1 where the scale went into the query."""
        scale = self.attention.scale
        return float(scale.value) if isinstance(scale, ex.Const) else 1.0

    def dropout_p(self) -> Any:
        """A number, or the node that holds it."""
        match self.attention.dropout_p:
            case None:
                return 0.0
            case ex.Const(p):
                return float(p)
            case other:
                return self._value(other, ())

    def keep(self) -> Node | None:
        """Bool [batch or 1, heads or 1, q_len or 1, kv_len or 1], True where the key is seen; None without a mask."""
        condition: Expr | None = None
        for part in self.attention.mask.parts:
            keep = self._condition(part)
            condition = keep if condition is None else ex.logical_and(condition, keep)
        return None if condition is None else self._over_scores(condition, torch.bool)

    def bias(self, dtype: torch.dtype) -> Node | None:
        """[batch or 1, heads or 1, q_len or 1, kv_len or 1] of `dtype`, the sum of the biases; None without one."""
        total: Expr | None = None
        for term in self.attention.biases:
            total = term if total is None else ex.Add(total, term)
        return None if total is None else self._over_scores(total, dtype)

    def node(self, target: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A new operation, a method by its name or a function, run once on fake tensors."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        made = self._graph.create_node(kind, target, args, kwargs)
        self.made.append(made)
        fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), value_of)
        with on_fake_tensors(self._mode):
            made.meta["example_value"] = (
                getattr(fake_args[0], target)(*fake_args[1:], **fake_kwargs)
                if isinstance(target, str)
                else target(*fake_args, **fake_kwargs)
            )
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if name in self._region.output.meta:
                made.meta[name] = self._region.output.meta[name]
        return made

    # ---- back to what the program had

    def as_written(self, out: Node) -> Node:
        """`out` [batch, heads, q_len, value_dim] in the dimensions, dtype and strides of the region's output."""
        a = self.attention
        out = self._unfold(out, 3, (a.axes.value,) if a.axes.value is not None else ())
        out = self._unfold(out, 2, (a.axes.query,) if a.axes.query is not None else ())
        out = self._unfold(out, 1, a.head_axes)
        out = self._unfold(out, 0, a.batch_axes)
        have = [*a.batch_axes, *a.head_axes, *(s for s in (a.axes.query, a.axes.value) if s is not None)]
        want = [s for dim in a.output for s in dim]
        out = self._permuted(out, [have.index(s) for s in want])
        for place, dim in enumerate(a.output):
            if not dim:
                out = self.node("unsqueeze", out, place)
            elif len(dim) > 1:
                out = self.node("flatten", out, place, place + len(dim) - 1)
        original = value_of(self._region.output)
        assert isinstance(original, torch.Tensor)
        if _tensor(out).dtype != original.dtype:
            out = self.node("to", out, original.dtype)
        made = _tensor(out)
        if made.dim() != original.dim() or any(
            not _same(m, o) for m, o in zip(made.shape, original.shape, strict=True)
        ):
            raise NotEmitted(f"the call gives {tuple(made.shape)} for {tuple(original.shape)}")
        if made.device != original.device:
            raise NotEmitted(f"the call gives a tensor on {made.device} for one on {original.device}")
        return self._with_strides(out, original)

    def undo(self) -> None:
        for node in reversed(self.made):
            self._graph.erase_node(node)

    # ---- operands

    def _operand(self, x: Expr, heads: Sequence[sympy.Symbol], inner: tuple[Axis, Axis]) -> Node:
        axes: list[Axis] = [*self.attention.batch_axes, *heads, *inner]
        node = self._value(x, axes)
        if not isinstance(node, Node):
            raise NotEmitted("an operand is a number")
        if _tensor(node).dtype != self.facts.dtype:
            node = self.node("to", node, self.facts.dtype)
        wanted = [self.attention.size(a) for a in axes]
        broadcast = [s == 1 and w != 1 for s, w in zip(_shape(node), wanted, strict=True)]
        if any(broadcast):
            node = self.node(
                "expand", node, *(self._size(w) if b else -1 for w, b in zip(wanted, broadcast, strict=True))
            )
        node = self._folded(node, 0, len(self.attention.batch_axes))
        node = self._folded(node, 1, len(heads))
        # No fused kernel of torch's reads a head_dim that is not dense.
        return node if _size_expr(_tensor(node).stride(-1)) == 1 else self.node("contiguous", node)

    def _folded(self, node: Node, place: int, count: int) -> Node:
        if count == 0:
            return self.node("unsqueeze", node, place)
        return node if count == 1 else self.node("flatten", node, place, place + count - 1)

    def _unfold(self, node: Node, place: int, axes: Sequence[sympy.Symbol]) -> Node:
        if not axes:
            return self.node("select", node, place, 0)
        return node if len(axes) == 1 else self._unflattened(node, place, [self.attention.size(a) for a in axes])

    def _over_scores(self, x: Expr, dtype: torch.dtype) -> Node:
        a = self.attention
        node = self._value(x, [*a.batch_axes, *a.head_axes, a.axes.query, a.axes.key])
        if not isinstance(node, Node):
            node = self.node(torch.full, [1, 1, 1, 1], node, dtype=dtype, device=self.facts.device)
            return node
        if _tensor(node).dtype != dtype:
            node = self.node("to", node, dtype)
        return self._folded_broadcast(self._folded_broadcast(node, 0, a.batch_axes), 1, a.head_axes)

    def _folded_broadcast(self, node: Node, place: int, axes: Sequence[sympy.Symbol]) -> Node:
        """Like `_folded`, for a tensor in which some of the axes may have size 1 to be broadcast."""
        if len(axes) > 1:
            sizes = _shape(node)[place : place + len(axes)]
            wanted = [self.attention.size(a) for a in axes]
            if any(s != 1 for s in sizes) and any(s == 1 and w != 1 for s, w in zip(sizes, wanted, strict=True)):
                shape: list[Any] = [-1] * _tensor(node).dim()
                shape[place : place + len(axes)] = [self._size(w) for w in wanted]
                node = self.node("expand", node, *shape)
        return self._folded(node, place, len(axes))

    def _condition(self, part: Causal | DenseMask) -> Expr:
        if isinstance(part, DenseMask):
            return part.keep
        axes = self.attention.axes
        assert axes.query is not None
        return ex.NonNegative(axes.query - axes.key + part.offset)

    # ---- element expressions as operations

    def _value(self, x: Expr, axes: Sequence[Axis]) -> Any:
        """`x` as a tensor with one dimension for each of `axes`, of size 1 where `x` does not depend on it."""
        match x:
            case ex.Const(value):
                return value
            case ex.Scalar(leaf):
                return self._region.leaves[leaf]
            case ex.Load():
                return self._load(x, axes)
            case ex.Cast(dtype, inner):
                node = self._value(inner, axes)
                return self.node("to", node, dtype) if isinstance(node, Node) and _is_tensor(node) else node
            case ex.Index(value):
                wide = torch.float64 if self.facts.dtype == torch.float64 else torch.float32
                return self.node("to", self._positions(value, axes), wide)
            case ex.NonNegative(value):
                return self.node(torch.ge, self._positions(value, axes), 0)
            case ex.IsZero(value):
                return self.node(torch.eq, self._positions(value, axes), 0)
            case ex.Select(cond, a, b):
                return self._choice(self._value(cond, axes), self._value(a, axes), self._value(b, axes), x)
            case ex.Unary(name, inner):
                return self.node(getattr(torch, name), self._as_tensor(self._value(inner, axes)))
            case ex.Not(inner):
                return self.node(torch.logical_not, self._as_tensor(self._value(inner, axes)))
            case ex.Compare(op, a, b):
                return self._on_tensors(getattr(torch, op), a, b, axes)
            case ex.Binary(name, a, b):
                return self._on_tensors(getattr(torch, name), a, b, axes, both=True)
            case ex.And(a, b):
                return self._on_tensors(torch.logical_and, a, b, axes, both=True)
            case ex.Or(a, b):
                return self._on_tensors(torch.logical_or, a, b, axes, both=True)
            case ex.Add(a, b):
                return self._on_tensors(torch.add, a, b, axes)
            case ex.Mul(a, b):
                return self._on_tensors(torch.mul, a, b, axes)
            case ex.Div(a, b):
                return self._on_tensors(torch.div, a, b, axes)
        raise NotEmitted(f"{type(x).__name__} cannot be made into a tensor")

    def _on_tensors(self, function: Any, a: Expr, b: Expr, axes: Sequence[Axis], both: bool = False) -> Node:
        left, right = self._value(a, axes), self._value(b, axes)
        if both or not isinstance(left, Node):
            left = self._as_tensor(left)
        if both:
            right = self._as_tensor(right)
        return self.node(function, left, right)

    def _as_tensor(self, value: Any) -> Node:
        if isinstance(value, Node) and _is_tensor(value):
            return value
        return self.node(torch.full, [], value, dtype=_dtype_of_number(value), device=self.facts.device)

    def _choice(self, cond: Any, a: Any, b: Any, x: Expr) -> Node:
        if not isinstance(a, Node) and not isinstance(b, Node):
            dtype = torch.bool if isinstance(a, bool) and isinstance(b, bool) else torch.float32
            if self.facts.dtype == torch.float64 and dtype != torch.bool:
                dtype = torch.float64
            a = self.node(torch.full, [], a, dtype=dtype, device=self.facts.device)
        return self.node(torch.where, self._as_tensor(cond), a, b)

    def _positions(self, value: sympy.Expr, axes: Sequence[Axis]) -> Node:
        """An index expression as an int64 tensor over `axes`."""
        total: Any = None
        rest = sympy.expand(value)
        for place, axis in enumerate(axes):
            if axis is None or not rest.has(axis):
                continue
            slope = sympy.diff(rest, axis)
            if slope.free_symbols & set(filter(None, axes)):
                raise NotEmitted(f"position {value} is not affine")
            rest = sympy.expand(rest - slope * axis)
            line = self.node(torch.arange, self._size(self.attention.size(axis)), device=self.facts.device)
            line = self.node("view", line, *[-1 if p == place else 1 for p in range(len(axes))])
            if slope != 1:
                line = self.node(torch.mul, line, self._size(slope))
            total = line if total is None else self.node(torch.add, total, line)
        if total is None:
            total = self.node(torch.zeros, [1] * len(axes), dtype=torch.int64, device=self.facts.device)
        return total if rest == 0 else self.node(torch.add, total, self._size(rest))

    # ---- loads as views

    def _load(self, load: ex.Load, axes: Sequence[Axis]) -> Node:
        node = self._region.leaves[load.leaf]
        found: list[sympy.Symbol] = []
        lengths = _shape(node)
        # From the last dimension, so that taking one apart does not move those still to come.
        for place in reversed(range(len(load.index))):
            terms, offset = self._affine(load.index[place])
            node, symbols = self._axis(node, place, lengths[place], terms, offset)
            found = symbols + found
        if len(set(found)) != len(found) or not set(found) <= set(axes):
            raise NotEmitted(f"no view of the tensor has the elements {load.index}")
        node = self._permuted(node, [found.index(a) for a in axes if a in found])
        for place, axis in enumerate(axes):
            if axis is None or axis not in found:
                node = self.node("unsqueeze", node, place)
        return node

    def _affine(self, index: sympy.Expr) -> tuple[list[tuple[sympy.Symbol, sympy.Expr]], sympy.Expr]:
        """(symbol, stride) pairs, the largest stride first, and the offset."""
        ranges = self.attention.space.sizes
        terms, rest = [], sympy.expand(index)
        for symbol in sorted(rest.free_symbols & ranges.keys(), key=str):
            stride = sympy.diff(rest, symbol)
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
        """Take the dimension at `place` apart so that `terms` and `offset` say which element is read."""
        if not terms:
            return self.node("select", node, place, self._size(offset)), []
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
        node = self._unflattened(node, place, [outer, stride])
        node, symbols = self._axis(node, place + 1, stride, inner, within)
        return self._narrowed(node, place, outer, start, count), [symbol, *symbols]

    def _narrowed(self, node: Node, place: int, length: sympy.Expr, start: sympy.Expr, count: sympy.Expr) -> Node:
        if start == 0 and self.attention.space.same_size(length, count):
            return node
        return self.node("narrow", node, place, self._size(start), self._size(count))

    def _unflattened(self, node: Node, place: int, sizes: Sequence[sympy.Expr]) -> Node:
        symbolic = [s for s in sizes if not s.is_Integer]
        shape = [-1 if len(symbolic) == 1 and not s.is_Integer else self._size(s) for s in sizes]
        return self.node("unflatten", node, place, shape)

    def _permuted(self, node: Node, order: list[int]) -> Node:
        return node if order == sorted(order) else self.node("permute", node, *order)

    def _with_strides(self, out: Node, original: torch.Tensor) -> Node:
        # Fake tensors do not show the strides that the kernel will give, so they are set wherever they could matter.
        if not _strides_matter(self._region.output):
            return out
        order = sorted(range(original.dim()), key=lambda d: original.stride()[d], reverse=True)
        back = [order.index(d) for d in range(original.dim())]
        dense = self.node("contiguous", self._permuted(out, order))
        return self._permuted(dense, back)

    # ---- sizes

    def _size(self, size: sympy.Expr) -> Any:
        """A size as a number or a node of the graph."""
        size = sympy.sympify(size)
        if size.is_Integer:
            return int(size)
        for leaf in self._region.leaves:
            value = value_of(leaf)
            if isinstance(value, torch.SymInt) and value.node.expr == size:
                return leaf
            if isinstance(value, torch.Tensor):
                for dim, length in enumerate(value.shape):
                    if _size_expr(length) == size:
                        return self.node("size", leaf, dim)
        match size:
            case sympy.Add():
                return self._joined(operator.add, size.args)
            case sympy.Mul():
                return self._joined(operator.mul, size.args)
        raise NotEmitted(f"size {size} is not that of any tensor here")

    def _joined(self, combine: Callable[..., Any], parts: Sequence[sympy.Expr]) -> Any:
        total = self._size(parts[0])
        for part in parts[1:]:
            total = self.node(combine, total, self._size(part))
        return total


# After these, the strides of what they were given are gone.
_FORGETS_STRIDES = frozenset("contiguous reshape flatten linear matmul bmm mm einsum cat stack concat".split())
_ONLY_REORDERS = frozenset({"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "mT"})


def _strides_matter(output: Node) -> bool:
    """Whether a later operation could see how the region's output lies in memory."""
    return any(
        op_name(user) not in _FORGETS_STRIDES and not (op_name(user) in _ONLY_REORDERS and not _strides_matter(user))
        for user in output.users
    )


def _tensor(node: Node) -> torch.Tensor:
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return value


def _shape(node: Node) -> list[sympy.Expr]:
    return [_size_expr(size) for size in _tensor(node).shape]


def _is_tensor(node: Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _size_expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _same(a: Any, b: Any) -> bool:
    return bool(sympy.expand(_size_expr(a) - _size_expr(b)) == 0)


def _dtype_of_number(value: Any) -> torch.dtype | None:
    return torch.bool if isinstance(value, bool) else torch.float32 if isinstance(value, float) else None
