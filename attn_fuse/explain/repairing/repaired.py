"""Inputs of other sizes, as the error that a model raises on some asks for: what a person does who reads the error."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.repairing.asked import Asked

# How large a side, and how many numbers of an argument, may be that an error asks for.
LARGEST, MOST_NUMBERS = 1 << 12, 1 << 22
# Sides of the patches of a picture that a model may count.
PATCHES = (1, 2, 4, 8, 14, 16, 32)
# Size of a dimension that is put in, usually and to large tensors, and of the sides of a map.
NEW, FEW, SIDE = 8, 2, 64
# How many values of a dict serve as one for an entry that it lacks.
MOST_ALIKE = 3

# Where a tensor is: the number or the name of the argument, then the keys within it.
_Place = tuple[Any, ...]
_Shape = tuple[int, ...]


def repaired(inputs: Inputs, asked: Asked, names: Sequence[str] = ()) -> Iterator[Inputs]:
    """The inputs with another size, rank or dtype of a tensor, or of all that are alike, such that what an error asks
    for would fit; also of the tensors in lists and dicts.

    A size of a tensor that is n times another may have come of it: where 12 was wanted and 48 was there, a side of
    32 becomes one of 8, or of 16 where a model counts the places of a square. So may one that differs by a constant,
    as by the tokens that a model adds. Tensors that the failing code names come first, and such as `image0` and
    `image1` together. An error that asks for nothing gives nothing. names: of the arguments by position.
    """
    seen = {str(inputs)}
    for made in _made(inputs, asked, names):
        if str(made) not in seen:
            seen.add(str(made))
            yield made


def resized(inputs: Inputs, has: int, wants: int) -> Inputs:
    """The inputs with `wants` in place of each size `has` of their tensors, as of a model of another width."""
    new: dict[_Place, Any] = {}
    for place, tensor in _tensors(inputs):
        if has in tensor.shape:
            new[place] = _of_shape(tensor, tuple(wants if size == has else size for size in tensor.shape))
    return _with(inputs, new)


def _made(inputs: Inputs, asked: Asked, names: Sequence[str]) -> Iterator[Inputs]:
    tensors = dict(_tensors(inputs))
    if asked.key is not None:
        yield from _with_entry(inputs, asked.key)
    if asked.arrays:
        yield _with(inputs, {place: t.cpu().numpy() for place, t in tensors.items() if not t.is_floating_point()})
    together = [*_together(tensors, asked, names)]
    if asked.scalar:
        near = [places[0] for places in together if len(places) == 1]
        yield from (_with(inputs, {place: number}) for place in near for number in _numbers_like(tensors[place]))
    if asked.small:
        whole = [place for place, tensor in tensors.items() if not tensor.is_floating_point()]
        yield from (_with(inputs, {p: torch.zeros_like(tensors[p]) for p in places}) for places in (whole, *zip(whole)))
    if "unpack" in asked.kind:
        yield from _in_tuples(inputs, tensors, asked, together)
    if asked.dtype is not None:
        of_other = {p: t for p, t in tensors.items() if t.is_floating_point() != asked.dtype.is_floating_point}
        for places in together:
            for shaped in (_same, _with_one_more, _with_one_less):
                new = {
                    p: _numbers(shaped(of_other[p].shape), asked.dtype, of_other[p].device)
                    for p in places
                    if p in of_other
                }
                yield _with(inputs, new)
    for change in _changes(asked):
        shapes = {place: [s for s in change(tensor) if _is_possible(s, asked)] for place, tensor in tensors.items()}
        for places in together:
            found = {place: shapes[place] for place in places if shapes[place]}
            for pick in range(max(map(len, found.values()), default=0)):
                picked = {place: several[min(pick, len(several) - 1)] for place, several in found.items()}
                yield _with(inputs, {place: _of_shape(tensors[place], shape) for place, shape in picked.items()})


def _in_tuples(
    inputs: Inputs, tensors: Mapping[_Place, Tensor], asked: Asked, together: Sequence[list[_Place]]
) -> Iterator[Inputs]:
    # A tuple of tensors in place of one that the failing code takes apart, with the batch or without.
    for _, count in asked.ranks:
        for place in (places[0] for places in together if len(places) == 1):
            tensor = tensors[place]
            for one in (tensor[0], tensor) if tensor.dim() > 1 else (tensor,):
                yield _with(inputs, {place: (one,) * count})


def _numbers_like(tensor: Tensor) -> list[int]:
    return list(dict.fromkeys((1, *tensor.shape[1:2])))


def _same(shape: _Shape) -> _Shape:
    return shape


def _with_one_more(shape: _Shape) -> _Shape:
    return (*shape, NEW)


def _with_one_less(shape: _Shape) -> _Shape:
    return shape[: max(len(shape) - 1, 2)]


def _together(tensors: Mapping[_Place, Tensor], asked: Asked, names: Sequence[str]) -> Iterator[list[_Place]]:
    # Tensors to change together: those that the failing code names, then each, then all.
    def words(place: _Place) -> list[str]:
        first = names[place[0]] if place[0] in range(len(names)) else place[0]
        return [str(word) for word in (first, *place[1:])]

    # Such as `image0` and `image1`, and such as `img_ids` and `txt_ids`.
    kinds: dict[tuple[str, ...], list[_Place]] = {}
    for place in tensors:
        kinds.setdefault(tuple(word.rstrip("0123456789") for word in words(place)), []).append(place)
        if "_" in (last := words(place)[-1]):
            kinds.setdefault(("_", last.rpartition("_")[2]), []).append(place)
    near = [place for place in tensors if words(place)[-1] in asked.near]
    groups = [places for places in kinds.values() if len(places) > 1]
    yield from (places for places in groups if any(place in near for place in places))
    yield from ([place] for place in near)
    yield from ([place] for place in tensors if place not in near)
    yield from (places for places in groups if not any(place in near for place in places))
    yield [*tensors]


def _is_possible(shape: _Shape, asked: Asked) -> bool:
    # A long sequence takes all memory: the model may attend to it. A block that the model asks for is no length.
    blocks = [block for _, block in asked.blocks]
    return all(0 < size <= LARGEST or size in blocks for size in shape) and math.prod(shape) <= MOST_NUMBERS


def _changes(asked: Asked) -> Iterator[Callable[[Tensor], Iterator[_Shape]]]:
    # Functions that give the shapes that a tensor may need: the likeliest first.
    yield from (functools.partial(_with_run, has, wants) for has, wants in asked.runs)
    if asked.is_rank_unequal:
        yield from (functools.partial(_of_another_rank, more) for more in (-1, 1))
    if asked.index_rank:
        yield _as_index
    if asked.map is not None:
        yield functools.partial(_as_map, *asked.map)
    yield from (functools.partial(_of_rank, has, wants) for has, wants in asked.ranks)
    yield from (functools.partial(_of_blocks, numbers, block) for numbers, block in asked.blocks)
    sizes = [(has, wants) for has, wants in asked.sizes if has not in (0, wants)]
    for change in (_equal, _fitting):
        yield from (functools.partial(change, has, wants) for has, wants in sizes)
    # torch's own attention takes the batch second.
    if sizes:
        yield _batch_second
    # What has a wrong rank may have come of a tensor of another.
    more = dict.fromkeys(wants - has for has, wants in asked.ranks if has is not None)
    yield from (functools.partial(_of_another_rank, one) for one in more)


def _of_another_rank(more: int, tensor: Tensor) -> Iterator[_Shape]:
    # Labels may be one for each of the batch.
    fewest = 2 if tensor.is_floating_point() else 1
    yield from _of_rank(None, max(tensor.dim() + more, fewest), tensor)


def _of_blocks(numbers: int, block: int, tensor: Tensor) -> Iterator[_Shape]:
    # Of each number the model makes a whole block.
    if tensor.numel() == numbers:
        yield (*tensor.shape, block)


def _as_index(tensor: Tensor) -> Iterator[_Shape]:
    if not tensor.is_floating_point() and tensor.dim():
        yield (*tensor.shape, 1)
        yield (*tensor.shape, 1, 1)


def _as_map(channels: int, dims: int, tensor: Tensor) -> Iterator[_Shape]:
    if tensor.is_floating_point() and 1 < tensor.dim() <= dims + 2:
        yield (tensor.shape[0], channels, *(SIDE,) * dims)


def _of_rank(has: int | None, wants: int, tensor: Tensor) -> Iterator[_Shape]:
    # With further dimensions after the batch or at the end, or without such.
    shape = tuple(tensor.shape)
    if has not in (None, len(shape)) or not shape or (has is None and abs(wants - len(shape)) != 1):
        return
    if (more := wants - len(shape)) > 0:
        # Eight pictures may be too many.
        new = NEW if math.prod(shape) * NEW**more <= MOST_NUMBERS else FEW
        yield (shape[0], *(new,) * more, *shape[1:])
        yield (*shape, *(new,) * more)
        yield (*shape, *(1,) * more)
    elif wants > 0:
        if shape[0] == 1 and not tensor.is_floating_point():
            yield shape[-more:]
        yield (shape[0], *shape[1 - more :])
        yield shape[:more]


def _dims(shape: _Shape) -> list[int]:
    # Those that may have another size: all but the batch, which matrices may be without.
    return list(range(len(shape) - 1, 0 if len(shape) > 2 else -1, -1)) if len(shape) < 6 else []


def _equal(has: int, wants: int, tensor: Tensor) -> Iterator[_Shape]:
    shape = tuple(tensor.shape)
    for dim in _dims(shape):
        if shape[dim] == has:
            yield _changed(shape, {dim: wants})
    if len(same := [dim for dim in _dims(shape) if shape[dim] == has]) > 1:
        yield _changed(shape, dict.fromkeys(same, wants))


def _batch_second(tensor: Tensor) -> Iterator[_Shape]:
    if tensor.dim() == 3 and tensor.shape[0] != tensor.shape[1]:
        batch, length, width = tensor.shape
        yield (length, batch, width)


def _with_run(has: _Shape, wants: _Shape, tensor: Tensor) -> Iterator[_Shape]:
    shape = tuple(tensor.shape)
    for start in range(len(shape) - len(has), -1, -1):
        if shape[start : start + len(has)] == has:
            yield (*shape[:start], *wants, *shape[start + len(has) :])


def _fitting(has: int, wants: int, tensor: Tensor) -> Iterator[_Shape]:
    # The shapes that may have `wants` where the model made `has` of this one; the batch stays as it is.
    shape = tuple(tensor.shape)
    dims = _dims(shape)
    for dim in dims:
        if shape[dim] * wants % has == 0 and shape[dim] != has:
            yield _changed(shape, {dim: shape[dim] * wants // has})
    if len(shape) >= 4 and shape[-1] == shape[-2]:
        for side in _sides(shape[-1], has, wants):
            yield _changed(shape, {-1: side, -2: side})
    for dim in dims[1:]:
        # The model may take two dimensions together.
        if shape[dim] * shape[dim + 1] == has:
            for factor in (2, 3, 4, 1):
                if wants % factor == 0:
                    yield _changed(shape, {dim: wants // factor, dim + 1: factor})
    for dim in dims:
        if shape[dim] != has and shape[dim] + wants - has > 0:
            yield _changed(shape, {dim: shape[dim] + wants - has})


def _sides(side: int, has: int, wants: int) -> Iterator[int]:
    # Sides of a square of which the model counts the places, the patches with some more tokens, or the lines.
    if (places := side**2 * wants) % has == 0 and math.isqrt(places // has) ** 2 == places // has:
        yield math.isqrt(places // has)
    for patch in PATCHES:
        count = (side // patch) ** 2 + wants - has
        if side % patch == 0 and count > 0 and math.isqrt(count) ** 2 == count:
            yield math.isqrt(count) * patch
    if side * wants % has == 0:
        yield side * wants // has


def _changed(shape: _Shape, new: dict[int, int]) -> _Shape:
    return tuple(new.get(dim, new.get(dim - len(shape), size)) for dim, size in enumerate(shape))


def _numbers(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype is torch.bool:
        return torch.ones(tuple(shape), dtype=dtype, device=device)
    # Whole numbers are 0 or 1, which every table has a row for.
    is_whole = not dtype.is_floating_point
    return (
        torch.randint(2, tuple(shape), device=device)
        if is_whole
        else torch.randn(tuple(shape), dtype=dtype, device=device)
    )


def _of_shape(tensor: Tensor, shape: _Shape) -> Tensor:
    # Numbers of the kind that `tensor` holds.
    if tensor.is_floating_point():
        return torch.randn(shape, dtype=tensor.dtype, device=tensor.device)
    picked = torch.arange(math.prod(shape), device=tensor.device) % tensor.numel()
    return tensor.flatten()[picked].reshape(shape)


def _tensors(inputs: Inputs) -> Iterator[tuple[_Place, Tensor]]:
    def within(value: Any, place: _Place) -> Iterator[tuple[_Place, Tensor]]:
        if isinstance(value, Tensor):
            yield place, value
        elif isinstance(value, (list, tuple, dict)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from within(item, (*place, key))

    yield from within([*inputs.args], ())
    yield from within(inputs.kwargs, ())


def _with(inputs: Inputs, values: dict[_Place, Any]) -> Inputs:
    # The inputs with other values at these places; arguments by position have numbers, those by name have names.
    def within(value: Any, place: _Place) -> Any:
        if place in values:
            return values[place]
        if isinstance(value, dict):
            return {key: within(item, (*place, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(within(item, (*place, key)) for key, item in enumerate(value))
        return value

    return Inputs(tuple(within([*inputs.args], ())), within(inputs.kwargs, ()))


def _with_entry(inputs: Inputs, key: str) -> Iterator[Inputs]:
    # With one more entry in each dict of tensors, like one of its others, or a number for each of their rows.
    def within(value: Any, place: _Place) -> Iterator[tuple[_Place, dict[Any, Any]]]:
        if isinstance(value, dict) and place and key not in value:
            yield place, value
        for inner, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, (list, tuple, dict)):
                yield from within(item, (*place, inner))

    for place, held in [*within([*inputs.args], ()), *within(inputs.kwargs, ())]:
        tensors = [value for value in held.values() if isinstance(value, Tensor)]
        shapes = dict.fromkeys(
            shape for t in tensors[::-1] for shape in (tuple(t.shape), tuple(t.shape[:-1])) if len(shape) > 1
        )
        for shape in [*shapes][:MOST_ALIKE]:
            yield _with(inputs, {place: {**held, key: _of_shape(tensors[0], shape)}})


def with_named(
    inputs: Inputs, asked: Asked, parameters: Sequence[inspect.Parameter], values_of: Callable[..., Iterator[Any]]
) -> Iterator[Inputs]:
    """The inputs with arguments that are None or left out, and that an error names, as in "guidance is needed"; where
    something is None that has no such name, with those that are given as None. Also with what a function lacks that
    forward hands its arguments on to.

    Those of which the message speaks come first, then all of them together, then each. parameters: those of forward;
    where it takes any keywords, names that the error speaks of count, too. values_of: values for a parameter, the
    likeliest first.
    """
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if asked.missing and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        wants = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in asked.missing]
        several = [list(itertools.islice((v for v in values_of(p) if v is not None), MOST_ALIKE)) for p in wants]
        for pick in range(max(map(len, several))):
            more = (values[min(pick, len(values) - 1)] for values in several if values)
            yield Inputs((*inputs.args, *more), inputs.kwargs)
    given = {**dict(zip((p.name for p in named), inputs.args, strict=False)), **inputs.kwargs}
    if len(named) < len(parameters):
        handed_on = sorted(asked.absent & asked.words - {p.name for p in named})
        named += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in handed_on]
    unset = [p for p in named if given.get(p.name) is None]
    # What is None further within may have another name here.
    handed = [p for p in unset if p.name in given] if asked.none else []
    # Nor may the plural be kept.
    spoken = {name.rstrip("s") for name in asked.words | asked.absent}
    wanted = [p for p in unset if p.name.rstrip("s") in spoken] or handed
    said = [p.name for p in wanted if p.name in asked.words]
    values = {p.name: [value for value in values_of(p) if value is not None] for p in wanted}
    together = [said] if 0 < len(said) < len(values) else []
    for names in (*together, [*values], *([name] for name in values if len(values) > 1)):
        for pick in range(max((len(values[name]) for name in names), default=0)):
            chosen = {name: values[name][pick] for name in names if pick < len(values[name])}
            args = [chosen.pop(p.name, value) for p, value in zip(named, inputs.args, strict=False)]
            yield Inputs((*args, *inputs.args[len(args) :]), {**inputs.kwargs, **chosen})


def without_optional(inputs: Inputs, parameters: Sequence[inspect.Parameter]) -> Iterator[Inputs]:
    """The inputs with None for an argument that may be None by its annotation, though it has no default; then with None
    for all such."""
    positions = {p.name: i for i, p in enumerate(parameters) if i < len(inputs.args)}
    may_be = [p.name for p in parameters if re.search(r"Optional|\bNone\b", str(p.annotation))]
    given = [n for n in may_be if (inputs.args[positions[n]] if n in positions else inputs.kwargs.get(n)) is not None]
    together = [given] if len(given) > 1 else []
    for names in (*([name] for name in given), *together):
        yield _with(inputs, {(positions.get(name, name),): None for name in names})
