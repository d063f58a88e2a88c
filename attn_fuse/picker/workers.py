"""Workers: calls in other processes, one at a time in each; a process that a call broke is replaced.

A call that hangs is ended at its deadline. A process that dies, or whose device stops working, runs no further call,
because the error of one kernel may surface in any later call. `multiprocessing` and `concurrent.futures` would import
the caller's main module into each process, and a script without a guard around its main part would train again. So a
process here is a Python of its own that imports the modules of the functions it calls, and nothing else of the caller's
program. It reads pickled calls from its standard input, and writes pickled answers to its standard output.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

# Max seconds for a process to start and import the function of a call, with torch and attn_fuse.
STARTING = 120.0
# Max seconds for a process to end by itself, and for a killed one to be gone.
_ENDING = 3.0
_LONGEST = 400
_SERVE = "from attn_fuse.picker.workers import serve; serve()"


@dataclass(frozen=True)
class Answer:
    """The outcome of a call: its value, or a problem in words.

    lost: whether the process ended with the call: it did not start, died, hung or broke its device.
    doing: the last `note` of the call.
    """

    value: Any = None
    problem: str = ""
    lost: bool = False
    doing: str = ""


class Worker:
    """A process that runs calls. It starts with the first call, and again with the first call after it was lost.

    environment: variables added to those of this process.
    quiet: whether its output is hidden; the problem of a call that it dies of then ends with the last line.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, quiet: bool = False) -> None:
        self._environment, self._quiet = dict(environment or {}), quiet
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None

    def call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Answer:
        """The answer of `function(*arguments)`, all picklable, ended after `seconds`.

        function: of a module that can be imported, unlike the caller's program; the import does not count.
        """
        request, doing = pickle.dumps((function, arguments)), ""
        late, died = f"its process did not start within {STARTING:.0f} s", "its process could not start"
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was killed after its last call
        try:
            process = self._process = self._process or self._started()
            assert process.stdin is not None and process.stdout is not None
            with self._killed_after(STARTING):
                pickle.dump(request, process.stdin)
                process.stdin.flush()
                said = pickle.load(process.stdout)
            late, died = f"stopped after {seconds:.3g} s", "its process died"
            with self._killed_after(seconds):
                while isinstance(said, str):
                    doing = said
                    said = pickle.load(process.stdout)
            value, problem, works = said
        except TimeoutError:
            problem, works = late, False
        except (EOFError, OSError, pickle.UnpicklingError):
            problem, works = f"{died}{self._ending()}", False
        if works:
            return Answer(value, problem, doing=doing)
        self.kill()
        self.close()
        return Answer(None, problem, lost=True, doing=doing)

    def kill(self) -> None:
        """End the process and what it started at once, also from another thread than that of `call`."""
        if (process := self._process) is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                if hasattr(os, "killpg"):
                    os.killpg(process.pid, signal.SIGKILL)
                else:  # on Windows
                    process.kill()
                process.wait(_ENDING)

    def close(self) -> None:
        """End the process: by itself if it is idle, since a killed one leaves its semaphores behind."""
        if (process := self._process) is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING)
            self.kill()
            process.stdout.close()
            self._process = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        self._printed = tempfile.TemporaryFile() if self._quiet else None  # noqa: SIM115  # until the next start
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env=os.environ | {"PYTHONPATH": path} | self._environment,
            start_new_session=True,  # a group to end as a whole, which Ctrl-C does not reach
        )

    @contextlib.contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        """A block in which the process is killed after `seconds`, with a TimeoutError at its end."""
        end, timer = time.perf_counter() + seconds, threading.Timer(seconds, self.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            if time.perf_counter() >= end:
                raise TimeoutError

    def _ending(self) -> str:
        """How the process ended, in words, with the last line that it printed if it is quiet."""
        if self._process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING)
        code, last = self._process.returncode or 0, ""
        if self._printed is not None:
            self._printed.seek(0)
            last = "".join(f": {line}" for line in self._printed.read().decode(errors="replace").splitlines()[-1:])
        return (f" of signal {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}") + last[:_LONGEST]


def spared(
    worker: Worker, seconds: float, end: float, function: Callable[..., Any], names: Sequence[str], *arguments: Any
) -> tuple[Answer, dict[str, str]]:
    """The answer of function(names, *arguments), and the problems of names that broke the process.

    The call is repeated without such a name while there are others.
    function: notes which of `names` it is at. seconds: of each call, at most. end: of all, by `time.perf_counter`.
    """
    left, broke = list(names), dict[str, str]()
    while True:
        answer = worker.call(min(seconds, end - time.perf_counter()), function, left, *arguments)
        if not answer.lost or answer.doing not in left or time.perf_counter() >= end:
            return answer, broke
        broke[answer.doing] = answer.problem
        left.remove(answer.doing)
        if not left:
            return answer, broke


# ---- the process

_to_caller: IO[bytes] | None = None


def note(doing: str) -> None:
    """Tell the caller what this call is doing now, in case it never ends; outside of a worker do nothing."""
    if _to_caller is not None:
        _send(doing)


def serve() -> None:
    """Run the calls that come by standard input, until the caller closes it. Prints go to standard error."""
    global _to_caller
    calls, _to_caller = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            request, value, problem = pickle.load(calls), None, ""
            try:
                function, arguments = pickle.loads(request)
                note("")  # the call begins
                value = function(*arguments)
            except BaseException as error:
                problem = _in_words(error)
            if broken := _device_error():
                _send((None, broken, False))
                os._exit(1)
            try:
                _send((value, problem, True))
            except Exception as error:  # the value cannot be pickled
                _send((None, _in_words(error), True))


def _send(said: Any) -> None:
    assert _to_caller is not None
    _to_caller.write(pickle.dumps(said))
    _to_caller.flush()


def _in_words(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:_LONGEST]


def _device_error() -> str:
    """What is wrong with the device, "" where it works; what the call held there is free afterwards."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()  # the error of an earlier kernel surfaces here
        gc.collect()
        torch.cuda.empty_cache()
    except Exception as error:
        return _in_words(error)
    return ""
