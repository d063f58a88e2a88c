"""Inputs that a model runs on: guessed from its parameters' names, annotations and layers, then tried."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.configs import CONFIG_NAMES
from attn_fuse.explain.problems import in_one_line

LENGTH_NAMES = (
    "block_size",
    "n_positions",
    "max_position_embeddings",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "seq_len",
    "seq_length",
    "sequence_length",
    "context_length",
    "context_size",
    "context_len",
    "n_ctx",
    "n_text_ctx",
    "n_tokens",
    "max_len",
    "max_length",
)
AUDIO_LENGTH_NAMES = ("n_audio_ctx", "audio_ctx")
PICTURE_NAMES = ("image_size", "img_size", "input_size", "resolution", "input_resolution", "image_resolution")

# Sequence lengths: of a first cheap run, for a model that declares none, and the max that is tried unasked.
SHORT, USUAL, LONGEST = 8, 64, 1024
# What torch's errors call for.
WIDTH_WANTED = re.compile(r"shapes cannot be multiplied \(\d+x\d+ and (\d+)x\d+\)")
LENGTH_WANTED = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
# How many combinations of guesses are run, how many of one first argument, and for how many seconds.
MOST_TRIES, MOST_PICKS, TRY_SECONDS = 240, 24, 60.0

TOKENS = re.compile(
    r"token|input_ids|^ids?$|idx|text|^src$|^tgt$|^trg$|src_seq|trg_seq|tgt_seq|source|target|caption|inputs?_ids|word|sent"
)
PICTURES = re.compile(r"image|img|pixel|picture|frame|photo|latent|sample")
SOUNDS = re.compile(r"mel|audio|wav|spec|speech|sound")
TIMES = re.compile(r"^t$|^ts$|time_?steps?$|^time$|^steps?$|noise_level|sigma|^times$|timestep")
LABELS = re.compile(r"^y$|label|class|^cond$")
LENGTHS = re.compile(r"len(gth)?s?$")
MARKS = re.compile(r"mark")
CONTEXTS = re.compile(r"context|cond|memory|encoder_(hidden|out)|enc_out|^enc|cross|prompt|query_embed|pos")
POSITIONS = re.compile(r"start_pos|^pos$|offset|past_len|^step$|cache_pos")


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model, by position and by name; as text, their dtypes and shapes."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([*map(_in_words, self.args), *(f"{name}={_in_words(v)}" for name, v in self.kwargs.items())])


def inputs_for(
    model: nn.Module,
    holders: Sequence[object] = (),
    targets: bool = False,
    length: int | None = None,
    batch: int = 1,
) -> Inputs:
    """Inputs that `model` runs on, of the length and the picture size that it or one of `holders` declares.

    targets: whether to pass integer targets too, where forward has a parameter for them.
    length, batch: the sequence length, and the batch size, instead of what is declared.
    Raises ExplainError where no guess runs.
    """
    sizes = _Sizes.of(model, holders, length, batch)
    trial = _Trial(model, targets, sizes)
    ran = trial.of_tokens() or trial.of_pictures() or trial.of_floats() or trial.of_all()
    if ran is not None:
        return ran.inputs
    tried = f"with {trial.failures[0]}" if trial.failures else "it has no embedding, convolution or linear layer"
    raise ExplainError(
        f"no inputs found that {type(model).__name__} runs on ({tried}); "
        f"pass them with --inputs, as in --inputs '{_example(trial)}'"
    )


def _example(trial: _Trial) -> str:
    # Inputs in Python for the parameters of forward: the user has to change shapes only.
    first = "torch.randint(100, (1, 64))" if trial.embeddings else "torch.randn(1, 64, 512)"
    if len(trial.required) < 2:
        return first
    return f"dict({', '.join(f'{p.name}={first}' for p in trial.required)})"


@dataclass(frozen=True)
class _Sizes:
    # What is declared: the length of sequences, of sounds, the side of pictures; and the batch size.
    length: int | None
    asked: int | None
    sound: int | None
    picture: int | None
    batch: int

    @classmethod
    def of(cls, model: nn.Module, holders: Sequence[object], length: int | None, batch: int) -> _Sizes:
        own = [getattr(model, name) for name in CONFIG_NAMES if hasattr(model, name)]
        known = [model, *holders, *own]
        return cls(
            length or _declared(known, LENGTH_NAMES),
            length,
            _declared(known, AUDIO_LENGTH_NAMES),
            _declared(known, PICTURE_NAMES) or _declared(list(model.modules()), PICTURE_NAMES),
            batch,
        )


@dataclass(frozen=True)
class _Ran:
    # Inputs that the model ran on, and what each of its embeddings was given.
    inputs: Inputs
    embedded: list[tuple[nn.Embedding, Tensor]]


class _Trial:
    """Runs the model on guesses of its arguments, until one runs."""

    def __init__(self, model: nn.Module, targets: bool, sizes: _Sizes) -> None:
        self.model = model
        self.sizes = sizes
        self.parameters = list(inspect.signature(model.forward).parameters.values())
        named = [p for p in self.parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.targets = next((p.name for p in named[1:] if targets and p.name in ("targets", "labels")), None)
        # The first is passed even where it has a default; of the others, what has none.
        self.required = [p for i, p in enumerate(named) if (i == 0 or p.default is p.empty) and p.name != self.targets]
        weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        self.device, self.dtype = weight.device, weight.dtype
        modules = list(model.modules())
        self.embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
        self.linears = [module for module in modules if isinstance(module, nn.Linear)]
        self.convolutions = [module for module in modules if isinstance(module, nn.modules.conv._ConvNd)]
        self.failures: list[str] = []
        # Widths and lengths that errors asked for, the last first.
        self.wanted: list[int] = []
        self.fixed: list[int] = []
        self.tries, self.end = 0, time.monotonic() + TRY_SECONDS

    def of_tokens(self) -> _Ran | None:
        """A run on tokens, of the length that the embeddings of positions have room for."""
        if not self.embeddings:
            return None
        declared = self.sizes.length
        # Descending tokens: a model makes no such positions or token types of its own, so we know its token embeddings.
        lengths = dict.fromkeys((min(SHORT, declared or SHORT), min(declared or USUAL, self.sizes.asked or LONGEST)))
        batch = self.sizes.batch
        probe = _first(self(self._tokens(size)) for size in lengths)
        probe = probe or _first(self(self._tokens(size)) for size in tuple(self.fixed) if size > 1)
        if probe is None:
            return None
        tokens = probe.inputs.args[0] if probe.inputs.args else torch.empty(0)
        takers = [module for module, given in probe.embedded if torch.equal(given.flatten(), tokens.flatten())]
        if not takers:
            return None
        length = declared or min((m.num_embeddings for m, _ in probe.embedded if m not in takers), default=USUAL)
        vocab = min(module.num_embeddings for module in takers)
        length = self.sizes.asked or min(length, LONGEST)
        return self(torch.randint(vocab, (batch, length))) or probe

    def of_pictures(self) -> _Ran | None:
        """A run on pictures, for a model whose first convolution is of two dimensions."""
        convolution = next((module for module in self.convolutions), None)
        if not isinstance(convolution, nn.Conv2d):
            return None
        sides = (self.sizes.picture,) if self.sizes.picture else (64, 224, 32)
        return _first(self(self._floats(convolution.in_channels, side, side)) for side in sides)

    def of_floats(self) -> _Ran | None:
        """A run on vectors as wide as the first linear layer's input."""
        if not self.linears:
            return None
        width = self.linears[0].in_features
        short = self(self._floats(SHORT, width))
        return self(self._floats(self.sizes.asked or min(self.sizes.length or USUAL, LONGEST), width)) or short

    def of_all(self) -> _Ran | None:
        """A run on any of the kinds of input that the layers of the model allow, each parameter by itself."""
        if not self.embeddings and not self.linears and not self.convolutions:
            return None
        for first in self._firsts():
            if (ran := self(first)) is not None:
                return ran
        return None

    def __call__(self, first: Tensor) -> _Ran | None:
        """A run on `first` with guesses of the other arguments, started again where an error tells a width."""
        known = -1
        while known < len(self.wanted):
            known = len(self.wanted)
            if (ran := self._with_first(first, known)) is not None:
                return ran
        return None

    def _with_first(self, first: Tensor, known: int) -> _Ran | None:
        for inputs in self._guesses(first.to(self.device)):
            if len(self.wanted) > known:
                return None
            if self.tries >= MOST_TRIES or time.monotonic() > self.end:
                return None
            self.tries += 1
            try:
                with torch.no_grad(), _embedded(self.embeddings) as embedded:
                    self.model(*inputs.args, **inputs.kwargs)
                return _Ran(inputs, embedded)
            except ExplainError:
                raise
            except Exception as error:
                self.failures.append(f"{inputs}: {in_one_line(error)}")
                self._learn(str(error))
        return None

    def _learn(self, message: str) -> None:
        # What torch says of sizes that do not fit: the width of a weight, the length of learned positions.
        if (width := WIDTH_WANTED.search(message)) and int(width[1]) not in self.wanted:
            self.wanted.insert(0, int(width[1]))
        if (sizes := LENGTH_WANTED.search(message)) and int(sizes[2]) not in self.fixed:
            self.fixed.insert(0, int(sizes[2]))

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn((self.sizes.batch, *shape), dtype=self.dtype)

    def _tokens(self, length: int) -> Tensor:
        vocab = min((embedding.num_embeddings for embedding in self.embeddings), default=2)
        return torch.arange(length).flip(0).repeat(self.sizes.batch, 1) % vocab

    def _firsts(self) -> Iterator[Tensor]:
        # First arguments of every kind, the likeliest for its name first.
        name = self.required[0].name.lower() if self.required else ""
        length = self.sizes.asked or min(self.sizes.length or USUAL, LONGEST)
        kinds: list[Iterator[Tensor]] = [self._sounds(), self._volumes(), self._vectors(length)]
        if self.embeddings:
            kinds.insert(0 if TOKENS.search(name) else 2, iter([self._tokens(length)]))
        if SOUNDS.search(name) or any(isinstance(c, nn.Conv1d) for c in self.convolutions[:1]):
            kinds.insert(0, self._sounds())
        yield from itertools.chain.from_iterable(kinds)

    def _sounds(self) -> Iterator[Tensor]:
        for convolution in self.convolutions[:2]:
            if isinstance(convolution, nn.Conv1d):
                lengths = [2 * self.sizes.sound, self.sizes.sound] if self.sizes.sound else [self.sizes.length or USUAL]
                for length in lengths:
                    yield self._floats(convolution.in_channels, length)
                    yield self._floats(length, convolution.in_channels)

    def _volumes(self) -> Iterator[Tensor]:
        side = self.sizes.picture
        for convolution in self.convolutions[:1]:
            sides = (side,) if side else (64, 32)
            if isinstance(convolution, nn.Conv3d):
                yield from (self._floats(convolution.in_channels, 16, s, s) for s in sides)
            elif isinstance(convolution, nn.Conv2d):
                # Speech models take [batch, time, frequency] and add the channel themselves.
                if convolution.in_channels == 1:
                    yield from (self._floats(self.sizes.length or USUAL, w) for w in (80, 64, 40, 128))
                yield from (self._floats(convolution.in_channels, s, s) for s in (32, 64, 28, 224))
        if side and not any(isinstance(c, nn.Conv2d) for c in self.convolutions):
            yield from (self._floats(channels, side, side) for channels in (3, 1))

    def _vectors(self, length: int) -> Iterator[Tensor]:
        norms = [norm.normalized_shape[-1] for norm in self.model.modules() if isinstance(norm, nn.LayerNorm)]
        widths = dict.fromkeys([*norms[:1], *self.wanted, *(linear.in_features for linear in self.linears[:6])])
        for width in widths:
            yield self._floats(length, width)
        for width in widths:
            yield self._floats(width)
            yield self._floats(width, length)

    def _guesses(self, first: Tensor) -> Iterator[Inputs]:
        if not self.parameters:
            yield Inputs()
            return
        others = self.required[1:]
        options = [list(self._options(p, first)) for p in others]
        # The likeliest of all parameters together come before any unlikely one.
        picks = itertools.product(*(range(len(values)) for values in options))
        ordered = sorted(itertools.islice(picks, 20000), key=sum)[:MOST_PICKS]
        for pick in ordered:
            values = {p.name: options[i][pick[i]] for i, p in enumerate(others)}
            args = (first, *(values.pop(p.name) for p in others if p.kind is not p.KEYWORD_ONLY))
            if self.targets is not None and not first.is_floating_point():
                yield Inputs(args, {**values, self.targets: first.roll(-1)})
            yield Inputs(args, values)

    def _options(self, parameter: inspect.Parameter, first: Tensor) -> Iterator[Any]:
        # What a further parameter may be given, the likeliest first.
        name, batch = parameter.name.lower(), first.shape[0] if first.dim() else 1
        hint = parameter.annotation
        if hint in (bool, "bool"):
            yield False
        elif hint in (int, "int") or POSITIONS.search(name):
            yield 0
        elif hint in (float, "float"):
            yield 0.5
        elif re.search(r"mask.*pos|positions?$|_index$|indices", name) and not first.is_floating_point():
            yield first.clamp(max=first.shape[-1] - 1)
            yield None
        elif "mask" in name:
            yield None
            if first.dim() > 1:
                length = first.shape[1]
                for shape in ((length, length), (1, length), (batch, 1, length), (batch, 1, 1, length)):
                    yield torch.ones(shape, device=self.device)
        elif LENGTHS.search(name):
            yield torch.full((batch,), first.shape[1] if first.dim() > 1 else 1, device=self.device)
            yield first
        elif TIMES.search(name):
            yield torch.ones(batch, dtype=torch.long, device=self.device)
            yield torch.ones(batch, dtype=self.dtype, device=self.device)
            yield from (torch.ones(batch, width, dtype=self.dtype, device=self.device) for width in self._narrow(3))
            yield first
        elif LABELS.search(name) and first.is_floating_point():
            yield torch.zeros(batch, dtype=torch.long, device=self.device)
            yield first
            yield from self._contexts(batch)
        elif MARKS.search(name):
            yield None
            yield from (torch.zeros(*first.shape[:2], n, dtype=self.dtype, device=self.device) for n in (4, 5, 3, 6))
        elif (TOKENS.search(name) or "text" in name) and first.is_floating_point() and self.embeddings:
            yield self._tokens(min(self.sizes.length or USUAL, LONGEST)).to(self.device)
            yield from (first, self._tokens(SHORT).to(self.device))
        elif CONTEXTS.search(name) and first.is_floating_point():
            yield first
            yield from self._contexts(batch)
            yield None
        else:
            yield first
            if first.is_floating_point() and self.embeddings:
                yield self._tokens(first.shape[1] if first.dim() == 3 else SHORT).to(self.device)
            if not first.is_floating_point():
                yield from self._contexts(batch)

    def _narrow(self, most: int) -> list[int]:
        return list(dict.fromkeys([*self.wanted, *(linear.in_features for linear in self.linears)]))[:most]

    def _contexts(self, batch: int) -> Iterator[Tensor]:
        for width in self._narrow(6):
            yield torch.randn(batch, USUAL, width, dtype=self.dtype, device=self.device)


@contextlib.contextmanager
def _embedded(embeddings: Sequence[nn.Embedding]) -> Iterator[list[tuple[nn.Embedding, Tensor]]]:
    # A list that receives each embedding of the model that is called within the block, with its input.
    calls: list[tuple[nn.Embedding, Tensor]] = []
    hooks = [m.register_forward_pre_hook(lambda module, args: calls.append((module, args[0]))) for m in embeddings]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _first(runs: Iterator[_Ran | None]) -> _Ran | None:
    return next((ran for ran in runs if ran is not None), None)


def _declared(holders: Sequence[object], names: Sequence[str]) -> int | None:
    # The first positive whole number that one of the holders has under one of the names.
    for name in names:
        for holder in holders:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if isinstance(value, (tuple, list)) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _in_words(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
