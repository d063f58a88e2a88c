"""Pool: several workers that run calls at the same time."""

from __future__ import annotations

import collections
import math
import queue
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from attn_fuse.picker.workers import Answer, Worker


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
