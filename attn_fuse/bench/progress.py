"""Progress: one line on stderr that says what is being measured, how much is done and how long the rest may take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

# Seconds between two writes of the line on a terminal, and between two lines where stderr is a file.
_OFTEN, _SELDOM = 0.2, 20.0
_WIDTH = 24


class Progress:
    """The progress of `steps` equal steps, printed to `stream`: on a terminal one line that is written over."""

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self._steps, self._stream = max(1, steps), stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._started = time.perf_counter()
        self._written, self._done, self._doing, self._length = -_SELDOM, 0.0, "", 0

    def step(self, doing: str) -> None:
        """Say that the next thing begins. doing: what it is, as in "compiling Inductor"."""
        self._doing = doing
        self._write(force=self._on_terminal)

    def advance(self, steps: float = 1.0) -> None:
        """Count `steps` as done."""
        self._done = min(float(self._steps), self._done + steps)
        self._write()

    def within(self, steps: float) -> Callable[[float], None]:
        """A function that counts these `steps` in parts: it is called with the share of them that is done by then."""
        begin = self._done
        return lambda share: self.advance(begin + share * steps - self._done)

    def left(self) -> float | None:
        """Seconds that the rest takes at the pace so far; None while nothing is done."""
        if not self._done:
            return None
        return (time.perf_counter() - self._started) / self._done * (self._steps - self._done)

    def close(self) -> None:
        """End the line on a terminal, so that what is printed next stands alone."""
        if self._on_terminal and self._length:
            self._stream.write("\r" + " " * self._length + "\r")
            self._stream.flush()
        self._length = 0

    def _write(self, force: bool = False) -> None:
        now = time.perf_counter()
        if not force and now - self._written < (_OFTEN if self._on_terminal else _SELDOM):
            return
        self._written = now
        share, left = self._done / self._steps, self.left()
        bar = "#" * round(_WIDTH * share)
        rest = "" if left is None else f", {duration(left)} left"
        line = f"[{bar:<{_WIDTH}}] {share:4.0%}{rest}  {self._doing}"
        if self._on_terminal:
            self._stream.write("\r" + line.ljust(self._length))
            self._length = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def duration(seconds: float) -> str:
    """`seconds` as text, in s below two minutes, else in min."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
