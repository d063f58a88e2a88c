"""Find the model of a file and inputs for it: the outermost class that attends, else the largest part that runs."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain import name_of
from attn_fuse.explain.building import built
from attn_fuse.explain.choose import candidates, parts
from attn_fuse.explain.feeding import Wish, fed
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.opening.stand_ins import MissingPackage
from attn_fuse.explain.problems import without_frames
from attn_fuse.explain.steps import now, step

# The most outermost classes to try, and the most classes inside a model.
_MOST_CANDIDATES, _MOST_PARTS = 3, 8
# The seconds for a part, and the least for any step.
_PART_SECONDS, _FEWEST = 15.0, 5.0
# The beginning of the note on a part.
OF_A_PART = "of a part only,"


@dataclass(frozen=True)
class Found:
    """A model, inputs it runs on, notes on what was made up, and whether it called a softmax or a whole attention."""

    model: Callable[..., Any]
    inputs: Inputs
    notes: tuple[str, ...] = ()
    attends: bool = True


@dataclass(frozen=True)
class Finding:
    """Finds what to run of a file.

    given: the user's inputs. most: the most parameters of a model. limit: seconds for whole models; parts get half as
    many more.
    """

    module: types.ModuleType
    wish: Wish
    given: Inputs | None
    most: int
    limit: float

    def of_file(self) -> Found:
        """A model of the file, the likeliest first, or of a part of one. Raises ExplainError if nothing runs."""
        return self.of_classes(candidates(self.module)[:_MOST_CANDIDATES], may_be_part=self.given is None)

    def of_classes(self, classes: list[type[nn.Module]], may_be_part: bool = False) -> Found:
        """A model of one of the classes, or of a part of the file's models. Raises ExplainError if none runs."""
        failures: list[ExplainError] = []
        found = self._first(classes, failures) or (self._part(failures) if may_be_part else None)
        if found is None:
            raise next((one for one in failures if isinstance(one, MissingPackage)), failures[0])
        return found

    def of_model(self, model: Callable[..., Any], slots: Mapping[str, Any], seconds: float) -> Found:
        """Inputs for a model, within some seconds. slots: the values it was built from.

        Raises ExplainError if it runs on none.
        """
        if self.given is not None:
            return Found(model, self.given)
        if not isinstance(model, nn.Module):
            raise ExplainError(f"no inputs can be guessed for the function {name_of(model)}; pass them with --inputs")
        dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
        ways = max(len(dtypes), 1)
        notes: tuple[str, ...] = ()
        with step(f"finding inputs for {name_of(model)}", seconds, "pass them with --inputs"):
            model.eval()
            try:
                ran = fed(model, slots, self.wish, now() + 0.9 * seconds / ways)
            except ExplainError:
                if ways == 1:
                    raise
                # The model's own script sets a default dtype.
                ran = fed(model.float(), slots, self.wish, now() + 0.9 * seconds / ways)
                notes = ("weights of several dtypes, all made float32",)
        return Found(model, ran.inputs, (*notes, *_without_masks(model, ran.inputs)), ran.attends)

    def _first(self, classes: list[type[nn.Module]], failures: list[ExplainError]) -> Found | None:
        # The first that attends, else the first that runs. The likeliest gets two shares of the time.
        start, idle = now(), None
        for number, cls in enumerate(classes):
            found = self._of(cls, start + self.limit * (2 + number) / (1 + len(classes)), failures)
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
        left = max(end - now(), _FEWEST)
        try:
            with step(f"building {cls.__name__}", left, f"build a smaller one with --entry '{cls.__name__}(...)'"):
                made = built(cls, self.module, self.most, now() + left / 2)
            found = self.of_model(made.model, made.slots, max(end - now(), _FEWEST))
        except ExplainError as error:
            failures.append(without_frames(error))
            return None
        return replace(found, notes=(*made.notes, *found.notes))


def _without_masks(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    # The report describes the masks of the call that was made.
    given = inspect.signature(model.forward).bind_partial(*inputs.args, **inputs.kwargs).arguments
    names = [name for name, value in given.items() if value is None and "mask" in name.lower()]
    return (f"{', '.join(names)}: none, since explain passed none",) if names else ()
