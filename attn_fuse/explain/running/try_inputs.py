"""Runs a model on guesses of its arguments, of every kind that its code and its layers allow, until one runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.inputs import Inputs, different
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.reading.uses import Use, uses_of
from attn_fuse.explain.repairing.asked import Asked, asked_by
from attn_fuse.explain.repairing.repaired import repaired, with_named, without_optional
from attn_fuse.explain.repairing.repairs import Calls, Failed, first_that_runs
from attn_fuse.explain.running.argument_names import (
    CONTEXTS,
    LEFT_OUT,
    MARKS,
    POSITIONS,
    SOUNDS,
    TIMES,
    TOKENS,
    values_by_name,
)
from attn_fuse.explain.running.declared import LONGEST, SHORT, USUAL, Sizes
from attn_fuse.explain.running.set_up import set_up
from attn_fuse.explain.running.use_values import Around, values_for
from attn_fuse.explain.steps import TimeUp, trying
from attn_fuse.graph.names import tensors_of

# Sides of pictures, in the order in which they are tried.
SIDES = (64, 224, 32, 256, 128)
# How many combinations of guesses are run, how many of one first argument, and for how many seconds.
MOST_TRIES, MOST_PICKS, TRY_SECONDS = 240, 24, 60.0
# Seconds of one run, and how many bytes it may take.
RUN_SECONDS, RUN_BYTES = 30.0, 6 << 30
# How many runs on one first argument may fail alike.
MOST_ALIKE = 16
# How many values of an argument its use gives.
MOST_BY_USE = 4


@dataclass(frozen=True)
class Ran:
    """Inputs that the model ran on, and what each of its embeddings was given."""

    inputs: Inputs
    embedded: list[tuple[nn.Embedding, Tensor]]


class Trial:
    """Runs the model on guesses of its arguments, until one runs.

    failed: the last that raised.
    """

    def __init__(self, model: nn.Module, targets: bool, sizes: Sizes) -> None:
        self.model = model
        self.sizes = sizes
        self.parameters = list(inspect.signature(model.forward).parameters.values())
        named = [p for p in self.parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.targets = next((p.name for p in named[1:] if targets and p.name in ("targets", "labels")), None)
        # The first is passed even where it has a default; of the others, what has none.
        self.required = [p for i, p in enumerate(named) if (i == 0 or p.default is p.empty) and p.name != self.targets]
        weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        self.named = named
        self.device, self.dtype = weight.device, weight.dtype
        self.uses: Mapping[str, Use] = {}
        with contextlib.suppress(Exception):  # code that is written in an unforeseen way
            self.uses = uses_of(model)
        modules = list(model.modules())
        self.embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
        self.linears = [module for module in modules if isinstance(module, nn.Linear)]
        convolutions = [module for module in modules if isinstance(module, nn.modules.conv._ConvNd)]
        # One of three channels takes pictures, though a projection of what it gives may be made before.
        self.convolutions = sorted(convolutions, key=lambda layer: layer.in_channels != 3)
        self.failures: list[str] = []
        # Of each error the inputs that came furthest; and those tried since.
        self.raised: dict[str, Failed[Inputs]] = {}
        self.repairs: set[str] = set()
        self.left = TRY_SECONDS / 2
        self.failed: Failed[Inputs] | None = None
        self.slow: Inputs | None = None
        self.counts = True
        # Widths that errors asked for, the last first; and lengths, the first first, as the likeliest guess came first.
        self.wanted: list[int] = []
        self.told: list[int] = []
        self.tries, self.end = 0, time.monotonic() + TRY_SECONDS

    def of_any(self) -> Ran | None:
        """A run on inputs of any kind; where the code says of what kind the first is, that comes first."""
        use = self.uses.get(self.required[0].name) if self.required else None
        is_map = use is not None and (use.rank == 5 or (use.rank == 4 and not self.convolutions))
        is_clear = use is not None and (use.keys or use.items or use.is_vectors or is_map)
        if is_clear and (ran := self.of_uses()) is not None:
            return ran
        # What was tried so far leaves room for the rest.
        self.tries = min(self.tries, MOST_TRIES // 2)
        return self.of_tokens() or self.of_pictures() or self.of_floats() or self.of_uses() or self.of_all()

    def of_uses(self) -> Ran | None:
        """A run on a first argument as the code of forward uses it."""
        if not self.required:
            return None
        short = first_of(self(value) for value in different(self.used(self.required[0].name, None, SHORT)))
        if short is not None and any(t.dim() > 3 for t in tensors_of(short.inputs.args[:1])):
            return short  # a map has no length
        if short is not None or not self.fixed:
            usual = self.sizes.asked or min(self.sizes.length or USUAL, LONGEST)
            longer = first_of(self(value) for value in self.used(self.required[0].name, None, usual)) if short else None
            return longer or short
        name = self.required[0].name
        # Lengths that an error of the short run told are among them.
        values = (value for length in self.fixed for value in self.used(name, None, length))
        return first_of(self(value) for value in different(values))

    def of_repairs(self) -> Ran | None:
        """A run on inputs that failed before, with other sizes, as the errors ask for."""
        start = time.monotonic()
        end = start + self.left
        found: Ran | None = first_that_runs([*self.raised.values()], self._repaired, self.others, end)
        self.left -= time.monotonic() - start
        return found

    def _repaired(self, inputs: Inputs) -> Ran | Failed[Inputs] | None:
        sizes = {size for t in tensors_of([*inputs.args, inputs.kwargs]) for size in t.shape}
        if str(inputs) in self.repairs or (self.sizes.asked and self.sizes.asked not in sizes):
            return None
        self.repairs.add(str(inputs))
        self.failed, slow = None, self.slow
        ran = self.on(inputs)
        self.slow = slow  # inputs of another size that run for long may yet raise
        return ran or self.failed

    def others(self, failed: Failed[Inputs]) -> Iterator[Inputs]:
        """Inputs with what the error of some asks for."""
        yield from repaired(failed.tried, failed.asked, [p.name for p in self.named])
        values_of = functools.partial(self._values_of, failed.tried, failed.asked)
        yield from with_named(failed.tried, failed.asked, self.parameters, values_of)
        yield from without_optional(failed.tried, self.named)

    def _values_of(self, inputs: Inputs, asked: Asked, parameter: inspect.Parameter) -> Iterator[Any]:
        # Values for an argument that an error names: by its use and its name, and like the others.
        if asked.number:
            yield from (1, 2)
            return
        others = tensors_of([*inputs.args, inputs.kwargs])
        like = others[0] if others else torch.empty(0)
        by_name = values_by_name(parameter, like, self)
        yield from itertools.islice(itertools.chain(self._by_use(parameter, like), by_name), MOST_BY_USE)
        yield from (torch.randn(t.shape, device=t.device) for t in others if t.dim() != like.dim())

    def with_optional(self) -> bool:
        """Pass arguments, too, whose default is None and that the code uses; whether there are any."""
        more = [
            p
            for p in self.named
            if p not in self.required
            and p.default is None
            and p.name != self.targets
            and not LEFT_OUT.search(p.name)
            and (p.name in self.uses or CONTEXTS.search(p.name) or "mask" in p.name)
        ]
        self.required = [p for p in self.named if p in self.required or p in more]
        self.tries, self.end = 0, time.monotonic() + TRY_SECONDS / 2
        return bool(more)

    def with_set_up(self) -> bool:
        """Call what sets up the model's caches, and what its forward lacks; whether there is such a method."""
        lacks = {name for failed in self.raised.values() for name in failed.asked.lacks}
        if not set_up(self.model, lacks, self.sizes, self.dtype, self.device):
            return False
        self.tries, self.end = 0, time.monotonic() + TRY_SECONDS / 2
        self.required = [p for p in self.named if p in self.required or POSITIONS.search(p.name)]
        # What failed for want of it may run now.
        self.raised.clear()
        self.repairs.clear()
        return True

    def used(self, name: str, like: Tensor | None, length: int) -> Iterator[Any]:
        """Values for the argument `name` from its use, beside `like`; none where its use says nothing."""
        use = self.uses.get(name) or (Use() if "adj" in name else None)
        if use is None:
            return
        norms = [norm.normalized_shape[-1] for norm in self.model.modules() if isinstance(norm, nn.LayerNorm)]
        done: set[int] = set()
        # A failed try may add to what is wanted.
        while left := [
            width
            for width in (*self.wanted[:2], *self.sizes.widths, *norms[:1], *self.narrow(1), USUAL)
            if width not in done
        ]:
            width = left[0]
            done.add(width)
            around = Around(
                self.sizes.batch,
                length,
                self.sizes.picture or 64,
                next((convolution.in_channels for convolution in self.convolutions), 3),
                width,
                self.vocabulary,
                self.dtype,
                self.device,
                like,
            )
            if use.layer is not None and width in self.wanted:
                yield from values_for(Use(rank=use.rank or 3), name, around)
            yield from values_for(use, name, around)
            if use.layer is not None:
                return

    def of_tokens(self) -> Ran | None:
        """A run on tokens, of the length that the embeddings of positions have room for."""
        if not self.embeddings:
            return None
        declared = self.sizes.length
        # Descending tokens: a model makes no such positions or token types of its own, so we know its token embeddings.
        lengths = dict.fromkeys((min(SHORT, declared or SHORT), min(declared or USUAL, self.sizes.asked or LONGEST)))
        batch = self.sizes.batch
        probe = first_of(self(self.tokens(size)) for size in lengths)
        probe = probe or first_of(self(self.tokens(size)) for size in self.fixed if size > 1)
        # A decoder with a cache may take one token at a time.
        probe = probe or self(self.tokens(1))
        if probe is None:
            # Tokens may come without a batch.
            return first_of(self(self.tokens(size)[0]) for size in [*lengths][::-1]) if batch == 1 else None
        tokens = probe.inputs.args[0] if probe.inputs.args else torch.empty(0)
        takers = [module for module, given in probe.embedded if torch.equal(given.flatten(), tokens.flatten())]
        if not takers:
            return None
        length = declared or min((m.num_embeddings for m, _ in probe.embedded if m not in takers), default=USUAL)
        vocab = min(module.num_embeddings for module in takers)
        length = self.sizes.asked or min(length, LONGEST)
        return self(torch.randint(vocab, (batch, length))) or probe

    def of_pictures(self) -> Ran | None:
        """A run on pictures, for a model whose first convolution is of two dimensions; on volumes whose sides are
        declared, for one of three."""
        convolution = next((module for module in self.convolutions), None)
        if isinstance(convolution, nn.Conv3d) and self.sizes.volume:
            return self(self._floats(convolution.in_channels, *self.sizes.volume))
        if not isinstance(convolution, nn.Conv2d):
            return None
        sides = dict.fromkeys(filter(None, (self.sizes.picture, *SIDES)))
        return first_of(self(self._floats(convolution.in_channels, side, side)) for side in sides)

    def of_floats(self) -> Ran | None:
        """A run on vectors as wide as the first linear layer's input."""
        if not self.linears:
            return None
        width = self.linears[0].in_features
        short = self(self._floats(SHORT, width))
        return self(self._floats(self.sizes.asked or min(self.sizes.length or USUAL, LONGEST), width)) or short

    def of_all(self) -> Ran | None:
        """A run on any of the kinds of input that the layers of the model allow, each parameter by itself."""
        for first in self._firsts():
            if (ran := self(first)) is not None:
                return ran
        return None

    def __call__(self, first: Any) -> Ran | None:
        """A run on `first` with guesses of the other arguments, started again where an error tells a width."""
        known = -1
        while known < len(self.wanted):
            known = len(self.wanted)
            if (ran := self._with_first(first, known)) is not None:
                return ran
        return None

    def on(self, inputs: Inputs) -> Ran | None:
        """A run on `inputs`."""
        calls = Calls()
        counted = calls if self.counts else contextlib.nullcontext()
        try:
            with trying(RUN_SECONDS, RUN_BYTES), counted, _embedded(self.embeddings) as embedded:
                self.model(*inputs.args, **inputs.kwargs)
            return Ran(inputs, embedded)
        except ExplainError:
            raise
        except TimeUp:
            self.failures.append(f"{inputs}: more than {RUN_SECONDS:g} s")
            # What runs that long without an error most likely runs to the end: the only one to take where none does.
            self.slow = self.slow or inputs
        except Exception as error:
            words, asked = in_one_line(error), asked_by(error)
            if self.counts and _is_of_an_override(error):
                self.counts = False
                return self.on(inputs)
            self.failures.append(f"{inputs}: {words}")
            self.failed = Failed(inputs, asked, calls.count)
            self.wanted[:0] = [width for width in asked.widths[::-1] if width not in self.wanted]
            self.told += [length for length in asked.lengths if length not in self.told]
            if words not in self.raised or self.raised[words].reached < calls.count:
                self.raised[words] = self.failed
        return None

    def _with_first(self, first: Any, known: int) -> Ran | None:
        alike: Counter[str] = Counter()
        for inputs in self._guesses(first.to(self.device) if isinstance(first, Tensor) else first):
            if len(self.wanted) > known:
                return None
            if self.tries >= MOST_TRIES or time.monotonic() > self.end:
                return None
            self.tries += 1
            if (ran := self.on(inputs)) is not None:
                return ran
            problem = self.failures[-1].removeprefix(f"{inputs}: ")
            alike[problem] += 1
            # The other arguments make no difference.
            if alike[problem] >= MOST_ALIKE:
                return None
        return None

    @property
    def fixed(self) -> tuple[int, ...]:
        """Lengths that errors asked for, then those that are declared."""
        return tuple(dict.fromkeys((*self.told, *self.sizes.lengths)))

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn((self.sizes.batch, *shape), dtype=self.dtype)

    @property
    def vocabulary(self) -> int:
        """The fewest rows that an embedding has; 0 without one."""
        return min((embedding.num_embeddings for embedding in self.embeddings), default=0)

    def tokens(self, length: int) -> Tensor:
        return torch.arange(length).flip(0).repeat(self.sizes.batch, 1) % (self.vocabulary or 2)

    def _firsts(self) -> Iterator[Tensor]:
        # First arguments of every kind, the likeliest for its name first.
        name = self.required[0].name.lower() if self.required else ""
        length = self.sizes.asked or min(self.sizes.length or USUAL, LONGEST)
        kinds: list[Iterator[Tensor]] = [self._sounds(), self._volumes(), self._vectors(length)]
        if self.embeddings:
            kinds.insert(0 if TOKENS.search(name) else 2, iter([self.tokens(length)]))
        if SOUNDS.search(name) or any(isinstance(c, nn.Conv1d) for c in self.convolutions[:1]):
            kinds.insert(0, self._sounds())
        yield from itertools.chain.from_iterable(kinds)
        # For a model of own layers only: its errors tell the rest.
        if any(True for _ in self.model.parameters()):
            yield self._floats(SHORT, USUAL)

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
        widths = dict.fromkeys(
            [*norms[:1], *self.wanted, *self.sizes.widths, *(linear.in_features for linear in self.linears[:6])]
        )
        for width in widths:
            yield self._floats(length, width)
        for width in widths:
            yield self._floats(width)
            yield self._floats(width, length)

    def _guesses(self, first: Any) -> Iterator[Inputs]:
        if not self.parameters:
            yield Inputs()
            return
        others = self.required[1:]
        like = next(iter(tensors_of(first)), torch.empty(0))
        options = [list(itertools.chain(self._by_use(p, like), values_by_name(p, like, self))) for p in others]
        # The likeliest of all parameters together come before any unlikely one.
        picks = itertools.product(*(range(len(values)) for values in options))
        ordered = sorted(itertools.islice(picks, 20000), key=sum)[:MOST_PICKS]
        for pick in ordered:
            values = {p.name: options[i][pick[i]] for i, p in enumerate(others)}
            if self.required and self.required[0].kind is inspect.Parameter.KEYWORD_ONLY:
                yield Inputs((), {self.required[0].name: first, **values})
                continue
            args = (first, *(values.pop(p.name) for p in others if p.kind is not p.KEYWORD_ONLY))
            if self.targets is not None and not like.is_floating_point():
                yield Inputs(args, {**values, self.targets: like.roll(-1)})
            yield Inputs(args, values)

    def _by_use(self, parameter: inspect.Parameter, first: Tensor) -> Iterator[Any]:
        # The likeliest values of a further parameter by its use; names say more of times, marks and classes.
        name = parameter.name.lower()
        use = self.uses.get(parameter.name) or (Use() if "adj" in name else None)
        is_named = TIMES.search(name) or MARKS.search(name)
        if use is None or (use.layer is None and not use.items and not use.keys and is_named):
            return
        values = self.used(parameter.name, first, first.shape[1] if first.dim() > 1 else SHORT)
        if parameter.default is None or ("mask" in name and not use.is_truth):
            yield None
        yield from itertools.islice(values, MOST_BY_USE)
        if parameter.default is None and use.rank is None and first.is_floating_point():
            width = (*self.sizes.widths, *self.narrow(1), *first.shape[-1:])
            norms = [norm.normalized_shape[-1] for norm in self.model.modules() if isinstance(norm, nn.LayerNorm)]
            yield torch.randn(SHORT, (*norms, *width)[0], dtype=self.dtype, device=self.device)

    def narrow(self, most: int) -> list[int]:
        return list(dict.fromkeys([*self.wanted, *(linear.in_features for linear in self.linears)]))[:most]

    def contexts(self, batch: int) -> Iterator[Tensor]:
        for width in self.narrow(6):
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


def _is_of_an_override(error: BaseException) -> bool:
    # Whether a copy of torch's functions raised it, which takes what counts their calls for a subclass of tensors.
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    file = Path(frame.f_code.co_filename)
    return "handle_torch_function" in frame.f_code.co_names and not file.is_relative_to(Path(torch.__file__).parent)


def first_of(runs: Iterator[Ran | None]) -> Ran | None:
    """The first run that came to its end."""
    return next((ran for ran in runs if ran is not None), None)
