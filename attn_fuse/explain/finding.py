"""A model of a file and inputs that it runs on: the outermost class that attends, else the largest part that runs."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain import name_of
from attn_fuse.explain.asked import near
from attn_fuse.explain.building import Built, all_built
from attn_fuse.explain.choose import candidates, parts
from attn_fuse.explain.feeding import Fed, Feeder, NoInputs, Wish, fed
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.names import says
from attn_fuse.explain.opening.stand_ins import MissingPackage
from attn_fuse.explain.problems import without_frames
from attn_fuse.explain.search import Failed
from attn_fuse.explain.steps import TimeUp, limited, now, step

# How many outermost classes are tried, how many classes inside a model where none of those runs, and how many ways to
# build one.
_MOST_CANDIDATES, _MOST_PARTS, _MOST_WAYS = 3, 4, 3
# Seconds for a part, and the fewest for a step.
_PART_SECONDS, _FEWEST = 15.0, 5.0
# How the note on a part begins.
OF_A_PART = "of a part only,"


@dataclass(frozen=True)
class Found:
    """A model, inputs that it runs on, what was made up for them, and whether it calls what an attention calls."""

    model: Callable[..., Any]
    inputs: Inputs
    notes: tuple[str, ...] = ()
    attends: bool = True


@dataclass(frozen=True)
class Finding:
    """Finds what to run of a file.

    given: the inputs that the user gave. most: how many parameters a model may have. limit: seconds for the whole; the
    parts of a model have half as many again.
    """

    module: types.ModuleType
    wish: Wish
    given: Inputs | None
    most: int
    limit: float

    def of_file(self) -> Found:
        """What runs of the file's classes, the likeliest model first. Raises ExplainError where nothing does."""
        failures: list[ExplainError] = []
        found = self._first(candidates(self.module)[:_MOST_CANDIDATES], failures)
        if found is None and self.given is None:
            found = self._part(failures)
        if found is not None:
            return found
        raise next((one for one in failures if isinstance(one, MissingPackage)), failures[0])

    def of_class(self, cls: type[nn.Module]) -> Found:
        """What runs of a class. Raises ExplainError where nothing does."""
        failures: list[ExplainError] = []
        found = self._first([cls], failures)
        if found is None:
            raise failures[0]
        return found

    def of_model(
        self,
        model: Callable[..., Any],
        slots: Mapping[str, Any],
        seconds: float,
        failed: Sequence[Failed[Inputs]] | None = None,
    ) -> Found:
        """A model, and inputs for it.

        slots: what it was built from. failed: those inputs are changed; None to do both, make some and change them.
        Raises ExplainError where it runs on none.
        """
        if self.given is not None:
            return Found(model, self.given)
        if not isinstance(model, nn.Module):
            raise ExplainError(f"no inputs can be guessed for the function {name_of(model)}; pass them with --inputs")
        end = now() + 0.9 * seconds
        with step(f"finding inputs for {name_of(model)}", seconds, "pass them with --inputs"):
            model.eval()
            try:
                ran = fed(model, self.module, slots, self.wish, end, failed or ())
            except NoInputs as error:
                # Weights of several dtypes wait for a script that sets a default dtype.
                dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
                if len(dtypes) > 1:
                    ran = fed(model.float(), self.module, slots, self.wish, end)
                    notes = ("weights of several dtypes, all made float32", *_without_masks(model, ran.inputs))
                    return Found(model, ran.inputs, notes, ran.attends)
                if failed is not None:
                    raise
                ran = fed(model, self.module, slots, self.wish, end, error.failed)
            return Found(model, ran.inputs, _without_masks(model, ran.inputs), ran.attends)

    def _first(self, classes: list[type[nn.Module]], failures: list[ExplainError]) -> Found | None:
        # The first that attends, else the first that runs.
        start, idle = now(), None
        for number, cls in enumerate(classes):
            found = self._of(cls, start + self.limit * (1 + number) / (1 + len(classes)), failures)
            if found is not None and found.attends:
                return found
            idle = idle or found
        return idle

    def _part(self, failures: list[ExplainError]) -> Found | None:
        whole, end = failures[0], now() + self.limit / 2
        for cls in parts(self.module)[:_MOST_PARTS]:
            found = self._of(cls, min(end, now() + _PART_SECONDS), failures)
            if found is not None and found.attends:
                return replace(found, notes=(*found.notes, f"{OF_A_PART} {cls.__name__}, since of the whole: {whole}"))
            if now() > end:
                break
        return None

    def _of(self, cls: type[nn.Module], end: float, failures: list[ExplainError]) -> Found | None:
        # What runs of the models that the ways to build a class give. Where none does, with another value of an
        # argument, as a width that the code takes for granted.
        unrun: list[tuple[Built, NoInputs]] = []
        left = max(end - now(), _FEWEST)
        ways = all_built(cls, self.module, self.most, now() + left / 2)
        try:
            for _ in range(_MOST_WAYS):
                with step(f"building {cls.__name__}", left, f"build a smaller one with --entry '{cls.__name__}(...)'"):
                    made = next(ways, None)
                if made is None or now() > end:
                    break
                try:
                    found = self.of_model(made.model, made.slots, max(end - now(), _FEWEST), ())
                    return replace(found, notes=(*made.notes, *found.notes))
                except NoInputs as error:
                    unrun.append((made, error))
                    failures.append(error)
        except ExplainError as error:
            failures.append(without_frames(error))
        for made, problem in unrun:
            with contextlib.suppress(ExplainError):
                seconds = max((end - now()) / len(unrun), _FEWEST)
                found = self.of_model(made.model, made.slots, seconds, problem.failed)
                return replace(found, notes=(*made.notes, *found.notes))
            if (again := self._with_other_arguments(made, problem, now() + left / 8)) is not None:
                return again
        return None

    def _with_other_arguments(self, made: Built, problem: NoInputs, end: float) -> Found | None:
        for failed in problem.failed[:3]:
            slots = [slot for slot in near([*made.slots], failed.asked) if type(made.slots[slot]) is int]
            layers = {slot: 2 for slot in slots if says(slot.rpartition(".")[2], "2") and made.slots[slot] > 2}
            changes = [layers] if layers and failed.asked.kind.startswith(TimeUp.__name__) else []
            for slot in slots:
                changes += [{slot: other} for other in itertools.islice(failed.asked.others_for(made.slots[slot]), 3)]
            for changed in changes:
                if now() > end:
                    return None
                with contextlib.suppress(Exception, SystemExit, TimeUp), limited(max(end - now(), 1.0)):
                    again = made.again(changed)
                    feeder = Feeder(again.model.eval(), again.slots, self.wish)
                    for inputs in (failed.tried, *itertools.islice(feeder.starts(), 2)):
                        if isinstance(ran := feeder.run(inputs), Fed):
                            return Found(again.model, ran.inputs, again.notes, ran.attends)
        return None


def _without_masks(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    # What a report says of a mask is of the model as it was called.
    given = inspect.signature(model.forward).bind_partial(*inputs.args, **inputs.kwargs).arguments
    names = [name for name, value in given.items() if value is None and "mask" in name.lower()]
    return (f"{', '.join(names)}: none, since explain passed none",) if names else ()
