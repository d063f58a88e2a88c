"""Workers: threads that each go through their own portion of an attention, from its beginning to its end.

A parallel operation ends with its slowest thread, and beside other processes one thread mostly waits for a core. So
thousands of small parallel operations, one after the other, take many times as long as their work; a single join at the
end costs what the busy cores take away, and no more.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Portion = TypeVar("Portion")
Result = TypeVar("Result")

# More workers than this would wait for the interpreter's lock, since Python chooses the operations; on a machine of
# more cores, each worker gets several threads for the operations themselves.
MOST_WORKERS = 16


def workers_and_threads() -> tuple[int, int]:
    """How many workers torch's threads make here, and how many threads each has for its operations."""
    total = torch.get_num_threads()
    if _alone.get():
        return 1, total
    threads = -(-total // MOST_WORKERS)
    return total // threads, threads


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

    # A fork has none of the threads of its parent, and their library waits for them.
    forked = os.getpid() != _process
    team = None if forked or workers_and_threads()[1] > 1 else _team_of_torch()
    return _in_a_pool(run, portions) if team is None else _in_the_team(team, run, portions)


# ---- torch's own threads

_process = os.getpid()


@functools.cache
def _team_of_torch() -> Any:
    """The library of OpenMP whose threads torch's operations use, where it is GNU's or looks like it; else None.

    Its threads wait for the next parallel region at full speed for some milliseconds. So others beside them would have
    to share the cores with them.
    """
    for name in ("libgomp.so.1", *_loaded("libgomp", "libiomp5", "libomp")):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, mode=getattr(os, "RTLD_NOLOAD", 4))
            if library.GOMP_parallel and _is_torchs(library):
                return library
    return None


def _loaded(*names: str) -> Iterator[str]:
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths = dict.fromkeys(line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line)
        yield from (path for path in paths if os.path.basename(path).startswith(names))


def _is_torchs(library: Any) -> bool:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        return bool(library.omp_get_max_threads() == before + 1)
    finally:
        torch.set_num_threads(before)


def _in_the_team(library: Any, run: Callable[[Portion], Result], portions: Sequence[Portion]) -> list[Result]:
    results: dict[int, Result] = {}
    problems: list[BaseException] = []
    left = iter(range(len(portions)))

    def member(_: Any) -> None:
        # The runtime may give fewer threads than asked for: each takes portions until none is left.
        try:
            for n in left:
                results[n] = run(portions[n])
        except BaseException as problem:
            problems.append(problem)

    library.GOMP_parallel(_MEMBER(member), None, ctypes.c_uint(len(portions)), ctypes.c_uint(0))
    if problems:
        raise problems[0]
    return [results[n] for n in range(len(portions))]


_MEMBER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


# ---- threads of ours

# The workers of this process, by its number (a fork has none of its parent's threads) and what they were made for.
_pool: tuple[tuple[int, int, int], ThreadPoolExecutor] | None = None
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


def _in_a_pool(run: Callable[[Portion], Result], portions: Sequence[Portion]) -> list[Result]:
    global _pool
    kind = (os.getpid(), *workers_and_threads())
    with _lock:
        if _pool is None or _pool[0] != kind:
            if _pool is not None and _pool[0][0] == kind[0]:
                # What it has begun it ends.
                _pool[1].shutdown(wait=False)
            _pool = kind, _started(*kind[1:])
        futures = [_pool[1].submit(run, portion) for portion in portions]
    return [future.result() for future in futures]


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
