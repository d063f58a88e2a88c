"""In-place writes as functional graphs say them: a tensor with some of its elements replaced.

An element of such a tensor is a choice between what was written and what was there before. Where its position proves
which one it is, the choice goes away by simplification.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr
from attn_fuse.lift.creation import TrianglePlace
from attn_fuse.lift.tensor import (
    Indices,
    LiftedTensor,
    NoClosedForm,
    Operation,
    aten,
    clamped,
    diagonal,
    filling,
    position,
    size,
    slice_start,
)
from attn_fuse.torch_internals import FloorDiv, Mod

# Longer lists of positions have no closed form, unless they count up by one.
_MOST_POSITIONS = 16
_UNKNOWN = "elements written at positions that are read from a tensor"


def _chosen(cond: Expr, new: Callable[[], Expr], old: Callable[[], Expr], space: Space) -> Expr:
    """`new` where `cond` holds, else `old`; one that is certain not to be chosen is not called."""
    if cond == ex.TRUE:
        return new()
    if cond == ex.FALSE:
        return old()
    a, b = new(), old()
    if any(isinstance(part, ex.Softmax) for x in (a, b) if ex.has_product(x) for part in ex.walk(x)):
        # Where parts of the scores are normalised in place one after the other, each reads what the others wrote.
        a, b = al.assuming(a, cond, space), al.assuming(b, al.logical_not(cond), space)
    return al.select(cond, _with_products_of(b, a, cond, space), b, space)


def _with_products_of(other: Expr, x: Expr, cond: Expr, space: Space) -> Expr:
    """`x` where `cond` holds, with the products of `other` wherever they are the same there: one row of the scores."""
    value = _zero(cond, space)
    if value is None or not (ex.has_product(x) and ex.has_product(other)):
        return x
    ours, others = _products(x), _products(other)
    for symbol in sorted(value.free_symbols & space.sizes.keys(), key=str):
        there = sympy.expand(symbol - value * value.coeff(symbol))
        if abs(value.coeff(symbol)) == 1 and not there.has(symbol):
            same = {al.substitute(product, {symbol: there}, space): product for product in others}
            for product in (ours - others) & same.keys():
                x = al.replaced(x, product, same[product])
    return x


def _zero(cond: Expr, space: Space) -> sympy.Expr | None:
    """What is 0 where `cond` holds: the last row is also that from which on all are."""
    match cond:
        case ex.IsZero(value):
            return value
        case ex.NonNegative(value) if space.is_nonnegative(-value):
            return value
    return None


def _slice_scatter(call: Operation) -> LiftedTensor:
    x, dim, step, space = call.operand, call.dim(), call["step"], call.space
    src: LiftedTensor = call["src"]
    count = src.shape[dim]
    start = slice_start(call, x.shape[dim], count)
    if step != 1 and not (isinstance(step, int) and start.is_Integer):
        raise NoClosedForm("a slice written in steps from an unknown position")
    # With `shift` added no position is negative, and `start` is a multiple of `step`.
    shift = (-start) % step

    if count == 0:
        return call.tensor(x.at)
    nth, own = space.fresh("w", count), space.fresh("w", x.shape[dim])

    def element(index: Indices, place: sympy.Expr, before: Callable[[], Expr]) -> Expr:
        def written(at: sympy.Expr) -> Expr:
            return src.at((*index[:dim], at, *index[dim + 1 :]))

        # A written position divides evenly by `step`, so that an element read from there and written back is itself
        # again, whatever digits of its position the layout reads.
        here = _stand_in(index, dim, x.shape[dim], own, space)
        itself = written(sympy.expand((here - start) / step))
        if here != index[dim]:
            itself = al.substitute(itself, {here: index[dim]}, space)
        if _is_whole(itself) and (not _has_digits(itself) or set() < _products(itself) <= _products(before())):
            return itself
        # Floor divisions simplify at a symbol that has the range of the slice.
        return al.substitute(written(nth), {nth: place}, space)

    def at(index: Indices) -> Expr:
        along = sympy.expand(index[dim] + shift)
        place = space.floordiv(along, sympy.Integer(step)) - (start + shift) / step if step != 1 else along - start
        place = sympy.expand(place)
        cond = _is_within(place, count, space)
        # Of the first or the last row an end is enough, which whoever writes the others asks for, too.
        if count == 1 and (step != 1 or isinstance(cond, ex.And)):
            cond = al.is_zero(index[dim] - start, space)
        elif step != 1:
            cond = al.logical_and(cond, al.is_zero(space.mod(along, sympy.Integer(step)), space))
        before = functools.cache(functools.partial(x.at, index))

        def after() -> Expr:
            return precision.cast(x.dtype, element(index, place, before), src.dtype, space)

        return _chosen(cond, after, before, space)

    return call.tensor(at)


def _stand_in(index: Indices, dim: int, length: sympy.Expr, own: sympy.Symbol, space: Space) -> sympy.Symbol:
    """A symbol over [0, length) for index[dim] that occurs nowhere else in `index`.

    The same one for all writes where that can be: a write after others is read at the same indices as they, and each
    element is worked out once.
    """
    if index[dim] in space.sizes and space.sizes[index[dim]] == length:
        shared = index[dim]
    else:
        shared = space.shared(f"w{dim}_", length)
    others = {symbol for d, x in enumerate(index) if d != dim for symbol in x.free_symbols}
    return own if shared in others else shared


def _has_digits(x: Expr) -> bool:
    return any(p.has(FloorDiv, Mod) for part in ex.walk(x) for p in ex.positions(part))


def _products(x: Expr) -> set[Expr]:
    return {part for part in ex.walk(x) if isinstance(part, ex.Contract)}


def _is_whole(x: Expr) -> bool:
    """Whether all numbers in the positions of `x` are integers."""
    return all(number.is_Integer for part in ex.walk(x) for p in ex.positions(part) for number in p.atoms(sympy.Number))


def _overwritten(
    call: Operation,
    src: LiftedTensor,
    is_written: Callable[[Indices], Expr],
    inside: Callable[[Indices], Indices],
) -> LiftedTensor:
    """`self` with the element of `src` at the indices `inside` wherever `is_written` holds."""
    x, space = call.operand, call.space

    def at(index: Indices) -> Expr:
        def new() -> Expr:
            return precision.cast(x.dtype, src.at(inside(index)), src.dtype, space)

        return _chosen(is_written(index), new, lambda: x.at(index), space)

    return call.tensor(at)


def _select_scatter(call: Operation) -> LiftedTensor:
    dim = call.dim()
    place = position(call, size(call["index"]), call.operand.shape[dim])
    return _overwritten(
        call,
        call["src"],
        lambda index: al.is_zero(index[dim] - place, call.space),
        lambda index: (*index[:dim], *index[dim + 1 :]),
    )


def _diagonal_scatter(call: Operation) -> LiftedTensor:
    space, (first, second, offset, above) = call.space, diagonal(call)
    return _overwritten(
        call,
        call["src"],
        lambda index: al.is_zero(index[second] - index[first] - offset, space),
        lambda index: (
            *(i for d, i in enumerate(index) if d not in (first, second)), index[first if above else second],
        ),
    )  # fmt: skip


# ---- at positions from a tensor


def _index_copy(call: Operation) -> LiftedTensor:
    x, src, dim, space = call.operand, call["source"], call.dim(), call.space
    if not x.shape:
        raise NoClosedForm("a number written into a number")
    places = _Places(call, call["index"], x.shape[dim])

    def at(index: Indices) -> Expr:
        def element(place: sympy.Expr) -> Expr:
            return precision.cast(x.dtype, src.at((*index[:dim], place, *index[dim + 1 :])), src.dtype, space)

        return places.chosen(index[dim], element, lambda: x.at(index))

    return call.tensor(at)


def _index_fill(call: Operation) -> LiftedTensor:
    x, dim, space = call.operand, call.dim(), call.space
    if not x.shape:
        raise NoClosedForm("a number written into a number")
    places = _Places(call, call["index"], x.shape[dim], may_repeat=True)
    value, held = filling(call["value"])

    def at(index: Indices) -> Expr:
        return places.chosen(index[dim], lambda _: precision.cast(x.dtype, value, held, space), lambda: x.at(index))

    return call.tensor(at)


def _index_put(call: Operation) -> LiftedTensor:
    positions, value = call["indices"], call["values"]
    given = [d for d, p in enumerate(positions) if p is not None]
    if call["accumulate"]:
        raise NoClosedForm("numbers added at lists of positions")
    if any(size != 1 for size in value.shape):
        raise NoClosedForm("several numbers written at lists of positions")
    if any(positions[d].dtype == torch.uint8 for d in given):
        raise NoClosedForm("indexing with a mask of whole numbers")
    is_written = _mask(positions, given) or _at_lists(call, positions, given)
    return _overwritten(call, value, is_written, lambda index: (sympy.Integer(0),) * len(value.shape))


def _mask(positions: Sequence[LiftedTensor | None], given: Sequence[int]) -> Callable[[Indices], Expr] | None:
    """Whether an element is written, by the Boolean mask in `positions`; None without a mask."""
    masks = [d for d in given if positions[d].dtype == torch.bool]  # type: ignore[union-attr]
    if not masks:
        return None
    if len(given) != 1:
        raise NoClosedForm("a mask beside lists of positions")
    (dim,) = given
    mask = positions[dim]
    assert mask is not None
    return lambda index: mask.at(index[dim : dim + len(mask.shape)])


def _at_lists(
    call: Operation, positions: Sequence[LiftedTensor | None], given: Sequence[int]
) -> Callable[[Indices], Expr]:
    """Whether an element is at a position that the lists name together, as a function of its index."""
    lists = [p for p in positions if p is not None]
    together = _triangle(call, lists, given) or _diagonal(call, lists, given)
    if together is not None:
        return together
    rank = max(len(p.shape) for p in lists)
    runs = [{rank - len(p.shape) + d for d, n in enumerate(p.shape) if n != 1} for p in lists]
    if any(a & b for n, a in enumerate(runs) for b in runs[n + 1 :]) or any(len(run) > 1 for run in runs):
        raise NoClosedForm("elements written at several lists of positions")

    def flat(p: LiftedTensor) -> LiftedTensor:
        place = next((d for d, n in enumerate(p.shape) if n != 1), None)
        count = sympy.Integer(1) if place is None else p.shape[place]

        def at(index: Indices) -> Expr:
            return p.at(tuple(index[0] if d == place else sympy.Integer(0) for d in range(len(p.shape))))

        return LiftedTensor((count,), p.dtype, at)

    lengths = call.operand.shape
    places = [_Places(call, flat(p), lengths[d], may_repeat=True) for d, p in zip(given, lists, strict=True)]
    return lambda index: _all(
        along.chosen(index[d], lambda _: ex.TRUE, lambda: ex.FALSE) for d, along in zip(given, places, strict=True)
    )


def _all(conditions: Iterable[Expr]) -> Expr:
    hit: Expr = ex.TRUE
    for condition in conditions:
        hit = al.logical_and(hit, condition)
    return hit


def _triangle(call: Operation, lists: Sequence[LiftedTensor], given: Sequence[int]) -> Callable[[Indices], Expr] | None:
    """Whether an element is in a triangle, if the two lists are the rows and columns of one; None if they are not."""
    if len(lists) != 2 or any(len(p.shape) != 1 for p in lists):
        return None
    space, n = call.space, call.space.fresh("w", lists[0].shape[0])
    match [p.at((n,)) for p in lists]:
        case [ex.Index(TrianglePlace() as row), ex.Index(TrianglePlace() as column)] if (
            row.args[0] == 0 and column.args[0] == 1 and row.args[1:] == column.args[1:] and row.args[1] == n
        ):
            rows, columns, offset, upper = row.args[2:]
        case _:
            return None

    def is_written(index: Indices) -> Expr:
        i, j = (index[d] for d in given)
        inside = j - i - offset if upper else i + offset - j
        return _all(al.nonnegative(value, space) for value in (rows - 1 - i, columns - 1 - j, inside))

    return is_written


def _diagonal(call: Operation, lists: Sequence[LiftedTensor], given: Sequence[int]) -> Callable[[Indices], Expr] | None:
    """Whether an element is on a diagonal, if each list counts up by one from its start; None if one does not."""
    space, count = call.space, lists[0].shape[0] if lists[0].shape else sympy.Integer(1)
    if len(lists) < 2 or any(len(p.shape) != 1 or p.shape[0] != count for p in lists):
        return None
    n = space.fresh("w", count)
    starts = [_start(call, p.at((n,)), n, call.operand.shape[d]) for d, p in zip(given, lists, strict=True)]
    if None in starts:
        return None

    def is_written(index: Indices) -> Expr:
        first, *others = (sympy.expand(index[d] - start) for d, start in zip(given, starts, strict=True))
        return _all((_is_within(first, count, space), *(al.is_zero(other - first, space) for other in others)))

    return is_written


def _start(call: Operation, place: Expr, n: sympy.Symbol, length: sympy.Expr) -> sympy.Expr | None:
    """The first position of a list that counts up by one, along a dimension of `length`; None of any other list.

    place: the position at the symbol `n`.
    """
    match place:
        case ex.Index(value) if n not in sympy.expand(value - n).free_symbols:
            return sympy.expand(position(call, value, length) - n)
    return None


def _is_within(place: sympy.Expr, count: sympy.Expr, space: Space) -> Expr:
    """Whether 0 <= `place` < `count`."""
    return al.logical_and(al.nonnegative(place, space), al.nonnegative(count - 1 - place, space))


class _Places:
    """A list of positions along a dimension of `length`: written out one by one, or counting up by one."""

    def __init__(self, call: Operation, where: LiftedTensor, length: sympy.Expr, may_repeat: bool = False) -> None:
        self.space = call.space
        self.count = where.shape[0] if where.shape else sympy.Integer(1)
        axis = call.space.fresh("w", self.count)
        self.listed: list[sympy.Expr] = []
        self.start = _start(call, where.at((axis,) if where.shape else ()), axis, length)
        if self.start is not None:
            return
        if not self.count.is_Integer or self.count > _MOST_POSITIONS:
            raise NoClosedForm(_UNKNOWN)
        for n in range(int(self.count)):
            match where.at((sympy.Integer(n),) if where.shape else ()):
                case ex.Const(value):
                    self.listed.append(position(call, sympy.Integer(int(value)), length))
                case ex.Index(value):
                    self.listed.append(position(call, value, length))
                case _:
                    raise NoClosedForm(_UNKNOWN)
        if not may_repeat and not all(self._differ(a, b) for n, a in enumerate(self.listed) for b in self.listed[:n]):
            raise NoClosedForm("elements that may be written twice")

    def _differ(self, a: sympy.Expr, b: sympy.Expr) -> bool:
        return self.space.is_negative(a - b) or self.space.is_negative(b - a)

    def chosen(self, i: sympy.Expr, new: Callable[[sympy.Expr], Expr], old: Callable[[], Expr]) -> Expr:
        """`new` of the place that position `i` has in the list, else `old`."""
        space = self.space
        if self.start is not None:
            place = sympy.expand(i - self.start)
            return _chosen(_is_within(place, self.count, space), lambda: new(place), old, space)
        for n, where in enumerate(self.listed):
            old = self._or(al.is_zero(i - where, space), sympy.Integer(n), new, old)
        return old()

    def _or(
        self, cond: Expr, place: sympy.Expr, new: Callable[[sympy.Expr], Expr], old: Callable[[], Expr]
    ) -> Callable[[], Expr]:
        return lambda: _chosen(cond, lambda: new(place), old, self.space)


def _copy(call: Operation) -> LiftedTensor:
    x, src = call.operand, call["src"]
    extra = len(x.shape) - len(src.shape)

    def at(index: Indices) -> Expr:
        return precision.cast(x.dtype, src.at(clamped(index[extra:], src.shape)), src.dtype, call.space)

    return call.tensor(at)


WRITTEN: dict[Any, Callable[[Operation], Any]] = {
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.index_copy.default: _index_copy,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten.index_put.default: _index_put,
    aten.copy.default: _copy,
}
