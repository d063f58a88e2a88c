"""A search from inputs that failed to inputs that run: what an error asks for is changed, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode

from attn_fuse.explain.asked import Asked
from attn_fuse.explain.inputs import Inputs

# How many inputs are tried of a start, how many at least of a step on, and in how many steps.
MOST_TRIES, FEWEST_TRIES, STEPS = 160, 16, 10


@dataclass(frozen=True)
class Failed:
    """Inputs on which a model raised an error, what that asks of them, and after how many calls of torch it came."""

    inputs: Inputs
    asked: Asked
    reached: int


class Calls(TorchFunctionMode):
    """Counts the calls of torch's functions within the block: how far a model came before it raised an error."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def first_that_runs(
    starts: Iterable[Failed],
    attempt: Callable[[Inputs], Any | Failed | None],
    others: Callable[[Failed], Iterator[Inputs]],
    end: float,
) -> Any | None:
    """What `attempt` gives for the first inputs that run; None where none do.

    starts: inputs that failed; those that came furthest are gone on from first. attempt: runs the model; gives Failed
    where it raised, and None for what was tried before. others: further inputs, as the error of some asks for.
    end: by time.monotonic(), in seconds.
    """
    for start in sorted(starts, key=lambda failed: -failed.reached):
        # What comes further is a step on, to go on from at once, for half of the tries that are left.
        steps = [(start, others(start), MOST_TRIES)]
        tries = 0
        while steps and time.monotonic() < end:
            before, further, most = steps[-1]
            inputs = next(further, None) if tries < most else None
            if inputs is None:
                steps.pop()
                continue
            found = attempt(inputs)
            if found is None:
                continue
            if not isinstance(found, Failed):
                return found
            tries += 1
            # At the same call another dimension may not fit.
            known = {failed.asked.kind for failed, _, _ in steps if failed.reached >= found.reached}
            is_on = found.reached > before.reached or (
                found.reached == before.reached and found.asked.kind not in known
            )
            if is_on and len(steps) < STEPS:
                deeper = min(tries + max((most - tries) // 2, FEWEST_TRIES), MOST_TRIES)
                steps.append((found, others(found), deeper))
    return None
