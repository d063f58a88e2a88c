"""Workers: calls in other processes, one at a time in each; a process that a call broke is replaced.

A call that hangs is ended at its deadline. A process that dies, or whose device no longer works, ends with that call
and runs no other: the error of an earlier kernel may surface in any later call. A process imports what the functions
need and never the caller's program, which may train as it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

# Max seconds for a process to start, in which it imports torch and attn_fuse.
STARTING = 120.0
# Max seconds for an idle process to end by itself.
_ENDING = 3.0
_LONGEST = 400
_SERVE = "import sys; from attn_fuse.picker.workers import serve; serve(sys.argv[1:])"


@dataclass(frozen=True)
class Answer:
    """The outcome of a call: its value, or a problem in words.

    lost: whether the process was ended, since it died, hung, broke its device or could not be talked to.
    begun: whether the process came up to run the call. doing: the last `note` of the call. seconds: its time.
    """

    value: Any = None
    problem: str = ""
    lost: bool = False
    doing: str = ""
    seconds: float = 0.0
    begun: bool = True


class Worker:
    """A process that runs calls. It starts with the first call, and again with the first after one that broke it.

    environment: variables added to those of this process. imports: modules that it imports while it starts; the time to
        import a function's own module counts for the first call. quiet: whether what it prints is seen only in the
        problem of a call that it died of, the last line of it.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, imports: Sequence[str] = (), quiet: bool = False
    ) -> None:
        self._environment, self._imports, self._quiet = dict(environment or {}), tuple(imports), quiet
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None
        self._heard: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._idle = False

    def call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Answer:
        """The answer of `function(*arguments)`, all picklable, ended after `seconds`; starting does not count.

        function: of a module that can be imported, which the caller's program is not.
        """
        started, doing, begun = time.perf_counter(), "", self._process is not None
        within, late = STARTING, f"its process did not start within {STARTING:.0f} s"
        try:
            request = pickle.dumps((function, arguments))
            if not begun:
                self._start()
                if self._next(within) is None:
                    return self._lost(f"its process could not start{self._ending()}", started, begun=False)
            started, begun, within, late = time.perf_counter(), True, seconds, f"stopped after {seconds:.3g} s"
            self._idle = False
            assert self._process is not None and self._process.stdin is not None
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            while (said := self._next(started + seconds - time.perf_counter())) is not None:
                kind, *rest = pickle.loads(said)
                if kind == "note":
                    (doing,) = rest
                    continue
                value, problem, works = rest
                if not works:
                    return self._lost(problem, started, doing)
                self._idle = True
                return Answer(value, problem, False, doing, time.perf_counter() - started)
        except queue.Empty:
            return self._lost(late, started, doing, begun)
        except OSError:
            if not begun:
                return self._lost("its process could not start", started, begun=False)
        except (pickle.PickleError, AttributeError, ImportError, TypeError) as error:
            return self._lost(_in_words(error), started, doing, begun)
        return self._lost(f"its process died{self._ending()}", started, doing)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        atexit.unregister(self.close)
        process, self._process, idle, self._idle = self._process, None, self._idle, False
        if process is not None:
            if idle and process.stdin is not None:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    process.stdin.close()
                    process.wait(_ENDING)
            _end(process)

    def kill(self) -> None:
        """End the process, from another thread than that of `call`, which then answers that the process died."""
        with self._starting:
            process = self._process
        if process is not None:
            _end(process)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        """Start the process; the first that it says is that it is ready."""
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._printed = tempfile.TemporaryFile() if self._quiet else None  # noqa: SIM115  # closed with the worker
        heard = self._heard = queue.SimpleQueue()
        with self._starting:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVE, *self._imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                env=os.environ | {"PYTHONPATH": path} | self._environment,
                start_new_session=True,  # so that its own children end with it, and Ctrl-C is this process's
            )
        atexit.register(self.close)
        threading.Thread(target=_hear, args=(process.stdout, heard), daemon=True).start()

    def _next(self, seconds: float) -> bytes | None:
        """What the process says next, None for its end. Raises queue.Empty where that is not within `seconds`."""
        return self._heard.get(timeout=max(0.0, seconds))

    def _lost(self, problem: str, started: float, doing: str = "", begun: bool = True) -> Answer:
        self.close()
        return Answer(None, problem, True, doing, time.perf_counter() - started, begun)

    def _ending(self) -> str:
        """How the process ended, in words, with the last line that it printed if that is kept."""
        if self._process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code, line = self._process.returncode, ""
        if self._printed is not None:
            self._printed.seek(0)
            lines = self._printed.read().decode(errors="replace").strip().splitlines()
            line = f": {lines[-1]}"[:_LONGEST] if lines else ""
        if code is None:
            return line
        return (f" of signal {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}") + line


def spared(
    worker: Worker, seconds: float, end: float, function: Callable[..., Any], names: Sequence[str], *arguments: Any
) -> tuple[Answer, dict[str, str]]:
    """The answer of function(names, *arguments), repeated without the names that broke the process; and their problems.

    function: notes which of `names` it is at. seconds: of each call, at most. end: of all, by `time.perf_counter`.
    """
    left, broke = list(names), {}  # type: list[str], dict[str, str]
    while True:
        answer = worker.call(min(seconds, end - time.perf_counter()), function, left, *arguments)
        if not answer.lost or answer.doing not in left or time.perf_counter() >= end:
            return answer, broke
        broke[answer.doing] = answer.problem
        left.remove(answer.doing)


def _hear(stream: IO[bytes], heard: queue.SimpleQueue[bytes | None]) -> None:
    """Put into `heard` what comes by `stream`, and None at its end."""
    with stream, contextlib.suppress(EOFError, OSError, pickle.PickleError):
        while True:
            heard.put(pickle.load(stream))
    heard.put(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Windows has no groups
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait(10)


# ---- the process

_to_caller: IO[bytes] | None = None


def note(doing: str) -> None:
    """Tell the caller what this call is doing now, in case it never ends; outside of a worker do nothing."""
    if _to_caller is not None:
        _tell("note", doing)


def _tell(*said: Any) -> None:
    assert _to_caller is not None
    # As bytes within bytes: where they cannot be read, what comes after them still can.
    pickle.dump(pickle.dumps(said), _to_caller)
    _to_caller.flush()


def serve(imports: Sequence[str]) -> None:
    """Run the calls that come by standard input, until it ends. What they print goes to standard error."""
    global _to_caller
    from_caller, to_caller = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in imports:
        importlib.import_module(name)
    _to_caller = to_caller
    _tell("ready")
    while True:
        try:
            request = pickle.load(from_caller)
        except (EOFError, OSError, pickle.PickleError):
            # An end like any other gives semaphores back, which Python would call leaked.
            late = threading.Timer(_ENDING, os._exit, (0,))
            late.daemon = True
            late.start()
            return
        value, problem = None, ""
        try:
            function, arguments = pickle.loads(request)
            value = function(*arguments)
        except BaseException as error:
            problem = _in_words(error)
        broken = _broken()
        if problem and not broken:
            gc.collect()  # what the exception's frames held
            broken = _broken("empty_cache")
        _answer(value if not broken else None, broken or problem, not broken)
        if broken:
            os._exit(1)


def _answer(value: Any, problem: str, works: bool) -> None:
    try:
        _tell("answer", value, problem, works)
    except OSError:
        os._exit(0)
    except Exception as error:  # what cannot be pickled
        _tell("answer", None, _in_words(error), works)


def _in_words(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:_LONGEST]


def _broken(then: str = "synchronize") -> str:
    """What is wrong with the device, "" where it works. The error of an earlier kernel surfaces here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        getattr(torch.cuda, then)()
    except Exception as error:
        return _in_words(error)
    return ""
