"""A search from what failed to what works, best first: what came furthest is changed as its error asks."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.overrides import TorchFunctionMode

from attn_fuse.explain.asked import Asked
from attn_fuse.explain.steps import now

# After how many changes of a candidate another that came as far gets its turn.
_TURN = 24

T = TypeVar("T")
Ran = TypeVar("Ran")


@dataclass(frozen=True)
class Failed(Generic[T]):
    """A candidate that raised an error, what that asks for, and how many functions of torch were called before."""

    tried: T
    asked: Asked
    reached: int


class Calls(TorchFunctionMode):
    """Counts the calls of torch's functions within the block: how far a model came before it raised an error.

    attends: whether one of them is a softmax, or an attention as a whole.
    """

    count, attends = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = getattr(func, "__name__", "")
        self.attends = self.attends or any(word in name for word in ("softmax", "attention", "transformer", "flex_"))
        return func(*args, **(kwargs or {}))


def searched(
    starts: Iterable[T],
    attempt: Callable[[T], Ran | Failed[T]],
    changes: Callable[[Failed[T]], Iterator[T]],
    end: float,
    most: int,
    key: Callable[[T], str] = str,
) -> tuple[Ran | None, list[Failed[T]]]:
    """What `attempt` gives for the first candidate that does not fail, None where all do; and those that failed,
    furthest first.

    starts: tried first, all of them. changes: candidates to try after one that failed. end: by now().
    most: how many candidates are tried after the starts. key: alike for candidates of which one is enough.
    """
    failed: list[Failed[T]] = []
    waiting: list[tuple[int, int, int, Iterator[T]]] = []
    seen: set[str] = set()
    counter = itertools.count()

    def tried(candidate: T) -> Ran | None:
        found = attempt(candidate)
        if not isinstance(found, Failed):
            return found
        # At one place one error is enough to go on from, and the same again leads to no more.
        place = f"{found.asked.kind} {found.asked.numbers} {found.reached}"
        failed.append(found)
        if place not in seen:
            seen.add(place)
            heapq.heappush(waiting, (-found.reached, 0, next(counter), changes(found)))
        return None

    def in_order() -> list[Failed[T]]:
        return sorted(failed, key=lambda one: -one.reached)

    known: set[str] = set()
    for start in starts:
        if key(start) in known:
            continue
        known.add(key(start))
        if (ran := tried(start)) is not None:
            return ran, in_order()
        if now() > end:
            return None, in_order()
    tries = 0
    while waiting and tries < most and now() < end:
        reached, turn, number, further = heapq.heappop(waiting)
        for count, candidate in enumerate(further, 1):
            if key(candidate) in known:
                continue
            known.add(key(candidate))
            tries += 1
            if (ran := tried(candidate)) is not None:
                return ran, in_order()
            if now() > end or tries >= most:
                break
            is_overtaken = bool(waiting) and waiting[0][0] < reached
            if is_overtaken or count >= _TURN:
                heapq.heappush(waiting, (reached, turn + (count >= _TURN), number, further))
                break
    return None, in_order()
