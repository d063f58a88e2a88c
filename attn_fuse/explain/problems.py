"""Errors of a model's own code, in one line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TypeVar

import torch

from attn_fuse.errors import first_line
from attn_fuse.explain.opening.roots import PACKAGE

E = TypeVar("E", bound=BaseException)


def in_one_line(error: BaseException) -> str:
    """The type of `error`, the first line of its message, and the user's file and line that raised it."""
    library = (str(Path(torch.__file__).parent), str(PACKAGE), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    if isinstance(error, SyntaxError):
        where = f"{Path(error.filename or '').name}:{error.lineno}"
        return f"{type(error).__name__}: {error.msg}" + ("" if where.startswith("<") else f" ({where})")
    message = first_line(error) or (frames[-1].line if frames else "")
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def without_frames(error: E) -> E:
    """The error without tracebacks, its causes' included: their frames hold models, which take memory."""
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            waiting += [one.__cause__, one.__context__]
    return error
