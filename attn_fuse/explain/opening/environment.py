"""Variables of the environment that a repository's scripts set before its files are imported."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

PLACES = re.compile(r"(DIR|ROOT|PATH|HOME|FOLDER)$", re.I)
# Of one process.
NUMBERS = {"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@contextlib.contextmanager
def environment_for(
    repository: Path, say: Callable[[str], object] = lambda note: None
) -> Iterator[Callable[[BaseException], bool]]:
    """Gives a function that sets the variable whose absence raised an error, and returns whether it could; `say` is
    told of it.

    A variable that is called after a place gets the repository's root, one that counts processes those of one process.
    At the end of the block all are gone.
    """
    added: list[str] = []

    def supplies(error: BaseException) -> bool:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not isinstance(error, KeyError) or not frames or frames[-1].f_globals.get("__name__") != "os":
            return False
        name = str(error.args[0])
        value = NUMBERS.get(name) or (str(repository) if PLACES.search(name) else None)
        if value is None or name in os.environ:
            return False
        os.environ[name] = value
        added.append(name)
        say(f"in the environment: {name}={value if name in NUMBERS else 'the repository'}")
        return True

    try:
        yield supplies
    finally:
        for name in added:
            os.environ.pop(name, None)
