"""Packed: query, key and value that lie in one tensor, as one projection to all three gives them.

Taken: three affine views of one tensor that have no element in common, however they are interleaved: [B, L, 3 * H * D],
[B, L, H, 3, D], [B, L, 3, H, D], ... A kernel reads them in place, and writes their gradients in place into that of the
packed tensor. Declined: a tensor that batch entries or heads share, whose gradient is a sum, and heads that have no
single stride.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy

from attn_fuse.attention.attention import Attention
from attn_fuse.emit.builder import tensor
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Load

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

Symbols = tuple[sympy.Symbol, ...]


@dataclass(frozen=True)
class View:
    """A view [batch, heads, len, head_dim] of a tensor of n dimensions: element x is at offset + sum_k x[k] * steps[k].

    offset: n positions. steps: n positions for each of the four dimensions.
    """

    offset: tuple[sympy.Expr, ...]
    steps: tuple[tuple[sympy.Expr, ...], ...]

    @property
    def numbers(self) -> Iterator[sympy.Expr]:
        """The offset, then the steps of each dimension."""
        yield from self.offset
        for step in self.steps:
            yield from step


@dataclass(frozen=True)
class Packed:
    """query, key and value as views of leaf number `leaf`; no element is in two views, or twice in one."""

    leaf: int
    query: View
    key: View
    value: View

    @property
    def can_be_written(self) -> bool:
        """Whether head_dim and value_dim are dense in the last dimension: kernels write no other views."""
        return all(
            sum(map(abs, view.steps[3][:-1])) == 0 and view.steps[3][-1] in (0, 1)
            for view in (self.query, self.key, self.value)
        )


def packed_views(attention: Attention) -> Packed | None:
    """The views of query, key and value in one tensor; None where they are not proved to lie in one."""
    a = attention
    if not (isinstance(a.query, Load) and isinstance(a.key, Load) and isinstance(a.value, Load)):
        return None
    if not a.query.leaf == a.key.leaf == a.value.leaf:
        return None
    groups = {
        a.query: (a.batch_axes, a.head_axes, a.axes.query, a.axes.inner),
        a.key: (a.batch_axes, a.kv_head_axes, a.axes.key, a.axes.inner),
        a.value: (a.batch_axes, a.kv_head_axes, a.axes.key, a.axes.value),
    }
    if len(groups) != 3:
        return None
    views = []
    places = []
    for load, axes in groups.items():
        place = [_affine(index, a.space) for index in load.index]
        if any(p is None for p in place):
            return None
        known = [p for p in place if p is not None]
        view = _view(known, axes, a.space)
        if view is None or not _is_injective(known, [s for group in axes for s in group], a.space):
            return None
        views.append(view)
        places.append(known)
    for n, first in enumerate(places):
        for second in places[n + 1 :]:
            if not any(_are_apart(x, y, a.space) for x, y in zip(first, second, strict=True)):
                return None
    return Packed(a.query.leaf, *views)


def packed_operands(call: Call) -> tuple[Any, list[Any], list[Any]] | None:
    """The packed tensor, the numbers of its three views, and the sizes, for an operator; None without such a tensor.

    The sizes are batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim.
    """
    a = call.attention
    packed = packed_views(a)
    if packed is None or not packed.can_be_written or tensor(call.leaf(packed.leaf)).dtype != call.facts.dtype:
        return None
    lengths = (
        a.batch_axes, a.head_axes, a.kv_head_axes, a.axes.query, a.axes.key, a.axes.inner, a.axes.value,
    )  # fmt: skip
    views = [call.size(n) for view in (packed.query, packed.key, packed.value) for n in view.numbers]
    return call.leaf(packed.leaf), views, [call.size(a.length(axes)) for axes in lengths]


@dataclass(frozen=True)
class _Affine:
    """A position in one dimension: offset + the sum of symbol * step."""

    offset: sympy.Expr
    steps: Mapping[sympy.Symbol, sympy.Expr]


def _affine(index: sympy.Expr, space: Space) -> _Affine | None:
    rest = sympy.expand(index)
    steps = {}
    for symbol in sorted(rest.free_symbols & space.sizes.keys(), key=str):
        step = rest.coeff(symbol)
        rest = sympy.expand(rest - step * symbol)
        if space.sizes[symbol] != 1:
            steps[symbol] = step
    if any(x.free_symbols & space.sizes.keys() for x in (rest, *steps.values())):
        return None
    if not all(space.is_nonnegative(x) for x in (rest, *steps.values())):
        return None
    return _Affine(rest, steps)


def _view(place: list[_Affine], groups: tuple[Symbols, ...], space: Space) -> View | None:
    """The view whose four dimensions are the groups; None where the symbols of a group have no common stride."""
    steps = []
    for group in groups:
        step: list[sympy.Expr] = [sympy.Integer(0)] * len(place)
        length = sympy.Integer(1)
        for symbol in reversed([s for s in group if space.sizes[s] != 1]):
            own = [p.steps.get(symbol, sympy.Integer(0)) for p in place]
            if length == 1:
                step = own
            elif any(sympy.expand(one - length * last) != 0 for one, last in zip(own, step, strict=True)):
                return None
            length = length * space.sizes[symbol]
        steps.append(tuple(step))
    return View(tuple(p.offset for p in place), tuple(steps))


def _is_injective(place: list[_Affine], symbols: list[sympy.Symbol], space: Space) -> bool:
    """Whether no two values of `symbols` lead to the same element."""
    wanted = [s for s in symbols if space.sizes[s] != 1]
    if sorted(map(str, wanted)) != sorted(str(s) for p in place for s in p.steps):
        return False
    return all(_is_mixed_radix(p, space) for p in place)


def _is_mixed_radix(place: _Affine, space: Space) -> bool:
    """Whether each step is larger than all that the smaller steps reach together."""
    left = dict(place.steps)
    reach = sympy.Integer(0)
    while left:
        least = next((s for s, x in left.items() if all(space.is_nonnegative(y - x) for y in left.values())), None)
        if least is None or not space.is_nonnegative(left[least] - reach - 1):
            return False
        reach += left.pop(least) * (space.sizes[least] - 1)
    return True


def _are_apart(a: _Affine, b: _Affine, space: Space) -> bool:
    """Whether two positions are proved to differ for all values of their symbols, as they are or modulo a step."""
    for by in (None, *{*a.steps.values(), *b.steps.values()}):
        one, other = _range(a, by, space), _range(b, by, space)
        if one is None or other is None:
            continue
        if space.is_negative(one[1] - other[0]) or space.is_negative(other[1] - one[0]):
            return True
    return False


def _range(place: _Affine, by: sympy.Expr | None, space: Space) -> tuple[sympy.Expr, sympy.Expr] | None:
    """The min and max of a position, modulo `by` unless that is None; None where the position would wrap around."""
    least, steps = place.offset, place.steps
    if by is not None:
        steps = {s: x for s, x in steps.items() if sympy.denom(sympy.cancel(x / by)) != 1}
        least = space.mod(least, by)
    greatest = least + sum((x * (space.sizes[s] - 1) for s, x in steps.items()), sympy.Integer(0))
    if by is not None and not space.is_nonnegative(by - 1 - greatest):
        return None
    return least, greatest
