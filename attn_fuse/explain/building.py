"""An instance of a class: from its defaults, as its repository builds it, or from small values that its errors change.

A candidate is a dict from slots to values. A slot is an argument of the constructor, or an entry of a config that it
takes, as in "config.n_head".
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from attn_fuse.errors import ExplainError
from attn_fuse.explain.arguments import GUESSES, Making, arguments_of, hints_of, parameters_of
from attn_fuse.explain.asked import Asked, asked_by, near
from attn_fuse.explain.names import says, value_for
from attn_fuse.explain.opening.sources import same_folder_after
from attn_fuse.explain.opening.stand_ins import about_stand_ins, held_by_models, refuse
from attn_fuse.explain.search import Calls, Failed, searched
from attn_fuse.explain.spelled import constructions, only_computing
from attn_fuse.explain.steps import now, within_memory
from attn_fuse.explain.weights import random_weights

# Parameters above which a model is not built unasked: 4 GB of float32.
MOST_PARAMETERS = 1_000_000_000
# How many changes of arguments are tried.
_MOST_CHANGES = 120
Say = Callable[[str], object]


class TooLarge(ExplainError):
    """A model of more parameters than the limit."""


@dataclass(frozen=True)
class Built:
    """A model, the values of its slots, and what was made up for it.

    again: builds the model with other values in some of its slots, and may raise whatever its class does.
    """

    model: nn.Module
    slots: Mapping[str, Any]
    notes: tuple[str, ...]
    again: Callable[[Mapping[str, Any]], Built]


def all_built(cls: type[nn.Module], module: types.ModuleType, most: int, end: float) -> Iterator[Built]:
    """The models of at most `most` parameters that the ways to build `cls` give: its defaults, with which nothing is
    made up; what texts of the repository call it with; small values. Where none of these works, other values are tried
    as the errors ask.

    end: by now().
    Raises ExplainError where no way works.
    """
    refuse(cls)
    build = _Builds(cls, module, most)
    failures: list[Failed[_Values]] = []
    works = False
    needs = [p for p in parameters_of(cls) if p.default is p.empty]
    starts: list[tuple[dict[str, Any], tuple[str, ...]]] = [] if needs else [({}, ())]
    for spelled in constructions(cls, module):
        values = _bound(cls, spelled.args, spelled.kwargs)
        if values is not None:
            starts.append((values, (f"as in {spelled.source}: {spelled.text}",)))
        if now() > end:
            break
    starts += [({}, ())] if needs else []
    for values, notes in starts:
        found = build(_Values(values, notes))
        if isinstance(found, Failed):
            failures.append(found)
        else:
            works = True
            yield found
        if now() > end:
            break
    if not works:
        ran, failed = searched([one.tried for one in failures], build, build.changed, end, _MOST_CHANGES)
        if ran is not None:
            yield ran
            return
        failures = failures or failed
        error = build.first
        if isinstance(error, ExplainError):
            raise error
        problem = failures[0].asked.words if failures else "nothing is known of its arguments"
        if build.unknown:
            problem = f"its constructor needs {', '.join(build.unknown)}"
        raise ExplainError(f"cannot build {cls.__name__}: {problem}; pass --entry '{_example(cls)}'") from error


class _Values(dict[str, Any]):
    # A candidate: values of slots, and notes on where they come from.
    def __init__(
        self, values: Mapping[str, Any], notes: tuple[str, ...] = (), changed: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(values)
        self.notes, self.changed = notes, dict(changed or {})

    def with_value(self, slot: str, value: Any) -> _Values:
        return _Values({**self, slot: value}, self.notes, {**self.changed, slot: value})


class _Builds:
    # Builds a class from values. first: what the first failure raised; unknown: the
    # arguments that it guessed. tried: how each candidate that failed was made.

    def __init__(self, cls: type[nn.Module], module: types.ModuleType, most: int) -> None:
        self.cls, self.module, self.most = cls, module, most
        self.first: BaseException | None = None
        self.unknown: tuple[str, ...] = ()
        self.tried: dict[int, Making] = {}

    def __call__(self, values: _Values) -> Built | Failed[_Values]:
        making = Making(self.module, values)
        calls = Calls()
        try:
            return self._built(values, making, calls)
        except (Exception, SystemExit) as error:
            return self._failed(values, error, making, calls)

    def _failed(self, values: _Values, error: BaseException, making: Making, calls: Calls) -> Failed[_Values]:
        if self.first is None:
            self.first, self.unknown = about_stand_ins(error) or error, tuple(making.guessed)
        self.tried[id(values)] = making
        return Failed(values, asked_by(error), calls.count)

    def again(self, values: _Values, changed: Mapping[str, Any]) -> Built:
        made = values
        for slot, value in changed.items():
            made = made.with_value(slot, value)
        return self._built(made, Making(self.module, made), Calls())

    def _built(self, values: _Values, making: Making, calls: Calls) -> Built:
        said: list[str] = []
        # The weights twice, and as much again for what the constructor makes beside them: masks of a guessed size.
        with (
            within_memory(16 * self.most),
            random_weights(said.append),
            only_computing(),
            same_folder_after(),
            held_by_models(),
            calls,
        ):
            self._refuse_large(making)
            arguments = arguments_of(self.cls, making)
            model = self.cls(*arguments.args, **arguments.kwargs)
        if not isinstance(model, nn.Module):
            raise ExplainError(
                f"cannot build {self.cls.__name__}: its constructor gives a value of type {type(model).__name__}"
            )
        notes = [*values.notes, *(f"as in {source}" for source in making.sources)]
        if values.changed:
            notes.append(f"as its errors ask: {in_words(values.changed)}")
        for words, found in (
            ("small values by name", making.made_up),
            ("guesses, for names that say nothing", making.guessed),
        ):
            if kept := {slot: v for slot, v in found.items() if slot not in values.changed}:
                notes.append(f"{words}: {in_words(kept)}")
        slots = {
            **making.slots,
            **{
                p.name: p.default
                for p in parameters_of(self.cls)
                if p.default is not p.empty and p.name not in making.slots
            },
        }
        return Built(model, slots, (*notes, *said), lambda changed: self.again(values, changed))

    def _refuse_large(self, making: Making) -> None:
        # Raises TooLarge, before the memory is taken, where the model can be built on the meta device, and what its
        # constructor raises there. The arguments are made for it alone: a constructor may write into its config.
        count = 0

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            nonlocal count
            count += 0 if parameter is None or is_lazy(parameter) else parameter.numel()
            # Some may be of modules that are thrown away.
            if count > 4 * self.most:
                raise TooLarge("")

        hook = register_module_parameter_registration_hook(registered)
        try:
            with torch.device("meta"):
                arguments = arguments_of(self.cls, making)
                model: Any = self.cls(*arguments.args, **arguments.kwargs)
                count = sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0
        except TooLarge:
            pass
        except (AttributeError, KeyError, NameError, AssertionError):
            raise  # no number of a tensor was asked for, and the weights are not drawn in vain
        except (Exception, SystemExit):
            # A constructor that reads the numbers of its tensors, as of a schedule, cannot be run there.
            return
        finally:
            hook.remove()
        if count > self.most:
            name = self.cls.__name__
            raise TooLarge(
                f"{name} has {count:.3g} parameters, more than {self.most:.3g}; build a smaller one with "
                f"--entry '{name}(...)', or allow it with --parameters {10 ** len(str(count))}"
            )

    def changed(self, failed: Failed[_Values]) -> Iterator[_Values]:
        """The values with another of one slot, as the error asks."""
        values, asked = failed.tried, failed.asked
        making = self.tried.pop(id(values))
        slots = dict(making.slots)
        defaults = {p.name: p.default for p in parameters_of(self.cls) if p.default is not p.empty}
        slots = {**{name: value for name, value in defaults.items() if name not in slots}, **slots}
        ordered = near([*slots], asked)
        if failed.asked.kind.startswith(TooLarge.__name__):
            layers = [slot for slot in ordered if says(slot.rpartition(".")[2], "2") and type(slots[slot]) is int]
            for count in (2, 1):
                made = values
                for slot in layers:
                    made = made.with_value(slot, count)
                yield made
            return
        for name in sorted(asked.names - slots.keys()):
            # An argument or an entry that the code missed.
            for config in making.configs:
                value = value_for(name, None, slots)
                yield values.with_value(f"{config}.{name}" if config else name, 2 if value is None else value)
        for slot in ordered:
            if slot.rpartition(".")[2] in asked.names:
                yield from (values.with_value(slot, other) for other in _others(slot, slots[slot], asked, slots))
        for slot in ordered:
            if slot.rpartition(".")[2] not in asked.names and type(slots[slot]) is int:
                yield from (values.with_value(slot, other) for other in asked.others_for(slots[slot]))
        for slot, guess in making.guessed.items():
            yield from (values.with_value(slot, other) for other in GUESSES if other is not guess)


def _others(slot: str, value: Any, asked: Asked, slots: Mapping[str, Any]) -> Iterator[Any]:
    # Other values for a slot that the failing code names.
    for current, options in asked.choices:
        if current is value or current == value:
            yield from (option for option in options if option != value)
    if type(value) is int:
        yield from asked.others_for(value)
    if value is None:
        by_name = value_for(slot.rpartition(".")[2], None, slots)
        yield from (by_name,) if by_name is not None else ()
    if isinstance(value, bool):
        yield not value
    if type(value) in (int, float):
        yield from ((value,) * 2, [value] * 4, [value])
    if isinstance(value, (tuple, list)) and value:
        yield value[0]
        yield [*value, value[-1]]
    if value is None or value_for(slot.rpartition(".")[2]) is None:
        yield from (other for other in GUESSES if type(other) is not type(value))


def in_words(values: Mapping[str, object]) -> str:
    """The values by name, with commas between, as one writes arguments."""
    said = {name: value.__name__ if isinstance(value, type) else repr(value) for name, value in values.items()}
    return ", ".join(f"{name}={value if len(value) < 60 else '...'}" for name, value in said.items())


def _bound(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    # The arguments of a call by the constructor's names; None where it does not take them.
    try:
        bound = inspect.signature(cls).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    values = dict(bound.arguments)
    for p in inspect.signature(cls).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            values |= values.pop(p.name, {})
        elif p.kind is p.VAR_POSITIONAL and p.name in values:
            return None
    return values


def _example(cls: type[nn.Module]) -> str:
    # A call of `cls` to start from; "..." for what is not known.
    values = {p.name: value_for(p.name, hints_of(cls).get(p.name)) for p in parameters_of(cls) if p.default is p.empty}
    return f"{cls.__name__}({', '.join(f'{n}=...' if v is None else f'{n}={v!r}' for n, v in values.items())})"
