"""Find inputs for a model: guesses by name and layer, then changes that its errors ask for."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.asked import Asked, asked_by
from attn_fuse.explain.inputs import Inputs, in_python
from attn_fuse.explain.names import kinds_of, says
from attn_fuse.explain.search import Calls, Failed, searched
from attn_fuse.explain.steps import TimeUp, now, trying, within_memory
from attn_fuse.graph.names import tensors_of

# The seconds and bytes of one run.
RUN_SECONDS, RUN_BYTES = 20.0, 6 << 30
# After that many seconds without an error, a model most likely runs to its end.
LONG_SECONDS = 5.0
# The bytes of one change of the inputs, and the errors of a change that cannot be made.
_CHANGE_BYTES = 1 << 30
_UNMADE = (RuntimeError, ValueError, TypeError, MemoryError)
# The length of sequences if nothing declares one, and the longest tried unasked.
_USUAL, _LONGEST = 64, 1024
# Sides of pictures to try after 64.
_SIDES = (224, 256, 32)
_MOST_NUMBERS, _MOST_STARTS, _MOST_CHANGES = 1 << 24, 40, 400

_Tensors = Mapping[str, Tensor]
_Changes = Iterator[Mapping[str, Any]]


@dataclass(frozen=True)
class Wish:
    """The inputs that the user asks for. length: of sequences. train: whether to pass targets."""

    length: int | None = None
    batch: int = 1
    train: bool = False


@dataclass(frozen=True)
class Fed:
    """Inputs that a model ran on. attends: whether it called a softmax or a whole attention."""

    inputs: Inputs
    attends: bool


def fed(model: nn.Module, slots: Mapping[str, Any], wish: Wish, end: float) -> Fed:
    """Inputs that `model` runs on.

    slots: what it was built from; they may declare a length or a picture size. end: when to stop, by now().
    Raises ExplainError if the model runs on none.
    """
    feeder = Feeder(model, slots, wish, end)
    ran, tried = searched(feeder.starts(), feeder.run, feeder.changed, end, _MOST_CHANGES, _key)
    if ran is not None:
        return ran
    if feeder.slow is not None:
        return Fed(feeder.slow, True)
    words = f"with {tried[0].tried}: {tried[0].asked.words}" if tried else "nothing is known of its arguments"
    raise ExplainError(
        f"no inputs found that {type(model).__name__} runs on ({words}); pass them with --inputs, as in --inputs "
        f"'{feeder.example(tried)}'"
    )


class Feeder:
    """Makes inputs for a model and runs it on them, until `end` by now().

    slow: the first inputs on which it ran for LONG_SECONDS or more without an error until its time was up.
    """

    def __init__(self, model: nn.Module, slots: Mapping[str, Any], wish: Wish, end: float = math.inf) -> None:
        self.model, self.wish, self.end = model, wish, end
        known = _known(model, slots)
        lengths = [value for name, value in known.items() if type(value) is int and value > 1 and says(name, "128")]
        self.length = wish.length or min(lengths[0] if lengths else _USUAL, _LONGEST)
        sides = [value for name, value in known.items() if says(name, "picture")]
        pairs = [(s,) if type(s) is int else tuple(s) if isinstance(s, (tuple, list)) else () for s in sides]
        # A single side is that of a square.
        pairs = [pair * 2 if len(pair) == 1 else pair for pair in pairs]
        self.sides = next((pair for pair in pairs if len(pair) > 1 and all(type(n) is int for n in pair)), None)
        parameters = inspect.signature(model.forward).parameters.values()
        self.named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not any(p.kind <= p.POSITIONAL_OR_KEYWORD for p in self.named):
            several = (p.replace(kind=p.POSITIONAL_ONLY) for p in parameters if p.kind is p.VAR_POSITIONAL)
            self.named = [*several, *self.named]
        self.targets = next((p.name for p in self.named[1:] if p.name in ("targets", "labels")), None)
        self.required = [
            p
            for i, p in enumerate(self.named)
            if i == 0 or p.default is p.empty or (wish.train and p.name == self.targets)
        ]
        weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        self.device, self.dtype = weight.device, weight.dtype
        self.vocabulary = max(min((m.num_embeddings for m in self._layers(nn.Embedding)), default=2), 1)
        self.slow: Inputs | None = None
        self.is_changing = False

    def _layers(self, kind: type[nn.Module]) -> list[Any]:
        return [layer for layer in self.model.modules() if isinstance(layer, kind)]

    def run(self, inputs: Inputs) -> Fed | Failed[Inputs]:
        """Run the model on `inputs`, for RUN_SECONDS and until `end` at most."""
        calls = Calls()
        left = min(RUN_SECONDS, self.end - now())
        try:
            with trying(left, RUN_BYTES), calls:
                if self.model(*inputs.args, **inputs.kwargs) is None and not calls.count:
                    # A mode among its arguments may be one that it does not know.
                    raise ValueError(f"{type(self.model).__name__} computes nothing")
            return Fed(inputs, calls.attends)
        except ExplainError:
            raise
        except TimeUp as error:
            # Changed inputs may yet fail.
            self.slow = self.slow or (inputs if left >= LONG_SECONDS and not self.is_changing else None)
            return Failed(inputs, replace(asked_by(error), numbers=()), calls.count)
        except Exception as error:
            return Failed(inputs, asked_by(error), calls.count)

    def starts(self) -> Iterator[Inputs]:
        """Inputs guessed by the arguments' names and the model's layers, the likeliest first."""
        if not self.required:
            yield Inputs()
            return
        first, *others = self.required
        for count, value in enumerate(self._firsts(first.name)):
            like = next(iter(tensors_of(value)), torch.empty(0))
            options = [list(itertools.islice(self._values(p, like), 4)) for p in others]
            picks = sorted(itertools.islice(itertools.product(*(range(len(o)) for o in options)), 5000), key=sum)
            for pick in picks[: max(_MOST_STARTS >> count, 3)]:
                yield self._inputs(
                    {first.name: value, **{p.name: o[i] for p, o, i in zip(others, options, pick, strict=True)}}
                )

    def _inputs(self, values: Mapping[str, Any]) -> Inputs:
        # The first and those without a default go by position.
        args: list[Any] = []
        for number, p in enumerate(self.named):
            is_optional = number > 0 and p.default is not p.empty and p.kind is not p.POSITIONAL_ONLY
            if p.name not in values or p.kind is p.KEYWORD_ONLY or is_optional:
                break
            args.append(values[p.name])
        rest = {p.name: values[p.name] for p in self.named[len(args) :] if p.name in values}
        return Inputs(tuple(args), rest)

    def _firsts(self, name: str) -> Iterator[Any]:
        # The first argument: by its name, then for the first layers in the model's order.
        for kind in kinds_of(name):
            yield from self._of_kind(kind, torch.empty(0)) if kind not in ("like", "none", "false", "zero") else ()
        seen: set[str] = set()
        for layer in self.model.modules():
            value = self._for_layer(layer)
            key = str(Inputs((value,)))
            if value is not None and key not in seen and len(seen) < 6:
                seen.add(key)
                yield value
                if isinstance(layer, nn.Conv2d) and self.sides is None:
                    yield from (self._floats(self.wish.batch, layer.in_channels, side, side) for side in _SIDES)
        yield from (self._floats(self.wish.batch, self.length, 512), self._picture(3), self._tokens())

    def _for_layer(self, layer: nn.Module) -> Tensor | None:
        batch, length = self.wish.batch, self.length
        match layer:
            case nn.Embedding(num_embeddings=rows) if rows > 2:
                return self._tokens()
            case nn.Conv2d(in_channels=channels):
                return self._picture(channels)
            case nn.Conv3d(in_channels=channels):
                return self._floats(batch, channels, 16, *(self.sides or (64, 64)))
            case nn.Conv1d(in_channels=channels):
                return self._floats(batch, channels, length)
            case nn.Linear(in_features=width) | nn.MultiheadAttention(embed_dim=width):
                return self._floats(batch, length, width)
            case nn.LayerNorm(normalized_shape=(width,)):
                return self._floats(batch, length, width)
        return None

    def _values(self, parameter: inspect.Parameter, like: Tensor) -> Iterator[Any]:
        # A further argument beside the first, `like`; the likeliest value first.
        hint = parameter.annotation
        if hint in (bool, "bool"):
            yield False
        elif hint in (int, "int", float, "float"):
            yield from (self.length if says(parameter.name, "128") else 1, 0)
        kinds = [kind for kind in kinds_of(parameter.name) if kind != "none" or like.numel()]
        if parameter.default is None and parameter.name != self.targets:
            yield None
        for kind in kinds or ("like", "vectors", "tokens", "none"):
            yield from self._of_kind(kind, like)

    def _of_kind(self, kind: str, like: Tensor) -> Iterator[Any]:
        batch = like.shape[0] if like.numel() else self.wish.batch
        length = like.shape[1] if like.dim() > 1 else self.length
        match kind:
            case "tokens":
                yield self._tokens()
            case "like":
                yield torch.randn_like(like) if like.is_floating_point() else like.clone()
            case "vectors":
                widths = dict.fromkeys(layer.in_features for layer in self._layers(nn.Linear))
                yield from (self._floats(batch, self.length, width) for width in [*widths][:3])
            case "picture":
                yield self._picture(next((layer.in_channels for layer in self._layers(nn.Conv2d)), 3))
            case "sound":
                yield self._floats(batch, next((m.in_channels for m in self._layers(nn.Conv1d)), 80), self.length)
            case "time":
                yield torch.ones(batch, dtype=torch.long, device=self.device)
            case "fraction":
                yield torch.rand(batch, device=self.device, dtype=self.dtype)
            case "label":
                yield torch.zeros(batch, dtype=torch.long, device=self.device)
            case "lengths":
                yield torch.full((batch,), length, device=self.device)
            case "length":
                yield length
            case "positions":
                yield torch.arange(length, device=self.device)
            case "square":
                yield torch.ones(length, length, device=self.device)
                yield torch.ones(batch, 1, length, length, device=self.device)
            case "keys":
                yield torch.ones(batch, length, device=self.device)
            case "zeros":
                yield torch.zeros_like(like) if not like.is_floating_point() else torch.zeros(batch, length).long()
            case _:
                yield {"none": None, "false": False, "zero": 0}[kind]

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def _picture(self, channels: int) -> Tensor:
        return self._floats(self.wish.batch, channels, *(self.sides or (64, 64)))

    def _tokens(self) -> Tensor:
        return torch.randint(self.vocabulary, (self.wish.batch, self.length), device=self.device)

    def changed(self, failed: Failed[Inputs]) -> Iterator[Inputs]:
        """The inputs with one thing changed as the error asks: a size, rank or dtype, or another argument."""
        self.is_changing = True
        names = [p.name for p in self.named]
        values = {**dict(zip(names, failed.tried.args, strict=False)), **failed.tried.kwargs}
        asked = failed.asked
        named = sorted(values, key=lambda name: name not in asked.names)
        tensors = {name: values[name] for name in named if isinstance(values[name], Tensor)}
        like = next(iter(tensors.values()), torch.empty(0))
        missing = [p for p in self.named if values.get(p.name) is None and p.kind is not p.POSITIONAL_ONLY]
        kinds: list[_Changes] = [
            _resized(values, tensors, asked, self.wish.length),
            _of_other_dtype(values, tensors, self.vocabulary),
            _of_other_rank(values, tensors, asked.numbers),
            ({**values, p.name: v} for p in missing if p.name in asked.names for v in self._given(p, like)),
            ({**values, name: None} for name in values if name in asked.names and values[name] is not None),
            ({**values, p.name: v} for p in missing for v in itertools.islice(self._given(p, like), 3)),
        ]
        # In turn, because an error does not tell which kind of change it asks for.
        while kinds:
            for kind in [*kinds]:
                made = None
                # A tensor may be too large, or a range of numbers empty.
                with within_memory(_CHANGE_BYTES), contextlib.suppress(*_UNMADE):
                    made = next(kind, None)
                if made is None:
                    kinds.remove(kind)
                elif self._is_as_wished(made):
                    yield self._inputs(made)

    def _given(self, parameter: inspect.Parameter, like: Tensor) -> Iterator[Any]:
        return (value for value in self._values(parameter, like) if value is not None)

    def _is_as_wished(self, values: Mapping[str, Any]) -> bool:
        sizes = {size for tensor in tensors_of(values) for size in tensor.shape}
        batch = self.wish.batch
        return (self.wish.length is None or self.wish.length in sizes) and (batch == 1 or batch in sizes)

    def example(self, failed: Sequence[Failed[Inputs]]) -> str:
        """Inputs in Python to start from."""
        inputs = failed[0].tried if failed else Inputs((self._floats(1, 64, 512),))
        values = {**dict(zip((p.name for p in self.named), inputs.args, strict=False)), **inputs.kwargs}
        written = {name: in_python(value, self.vocabulary) for name, value in values.items()}
        return (
            next(iter(written.values())) if len(written) == 1 else f"dict({', '.join(map('='.join, written.items()))})"
        )


def _known(model: nn.Module, slots: Mapping[str, Any]) -> dict[str, Any]:
    # Values by name: the model's attributes, its slots, and the entries of the configs among them.
    own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    inner = [getattr(value, "__dict__", {}) for value in (*own.values(), *slots.values())]
    entries = {k: v for one in inner for k, v in one.items() if isinstance(k, str) and not k.startswith("_")}
    return {name.rpartition(".")[2]: value for name, value in {**entries, **own, **slots}.items()}


def _of_shape(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None, below: int = 2) -> Tensor:
    # Numbers like the tensor's in another shape or dtype.
    dtype = dtype or tensor.dtype
    if dtype.is_floating_point:
        return torch.randn(*shape, dtype=dtype, device=tensor.device)
    if dtype == torch.bool:
        return torch.ones(*shape, dtype=dtype, device=tensor.device)
    most = int(tensor.max()) + 1 if tensor.numel() and not tensor.is_floating_point() else below
    return torch.randint(max(most, 1), tuple(shape), dtype=dtype, device=tensor.device)


def _key(inputs: Inputs) -> str:
    # Equal for inputs of the same shapes and dtypes, but for indices that may be out of range.
    whole = [t for t in tensors_of([*inputs.args, inputs.kwargs]) if not t.is_floating_point() and t.numel()]
    return f"{inputs} {[int(tensor.max()) > 0 for tensor in whole]}"


def _resized(values: Mapping[str, Any], tensors: _Tensors, asked: Asked, kept: int | None) -> _Changes:
    # kept: the size that the user asked for, which stays.
    changes = [
        [(name, dim, other) for other in itertools.islice(asked.others_for(tensor.shape[dim]), 12)]
        for name, tensor in tensors.items()
        for dim in range(tensor.dim() - 1, -1, -1)
        if tensor.shape[dim] != kept
    ]
    # The likeliest size of every dimension comes before unlikely ones.
    for name, dim, other in (c for row in itertools.zip_longest(*changes) for c in row if c is not None):
        shape = tensors[name].shape
        alone = {name: [other if i == dim else n for i, n in enumerate(shape)]}
        alike = {at: [other if n == shape[dim] else n for n in t.shape] for at, t in tensors.items()}
        for several in (alone, alike):
            if all(torch.Size(shape).numel() <= _MOST_NUMBERS for shape in several.values()):
                yield {**values, **{at: _of_shape(tensors[at], shape) for at, shape in several.items()}}


def _of_other_dtype(values: Mapping[str, Any], tensors: _Tensors, vocabulary: int) -> _Changes:
    whole = {name: torch.zeros_like(t) for name, t in tensors.items() if not t.is_floating_point() and t.any()}
    others = [whole]
    for dtype in (torch.long, torch.float32, torch.bool):
        others.append({n: _of_shape(t, t.shape, dtype, vocabulary) for n, t in tensors.items() if t.dtype != dtype})
    for several in others:
        yield from ({**values, name: new} for name, new in several.items())
        yield {**values, **several}


def _of_other_rank(values: Mapping[str, Any], tensors: _Tensors, numbers: Sequence[int]) -> _Changes:
    for name, tensor in tensors.items():
        shape = [*tensor.shape]
        usual = (len(shape) + 1, len(shape) - 1)
        shapes = [shape[:1]]
        for rank in dict.fromkeys((*(n for n in numbers if 1 <= n <= 5 and n != len(shape)), *usual)):
            if (more := rank - len(shape)) > 0:
                ones = ([1] if len(shape) > 1 else [8]) * more
                shapes += [[*shape[:1], *ones, *shape[1:]], [*shape, *[8] * more], [*ones, *shape]]
            elif rank > 0:
                shapes += [shape[:more], shape[-more:], [shape[0], *shape[1 - more :]]]
        yield from ({**values, name: _of_shape(tensor, other)} for other in shapes)
