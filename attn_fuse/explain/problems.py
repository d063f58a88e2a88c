"""Errors of a model's own code, in one line."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch


def in_one_line(error: BaseException) -> str:
    """The type of `error`, the first line of its message, and the user's file and line that raised it."""
    lines = str(error).strip().splitlines()
    library = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    if isinstance(error, SyntaxError):
        where = f"{Path(error.filename or '').name}:{error.lineno}"
        return f"{type(error).__name__}: {error.msg}" + ("" if where.startswith("<") else f" ({where})")
    message = lines[0] if lines else frames[-1].line if frames else ""
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text
