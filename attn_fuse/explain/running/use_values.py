"""Values for an argument from how forward uses it, the likeliest first."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.explain.building.sizes import value_for
from attn_fuse.explain.reading.uses import Use

# How many maps a list of feature maps has, and their side.
LEVELS, SIDE = 4, 8
# How many numbers a guess may hold.
MOST_NUMBERS = 1 << 26
TIMES = re.compile(r"^t$|time$|time_?step|sigma|noise_level", re.I)
TRUTH = re.compile(r"mask|adj", re.I)
LENGTHS = re.compile(r"(^|_)len(gth)?s?$", re.I)
PICTURES = re.compile(r"tensors?|images?|imgs?|pixel_values|pixels|frames")
SIZES = re.compile(r"(original|image|img|input)_(size|shape)|(ori|img)_shape")
# Attributes of dicts that tensors lack.
OF_DICTS = {"items", "keys", "values"}


@dataclass(frozen=True)
class Around:
    """What the values have to fit: sizes in elements.

    side, channels: of a picture. width: of the model's vectors. like: another argument, whose length and sides are
    taken.
    """

    batch: int
    length: int
    side: int
    channels: int
    width: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    like: Tensor | None = None

    @property
    def sequence(self) -> int:
        """The length of `like`, else the usual one."""
        like = self.like
        return int(like.shape[1]) if like is not None and like.dim() in (2, 3) else self.length

    @property
    def sides(self) -> tuple[int, ...]:
        """The sides of `like` where it is a map, else those of a small one."""
        like = self.like
        return tuple(like.shape[2:]) if like is not None and like.dim() == 4 else (SIDE, SIDE)

    def floats(self, *shape: int) -> Tensor:
        """Random numbers of the model's dtype."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)


def values_for(use: Use, name: str, around: Around) -> Iterator[Any]:
    """Values that fit `use`; none where it says nothing. name: the argument's own."""
    if use.keys:
        pictured = {key: value for key in use.keys if (value := _of_picture(key, around)) is not None}
        # Of what stands beside a picture a model may do without: points, boxes.
        if any(isinstance(value, Tensor) for value in pictured.values()):
            yield pictured
        held = {key: next(values_for(inner, key, around), None) for key, inner in use.keys.items()}
        yield {key: value if value is not None else _entry(key, around) for key, value in held.items()} | pictured
        return
    if use.items is not None:
        is_map = use.items.layer is None and use.items.rank is None and not (use.items.is_truth or TRUTH.search(name))
        inner = use.items.also(Use(rank=4)) if is_map else use.items
        first = list(itertools.islice(values_for(inner, name, around), 2))
        # Maps as wide as the model come before pictures.
        for one in first if inner.keys else first[::-1]:
            for count in (1,) if isinstance(one, dict) else (LEVELS, 1, 3):
                yield [_alone(one) for _ in range(count)]
        return
    if use.is_truth or use.hides_keys or (TRUTH.search(name) and use.layer is None):
        yield from _truths(use, around)
        return
    if use.layer is not None:
        yield from _for_layer(use, use.layer, name, around)
    elif attributes := use.attributes - OF_DICTS:
        yield types.SimpleNamespace(**{attribute: _attribute(attribute, around) for attribute in attributes})
    elif use.rank == 5:
        yield from _clips(use.names, around)
    elif use.rank is not None:
        yield from _of_rank(use.rank, around)
    elif use.least > 2:
        yield from _of_rank(use.least, around)


def _attribute(name: str, around: Around) -> Any:
    # A number by its name; of pictures that are padded, as DETR's NestedTensor holds them, the pictures and the mask.
    shape = (around.batch, around.channels, around.side, around.side)
    if PICTURES.fullmatch(name):
        return around.floats(*shape)
    if name == "mask":
        return torch.zeros((shape[0], *shape[2:]), dtype=torch.bool, device=around.device)
    value = value_for(name)
    return value if value is not None else 0


def _clips(names: tuple[str, ...], around: Around) -> Iterator[Tensor]:
    # Pictures in a row: their channels stand before the number of pictures or after it, as the code calls them.
    batch, frames, side = around.batch, around.length, around.side
    are_first = len(names) == 5 and names[1].startswith("c")
    shapes = [(batch, frames, around.channels, side, side), (batch, around.channels, frames, side, side)]
    yield from (around.floats(*shape) for shape in (reversed(shapes) if are_first else shapes))


def _of_picture(key: str, around: Around) -> Any:
    # What detectors are given of a picture: its numbers, its size, its height and its width. None for other keys.
    if PICTURES.fullmatch(key):
        return around.floats(around.batch, around.channels, around.side, around.side)
    if key in ("height", "width"):
        return around.side
    return (around.side, around.side) if SIZES.fullmatch(key) else None


def _alone(value: Any) -> Any:
    # One of a list, which has no batch; of a dict its pictures, each of which has its size beside it.
    if isinstance(value, dict):
        return {
            key: one[0] if PICTURES.fullmatch(key) and isinstance(one, Tensor) else one for key, one in value.items()
        }
    return value.clone() if isinstance(value, Tensor) else value


def _entry(key: str, around: Around) -> Tensor:
    if LENGTHS.search(key):
        return torch.full((around.batch,), around.sequence, device=around.device)
    return _plain(around)


def _plain(around: Around) -> Tensor:
    return around.floats(around.batch, around.sequence, around.width)


def _truths(use: Use, around: Around) -> Iterator[Tensor]:
    batch, length = around.batch, around.sequence
    like = around.like
    shapes: list[tuple[int, ...]] = [(batch, *around.sides)] if like is not None and like.dim() == 4 else []
    if like is not None and like.dim() == 2 and like.is_floating_point():
        shapes.append((like.shape[0], like.shape[0]))
    shapes += [(batch, length), (length, batch), (length, length), (batch, length, length), (batch, 1, 1, length)]
    shapes += [(batch, 1, length, length), (batch, 1, length), (batch, *around.sides)]
    for shape in dict.fromkeys(shapes):
        if use.rank is not None and len(shape) != use.rank:
            continue
        if len(shape) < use.least:
            continue
        if use.is_truth or use.hides_keys:
            yield torch.zeros(shape, dtype=torch.bool, device=around.device)
            continue
        yield torch.ones(shape, dtype=around.dtype, device=around.device)
        yield torch.zeros(shape, dtype=torch.bool, device=around.device)


def _for_layer(use: Use, layer: nn.Module | Tensor, name: str, around: Around) -> Iterator[Tensor]:
    batch, length = around.batch, around.sequence
    if isinstance(layer, nn.Embedding):
        shapes = [(batch, length), (batch,), (batch, length, 1)] if layer.num_embeddings else []
        for shape in sorted(shapes, key=lambda s: len(s) != use.rank) if use.rank else shapes[:2]:
            yield torch.randint(layer.num_embeddings, shape, device=around.device)
    elif isinstance(layer, nn.modules.conv._ConvNd):
        yield from _for_convolution(use, layer, around)
    elif (width := _width_of(layer)) is not None:
        ranks = [use.rank] if use.rank else [rank for rank in (3, 2, 4) if rank >= use.least]
        if not use.rank and (isinstance(layer, Tensor) or TIMES.search(name)):
            ranks = [2, 3]
        for rank in ranks:
            if rank == 2 and isinstance(layer, Tensor):
                yield around.floats(length, width)
            before = {1: (), 2: (batch,), 3: (batch, length), 4: (batch, *around.sides)}.get(rank)
            if before is not None:
                yield around.floats(*before, width)


def _for_convolution(use: Use, layer: nn.modules.conv._ConvNd, around: Around) -> Iterator[Tensor]:
    count, channels = len(layer.kernel_size), layer.in_channels
    kernel = max(layer.kernel_size)
    if use.rank is not None and use.rank != count + 2:
        return
    sides = {1: (around.sequence, 8 * kernel), 2: (around.side, 8 * kernel, 32, 64), 3: (around.side,)}[count]
    for side in dict.fromkeys(s for s in sides if s >= kernel):
        yield around.floats(around.batch, channels, *((16, side, side) if count == 3 else (side,) * count))


def _width_of(layer: nn.Module | Tensor) -> int | None:
    if isinstance(layer, Tensor):
        return int(layer.shape[-2])
    if isinstance(layer, nn.LayerNorm):
        return int(layer.normalized_shape[-1])
    names = ("in_features", "embed_dim", "input_size", "d_model")
    found = next((value for n in names if isinstance(value := getattr(layer, n, None), int)), None)
    return found if found is not None or not hasattr(layer, "self_attn") else _width_of(layer.self_attn)


def _of_rank(rank: int, around: Around) -> Iterator[Tensor]:
    batch, length, width = around.batch, around.sequence, around.width
    if rank == 4:
        if around.like is None or around.like.dim() != 4:
            yield around.floats(batch, 3, around.side, around.side)
        else:
            yield around.floats(*around.like.shape)
        yield around.floats(batch, width, *around.sides)
        if batch * length**2 * width <= MOST_NUMBERS:
            yield around.floats(batch, length, length, width)
    elif rank == 3:
        yield around.floats(batch, length, width)
        yield around.floats(batch, width, length)
    elif rank == 2:
        if around.vocabulary:
            yield torch.randint(around.vocabulary, (batch, length), device=around.device)
        yield around.floats(length, width)
        yield around.floats(batch, width)
    elif rank == 1:
        yield torch.ones(batch, dtype=torch.long, device=around.device)
        yield around.floats(batch)
