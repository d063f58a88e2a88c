"""Workers: threads that each go through their own portion of an attention, from its beginning to its end.

A parallel operation ends with its slowest thread, and beside other processes one thread mostly waits for a core. So
thousands of small parallel operations, one after the other, take many times as long as their work; a single join at the
end costs what the busy cores take away, and no more.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Portion = TypeVar("Portion")
Result = TypeVar("Result")

# More threads than this would wait for the interpreter's lock, since Python chooses the operations; on a machine of
# more cores, each worker gets several for the operations themselves.
MOST_WORKERS = 16


def workers_and_threads() -> tuple[int, int]:
    """How many workers torch's threads make here, and how many threads each has for its operations."""
    threads = torch.get_num_threads()
    workers = 1 if _alone.get() else min(threads, MOST_WORKERS)
    return workers, threads // workers


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While the block runs, this thread works alone, for a profiler or a mode that sees no other."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


_alone = contextvars.ContextVar("alone", default=False)


def together(work: Callable[[Portion], Result], portions: Sequence[Portion]) -> list[Result]:
    """The results of `work` on each portion, in order: by a worker each, or by the caller where there is but one.

    No more portions than `workers_and_threads` has workers. `work` runs without gradients and autocast, in inference
    mode where the caller is, and raises here what it raises there.
    """
    if len(portions) <= 1:
        return list(map(work, portions))
    inference = torch.is_inference_mode_enabled()

    def run(portion: Portion) -> Result:
        with torch.inference_mode(inference), torch.no_grad():
            return work(portion)

    return [future.result() for future in _submitted(run, portions)]


# The workers of this process, by its number (a fork has none of its parent's threads) and what they were made for.
_pool: tuple[tuple[int, int, int], ThreadPoolExecutor] | None = None
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def _submitted(run: Callable[[Portion], Result], portions: Sequence[Portion]) -> list[Future[Result]]:
    global _pool
    kind = (os.getpid(), *workers_and_threads())
    with _lock:
        if _pool is None or _pool[0] != kind:
            if _pool is not None and _pool[0][0] == kind[0]:
                # What it has begun it ends.
                _pool[1].shutdown(wait=False)
            _pool = kind, _started(*kind[1:])
        return [_pool[1].submit(run, portion) for portion in portions]


def _started(workers: int, threads: int) -> ThreadPoolExecutor:
    before, ready = torch.get_num_threads(), threading.Barrier(workers)

    def begin() -> None:
        # A thread that asks for the first time takes the number that was set last, in place of its own.
        torch.get_num_threads()
        torch.set_num_threads(threads)

    pool = ThreadPoolExecutor(workers, "attn_fuse", initializer=begin)
    # torch takes the number for the thread that sets it, and for those that begin later: the latter shall have ours.
    for begun in [pool.submit(ready.wait) for _ in range(workers)]:
        begun.result()
    torch.set_num_threads(before)
    return pool
