"""In-place writes in their functional form: a tensor with some elements replaced.

An element is a choice between the written value and the previous one, which simplifies away where its position decides.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr
from attn_fuse.lift.creation import TrianglePlace
from attn_fuse.lift.tensor import Indices, LiftedTensor, NoClosedForm, Operation, aten, filling, size
from attn_fuse.torch_internals import FloorDiv, Mod

# The max length of a list of positions that does not count up by one.
_MOST_POSITIONS = 16
_UNKNOWN = "elements written at positions read from a tensor"


def _chosen(cond: Expr, new: Callable[[], Expr], old: Callable[[], Expr], space: Space) -> Expr:
    """`new` where `cond` holds, else `old`; a branch that is never taken is not called."""
    if cond == ex.TRUE:
        return new()
    if cond == ex.FALSE:
        return old()
    a, b = new(), old()
    if any(isinstance(part, ex.Softmax) for x in (a, b) if ex.has_product(x) for part in ex.walk(x)):
        # If parts of the scores are normalised in place one by one, each reads the values that the others wrote.
        a, b = al.assuming(a, cond, space), al.assuming(b, al.logical_not(cond), space)
    return al.select(cond, _with_products_of(b, a, cond, space), b, space)


def _with_products_of(other: Expr, x: Expr, cond: Expr, space: Space) -> Expr:
    """`x` where `cond` holds, with the products of `other` that equal its own there, so both show the same scores."""
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
    """The expression that is 0 where `cond` holds: `value` >= 0 means this, too, if `value` is never positive."""
    match cond:
        case ex.IsZero(value):
            return value
        case ex.NonNegative(value) if space.is_nonnegative(-value):
            return value
    return None


def _slice_scatter(call: Operation) -> LiftedTensor:
    x, dim, step, space = call.operand, call.dim(), size(call["step"]), call.space
    src: LiftedTensor = call["src"]
    count = src.shape[dim]
    start = call.slice_start(x.shape[dim], count)
    if step != 1 and not (step.is_Integer and start.is_Integer):
        raise NoClosedForm("a slice written in steps from an unknown position")
    # Adding `shift` makes `start` a multiple of `step` and keeps positions non-negative.
    shift = (-start) % step

    if count == 0:
        return call.tensor(x.at)
    nth, own = space.fresh("w", count), space.fresh("w", x.shape[dim])

    def element(index: Indices, place: sympy.Expr, before: Callable[[], Expr]) -> Expr:
        def written(at: sympy.Expr) -> Expr:
            return src.at((*index[:dim], at, *index[dim + 1 :]))

        # A written position is divisible by `step`, so an element read there and written back is itself, whatever
        # digits of its position the layout reads.
        here = _stand_in(index, dim, x.shape[dim], own, space)
        itself = written(sympy.expand((here - start) / step))
        if here != index[dim]:
            itself = al.substitute(itself, {here: index[dim]}, space)
        if _is_whole(itself) and (not _has_digits(itself) or set() < _products(itself) <= _products(before())):
            return itself
        # Floor divisions simplify at a symbol with the range of the slice.
        return al.substitute(written(nth), {nth: place}, space)

    def at(index: Indices) -> Expr:
        along = sympy.expand(index[dim] + shift)
        place = sympy.expand(space.floordiv(along, step) - (start + shift) / step)
        cond = _is_within(place, count, space)
        # One bound is enough for the first or last row, and the writes to the other rows use it, too.
        if count == 1 and (step != 1 or isinstance(cond, ex.And)):
            cond = al.is_zero(index[dim] - start, space)
        else:
            cond = al.logical_and(cond, al.is_zero(space.mod(along, step), space))
        before = partial(x.at, index)

        def after() -> Expr:
            return precision.cast(x.dtype, element(index, place, before), src.dtype, space)

        return _chosen(cond, after, before, space)

    return call.tensor(at)


def _stand_in(index: Indices, dim: int, length: sympy.Expr, own: sympy.Symbol, space: Space) -> sympy.Symbol:
    """A symbol over [0, length) for index[dim] that occurs nowhere else in `index`.

    All writes share it if possible: successive writes are then read at equal indices, and each element is lifted once.
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
    """Whether the positions in `x` contain only integers."""
    return all(number.is_Integer for part in ex.walk(x) for p in ex.positions(part) for number in p.atoms(sympy.Number))


def _overwritten(
    call: Operation,
    src: LiftedTensor,
    is_written: Callable[[Indices], Expr],
    inside: Callable[[Indices], Indices],
) -> LiftedTensor:
    """`self` with the element of `src` at `inside(index)` where `is_written(index)` holds."""
    x, space = call.operand, call.space

    def at(index: Indices) -> Expr:
        def new() -> Expr:
            return call.converted(src, x.dtype)(inside(index))

        return _chosen(is_written(index), new, lambda: x.at(index), space)

    return call.tensor(at)


def _select_scatter(call: Operation) -> LiftedTensor:
    dim = call.dim()
    place = call.position(size(call["index"]), call.operand.shape[dim])
    return _overwritten(
        call,
        call["src"],
        lambda index: al.is_zero(index[dim] - place, call.space),
        lambda index: (*index[:dim], *index[dim + 1 :]),
    )


def _diagonal_scatter(call: Operation) -> LiftedTensor:
    space, (first, second, offset, above) = call.space, call.diagonal()
    return _overwritten(
        call,
        call["src"],
        lambda index: al.is_zero(index[second] - index[first] - offset, space),
        lambda index: (
            *(i for d, i in enumerate(index) if d not in (first, second)), index[first if above else second],
        ),
    )  # fmt: skip


def _index_copy(call: Operation) -> LiftedTensor:
    """index_copy of `source`, or index_fill with one value."""
    x, dim, space, fills = call.operand, call.dim(), call.space, "value" in call.named
    if not x.shape:
        raise NoClosedForm("a write into a tensor without dimensions")
    chosen = _by_place(call, call["index"], x.shape[dim], may_repeat=fills)
    value, held = filling(call["value"]) if fills else (None, call["source"].dtype)

    def at(index: Indices) -> Expr:
        def element(place: sympy.Expr) -> Expr:
            new = call["source"].at((*index[:dim], place, *index[dim + 1 :])) if value is None else value
            return precision.cast(x.dtype, new, held, space)

        return chosen(index[dim], element, lambda: x.at(index))

    return call.tensor(at)


def _index_put(call: Operation) -> LiftedTensor:
    value, lists = call["values"], {d: p for d, p in enumerate(call["indices"]) if p is not None}
    if call["accumulate"]:
        raise NoClosedForm("numbers added at a list of positions")
    if any(size != 1 for size in value.shape):
        raise NoClosedForm("several numbers written at a list of positions")
    if any(p.dtype == torch.uint8 for p in lists.values()):
        raise NoClosedForm("indexing with an integer mask")
    is_written = _mask(lists) or _triangle(call, lists) or _diagonal(call, lists) or _at_lists(call, lists)
    return _overwritten(call, value, is_written, lambda index: (sympy.Integer(0),) * len(value.shape))


# Whether an element is written, as a function of its index.
IsWritten = Callable[[Indices], Expr]
# By dimension.
Lists = Mapping[int, LiftedTensor]


def _mask(lists: Lists) -> IsWritten | None:
    """By a Boolean mask; None if there is none."""
    if all(p.dtype != torch.bool for p in lists.values()):
        return None
    if len(lists) != 1:
        raise NoClosedForm("a mask beside lists of positions")
    ((dim, mask),) = lists.items()
    return lambda index: mask.at(index[dim : dim + len(mask.shape)])


def _at_lists(call: Operation, lists: Lists) -> IsWritten:
    """At each combination of positions from the lists, which must run along different dimensions."""
    rank = max(len(p.shape) for p in lists.values())
    runs = [{rank - len(p.shape) + d for d, n in enumerate(p.shape) if n != 1} for p in lists.values()]
    if any(a & b for a, b in itertools.combinations(runs, 2)) or any(len(run) > 1 for run in runs):
        raise NoClosedForm("elements written at several lists of positions")

    def flat(p: LiftedTensor) -> LiftedTensor:
        def at(index: Indices) -> Expr:
            return p.at(tuple(sympy.Integer(0) if n == 1 else index[0] for n in p.shape))

        return LiftedTensor((sympy.Mul(*p.shape),), p.dtype, at)

    chosen = {d: _by_place(call, flat(p), call.operand.shape[d], may_repeat=True) for d, p in lists.items()}
    return lambda index: _all(among(index[d], lambda _: ex.TRUE, lambda: ex.FALSE) for d, among in chosen.items())


def _all(conditions: Iterable[Expr]) -> Expr:
    return functools.reduce(al.logical_and, conditions)


def _triangle(call: Operation, lists: Lists) -> IsWritten | None:
    """In the triangle whose rows and columns are the two lists; None if they are no triangle."""
    if len(lists) != 2 or any(len(p.shape) != 1 for p in lists.values()):
        return None
    space, n = call.space, call.space.fresh("w", next(iter(lists.values())).shape[0])
    match [p.at((n,)) for p in lists.values()]:
        case [ex.Index(TrianglePlace() as row), ex.Index(TrianglePlace() as column)] if (
            row.args[0] == 0 and column.args[0] == 1 and row.args[1:] == column.args[1:] and row.args[1] == n
        ):
            rows, columns, offset, upper = row.args[2:]
        case _:
            return None

    def is_written(index: Indices) -> Expr:
        i, j = (index[d] for d in lists)
        inside = j - i - offset if upper else i + offset - j
        return _all(al.nonnegative(value, space) for value in (rows - 1 - i, columns - 1 - j, inside))

    return is_written


def _diagonal(call: Operation, lists: Lists) -> IsWritten | None:
    """On the diagonal along which the lists count; None if one does not count up by one."""
    space, (shape, *others) = call.space, [p.shape for p in lists.values()]
    if not others or len(shape) != 1 or any(other != shape for other in others):
        return None
    n = space.fresh("w", shape[0])
    starts = {d: _start(call, p.at((n,)), n, call.operand.shape[d]) for d, p in lists.items()}
    if None in starts.values():
        return None

    def is_written(index: Indices) -> Expr:
        first, *others = (sympy.expand(index[d] - start) for d, start in starts.items())
        return _all((_is_within(first, shape[0], space), *(al.is_zero(other - first, space) for other in others)))

    return is_written


def _start(call: Operation, place: Expr, n: sympy.Symbol, length: sympy.Expr) -> sympy.Expr | None:
    """The first position of a list that counts up by one, along a dimension of `length`; None for any other list.

    place: the list's element at the symbol `n`.
    """
    match place:
        case ex.Index(value) if n not in sympy.expand(value - n).free_symbols:
            return sympy.expand(call.position(value, length) - n)
    return None


def _is_within(place: sympy.Expr, count: sympy.Expr, space: Space) -> Expr:
    """Whether 0 <= `place` < `count`."""
    return al.logical_and(al.nonnegative(place, space), al.nonnegative(count - 1 - place, space))


def _by_place(
    call: Operation, where: LiftedTensor, length: sympy.Expr, may_repeat: bool = False
) -> Callable[[sympy.Expr, Callable[[sympy.Expr], Expr], Callable[[], Expr]], Expr]:
    """(i, new, old) -> `new(n)` if position `i` is number n in the list `where`, else `old()`.

    The positions, along a dimension of `length`, must count up by one or be few enough to write out.
    """
    space, count = call.space, where.shape[0] if where.shape else sympy.Integer(1)

    def listed(n: sympy.Expr) -> Expr:
        return where.at((n,) if where.shape else ())

    axis = space.fresh("w", count)
    start = _start(call, listed(axis), axis, length)
    if start is not None:

        def counted(i: sympy.Expr, new: Callable[[sympy.Expr], Expr], old: Callable[[], Expr]) -> Expr:
            place = sympy.expand(i - start)
            return _chosen(_is_within(place, count, space), partial(new, place), old, space)

        return counted
    if not count.is_Integer or count > _MOST_POSITIONS:
        raise NoClosedForm(_UNKNOWN)
    places: list[sympy.Expr] = []
    for n in range(int(count)):
        match listed(sympy.Integer(n)):
            case ex.Const(value) | ex.Index(value):
                places.append(call.position(sympy.sympify(value), length))
            case _:
                raise NoClosedForm(_UNKNOWN)
    pairs = itertools.combinations(places, 2)
    if not may_repeat and not all(space.is_negative(a - b) or space.is_negative(b - a) for a, b in pairs):
        raise NoClosedForm("elements that may be written twice")

    def among(i: sympy.Expr, new: Callable[[sympy.Expr], Expr], old: Callable[[], Expr]) -> Expr:
        for n, place in enumerate(places):
            old = partial(_chosen, al.is_zero(i - place, space), partial(new, sympy.Integer(n)), old, space)
        return old()

    return among


WRITTEN: dict[Any, Callable[[Operation], Any]] = {
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.diagonal_scatter.default: _diagonal_scatter,
    **dict.fromkeys((aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor), _index_copy),
    aten.index_put.default: _index_put,
}
