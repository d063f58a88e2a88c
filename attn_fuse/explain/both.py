"""A search for arguments of a model and for inputs together, where nothing runs on the model as it was built.

Sizes of two arguments may contradict each other only when the model runs, as those of an encoder and a decoder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from attn_fuse.explain.build import Built
from attn_fuse.explain.guess_inputs import Trial
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.other_arguments import Arguments, other_arguments
from attn_fuse.explain.repairs import Failed, first_that_runs

# Seconds of a search, and of how many inputs it starts.
SECONDS, STARTS = 30.0, 3


@dataclass(frozen=True)
class _Both:
    arguments: Arguments
    inputs: Inputs


def both_for(
    made: Built, failed: Sequence[Failed[Inputs]], trial_of: Callable[[Built], Trial]
) -> tuple[Built, Inputs] | None:
    """A model of other arguments than `made`, and inputs that it runs on; None where none are found.

    failed: inputs that failed on `made`. trial_of: what runs a model on inputs.
    """
    again = made.again
    if again is None:
        return None
    models: dict[str, tuple[Built, Trial]] = {str(made.arguments): (made, trial_of(made))}
    seen: set[str] = set()

    def attempt(both: _Both) -> tuple[Built, Inputs] | Failed[_Both] | None:
        key = str(both.arguments)
        if f"{key} {both.inputs}" in seen:
            return None
        seen.add(f"{key} {both.inputs}")
        if key not in models:
            # Whatever a constructor raises on arguments that nobody wrote.
            with contextlib.suppress(Exception):
                built = again(both.arguments)
                models[key] = built, trial_of(built)
        if key not in models:
            return None
        built, trial = models[key]
        trial.failed = None
        if trial.on(both.inputs) is not None:
            return built, both.inputs
        return None if trial.failed is None else Failed(both, trial.failed.asked, trial.failed.asked.lines)

    def others(one: Failed[_Both]) -> Iterator[_Both]:
        built, trial = models[str(one.tried.arguments)]
        inputs = one.tried.inputs
        for arguments in other_arguments(one.tried.arguments, one.asked, built.holders):
            yield _Both(arguments, inputs)
        yield from (_Both(one.tried.arguments, other) for other in trial.others(Failed(inputs, one.asked, 0)))

    furthest = sorted(failed, key=lambda one: one.asked.lines, reverse=True)[:STARTS]
    starts = [Failed(_Both(made.arguments, one.tried), one.asked, one.asked.lines) for one in furthest]
    return first_that_runs(starts, attempt, others, time.monotonic() + SECONDS)
