"""Layout operations: they change the indices, not the element."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space, recombined
from attn_fuse.expression.nodes import Expr
from attn_fuse.lift.tensor import Indices, LiftedTensor, NoClosedForm, Operation, aten, clamped, number, shape_of, size


def _same_element(call: Operation) -> LiftedTensor:
    return call.tensor(call.converted(call.operand, call.result.dtype))


def _broadcast(call: Operation, name: str = "self") -> LiftedTensor:
    return call.tensor(call.elements(name, call.result.dtype))


def _view(call: Operation) -> LiftedTensor:
    x, shape, space = call.operand, shape_of(call.result), call.space

    def at(index: Indices) -> Expr:
        longer = tuple(i for i, length in zip(index, shape, strict=True) if length != 1)
        places = iter(_reindex(longer, _without_ones(shape), _without_ones(x.shape), space))
        return x.at(tuple(sympy.Integer(0) if length == 1 else next(places) for length in x.shape))

    return call.tensor(at)


def _without_ones(shape: Indices) -> Indices:
    return tuple(length for length in shape if length != 1)


def _reindex(index: Indices, shape: Indices, into: Indices, space: Space) -> Indices:
    """The index in shape `into` of the element at `index` in `shape`, both in row-major order."""
    if shape == into:
        return index
    if 0 in shape:
        return (sympy.Integer(0),) * len(into)
    # Equal outer dimensions keep their index, which keeps symbolic sizes out of the arithmetic.
    if shape and into and space.same_size(shape[0], into[0]):
        return (index[0], *_reindex(index[1:], shape[1:], into[1:], space))
    if shape and into and space.same_size(shape[-1], into[-1]):
        return (*_reindex(index[:-1], shape[:-1], into[:-1], space), index[-1])
    flat = sympy.Integer(0)
    for i, length in zip(index, shape, strict=True):
        flat = recombined(sympy.expand(flat * length + i))
    position: list[sympy.Expr] = []
    for length in reversed(into[1:]):
        position.append(space.mod(flat, length))
        flat = space.floordiv(flat, length)
    return (flat, *reversed(position)) if into else ()


def _permute(call: Operation) -> LiftedTensor:
    x, dims = call.operand, [d % len(call.operand.shape) for d in call["dims"]]
    return call.tensor(lambda index: x.at(tuple(index[dims.index(d)] for d in range(len(dims)))))


def _repeat(call: Operation) -> LiftedTensor:
    x, space = call.operand, call.space
    extra = len(shape_of(call.result)) - len(x.shape)

    def at(index: Indices) -> Expr:
        places = zip(index[extra:], x.shape, strict=True)
        # Dimensions of size 0 or 1 are only read at 0.
        return x.at(tuple(sympy.Integer(0) if n in (0, 1) else space.mod(i, n) for i, n in places))

    return call.tensor(at)


def _slice(call: Operation) -> LiftedTensor:
    x, dim, step = call.operand, call.dim(), call["step"]
    start = call.slice_start(x.shape[dim], shape_of(call.result)[dim])

    def at(index: Indices) -> Expr:
        return x.at((*index[:dim], sympy.expand(start + step * index[dim]), *index[dim + 1 :]))

    return call.tensor(at)


def _select_index(call: Operation) -> LiftedTensor:
    x, dim = call.operand, call.dim()
    place = call.position(size(call["index"]), x.shape[dim])
    return call.tensor(lambda index: x.at((*index[:dim], place, *index[dim:])))


def _diagonal(call: Operation) -> LiftedTensor:
    x, (first, second, offset, above) = call.operand, call.diagonal()

    def at(index: Indices) -> Expr:
        rest = iter(index[:-1])
        row, column = (index[-1], index[-1] + offset) if above else (index[-1] - offset, index[-1])
        return x.at(tuple(row if d == first else column if d == second else next(rest) for d in range(len(x.shape))))

    return call.tensor(at)


def _split(call: Operation) -> list[LiftedTensor]:
    x, dim = call.operand, call["dim"] % len(call.operand.shape)

    def at(start: sympy.Expr, index: Indices) -> Expr:
        return x.at((*index[:dim], sympy.expand(index[dim] + start), *index[dim + 1 :]))

    shapes = [shape_of(piece) for piece in call.node.meta["val"]]
    starts = itertools.accumulate((shape[dim] for shape in shapes), initial=sympy.Integer(0))
    return [LiftedTensor(shape, x.dtype, partial(at, start)) for shape, start in zip(shapes, starts, strict=False)]


def _flip(call: Operation) -> LiftedTensor:
    x = call.operand
    dims = {d % len(x.shape) for d in call["dims"]}
    return call.tensor(lambda index: x.at(tuple(x.shape[d] - 1 - i if d in dims else i for d, i in enumerate(index))))


def _cat(call: Operation) -> LiftedTensor:
    parts = [t for t in call["tensors"] if t.shape != (0,)] or call["tensors"]
    dim = call["dim"] % len(parts[0].shape)

    def at(index: Indices) -> Expr:
        end, result = sympy.Integer(0), None
        for part in parts:
            end, start = end + part.shape[dim], end
            inside = (*index[:dim], sympy.expand(index[dim] - start), *index[dim + 1 :])
            element = call.converted(part, call.result.dtype)(inside)
            reached = al.nonnegative(index[dim] - start, call.space)
            result = element if result is None else al.select(reached, element, result, call.space)
        assert result is not None
        return result

    return call.tensor(at)


def _padded(call: Operation) -> LiftedTensor:
    x, pad = call.operand, call["pad"]
    value = precision.cast(x.dtype, number(call["value"]), torch.float64, call.space)
    sides = [(size(before), size(after)) for before, after in zip(pad[::2], pad[1::2], strict=True)]
    sides += [(sympy.Integer(0), sympy.Integer(0))] * (len(x.shape) - len(sides))
    # The arguments begin with the last dimension.
    sides.reverse()

    def at(index: Indices) -> Expr:
        result = x.at(tuple(sympy.expand(i - before) for i, (before, _) in zip(index, sides, strict=True)))
        for i, length, (before, after) in zip(index, x.shape, sides, strict=True):
            if before != 0:
                result = al.select(al.nonnegative(i - before, call.space), result, value)
            if after != 0:
                result = al.select(al.nonnegative(length - 1 + before - i, call.space), result, value)
        return result

    return call.tensor(at)


def _embedding(call: Operation) -> LiftedTensor:
    table, positions = call["weight"], call["indices"]
    if call["padding_idx"] != -1 or call["scale_grad_by_freq"] or call["sparse"]:
        raise NoClosedForm("an embedding with a gradient of its own")
    return call.tensor(lambda index: _read(call, table, (positions.at(index[:-1]), ex.Index(index[-1]))))


def _gather(call: Operation) -> LiftedTensor:
    x, dim, positions = call.operand, call.dim(), call["index"]
    if not x.shape or len(positions.shape) != len(x.shape):
        raise NoClosedForm("positions in a tensor without dimensions")

    def at(index: Indices) -> Expr:
        wanted = [*map(ex.Index, index)]
        return _read(call, x, (*wanted[:dim], positions.at(index), *wanted[dim + 1 :]))

    return call.tensor(at)


def _index(call: Operation) -> LiftedTensor:
    x, positions = call.operand, call["indices"]
    given = [d for d, p in enumerate(positions) if p is not None]
    if any(positions[d].dtype in (torch.bool, torch.uint8) for d in given):
        raise NoClosedForm("indexing with a mask")
    rank = max(len(positions[d].shape) for d in given)
    # Adjacent index tensors leave their dimensions in place; others move them to the front.
    place = given[0] if given == list(range(given[0], given[-1] + 1)) else 0

    def at(index: Indices) -> Expr:
        read, rest = index[place : place + rank], iter(index[:place] + index[place + rank :])
        wanted = (
            ex.Index(next(rest)) if p is None else p.at(clamped(read[rank - len(p.shape) :], p.shape))
            for p in (*positions, *[None] * (len(x.shape) - len(positions)))
        )
        return _read(call, x, tuple(wanted))

    return call.tensor(at)


def _read(call: Operation, x: LiftedTensor, wanted: tuple[Expr, ...]) -> Expr:
    """The element of `x` at `wanted`, a lookup if a position is itself read from a tensor."""
    known = [call.position(w.value, n) for w, n in zip(wanted, x.shape, strict=True) if isinstance(w, ex.Index)]
    if len(known) == len(wanted):
        return x.at(tuple(known))
    if x.leaf is None:
        raise NoClosedForm("positions read from a tensor, in a computed tensor")
    places = iter(known)
    return ex.Gather(x.leaf, tuple(ex.Index(next(places)) if isinstance(w, ex.Index) else w for w in wanted))


def _detach(call: Operation) -> LiftedTensor:
    x = call.operand
    return call.tensor(lambda index: al.unary("detach", x.at(index)) if x.dtype.is_floating_point else x.at(index))


LAYOUT: dict[Any, Callable[[Operation], Any]] = {
    **dict.fromkeys(
        (
            aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default,
            aten.lift_fresh.default, aten.contiguous.default, aten._to_copy.default,
        ),
        _same_element,
    ),
    aten.expand.default: _broadcast,
    aten.copy.default: partial(_broadcast, name="src"),
    **dict.fromkeys(
        (
            aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
            aten.squeeze.dim, aten.squeeze.dims,
        ),
        _view,
    ),
    aten.permute.default: _permute,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select_index,
    aten.diagonal.default: _diagonal,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.flip.default: _flip,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _padded,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.gather.default: _gather,
    aten.detach.default: _detach,
}  # fmt: skip
