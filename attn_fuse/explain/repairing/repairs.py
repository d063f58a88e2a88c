"""A search from what failed to what works: what an error asks for is changed, step by step."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.overrides import TorchFunctionMode

from attn_fuse.explain.inputs import that_can_be_made
from attn_fuse.explain.repairing.asked import Asked

# How many candidates are tried of a start, how many at least of a step on, and in how many steps.
MOST_TRIES, FEWEST_TRIES, STEPS = 160, 16, 10

# Names of torch's functions that an attention calls.
ATTENDS = re.compile(r"softmax|attention|transformer|flex_")

T = TypeVar("T")
Ran = TypeVar("Ran")


@dataclass(frozen=True)
class Failed(Generic[T]):
    """A candidate that raised an error, what the error asks for, and how far the candidate came before.

    reached: greater for what came further, as the number of calls of torch.
    """

    tried: T
    asked: Asked
    reached: Any


class Calls(TorchFunctionMode):
    """Counts the calls of torch's functions within the block: how far a model came before it raised an error.

    attends: whether one of them is a softmax, or an attention as a whole.
    """

    count, attends = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.attends = self.attends or ATTENDS.search(getattr(func, "__name__", "")) is not None
        return func(*args, **(kwargs or {}))


def searched(
    starts: Iterable[Failed[T]], others: Callable[[Failed[T]], Iterator[T]], end: float, most: int = MOST_TRIES
) -> Generator[T, Failed[T] | None, None]:
    """Candidates to try; it is sent how each failed, None for what was tried before.

    starts: what failed; those that came furthest are gone on from first. others: further candidates, as the error of
    one asks for. end: by time.monotonic(), in seconds. most: how many are tried of a start.
    """
    for start in sorted(starts, key=lambda failed: failed.reached, reverse=True):
        # What comes further is a step on, to go on from at once, for half of the tries that are left.
        steps = [(start, that_can_be_made(others(start)), most)]
        tries = 0
        while steps and time.monotonic() < end:
            before, further, last = steps[-1]
            candidate = next(further, None) if tries < last else None
            if candidate is None:
                steps.pop()
                continue
            failed = yield candidate
            if failed is None:
                continue
            tries += 1
            # At the same place another size may not fit.
            known = {step.asked.kind for step, _, _ in steps if step.reached >= failed.reached}
            is_on = failed.reached > before.reached or (
                failed.reached == before.reached and failed.asked.kind not in known
            )
            if is_on and len(steps) < STEPS:
                deeper = min(tries + max((last - tries) // 2, FEWEST_TRIES), most)
                steps.append((failed, that_can_be_made(others(failed)), deeper))


def first_that_runs(
    starts: Iterable[Failed[T]],
    attempt: Callable[[T], Ran | Failed[T] | None],
    others: Callable[[Failed[T]], Iterator[T]],
    end: float,
) -> Ran | None:
    """What `attempt` gives for the first candidate of `searched` that runs; None where none does.

    attempt: gives Failed where the candidate raised, and None for what was tried before.
    """
    search = searched(starts, others, end)
    candidate = next(search, None)
    while candidate is not None:
        found = attempt(candidate)
        if found is not None and not isinstance(found, Failed):
            return found
        try:
            candidate = search.send(found)
        except StopIteration:
            break
    return None
