"""Workers: calls in other processes, one at a time in each; a process that a call broke is replaced.

A call that hangs is ended at its deadline. A process that dies, or whose device no longer works, ends with that call
and runs no other: the error of an earlier kernel may surface in any later call.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import importlib
import math
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

# Max seconds for a process to start, in which it imports torch and attn_fuse.
STARTING = 120.0
# Max seconds for an idle process to end by itself.
_ENDING = 3.0
_LONGEST = 400


@dataclass(frozen=True)
class Answer:
    """The outcome of a call: its value, or a problem in words.

    lost: whether the process was ended, since it died, hung, broke its device or could not be talked to.
    doing: the last `note` of the call. seconds: the time that the call took.
    """

    value: Any = None
    problem: str = ""
    lost: bool = False
    doing: str = ""
    seconds: float = 0.0


class Worker:
    """A process that runs calls. It starts with the first call, and again with the first after one that broke it.

    environment: variables added to those of this process. imports: modules that it imports while it starts; the time to
        import a function's own module counts for the first call.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, imports: Sequence[str] = ()) -> None:
        self._environment, self._imports = dict(environment or {}), tuple(imports)
        self._process: Any = None
        self._pipe: Connection | None = None
        self._starting = threading.Lock()
        self._idle = False

    def call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Answer:
        """The answer of `function(*arguments)`, all picklable, ended after `seconds`; starting does not count."""
        started = time.perf_counter()
        try:
            pipe = self._running()
        except (EOFError, OSError):
            return self._lost(f"its process could not start{self._ending()}", started)
        if pipe is None:
            return self._lost(f"its process did not start within {STARTING:.0f} s", started)
        started, doing = time.perf_counter(), ""
        self._idle = False
        try:
            pipe.send((function, arguments))
            while pipe.poll(max(0.0, started + seconds - time.perf_counter())):
                kind, *said = pipe.recv()
                if kind == "note":
                    (doing,) = said
                    continue
                value, problem, works = said
                if not works:
                    return self._lost(problem, started, doing)
                self._idle = True
                return Answer(value, problem, False, doing, time.perf_counter() - started)
            return self._lost(f"stopped after {seconds:.3g} s", started, doing)
        except (EOFError, OSError):
            return self._lost(f"its process died{self._ending()}", started, doing)
        except (pickle.PickleError, AttributeError, ImportError, TypeError) as error:
            return self._lost(_in_words(error), started, doing)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        atexit.unregister(self.close)
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            if self._idle:
                process.join(_ENDING)
            _end(process)
        self._idle = False

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

    def _running(self) -> Connection | None:
        """The pipe to a process that is ready; None where it is not ready in time."""
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._environment, self._imports), daemon=False)
            with self._starting:
                process.start()
                self._process = process
            atexit.register(self.close)  # before multiprocessing waits for it
            theirs.close()
            if not self._pipe.poll(STARTING):
                return None
            self._pipe.recv()
        return self._pipe

    def _lost(self, problem: str, started: float, doing: str = "") -> Answer:
        self.close()
        return Answer(None, problem, True, doing, time.perf_counter() - started)

    def _ending(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is None:
            return ""
        return f" of signal {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"


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


class Pool:
    """Several workers that run calls at the same time."""

    def __init__(self, workers: int, environment: Mapping[str, str] | None = None, imports: Sequence[str] = ()) -> None:
        self._workers = [Worker(environment, imports) for _ in range(workers)]

    def answers(
        self, calls: Iterable[tuple[Any, ...]], seconds: float, end: float = math.inf, begin: float = math.inf
    ) -> Generator[tuple[int, Answer]]:
        """The answers of `calls`, each (function, *arguments), with the numbers of the calls, as they come.

        seconds: of each call, at most. begin: when calls stop to start. end: when all are ended; by
            `time.perf_counter`.
        """
        waiting = collections.deque(enumerate(calls))
        come: queue.SimpleQueue[tuple[int, Answer] | BaseException | None] = queue.SimpleQueue()

        def work(worker: Worker) -> None:
            try:
                while time.perf_counter() < min(begin, end):
                    number, call = waiting.popleft()
                    come.put((number, worker.call(min(seconds, end - time.perf_counter()), *call)))
                come.put(None)
            except IndexError:
                come.put(None)
            except BaseException as error:
                come.put(error)

        busy = self._workers[: len(waiting)]
        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in busy]
        for thread in threads:
            thread.start()
        working = len(threads)
        try:
            while working:
                answer = come.get()
                if isinstance(answer, BaseException):
                    raise answer
                if answer is None:
                    working -= 1
                else:
                    yield answer
        finally:
            waiting.clear()
            # One kill may not do: a worker may be about to start its process.
            for worker, thread in zip(busy, threads, strict=True):
                while thread.is_alive():
                    if working:
                        worker.kill()
                    thread.join(0.1)
                if working:
                    worker.close()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- the process

_to_caller: Connection | None = None


def note(doing: str) -> None:
    """Tell the caller what this call is doing now, in case it never ends; outside of a worker do nothing."""
    if _to_caller is not None:
        _to_caller.send(("note", doing))


def _serve(pipe: Connection, environment: Mapping[str, str], imports: Sequence[str]) -> None:
    global _to_caller
    os.environ.update(environment)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # so that its own children end with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in imports:
        importlib.import_module(name)
    _to_caller = pipe
    pipe.send(None)
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, OSError):
            # An end like any other gives semaphores back, which our caller's Python would call leaked.
            late = threading.Timer(_ENDING, os._exit, (0,))
            late.daemon = True
            late.start()
            return
        except BaseException as error:
            _answer(pipe, (None, _in_words(error), True))
            continue
        value, problem = None, ""
        try:
            value = function(*arguments)
        except BaseException as error:
            problem = _in_words(error)
        broken = _broken()
        if problem and not broken:
            gc.collect()  # what the exception's frames held
            broken = _broken("empty_cache")
        _answer(pipe, (value if not broken else None, broken or problem, not broken))
        if broken:
            os._exit(1)


def _answer(pipe: Connection, answer: tuple[Any, str, bool]) -> None:
    try:
        pipe.send(("answer", *answer))
    except OSError:
        os._exit(0)
    except Exception as error:  # what cannot be pickled
        pipe.send(("answer", None, _in_words(error), answer[2]))


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


def _end(process: Any) -> None:
    for end in (lambda: os.killpg(process.pid, signal.SIGKILL), process.kill):
        with contextlib.suppress(OSError):
            end()
    process.join(10)
