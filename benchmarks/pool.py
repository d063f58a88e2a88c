"""Pool: several workers that run calls at the same time."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from typing import Any

from attn_fuse.picker.workers import Answer, Worker


class Pool:
    """Several workers that run calls at the same time."""

    def __init__(self, workers: int, environment: Mapping[str, str] | None = None) -> None:
        self._workers = [Worker(environment) for _ in range(workers)]

    def answers(
        self, calls: Iterable[tuple[Any, ...]], seconds: float, end: float = math.inf, begin: float = math.inf
    ) -> Generator[tuple[int, Answer]]:
        """The answers of `calls`, each (function, *arguments), with the numbers of the calls, in the order they finish.

        seconds: of each call, max. begin: when no further call starts. end: when all calls are ended; both by
            `time.perf_counter`.
        """
        idle: queue.LifoQueue[Worker] = queue.LifoQueue()  # the last one used, which has a process, comes first
        for worker in self._workers:
            idle.put(worker)

        def answered(number: int, call: tuple[Any, ...]) -> tuple[int, Answer] | None:
            worker = idle.get()
            try:
                now = time.perf_counter()
                return (number, worker.call(min(seconds, end - now), *call)) if now < min(begin, end) else None
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            futures = [threads.submit(answered, *numbered) for numbered in enumerate(calls)]
            try:
                for future in as_completed(futures):
                    if (answer := future.result()) is not None:
                        yield answer
            finally:
                for future in futures:
                    future.cancel()
                # One kill may not do: a worker may be about to start its process.
                while wait(futures, 0.1).not_done:
                    for worker in self._workers:
                        if worker not in idle.queue:
                            worker.kill()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
