"""Other arguments for a program: other numbers, other sizes, and lengths whose order is swapped.

What holds for the numbers and sizes of the first call need not hold for others: a number below zero, a key shorter than
the query, a length beyond a constant. Nothing here knows what a program takes: a list that it cannot take raises in
eager mode, and is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Arguments = tuple[Any, ...]
# (index of a leaf, axis)
Place = tuple[int, int]

# A tensor of more whole numbers than this holds ids or a mask, not numbers by which to shift or to cut.
MOST_NUMBERS = 4


def variations(args: Sequence[Any], runs: Callable[[Arguments], bool]) -> Iterator[tuple[str, Arguments]]:
    """(how it differs from `args`, arguments), those most likely to find something first.

    runs: whether arguments can be called. Only what decides about many lists is asked, so some may not run after all.
    """
    leaves, spec = pytree.tree_flatten(tuple(args))
    groups = _groups(leaves, lambda changed: runs(pytree.tree_unflatten(changed, spec)))
    of_numbers, of_sizes = list(_numbers(leaves)), list(_sizes(leaves, groups))
    both = [
        (f"{words}; {more}", {**changed, **_resized(leaves, sizes)})
        for (words, changed), (more, sizes) in zip(of_numbers, of_sizes[::-1], strict=False)
    ]
    sized = ((words, _resized(leaves, sizes)) for words, sizes in of_sizes)
    for words, changed in _in_turns(of_numbers, sized, both):
        yield words, pytree.tree_unflatten([changed.get(n, leaf) for n, leaf in enumerate(leaves)], spec)


def _in_turns(*lists: Iterable[tuple[str, dict[int, Any]]]) -> Iterator[tuple[str, dict[int, Any]]]:
    for row in itertools.zip_longest(*lists):
        yield from (one for one in row if one is not None)


# ---- numbers


def other_numbers(x: float, longest: int) -> dict[str, float]:
    """Numbers like x and unlike it. longest: the max length that there is."""
    if isinstance(x, int):
        others: dict[str, float] = {
            "sign changed": -x if x else -1, "beyond the end": longest + 3, "far below": -longest - 3, "zero": 0,
            "larger": 2 * abs(x) + 1, "one": 1, "smaller": x // 2, "minus one": -1,
        }  # fmt: skip
    else:
        others = {"sign changed": -x if x else -0.5, "larger": 2 * abs(x) + 0.5, "zero": 0.0, "smaller": x / 2}
    return {words: y for words, y in others.items() if y != x}


def _numbers(leaves: Sequence[Any]) -> Iterator[tuple[str, dict[int, Any]]]:
    """All numbers in the same way, then each by itself."""
    longest = max((n for x in leaves if isinstance(x, Tensor) for n in x.shape), default=1)
    others = {n: _others(x, longest) for n, x in enumerate(leaves)}
    others = {n: values for n, values in others.items() if values}
    words = dict.fromkeys(itertools.chain.from_iterable(others.values()))
    for word in words:
        changed = {n: values[word] for n, values in others.items() if word in values}
        yield f"numbers {word}", changed
    for word in words:
        for n, values in others.items():
            if len(others) > 1 and word in values:
                yield f"leaf {n} {word}: {values[word]}", {n: values[word]}


def _others(leaf: Any, longest: int) -> dict[str, Any]:
    if isinstance(leaf, bool):
        return {}
    if isinstance(leaf, (int, float)):
        return dict(other_numbers(leaf, longest))
    whole = isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    if not whole or not 0 < leaf.numel() <= MOST_NUMBERS:
        return {}
    found: dict[str, Any] = {}
    for n, x in enumerate(leaf.flatten().tolist()):
        for word, y in other_numbers(x, longest).items():
            found.setdefault(word, leaf.clone()).view(-1)[n] = y
    return found


# ---- sizes


def _groups(leaves: Sequence[Any], runs: Callable[[list[Any]], bool]) -> dict[frozenset[Place], int]:
    """Places that can change their length together, and the length that they share."""
    places: dict[int, list[Place]] = {}
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and type(leaf) is Tensor and leaf.layout == torch.strided:
            for axis, length in enumerate(leaf.shape):
                places.setdefault(length, []).append((n, axis))
    found: dict[frozenset[Place], int] = {}
    for length, all_of_them in places.items():
        for group in dict.fromkeys(_parts(leaves, all_of_them)):
            longer = _changed(leaves, _resized(leaves, dict.fromkeys(group, length + 2)))
            if length > 0 and runs(longer):
                found[group] = length
    return found


def _parts(leaves: Sequence[Any], places: list[Place]) -> Iterator[frozenset[Place]]:
    """Those of `places` that may belong together: lengths that are equal by chance do not."""
    yield frozenset(places)
    from_end = [axis - leaves[n].dim() for n, axis in places]
    for axis in dict.fromkeys(from_end):
        same = [place for place, other in zip(places, from_end, strict=True) if other == axis]
        yield frozenset(same)
        if len(same) > 1:  # the query, or all but the query
            yield frozenset(same[1:])
            yield frozenset(same[:1])


def _sizes(leaves: Sequence[Any], groups: Mapping[frozenset[Place], int]) -> Iterator[tuple[str, dict[Place, int]]]:
    swapped = [
        (
            f"lengths {a} of {sorted(one)} and {b} of {sorted(other)} swapped",
            dict.fromkeys(one, b) | dict.fromkeys(other, a),
        )
        for (one, a), (other, b) in itertools.combinations(groups.items(), 2)
        if a != b and not one & other and 1 not in (a, b)
    ]
    others = [
        (f"length {length} of {sorted(group)} now {made(length)}", dict.fromkeys(group, made(length)))
        for made in (lambda n: 2 * n + 3, lambda n: n // 2, lambda n: n + 1, lambda n: n - 1, lambda n: 1)
        for group, length in groups.items()
        if made(length) > 0
    ]
    for row in itertools.zip_longest(others, swapped):
        yield from (one for one in row if one is not None)


def _changed(leaves: Sequence[Any], changed: Mapping[int, Any]) -> list[Any]:
    return [changed.get(n, leaf) for n, leaf in enumerate(leaves)]


def _resized(leaves: Sequence[Any], sizes: Mapping[Place, int]) -> dict[int, Tensor]:
    return {
        n: resized(leaves[n], {axis: length for (m, axis), length in sizes.items() if m == n})
        for n in {n for n, _ in sizes}
    }


def resized(x: Tensor, lengths: Mapping[int, int]) -> Tensor:
    """`x` with other lengths, by axis: of the same kind of values, and laid out in the same order."""
    expanded = [axis for axis in range(x.dim()) if x.stride(axis) == 0 and x.shape[axis] > 1]
    shape = [lengths.get(axis, length) for axis, length in enumerate(x.shape)]
    y = x.detach()
    for axis in expanded:
        y = y.narrow(axis, 0, 1)
    for axis in set(lengths) - set(expanded):
        y = y.index_select(axis, torch.arange(lengths[axis]) % x.shape[axis])
    if y.is_floating_point() and y.unique().numel() > y.numel() // 2:
        generator = torch.Generator().manual_seed(y.numel())
        y = (y * (0.5 + torch.rand(y.shape, generator=generator))).to(x.dtype)
    order = sorted(range(x.dim()), key=lambda axis: -x.stride(axis))
    places = [order.index(axis) for axis in range(x.dim())]
    return y.permute(order).contiguous().permute(places).expand(shape)
