"""Progress on stderr: tqdm's bar where tqdm is installed (the extra `bench`), else a line for each step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Seconds between two updates of the bar, on a terminal and in a file.
_OFTEN, _SELDOM = 0.2, 20.0


class Progress:
    """The progress of about `steps` equal steps. As a context it clears the bar at its end."""

    def __init__(self, steps: int) -> None:
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        pause = _OFTEN if sys.stderr.isatty() else _SELDOM
        shape = "{percentage:3.0f}% |{bar:24}| {remaining} left  {desc}"
        self._bar = tqdm(total=steps, file=sys.stderr, leave=False, mininterval=pause, bar_format=shape)

    def step(self, doing: str) -> None:
        """Show what begins now, such as "compiling Inductor"."""
        if self._bar is None:
            print(doing, file=sys.stderr, flush=True)
        else:
            self._bar.set_description_str(doing, refresh=sys.stderr.isatty())

    def advance(self, steps: float = 1.0) -> None:
        """Count `steps` as done."""
        if self._bar is not None:
            self._bar.update(min(steps, self._bar.total - self._bar.n))

    def within(self, steps: float) -> Callable[[float], None]:
        """A function to call with the share of the next `steps` that is done, again and again until it is 1."""
        done = 0.0

        def report(share: float) -> None:
            nonlocal done
            self.advance(share * steps - done)
            done = share * steps

        return report

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
