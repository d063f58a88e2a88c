"""Errors that users meet. A message names the problem, the value, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from attn_fuse.torch_internals import PassesThroughDynamo


class AttnFuseError(PassesThroughDynamo, RuntimeError):
    """Base of the errors that attn_fuse raises on purpose; Dynamo passes them on unwrapped."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)
        self.message = message

    def __str__(self) -> str:
        # Dynamo appends advice on its own debugging to `args`.
        return self.message


class OptionError(AttnFuseError, ValueError):
    """An unknown option, or an impossible value of an option."""


class NotFusedError(AttnFuseError):
    """Raised under ``options={"strict": True}`` if an attention stays as written."""


class ExplainError(Exception):
    """An error of `python -m attn_fuse.explain`, which prints it in one line and exits with code 2."""


class BenchError(Exception):
    """An error of `python -m attn_fuse.bench`, which prints it in one line and exits with code 2."""


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint for the end of a message: a known name close to `name`, else all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."


def first_line(problem: object) -> str:
    """The first line of an error's message; torch's messages run to pages."""
    return str(problem).strip().partition("\n")[0]


def named(problem: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(problem).__name__}: {first_line(problem)}"
