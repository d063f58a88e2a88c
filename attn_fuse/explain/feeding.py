"""Inputs that a model runs on: as its repository calls it, or by names and layers, then as its errors ask."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.asked import Asked, asked_by, memory_of
from attn_fuse.explain.inputs import Inputs, in_python
from attn_fuse.explain.names import kinds_of, says
from attn_fuse.explain.search import Calls, Failed, searched
from attn_fuse.explain.spelled import calls_of
from attn_fuse.explain.steps import TimeUp, now, trying
from attn_fuse.graph.names import tensors_of

# Seconds of one run, and how many bytes it may take.
RUN_SECONDS, RUN_BYTES = 20.0, 6 << 30
# Seconds of one on inputs that a text spells out: those of a benchmark are taken only where nothing smaller runs.
_SPELLED_SECONDS = 4.0
# How long sequences are that nothing declares, and the longest that are tried unasked.
_USUAL, _LONGEST = 64, 1024
# Further sides of pictures.
_SIDES = (224, 256, 32)
_MOST_NUMBERS, _MOST_STARTS, _MOST_CHANGES = 1 << 24, 40, 400

# Where a tensor is: the name of the argument, then the keys within it.
_Place = tuple[Any, ...]


class NoInputs(ExplainError):
    """No inputs run on a model; `failed` are those that were tried, what came furthest first."""

    def __init__(self, message: str, failed: Sequence[Failed[Inputs]]) -> None:
        super().__init__(message)
        self.failed = tuple(failed)


@dataclass(frozen=True)
class Wish:
    """What the user asks of inputs: the length of sequences, the batch size, and whether there are targets."""

    length: int | None = None
    batch: int = 1
    train: bool = False


@dataclass(frozen=True)
class Fed:
    """Inputs that a model ran on, and whether it called what an attention calls."""

    inputs: Inputs
    attends: bool


def fed(
    model: nn.Module,
    module: types.ModuleType,
    slots: Mapping[str, Any],
    wish: Wish,
    end: float,
    failed: Sequence[Failed[Inputs]] = (),
) -> Fed:
    """Inputs that `model` runs on, of the length and the picture size that its slots declare.

    module: the file, whose repository may spell out a call. end: by now(). failed: inputs that
    were tried; they are changed as their errors ask. Without any, inputs are made by names and layers.
    Raises NoInputs where none runs.
    """
    feeder = Feeder(model, slots, wish, end)
    starts = iter([one.tried for one in failed]) if failed else feeder.starts()
    if not failed and wish == Wish(train=wish.train):
        for spelled in calls_of(model, module):
            found = feeder.run(Inputs(spelled.args, spelled.kwargs), _SPELLED_SECONDS)
            if isinstance(found, Fed) and (not wish.train or feeder.targets is None):
                return found
            if now() > end:
                break
    ran, tried = searched(starts, feeder.run, feeder.changed, end, _MOST_CHANGES if failed else 0, _key)
    if ran is not None:
        return ran
    if feeder.slow is not None:
        return Fed(feeder.slow, True)
    first = (*failed, *tried)[:1]
    words = f"with {first[0].tried}: {first[0].asked.words}" if first else "nothing is known of its arguments"
    raise NoInputs(
        f"no inputs found that {type(model).__name__} runs on ({words}); pass them with --inputs, as in --inputs "
        f"'{feeder.example(first)}'",
        tried,
    )


class Feeder:
    """Makes inputs for a model, and runs it on them, until `end` by now().

    slow: the first inputs that the model ran on for RUN_SECONDS without an error.
    """

    def __init__(self, model: nn.Module, slots: Mapping[str, Any], wish: Wish, end: float = math.inf) -> None:
        self.model, self.wish, self.end = model, wish, end
        own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
        inner = [getattr(value, "__dict__", {}) for value in (*own.values(), *slots.values())]
        entries = {k: v for one in inner for k, v in one.items() if isinstance(k, str) and not k.startswith("_")}
        known = {name.rpartition(".")[2]: value for name, value in {**entries, **own, **slots}.items()}
        lengths = [value for name, value in known.items() if type(value) is int and value > 1 and says(name, "128")]
        self.length = wish.length or min(lengths[0] if lengths else _USUAL, _LONGEST)
        sides = [value for name, value in known.items() if says(name, "picture")]
        pairs = [(s, s) if type(s) is int else tuple(s) if isinstance(s, (tuple, list)) else () for s in sides]
        self.sides = next((pair for pair in pairs if len(pair) > 1 and all(type(n) is int for n in pair)), None)
        parameters = inspect.signature(model.forward).parameters.values()
        self.named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not any(p.kind <= p.POSITIONAL_OR_KEYWORD for p in self.named):
            # What is handed on says nothing of its names.
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
        rows = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        self.vocabulary = max(min(rows, default=2), 1)
        self.slow: Inputs | None = None
        self.is_changing = False

    def run(self, inputs: Inputs, seconds: float = RUN_SECONDS) -> Fed | Failed[Inputs]:
        """A run of the model on `inputs`, of at most `seconds`."""
        calls = Calls()
        left = min(seconds, max(self.end - now(), 1.0))
        if any(tensor.numel() == 0 for tensor in tensors_of([*inputs.args, inputs.kwargs])):
            return Failed(inputs, asked_by(ValueError("an empty tensor")), 0)
        try:
            with trying(left, RUN_BYTES), calls:
                self.model(*inputs.args, **inputs.kwargs)
            return Fed(inputs, calls.attends)
        except ExplainError:
            raise
        except TimeUp as error:
            # What runs that long without an error most likely runs to the end; of another size it may yet raise.
            self.slow = self.slow or (inputs if left == RUN_SECONDS and not self.is_changing else None)
            return Failed(inputs, replace(asked_by(error), numbers=()), calls.count)
        except Exception as error:
            return Failed(inputs, asked_by(error), calls.count)

    def starts(self) -> Iterator[Inputs]:
        """Inputs by the names of the arguments and the model's layers, the likeliest first."""
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
        # By position the first, and those that have no default.
        args: list[Any] = []
        for number, p in enumerate(self.named):
            is_optional = number > 0 and p.default is not p.empty and p.kind is not p.POSITIONAL_ONLY
            if p.name not in values or p.kind is p.KEYWORD_ONLY or is_optional:
                break
            args.append(values[p.name])
        rest = {p.name: values[p.name] for p in self.named[len(args) :] if p.name in values}
        return Inputs(tuple(args), rest)

    def _firsts(self, name: str) -> Iterator[Any]:
        # Values of the first argument: as its name says, then for each layer in the order in which the model has them.
        for kind in kinds_of(name):
            yield from self._of_kind(kind, torch.empty(0)) if kind not in ("like", "none", "false", "zero") else ()
        seen: set[str] = set()
        batch, length = self.wish.batch, self.length
        for layer in self.model.modules():
            value: Tensor | None = None
            if isinstance(layer, nn.Embedding) and layer.num_embeddings > 2:
                value = self._tokens()
            elif isinstance(layer, nn.Conv2d):
                value = self._picture(layer.in_channels)
            elif isinstance(layer, nn.Conv3d):
                value = self._floats(batch, layer.in_channels, 16, *(self.sides or (64, 64)))
            elif isinstance(layer, nn.Conv1d):
                value = self._floats(batch, layer.in_channels, length)
            elif isinstance(layer, nn.Linear):
                value = self._floats(batch, length, layer.in_features)
            elif isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1:
                value = self._floats(batch, length, layer.normalized_shape[0])
            elif isinstance(layer, nn.MultiheadAttention):
                value = self._floats(batch, length, layer.embed_dim)
            key = str(Inputs((value,)))
            if value is not None and key not in seen and len(seen) < 6:
                seen.add(key)
                yield value
                if isinstance(layer, nn.Conv2d) and self.sides is None:
                    yield from (self._floats(batch, layer.in_channels, side, side) for side in _SIDES)
        yield from (self._floats(batch, length, 512), self._picture(3), self._tokens())

    def _values(self, parameter: inspect.Parameter, like: Tensor) -> Iterator[Any]:
        # Values for a further argument beside the first, the likeliest first.
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
        batch = like.shape[0] if like.dim() else self.wish.batch
        length = like.shape[1] if like.dim() > 1 else self.length
        match kind:
            case "tokens":
                yield self._tokens()
            case "like":
                yield torch.randn_like(like) if like.is_floating_point() else like.clone()
            case "vectors":
                widths = dict.fromkeys(m.in_features for m in self.model.modules() if isinstance(m, nn.Linear))
                yield from (self._floats(batch, self.length, width) for width in [*widths][:3])
            case "picture":
                channels = [m.in_channels for m in self.model.modules() if isinstance(m, nn.Conv2d)]
                yield self._picture(channels[0] if channels else 3)
            case "sound":
                channels = [m.in_channels for m in self.model.modules() if isinstance(m, nn.Conv1d)]
                yield from (self._floats(batch, n, self.length) for n in channels[:1] or [80])
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
            case "none":
                yield None
            case "false":
                yield False
            case "zero":
                yield 0

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def _picture(self, channels: int) -> Tensor:
        return self._floats(self.wish.batch, channels, *(self.sides or (64, 64)))

    def _tokens(self) -> Tensor:
        return torch.randint(self.vocabulary, (self.wish.batch, self.length), device=self.device)

    def changed(self, failed: Failed[Inputs]) -> Iterator[Inputs]:
        """The inputs with what the error asks for: a size, a rank, another kind of numbers, a further argument."""
        self.is_changing = True
        names = [p.name for p in self.named]
        values = {**dict(zip(names, failed.tried.args, strict=False)), **failed.tried.kwargs}
        asked = failed.asked
        tensors = [*_tensors(values)]
        # What the innermost call holds comes first.
        places = {place: number for number, place in enumerate(asked.memory)}
        tensors.sort(key=lambda one: (places.get(memory_of(one[1]), len(places)), one[0][0] not in asked.names))
        like = tensors[0][1] if tensors else torch.empty(0)
        further = [p for p in self.named if values.get(p.name) is None and p.kind is not p.POSITIONAL_ONLY]
        kinds: list[Iterator[Mapping[str, Any]]] = [
            _resized(values, tensors, asked, self.wish.length),
            _of_other_kind(values, tensors, self.vocabulary),
            _of_other_rank(values, tensors, asked.numbers),
            (
                {**values, p.name: v}
                for p in further
                if p.name in asked.names
                for v in self._values(p, like)
                if v is not None
            ),
            ({**values, name: None} for name in values if name in asked.names and values[name] is not None),
            (
                {**values, p.name: v}
                for p in further
                for v in itertools.islice(self._values(p, like), 3)
                if v is not None
            ),
            _in_containers(values, tensors),
        ]
        # In turn: no wording of an error tells which kind of change it asks for.
        while kinds:
            for kind in [*kinds]:
                made = None
                # A tensor too large, or a number below an empty table.
                with contextlib.suppress(RuntimeError, ValueError, TypeError, MemoryError):
                    made = next(kind, None)
                if made is None:
                    kinds.remove(kind)
                elif self._is_as_wished(made):
                    yield self._inputs(made)

    def _is_as_wished(self, values: Mapping[str, Any]) -> bool:
        sizes = {size for _, tensor in _tensors(values) for size in tensor.shape}
        batch = self.wish.batch
        return (self.wish.length is None or self.wish.length in sizes) and (batch == 1 or batch in sizes)

    def example(self, failed: Sequence[Failed[Inputs]]) -> str:
        """Inputs in Python to start from."""
        inputs = failed[0].tried if failed else Inputs((self._floats(1, 64, 512),))
        names = [p.name for p in self.named]
        values = {**dict(zip(names, inputs.args, strict=False)), **inputs.kwargs}
        written = {name: in_python(value, self.vocabulary) for name, value in values.items()}
        return (
            next(iter(written.values())) if len(written) == 1 else f"dict({', '.join(map('='.join, written.items()))})"
        )


def _tensors(value: Any, place: _Place = ()) -> Iterator[tuple[_Place, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, inner in items:
        yield from _tensors(inner, (*place, key))


def _with(value: Any, place: _Place, new: Any) -> Any:
    # `value` with `new` at a place.
    if not place:
        return new
    key, *rest = place
    if isinstance(value, dict):
        return {**value, key: _with(value[key], tuple(rest), new)}
    items = list(value)
    items[key] = _with(items[key], tuple(rest), new)
    return type(value)(items)


def _of_shape(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None, below: int = 2) -> Tensor:
    # Numbers like those of a tensor in another shape.
    dtype = dtype or tensor.dtype
    if dtype.is_floating_point:
        return torch.randn(*shape, dtype=dtype, device=tensor.device)
    if dtype == torch.bool:
        return torch.ones(*shape, dtype=dtype, device=tensor.device)
    most = int(tensor.max()) + 1 if tensor.numel() and not tensor.is_floating_point() else below
    return torch.randint(max(most, 1), tuple(shape), dtype=dtype, device=tensor.device)


def _resized(
    values: Mapping[str, Any], tensors: Sequence[tuple[_Place, Tensor]], asked: Asked, kept: int | None
) -> Iterator[Mapping[str, Any]]:
    # kept: a size that stays, as the user has asked for it.
    changes = [
        [(place, t, dim, other) for other in itertools.islice(asked.others_for(t.shape[dim]), 12)]
        for place, t in tensors
        for dim in range(t.dim() - 1, -1, -1)
        if t.shape[dim] != kept
    ]
    # The likeliest size of each dimension before an unlikely one of any.
    for place, tensor, dim, other in (c for row in itertools.zip_longest(*changes) for c in row if c is not None):
        size = tensor.shape[dim]
        alone = [(place, tensor, [other if i == dim else n for i, n in enumerate(tensor.shape)])]
        alike = [(p, t, [other if n == size else n for n in t.shape]) for p, t in tensors if size in t.shape]
        for several in (alone, alike):
            if all(torch.Size(shape).numel() <= _MOST_NUMBERS for _, _, shape in several):
                made: Any = dict(values)
                for at, t, shape in several:
                    made = _with(made, at, _of_shape(t, shape))
                yield made


def _of_other_kind(
    values: Mapping[str, Any], tensors: Sequence[tuple[_Place, Tensor]], vocabulary: int
) -> Iterator[Mapping[str, Any]]:
    whole = [(place, tensor) for place, tensor in tensors if not tensor.is_floating_point() and tensor.any()]
    for several in ([[one] for one in whole], [whole] if len(whole) > 1 else []):
        for one in several:
            made: Any = values
            for place, tensor in one:
                made = _with(made, place, torch.zeros_like(tensor))
            yield made
    for dtype in (torch.long, torch.float32, torch.bool):
        others = [(place, tensor) for place, tensor in tensors if tensor.dtype != dtype]
        made = values
        for place, tensor in others:
            new = _of_shape(tensor, tensor.shape, dtype, vocabulary)
            made = _with(made, place, new)
            yield _with(values, place, new)
        if len(others) > 1:
            yield made


def _key(inputs: Inputs) -> str:
    # Of inputs alike in shapes and dtypes one is enough, but for whole numbers below another limit.
    whole = [t for t in tensors_of([*inputs.args, inputs.kwargs]) if not t.is_floating_point() and t.numel()]
    return f"{inputs} {[int(tensor.max()) > 0 for tensor in whole]}"


def _of_other_rank(
    values: Mapping[str, Any], tensors: Sequence[tuple[_Place, Tensor]], numbers: Sequence[int]
) -> Iterator[Mapping[str, Any]]:
    for place, tensor in tensors:
        shape = [*tensor.shape]
        yield _with(values, place, _of_shape(tensor, shape[:1]))
        ranks = [n for n in numbers if 1 <= n <= 5 and n != len(shape)] or [len(shape) + 1, len(shape) - 1]
        for rank in dict.fromkeys((*ranks, len(shape) + 1, len(shape) - 1)):
            made = [*shape]
            if rank > len(shape):
                new = [1] if len(shape) > 1 else [8]
                for other in (
                    [*made[:1], *new * (rank - len(shape)), *made[1:]],
                    [*made, *[8] * (rank - len(shape))],
                    [*new * (rank - len(shape)), *made],
                ):
                    yield _with(values, place, _of_shape(tensor, other))
            elif 0 < rank < len(shape):
                cut = len(shape) - rank
                for other in (made[:-cut], made[cut:], [made[0], *made[1 + cut :]]):
                    yield _with(values, place, _of_shape(tensor, other))


def _in_containers(values: Mapping[str, Any], tensors: Sequence[tuple[_Place, Tensor]]) -> Iterator[Mapping[str, Any]]:
    arrays: Any = values
    for place, tensor in tensors:
        arrays = _with(arrays, place, (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy())
    yield arrays
    for place, tensor in tensors:
        yield _with(values, place, [tensor])
        yield _with(values, place, (tensor, tensor))
        yield _with(values, place, [tensor[0], tensor[0]] if tensor.dim() > 1 and len(tensor) else [tensor])
        yield _with(values, place, tensor.shape[1] if tensor.dim() > 1 else 1)
