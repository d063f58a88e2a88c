"""A call in a forked process: what it returns, or that it died or took too long. It starts with all that is loaded."""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any


class TooLongError(Exception):
    """The call was ended after its time."""


class DiedError(Exception):
    """The process ended without an answer."""


# A process that waits is ended after that many times the seconds that it may compute.
PATIENCE = 10


def forked(call: Callable[[], Any], seconds: int, quiet: bool = True) -> Any:
    """What `call` returns, which must be picklable. Its standard output and errors are thrown away if `quiet`.

    Raises TooLongError after `seconds` of computing, which are the same on a busy machine, and DiedError where the
    process ends by another signal or by an exception.
    """
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        if quiet:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        try:
            answer = pickle.dumps(call())
            with os.fdopen(start, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(start)
    answer = _received(end, PATIENCE * seconds)
    os.close(end)
    if answer is None:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if answer is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        raise TooLongError(f"over {seconds} s")
    if not answer:
        raise DiedError(f"died of signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "died")
    return pickle.loads(answer)


def _received(pipe: int, seconds: float) -> bytes | None:
    """What is written to the pipe until its end, None where that is not reached in time."""
    deadline, data = time.monotonic() + seconds, b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            return data
        data += part
    return None
