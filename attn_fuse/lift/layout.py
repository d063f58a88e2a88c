"""Layout operations: the indices change, the element does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space, recombined
from attn_fuse.expression.nodes import Expr
from attn_fuse.lift.tensor import (
    Indices,
    LiftedTensor,
    NoClosedForm,
    Operation,
    aten,
    clamped,
    diagonal,
    number,
    position,
    shape_of,
    size,
    slice_start,
)


def _same_element(call: Operation) -> LiftedTensor:
    return call.tensor(call.operand.at)


def _view(call: Operation) -> LiftedTensor:
    x, shape, space = call.operand, shape_of(call.result), call.space

    def at(index: Indices) -> Expr:
        return x.at(_reindex(index, shape, x.shape, space))

    return call.tensor(at)


def _reindex(index: Indices, shape: Indices, into: Indices, space: Space) -> Indices:
    """The index in shape `into` of the element at `index` in `shape`, both in row-major order."""
    if shape == into:
        return index
    if 0 in shape:
        return (sympy.Integer(0),) * len(into)
    # Equal outer dimensions keep their index, so that symbolic sizes stay out of the arithmetic.
    if shape and into and space.same_size(shape[0], into[0]):
        return (index[0], *_reindex(index[1:], shape[1:], into[1:], space))
    if shape and into and space.same_size(shape[-1], into[-1]):
        return (*_reindex(index[:-1], shape[:-1], into[:-1], space), index[-1])
    flat = sympy.Integer(0)
    for i, length in zip(index, shape, strict=True):
        flat = recombined(sympy.expand(flat * length + i))
    position: list[sympy.Expr] = []
    for length in reversed(into[1:]):
        position.append(space.mod(flat, length) if length != 1 else sympy.Integer(0))
        flat = space.floordiv(flat, length) if length != 1 else flat
    return (flat, *reversed(position)) if into else ()


def _permute(call: Operation) -> LiftedTensor:
    x, dims = call.operand, [d % len(call.operand.shape) for d in call["dims"]]
    return call.tensor(lambda index: x.at(tuple(index[dims.index(d)] for d in range(len(dims)))))


def _transpose(call: Operation) -> LiftedTensor:
    x, a, b = call.operand, call.dim("dim0"), call.dim("dim1")
    if not x.shape:
        return _same_element(call)

    def at(index: Indices) -> Expr:
        swapped = list(index)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        return x.at(tuple(swapped))

    return call.tensor(at)


def _expand(call: Operation) -> LiftedTensor:
    x = call.operand
    extra = len(shape_of(call.result)) - len(x.shape)
    return call.tensor(lambda index: x.at(clamped(index[extra:], x.shape)))


def _repeat(call: Operation) -> LiftedTensor:
    x, space = call.operand, call.space
    extra = len(shape_of(call.result)) - len(x.shape)

    def at(index: Indices) -> Expr:
        # A dimension of size 0 or 1 is only ever read at 0.
        return x.at(
            tuple(
                sympy.Integer(0) if n in (0, 1) else space.mod(i, n)
                for i, n in zip(index[extra:], x.shape, strict=True)
            )
        )

    return call.tensor(at)


def _unsqueeze(call: Operation) -> LiftedTensor:
    x, dim = call.operand, call["dim"] % (len(call.operand.shape) + 1)
    return call.tensor(lambda index: x.at(index[:dim] + index[dim + 1 :]))


def _squeeze(call: Operation) -> LiftedTensor:
    x = call.operand
    dims = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
    gone = {d % len(x.shape) for d in dims if x.shape[d % len(x.shape)] == 1} if x.shape else set()

    def at(index: Indices) -> Expr:
        rest = iter(index)
        return x.at(tuple(sympy.Integer(0) if d in gone else next(rest) for d in range(len(x.shape))))

    return call.tensor(at)


def _slice(call: Operation) -> LiftedTensor:
    x, dim, step = call.operand, call.dim(), call["step"]
    start = slice_start(call, x.shape[dim], shape_of(call.result)[dim])

    def at(index: Indices) -> Expr:
        return x.at((*index[:dim], sympy.expand(start + step * index[dim]), *index[dim + 1 :]))

    return call.tensor(at)


def _select_index(call: Operation) -> LiftedTensor:
    x, dim = call.operand, call.dim()
    place = position(call, size(call["index"]), x.shape[dim])
    return call.tensor(lambda index: x.at((*index[:dim], place, *index[dim:])))


def _diagonal(call: Operation) -> LiftedTensor:
    x, (first, second, offset, above) = call.operand, diagonal(call)

    def at(index: Indices) -> Expr:
        rest = iter(index[:-1])
        row, column = (index[-1], index[-1] + offset) if above else (index[-1] - offset, index[-1])
        return x.at(tuple(row if d == first else column if d == second else next(rest) for d in range(len(x.shape))))

    return call.tensor(at)


def _split(call: Operation) -> list[LiftedTensor]:
    x, dim = call.operand, call["dim"] % len(call.operand.shape)
    pieces, start = [], sympy.Integer(0)
    for piece in call.node.meta["val"]:

        def at(index: Indices, start: sympy.Expr = start) -> Expr:
            return x.at((*index[:dim], sympy.expand(index[dim] + start), *index[dim + 1 :]))

        pieces.append(LiftedTensor(shape_of(piece), piece.dtype, at))
        start = start + shape_of(piece)[dim]
    return pieces


def _unbind(call: Operation) -> list[LiftedTensor]:
    x, dim = call.operand, call["dim"] % len(call.operand.shape)
    return [
        LiftedTensor(
            shape_of(piece),
            piece.dtype,
            lambda index, n=n: x.at((*index[:dim], sympy.Integer(n), *index[dim:])),  # type: ignore[misc]
        )
        for n, piece in enumerate(call.node.meta["val"])
    ]


def _flip(call: Operation) -> LiftedTensor:
    x = call.operand
    dims = {d % len(x.shape) for d in call["dims"]}
    return call.tensor(lambda index: x.at(tuple(x.shape[d] - 1 - i if d in dims else i for d, i in enumerate(index))))


def _cat(call: Operation) -> LiftedTensor:
    parts = [t for t in call["tensors"] if t.shape != (0,)] or call["tensors"]
    return call.tensor(_joined(call, parts, call["dim"] % len(parts[0].shape)))


def _stack(call: Operation) -> LiftedTensor:
    parts, dim = call["tensors"], call["dim"] % (len(call["tensors"][0].shape) + 1)

    def lengthened(x: LiftedTensor) -> LiftedTensor:
        shape = (*x.shape[:dim], sympy.Integer(1), *x.shape[dim:])
        return LiftedTensor(shape, x.dtype, lambda index: x.at(index[:dim] + index[dim + 1 :]))

    return call.tensor(_joined(call, [lengthened(x) for x in parts], dim))


def _joined(call: Operation, parts: list[LiftedTensor], dim: int) -> Callable[[Indices], Expr]:
    """The element of `parts`, concatenated along `dim`, as a function of its index."""

    def at(index: Indices) -> Expr:
        end, result = sympy.Integer(0), None
        for part in parts:
            end, start = end + part.shape[dim], end
            inside = (*index[:dim], sympy.expand(index[dim] - start), *index[dim + 1 :])
            element = precision.cast(call.result.dtype, part.at(inside), part.dtype, call.space)
            reached = al.nonnegative(index[dim] - start, call.space)
            result = element if result is None else al.select(reached, element, result, call.space)
        assert result is not None
        return result

    return at


def _padded(call: Operation) -> LiftedTensor:
    x, pad = call.operand, call["pad"]
    value = precision.cast(x.dtype, number(call["value"]), torch.float64, call.space)
    rank = len(x.shape)
    before = {rank - 1 - n: size(pad[2 * n]) for n in range(len(pad) // 2)}
    after = {rank - 1 - n: size(pad[2 * n + 1]) for n in range(len(pad) // 2)}

    def at(index: Indices) -> Expr:
        result = x.at(tuple(sympy.expand(i - before.get(d, 0)) for d, i in enumerate(index)))
        for d, i in enumerate(index):
            if before.get(d, 0) != 0:
                result = al.select(al.nonnegative(i - before[d], call.space), result, value)
            if after.get(d, 0) != 0:
                last = x.shape[d] - 1 + before[d]
                result = al.select(al.nonnegative(last - i, call.space), result, value)
        return result

    return call.tensor(at)


# ---- positions from tensors


def _embedding(call: Operation) -> LiftedTensor:
    table, positions = call["weight"], call["indices"]
    if call["padding_idx"] != -1 or call["scale_grad_by_freq"] or call["sparse"]:
        raise NoClosedForm("an embedding whose gradient is not that of a lookup")
    return call.tensor(lambda index: _read(call, table, (positions.at(index[:-1]), ex.Index(index[-1]))))


def _taken(each: bool) -> Callable[[Operation], LiftedTensor]:
    """The elements at positions along one dimension. each: whether each element has a position of its own."""

    def handler(call: Operation) -> LiftedTensor:
        x, dim, positions = call.operand, call.dim(), call["index"]
        if not x.shape or len(positions.shape) != (len(x.shape) if each else 1):
            raise NoClosedForm("positions in a single number")

        def at(index: Indices) -> Expr:
            wanted = [*map(ex.Index, index)]
            place = positions.at(index if each else (index[dim],))
            return _read(call, x, (*wanted[:dim], place, *wanted[dim + 1 :]))

        return call.tensor(at)

    return handler


def _index(call: Operation) -> LiftedTensor:
    x, positions = call.operand, call["indices"]
    given = [d for d, p in enumerate(positions) if p is not None]
    if any(positions[d].dtype in (torch.bool, torch.uint8) for d in given):
        raise NoClosedForm("indexing with a mask")
    rank = max(len(positions[d].shape) for d in given)
    # Index tensors side by side leave their dimensions in place; others move them to the front.
    place = given[0] if given == list(range(given[0], given[-1] + 1)) else 0

    def at(index: Indices) -> Expr:
        read, rest = index[place : place + rank], iter(index[:place] + index[place + rank :])
        wanted: list[Expr] = []
        for d in range(len(x.shape)):
            p = positions[d] if d < len(positions) else None
            if p is None:
                wanted.append(ex.Index(next(rest)))
            else:
                wanted.append(p.at(clamped(read[rank - len(p.shape) :], p.shape)))
        return _read(call, x, tuple(wanted))

    return call.tensor(at)


def _read(call: Operation, x: LiftedTensor, wanted: tuple[Expr, ...]) -> Expr:
    """The element of `x` at the positions `wanted`, looked up where a position is itself read from a tensor."""
    wanted = tuple(_from_the_front(call, w, n) for w, n in zip(wanted, x.shape, strict=True))
    if all(isinstance(w, ex.Index) for w in wanted):
        return x.at(tuple(w.value for w in wanted if isinstance(w, ex.Index)))
    if x.leaf is None:
        raise NoClosedForm("positions that are read from a tensor, in a tensor that is itself computed")
    return ex.Gather(x.leaf, wanted)


def _from_the_front(call: Operation, place: Expr, length: sympy.Expr) -> Expr:
    return ex.Index(position(call, place.value, length)) if isinstance(place, ex.Index) else place


def _detach(call: Operation) -> LiftedTensor:
    x = call.operand
    return call.tensor(lambda index: al.unary("detach", x.at(index)) if x.dtype.is_floating_point else x.at(index))


LAYOUT: dict[Any, Callable[[Operation], Any]] = {
    **dict.fromkeys(
        (
            aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default,
            aten.lift_fresh.default, aten.contiguous.default,
        ),
        _same_element,
    ),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select_index,
    aten.diagonal.default: _diagonal,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.flip.default: _flip,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _padded,
    aten.embedding.default: _embedding,
    aten.index_select.default: _taken(each=False),
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.gather.default: _taken(each=True),
    aten.detach.default: _detach,
}  # fmt: skip
