"""Workers: threads that each compute a portion of an attention from start to end.

A parallel operation ends with its slowest thread, and next to other processes some thread is usually waiting for a
core. Thousands of small parallel operations then take many times as long as their work. One join at the end costs only
the time that busy cores take away.
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

# More workers would wait for the interpreter's lock, which Python needs between operations. On a machine with more
# cores, each worker has several threads for its operations.
MOST_WORKERS = 16


def workers_and_threads() -> tuple[int, int]:
    """The number of workers that share torch's threads here, and the number of threads of each."""
    total = torch.get_num_threads()
    if _alone.get():
        return 1, total
    threads = -(-total // MOST_WORKERS)
    return total // threads, threads


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Work in this thread alone within the block, for a profiler or a mode that sees no other threads."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


_alone = contextvars.ContextVar("alone", default=False)


def together(work: Callable[[Portion], Result], portions: Sequence[Portion]) -> list[Result]:
    """The results of `work` on each portion, in order, computed by a worker each; by the caller if there is only one.

    There are at most as many portions as `workers_and_threads` has workers. `work` runs without gradients and autocast,
    and in the caller's inference mode. What it raises is raised here.
    """
    if len(portions) <= 1:
        return list(map(work, portions))
    inference = torch.is_inference_mode_enabled()

    def run(portion: Portion) -> Result:
        with torch.inference_mode(inference), torch.no_grad():
            return work(portion)

    # A fork lacks its parent's threads, and the library would wait for them.
    forked = os.getpid() != _process
    team = None if forked or workers_and_threads()[1] > 1 else _team_of_torch()
    return _in_a_pool(run, portions) if team is None else _in_the_team(team, run, portions)


# ---- torch's own threads

_process = os.getpid()


@functools.cache
def _team_of_torch() -> Any:
    """The OpenMP library whose threads torch's operations use, if it has GNU's interface; else None.

    Its threads spin for some milliseconds after each parallel region, and would take the cores from other threads.
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
        # The runtime may start fewer threads than portions, so each takes portions until none is left.
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

# The pool, and the process, workers and threads it was made for; a fork has none of its parent's threads.
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
                # It still ends what it has begun.
                _pool[1].shutdown(wait=False)
            _pool = kind, _started(*kind[1:])
        futures = [_pool[1].submit(run, portion) for portion in portions]
    return [future.result() for future in futures]


def _started(workers: int, threads: int) -> ThreadPoolExecutor:
    before, ready = torch.get_num_threads(), threading.Barrier(workers)

    def begin() -> None:
        # A thread's first question resets its number to the one that was set last, so ask before setting.
        torch.get_num_threads()
        torch.set_num_threads(threads)

    pool = ThreadPoolExecutor(workers, "attn_fuse", initializer=begin)
    # Setting the number also sets it for threads that start later. Those shall have the caller's number again.
    for begun in [pool.submit(ready.wait) for _ in range(workers)]:
        begun.result()
    torch.set_num_threads(before)
    return pool
