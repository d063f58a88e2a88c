"""Best-first search: the candidate that came furthest is changed as its error asks."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.overrides import TorchFunctionMode

from attn_fuse.explain.asked import Asked
from attn_fuse.explain.steps import TimeUp, now

# Changes of one candidate before another that came equally far gets its turn.
_TURN = 24

T = TypeVar("T")
Ran = TypeVar("Ran")


@dataclass(frozen=True)
class Failed(Generic[T]):
    """A candidate that raised an error.

    reached: how many torch functions it called before the error. made: how the candidate was made, for its changes.
    """

    tried: T
    asked: Asked
    reached: int
    made: Any = None


class Calls(TorchFunctionMode):
    """Counts the torch functions called in the block: how far a model came before an error.

    attends: whether one of them was a softmax or a whole attention.
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
    """The first success of `attempt`, or None, and the failed candidates, furthest first.

    starts: candidates to try first, all of them. changes: candidates derived from a failed one.
    end: when to stop, by now(). most: how many candidates to try after the starts.
    Raises TimeUp if a caller's limit ends before anything failed.
    key: equal for candidates of which one is enough.
    """
    failed: list[Failed[T]] = []
    waiting: list[tuple[int, int, int, int, Iterator[T]]] = []
    known: set[str] = set()
    places: set[str] = set()
    numbers = itertools.count()

    def fresh(candidates: Iterable[T]) -> Iterator[T]:
        for candidate in candidates:
            if (name := key(candidate)) not in known:
                known.add(name)
                yield candidate

    def found(candidate: T) -> Ran | None:
        result = attempt(candidate)
        if not isinstance(result, Failed):
            return result
        failed.append(result)
        # The same error at the same place leads to the same changes.
        place = f"{result.asked.kind} {result.asked.numbers} {result.reached}"
        if place not in places:
            places.add(place)
            heapq.heappush(waiting, (-result.reached, 0, next(numbers), 0, fresh(changes(result))))
        return None

    def after_starts() -> Iterator[T]:
        for _ in range(most):
            candidate = None
            while waiting and candidate is None:
                reached, _, number, count, further = heapq.heappop(waiting)
                candidate = next(further, None)
            if candidate is None:
                return
            count += 1
            # Changes that come further overtake these at once.
            heapq.heappush(waiting, (reached, count // _TURN, number, count, further))
            yield candidate

    ran: Ran | None = None
    try:
        for candidate in itertools.chain(fresh(starts), after_starts()):
            ran = found(candidate)
            if ran is not None or now() > end:
                break
    except TimeUp:
        # A caller's limit may end within one operation that began before `end`; what failed until then says more.
        if not failed:
            raise
    return ran, sorted(failed, key=lambda one: -one.reached)
