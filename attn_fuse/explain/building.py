"""Build a model of a class: by its defaults, or with small values, changed as its errors ask.

A candidate is a dict from slots to values. A slot is a constructor argument, or an entry of a config argument such as
"config.n_head".
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from attn_fuse.errors import ExplainError
from attn_fuse.explain.arguments import GUESSES, Making, arguments_of, hints_of, parameters_of
from attn_fuse.explain.asked import Asked, asked_by
from attn_fuse.explain.names import says, value_for
from attn_fuse.explain.opening.stand_ins import about_stand_ins, held_by_models, refuse
from attn_fuse.explain.sandbox import only_computing
from attn_fuse.explain.search import Calls, Failed, searched
from attn_fuse.explain.steps import within_memory

# The most parameters of a model that is built unasked: 4 GB of float32.
MOST_PARAMETERS = 1_000_000_000
_MOST_CHANGES = 120


# A candidate: the values that errors asked for, by slot.
_Slots = dict[str, Any]


class TooLarge(ExplainError):
    """A model with more parameters than the limit."""


@dataclass(frozen=True)
class Built:
    """A model, the values of its slots, and notes on what was made up for it."""

    model: nn.Module
    slots: Mapping[str, Any]
    notes: tuple[str, ...]


def built(cls: type[nn.Module], module: types.ModuleType, most: int, end: float) -> Built:
    """A model of `cls`, built from its defaults and small values, or from values changed as the errors ask.

    module: its file. most: the most parameters of a model. end: when to stop, by now().
    Raises ExplainError if nothing can be built.
    """
    refuse(cls)
    builder = _Builder(cls, module, most)
    ran, _ = searched([dict[str, Any]()], builder, builder.changed, end, _MOST_CHANGES)
    if ran is None:
        raise builder.problems[0]
    return ran


class _Builder:
    def __init__(self, cls: type[nn.Module], module: types.ModuleType, most: int) -> None:
        self.cls, self.module, self.most = cls, module, most
        self.problems: list[ExplainError] = []  # the first one alone

    def __call__(self, values: _Slots) -> Built | Failed[_Slots]:
        making, calls = Making(self.module, values), Calls()
        try:
            return self._built(values, making, calls)
        except (Exception, SystemExit) as error:
            asked = asked_by(error)
            if not self.problems:
                self.problems.append(self._problem(error, making, asked))
            return Failed(values, asked, calls.count, making)

    def _problem(self, error: BaseException, making: Making, asked: Asked) -> ExplainError:
        known = about_stand_ins(error) or error
        if isinstance(known, ExplainError):
            return known
        words = f"its constructor needs {', '.join(making.guessed)}" if making.guessed else asked.words
        return ExplainError(f"cannot build {self.cls.__name__}: {words}; pass --entry '{_example(self.cls)}'")

    def _built(self, values: _Slots, making: Making, calls: Calls) -> Built:
        # Memory for the weights twice, and as much again for masks and tables of a guessed size.
        with within_memory(16 * self.most), only_computing(), contextlib.chdir("."), held_by_models(), calls:
            self._refuse_large(making)
            arguments = arguments_of(self.cls, making)
            model = self.cls(*arguments.args, **arguments.kwargs)
        if not isinstance(model, nn.Module):
            raise ExplainError(
                f"cannot build {self.cls.__name__}: its constructor gives a value of type {type(model).__name__}"
            )
        made_up = (
            ("as its errors ask", values),
            ("small values by name", making.made_up),
            ("guesses, for names that say nothing", making.guessed),
        )
        notes = tuple(f"{words}: {in_words(found)}" for words, found in made_up if found)
        return Built(model, self._slots(making), notes)

    def _slots(self, making: Making) -> dict[str, Any]:
        defaults = {p.name: p.default for p in parameters_of(self.cls) if p.default is not p.empty}
        return {**defaults, **making.slots}

    def _refuse_large(self, making: Making) -> None:
        # Raises TooLarge before any memory is taken, if the model can be built on the meta device. The arguments are
        # made anew for it: a constructor may write into its config.
        count = 0

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            nonlocal count
            count += 0 if parameter is None or is_lazy(parameter) else parameter.numel()
            # Some may belong to modules that are thrown away.
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
            raise  # independent of the tensors' numbers, so there is no need to draw the weights first
        except (Exception, SystemExit):
            # A constructor may read its tensors' numbers, for example those of a schedule.
            return
        finally:
            hook.remove()
        if count > self.most:
            name = self.cls.__name__
            raise TooLarge(
                f"{name} has {count:.3g} parameters, more than {self.most:.3g}; build a smaller one with "
                f"--entry '{name}(...)', or allow it with --parameters {10 ** len(str(count))}"
            )

    def changed(self, failed: Failed[_Slots]) -> Iterator[_Slots]:
        """The values with one slot changed as the error asks."""
        values, asked, making = failed.tried, failed.asked, failed.made
        slots = self._slots(making)
        ordered = sorted(slots, key=lambda slot: _last(slot) not in asked.names)
        if asked.kind.startswith(TooLarge.__name__):
            layers = [slot for slot in ordered if says(_last(slot), "2") and type(slots[slot]) is int]
            yield from ({**values, **dict.fromkeys(layers, count)} for count in (2, 1))
            return
        # An argument or a config entry that is missing.
        for name in sorted(asked.names - slots.keys()):
            for config in making.configs:
                value = value_for(name, None, slots)
                yield {**values, f"{config}.{name}" if config else name: 2 if value is None else value}
        named = [slot for slot in ordered if _last(slot) in asked.names]
        for slot in named:
            yield from ({**values, slot: other} for other in _others(slot, slots[slot], asked, slots))
        for slot in ordered:
            if slot not in named and type(slots[slot]) is int:
                yield from ({**values, slot: other} for other in asked.others_for(slots[slot]))
        for slot, guess in making.guessed.items():
            yield from ({**values, slot: other} for other in GUESSES if other is not guess)


def _last(slot: str) -> str:
    return slot.rpartition(".")[2]


def _others(slot: str, value: Any, asked: Asked, slots: Mapping[str, Any]) -> Iterator[Any]:
    # Other values for a slot that the failing code names.
    by_name = value_for(_last(slot), None, slots)
    for current, options in asked.choices:
        if current is value or current == value:
            yield from (option for option in options if option != value)
    if type(value) is int:
        yield from asked.others_for(value)
    if value is None and by_name is not None:
        yield by_name
    if isinstance(value, bool):
        yield not value
    if type(value) in (int, float):
        yield from ((value,) * 2, [value] * 4, [value])
    if isinstance(value, (tuple, list)) and value:
        yield value[0]
        yield [*value, value[-1]]
    if value is None or by_name is None:
        yield from (other for other in GUESSES if type(other) is not type(value))


def in_words(values: Mapping[str, object]) -> str:
    """The values by name, as arguments are written."""
    said = {name: value.__name__ if isinstance(value, type) else repr(value) for name, value in values.items()}
    return ", ".join(f"{name}={value if len(value) < 60 else '...'}" for name, value in said.items())


def _example(cls: type[nn.Module]) -> str:
    # A call to start from, with "..." for the unknown.
    values = {p.name: value_for(p.name, hints_of(cls).get(p.name)) for p in parameters_of(cls) if p.default is p.empty}
    return f"{cls.__name__}({', '.join(f'{n}=...' if v is None else f'{n}={v!r}' for n, v in values.items())})"
