"""Limits of time and memory for steps that run a user's code."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from attn_fuse.errors import ExplainError

# Seconds after which a step says that it still runs, and its default limit.
QUIET, LIMIT = 10.0, 40.0
# Seconds for cleaning up when the time is up.
CLEANING_UP = 10.0
# When the current limits end, by now(), the outermost first.
_ends: list[float] = []


class TimeUp(BaseException):
    """The end of a limit. Not an Exception, which training loops catch."""


def now() -> float:
    """A clock in seconds that counts computing in full and waiting as a quarter.

    A busy machine hardly changes what a limit lets through, and sleeping code still ends.
    """
    computed = time.thread_time()
    return computed + (time.monotonic() - computed) / 4


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the block after `seconds` by now(), and again each second where its code catches it.

    Code that handles TimeUp has CLEANING_UP seconds before the next one. An inner limit ends no later than an outer
    one. Only the main thread has limits, on systems with alarms.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    ended, fired = False, math.inf
    outer = _ends[-1] if _ends else math.inf
    end = min(now() + seconds, outer)

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal fired
        # The alarm may be early, since now() is slower than its clock.
        if (left := end - now()) > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))
            return
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        fired = min(fired, at := time.monotonic())
        # While the first one propagates, another would interrupt the code that cleans up.
        is_on_its_way = isinstance(sys.exc_info()[1], TimeUp) and at - fired < CLEANING_UP
        if not ended and not is_on_its_way:
            raise TimeUp

    before = signal.getsignal(signal.SIGALRM)
    try:
        _ends.append(end)
        try:
            # The outer time may be up before the block begins.
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, max(end - now(), 0.001))
            yield
        finally:
            ended = True
    finally:
        _ends.pop()
        signal.setitimer(signal.ITIMER_REAL, 0.0 if outer == math.inf else max(outer - now(), 0.001))
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def within_memory(more: int) -> Iterator[None]:
    """Let the process take `more` bytes within the block; beyond them torch raises a RuntimeError. Only on Linux."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = pages * resource.getpagesize() + more
        # A lower limit of the user's stays.
        resource.setrlimit(resource.RLIMIT_AS, (most if before == resource.RLIM_INFINITY else min(most, before), hard))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


@contextlib.contextmanager
def trying(seconds: float, more: int) -> Iterator[None]:
    """A block for a run that may fail, with `seconds` and `more` bytes, without gradients or warnings."""
    with contextlib.ExitStack() as changed:
        with _alarms_later():
            changed.enter_context(warnings.catch_warnings(action="ignore"))
            changed.enter_context(within_memory(more))
            changed.enter_context(torch.no_grad())
            # A model may compile parts of itself, which would take too long for a guess.
            changed.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            with limited(seconds):
                yield
        finally:
            with _alarms_later():
                changed.close()


@contextlib.contextmanager
def _alarms_later() -> Iterator[None]:
    # Alarms wait for the end of the block: changes of torch's state must not stop halfway.
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def step(what: str, seconds: float, advice: str) -> Iterator[None]:
    """A step named `what`, such as "building GPT". Raises ExplainError, which ends in `advice`, after `seconds`."""
    words = threading.Timer(QUIET, lambda: print(f"attn_fuse.explain: still {what} ...", file=sys.stderr, flush=True))
    words.daemon = True
    words.start()
    try:
        with limited(seconds):
            yield
    except TimeUp:
        more = f"{advice}, or give more with --time-limit"
        raise ExplainError(f"{what} takes more than {seconds:.3g} s; {more}") from None
    finally:
        words.cancel()
