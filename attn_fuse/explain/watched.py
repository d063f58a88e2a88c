"""A command in a child process: a model that crashes it also ends in one line."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

# Signals of crashes, and SIGKILL, by which the system ends a process that takes too much memory.
FATAL = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGKILL")
# PR_SET_PDEATHSIG: the signal to a child when its parent ends.
_ON_PARENTS_END = 1


def watch(command: str) -> None:
    """Continue in a child process, while the parent waits and takes over its exit code.

    After a signal in FATAL, the parent prints one line, which begins with `command`, and exits with 2. Does nothing on
    systems without fork, such as Windows.
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
