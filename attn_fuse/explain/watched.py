"""A command in a child process, so that a model that ends it, as by a segmentation fault, ends in one line, too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

# Signals that end a process whose code goes wrong, and that by which the system ends one that takes too much memory.
FATAL = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGKILL")
# What Linux calls the signal that a child gets when its parent ends.
_ON_PARENTS_END = 1


def watch(command: str) -> None:
    """Go on in a child process. The parent waits, and ends as the child does.

    Where a signal of FATAL ended the child, the parent ends in one line and exit code 2.

    command: begins that line. Where the system cannot fork, as Windows, nothing is watched.
    """
    if not hasattr(os, "fork"):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_ON_PARENTS_END, signal.SIGKILL)
        return
    # The terminal sends an interrupt to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    name = signal.Signals(os.WTERMSIG(status)).name
    if name not in FATAL:
        os._exit(128 + os.WTERMSIG(status))
    why = "the system ended it, most likely for its memory" if name == "SIGKILL" else "a run of the model ended it"
    print(f"{command}: {name}: {why}; pass inputs that the model takes with --inputs", file=sys.stderr, flush=True)
    os._exit(2)
