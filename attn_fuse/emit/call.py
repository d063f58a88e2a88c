"""Call: an attention's operands in the form that kernels take, and its output in the form of the program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from attn_fuse.attention.facts import may_be_nan
from attn_fuse.emit.builder import Builder, NotEmitted, shape, size_expr, tensor
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.nodes import Expr
from attn_fuse.graph.names import op_name, value_of

Axes: TypeAlias = tuple[sympy.Symbol, ...]


class Call(Builder):
    """The builder passed to a kernel's `emit`."""

    def query(self, scaled: bool = True) -> Node:
        """The query, [batch, heads, q_len, head_dim]. scaled: whether to apply the factor missing from `scale`."""
        a = self.attention
        query = al.mul(a.query, self.factor_of_query) if scaled else a.query
        return self._operand(query, a.head_axes, (a.axes.query, a.axes.inner))

    def key(self) -> Node:
        """The key, [batch, kv_heads, kv_len, head_dim]."""
        a = self.attention
        return self._operand(a.key, a.axes.kv_heads, (a.axes.key, a.axes.inner))

    def value(self) -> Node:
        """The value, [batch, kv_heads, kv_len, value_dim]."""
        a = self.attention
        return self._operand(a.value, a.axes.kv_heads, (a.axes.key, a.axes.value))

    def scale(self) -> float:
        """The scale left to the kernel, above 0; 1 where the scale went into the query.

        torch's flash attention on CPU multiplies a causal mask's -inf by the scale, so 0 or less would spoil it.
        """
        scale = self.attention.scale
        return abs(float(scale.value)) or 1.0 if isinstance(scale, ex.Const) else 1.0

    @property
    def factor_of_query(self) -> ex.Expr:
        """The factor of the scores that `scale` leaves to the query."""
        match self.attention.scale:
            case ex.Const(value) if value != 0:
                # A sign flip is exact.
                return ex.Const(1.0 if value > 0 else -1.0)
            case scale:
                return scale

    @property
    def empty_is_nan(self) -> bool:
        """Whether there may be fully masked rows that are NaN as written."""
        return may_be_nan(self.attention, self.facts)

    def dropout_p(self) -> Any:
        """The dropout probability as a number or node; 0 without dropout."""
        match self.attention.dropout_p:
            case None:
                return 0.0
            case ex.Const(p):
                return float(p)
            case other:
                return self.tensor_of(other, ())

    def keep(self) -> Node | None:
        """The mask: bool [batch|1, heads|1, q_len|1, kv_len|1], True = keep; None without one."""
        parts = [part.keep for part in self.attention.mask.parts]
        return self.over_scores(functools.reduce(al.logical_and, parts), torch.bool) if parts else None

    def bias(self, dtype: torch.dtype) -> Node | None:
        """The sum of the biases: [batch|1, heads|1, q_len|1, kv_len|1] in `dtype`; None without one."""
        biases = self.attention.biases
        return self.over_scores(functools.reduce(ex.Add, biases), dtype) if biases else None

    @property
    def score_axes(self) -> Axes:
        """The index symbols of an element of the scores: batch, heads, query, key."""
        a = self.attention
        return (*a.axes.batch, *a.head_axes, *a.axes.query, *a.axes.key)

    def over_scores(self, x: Expr, dtype: torch.dtype | None = None) -> Node:
        """`x` as a tensor [batch|1, heads|1, q_len|1, kv_len|1], in `dtype` unless it is None."""
        a = self.attention
        return self._over(x, (a.axes.batch, a.head_axes, a.axes.query, a.axes.key), dtype)

    def as_written(self, out: Node) -> Node:
        """`out`, [batch, heads, q_len, value_dim], in the dimensions, dtype and strides of the region's output.

        Applies `out_scale`. Raises NotEmitted where shape or device are not those of the region's output.
        """
        a = self.attention
        if a.out_scale is not None:
            out = self.node(torch.mul, out, self.over_scores(a.out_scale))
        groups = (a.axes.batch, a.head_axes, a.axes.query, a.axes.value)
        for place, axes in reversed(list(enumerate(groups))):
            out = self._unfold(out, place, axes)
        have = [axis for axes in groups for axis in axes]
        out = self._grouped(self.permuted(out, [have.index(s) for dim in a.output for s in dim]), a.output)
        original = value_of(self._region.output)
        assert isinstance(original, torch.Tensor)
        if tensor(out).dtype != original.dtype:
            out = self.node("to", out, original.dtype)
        made = tensor(out)
        differences = [a - size_expr(b) for a, b in zip(shape(out), original.shape, strict=False)]
        if made.dim() != original.dim() or any(sympy.expand(n) != 0 for n in differences):
            raise NotEmitted(f"the call gives {tuple(made.shape)} for {tuple(original.shape)}")
        if made.device != original.device:
            raise NotEmitted(f"the call gives a tensor on {made.device} for one on {original.device}")
        return self._with_strides(out, original)

    def _operand(self, x: Expr, heads: Axes, last: tuple[Axes, Axes]) -> Node:
        node = self._over(x, (self.attention.axes.batch, heads, *last), self.facts.dtype, broadcast=False)
        # torch's fused kernels need a dense head_dim.
        return node if size_expr(tensor(node).stride(-1)) == 1 else self.node("contiguous", node)

    def _over(self, x: Expr, groups: tuple[Axes, ...], dtype: torch.dtype | None, broadcast: bool = True) -> Node:
        """`x` with one dimension for each group of axes. broadcast: whether groups not in `x` have size 1."""
        axes = [axis for group in groups for axis in group]
        node = self.tensor_of(x, axes)
        if not isinstance(node, Node) or not isinstance(value_of(node), torch.Tensor):
            dtype = self.dtype_of_number(node) if dtype is None else dtype
            return self.node(torch.full, [1] * len(groups), node, dtype=dtype, device=self.facts.device)
        if dtype is not None and tensor(node).dtype != dtype:
            node = self.node("to", node, dtype)
        return self._grouped(self._expanded(node, groups, broadcast), groups)

    def _grouped(self, node: Node, groups: Sequence[Axes]) -> Node:
        """`node` with its dimensions, one for each axis, merged into one for each group."""
        for place, group in enumerate(groups):
            if not group:
                node = self.node("unsqueeze", node, place)
            elif len(group) > 1:
                node = self.node("flatten", node, place, place + len(group) - 1)
        return node

    def _expanded(self, node: Node, groups: tuple[Axes, ...], broadcast: bool) -> Node:
        have, wanted = shape(node), [self.attention.size(axis) for group in groups for axis in group]
        if not have:
            return self.node("expand", node, *[1] * len(wanted)) if wanted else node
        target: list[Any] = [-1] * len(have)
        start = 0
        for group in groups:
            places = range(start, start + len(group))
            start += len(group)
            small = [p for p in places if have[p] == 1 and wanted[p] != 1]
            if small and (not broadcast or len(small) < sum(wanted[p] != 1 for p in places)):
                for p in small:
                    target[p] = self.size(wanted[p])
        return node if all(t == -1 for t in target) else self.node("expand", node, *target)

    def _unfold(self, node: Node, place: int, axes: Axes) -> Node:
        if not axes:
            return self.node("select", node, place, 0)
        return node if len(axes) == 1 else self.unflattened(node, place, [self.attention.size(a) for a in axes])

    def _with_strides(self, out: Node, original: torch.Tensor) -> Node:
        # Fake tensors do not show the strides of the kernel's output, so set them where they could matter.
        if not _strides_matter(self._region.output):
            return out
        order = sorted(range(original.dim()), key=lambda d: original.stride()[d], reverse=True)
        back = [order.index(d) for d in range(original.dim())]
        dense = self.node("contiguous", self.permuted(out, order))
        return self.permuted(dense, back)


# Their results do not depend on the strides of their inputs.
_FORGETS_STRIDES = frozenset("contiguous linear matmul bmm mm einsum cat stack concat".split())
# Their results may be views, which show the strides to their users.
_ONLY_REORDERS = frozenset("transpose permute swapaxes swapdims movedim moveaxis t mT reshape flatten".split())


def _strides_matter(output: Node) -> bool:
    """Whether a later operation could see the strides of `output`."""
    return any(
        op_name(user) not in _FORGETS_STRIDES and not (op_name(user) in _ONLY_REORDERS and not _strides_matter(user))
        for user in output.users
    )
