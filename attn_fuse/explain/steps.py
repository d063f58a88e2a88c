"""Steps that run a user's code: each says after a while that it still runs, and stops at a time limit."""

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

# Seconds: after how many a step says that it still runs, and how many it may take unless the user says otherwise.
QUIET, LIMIT = 10.0, 40.0
# Seconds that code may take to clean up when its time is up.
CLEANING_UP = 10.0
# When the limits around what runs now end, by now(), the outermost first.
_ends: list[float] = []


class TimeUp(BaseException):
    """The time limit of a step. No Exception: the `except Exception` of a training loop must not catch it."""


def now() -> float:
    """Seconds that this thread has computed, and a quarter of those in which it waited, since some moment.

    What a limit lets through does so then on a busy machine, too, and what sleeps still ends.
    """
    computed = time.thread_time()
    return computed + (time.monotonic() - computed) / 4


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the block after `seconds` by now(), and once more each second where its own code catches it.

    Code that handles TimeUp has CLEANING_UP seconds before the next one.
    A limit within another ends no later than that one. Outside the main thread, and on a system without alarms, there
    is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    ended, fired = False, math.inf
    outer = _ends[-1] if _ends else math.inf
    end = min(now() + seconds, outer)

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal fired
        # now() is never faster than the alarm's clock.
        if (left := end - now()) > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))
            return
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        fired = min(fired, at := time.monotonic())
        # While the first one is on its way up, another would break what cleans up behind it.
        is_on_its_way = isinstance(sys.exc_info()[1], TimeUp) and at - fired < CLEANING_UP
        if not ended and not is_on_its_way:
            raise TimeUp

    before = signal.getsignal(signal.SIGALRM)
    try:
        _ends.append(end)
        try:
            # Of a block within another the time may be up before it begins.
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
    """Within the block the process may take `more` bytes beyond what it has; then torch raises a RuntimeError.

    Where the system does not say how much there is, as outside of Linux, there is no limit.
    """
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = pages * resource.getpagesize() + more
        # A limit that the user has set stays.
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
    """A run of a model that may fail, without gradients or warnings, of at most `seconds` and `more` bytes."""
    with contextlib.ExitStack() as changed:
        with _alarms_later():
            changed.enter_context(warnings.catch_warnings(action="ignore"))
            changed.enter_context(within_memory(more))
            changed.enter_context(torch.no_grad())
            # A model that compiles parts of itself is not compiled for a guess.
            changed.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            with limited(seconds):
                yield
        finally:
            with _alarms_later():
                changed.close()


@contextlib.contextmanager
def _alarms_later() -> Iterator[None]:
    # The time that is up within the block is so at its end: what changes torch's state must not stop halfway.
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
    """A step named `what`, as in "building GPT". Raises ExplainError, which ends in `advice`, after `seconds`."""
    words = threading.Timer(QUIET, lambda: print(f"attn_fuse.explain: still {what} ...", file=sys.stderr, flush=True))
    words.daemon = True
    words.start()
    try:
        with limited(seconds):
            yield
    except TimeUp:
        raise ExplainError(f"{what} takes more than {seconds:g} s; {advice}, or give more with --time-limit") from None
    finally:
        words.cancel()
