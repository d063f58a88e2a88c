"""A search for arguments of a model and for inputs together, where nothing runs on the model as it was built.

Sizes of two arguments may contradict each other only when the model runs, as those of an encoder and a decoder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from attn_fuse.explain.building.build import Built, parameters_of
from attn_fuse.explain.building.fewer_layers import fewer_by_default
from attn_fuse.explain.building.other_arguments import Arguments, other_arguments, values_in
from attn_fuse.explain.building.sizes import in_words
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.repairing.repaired import resized
from attn_fuse.explain.repairing.repairs import Failed, first_that_runs
from attn_fuse.explain.running.try_inputs import Trial

# From how many parameters on a model is slow to try, and how many layers it is tried with.
LARGE, LAYERS = 200_000_000, 2
# Seconds of a search, of how many inputs it starts, and how many parameters a model may have that is built so often.
SECONDS, STARTS, MOST_PARAMETERS = 30.0, 3, 200_000_000


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
    if again is None or parameters_of(made.model) > MOST_PARAMETERS:
        return None
    seen: set[str] = set()
    # The last model alone: many would take all memory.
    last: dict[str, tuple[Built, Trial]] = {}

    def model_of(arguments: Arguments) -> tuple[Built, Trial] | None:
        key = str(arguments)
        if key not in last:
            last.clear()
            # Whatever a constructor raises on arguments that nobody wrote.
            with contextlib.suppress(Exception):
                built = again(arguments)
                if parameters_of(built.model) <= MOST_PARAMETERS:
                    last[key] = built, trial_of(built)
        return last.get(key)

    def attempt(both: _Both) -> tuple[Built, Inputs] | Failed[_Both] | None:
        key = f"{both.arguments} {both.inputs}"
        if key in seen or (found := model_of(both.arguments)) is None:
            return None
        seen.add(key)
        built, trial = found
        trial.failed = None
        if trial.on(both.inputs) is not None:
            return built, both.inputs
        return None if trial.failed is None else Failed(both, trial.failed.asked, trial.failed.asked.lines)

    def others(one: Failed[_Both]) -> Iterator[_Both]:
        tried, inputs = one.tried.arguments, one.tried.inputs
        found = model_of(tried)
        held = values_in(found[0].holders) if found is not None else {}
        for arguments in other_arguments(tried, one.asked, found[0].holders) if found is not None else ():
            yield _Both(arguments, inputs)
            # The inputs may be as wide as the model was.
            for name, size in arguments.changed.items():
                before = held.get(name)
                if type(size) is int and type(before) is int and size not in (0, before):
                    yield _Both(arguments, resized(inputs, before, size))
        found = model_of(tried)
        more = found[1].others(Failed(inputs, one.asked, 0)) if found is not None else ()
        yield from (_Both(tried, other) for other in more)

    furthest = sorted(failed, key=lambda one: one.asked.lines, reverse=True)[:STARTS]
    starts = [Failed(_Both(made.arguments, one.tried), one.asked, one.asked.lines) for one in furthest]
    return first_that_runs(starts, attempt, others, time.monotonic() + SECONDS)


def with_fewer_layers(made: Built) -> Built | None:
    """A large model with two layers, on which inputs are tried sooner; None for a small one, and for one whose depth is
    no argument of its own."""
    layers = fewer_by_default(type(made.model), LAYERS)
    if made.again is None or not layers or parameters_of(made.model) < LARGE:
        return None
    # Whatever a constructor raises on arguments that nobody wrote.
    with contextlib.suppress(Exception):
        fewer = made.again(replace(made.arguments, given={**made.arguments.given, **layers}))
        notes = (note for note in fewer.notes if not note.endswith(f": {in_words(fewer.arguments.changed)}"))
        why = f"fewer layers, since it runs for long: {in_words(fewer.arguments.changed)}"
        return replace(fewer, notes=(why, *notes))
    return None
